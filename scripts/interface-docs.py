#!/usr/bin/python3
"""Writes what is told about the D-Bus interfaces outside config/io.yunion.Mps1.*.xml, where the words are:

    scripts/interface-docs.py [DIRECTORY]

* the reference at the end of DIRECTORY/dbus.md, below the line that names this program;
* DIRECTORY/schemas/*.json of the commands that print the dictionaries of the bus.

DIRECTORY is docs unless it is given. A person runs this after a change of the XML files; a test compares.
"""

import json
import pathlib
import re
import sys
import textwrap
import xml.etree.ElementTree as tree

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARKER = "<!-- From here on: made by scripts/interface-docs.py from config/io.yunion.Mps1.*.xml. -->\n"
EMITS = "org.freedesktop.DBus.Property.EmitsChangedSignal"
SIGNAL = {"true": "PropertiesChanged", "const": "never changes", "false": "none"}
KEY = re.compile(r"  (\w+) ([a-z{}()]+): (.*)")
# A key within a key, with its type and its meaning.
INNER = re.compile(r"(\w+) ([siubx]) \(([^)]*)\)")
TYPES = {"s": "string", "b": "boolean", "i": "integer", "u": "integer", "x": "integer", "t": "integer"}
# Names, paths and addresses are code.
CODE = re.compile(
    r"""
    (?<![\w`/.])(
        /[a-z][\w./]*\w                          # a path
      | (?:io|org)\.[a-z]+\.[A-Z][\w.]*\w        # a name on the bus
      | _[0-9][0-9_]+[0-9]                       # an element of an object path
      | [A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+   # a key, a variable of the environment, a setting
      | (?:Manager|Control)\.[A-Z]\w+            # a method with its interface
    )(?![\w`])
    """,
    re.VERBOSE,
)


class Text:
    """A comment of the XML: paragraphs, and the keys of a dictionary between them."""

    def __init__(self, comment):
        first, _, rest = comment.strip("\n").rstrip().partition("\n")
        lines = textwrap.dedent((first.lstrip() if not rest else first + "\n" + rest)).strip("\n").split("\n")
        self.paragraphs = [[]]
        self.keys = {}
        key = None
        for line in lines:
            found = KEY.fullmatch(line)
            if found:
                key = found[1]
                self.keys[key] = (found[2], [found[3]])
            elif key and line.startswith("   "):
                self.keys[key][1].append(line.strip())
            elif line.strip():
                key = None
                self.paragraphs[-1].append(line.strip())
            else:
                self.paragraphs.append([])
        self.paragraphs = [" ".join(lines) for lines in self.paragraphs if lines]
        self.keys = {name: (kind, " ".join(lines)) for name, (kind, lines) in self.keys.items()}


class Member:
    def __init__(self, element, comment):
        self.name = element.get("name")
        self.text = Text(comment)
        self.type = element.get("type")
        self.arguments = [(a.get("name"), a.get("type"), a.get("direction")) for a in element.findall("arg")]
        notes = {note.get("name"): note.get("value") for note in element.findall("annotation")}
        self.emits = notes.get(EMITS, "true")


class Interface:
    def __init__(self, name):
        self.name = f"io.yunion.Mps1.{name}"
        builder = tree.TreeBuilder(insert_comments=True)
        parser = tree.XMLParser(target=builder)
        node = tree.parse(ROOT / f"config/{self.name}.xml", parser).getroot()
        self.members = {"method": {}, "property": {}, "signal": {}}
        before = ""
        for element in node:
            if element.tag is tree.Comment:
                before = element.text
            else:
                self.text = Text(before)
                self._read(element)

    def _read(self, interface):
        before = None
        for element in interface:
            if element.tag is tree.Comment:
                before = element.text
            else:
                self.members[element.tag][element.get("name")] = Member(element, before)


INTERFACES = {name: Interface(name) for name in ("Manager", "Control", "Device", "Gpu")}


def prose(text):
    text = INNER.sub(r"`\1` \2 (\3)", text)
    return CODE.sub(lambda found: f"`{found[1]}`", text)


def wrapped(text):
    return textwrap.fill(prose(text), 120, break_long_words=False, break_on_hyphens=False)


def row(*cells):
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def arguments(member, directions):
    chosen = [(name, kind) for name, kind, direction in member.arguments if direction in directions]
    return ", ".join(f"`{name}` {kind}" for name, kind in chosen)


def members(interface):
    for method in interface.members["method"].values():
        yield f"#### {method.name}\n"
        given, answered = arguments(method, ["in"]), arguments(method, ["out"])
        yield f"Arguments: {given or 'none'}. Answer: {answered or 'nothing'}.\n"
        yield from told(method)
    for signal in interface.members["signal"].values():
        yield f"#### {signal.name}, a signal\n"
        yield f"Arguments: {arguments(signal, [None])}.\n"
        yield from told(signal)
    if interface.members["property"]:
        yield "#### Properties\n"
        yield row("property", "type", "signal", "meaning")
        yield "|---|---|---|---|"
        for one in interface.members["property"].values():
            yield row(f"`{one.name}`", one.type, SIGNAL[one.emits], prose(" ".join(one.text.paragraphs)))
        yield ""


