#!/bin/bash
# On a host with a real GPU, its driver and nvcc: what running clients notice of the service's deaths, reloads and repairs.
# The compute mode is left alone.
#
#   tests/gpu/survive.sh BINARIES [DIR]   as serve.sh
set -u
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "$1" && pwd)
dir=${2:-$(mktemp -d /tmp/mps-gpu.XXXXXX)}
mkdir -p "$dir/etc"
export PATH=$bin:$PATH RUNTIME_DIRECTORY=$dir/run
say() { printf '\n##### %s [%s]\n' "$*" "$(date +%H:%M:%S.%3N)"; }
show() { echo "\$ $*"; timeout 90 "$@"; echo "  rc=$?"; }
configure() {
    cat >"$dir/etc/host.conf" <<END
enable_cuda_mps: true
cuda_mps_replicas: $1
cuda_mps_set_compute_mode: false
cuda_mps_pipe_directory: $dir/pipe
cuda_mps_log_directory: $dir/log
cuda_mps_fault_grace: 5
END
}
start() {
    yunion-mps-daemon --config "$dir/etc/host.conf" >>"$dir/daemon.log" 2>&1 &
    daemon=$!
}
ready() { # until the state is ready
    for _ in $(seq 600); do
        yunion-mpsctl status --json 2>/dev/null | grep -q '"state": *"ready"' && return
        sleep 0.05
    done
    echo "NOT READY"
    yunion-mpsctl status
}
control() { pgrep -f '^[^ ]*nvidia-cuda-mps-control -f'; }

[ -x "$dir/client" ] || nvcc -O2 -arch=native -o "$dir/client" "$here/client.cu" || exit 1
client=$dir/client
configure 4
start
ready
slice=$(yunion-mpsctl list --json | python3 -c 'import json,sys; print(json.load(sys.stdin)[1]["addr"])')
gpu=${slice%-*}

say "a client computes for ${HOLD:-60} s while the service is killed three times and reloaded twice"
echo "control daemon $(control)"
yunion-mpsctl run "$slice" -- "$client" hold "${HOLD:-60}" &
holder=$!
for round in 1 2 3; do
    sleep 4
    kill -KILL "$daemon"
    wait "$daemon" 2>/dev/null
    echo "killed, round $round; control daemon $(control)"
    sleep 1
    start
    ready
    echo "ready again; control daemon $(control)"
done
for replicas in 2 8; do
    configure $replicas
    kill -HUP "$daemon"
    sleep 1
    ready
    echo "reloaded with $replicas slices; control daemon $(control)"
    show yunion-mpsctl run "$gpu-0" -- "$client" props
done
wait "$holder"
echo "the client of ${HOLD:-60} s: rc=$?"

say "a faulting client and a bystander"
yunion-mpsctl run "$gpu-0" -- "$client" hold 20 &
bystander=$!
sleep 2
show yunion-mpsctl run "$gpu-1" -- "$client" fault
wait "$bystander"
echo "bystander rc=$?"
sleep 1
ready
show yunion-mpsctl run "$gpu-0" -- "$client" props
yunion-mpsctl status | tail -n 8

say "a faulting client and one that does not exit; the grace is 5 s"
yunion-mpsctl run "$gpu-0" -- "$client" stubborn 40 &
stubborn=$!
sleep 2
show yunion-mpsctl run "$gpu-1" -- "$client" fault
sleep 1
yunion-mpsctl status | grep -E '^State|^Reason'
show yunion-mpsctl run "$gpu-1" -- "$client" props
began=$(date +%s.%3N)
ready
echo "ready again $(echo "$(date +%s.%3N) - $began" | bc 2>/dev/null || python3 -c "import time; print(round(time.time() - $began, 1))") s later"
show yunion-mpsctl run "$gpu-1" -- "$client" props
yunion-mpsctl status | tail -n 12
kill "$stubborn"
wait "$stubborn"

for way in terminate ctrl-c; do
    for round in 1 2 3; do
        say "two clients, one in a kernel of 20 s, ended by $way, round $round"
        yunion-mpsctl run "$gpu-0" -- "$client" hold 7 &
        bystander=$!
        # A shell's background jobs ignore SIGINT, and so would this one.
        env --default-signal=INT yunion-mpsctl run "$gpu-1" -- "$client" long 20 >"$dir/long" 2>&1 &
        long=$!
        for _ in $(seq 100); do grep -q begins "$dir/long" && break; sleep 0.05; done
        sleep 1
        if [ $way = terminate ]; then
            show yunion-mpsctl terminate "$(sed -n 's/.*pid \([0-9]*\) begins/\1/p' "$dir/long")"
        else
            kill -INT "$long"
        fi
        wait "$long"
        echo "the client in the long kernel: rc=$? $(tail -n 1 "$dir/long")"
        wait "$bystander"
        echo "the bystander: rc=$?"
    done
done

say "stop"
kill -TERM "$daemon"
wait "$daemon"
echo "daemon rc=$?"
ps -eo pid,stat,args | grep nvidia-cuda-mps | grep -v -e grep -e ' Z' || echo "no process is left"
nvidia-smi --query-gpu=index,compute_mode,memory.used --format=csv
say "what the service said"
grep -vE 'Threads Percentage|pinned memory limit|Starting new server|: Ready' "$dir/daemon.log"
