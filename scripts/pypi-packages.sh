#!/bin/bash
# Packages of PyPI, in a separate directory. This file is to be sourced; it changes nothing of the machine, and needs no root.

# Installs the pinned packages of REQUIREMENTS into DIRECTORY, with the first PYTHON that has pip. The script that sources this
# file must have a function fail.
from_pypi() { # REQUIREMENTS DIRECTORY PYTHON...
    local requirements=$1 directory=$2 candidate python='' pause
    shift 2
    for candidate in "$@"; do
        if "$candidate" -m pip --version >/dev/null 2>&1; then
            python=$candidate
            break
        fi
    done
    [ -n "$python" ] || fail "no $* with pip (Debian: python3-pip)"
    # A download may be interrupted.
    for pause in 5 20 0; do
        rm -rf "$directory.new"
        "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
            --target "$directory.new" --no-deps --only-binary :all: --require-hashes --requirement "$requirements" \
            >&2 && break
        rm -rf "$directory.new"
        sleep "$pause"
    done
    [ -d "$directory.new" ] || fail "pip can't install what $requirements names"
    # Renamed in one step: a directory with the final name is complete.
    mv -T "$directory.new" "$directory"
}
