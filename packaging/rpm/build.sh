#!/bin/bash
# Builds the rpms of yunion-mps-daemon and yunion-mps-device-plugin in dist from what scripts/build-packaged.sh has built, and
# checks them.
#   packaging/rpm/build.sh [PROGRAMS DIRECTORY SUFFIX]   as packaging/deb/build.sh
set -euo pipefail
cd "$(dirname "$0")/../.."

version=$(packaging/version.sh)
programs=${1:-target/packaged} directory=${2:-dist} suffix=${3:-}
work=$PWD/target/rpm
rm -rf "$work"
mkdir -p "$work" "$directory"
packaging/rpm/spec.sh >"$work/yunion-mps-daemon.spec"
export BIN=$PWD/$programs PAGES=$PWD/target/pages
compression=()
[ -z "$suffix" ] || compression=(--define 'package_compression 0')
rpmbuild -bb --with prebuilt "${compression[@]}" --build-in-place --define "_topdir $work" --define "_builddir $PWD" \
    --define "_dbpath $work/db" "$work/yunion-mps-daemon.spec" >"$work/log" 2>&1 || {
    cat "$work/log" >&2
    exit 1
}
for name in yunion-mps-daemon yunion-mps-device-plugin; do
    package=$name-$version-1.$(uname -m).rpm
    rpmlint --config packaging/rpm/rpmlint.toml "$work/RPMS/$(uname -m)/$package"
    built=$directory/${package%.rpm}$suffix.rpm
    mv "$work/RPMS/$(uname -m)/$package" "$built"
    echo "$built: $(stat -c %s "$built") bytes"
done
