#!/bin/bash
# Fetches the real MPS control daemons that the tests run against, into DIR/535, DIR/550 and DIR/555 (.cache/mps unless
# given): nvidia-cuda-mps-control and, beside it, nvidia-cuda-mps-server. Nothing that is there already is fetched again. With
# ARCHITECTURE, Debian's name, they are those for another machine:
#   scripts/fetch-mps-control.sh [DIR [ARCHITECTURE]]
# They come from Debian's package nvidia-cuda-mps, through the mirror that this machine's apt uses. The licence is
# NVIDIA's: they are for testing on this machine only and never part of this repository or of a package.
# A control daemon looks its server up in PATH and nowhere else: put its directory first there.
set -euo pipefail
umask 022
# shellcheck source=scripts/debian-packages.sh
. "$(dirname "$0")/debian-packages.sh"

# Driver series and the Debian suite that has it.
SERIES='535:bookworm 550:trixie 555:experimental'
PACKAGE=nvidia-cuda-mps

fail() {
    echo "fetch-mps-control: $*" >&2
    exit 1
}

complete() { # SERIES-DIRECTORY
    [ -x "$1/nvidia-cuda-mps-control" ] && [ -x "$1/nvidia-cuda-mps-server" ]
}

fetch() { # MIRROR SUITE SERIES TARGET-DIRECTORY
    local mirror=$1 suite=$2 series=$3 target=$4 work="$scratch/$3" deb found
    rm -rf "$work"
    unpack_packages "$mirror" "$suite" non-free "$work" "$PACKAGE" || return 1
    deb=$(find "$work/deb" -name '*.deb')
    found=$(dpkg-deb -f "$deb" Version) || return 1
    case $found in
    "$series".*) ;;
    *) fail "$suite has $PACKAGE $found now, not $series: SERIES in $0 must name a suite that has $series" ;;
    esac
    # Renamed in one step, within one file system: a directory with the final name is complete.
    rm -rf "$target" "$target.new" && mkdir "$target.new" || return 1
    cp "$work/tree/usr/bin/nvidia-cuda-mps-control" "$work/tree/usr/sbin/nvidia-cuda-mps-server" \
        "$target.new/" || return 1
    mv -T "$target.new" "$target" || return 1
    echo "fetch-mps-control: $PACKAGE $found in $target" >&2
}

missing() {
    local entry
    for entry in $SERIES; do
        complete "$dir/${entry%%:*}" || echo "$entry"
    done
}

dir=${1:-.cache/mps}
# shellcheck disable=SC2034 # for apt
architecture=${2:-}
[ -n "$(missing)" ] || exit 0

mkdir -p "$dir"
exec 9>"$dir/.lock"
flock 9
wanted=$(missing) # again: another run may have fetched them meanwhile
by_hand="or put nvidia-cuda-mps-control and nvidia-cuda-mps-server of each series into $dir/<series>"

begin_to_fetch

for entry in $wanted; do
    series=${entry%%:*} suite=${entry#*:}
    from_a_mirror "$suite" "$series" "$dir/$series" ||
        fail "can't get $PACKAGE $series (Debian $suite, non-free); try again $by_hand"
done
