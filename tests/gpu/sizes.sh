#!/bin/bash
# On a host with a real GPU in compute mode Default, its driver and PyTorch: slices of different sizes on one GPU. probe finds
# each size through the environment of its slice; with a control daemon for each slice, also without it; the recipe for PyTorch
# takes the memory of its slice; overcommitted memory is told. Compute modes are not touched. Exit status 1 if anything is not
# as expected.
#
#   tests/gpu/sizes.sh BINARIES [DIR]   as serve.sh
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$@"

devices() { # KEYS...: an entry for the first GPU with these keys
    echo "devices: [{path: $uuid, type: NVIDIA_MPS, $*}]" >"$dir/etc/devices.yml"
}

limits() { timeout 20 yunion-mpsctl list --json | python3 -c 'import json,sys
print(*(one["mps_memory_limit"] for one in json.load(sys.stdin)))'; }

probed() { # SLICE: the memory that a client of the slice can allocate, and that one without limits of its own can
    timeout 120 yunion-mpsctl probe "$1" --json >"$dir/probe.json"
    result "probe of $1" $? 0
    cat "$dir/probe.json"
}

taken() { # SLICE MIB: PyTorch with the recipe takes the memory that the slice is said to have
    local mib
    mib=$(yunion-mpsctl env "$1" --format json | python3 -c 'import json,sys
print(json.load(sys.stdin)["environment"]["YUNION_MPS_MEMORY_MIB"])')
    timeout 120 yunion-mpsctl run "$1" -- python3 "$here/recipes.py" 1 >"$dir/torch" 2>&1
    result "PyTorch in $1" $? 0
    grep "total\|taken\|computed" "$dir/torch"
    local found
    found=$(sed -n 's/^taken //p' "$dir/torch")
    result "memory taken ($found MiB) close to $mib MiB" "$((${found:-0} <= mib && ${found:-0} + 512 >= mib))" 1
}

uuid=$(nvidia-smi --query-gpu=uuid --format=csv,noheader | head -n 1)
total=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1)
unit=$((total / 1024 / 7))
sizes="slices: [{memory: ${unit}GiB}, {memory: $((2 * unit))GiB}, {memory: $((3 * unit))GiB}]"
echo "$total MiB, $sizes"
modes=$(nvidia-smi --query-gpu=compute_mode --format=csv,noheader)
for isolation in gpu slice; do
    say "isolation: $isolation"
    devices "$sizes, isolation: $isolation"
    host_conf 4 "container_device_config_file: $dir/etc/devices.yml"
    start_service
    ready || { cat "$dir/daemon.log"; exit 1; }
    timeout 20 yunion-mpsctl list
    timeout 20 yunion-mpsctl status
    result "limits" "$(limits)" "$((unit * 1024)) $((2 * unit * 1024)) $((3 * unit * 1024))"
    for ordinal in 0 1 2; do
        slice=$(timeout 20 yunion-mpsctl list --json | python3 -c "import json,sys; print(json.load(sys.stdin)[$ordinal]['addr'])")
        probed "$slice"
        taken "$slice"
    done
    stop_service
    result "exit status" $? 0
done

say "overcommitted"
devices "virtual_number: 3, memory: $((3 * unit))GiB"
yunion-mps-daemon --config "$dir/etc/host.conf" --check
result "exit status of the check" $? 78
devices "virtual_number: 3, memory: $((3 * unit))GiB, overcommit: true"
start_service
ready || exit 1
timeout 20 yunion-mpsctl doctor
result "doctor tells" "$(timeout 60 yunion-mpsctl doctor --json | grep -c '"memory-overcommitted"')" 1
probed "$slice"
stop_service
result "exit status" $? 0
result "compute modes" "$(nvidia-smi --query-gpu=compute_mode --format=csv,noheader)" "$modes"
[ "$failures" = 0 ]
