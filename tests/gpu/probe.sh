#!/bin/bash
# On a host with a real GPU from Volta on and its driver: `yunion-mpsctl probe` finds what is promised, and finds out
# when somebody changes the limits through the control pipe, without harm for a neighbour. Compute modes are not touched.
# Exit status 1 if anything is not as expected.
#
#   tests/gpu/probe.sh BINARIES [DIR]   BINARIES: where yunion-mps-daemon and yunion-mpsctl are
#
# Needs a bus with a policy that lets this user own io.yunion.Mps1, in DBUS_SYSTEM_BUS_ADDRESS. With nvcc it also tries
# what a neighbour feels.
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$@"
expect() { # STATUS SECONDS COMMAND...
    local status=$1 seconds=$2
    shift 2
    echo "\$ $*"
    timeout "$seconds" "$@"
    result "exit status" $? "$status"
}
control() { # COMMAND...
    echo "> $*" >&2
    ask "$@"
}
json() { python3 -c "import json,sys; d=json.load(open('$1')); print($2)"; }
wait_until() { # SECONDS COMMAND...
    local end=$((SECONDS + $1))
    shift
    until "$@" 2>/dev/null; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.1
    done
}
ill() { ! timeout 10 yunion-mpsctl list --json | grep -q '"healthy": *true'; }
healthy() { ! ill; }
no_clients() { [ -z "$(control get_client_list "$server" 2>/dev/null)" ]; }

say "before"
nvidia-smi --query-gpu=index,uuid,name,memory.total,memory.used,compute_mode,driver_version --format=csv
modes=$(nvidia-smi --query-gpu=compute_mode --format=csv,noheader)
host_conf 4
start_service
wait_until 30 is_ready || { cat "$dir/daemon.log"; kill "$daemon"; exit 1; }
timeout 20 yunion-mpsctl status
slice=$(a_slice)
limit=$(timeout 20 yunion-mpsctl list --json | python3 -c 'import json,sys; print(json.load(sys.stdin)[1]["mps_memory_limit"])')
server=$(control get_server_list)
echo "slice $slice, limit $limit MiB, server $server"

say "what is promised is what is found"
expect 0 120 yunion-mpsctl probe
expect 0 120 yunion-mpsctl probe "$slice" --json
expect 1 20 yunion-mpsctl probe 00:99.0-0

say "somebody gives more threads"
control set_active_thread_percentage "$server" 50
expect 1 120 yunion-mpsctl probe "$slice"
say "somebody gives less"
control set_active_thread_percentage "$server" 10
expect 1 120 yunion-mpsctl probe "$slice"
control set_active_thread_percentage "$server" 25
expect 0 120 yunion-mpsctl probe "$slice"

say "somebody gives more memory"
control set_device_pinned_mem_limit "$server" 0 "$((2 * limit))M"
wait_until 40 ill
result "noticed by the daemon" $? 0
expect 1 120 yunion-mpsctl probe
expect 1 120 yunion-mpsctl probe "$slice"
say "somebody gives less memory"
control set_device_pinned_mem_limit "$server" 0 "$((limit / 2))M"
expect 1 120 yunion-mpsctl probe "$slice"
say "as it was"
control set_device_pinned_mem_limit "$server" 0 "${limit}M"
wait_until 40 healthy
expect 0 120 yunion-mpsctl probe

if command -v nvcc >/dev/null && { [ -x "$dir/client" ] || nvcc -O2 -arch=native -o "$dir/client" "$here/client.cu"; }; then
    say "a neighbour"
    timeout 120 yunion-mpsctl run "$slice" -- "$dir/client" hold 40 >"$dir/neighbour" &
    neighbour=$!
    sleep 3
    expect 0 120 yunion-mpsctl probe "$slice"
    expect 0 120 yunion-mpsctl probe "$slice" --beside-clients
    wait "$neighbour"
    result "exit status of the neighbour" $? 0
    cat "$dir/neighbour"
fi

say "stop"
stop_service
result "exit status of the daemon" $? 0
result "compute modes" "$(nvidia-smi --query-gpu=compute_mode --format=csv,noheader)" "$modes"
nvidia-smi --query-gpu=index,compute_mode,memory.used --format=csv
grep -E 'limit|Percentage|fatal|exited' "$dir/log/control.log" | tail -n 40
say "failures: $failures"
[ "$failures" -eq 0 ]
