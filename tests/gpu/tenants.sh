#!/bin/bash
# On a host with a real GPU, its driver and nvcc: tenants in mount namespaces that have the directory of their slice and
# nothing else of the service are served with its limits, can't command the control daemon, and are served again after
# its death. Compute modes are not touched. Exit status 1 if anything is not as expected.
#
#   tests/gpu/tenants.sh BINARIES [DIR]   as serve.sh
set -u
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "$1" && pwd)
dir=${2:-$(mktemp -d /tmp/mps-gpu.XXXXXX)}
mkdir -p "$dir/etc"
chmod 755 "$dir"
export PATH=$bin:$PATH RUNTIME_DIRECTORY=$dir/run
failures=0
say() { printf '\n##### %s [%s]\n' "$*" "$(date +%H:%M:%S.%3N)"; }
result() { # SUBJECT FOUND EXPECTED
    if [ "$2" = "$3" ]; then echo "  ok: $1 is $2"; else
        echo "  FAILED: $1 is $2, not $3"
        failures=$((failures + 1))
    fi
}
contained() { # COMMAND...: with the slice's environment, its directory at /run/yunion-mps, and a /dev/shm of its own
    # shellcheck disable=SC2016 # the inner shell's
    timeout 120 unshare --mount --ipc bash -c 'set -e
        mount --make-rprivate /
        mount --bind "$0" /mnt
        mount -t tmpfs tmpfs /run
        mkdir /run/yunion-mps
        mount --bind /mnt /run/yunion-mps
        mount -o remount,bind,ro /run/yunion-mps
        umount /mnt
        mount -t tmpfs tmpfs "$1"
        mount -t tmpfs tmpfs /dev/shm
        shift
        exec "$@"' "$host" "$dir/pipe" "${environment[@]}" "$@"
}
nobody=(setpriv --reuid=65534 --regid=65534 --clear-groups --)
control() { pgrep -f '^[^ ]*nvidia-cuda-mps-control -f'; }
ask() { echo "$*" | CUDA_MPS_PIPE_DIRECTORY=$dir/pipe timeout 10 nvidia-cuda-mps-control; }
ready() { # until the state is ready
    for _ in $(seq 600); do
        yunion-mpsctl status --json 2>/dev/null | grep -q '"state": *"ready"' && return
        sleep 0.05
    done
    echo "NOT READY"
    yunion-mpsctl status
}

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
ready
slice=$(yunion-mpsctl list --json | python3 -c 'import json,sys; print(json.load(sys.stdin)[1]["addr"])')
yunion-mpsctl env "$slice" --format docker
host=$(yunion-mpsctl env "$slice" --format docker | sed -n 's/^--volume=\(.*\):\/run\/yunion-mps:ro$/\1/p')
result "what the directory has" "$(ls -A "$host")" control
mapfile -t environment < <(yunion-mpsctl env "$slice" --format docker | sed -n 's/^--env=//p' | grep -v '^NVIDIA_')
environment=(env "CUDA_VISIBLE_DEVICES=$(nvidia-smi --query-gpu=uuid --format=csv,noheader | head -1)" "${environment[@]}")

say "tenants with their slice's directory alone"
for user in root nobody; do
    as=()
    [ $user = root ] || as=("${nobody[@]}")
    said=$(contained "${as[@]}" "$client" props 2>&1)
    echo "  $said"
    result "the threads of $user" "$(grep -o 'sms [0-9]*' <<<"$said")" "sms 32"
    said=$(contained "${as[@]}" "$client" alloc 60000 2>&1)
    echo "  $said"
    result "the memory of $user is limited" "$(grep -c 'stopped at 3[45][0-9]* MiB' <<<"$said")" 1
done

say "their commands"
before=$(control)
percentage=$(ask get_default_active_thread_percentage)
memory=$(ask get_default_device_pinned_mem_limit 0)
server=$(ask get_server_list | head -1)
for user in root nobody; do
    as=()
    [ $user = root ] || as=("${nobody[@]}")
    for command in "set_default_active_thread_percentage 100" "set_default_device_pinned_mem_limit 0 100G" \
        "set_active_thread_percentage $server 100" "set_device_pinned_mem_limit $server 0 100G" "quit -t 1"; do
        echo "  $user: $command: $(contained "${as[@]}" bash -c "echo '$command' | timeout 20 nvidia-cuda-mps-control" 2>&1 | tr '\n' ' ')"
    done
done
# Root with the socket alone changes a running server's limits, and the next check sets them back.
yunion-mpsctl reload
sleep 1
ready
result "the default percentage" "$(ask get_default_active_thread_percentage)" "$percentage"
result "the default memory limit" "$(ask get_default_device_pinned_mem_limit 0)" "$memory"
result "the server's percentage" "$(ask get_active_thread_percentage "$server")" "$percentage"
result "the server's memory limit" "$(ask get_device_pinned_mem_limit "$server" 0)" "$memory"
result "the control daemon" "$(control)" "$before"

say "the same mounted directory after the control daemon's death"
# shellcheck disable=SC2016 # the inner shell's
contained bash -c '"$0" props; touch "$1/first"; until [ -e "$1/go" ]; do sleep 0.05; done; "$0" props' "$client" "$dir" \
    >"$dir/kept.log" 2>&1 &
kept=$!
until [ -e "$dir/first" ]; do sleep 0.05; done
kill -KILL "$before"
for _ in $(seq 200); do [ "$(control)" = "$before" ] || break; sleep 0.05; done
sleep 0.5
ready
result "the control daemon is another one" "$([ "$(control)" != "$before" ] && echo yes)" yes
touch "$dir/go"
wait "$kept"
sed 's/^/  /' "$dir/kept.log"
result "both times it was limited" "$(grep -c 'sms 32' "$dir/kept.log")" 2

say "stop"
kill -TERM "$daemon"
wait "$daemon"
result "the daemon's status" $? 0
say "what the service said"
cat "$dir/daemon.log"
exit $((failures > 0))
