#!/bin/sh
# Builds what is installed: the programs, and target/pages with manual pages, completions and the copyright file.
set -eu
cd "$(dirname "$0")/.."

cargo build --release --locked --bins --package yunion-mps-daemon --package yunion-mpsctl \
    --package yunion-mps-device-plugin --package yunion-mps-pages
scripts/pages.sh target/release/yunion-mps-pages
