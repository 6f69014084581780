#!/bin/bash
# Builds the debs of yunion-mps-daemon and yunion-mps-device-plugin in dist from what scripts/build-packaged.sh has built, and checks them.
#   packaging/deb/build.sh [PROGRAMS DIRECTORY SUFFIX]   for scripts/build-under-test.sh: other programs, another place, and
#                                                        a word behind the file's name
# With ARCH=arm64 the packages are in dist/arm64.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=packaging/architecture.sh
. packaging/architecture.sh

version=$(packaging/version.sh)
programs=${1:-target/packaged}$FOREIGN directory=${2:-dist}$FOREIGN suffix=${3:-}
stage=target/deb/yunion-mps-daemon-$version
rm -rf target/deb
mkdir -p "$stage" "$directory"
# The files that install.sh takes from the tree, and the packaging itself.
cp -a README.md README.zh-CN.md CHANGELOG.md config docs systemd packaging "$stage/"
packaging/deb/debian.sh "$stage"

GLIBC=$(cat packaging/glibc-version)
export GLIBC BIN=$PWD/$programs PAGES=$PWD/target/pages
[ -z "$suffix" ] || export PACKAGE_COMPRESSION=0
# No compiler of that architecture is needed, for which a foreign package would ask.
foreign=()
[ -z "$FOREIGN" ] || foreign=(--host-arch "$DEB_ARCH" --no-check-builddeps)
(cd "$stage" && dpkg-buildpackage "${foreign[@]}" --build=binary --build-profiles=pkg.yunion-mps-daemon.prebuilt \
    --unsigned-source --unsigned-changes) >target/deb/log 2>&1 || {
    cat target/deb/log >&2
    exit 1
}
for name in yunion-mps-daemon yunion-mps-device-plugin; do
    package=${name}_${version}_$DEB_ARCH.deb
    lintian --allow-root --fail-on error,warning "target/deb/$package"
    built=$directory/${package%.deb}$suffix.deb
    mv "target/deb/$package" "$built"
    echo "$built: $(stat -c %s "$built") bytes"
done
