#!/bin/sh
# Prints the version of the packages: that of the workspace.
set -eu
cd "$(dirname "$0")/.."
sed -n '/^\[workspace\.package\]/,/^$/s/^version = "\(.*\)"$/\1/p' Cargo.toml
