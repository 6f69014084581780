#!/bin/bash
# Fetches zig and cargo-zigbuild into .cache/tools and prints the directory. Nothing that is there already is fetched again.
# They come from PyPI, pinned by scripts/zig-requirements.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

REQUIREMENTS=scripts/zig-requirements.txt

fail() {
    echo "fetch-zig: $*" >&2
    exit 1
}

# Named after what is to be in it, and moved into place when it is complete.
tools=$PWD/.cache/tools/zig-$(sha256sum "$REQUIREMENTS" | cut -c 1-12)
mkdir -p .cache/tools
exec 9>.cache/tools/zig.lock
flock 9
if [ ! -d "$tools" ]; then
    python=''
    for candidate in python3 /usr/bin/python3; do
        if "$candidate" -m pip --version >/dev/null 2>&1; then
            python=$candidate
            break
        fi
    done
    [ -n "$python" ] || fail "no python3 with pip; scripts/deps.sh packages installs it"
    # A download may break off.
    for pause in 5 20 0; do
        rm -rf "$tools.new"
        "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
            --target "$tools.new" --no-deps --only-binary :all: --require-hashes --requirement "$REQUIREMENTS" \
            >&2 && break
        rm -rf "$tools.new"
        sleep "$pause"
    done
    [ -d "$tools.new" ] || fail "pip can't install what $REQUIREMENTS names"
    mv -T "$tools.new" "$tools"
fi
echo "$tools"
