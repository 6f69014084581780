#!/bin/bash
# On a host with a real GPU in compute mode Default, its driver, PyTorch and grpcio: the device plugin between the service and the
# kubelet of the tests. A program with the environment that a container gets takes the memory of its slice and no more; a drain
# and a killed control daemon reach the kubelet. Compute modes are not touched. Exit status 1 if anything is not as expected.
#
#   tests/gpu/plugin.sh BINARIES [DIR]   as serve.sh; MESSAGES is what scripts/fetch-kubernetes-api.sh has made
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
messages=${MESSAGES:-$here/../../.cache/kubernetes-api}
set_up "$@"

host_conf 4
start_service
ready || exit 1

yunion-mps-device-plugin --kubelet-directory "$dir/kubelet" --without-cdi --metrics "$dir/plugin.prom" >"$dir/plugin.log" 2>&1 &
plugin=$!
timeout 200 python3 "$here/plugin.py" "$messages" "$dir/kubelet" | tee "$dir/kubelet.log"
word() { sed -n "s/^$1 //p" "$dir/kubelet.log" | head -n 1; }

result "slices that the kubelet has" "$(word healthy)" 4
result "a program in the slice computes" "$(grep -c '^computed True' "$dir/kubelet.log")" 1
mib=$(yunion-mpsctl env "$(word slice)" --format json | python3 -c 'import json,sys
print(json.load(sys.stdin)["environment"]["YUNION_MPS_MEMORY_MIB"])')
taken=$(word taken)
result "memory taken ($taken MiB) close to $mib MiB" "$((${taken:-0} <= mib && ${taken:-0} + 512 >= mib))" 1
result "the kubelet hears of a drain" "$(word drained)" 1
result "the kubelet hears of a killed control daemon" "$(word killed)" 4
result "and of the next one" "$(word served-again)" 4
show cat "$dir/plugin.prom"

say "the log of the plugin"
cat "$dir/plugin.log"
kill -TERM "$plugin"
wait "$plugin"
stop_service
result "exit status" "$?" 0
cat "$dir/daemon.log"
exit "$((failures > 0))"
