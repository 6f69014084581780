#!/bin/bash
# On a host with a real GPU, its driver and nvcc: what running clients notice of the service's deaths, reloads and repairs.
# The compute mode is left alone.
#
#   tests/gpu/survive.sh BINARIES [DIR]   as serve.sh
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$@"
configure() { host_conf "$1" "cuda_mps_fault_grace: 5"; } # REPLICAS

build_client
configure 4
start_service_again
ready
slice=$(a_slice)
gpu=${slice%-*}

say "a client computes for ${HOLD:-60} s while the service is killed three times and reloaded twice"
echo "control daemon $(control_daemon)"
yunion-mpsctl run "$slice" -- "$client" hold "${HOLD:-60}" &
holder=$!
for round in 1 2 3; do
    sleep 4
    kill -KILL "$daemon"
    wait "$daemon" 2>/dev/null
    echo "killed, round $round; control daemon $(control_daemon)"
    sleep 1
    start_service_again
    ready
    echo "ready again; control daemon $(control_daemon)"
done
for replicas in 2 8; do
    configure $replicas
    kill -HUP "$daemon"
    sleep 1
    ready
    echo "reloaded with $replicas slices; control daemon $(control_daemon)"
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
stop_service
echo "daemon rc=$?"
ps -eo pid,stat,args | grep nvidia-cuda-mps | grep -v -e grep -e ' Z' || echo "no process is left"
nvidia-smi --query-gpu=index,compute_mode,memory.used --format=csv
say "what the service said"
grep -vE 'Threads Percentage|pinned memory limit|Starting new server|: Ready' "$dir/daemon.log"
