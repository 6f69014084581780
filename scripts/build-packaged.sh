#!/bin/bash
# Builds the content of the packages: the programs, against the C library of an old distribution, in target/packaged; the manual
# pages, completions and the copyright file in target/pages. Nothing that is up to date is built again. With ARCH=arm64
# the programs are in target/packaged/arm64.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=packaging/architecture.sh
. packaging/architecture.sh

# The oldest C library with which the programs run: that of RHEL 8, Debian 10 and openEuler 20.03. Their systemd is as old.
GLIBC=$(cat packaging/glibc-version)
MAX_DAEMON_BYTES=$((5 * 1024 * 1024))

fail() {
    echo "build-packaged: $*" >&2
    exit 1
}

host=$(rustc -vV | sed -n 's/^host: //p')
case $host in
x86_64-unknown-linux-gnu | aarch64-unknown-linux-gnu) ;;
*) fail "packages are for x86_64 and aarch64 with the GNU C library; here is $host. make build and make install do" ;;
esac
target=$host
[ -z "$FOREIGN" ] || target=$RPM_ARCH-unknown-linux-gnu

scripts/zigbuild.sh "$target" --release --bins --package yunion-mps-daemon --package yunion-mpsctl \
    --package yunion-mps-device-plugin
mkdir -p "target/packaged$FOREIGN"
for program in yunion-mps-daemon yunion-mpsctl yunion-mps-device-plugin; do
    built=target/$target/release/$program
    newest=$(readelf --wide --dyn-syms "$built" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -n 1)
    [ "$(printf '%s\n' "$newest" "GLIBC_$GLIBC" | sort -V | tail -n 1)" = "GLIBC_$GLIBC" ] ||
        fail "$built needs $newest, newer than GLIBC_$GLIBC"
    # The packages depend on no other library.
    others=$(readelf -d "$built" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        sed -E '/^lib(c|m|dl|rt|pthread)\.so\.[0-9]+$|^ld-linux-/d')
    [ -z "$others" ] || fail "$built needs $others, which packages don't depend on"
    cp -p "$built" "target/packaged$FOREIGN/"
    echo "$program: $(stat -c %s "$built") bytes, $newest"
done
bytes=$(stat -c %s "target/packaged$FOREIGN/yunion-mps-daemon")
[ "$bytes" -lt "$MAX_DAEMON_BYTES" ] || fail "yunion-mps-daemon has $bytes bytes, the limit is $MAX_DAEMON_BYTES"

# With the features of the whole workspace, so that it shares the builds of the tests.
cargo build --quiet --workspace --locked --bin yunion-mps-pages
scripts/pages.sh target/debug/yunion-mps-pages
