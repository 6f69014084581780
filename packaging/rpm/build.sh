#!/bin/bash
# Builds the rpms of yunion-mps-daemon and yunion-mps-device-plugin in dist from what scripts/build-packaged.sh has built, and
# checks them.
#   packaging/rpm/build.sh [PROGRAMS DIRECTORY SUFFIX]   as packaging/deb/build.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=packaging/architecture.sh
. packaging/architecture.sh

version=$(packaging/version.sh)
programs=${1:-target/packaged}$FOREIGN directory=${2:-dist}$FOREIGN suffix=${3:-}
work=$PWD/target/rpm
rm -rf "$work"
mkdir -p "$work" "$directory"
packaging/rpm/spec.sh >"$work/yunion-mps-daemon.spec"
export BIN=$PWD/$programs PAGES=$PWD/target/pages
compression=()
[ -z "$suffix" ] || compression=(--define 'package_compression 0')
foreign=()
[ -z "$FOREIGN" ] || foreign=(--target "$RPM_ARCH-linux")
# Two builds give the same bytes, on any machine.
same=(--define 'source_date_epoch_from_changelog 1' --define 'use_source_date_epoch_as_buildtime 1'
    --define 'clamp_mtime_to_source_date_epoch 1' --define '_buildhost localhost')
rpmbuild -bb "${foreign[@]}" --with prebuilt "${compression[@]}" "${same[@]}" --build-in-place --define "_topdir $work" --define "_builddir $PWD" \
    --define "_dbpath $work/db" "$work/yunion-mps-daemon.spec" >"$work/log" 2>&1 || {
    cat "$work/log" >&2
    exit 1
}
for name in yunion-mps-daemon yunion-mps-device-plugin; do
    package=$name-$version-1.$RPM_ARCH.rpm
    rpmlint --config packaging/rpm/rpmlint.toml "$work/RPMS/$RPM_ARCH/$package"
    built=$directory/${package%.rpm}$suffix.rpm
    mv "$work/RPMS/$RPM_ARCH/$package" "$built"
    echo "$built: $(stat -c %s "$built") bytes"
done
