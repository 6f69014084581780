#!/bin/sh
# Writes what is installed and comes from the sources into target/pages, with the yunion-mps-pages given: manual pages,
# completions, and the copyright file with the licences of the crates.
set -eu
cd "$(dirname "$0")/.."

"$1" target/pages tests/golden/tesla-p40
packaging/copyright.py >target/pages/copyright
