#!/bin/sh
# Writes what dpkg-buildpackage needs into DIRECTORY/debian: packaging/deb/debian.sh DIRECTORY
# target/pages/copyright must be there (scripts/pages.sh).
set -eu
target=$(realpath "$1")/debian
cd "$(dirname "$0")/../.."

mkdir "$target" "$target/source"
for file in lintian-overrides postinst postrm prerm rules yunion-mps-device-plugin.prerm; do
    cp -p "packaging/deb/$file" "$target/"
done
sed "s/@MAINTAINER@/$(packaging/maintainer.sh)/" packaging/deb/control.in >"$target/control"
packaging/changelog.py deb >"$target/changelog"
cp target/pages/copyright "$target/copyright"
echo '3.0 (native)' >"$target/source/format"
