#!/bin/bash
# Builds a deb and an rpm from the file that `make dist` has made, in a clean root of Debian without a network, and compares their
# lists of files with the packages of `make deb rpm`: make check-dist, as root. The root is Debian 13 with the cargo of its
# backports: it has no other toolchain.
set -euo pipefail
cd "$(dirname "$0")/.."

SUITE=trixie
# rpmbuild has its own list of packages, in which none of these exist: hence --nodeps below.
PACKAGES=build-essential,cargo,rustc,python3,debhelper,rpm,xz-utils

version=$(packaging/version.sh)
source=dist/yunion-mps-daemon-$version.tar.xz
debs=() rpms=()
for name in yunion-mps-daemon yunion-mps-device-plugin; do
    debs+=("dist/${name}_${version}_$(dpkg --print-architecture).deb")
    rpms+=("dist/$name-$version-1.$(uname -m).rpm")
done
for file in "$source" "${debs[@]}" "${rpms[@]}"; do
    [ -f "$file" ] || {
        echo "check-dist: $file is missing: make dist deb rpm" >&2
        exit 1
    }
done

work=$(mktemp -d /var/tmp/mps-dist.XXXXXX)
trap 'rm -rf "$work"' EXIT
root=$work/root
mirror=$(apt-get indextargets --no-release-info --format '$(SITE)' 'Created-By: Packages' 'Component: main' |
    grep -v security | grep /debian | head -n 1)
[ -n "$mirror" ] || {
    echo "check-dist: apt's sources here name no mirror of Debian, which the clean root comes from" >&2
    exit 1
}
sources() { # SUITE
    echo "deb $mirror $1 main"
}
mmdebstrap --quiet --variant=minbase --include="$PACKAGES" \
    --setup-hook='printf "Package: cargo rustc libstd-rust-* libllvm*\nPin: release a=*-backports\nPin-Priority: 900\n" >"$1/etc/apt/preferences.d/rust"' \
    "$SUITE" "$root" "$(sources $SUITE)" "$(sources $SUITE-backports)"
mkdir "$root/build"
cp "$source" "$root/build/"

# `make deb rpm` makes the optimised programs; here programs and unit tests share one fast compilation of all crates, for which
# both have to unwind: tests always do.
cat >"$root/build/run" <<END
set -eux
export HOME=/build LC_ALL=C.UTF-8 CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_OPT_LEVEL=0
export CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_PANIC=unwind
# The second package finds what the first one has compiled, since its sources have the same path: rpmbuild unpacks them there.
export CARGO_BUILD_BUILD_DIR=/build/compiled
cargo --version
mkdir /build/yunion-mps-daemon-$version-build
cd /build/yunion-mps-daemon-$version-build
tar xf ../yunion-mps-daemon-$version.tar.xz
cd yunion-mps-daemon-$version
dpkg-buildpackage -b --no-sign
mv ../*.deb /build
cd /build
# The unit tests have passed once.
rpmbuild -tb --nodeps --nocheck --define '_builddir /build' yunion-mps-daemon-$version.tar.xz
END
unshare --net --mount --pid --fork sh -ec '
    mount -t proc proc "$1/proc"
    mount --bind /dev "$1/dev"
    exec chroot "$1" sh /build/run' sh "$root" >"$work/log" 2>&1 || {
    cat "$work/log" >&2
    exit 1
}

files_of_deb() {
    dpkg-deb -c "$1" | awk '{ print $1, $2, $6, $7, $8 }' | sort
}
files_of_rpm() {
    rpm -qp --qf '[%{FILEMODES:perms} %{FILEUSERNAME}/%{FILEGROUPNAME} %{FILENAMES} %{FILELINKTOS}\n]' "$1" | sort
}
for deb in "${debs[@]}"; do
    diff <(files_of_deb "$deb") <(files_of_deb "$root/build/${deb#dist/}")
    echo "$deb: the same files from $source, $(files_of_deb "$deb" | wc -l)"
done
for rpm in "${rpms[@]}"; do
    diff <(files_of_rpm "$rpm") <(files_of_rpm "$root/build/rpmbuild/RPMS/$(uname -m)/${rpm#dist/}")
    echo "$rpm: the same files from $source, $(files_of_rpm "$rpm" | wc -l)"
done
