#!/bin/sh
# Installs the programs that only the machines of the tests need, such as container engines and Slurm, and leaves all resulting
# changes of the machine's files in DIR (.cache/machine unless given). tests/e2e/boot.sh mounts them over the machine's files. The
# machine itself is not changed. Needs root.
set -eu
cd "$(dirname "$0")/.."

dir=${1:-.cache/machine}
# The packages are installed in addition to those of the machine.
made_of=$(cat scripts/deps.sh scripts/machine-root.sh /var/lib/dpkg/status 2>/dev/null | sha256sum)
[ "$(cat "$dir.made-of" 2>/dev/null)" != "$made_of" ] || exit 0

rm -rf "$dir" "$dir.made-of"
mkdir -p "$dir"
# With a mount namespace of its own, every mount is removed at the end, in any case. The changes are made in memory: that works
# even if / is an overlay, on which another overlay can't be written.
unshare --mount --propagation private sh -eu -c '
    mount -t tmpfs -o mode=755,size=4g tmpfs /mnt
    mkdir /mnt/upper /mnt/work /mnt/root
    mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root
    mount -t proc proc /mnt/root/proc
    mount --bind /dev /mnt/root/dev
    mount -t tmpfs tmpfs /mnt/root/run
    mount -t tmpfs tmpfs /mnt/root/tmp
    # The names of the mirrors are resolved as on this machine.
    resolver=$(readlink -f /etc/resolv.conf)
    case $resolver in
    /run/*) mkdir -p "/mnt/root${resolver%/*}" && cp "$resolver" "/mnt/root$resolver" ;;
    esac
    chroot /mnt/root sh -s machines <"$1"
    umount /mnt/root/tmp /mnt/root/run /mnt/root/dev /mnt/root/proc
    rm -rf /mnt/upper/var/cache/apt /mnt/upper/var/lib/apt/lists
    # Including the marks for removed files.
    cp -a /mnt/upper/. "$2/"
' sh scripts/deps.sh "$dir"
echo "$made_of" >"$dir.made-of"
echo "machine-root: $(du -sh "$dir" | cut -f 1) in $dir" >&2
