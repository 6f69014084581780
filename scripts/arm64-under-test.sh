#!/bin/sh
# Makes what tests/it/arm64.rs runs, on a machine that is not aarch64 itself: the files of a Debian, NVIDIA's control daemons, and
# target/under-test/programs/arm64 with the programs of the service and of the simulated host. With RELEASE=1 the programs of the
# service are those of `make deb ARCH=arm64`. Otherwise they are built without optimisation, and the deb in
# target/under-test/arm64 has them too.
set -eu
cd "$(dirname "$0")/.."
export ARCH=arm64
# shellcheck source=packaging/architecture.sh
. packaging/architecture.sh
[ -n "$FOREIGN" ] || exit 0

scripts/arm64-root.sh
scripts/fetch-mps-control.sh .cache/mps-arm64 "$DEB_ARCH"
target=$RPM_ARCH-unknown-linux-gnu
programs=target/under-test/programs$FOREIGN
service='yunion-mps-daemon yunion-mpsctl yunion-mps-device-plugin'
if [ -n "${RELEASE:-}" ] && [ ! -e "target/packaged$FOREIGN/yunion-mpsctl" ]; then
    echo "arm64-under-test: no target/packaged$FOREIGN; make deb rpm ARCH=arm64 makes it" >&2
    exit 1
fi
rm -rf "$programs" "target/under-test$FOREIGN"
mkdir -p "$programs"
packages='--package yunion-mps-sim'
[ -n "${RELEASE:-}" ] || for program in $service; do
    packages="$packages --package $program"
done
# shellcheck disable=SC2086 # a list of words
CARGO_PROFILE_DEV_STRIP=symbols scripts/zigbuild.sh "$target" --lib --bins $packages
for program in yunion-mps-sim nvidia-cuda-mps-control nvidia-cuda-mps-server nvidia-smi cuda-client libnvidia_ml.so; do
    cp "target/$target/debug/$program" "$programs/"
done
if [ -n "${RELEASE:-}" ]; then
    for program in $service; do
        cp "target/packaged$FOREIGN/$program" "$programs/"
    done
else
    for program in $service; do
        cp "target/$target/debug/$program" "$programs/"
    done
    packaging/deb/build.sh target/under-test/programs target/under-test .no-release
fi
