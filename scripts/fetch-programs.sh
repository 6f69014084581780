#!/bin/bash
# Fetches programs for the tests into DIR (.cache/programs unless given). Nothing is installed: the packages would leave engines,
# services and users on this machine.
# - of Debian 13: a Docker and a containerd that know CDI (dockerd, docker, containerd with ctr, the shim of runc). Debian 12 has
#   Docker 20.10 and containerd 1.6.
# - of this machine's own release, since they need its libraries: runc and promtool.
set -euo pipefail
umask 022
# shellcheck source=scripts/debian-packages.sh
. "$(dirname "$0")/debian-packages.sh"

SUITE=trixie
DOCKER='usr/sbin/dockerd usr/bin/docker usr/bin/containerd usr/bin/containerd-shim-runc-v2 usr/bin/ctr'
OTHERS='usr/sbin/runc usr/bin/promtool'

fail() {
    echo "fetch-programs: $*" >&2
    exit 1
}

fetch() { # MIRROR
    local program own
    # shellcheck disable=SC1091 # the machine's own file
    own=$(. /etc/os-release && echo "$VERSION_CODENAME") || return 1
    rm -rf "$scratch/docker" "$scratch/others"
    unpack_packages "$1" "$SUITE" main "$scratch/docker" docker.io docker-cli containerd || return 1
    unpack_packages "$1" "$own" main "$scratch/others" runc prometheus || return 1
    rm -rf "$dir" "$dir.new" && mkdir -p "$dir.new" || return 1
    for program in $DOCKER; do
        cp "$scratch/docker/tree/$program" "$dir.new/" || return 1
    done
    for program in $OTHERS; do
        cp "$scratch/others/tree/$program" "$dir.new/" || return 1
    done
    # Renamed in one step: a directory with the final name is complete.
    mv -T "$dir.new" "$dir" || return 1
    echo "fetch-programs: $("$dir/docker" --version), $("$dir/runc" --version | head -n 1) in $dir" >&2
}

dir=${1:-.cache/programs}
[ ! -x "$dir/promtool" ] || exit 0
begin_to_fetch
from_a_mirror || fail "can't get $DOCKER of Debian $SUITE, and $OTHERS; try again, or put Docker 25 or newer and the others into $dir"
