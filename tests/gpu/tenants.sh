#!/bin/bash
# On a host with a real GPU, its driver and nvcc: tenants in mount namespaces that have the directory of their slice and
# nothing else of the service, or the pipe directory as an agent mounts it, are served with their limits, can't command
# the control daemon, and are served again after its death. A tenant whose processes together take more than the slice is
# told and, with terminate, cut back, and a bystander is not harmed. A drained slice takes nobody. Compute modes are not
# touched. Exit status 1 if anything is not as expected.
#
#   tests/gpu/tenants.sh BINARIES [DIR]   as serve.sh
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$@"
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
        mount -t tmpfs tmpfs "$1.private"
        mount -t tmpfs tmpfs /dev/shm
        shift
        exec "$@"' "$host" "$dir/pipe" "${environment[@]}" "$@"
}
as_the_agent() { # COMMAND...: in a mount namespace where the pipe directory is writable, and the private one not to be seen
    # shellcheck disable=SC2016 # the inner shell's
    timeout 120 unshare --mount --ipc bash -c 'set -e
        mount --make-rprivate /
        mount -t tmpfs tmpfs "$0.private"
        mount -t tmpfs tmpfs /dev/shm
        exec "$@"' "$dir/pipe" env "CUDA_MPS_PIPE_DIRECTORY=$dir/pipe" "$@"
}

build_client
# Without MPS, all of the GPU.
whole=$(CUDA_MPS_PIPE_DIRECTORY=$dir/none timeout 60 "$client" props | grep -o 'sms [0-9]*' | head -1 | cut -d ' ' -f 2)
[ -n "$whole" ] || exit 1
host_conf 4
start_service
ready
slice=$(a_slice)
yunion-mpsctl env "$slice" --format docker
host=$(yunion-mpsctl env "$slice" --format docker | sed -n 's/^--volume=\(.*\):\/run\/yunion-mps:ro$/\1/p')
result "what the directory has" "$(ls -A "$host")" control
result "what the pipe directory has" "$(ls -A "$dir/pipe" | tr '\n' ' ')" "control slices "
result "the mode of the private directory" "$(stat -c %a "$dir/pipe.private")" 700
mapfile -t environment < <(yunion-mpsctl env "$slice" --format docker | sed -n 's/^--env=//p' | grep -v '^NVIDIA_')
value() { yunion-mpsctl env "$slice" --format docker | sed -n "s/^--env=$1=//p"; }
# The limits of a slice; multiprocessors come in pairs.
sms="sms $((whole * $(value CUDA_MPS_ACTIVE_THREAD_PERCENTAGE) / 100 / 2 * 2))"
limit=$(value CUDA_MPS_PINNED_DEVICE_MEM_LIMIT | sed 's/.*=//; s/M$//')
echo "  a slice has $sms of $whole and $limit MiB"
# Three processes of one slice have more than the slice together, and none more than it alone.
much=$((limit * 5 / 6)) little=$((limit / 9))
environment=(env "CUDA_VISIBLE_DEVICES=$(nvidia-smi --query-gpu=uuid --format=csv,noheader | head -1)" "${environment[@]}")

say "tenants with their slice's directory alone"
for user in root nobody; do
    as=()
    [ $user = root ] || as=("${nobody[@]}")
    said=$(contained "${as[@]}" "$client" props 2>&1)
    echo "  $said"
    result "the threads of $user" "$(grep -o 'sms [0-9]*' <<<"$said")" "$sms"
    said=$(contained "${as[@]}" "$client" alloc $((2 * limit)) 2>&1)
    echo "  $said"
    # A context takes some of it.
    stopped=$(sed -n 's/.*stopped at \([0-9]*\) MiB.*/\1/p' <<<"$said")
    result "the memory of $user is limited" "$((${stopped:-0} > limit - 1280 && ${stopped:-0} <= limit))" 1
done

say "their commands"
before=$(control_daemon)
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
result "the control daemon" "$(control_daemon)" "$before"

say "the whole pipe directory, as an agent mounts it"
said=$(as_the_agent "$client" props 2>&1)
echo "  $said"
result "the threads of root" "$(grep -o 'sms [0-9]*' <<<"$said")" "$sms"
for command in "set_default_active_thread_percentage 100" "quit -t 1"; do
    echo "  root: $command: $(as_the_agent bash -c "echo '$command' | timeout 20 nvidia-cuda-mps-control" 2>&1 | tr '\n' ' ')"
done
result "the default percentage" "$(ask get_default_active_thread_percentage)" "$percentage"
result "the control daemon" "$(control_daemon)" "$before"
as_the_agent rm -rf "$dir/pipe/control" "$dir/pipe/slices" 2>/dev/null
for _ in $(seq 100); do [ -e "$dir/pipe/control" ] && [ -e "$host/control" ] && break; sleep 0.02; done
said=$(as_the_agent "$client" props 2>&1)
result "the threads after the links were taken away" "$(grep -o 'sms [0-9]*' <<<"$said")" "$sms"
host=$(yunion-mpsctl env "$slice" --format docker | sed -n 's/^--volume=\(.*\):\/run\/yunion-mps:ro$/\1/p')

say "whose a process is"
contained env "YUNION_MPS_DEVICE=${slice%-*}-3" "$client" hold 8 >/dev/null &
forger=$!
for _ in $(seq 100); do [ "$(yunion-mpsctl clients --json | grep -c '"known_by"')" -gt 0 ] && break; sleep 0.1; done
yunion-mpsctl clients --json | python3 -c '
import json, sys
for client in json.load(sys.stdin):
    print(client["device"], client["known_by"], client["may_command"])' | tee "$dir/whose"
