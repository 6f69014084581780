#!/bin/bash
# Makes sure that rustc has the standard library of TARGET, and prints the flags by which rustc finds it, if it needs any:
#   scripts/fetch-std.sh TARGET
# Nothing that is there already is fetched again. rustup installs the library beside the toolchain. For Debian's rustc it comes
# from Debian's package of the same version, into .cache/std, and nothing is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022
# shellcheck source=scripts/debian-packages.sh
. scripts/debian-packages.sh

target=$1
case $target in
aarch64-*) architecture=arm64 ;;
x86_64-*) architecture=amd64 ;;
esac
version=$(rustc --version | cut -d ' ' -f 2)
sysroot=$(rustc --print sysroot)

fail() {
    echo "fetch-std: $*" >&2
    exit 1
}

has_std() { # SYSROOT
    compgen -G "$1/lib/rustlib/$target/lib/libstd-*.rlib" >/dev/null
}

with_rustup() {
    local pause
    command -v rustup >/dev/null || return 1
    case $(readlink -f "$sysroot") in
    "$(readlink -f "$(rustup show home)")"/*) ;;
    *) return 1 ;; # a rustc that is not rustup's
    esac
    # A download may be interrupted.
    for pause in 5 20 0; do
        rustup target add "$target" >&2 && return 0
        sleep "$pause"
    done
    return 1
}

# Debian's package of the same version as rustc: no other library can be linked.
with_apt() {
    local version_there
    dpkg-query --search "$sysroot/lib/rustlib" 2>/dev/null | grep -q libstd-rust-dev || return 1
    version_there=$(dpkg-query --show --showformat '${Version}' libstd-rust-dev) || return 1
    begin_to_fetch
    unpack_packages '' '' '' "$scratch" "libstd-rust-dev=$version_there" || return 1
    mkdir -p .cache/std
    rm -rf "$of_apt"
    # Renamed in one step: a directory with the final name is complete.
    mv -T "$scratch/tree/usr" "$of_apt"
}

! has_std "$sysroot" || exit 0
of_apt=$PWD/.cache/std/$version-$target
if ! has_std "$of_apt"; then
    ! with_rustup || exit 0
    with_apt || fail "rustc $version has no standard library for $target: with rustup, rustup target add $target; with Debian's" \
        "rustc, libstd-rust-dev of the same version for ${architecture:-the architecture}; otherwise unpack lib/rustlib/$target of the release's file" \
        "rust-std-$version-$target.tar.xz into $sysroot"
fi
echo "--sysroot=$of_apt"
