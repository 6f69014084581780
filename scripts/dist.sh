#!/bin/bash
# Makes dist/yunion-mps-daemon-<version>.tar.xz: the sources of the last commit, those of every crate, a debian/ and a
# spec. Packages are built from it without a network:
#   tar xf yunion-mps-daemon-<version>.tar.xz; cd yunion-mps-daemon-<version>; dpkg-buildpackage -b
#   rpmbuild -tb yunion-mps-daemon-<version>.tar.xz
# The same commit gives the same bytes.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    echo "dist: $*" >&2
    exit 1
}

git rev-parse --quiet --verify HEAD >/dev/null || fail "no git checkout: this file comes from a commit"
[ -z "$(git status --porcelain)" ] || echo "dist: changes that are not committed are left out" >&2
name=yunion-mps-daemon-$(git show HEAD:Cargo.toml | sed -n '/^\[workspace\.package\]/,/^$/s/^version = "\(.*\)"$/\1/p')
work=target/dist
stage=$work/$name
rm -rf "$work"
mkdir -p "$stage" dist
git archive HEAD | tar -x -C "$stage"

mkdir "$stage/.cargo"
# It prints the settings that make cargo use these crates; with --quiet it would not.
(cd "$stage" && cargo vendor --locked --versioned-dirs vendor >.cargo/config.toml) 2>"$work/log" || {
    cat "$work/log" >&2
    exit 1
}
# Binaries for Windows, a third of all bytes: nothing here links them, and distributions do not want binaries in the sources.
/usr/bin/python3 - "$stage/vendor" <<'END'
import json, pathlib, sys

for library in pathlib.Path(sys.argv[1]).glob("*/lib/*.a"):
    library.unlink()
    sums = library.parent.parent / ".cargo-checksum.json"
    content = json.loads(sums.read_text())
    del content["files"][f"lib/{library.name}"]
    sums.write_text(json.dumps(content))
END

(cd "$stage" && mkdir -p target/pages && packaging/copyright.py >target/pages/copyright)
"$stage/packaging/deb/debian.sh" "$stage"
(cd "$stage" && packaging/rpm/spec.sh) >"$stage/yunion-mps-daemon.spec"
rm -r "$stage/target"

tar -c -C "$work" --sort=name --mtime="@$(git log -1 --format=%ct)" --owner=0 --group=0 --numeric-owner --format=gnu \
    "$name" | xz -6 -T2 >"dist/$name.tar.xz.new"
mv "dist/$name.tar.xz.new" "dist/$name.tar.xz"
rm -r "$work"
echo "dist/$name.tar.xz: $(stat -c %s "dist/$name.tar.xz") bytes"
