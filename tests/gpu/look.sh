#!/bin/bash
# On a host with a real GPU in compute mode Default, its driver and nvcc: who uses the GPU, as yunion-mpsctl clients, status,
# doctor and metrics tell it, with clients, with a program that bypasses MPS, after a fault and after the death of a server.
# Compute modes are not touched. Exit status 1 if anything is not as expected.
#
#   tests/gpu/look.sh BINARIES [DIR]   as serve.sh
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$@"
bypassing() { timeout 20 yunion-mpsctl clients --json | python3 -c 'import json,sys; print(sum(one["bypass"] for one in json.load(sys.stdin)))'; }
# Each state is looked at twice, a second apart, since a single look can be a false alarm.
look() { for _ in 1 2 3 4; do yunion-mpsctl reload >/dev/null; sleep 1.1; done; }

build_client
host_conf 4
start_service
becomes ready 30
slice=$(a_slice)
gpu=${slice%-*}
show yunion-mpsctl doctor --config "$dir/etc/host.conf"
show yunion-mpsctl check --config "$dir/etc/host.conf"

say "two clients"
yunion-mpsctl run "$gpu-0" -- "$client" hold 14 &
one=$!
yunion-mpsctl run "$gpu-1" -- "$client" hold 14 &
two=$!
sleep 3
look
show yunion-mpsctl clients
show nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv
result "programs that bypass MPS" "$(bypassing)" 0
result "state" "$(state)" ready
timeout 20 yunion-mpsctl metrics | grep -E '^yunion_mps_(up|gpu_clients|gpu_bypass|device_clients|device_memory_used|faults|server_restarts)'
wait "$one" "$two"

say "a program that bypasses MPS"
CUDA_MPS_PIPE_DIRECTORY=/nonexistent "$client" hold 12 &
native=$!
sleep 2
look
result "programs that bypass MPS" "$(bypassing)" 1
result "state" "$(state)" degraded
show yunion-mpsctl clients
show yunion-mpsctl status
show yunion-mpsctl doctor --config "$dir/etc/host.conf"
wait "$native"
look
result "programs that bypass MPS, after its end" "$(bypassing)" 0
becomes ready 20

say "a fault, with a client that stays a while"
yunion-mpsctl run "$gpu-0" -- "$client" stubborn 8 &
stubborn=$!
sleep 2
yunion-mpsctl run "$gpu-1" -- "$client" fault
for _ in 1 2 3 4 5 6; do
    yunion-mpsctl reload >/dev/null
    result "programs that bypass MPS" "$(bypassing 2>/dev/null || echo unknown)" 0
    sleep 1.1
done
wait "$stubborn"
becomes ready 60
look
result "programs that bypass MPS" "$(bypassing)" 0

say "the server is killed, with a client"
yunion-mpsctl run "$gpu-0" -- "$client" hold 20 &
held=$!
sleep 2
server=$(yunion-mpsctl status --json | python3 -c 'import json,sys; print(json.load(sys.stdin)["control_daemons"][0]["servers"][0])')
kill -KILL "$server"
look
result "programs that bypass MPS" "$(bypassing)" 0
becomes ready 60
wait "$held"
echo "  its client: rc=$?"
timeout 20 yunion-mpsctl metrics | grep -E '^yunion_mps_(faults|server_restarts|gpu_bypass)'
result "faults" "$(timeout 20 yunion-mpsctl metrics | sed -n 's/^yunion_mps_faults_total.* //p')" 1

say "stop"
stop_service
result "exit status of the daemon" $? 0
printf '\n##### failures: %s\n' "$failures"
[ "$failures" -eq 0 ]
