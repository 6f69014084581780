#!/bin/sh
# Runs COMMAND where programs for aarch64 find their C library beside that of this machine: tests/arm64/emulated.sh runs it.
#   tests/arm64/libraries.sh COMMAND...
# (QEMU_LD_PREFIX would do so too, but then the emulator opens other directories than the programs ask for.)
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
of_arm64=$here/.cache/arm64/root/usr/lib/aarch64-linux-gnu
lib=$(readlink -f /lib)

mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir -p /mnt/lib/aarch64-linux-gnu
ln -s aarch64-linux-gnu/ld-linux-aarch64.so.1 /mnt/lib/
mount -t overlay -o "lowerdir=/mnt/lib:$lib" overlay "$lib"
mount --bind "$of_arm64" "$lib/aarch64-linux-gnu"
umount --lazy /mnt
exec "$@"
