#!/bin/bash
# On a host with a real GPU, its driver and nvcc: clients that see the pipe directory read-only, as a container does, need no
# more than that, whatever becomes of them. Compute modes are not touched. Exit status 1 if anything is not as expected.
#
#   tests/gpu/readonly.sh BINARIES [DIR]   as serve.sh
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$@"
contained() { # COMMAND...
    # shellcheck disable=SC2016 # the inner shell's
    timeout 60 unshare --mount bash -c 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" &&
        ! touch "$0/new" 2>/dev/null && exec "$@"' "$dir/pipe" "$@"
}

build_client
host_conf 4
start_service
ready
slice=$(a_slice)
yunion-mpsctl env "$slice" --format docker
eval "$(yunion-mpsctl env "$slice")"
for user in root nobody; do
    as=()
    [ $user = root ] || as=("${nobody[@]}")
    for work in 'props' 'alloc 60000' 'hold 3'; do
        # shellcheck disable=SC2086 # words
        contained "${as[@]}" "$client" $work
        result "$work as $user" $? 0
    done
done
contained "$client" hold 30 &
hit=$!
sleep 2
contained "${nobody[@]}" "$client" fault
result "a fault" $? 4
wait "$hit"
result "the client beside it" $? 4
sleep 1
contained "$client" hold 8 &
neighbour=$!
contained "${nobody[@]}" "$client" long 20 &
long=$!
sleep 3
pid=$(yunion-mpsctl clients --json |
    python3 -c 'import json,sys; print([one["pid"] for one in json.load(sys.stdin) if one["uid"] == 65534][0])')
yunion-mpsctl terminate "$pid"
result "terminate in a long kernel" $? 0
wait "$long"
result "the client in it" $? 4
wait "$neighbour"
result "its neighbour" $? 0
stop_service
result "exit status of the daemon" $? 0
echo "##### failures: $failures"
[ "$failures" -eq 0 ]