# It sees the rest of the host: a container with a root of its own would be said to command its neighbours.
result "its slice, whatever it says" "$(head -1 "$dir/whose")" "$slice mount all"
wait "$forger"

say "three processes of one slice"
wait_for_state() { # WHAT PYTHON-EXPRESSION over device
    for _ in $(seq 200); do
        [ "$(yunion-mpsctl list --json | python3 -c "
import json, sys
device = [one for one in json.load(sys.stdin) if one['addr'] == '$slice'][0]
print($2)")" = True ] && { result "$1" yes yes; return; }
        sleep 0.1
    done
    result "$1" no yes
    yunion-mpsctl list --json | grep -A40 "\"addr\": \"$slice\""
}
bystander() { # SECONDS: a client of another slice
    yunion-mpsctl run "${slice%-*}-0" -- "$client" keep "$1" "$little"
}
bystander 60 >"$dir/bystander.log" 2>&1 &
other=$!
tenants=()
for place in 1 2 3; do
    contained "$client" keep 25 "$much" >"$dir/tenant.$place" 2>&1 &
    tenants+=($!)
    until grep -q begins "$dir/tenant.$place"; do sleep 0.1; done
done
wait_for_state "the overuse is told" "device['overuse'] != '' and device['clients'] == 3"
yunion-mpsctl list --json | python3 -c '
import json, sys
for device in json.load(sys.stdin):
    print(" ", device["addr"], device["clients"], device.get("memory_used"), repr(device["overuse"]), device["healthy"])'
yunion-mpsctl doctor | grep -A3 -i overuse || true
wait "${tenants[@]}"
cat "$dir"/tenant.[123]
result "all three went on" "$(cat "$dir"/tenant.[123] | grep -c ' ok rounds')" 3
wait_for_state "it fits again" "device['overuse'] == ''"

say "the same with terminate"
echo "cuda_mps_overuse: terminate" >>"$dir/etc/host.conf"
yunion-mpsctl reload
ready
# In one container: where members of a slice are in several, no work is ended.
# shellcheck disable=SC2016 # the inner shell's
contained bash -c 'for place in 1 2 3; do
        "$0" keep 20 "$1" >"$2/tenant.$place" 2>&1 &
        until grep -q begins "$2/tenant.$place"; do sleep 0.1; done
        # The next one is the newer one, to the second.
        sleep 1.1
    done
    wait' "$client" "$much" "$dir"
cat "$dir"/tenant.[123]
result "the first went on" "$(grep -c ' ok rounds' "$dir/tenant.1")" 1
result "the newer ones were ended" "$(cat "$dir"/tenant.[23] | grep -c '(810)')" 2
wait "$other"
cat "$dir/bystander.log"
result "the bystander went on" "$(grep -c ' ok rounds' "$dir/bystander.log")" 1
sed -i '/cuda_mps_overuse/d' "$dir/etc/host.conf"
yunion-mpsctl reload
ready

say "drain"
contained "$client" hold 6 >"$dir/present" 2>&1 &
present=$!
until grep -q begins "$dir/present"; do sleep 0.1; done
timeout 60 yunion-mpsctl drain "$slice" --wait
wait "$present"
result "the present client finished" "$(grep -c ' ok rounds' "$dir/present")" 1
result "what the directory has" "$(ls -A "$host")" ""
result "env" "$(yunion-mpsctl env "$slice" >/dev/null 2>&1; echo $?)" 1
yunion-mpsctl drain --all
result "what the pipe directory has" "$(ls -A "$dir/pipe")" slices
yunion-mpsctl undrain --all
said=$(contained "$client" props 2>&1)
echo "  $said"
result "the threads after the undrain" "$(grep -o 'sms [0-9]*' <<<"$said")" "$sms"
before=$(control_daemon)

say "wake-ups of an idle service"
switches() { awk '/^Pid:/ {pid = $2} /ctxt_switches/ {sum[pid] += $2} END {for (pid in sum) print pid, sum[pid]}' \
    /proc/"$daemon"/task/*/status; }
# The thread that helps for a moment may end meanwhile.
switches >"$dir/switches.first"
sleep 60
switches >"$dir/switches.last"
awk 'NR == FNR {first[$1] = $2; next} {sum += $2 - first[$1]} END {print "  " sum " in a minute"}' "$dir/switches.first" "$dir/switches.last"

say "the same mounted directory after the control daemon's death"
# shellcheck disable=SC2016 # the inner shell's
contained bash -c '"$0" props; touch "$1/first"; until [ -e "$1/go" ]; do sleep 0.05; done; "$0" props' "$client" "$dir" \
    >"$dir/kept.log" 2>&1 &
kept=$!
until [ -e "$dir/first" ]; do sleep 0.05; done
kill -KILL "$before"
for _ in $(seq 200); do [ "$(control_daemon)" = "$before" ] || break; sleep 0.05; done
sleep 0.5
ready
result "the control daemon is another one" "$([ "$(control_daemon)" != "$before" ] && echo yes)" yes
touch "$dir/go"
wait "$kept"
sed 's/^/  /' "$dir/kept.log"
result "both times it was limited" "$(grep -c "$sms " "$dir/kept.log")" 2

say "stop"
stop_service
result "the daemon's status" $? 0
say "what the service said"
cat "$dir/daemon.log"
exit $((failures > 0))
