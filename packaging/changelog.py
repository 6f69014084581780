#!/usr/bin/python3
"""Prints the releases in CHANGELOG.md as the changelog of a package: changelog.py deb|rpm

A release is a heading `## [VERSION] - DATE`. The newest one must be the version in Cargo.toml.
"""

import datetime
import pathlib
import re
import subprocess
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADING = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$")
# The epoch: the platform's own package of this name has dates as versions, 20230911.0-26053021, and this package must count as
# newer.
EPOCH = 1


def printed_by(script):
    return subprocess.check_output([ROOT / "packaging" / script], text=True).strip()


def releases(text):
    """(version, date, [paragraph]) of each release, the newest first. A paragraph is a heading or an item."""
    found = []
    for line in text.splitlines():
        if line.startswith("## "):
            heading = HEADING.match(line)
            paragraphs = []
            # A change that is not released yet is in no changelog.
            if heading:
                found.append((heading[1], datetime.date.fromisoformat(heading[2]), paragraphs))
        elif found and line.startswith(("### ", "- ")):
            paragraphs.append(line)
        elif found and line.strip() and paragraphs:
            paragraphs[-1] += " " + line.strip()
    return found


def wrapped(text, first, rest):
    return textwrap.fill(
        text, 78, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


# The package tools accept these names only in English, independent of the locale.
def day(date):
    return "Mon Tue Wed Thu Fri Sat Sun".split()[date.weekday()]


def month(date):
    return "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()[date.month - 1]


def deb(version, date, paragraphs, maintainer):
    body = [
        f"\n  [ {text[4:]} ]" if text.startswith("### ") else wrapped(text[2:], "  * ", "    ") for text in paragraphs
    ]
    return "\n".join(
        [
            f"yunion-mps-daemon ({EPOCH}:{version}) unstable; urgency=medium",
            *body,
            f"\n -- {maintainer}  {day(date)}, {date.day:02} {month(date)} {date.year} 00:00:00 +0000\n",
        ]
    )


def rpm(version, date, paragraphs, maintainer):
    items = [wrapped(text[2:], "- ", "  ") for text in paragraphs if text.startswith("- ")]
    heading = f"* {day(date)} {month(date)} {date.day:02} {date.year} {maintainer} - {EPOCH}:{version}-1"
    return "\n".join([heading, *items, ""]).replace("%", "%%")


def main():
    entry = {"deb": deb, "rpm": rpm}[sys.argv[1]]
    all_releases = releases((ROOT / "CHANGELOG.md").read_text())
    version = printed_by("version.sh")
    newest = all_releases[0][0] if all_releases else "no release"
    if newest != version:
        sys.exit(f"changelog.py: Cargo.toml has version {version}, CHANGELOG.md has {newest} on top; see CONTRIBUTING.md")
    maintainer = printed_by("maintainer.sh")
    print("\n".join(entry(*release, maintainer) for release in all_releases), end="")


main()
