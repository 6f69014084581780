#!/bin/sh
# Installs what belongs to yunion-mps-daemon: `make install`, the deb and the rpm all call this, and no other list exists.
#   DESTDIR   put before every path; nothing by default
#   PREFIX    /usr by default
#   BIN       where the two programs are; target/release by default
#   PAGES     where `make build` has written manual pages and completions; target/pages by default
#   ZSH_COMPLETIONS  where zsh looks for them; $PREFIX/share/zsh/site-functions by default, Debian has another place
# (ZSH alone belongs to zsh's users: Oh My Zsh exports it.)
set -eu
cd "$(dirname "$0")/.."

PREFIX=${PREFIX:-/usr}
BIN=${BIN:-target/release}
PAGES=${PAGES:-target/pages}
zsh=${ZSH_COMPLETIONS:-$PREFIX/share/zsh/site-functions}
root=${DESTDIR:-}
share=$root$PREFIX/share
doc=$share/doc/yunion-mps-daemon

put() { # MODE FILE PATH
    install -D -m "$1" "$2" "$3"
}

for program in yunion-mps-daemon yunion-mpsctl; do
    put 755 "$BIN/$program" "$root$PREFIX/bin/$program"
    put 644 "$PAGES/$program.bash" "$share/bash-completion/completions/$program"
    put 644 "$PAGES/_$program" "$root$zsh/_$program"
    put 644 "$PAGES/$program.fish" "$share/fish/vendor_completions.d/$program.fish"
done

unit=$root$PREFIX/lib/systemd/system/yunion-mps-daemon.service
put 644 systemd/yunion-mps-daemon.service "$unit"
# ExecStart, ExecReload and Documentation name installed files.
[ "$PREFIX" = /usr ] || sed -i -E "s#/usr/(bin/yunion|share/doc/yunion)#$PREFIX/\1#" "$unit"
put 644 systemd/yunion-mps-daemon.tmpfiles.conf "$root$PREFIX/lib/tmpfiles.d/yunion-mps-daemon.conf"

put 644 config/io.yunion.Mps1.conf "$share/dbus-1/system.d/io.yunion.Mps1.conf"
for interface in config/io.yunion.Mps1.*.xml; do
    put 644 "$interface" "$share/dbus-1/interfaces/${interface##*/}"
done

put 644 "$PAGES/yunion-mpsctl.1" "$share/man/man1/yunion-mpsctl.1"
put 644 packaging/man/yunion-mps-host.conf.5 "$share/man/man5/yunion-mps-host.conf.5"
ln -sf yunion-mps-host.conf.5 "$share/man/man5/yunion-mps-host_container_device.yml.5"
put 644 "$PAGES/yunion-mps-daemon.8" "$share/man/man8/yunion-mps-daemon.8"

put 644 README.md "$doc/README.md"
put 644 CHANGELOG.md "$doc/CHANGELOG.md"
for file in docs/*; do
    put 644 "$file" "$doc/$file"
done
put 644 "$PAGES/copyright" "$doc/copyright"
for example in host.conf host_container_device.yml; do
    put 644 "config/$example" "$doc/$example.example"
done
