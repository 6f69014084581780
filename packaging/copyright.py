#!/usr/bin/python3
"""Prints the copyright file of the packages: our licence, and those of the crates that are compiled into the programs.

A crate that may be used under the Apache licence, as ours, is only listed. Of any other its licence is repeated,
with the names in it. Needs the crates' sources: cargo fetch.
"""

import json
import pathlib
import re
import subprocess
import sys

# The crates of the programs, and the crate that all of them use.
PROGRAMS = {"yunion-mps-daemon", "yunion-mpsctl", "yunion-mps-device-plugin"}
OURS = PROGRAMS | {"yunion-mps-common"}
APACHE = "Apache-2.0"


def metadata():
    host = re.search(r"^host: (\S+)$", subprocess.check_output(["rustc", "-vV"], text=True), re.M)[1]
    command = ["cargo", "metadata", "--locked", "--format-version=1", f"--filter-platform={host}"]
    return json.loads(subprocess.check_output(command))


def compiled_in(data):
    """The crates that our programs need to run, however indirectly: no build or test dependencies, no macros."""
    crates = {crate["id"]: crate for crate in data["packages"]}
    needs = {node["id"]: node["deps"] for node in data["resolve"]["nodes"]}
    todo = [crate["id"] for crate in data["packages"] if crate["name"] in PROGRAMS]
    seen = set(todo)
    while todo:
        for need in needs[todo.pop()]:
            crate = crates[need["pkg"]]
            macro = any("proc-macro" in target["kind"] for target in crate["targets"])
            if need["pkg"] not in seen and not macro and any(kind["kind"] is None for kind in need["dep_kinds"]):
                seen.add(need["pkg"])
                todo.append(need["pkg"])
    # Two versions of a crate may be compiled in. They are sorted, since the order of a set differs in each run.
    found = (crates[name] for name in seen if crates[name]["name"] not in OURS)
    return sorted(found, key=lambda crate: (crate["name"], crate["version"]))


def choices(crate):
    """The licences of which one is enough."""
    return re.split(r" OR |/", crate["license"].strip("()"))


def licence_text(crate):
    directory = pathlib.Path(crate["manifest_path"]).parent
    files = sorted(path for path in directory.iterdir() if re.match(r"(licen[cs]e|copying|unlicense)", path.name, re.I))
    # The text of the Apache licence is not repeated.
    files = [path for path in files if path.is_file() and "APACHE" not in path.name]
    if not files:
        sys.exit(f"copyright.py: {crate['name']} {crate['version']} ({crate['license']}) comes without its licence")
    return "\n\n".join(path.read_text().strip() for path in files)


def indented(text):
    return "\n".join(f" {line.rstrip()}" if line.strip() else " ." for line in text.expandtabs().split("\n"))


def main():
    apache, others = [], {}
    for crate in compiled_in(metadata()):
        name = f"{crate['name']} {crate['version']}"
        if APACHE in choices(crate):
            apache.append(name)
        else:
            others.setdefault((crate["license"], licence_text(crate)), []).append(name)
    print("Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/")
    print("Upstream-Name: yunion-mps-daemon")
    print("Comment: Beside our own code the programs contain Rust crates.")
    print(" .\n Under the Apache licence, version 2.0:")
    print(indented(", ".join(apache)))
    for number, ((licence, _), crates) in enumerate(others.items(), 1):
        print(f" .\n Under {licence}, see crates-{number} below:")
        print(indented(", ".join(crates)))
    print(f"\nFiles: *\nCopyright: the authors of yunion-mps-daemon\nLicense: {APACHE}")
    print(f"\nLicense: {APACHE}")
    print(" http://www.apache.org/licenses/LICENSE-2.0, on Debian in /usr/share/common-licenses/Apache-2.0")
    for number, (_, text) in enumerate(others, 1):
        print(f"\nLicense: crates-{number}")
        print(indented(text))


main()
