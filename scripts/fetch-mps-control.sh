#!/bin/bash
# Fetches the real MPS control daemons that the tests run against, into DIR/535, DIR/550 and DIR/555 (.cache/mps unless
# given): nvidia-cuda-mps-control and, beside it, nvidia-cuda-mps-server. Nothing that is there already is fetched again.
# They come from Debian's package nvidia-cuda-mps, through the mirror that this machine's apt uses. The licence is
# NVIDIA's: they are for testing on this machine only and never part of this repository or of a package.
# A control daemon looks its server up in PATH and nowhere else: put its directory first there.
set -euo pipefail
umask 022

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

# The Debian mirrors that apt uses; the security archive has none of these suites.
mirrors() {
    local id='' codename=''
    # shellcheck disable=SC1091 # the machine's own file
    id=$(. /etc/os-release && echo "${ID:-}")
    # shellcheck disable=SC1091
    codename=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")
    [ "$id" = debian ] || return 0
    # Without release information it also answers on a machine that never ran apt-get update.
    # shellcheck disable=SC2016 # apt's variables, not the shell's
    apt-get indextargets --no-release-info --format '$(SITE)|$(RELEASE)|$(COMPONENT)' 'Created-By: Packages' |
        awk -F'|' -v codename="$codename" '
            $1 !~ /security/ && $3 == "main" &&
            ($2 == codename || $2 ~ /^(oldstable|stable|testing|unstable|sid)$/) && !seen[$1]++ { print $1 }'
}

# Makes apt-get use lists, sources and caches of its own: then it neither needs root nor touches the machine's.
write_apt_conf() { # WORK-DIRECTORY
    cat <<END
Dir::Etc::sourcelist "$1/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "/dev/null";
Dir::State::Lists "$1/lists";
Dir::State::status "/dev/null";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Acquire::Languages "none";
Acquire::Retries "3";
// A mirror that stands still will do: what is wanted is old, and its signature is checked all the same.
Acquire::Check-Valid-Until "false";
// The machine's hooks are for the machine's lists.
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
END
}

fetch() { # MIRROR SUITE SERIES TARGET-DIRECTORY
    local mirror=$1 suite=$2 series=$3 target=$4 work="$scratch/$3" trust='' deb found
    # In a condition, where this function runs, set -e is off: each step says itself what its failure means.
    mkdir -p "$work/lists/partial" "$work/deb" || return 1
    # apt's own user downloads for root.
    [ "$(id -u)" -ne 0 ] || chown _apt "$work/deb" || return 1
    # Debian's keys, where apt doesn't trust them by default.
    [ ! -r "$KEYRING" ] || trust="[signed-by=$KEYRING] "
    echo "deb $trust$mirror $suite non-free" >"$work/sources.list" || return 1
    write_apt_conf "$work" >"$work/apt.conf" || return 1
    apt-get -qq -c "$work/apt.conf" update </dev/null || return 1
    (cd "$work/deb" && apt-get -qq -c "$work/apt.conf" download "$PACKAGE" </dev/null) || return 1
    deb=$(find "$work/deb" -name '*.deb')
    found=$(dpkg-deb -f "$deb" Version) || return 1
    case $found in
    "$series".*) ;;
    *) fail "$suite has $PACKAGE $found now, not $series: SERIES in $0 must name a suite that has $series" ;;
    esac
    dpkg-deb -x "$deb" "$work/tree" || return 1
    # Into place in one step, within one file system: what has its final name is complete.
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

KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
dir=${1:-.cache/mps}
[ -n "$(missing)" ] || exit 0

mkdir -p "$dir"
exec 9>"$dir/.lock"
flock 9
wanted=$(missing) # again: another run may have fetched them meanwhile
by_hand="or put nvidia-cuda-mps-control and nvidia-cuda-mps-server of each series into $dir/<series>"

for program in apt-get dpkg-deb; do
    command -v "$program" >/dev/null || fail "needs $program; install it $by_hand"
done
mapfile -t found_mirrors < <(mirrors)
[ ${#found_mirrors[@]} -gt 0 ] || fail "no Debian mirror among this machine's apt sources; add one $by_hand"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch" # for apt's own user

for entry in $wanted; do
    series=${entry%%:*} suite=${entry#*:} done=no
    # A mirror may hiccup.
    for pause in 5 20 0; do
        for mirror in "${found_mirrors[@]}"; do
            if fetch "$mirror" "$suite" "$series" "$dir/$series"; then
                done=yes
                break 2
            fi
            rm -rf "${scratch:?}/$series"
        done
        sleep "$pause"
    done
    [ $done = yes ] || fail "can't get $PACKAGE $series (Debian $suite, non-free) from ${found_mirrors[*]}; try again $by_hand"
done
