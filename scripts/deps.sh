#!/bin/sh
# Makes sure that the programs exist which building, testing and the demo need besides the Rust toolchain.
# As root on a machine with apt-get the missing ones are installed; otherwise one line names them all and the exit
# status is 1. Programs are looked for, not packages: any other way to have them is as good.
# An argument asks for less:
#   demo        the programs that `make demo` needs
#   packages    the programs that build and check the packages
#   build       the programs that `make build` needs, on every distribution
#   dist        the programs that `make dist` needs
#   clean_root  the programs that `make check-dist` needs
#   bench       the programs that `make bench` needs
#   machines    the programs that the tests need on the machines that they boot (scripts/machine-root.sh)
set -eu

missing=''  # what to tell the user
packages='' # what Debian calls it

lacks() { # WHAT PACKAGES
    missing="$missing${missing:+, }$1 (Debian: $2)"
    packages="$packages $2"
}

needs() { # PROGRAM PACKAGES
    command -v "$1" >/dev/null 2>&1 || lacks "$1" "$2"
}

look() {
    missing=''
    packages=''
    "look_$what"
}

look_linker() {
    # Rust links with cc, and that needs the C library's start-up files, which Debian's gcc only recommends.
    echo 'int main(void) { return 0; }' | cc -x c -o /dev/null - >/dev/null 2>&1 || lacks 'cc that links' 'gcc libc6-dev'
}

look_demo() {
    look_linker
    needs dbus-daemon dbus
}

look_build() {
    look_linker
    needs make make
    [ -x /usr/bin/python3 ] || lacks /usr/bin/python3 python3
}

look_packages() {
    look_build
    needs objdump binutils
    needs dh debhelper
    needs dpkg-buildpackage dpkg-dev
    needs lintian lintian
    needs rpmbuild rpm
    needs rpmlint rpmlint
    # Any Python with pip is enough.
    python3 -m pip --version >/dev/null 2>&1 || /usr/bin/python3 -m pip --version >/dev/null 2>&1 ||
        lacks 'python module pip' python3-pip
}

look_dist() {
    look_build
    needs git git
    needs xz xz-utils
}

look_clean_root() {
    look_packages
    needs mmdebstrap mmdebstrap
    needs unshare util-linux
}

look_bench() {
    look_build
    needs dbus-daemon dbus
    needs git git
    # Its client of the bus is written in C.
    echo '#include <systemd/sd-bus.h>' | cc -x c -fsyntax-only - >/dev/null 2>&1 || lacks systemd/sd-bus.h libsystemd-dev
}

look_tests() {
    look_bench
    needs busctl systemd
    needs systemd-analyze systemd
    needs systemd-tmpfiles systemd
    needs gdbus libglib2.0-bin
    needs setpriv util-linux
    needs script bsdutils
    needs diff diffutils
    needs flock util-linux
    # Only root can boot machines with a systemd.
    if [ "$(id -u)" -eq 0 ]; then
        needs systemd-nspawn systemd-container
        needs nsenter util-linux
        needs ps procps
        # The only program in the image of the tests' pods.
        needs busybox busybox-static
    fi
    needs dpkg-deb dpkg
    # They check the manual pages.
    needs groff groff
    needs mandoc mandoc
    # The shells for which there are completions.
    needs bash bash
    needs zsh zsh
    needs fish fish
    # It tests the installation into a directory.
    needs make make
    # It simulates a clock that jumps, for one process and its children.
    needs faketime faketime
    # The host agent's package, and the examples of docs/dbus.md and docs/json.md.
    needs go golang-go
    needs gofmt golang-go
    [ -e /usr/share/gocode/src/github.com/godbus/dbus/go.mod ] || lacks 'Go package godbus' golang-dbus-dev
    needs jq jq
    needs jsonschema python3-jsonschema
    # The system's python: another python in PATH does not find the distribution's modules.
    /usr/bin/python3 -c 'import dbus' >/dev/null 2>&1 || lacks 'python module dbus' python3-dbus
    /usr/bin/python3 -c 'import prometheus_client.openmetrics.parser' >/dev/null 2>&1 ||
        lacks 'python module prometheus_client' python3-prometheus-client
    # For the kubelet with which the device plugin is tested.
    needs protoc protobuf-compiler
    /usr/bin/python3 -c 'import google.protobuf' >/dev/null 2>&1 || lacks 'python module google.protobuf' python3-protobuf
    /usr/bin/python3 -c 'import grpc' >/dev/null 2>&1 || lacks 'python module grpc' python3-grpcio
    # For Kubernetes' types.
    /usr/bin/python3 -c 'import certifi, dateutil.parser, requests, six, urllib3' >/dev/null 2>&1 ||
        lacks 'python modules certifi, dateutil, requests, six and urllib3' \
            'python3-certifi python3-dateutil python3-requests python3-six python3-urllib3'
    # For the language of Kubernetes' policies, from PyPI.
    /usr/bin/python3 -m pip --version >/dev/null 2>&1 || lacks 'python module pip' python3-pip
    /usr/bin/python3 -c 'import gi' >/dev/null 2>&1 || lacks 'python module gi' python3-gi
    /usr/bin/python3 -c 'import yaml' >/dev/null 2>&1 || lacks 'python module yaml' python3-yaml
    /usr/bin/python3 -c 'import jsonschema' >/dev/null 2>&1 || lacks 'python module jsonschema' python3-jsonschema
}

look_machines() {
    # The engines that start containers with slices.
    needs podman podman
    needs newuidmap uidmap
    needs runc runc
    needs dockerd docker.io
    needs docker-compose docker-compose
    needs prometheus-node-exporter prometheus-node-exporter
    # For a Slurm cluster of one node.
    needs munged munge
    needs slurmctld slurmctld
    needs slurmd slurmd
    needs srun slurm-client
    needs ip iproute2
    [ -e /usr/lib/systemd/system/dbus.service ] || [ -e /lib/systemd/system/dbus.service ] ||
        lacks 'a system bus' dbus
}

what=${1:-tests}
# This script installs no toolchain, and the machines need none.
if [ "$what" != machines ] && ! command -v cargo >/dev/null 2>&1; then
    echo "missing: cargo (a Rust toolchain, 1.89 or newer)" >&2
    exit 1
fi

look
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing:$packages" >&2
    export DEBIAN_FRONTEND=noninteractive
    # The tests start the services that they need. Otherwise a package would start its services on this machine, now and at each
    # boot.
    begun=$(mktemp)
    if [ ! -e /usr/sbin/policy-rc.d ]; then
        printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
        chmod 755 /usr/sbin/policy-rc.d
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    fi
    # A mirror may fail for a moment, and another program may have the lock. An update that fails for one source does not stop the
    # script.
    for pause in 5 20 0; do
        apt-get update -qq >&2 || :
        # shellcheck disable=SC2086 # a list of words
        apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 install -y -qq --no-install-recommends $packages \
            >&2 </dev/null && break
        sleep "$pause"
    done
    [ ! -d /etc/systemd/system ] || find /etc/systemd/system -type l -newer "$begun" -delete
    rm -f "$begun"
    look
    [ -n "$missing" ] || exit 0
fi

echo "missing: $missing" >&2
exit 1
