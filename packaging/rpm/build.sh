#!/bin/bash
# Builds dist/yunion-mps-daemon-<version>-1.<architecture>.rpm from what scripts/build-packaged.sh has built, and checks it.
set -euo pipefail
cd "$(dirname "$0")/../.."

version=$(packaging/version.sh)
work=$PWD/target/rpm
package=yunion-mps-daemon-$version-1.$(uname -m).rpm
rm -rf "$work"
mkdir -p "$work" dist
packaging/rpm/spec.sh >"$work/yunion-mps-daemon.spec"
export BIN=$PWD/target/packaged PAGES=$PWD/target/pages
rpmbuild -bb --with prebuilt --build-in-place --define "_topdir $work" --define "_builddir $PWD" \
    --define "_dbpath $work/db" "$work/yunion-mps-daemon.spec" >"$work/log" 2>&1 || {
    cat "$work/log" >&2
    exit 1
}
rpmlint --config packaging/rpm/rpmlint.toml "$work/RPMS/$(uname -m)/$package"
mv "$work/RPMS/$(uname -m)/$package" dist/
echo "dist/$package: $(stat -c %s "dist/$package") bytes"
