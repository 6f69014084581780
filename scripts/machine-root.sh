#!/bin/sh
# Installs the programs that only the machines of the tests need, container engines and Slurm among them, and leaves all that
# this changes of the machine's files in DIR (.cache/machine unless given), which tests/e2e/boot.sh lays over them. The machine
# itself stays as it is. As root.
set -eu
cd "$(dirname "$0")/.."

dir=${1:-.cache/machine}
# The packages are installed on top of those that the machine has now.
made_of=$(cat scripts/deps.sh scripts/machine-root.sh /var/lib/dpkg/status 2>/dev/null | sha256sum)
[ "$(cat "$dir.made-of" 2>/dev/null)" != "$made_of" ] || exit 0

rm -rf "$dir" "$dir.made-of"
mkdir -p "$dir"
# A mount namespace of its own takes every mount away at the end, however that comes. The changes are made in memory: that works
# where / is itself an overlay, on which another can't write.
unshare --mount --propagation private sh -eu -c '
    mount -t tmpfs -o mode=755,size=4g tmpfs /mnt
    mkdir /mnt/upper /mnt/work /mnt/root
    mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root
    mount -t proc proc /mnt/root/proc
    mount --bind /dev /mnt/root/dev
    mount -t tmpfs tmpfs /mnt/root/run
    mount -t tmpfs tmpfs /mnt/root/tmp
    # The names of the mirrors are found as here.
    resolver=$(readlink -f /etc/resolv.conf)
    case $resolver in
    /run/*) mkdir -p "/mnt/root${resolver%/*}" && cp "$resolver" "/mnt/root$resolver" ;;
    esac
    chroot /mnt/root sh -s machines <"$1"
    umount /mnt/root/tmp /mnt/root/run /mnt/root/dev /mnt/root/proc
    rm -rf /mnt/upper/var/cache/apt /mnt/upper/var/lib/apt/lists
    # With the marks for what is removed.
    cp -a /mnt/upper/. "$2/"
' sh scripts/deps.sh "$dir"
echo "$made_of" >"$dir.made-of"
echo "machine-root: $(du -sh "$dir" | cut -f 1) in $dir" >&2
