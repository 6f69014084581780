#!/bin/bash
# On a host with two real GPUs in compute mode Default, their driver and nvcc: each GPU's slices are its own, a fault on one
# costs nobody on the other (one control daemon for both, and one for each), and a change between the two waits for clients.
# Compute modes are not touched. Exit status 1 if anything is not as expected.
#
#   tests/gpu/two.sh BINARIES [DIR]   as serve.sh
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$@"
server() { of_status 's["control_daemons"][0]["servers"][0]'; }
configure() { # TOPOLOGY
    cat >"$dir/etc/host.conf" <<END
enable_cuda_mps: true
container_device_config_file: $dir/etc/devices.yml
cuda_mps_topology: $1
cuda_mps_set_compute_mode: false
cuda_mps_pipe_directory: $dir/p
cuda_mps_log_directory: $dir/l
cuda_mps_fault_grace: 5
END
}
client() { # SLICE LOG ARGUMENTS
    local slice=$1 log=$2
    shift 2
    yunion-mpsctl run "$slice" -- "$dir/client" "$@" >"$dir/$log" 2>&1 &
}
sms() { sed -n 's/.* sms \([0-9]*\) .*/\1/p'; }

build_client
mapfile -t uuids < <(nvidia-smi --query-gpu=uuid --format=csv,noheader)
[ "${#uuids[@]}" -ge 2 ] || { echo "two GPUs are needed"; exit 1; }
cat >"$dir/etc/devices.yml" <<END
devices:
- {path: ${uuids[0]}, type: NVIDIA_MPS, virtual_number: 4}
- {path: ${uuids[1]}, type: NVIDIA_MPS, virtual_number: 2}
END

say "one control daemon for both, quarters of one and halves of the other"
configure shared
start_service_again
becomes ready 40
show yunion-mpsctl list
mapfile -t slices < <(yunion-mpsctl list --json | python3 -c 'import json,sys
for one in json.load(sys.stdin): print(one["addr"])')
result "slices" "${#slices[@]}" 6
quarter=${slices[0]} half=${slices[4]}
show yunion-mpsctl status
show yunion-mpsctl probe
result "SMs of a quarter" "$(yunion-mpsctl run "$quarter" -- "$dir/client" props | sms)" 32
result "SMs of a half" "$(yunion-mpsctl run "$half" -- "$dir/client" props | sms)" 66
client "$half" half hold 4
sleep 2
result "GPU of the half's client" "$(nvidia-smi --query-compute-apps=gpu_uuid,name --format=csv,noheader | sed -n 's/, .*client$//p')" "${uuids[1]}"
result "the same, as we say" "$(yunion-mpsctl clients --json | python3 -c 'import json,sys; print(json.load(sys.stdin)[0]["gpu"])')" "${uuids[1]}"
show yunion-mpsctl clients
wait %+

say "a fault on one GPU, with a client there that stays, and a bystander on the other"
client "$quarter" bystander hold 50
bystander=$!
client "$half" stubborn stubborn 30
stubborn=$!
sleep 2
before=$(server)
show yunion-mpsctl run "${half%-*}-1" -- "$dir/client" fault
sleep 8
show yunion-mpsctl status
result "server after the grace" "$(server)" "$before"
kill -KILL "$daemon"
wait "$daemon" 2>/dev/null
start_service_again
sleep 9
show yunion-mpsctl status
result "server after the next one's grace" "$(server)" "$before"
kill -0 "$bystander" 2>/dev/null
result "the bystander's life" $? 0
wait "$stubborn"
tail -n 1 "$dir/stubborn"
becomes ready 40
result "server" "$(server)" "$before"
result "SMs of a half" "$(yunion-mpsctl run "$half" -- "$dir/client" props | sms)" 66
wait "$bystander"
result "the bystander's exit status" $? 0
tail -n 1 "$dir/bystander"

say "the same without a bystander"
client "$half" stubborn stubborn 25
stubborn=$!
sleep 2
yunion-mpsctl run "${half%-*}-1" -- "$dir/client" fault
sleep 1
becomes ready 20
[ "$(server)" != "$before" ]
result "another server" $? 0
kill "$stubborn"
wait "$stubborn"

say "one control daemon for each, after the last client"
client "$quarter" holder hold 8
holder=$!
sleep 2
configure per_gpu
show yunion-mpsctl check --config "$dir/etc/host.conf"
show yunion-mpsctl reload
sleep 1
show yunion-mpsctl status
wait "$holder"
result "the client's exit status" $? 0
becomes ready 60
result "control daemons" "$(of_status 'len(s["control_daemons"])')" 2
show yunion-mpsctl probe
client "$quarter" bystander hold 15
bystander=$!
sleep 2
yunion-mpsctl run "$half" -- "$dir/client" fault
kill -KILL "$(of_status "[d['pid'] for d in s['control_daemons'] if '${uuids[1]}' in d['gpus']][0]")"
sleep 1
becomes ready 40
result "SMs of a half" "$(yunion-mpsctl run "$half" -- "$dir/client" props | sms)" 66
wait "$bystander"
result "the bystander's exit status" $? 0

say "a program that bypasses MPS on one of them"
CUDA_MPS_PIPE_DIRECTORY=/nonexistent CUDA_VISIBLE_DEVICES=${uuids[1]} "$dir/client" hold 10 &
native=$!
sleep 2
for _ in 1 2 3; do yunion-mpsctl reload; sleep 1.1; done
show yunion-mpsctl clients
show yunion-mpsctl status
result "state" "$(state)" degraded
wait "$native"
yunion-mpsctl reload
becomes ready 20

say "stop"
stop_service
result "exit status of the daemon" $? 0
nvidia-smi --query-gpu=index,compute_mode,memory.used --format=csv
say "what the service said"
grep -vE 'Threads Percentage|pinned memory limit|Starting new server|: Ready' "$dir/daemon.log"
printf '\n##### failures: %s\n' "$failures"
[ "$failures" -eq 0 ]
