#!/bin/bash
# Fetches zig and cargo-zigbuild into .cache/tools and prints the directory. Nothing that is there already is fetched again.
# They come from PyPI, pinned by scripts/zig-requirements.txt.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/pypi-packages.sh
. scripts/pypi-packages.sh

REQUIREMENTS=scripts/zig-requirements.txt

fail() {
    echo "fetch-zig: $*" >&2
    exit 1
}

# The name depends on the content that the directory should have.
tools=$PWD/.cache/tools/zig-$(sha256sum "$REQUIREMENTS" | cut -c 1-12)
mkdir -p .cache/tools
exec 9>.cache/tools/zig.lock
flock 9
if [ ! -d "$tools" ]; then
    # Any Python is enough.
    from_pypi "$REQUIREMENTS" "$tools" python3 /usr/bin/python3
fi
echo "$tools"
