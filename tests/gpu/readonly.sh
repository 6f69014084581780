#!/bin/bash
# On a host with a real GPU, its driver and nvcc: clients that see the pipe directory read-only, as a container does, need no
# more than that, whatever becomes of them. Compute modes are not touched. Exit status 1 if anything is not as expected.
#
#   tests/gpu/readonly.sh BINARIES [DIR]   as serve.sh
set -u
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "$1" && pwd)
dir=${2:-$(mktemp -d /tmp/mps-gpu.XXXXXX)}
mkdir -p "$dir/etc"
export PATH=$bin:$PATH RUNTIME_DIRECTORY=$dir/run
failures=0
result() { # WHAT FOUND EXPECTED
    if [ "$2" = "$3" ]; then echo "  ok: $1 is $2"; else
        echo "  FAILED: $1 is $2, not $3"
        failures=$((failures + 1))
    fi
}
contained() { # COMMAND...
    # shellcheck disable=SC2016 # the inner shell's
    timeout 60 unshare --mount bash -c 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" &&
        ! touch "$0/new" 2>/dev/null && exec "$@"' "$dir/pipe" "$@"
}
nobody=(setpriv --reuid=65534 --regid=65534 --clear-groups --)

[ -x "$dir/client" ] || nvcc -O2 -arch=native -o "$dir/client" "$here/client.cu" || exit 1
client=$dir/client
cat >"$dir/etc/host.conf" <<END
enable_cuda_mps: true
cuda_mps_replicas: 4
cuda_mps_set_compute_mode: false
cuda_mps_pipe_directory: $dir/pipe
cuda_mps_log_directory: $dir/log
END
yunion-mps-daemon --config "$dir/etc/host.conf" >"$dir/daemon.log" 2>&1 &
daemon=$!
for _ in $(seq 600); do
    yunion-mpsctl status --json 2>/dev/null | grep -q '"state": *"ready"' && break
    sleep 0.05
done
slice=$(yunion-mpsctl list --json | python3 -c 'import json,sys; print(json.load(sys.stdin)[1]["addr"])')
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
kill -TERM "$daemon"
wait "$daemon"
result "exit status of the daemon" $? 0
echo "##### failures: $failures"
[ "$failures" -eq 0 ]
