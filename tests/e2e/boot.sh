#!/bin/sh
# Boots a machine, systemd as PID 1 over an overlay of this host's files, and stays until it is powered off.
#
# To be run in a mount namespace of its own, which is what takes every mount away at the end, however that comes.
set -eu

directory=$1 # ours: stage/ is laid over the host's files, mnt/ is where they are mounted
name=$2      # the machine's, and its control group's
unified=$3   # 1: the unified control group hierarchy, 0: the legacy one
# Another distribution's files instead, below a directory; its C library must be at least as new as this host's.
base=${E2E_ROOT:-/}
# FROM:TO shows a folder of this host, read-only, at a place in the machine: programs that would fill its memory.
programs=${E2E_PROGRAMS:-}
# The files that scripts/machine-root.sh has installed, over those of this host.
installed=$(dirname "$0")/../../.cache/machine

fail() {
    echo "boot.sh: $*" >&2
    exit 1
}

# A control group of its own: systemd-nspawn makes groups with fixed names below the one it is in.
for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/systemd /sys/fs/cgroup/unified /sys/fs/cgroup/freezer; do
    [ -f "$hierarchy/cgroup.procs" ] || continue
    mkdir "$hierarchy/$name"
    echo $$ >"$hierarchy/$name/cgroup.procs"
done

# Changes are made in memory: that works even if / is an overlay, on which another overlay can't be written.
mnt=$directory/mnt
root=$mnt/root
mount -t tmpfs -o mode=755,size=3g tmpfs "$mnt"
mkdir "$mnt/upper" "$mnt/work" "$mnt/installed" "$root"
# A copy: no layer of an overlay may lie within another one.
if [ -z "${E2E_ROOT:-}" ]; then
    [ -d "$installed" ] || fail "$installed is missing; scripts/machine-root.sh makes it"
    cp -a "$installed/." "$mnt/installed"
fi
mount -t overlay -o "lowerdir=$mnt/installed:$base,upperdir=$mnt/upper,workdir=$mnt/work" overlay "$root"
# The files that systemd-nspawn leaves in /run belong to this test too.
mount -t tmpfs -o mode=755 tmpfs /run

[ -x "$root/usr/lib/systemd/systemd" ] || [ -x "$root/lib/systemd/systemd" ] || fail "$base has no systemd"

# No service of the host's, no timer, no login: what is left is systemd, its journal and the bus.
rm -rf "$root/etc/systemd/system" "$root/etc/systemd/system.conf.d" "$root/etc/systemd/journald.conf.d" \
    "$root/etc/systemd/system-generators" "$root/etc/fstab" "$root/var/log/journal" "$root/var/lib/systemd"
mkdir -p "$root/etc/systemd/system" "$root/etc/systemd/system-generators" "$root/var/log/journal"
for unit in getty.target timers.target remote-fs.target systemd-firstboot.service systemd-resolved.service \
    systemd-networkd.service systemd-timesyncd.service systemd-udevd.service; do
    ln -s /dev/null "$root/etc/systemd/system/$unit"
done
# An image for containers may forbid packages to start services, and leave out their documentation; a host doesn't.
rm -f "$root/usr/sbin/policy-rc.d"
for file in $(grep -ls '^path-exclude' "$root"/etc/dpkg/dpkg.cfg.d/* || :); do
    rm -f "$file"
done
# Every package with a manual page would make the index of all pages again.
rm -f "$root/var/lib/man-db/auto-update"
# The machine need not survive a crash, so no write has to wait for a disk.
mkdir -p "$root/etc/dpkg/dpkg.cfg.d"
echo force-unsafe-io >"$root/etc/dpkg/dpkg.cfg.d/mps-e2e"
# Scripts in /etc/init.d would become services.
ln -s /dev/null "$root/etc/systemd/system-generators/systemd-sysv-generator"
ln -s /usr/lib/systemd/system/multi-user.target "$root/etc/systemd/system/default.target"
[ -e "$root/usr/lib/systemd/system" ] ||
    ln -sf /lib/systemd/system/multi-user.target "$root/etc/systemd/system/default.target"
# Its own, and a whole one: an empty one would make this a first boot, at which systemd enables what it finds.
rm -f "$root/etc/machine-id" "$root/var/lib/dbus/machine-id"
tr -d - </proc/sys/kernel/random/uuid >"$root/etc/machine-id"

cp -R --preserve=mode "$directory/stage/." "$root/"

# Nothing of the caller's service manager, if it has one.
unset NOTIFY_SOCKET JOURNAL_STREAM INVOCATION_ID WATCHDOG_PID WATCHDOG_USEC LISTEN_FDS LISTEN_PID
export SYSTEMD_NSPAWN_UNIFIED_HIERARCHY="$unified" TERM=dumb
status=133
# 133 is a machine that wants to be rebooted.
while [ "$status" -eq 133 ]; do
    status=0
    # If this process is killed, the machine ends too: its PID 1, and with that everything else. Its systemd may load programs
    # into the kernel: without that, units could use any device.
    setpriv --pdeathsig KILL systemd-nspawn --quiet --register=no --keep-unit --boot --private-network \
        --system-call-filter=bpf --capability=CAP_BPF ${programs:+"--bind-ro=$programs"} \
        --link-journal=no --console=read-only --machine="$name" --directory="$root" || status=$?
done
exit "$status"
