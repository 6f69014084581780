#!/bin/bash
# Packages of other Debian suites, through the mirror that this machine's apt uses. This file is to be sourced; it changes nothing
# of the machine, and needs no root.

KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg

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

# Makes sure that the programs for fetching exist, and makes a directory for the fetched files, in the variable scratch. The
# directory is removed when the script ends. The script that sources this file must have a function fail.
begin_to_fetch() { # PROGRAM...
    local program
    for program in apt-get dpkg-deb "$@"; do
        command -v "$program" >/dev/null || fail "needs $program; install it"
    done
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    chmod 755 "$scratch" # for apt's own user
}

# Makes apt-get use its own lists, sources and caches: then it needs no root and changes nothing of the machine.
write_apt_conf() { # WORK-DIRECTORY
    [ -z "${architecture:-}" ] || printf 'APT::Architecture "%s";\nAPT::Architectures { "%s"; };\n' "$architecture" "$architecture"
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

# Makes ready for apt-get -c WORK-DIRECTORY/apt.conf: the sources and the lists. Without a mirror the sources are this machine's.
# The variable architecture, if it is set, asks for the packages of another architecture than this machine's.
prepare_apt() { # MIRROR SUITE COMPONENT WORK-DIRECTORY
    local mirror=$1 suite=$2 component=$3 work=$4 trust=''
    # This function runs in a condition, where set -e has no effect: each step says what happens when it fails.
    mkdir -p "$work/lists/partial" "$work/deb/partial" || return 1
    # As root, apt downloads as its own user.
    [ "$(id -u)" -ne 0 ] || chown -R _apt "$work/deb" || return 1
    write_apt_conf "$work" >"$work/apt.conf" || return 1
    if [ -n "$mirror" ]; then
        # Debian's keys, if apt does not trust them by default.
        [ ! -r "$KEYRING" ] || trust="[signed-by=$KEYRING] "
        echo "deb $trust$mirror $suite $component" >"$work/sources.list" || return 1
    else
        sed -i '/^Dir::Etc/d' "$work/apt.conf" || return 1
    fi
    apt-get -qq -c "$work/apt.conf" update </dev/null
}

# Unpacks packages of a suite into WORK-DIRECTORY/tree, and leaves the packages in WORK-DIRECTORY/deb.
unpack_packages() { # MIRROR SUITE COMPONENT WORK-DIRECTORY PACKAGE...
    local work=$4 deb
    prepare_apt "$@" || return 1
    shift 4
    (cd "$work/deb" && apt-get -qq -c "$work/apt.conf" download "$@" </dev/null) || return 1
    for deb in "$work"/deb/*.deb; do
        dpkg-deb -x "$deb" "$work/tree" || return 1
    done
}

# Calls `fetch MIRROR ARGUMENT...` until it succeeds: a mirror may fail for a moment.
from_a_mirror() { # ARGUMENT...
    local pause mirror found
    mapfile -t found < <(mirrors)
    if [ ${#found[@]} -eq 0 ]; then
        echo "no Debian mirror is among this machine's apt sources" >&2
        return 1
    fi
    for pause in 5 20 0; do
        for mirror in "${found[@]}"; do
            fetch "$mirror" "$@" && return 0
        done
        sleep "$pause"
    done
    return 1
}
