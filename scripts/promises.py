#!/usr/bin/python3
"""Writes the promises of the core, whose words stand at the beginning of tests/world/src/truths.rs, into the table of
docs/architecture.md:

    scripts/promises.py [FILE]

FILE is docs/architecture.md unless it is given. A person runs this after a change of a promise; a test compares. The
program ends with an error if the world asserts a promise without words, or asserts none of that name.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN = "<!-- Made by scripts/promises.py from tests/world/src/truths.rs: -->\n"
END = "<!-- Until here. -->\n"
WORLD = ROOT / "tests/world/src"


def promises():
    """Each promise with its words, in order: `//! * name: words`, and lines that are further in."""
    lines = (WORLD / "truths.rs").read_text().split("\n")
    head = lines[: next(number for number, line in enumerate(lines) if not line.startswith("//!"))]
    text = "\n".join(line.removeprefix("//!").removeprefix(" ") for line in head)
    return {name: " ".join(words.split()) for name, words in re.findall(r"^\* ([a-z-]+): (.*(?:\n  .*)*)", text, re.M)}


def asserted():
    """The names at the beginning of the texts of assertions."""
    text = "".join(path.read_text().split("\nuse ", 1)[-1] for path in sorted(WORLD.glob("*.rs")))
    return set(re.findall(r'"([a-z]+(?:-[a-z]+)+)(?:: |")', text))


def main():
    page = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/architecture.md"
    found = promises()
    if found.keys() != asserted():
        sys.exit(f"with words or asserted, and not both: {', '.join(sorted(found.keys() ^ asserted()))}")
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"{page} lacks a line: {BEGIN}{END}")
    before, rest = text.split(BEGIN)
    rows = "".join(f"| {name} | {words} |\n" for name, words in found.items())
    page.write_text(f"{before}{BEGIN}\n| name | promise |\n|---|---|\n{rows}\n{END}{rest.split(END)[1]}")


main()