def told(member):
    for paragraph in member.text.paragraphs:
        yield wrapped(paragraph) + "\n"
    if member.text.keys:
        yield row("key", "type", "meaning")
        yield "|---|---|---|"
        for key, (kind, meaning) in member.text.keys.items():
            yield row(f"`{key}`", kind, prose(meaning))
        yield ""


def reference():
    yield MARKER
    yield "## Reference\n"
    for interface in INTERFACES.values():
        yield f"### {interface.name}\n"
        for paragraph in interface.text.paragraphs:
            yield wrapped(paragraph) + "\n"
        yield from members(interface)


def value(kind):
    """The JSON of a type of D-Bus."""
    if kind.startswith("a{"):
        return {"type": "object"}
    if kind.startswith("a"):
        return {"type": "array", "items": value(kind[1:])}
    schema = {"type": TYPES[kind]}
    return {**schema, "minimum": 0} if kind in "ut" else schema


def may_lack(meaning):
    return re.search(r"\b(left out|missing)\b", meaning, re.IGNORECASE)


def key(kind, meaning):
    schema = {"description": meaning, **value(kind)}
    if kind == "a{sv}":
        inner = {name: (kind, words) for name, kind, words in INNER.findall(meaning)}
        schema |= dictionary(inner)
    return schema


def dictionary(keys):
    outer = {name: INNER.sub("", meaning) for name, (_, meaning) in keys.items()}
    return {
        "type": "object",
        "properties": {name: key(*keys[name]) for name in sorted(keys)},
        "required": sorted(name for name in keys if not may_lack(outer[name])),
    }


def rows():
    """The dictionaries of the bus, by the method that lists them."""
    methods = INTERFACES["Manager"].members["method"]
    keys = {name: method.text.keys for name, method in methods.items()}
    without = next(text for text in methods["ListGpus"].text.paragraphs if text.startswith("Keys: "))
    without = re.findall(r"\w+", re.search(r"the keys of ListDevices without ([^;]*);", without)[1])
    shared = {name: one for name, one in keys["ListDevices"].items() if name not in without}
    keys["ListGpus"] = {**shared, **keys["ListGpus"]}
    return keys


def schema(title, description, body):
    beginning = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
    return {**beginning, "description": description, **body}


def schemas():
    keys = rows()
    lists = {
        "list": ("yunion-mpsctl list --json", "The slices, as ListDevices has them.", "ListDevices"),
        "list-gpus": ("yunion-mpsctl list --gpus --json", "The GPUs, as ListGpus has them.", "ListGpus"),
        "clients": (
            "yunion-mpsctl clients --json",
            "The processes that use the GPUs, as ListClients has them.",
            "ListClients",
        ),
        "events": (
            "yunion-mpsctl events --json",
            "The last events, oldest first, as ListEvents has them. With --follow each line is one of the items.",
            "ListEvents",
        ),
    }
    for name, (command, description, method) in lists.items():
        items = dictionary(keys[method])
        yield name, schema(command, description, {"type": "array", "items": items})
    properties = INTERFACES["Manager"].members["property"].values()
    service = {}
    for one in properties:
        snake = re.sub(r"(?<!^)(?=[A-Z])", "_", one.name).lower()
        service[snake] = (one.type, " ".join(one.text.paragraphs))
    parts = {
        "service": {"description": "The service itself: the properties of Manager.", **dictionary(service)},
        "control_daemons": ("The control daemons, as ListControlDaemons has them.", "ListControlDaemons"),
        "gpus": ("The GPUs, as ListGpus has them; none before the service knows them.", "ListGpus"),
        "events": ("The last events, oldest first, as ListEvents has them.", "ListEvents"),
    }
    for name in ("control_daemons", "gpus", "events"):
        description, method = parts[name]
        parts[name] = {"description": description, "type": "array", "items": dictionary(keys[method])}
    description = "The service, its control daemons, GPUs and last events. With --watch each line is one such object."
    body = {"type": "object", "properties": parts, "required": sorted(parts)}
    yield "status", schema("yunion-mpsctl status --json", description, body)


def main():
    docs = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    page = docs / "dbus.md"
    text = page.read_text()
    if MARKER not in text:
        sys.exit(f"{page} lacks the line: {MARKER}")
    made = "\n".join(reference()).removeprefix(MARKER).rstrip("\n") + "\n"
    page.write_text(text[: text.index(MARKER)] + MARKER + made)
    for name, one in schemas():
        (docs / "schemas").mkdir(exist_ok=True)
        (docs / "schemas" / f"{name}.json").write_text(json.dumps(one, indent=2) + "\n")


main()
