#!/bin/bash
# On a host with a real GPU, its driver and nvcc, as root, where control groups can be made: a container as the platform's
# host agent of today makes it, with the whole pipe directory and without the name of its slice. The agent's records tell
# the slice: three processes that together take more than the slice are told with their guest and, with terminate, cut back,
# and a container of another guest is not harmed. The same holds for a control group that is bound. Compute modes are not touched. Exit status 1 if anything is not as expected.
#
#   tests/gpu/guests.sh BINARIES [DIR]   as serve.sh
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$@"

groups=()
# shellcheck disable=SC2317 # at the end
leave() {
    for group in "${groups[@]}"; do rmdir "$group" 2>/dev/null; done
}
trap leave EXIT

container() { # ID: makes its control group, and prints where
    local root
    for root in /sys/fs/cgroup /sys/fs/cgroup/systemd /sys/fs/cgroup/pids; do
        mkdir -p "$root/cloudpods/$1" 2>/dev/null && (echo "$BASHPID" >"$root/cloudpods/$1/cgroup.procs") 2>/dev/null && {
            echo "$root/cloudpods/$1"
            return
        }
    done
    return 1
}

record() { # GUEST ID SLICE: as the agent writes it
    mkdir -p "$dir/servers/$1"
    chmod 755 "$dir/servers" "$dir/servers/$1"
    echo "{\"c-1\":{\"id\":\"c-1\",\"index\":0,\"cri_id\":\"$2\"}}" >"$dir/servers/$1/containers"
    cat >"$dir/servers/$1/desc" <<END
{"name":"$1","tenant":"vision","containers":[{"id":"c-1","name":"main","spec":{"devices":[
{"isolated_device":{"addr":"$3","device_type":"NVIDIA_MPS"}}]}}]}
END
    chmod 644 "$dir/servers/$1"/*
}

contained() { # GROUP COMMAND...
    # shellcheck disable=SC2016 # the inner shell's
    timeout 120 env "CUDA_MPS_PIPE_DIRECTORY=$dir/pipe" bash -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$@"
}

build_client
own=$(printf 'a%.0s' $(seq 64)) other=$(printf 'b%.0s' $(seq 64))
if ! own_group=$(container "$own") || ! other_group=$(container "$other"); then
    echo "no control group can be made here"
    exit 77
fi
groups=("$own_group" "$other_group" "$(dirname "$own_group")")
host_conf 4 "servers_path: $dir/servers"
start_service
ready
slice=$(a_slice)
neighbours=${slice%-*}-0
record train-1 "$own" "$slice"
record train-2 "$other" "$neighbours"
limit=$(yunion-mpsctl env "$slice" --format docker | sed -n 's/^--env=CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=.*=//p' | sed 's/M$//')
# Three processes of one slice have more than the slice together, and none more than it alone.
much=$((limit * 5 / 6)) little=$((limit / 9))

overuse() { # the slice's number of clients, and whether it is over its budget
    yunion-mpsctl list --json | python3 -c "
import json, sys
device = [one for one in json.load(sys.stdin) if one['addr'] == '$slice'][0]
print(device['clients'], device['overuse'] != '')"
}

becomes_used() { # CLIENTS OVER
    for _ in $(seq 100); do
        [ "$(overuse)" = "$1 $2" ] && break
        sleep 0.1
    done
    result "clients of the slice, and overuse" "$(overuse)" "$1 $2"
}

keep_three() { # SECONDS
    tenants=()
    for place in 1 2 3; do
        contained "$own_group" env "YUNION_MPS_DEVICE=$neighbours" "$client" keep "$1" "$much" >"$dir/tenant.$place" 2>&1 &
        tenants+=($!)
        until grep -q begins "$dir/tenant.$place"; do sleep 0.1; done
        # The next one is the newer one, to the second.
        sleep 1.1
    done
}

say "three processes of one guest"
contained "$other_group" "$client" keep 60 "$little" >"$dir/bystander.log" 2>&1 &
bystander=$!
until grep -q begins "$dir/bystander.log"; do sleep 0.1; done
keep_three 15
becomes_used 3 True
yunion-mpsctl clients -o wide
result "clients by the platform's word" "$(yunion-mpsctl clients --json | grep -c '"known_by": "platform"')" 4
result "guests" "$(yunion-mpsctl clients --json | grep -c '"guest": "train-1"')" 3
result "the warning names the guest" "$(grep -c "over its budget.*of guest train-1, container main" "$dir/daemon.log")" 1
wait "${tenants[@]}"
result "all three went on" "$(cat "$dir"/tenant.[123] | grep -c ' ok rounds')" 3

say "the same with terminate"
echo "cuda_mps_overuse: terminate" >>"$dir/etc/host.conf"
yunion-mpsctl reload
ready
keep_three 12
wait "${tenants[@]}"
cat "$dir"/tenant.[123]
result "the first went on" "$(grep -c ' ok rounds' "$dir/tenant.1")" 1
result "the newer ones were ended" "$(cat "$dir"/tenant.[23] | grep -c '(810)')" 2
wait "$bystander"
cat "$dir/bystander.log"
result "the bystander went on" "$(grep -c ' ok rounds' "$dir/bystander.log")" 1

say "the same with a control group that is bound, whatever the records say"
path=/cloudpods/$own
result "the slice that is bound" "$(yunion-mpsctl bind "$slice" --control-group "$path" --label job-17)" "$slice"
result "a slice that is taken" "$(yunion-mpsctl bind "$slice" --control-group "/cloudpods/$other" 2>&1 | grep -c "taken by job-17")" 1
# From driver 615 on the kernel can hold the memory of a bound control group.
enforces() { yunion-mpsctl list --json | python3 -c 'import json,sys; print({one["addr"]: (one["memory_enforced_by"], one.get("kernel_limit_refused", "")) for one in json.load(sys.stdin)}[sys.argv[1]])' "$slice"; }
series=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -1 | cut -d. -f1)
if [ "$series" -lt 615 ]; then
    result "who enforces the memory of the bound slice" "$(enforces)" "('watch', '')"
else
    show enforces
fi
record train-1 "$own" "$neighbours"
keep_three 12
result "a client by its control group" "$(yunion-mpsctl clients --json | grep -q '"known_by": "bound"' && echo yes)" yes
wait "${tenants[@]}"
cat "$dir"/tenant.[123]
result "the first went on" "$(grep -c ' ok rounds' "$dir/tenant.1")" 1
result "the newer ones were ended" "$(cat "$dir"/tenant.[23] | grep -c '(810)')" 2
yunion-mpsctl unbind --control-group "$path"
record train-1 "$own" "$slice"

say "the farewell"
contained "$own_group" "$client" keep 60 "$little" >"$dir/tenant.1" 2>&1 &
last=$!
until grep -q begins "$dir/tenant.1"; do sleep 0.1; done
stop_service
result "the service's exit status" "$?" 0
wait "$last"
grep "the stop ends" "$dir/daemon.log"
result "the stop names the guest" "$(grep -c "the stop ends the work of 1 client: PID .* of guest train-1, slice $slice, container main" "$dir/daemon.log")" 1
[ "$failures" = 0 ]
