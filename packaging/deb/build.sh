#!/bin/bash
# Builds dist/yunion-mps-daemon_<version>_<architecture>.deb from what scripts/build-packaged.sh has built, and checks it.
set -euo pipefail
cd "$(dirname "$0")/../.."

version=$(packaging/version.sh)
stage=target/deb/yunion-mps-daemon-$version
rm -rf target/deb
mkdir -p "$stage" dist
# What install.sh takes from the tree, and the packaging itself.
cp -a README.md CHANGELOG.md config docs systemd packaging "$stage/"
cp -a packaging/deb "$stage/debian"
rm "$stage/debian/build.sh"
cp target/pages/copyright "$stage/debian/copyright"

# The date of the sources, so that the same sources give the same package.
if [ -z "${SOURCE_DATE_EPOCH:-}" ]; then
    SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || stat -c %Y CHANGELOG.md)
    export SOURCE_DATE_EPOCH
fi
# The epoch: the platform's own package of this name counts by date, 20230911.0-26053021, and ours comes after it.
cat >"$stage/debian/changelog" <<END
yunion-mps-daemon (1:$version) unstable; urgency=medium

  * What has changed is in CHANGELOG.md.

 -- $(sed -n 's/^Maintainer: //p' packaging/deb/control)  $(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")
END
mkdir "$stage/debian/source"
echo '3.0 (native)' >"$stage/debian/source/format"

GLIBC=$(cat packaging/glibc-version)
export GLIBC BIN=$PWD/target/packaged PAGES=$PWD/target/pages
(cd "$stage" && dpkg-buildpackage --build=binary --unsigned-source --unsigned-changes) >target/deb/log 2>&1 || {
    cat target/deb/log >&2
    exit 1
}
package=yunion-mps-daemon_${version}_$(dpkg --print-architecture).deb
lintian --allow-root --fail-on error,warning "target/deb/$package"
mv "target/deb/$package" dist/
echo "dist/$package: $(stat -c %s "dist/$package") bytes"
