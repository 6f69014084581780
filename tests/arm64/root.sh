#!/bin/sh
# Lays memory over the files of scripts/arm64-root.sh, mounts what programs expect, and stays in there: tests/arm64/emulated.sh
# runs it, and tests/it/arm64.rs enters its namespaces. What is written there is gone at the end.
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)

mount -t tmpfs -o mode=755,size=1g tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
root=/mnt/root
mount -t overlay -o "userxattr,lowerdir=$here/.cache/arm64/root,upperdir=/mnt/upper,workdir=/mnt/work" overlay "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mkdir -p "$root/srv/tree" "$root/run/dbus"
mount --bind "$here" "$root/srv/tree"
touch "$root/run/is-up"
# The first process of these namespaces is the parent of all that have lost theirs: wait takes note of their ends.
exec chroot "$root" sh -c 'sleep infinity & wait'
