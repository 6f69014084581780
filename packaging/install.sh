#!/bin/sh
# Installs what belongs to yunion-mps-daemon: `make install`, the deb and the rpm all call this, and no other list exists. The
# device plugin of Kubernetes has packages of its own: install-device-plugin.sh.
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

# Escapes three characters that have a meaning for sed.
replacement=$(printf '%s\n' "$PREFIX" | sed 's/[\\&#]/\\&/g')

put() { # MODE FILE PATH
    install -D -m "$1" "$2" "$3"
}

install_program() { # NAME COMPLETIONS
    put 755 "$BIN/$1" "$root$PREFIX/bin/$1"
    put 644 "$2/$1.bash" "$share/bash-completion/completions/$1"
    put 644 "$2/_$1" "$root$zsh/_$1"
    put 644 "$2/$1.fish" "$share/fish/vendor_completions.d/$1.fish"
}
install_program yunion-mps-daemon "$PAGES"
# yunion-mpsctl itself answers the shells.
install_program yunion-mpsctl packaging/completions
# Called by these names, it is a container runtime that wraps the runtime with the rest of the name.
for runtime in runc crun nvidia-container-runtime; do
    ln -sf yunion-mpsctl "$root$PREFIX/bin/yunion-mps-$runtime"
done

for unit in yunion-mps-daemon.service yunion-mps-metrics.service yunion-mps-metrics.timer; do
    installed=$root$PREFIX/lib/systemd/system/$unit
    put 644 "systemd/$unit" "$installed"
    # ExecStart, ExecReload and Documentation name installed files.
    [ "$PREFIX" = /usr ] || sed -i -E "s#/usr/(bin/yunion|share/doc/yunion)#$replacement/\1#" "$installed"
done
put 644 systemd/yunion-mps-daemon.tmpfiles.conf "$root$PREFIX/lib/tmpfiles.d/yunion-mps-daemon.conf"
put 644 systemd/yunion-mps-daemon.sysusers.conf "$root$PREFIX/lib/sysusers.d/yunion-mps-daemon.conf"

for catalog in packaging/journal/*.catalog; do
    put 644 "$catalog" "$root$PREFIX/lib/systemd/catalog/${catalog##*/}"
done

put 644 config/io.yunion.Mps1.conf "$share/dbus-1/system.d/io.yunion.Mps1.conf"
for interface in config/io.yunion.Mps1.*.xml; do
    put 644 "$interface" "$share/dbus-1/interfaces/${interface##*/}"
done

put 644 "$PAGES/yunion-mpsctl.1" "$share/man/man1/yunion-mpsctl.1"
put 644 packaging/man/yunion-mps-host.conf.5 "$share/man/man5/yunion-mps-host.conf.5"
ln -sf yunion-mps-host.conf.5 "$share/man/man5/yunion-mps-host_container_device.yml.5"
put 644 "$PAGES/yunion-mps-daemon.8" "$share/man/man8/yunion-mps-daemon.8"
put 644 packaging/man/yunion-mps-runc.8 "$share/man/man8/yunion-mps-runc.8"
for page in yunion-mpsctl.1 yunion-mps-host.conf.5 yunion-mps-daemon.8 yunion-mps-runc.8; do
    put 644 "packaging/man/zh_CN/$page" "$share/man/zh_CN/man${page##*.}/$page"
done
ln -sf yunion-mps-host.conf.5 "$share/man/zh_CN/man5/yunion-mps-host_container_device.yml.5"
for runtime in crun nvidia-container-runtime; do
    for pages in man man/zh_CN; do
        ln -sf yunion-mps-runc.8 "$share/$pages/man8/yunion-mps-$runtime.8"
    done
done

for file in README.md README.zh-CN.md CHANGELOG.md; do
    put 644 "$file" "$doc/$file"
done
find docs -type f | while read -r file; do
    put 644 "$file" "$doc/$file"
done
put 644 "$PAGES/copyright" "$doc/copyright"
for example in host.conf host_container_device.yml; do
    put 644 "config/$example" "$doc/$example.example"
done
