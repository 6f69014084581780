#!/bin/bash
# Fetches what programs for aarch64 need to run on this machine, into DIR (.cache/arm64 unless given): an emulator,
# DIR/qemu-aarch64, and the files of a Debian for arm64, DIR/root. Nothing is installed: tests/arm64/emulated.sh runs programs there.
# No maintainer script of these packages has run, so the services of this Debian are not set up.
set -euo pipefail
umask 022
cd "$(dirname "$0")/.."
# shellcheck source=scripts/debian-packages.sh
. scripts/debian-packages.sh

SUITE=trixie
# What each Debian has, and what the package of the service depends on. adduser has deluser for the purge of a package.
PACKAGES='base-files base-passwd bash coreutils dash dbus debianutils diffutils dpkg findutils grep hostname init-system-helpers
    libc-bin mawk ncurses-bin perl-base procps python3-minimal sed systemd sysvinit-utils tar util-linux'

fail() {
    echo "arm64-root: $*" >&2
    exit 1
}

# All of them with what they depend on. dpkg in there knows them as installed.
unpack_root() { # MIRROR
    local work=$scratch/root deb name
    architecture=arm64 prepare_apt "$1" "$SUITE" main "$work" || return 1
    # shellcheck disable=SC2086 # a list of words
    apt-get -qq -c "$work/apt.conf" -o "Dir::Cache::archives=$work/deb" install --download-only \
        --yes --no-install-recommends $PACKAGES </dev/null || return 1
    mkdir -p "$work/tree/var/lib/dpkg/info" || return 1
    for deb in "$work"/deb/*.deb; do
        dpkg-deb -x "$deb" "$work/tree" || return 1
        name=$(dpkg-deb -f "$deb" Package) || return 1
        # An empty line ends a package.
        { dpkg-deb -f "$deb" && echo 'Status: install ok installed' && echo; } >>"$work/tree/var/lib/dpkg/status" || return 1
        dpkg-deb --fsys-tarfile "$deb" | tar -t | sed -e 's|^\./$|/.|' -e 's|^\.||' -e 's|/$||' \
            >"$work/tree/var/lib/dpkg/info/$name.list" || return 1
    done
}

fetch() { # MIRROR
    local work=$scratch/root
    rm -rf "$work" "$scratch/qemu"
    unpack_packages "$1" "$SUITE" main "$scratch/qemu" qemu-user || return 1
    unpack_root "$1" || return 1
    # The maintainer scripts of base-passwd and base-files would do this.
    cp "$work/tree/usr/share/base-passwd/passwd.master" "$work/tree/etc/passwd" || return 1
    cp "$work/tree/usr/share/base-passwd/group.master" "$work/tree/etc/group" || return 1
    rm -r "$work/tree/var/run" && ln -s /run "$work/tree/var/run" || return 1
    rm -rf "$dir" "$dir.new" && mkdir -p "$dir.new" || return 1
    mv "$work/tree" "$dir.new/root" && mv "$scratch/qemu/tree/usr/bin/qemu-aarch64" "$dir.new/" || return 1
    echo "$made_of" >"$dir.new/made-of" || return 1
    # Renamed in one step: a directory with the final name is complete.
    mv -T "$dir.new" "$dir" || return 1
    echo "arm64-root: $("$dir/qemu-aarch64" --version | head -n 1), $(du -sh "$dir/root" | cut -f 1) in $dir/root" >&2
}

dir=${1:-.cache/arm64}
made_of=$(cat scripts/arm64-root.sh scripts/debian-packages.sh | sha256sum)
[ "$(cat "$dir/made-of" 2>/dev/null)" != "$made_of" ] || exit 0
begin_to_fetch
from_a_mirror || fail "can't get qemu-user, and $PACKAGES for arm64, of Debian $SUITE; try again"
