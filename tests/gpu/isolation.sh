#!/bin/bash
# On a host with a real GPU in compute mode Default, its driver and nvcc: a control daemon for each of four slices. A fault, a
# killed control daemon and a kernel that fills the GPU stay in their slice; the service is killed with all of it at work; its
# stop leaves nothing. On a host with two GPUs, one of them then has a control daemon for all of its slices. Compute modes are
# not touched. Exit status 1 if anything is not as expected.
#
#   tests/gpu/isolation.sh BINARIES [DIR]   as serve.sh
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$@"
now() { date +%s.%3N; }
since() { python3 -c "import time; print(round(time.time() - $1, 2))"; }

configure() { # the first GPU alone, in four slices, each with this isolation; the second GPU's after it, if there is one
    {
        echo "devices:"
        for place in "${!uuids[@]}"; do
            [ "$place" -lt $# ] || break
            local isolations=("$@")
            echo "- {path: ${uuids[$place]}, type: NVIDIA_MPS, virtual_number: 4, isolation: ${isolations[$place]}}"
        done
    } >"$dir/etc/devices.yml"
    cat >"$dir/etc/host.conf" <<END
enable_cuda_mps: true
container_device_config_file: $dir/etc/devices.yml
cuda_mps_set_compute_mode: false
cuda_mps_pipe_directory: $dir/p
cuda_mps_log_directory: $dir/l
cuda_mps_fault_grace: 5
END
}

names() { timeout 20 yunion-mpsctl list --json | python3 -c 'import json,sys
for one in json.load(sys.stdin): print(one["addr"])'; }

begin() { # SLICE NAME ARGUMENTS: a client in the background, at work
    local slice=$1 name=$2
    shift 2
    yunion-mpsctl run "$slice" -- "$client" "$@" >"$dir/$name.log" 2>&1 &
    pids[$name]=$!
    until grep -q begins "$dir/$name.log"; do
        kill -0 "${pids[$name]}" 2>/dev/null || break
        sleep 0.02
    done
}

pair() { # PLACE SECONDS: two clients of a slice
    begin "${slices[$1]}" "$1-a" hold "$2"
    begin "${slices[$1]}" "$1-b" hold "$2"
}

ended() { # PLACE: how the two clients of a slice have ended
    local name
    for name in "$1-a" "$1-b"; do
        for _ in $(seq 1200); do
            kill -0 "${pids[$name]}" 2>/dev/null || break
            sleep 0.05
        done
    done
    cat "$dir/$1-a.log" "$dir/$1-b.log" | sed -n 's/.*(\([0-9]*\))$/\1/p; s/.* ok rounds.*/ok/p' | sort -u | paste -sd ' '
}

sample() { # the slices that are not served, until the file goes
    while [ -e "$dir/sampling" ]; do
        timeout 5 yunion-mpsctl list --json 2>/dev/null | python3 -c 'import json,sys
for one in json.load(sys.stdin):
    if not one["healthy"]: print(one["addr"], one["reason"])'
    done | sort -u >"$dir/unserved"
}

sampled() { # PLACE
    rm "$dir/sampling"
    wait "$sampler"
    cat "$dir/unserved"
    result "slices that were not served" "$(cut -d' ' -f1 "$dir/unserved" | sort -u | paste -sd ' ')" "${slices[$1]}"
}

all_take_clients() {
    local slice
    for slice in "${slices[@]}"; do
        timeout 30 yunion-mpsctl run "$slice" -- "$client" props >"$dir/props" 2>&1 || echo "$slice: $(cat "$dir/props")"
    done
}

declare -A pids
build_client
mapfile -t uuids < <(nvidia-smi --query-gpu=uuid --format=csv,noheader)
modes=$(nvidia-smi --query-gpu=compute_mode --format=csv,noheader | paste -sd ' ')
echo "compute modes $modes"
configure slice
began=$(now)
start_service
ready
echo "  four control daemons are ready after $(since "$began") s"
mapfile -t slices < <(names)
yunion-mpsctl list
yunion-mpsctl status
nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv,noheader
result "slices" "${#slices[@]}" 4
result "control daemons" "$(of_status 'len(s["control_daemons"])')" 4
yunion-mpsctl run "${slices[1]}" -- "$client" props | tee "$dir/props"
result "SMs of a slice" "$(sed -n 's/.* sms \([0-9]*\) .*/\1/p' "$dir/props")" 132

say "a fault in one of four slices with two clients each"
for place in 0 1 2 3; do pair "$place" 25; done
sleep 1
yunion-mpsctl clients
result "clients that bypass" "$(yunion-mpsctl clients --json | grep -c '"bypass": true')" 0
touch "$dir/sampling"
sample &
sampler=$!
sleep 1
began=$(now)
yunion-mpsctl run "${slices[1]}" -- "$client" fault >"$dir/fault.log" 2>&1
cat "$dir/fault.log"
echo "  the culprit has ended after $(since "$began") s"
result "its slice's clients" "$(ended 1)" 700
began=$(now)
until yunion-mpsctl run "${slices[1]}" -- "$client" props >"$dir/props" 2>&1; do sleep 0.02; done
took=$(since "$began")
result "a client of that slice within a second" "$(python3 -c "print($took < 1)")" True
echo "  it took $took s"
sampled 1
result "slices that take no client" "$(all_take_clients)" ""
for place in 0 2 3; do result "clients of slice $place" "$(ended "$place")" ok; done
ready

say "a killed control daemon"
for place in 0 1 2 3; do pair "$place" 15; done
touch "$dir/sampling"
sample &
sampler=$!
sleep 1
victim=$(of_status "[one['pid'] for one in s['control_daemons'] if one['id'] == '${slices[2]}'][0]")
began=$(now)
kill -KILL "$victim"
echo "  its slice's clients: $(ended 2)"
result "its slice's clients lost their work" "$(ended 2 | grep -c ok)" 0
until yunion-mpsctl run "${slices[2]}" -- "$client" props >"$dir/props" 2>&1; do sleep 0.02; done
echo "  that slice has a client again after $(since "$began") s"
ready
sampled 2
for place in 0 1 3; do result "clients of slice $place" "$(ended "$place")" ok; done

say "a kernel that fills the GPU for 12 s"
for place in 0 1; do pair "$place" 10; done
begin "${slices[3]}" filler fill 12
sleep 1
began=$(now)
timeout 30 yunion-mpsctl run "${slices[0]}" -- "$client" props >"$dir/props" 2>&1
echo "  a newcomer of another slice is done after $(since "$began") s, rc=$?"
cat "$dir/props"
for place in 0 1; do result "clients of slice $place" "$(ended "$place")" ok; done
grep -h rounds "$dir"/[01]-[ab].log
yunion-mpsctl terminate --device "${slices[3]}"
wait "${pids[filler]}"
cat "$dir/filler.log"
ready

say "the service is killed with all of it at work"
for place in 0 1 2 3; do pair "$place" 12; done
before=$(of_status 'sorted(one["pid"] for one in s["control_daemons"])')
kill -KILL "$daemon"
wait "$daemon" 2>/dev/null
start_service_again
ready
result "the control daemons" "$(of_status 'sorted(one["pid"] for one in s["control_daemons"])')" "$before"
for place in 0 1 2 3; do result "clients of slice $place" "$(ended "$place")" ok; done

say "a program without MPS"
CUDA_MPS_PIPE_DIRECTORY=$dir/nowhere "$client" hold 8 >"$dir/stranger.log" 2>&1 &
stranger=$!
becomes degraded 20
yunion-mpsctl status | grep -E '^(State|Reason)'
wait "$stranger"
yunion-mpsctl reload
ready
result "events of it" "$(grep -c 'WARN GPU .* is used without an MPS server of this service' "$dir/daemon.log")" 1

if [ "${#uuids[@]}" -ge 2 ]; then
    say "a second GPU with one control daemon for its slices"
    configure slice gpu
    yunion-mpsctl reload
    ready
    mapfile -t slices < <(names)
    result "slices" "${#slices[@]}" 8
    result "control daemons" "$(of_status 'len(s["control_daemons"])')" 5
    yunion-mpsctl list
    for place in 0 1 4 5; do pair "$place" 10; done
    result "clients that bypass" "$(yunion-mpsctl clients --json | grep -c '"bypass": true')" 0
    yunion-mpsctl run "${slices[4]}" -- "$client" fault
    for place in 0 1; do result "clients of slice $place" "$(ended "$place")" ok; done
    for place in 4 5; do result "clients of slice $place" "$(ended "$place")" 700; done
    ready
    result "slices that take no client" "$(all_take_clients)" ""
fi

say "the stop"
pair 0 60
stop_service
result "the service's exit status" "$?" 0
ended 0
result "control daemons" "$(pgrep -c -f '^[^ ]*nvidia-cuda-mps-control -f')" 0
result "servers" "$(pgrep -c -f nvidia-cuda-mps-server)" 0
result "compute modes" "$(nvidia-smi --query-gpu=compute_mode --format=csv,noheader | paste -sd ' ')" "$modes"
grep -E ' WARN ' "$dir/daemon.log" | tail -n 30
[ "$failures" = 0 ]
