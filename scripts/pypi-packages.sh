#!/bin/bash
# Packages of PyPI, into a directory of their own. To be sourced; nothing of the machine is changed, and nobody has to be root.

# Puts what REQUIREMENTS pins into DIRECTORY, by the first PYTHON that has pip. Who sources this file has a function fail.
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
    # A download may break off.
    for pause in 5 20 0; do
        rm -rf "$directory.new"
        "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
            --target "$directory.new" --no-deps --only-binary :all: --require-hashes --requirement "$requirements" \
            >&2 && break
        rm -rf "$directory.new"
        sleep "$pause"
    done
    [ -d "$directory.new" ] || fail "pip can't install what $requirements names"
    # Into place in one step: what has its final name is complete.
    mv -T "$directory.new" "$directory"
}
