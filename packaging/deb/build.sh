#!/bin/bash
# Builds dist/yunion-mps-daemon_<version>_<architecture>.deb from what scripts/build-packaged.sh has built, and checks it.
set -euo pipefail
cd "$(dirname "$0")/../.."

version=$(packaging/version.sh)
stage=target/deb/yunion-mps-daemon-$version
rm -rf target/deb
mkdir -p "$stage" dist
# What install.sh takes from the tree, and the packaging itself.
cp -a README.md README.zh-CN.md CHANGELOG.md config docs systemd packaging "$stage/"
packaging/deb/debian.sh "$stage"

GLIBC=$(cat packaging/glibc-version)
export GLIBC BIN=$PWD/target/packaged PAGES=$PWD/target/pages
(cd "$stage" && dpkg-buildpackage --build=binary --build-profiles=pkg.yunion-mps-daemon.prebuilt \
    --unsigned-source --unsigned-changes) >target/deb/log 2>&1 || {
    cat target/deb/log >&2
    exit 1
}
package=yunion-mps-daemon_${version}_$(dpkg --print-architecture).deb
lintian --allow-root --fail-on error,warning "target/deb/$package"
mv "target/deb/$package" dist/
echo "dist/$package: $(stat -c %s "dist/$package") bytes"
