#!/bin/bash
# Fetches a Docker and a containerd that know CDI into DIR (.cache/docker unless given): dockerd, docker, containerd with ctr,
# and the shim of runc, of Debian 13. Debian 12 has Docker 20.10 and containerd 1.6. Their runc is the machine's own. They are
# for the tests that root runs.
set -euo pipefail
umask 022
# shellcheck source=scripts/debian-packages.sh
. "$(dirname "$0")/debian-packages.sh"

SUITE=trixie
PROGRAMS='usr/sbin/dockerd usr/bin/docker usr/bin/containerd usr/bin/containerd-shim-runc-v2 usr/bin/ctr'

fail() {
    echo "fetch-docker: $*" >&2
    exit 1
}

fetch() { # MIRROR
    local work="$scratch/work" program
    rm -rf "$work"
    unpack_packages "$1" "$SUITE" main "$work" docker.io docker-cli containerd || return 1
    rm -rf "$dir" "$dir.new" && mkdir -p "$dir.new" || return 1
    for program in $PROGRAMS; do
        cp "$work/tree/$program" "$dir.new/" || return 1
    done
    # Into place in one step: what has its final name is complete.
    mv -T "$dir.new" "$dir" || return 1
    echo "fetch-docker: $("$dir/docker" --version) in $dir" >&2
}

dir=${1:-.cache/docker}
[ ! -x "$dir/ctr" ] || exit 0
begin_to_fetch
from_a_mirror || fail "can't get Docker of Debian $SUITE; try again, or put $PROGRAMS of Docker 25 or newer into $dir"
