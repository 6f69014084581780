#!/bin/sh
# Installs what belongs to yunion-mps-device-plugin, which has packages of its own: `make install`, the deb and the rpm all call
# this. DESTDIR, PREFIX, BIN and PAGES as for packaging/install.sh; its page in docs is installed there.
set -eu
cd "$(dirname "$0")/.."

PREFIX=${PREFIX:-/usr}
BIN=${BIN:-target/release}
PAGES=${PAGES:-target/pages}
root=${DESTDIR:-}$PREFIX
name=yunion-mps-device-plugin

# Escapes three characters that have a meaning for sed.
replacement=$(printf '%s\n' "$PREFIX" | sed 's/[\\&#]/\\&/g')

put() { # MODE FILE PATH
    install -D -m "$1" "$2" "$3"
}

put 755 "$BIN/$name" "$root/bin/$name"
unit=$root/lib/systemd/system/$name.service
put 644 "systemd/$name.service" "$unit"
# ExecStart and Documentation name installed files.
[ "$PREFIX" = /usr ] || sed -i -E "s#/usr/(bin/yunion|share/doc/yunion)#$replacement/\1#" "$unit"
put 644 "$PAGES/$name.8" "$root/share/man/man8/$name.8"
put 644 "packaging/man/zh_CN/$name.8" "$root/share/man/zh_CN/man8/$name.8"
put 644 "$PAGES/copyright" "$root/share/doc/$name/copyright"
