#!/bin/sh
# Runs COMMAND, as root, where the kernel starts programs for aarch64 by themselves, with the emulator of scripts/arm64-root.sh:
#   tests/arm64/emulated.sh COMMAND...
#
# The kernel knows the emulator only in a user namespace, which has all users of the machine, so nothing of the machine changes.
# Mounts and processes are in namespaces of their own too: at the end of COMMAND every process ends, and every mount is removed.
set -eu
here=$(cd "$(dirname "$0")/../.." && pwd)
emulator=$here/.cache/arm64/qemu-aarch64

# The first bytes of a program for aarch64, and which bits of them count.
magic='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'

directory=$(mktemp -d)
mkfifo "$directory/go"
# If this script is killed, everything in the namespaces ends: their first process ends with its parent.
setpriv --pdeathsig KILL unshare --user --mount --pid --ipc --fork --propagation private sh -euc '
    # Until the users are there.
    read -r go <"$1"
    mount -t proc proc /proc
    mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc
    # F: the emulator is opened now, so it is there in every root. P: programs see the name by which they were called. C: they get
    # the rights of their files, as without an emulator.
    printf "%s\n" ":mps-aarch64:M::$2:$3:$4:FPC" >/proc/sys/fs/binfmt_misc/register
    shift 4
    # Once more: a process that gets rights, as this one did when the users were there, forgets it.
    exec setpriv --pdeathsig KILL "$@"' sh "$directory/go" "$magic" "$mask" "$emulator" "$@" &
child=$!
own=$(readlink /proc/self/ns/user)
until [ "$(readlink "/proc/$child/ns/user")" != "$own" ]; do
    kill -0 "$child" 2>/dev/null || break
    sleep 0.01
done
for map in uid_map gid_map; do
    echo '0 0 4294967295' >"/proc/$child/$map"
done
echo >"$directory/go"
rm -r "$directory"
status=0
wait "$child" || status=$?
exit "$status"
