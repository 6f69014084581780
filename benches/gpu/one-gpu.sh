#!/bin/bash
# On a host with one GPU: the cost of the service and of its clients, a small client next to greedy ones, and the works that are
# measured for about a second, in three runs. It takes less than eight minutes: benches/gpu/one-gpu.sh BINARIES OUT
#
# It needs the same as run.py and service.py, but starts a bus of its own, so dbus-daemon must be installed. Compute modes are not
# changed. OUT gets the files even if a step fails or takes too long; then the exit status is 1.
set -u
bin=$(cd "$1" && pwd) && mkdir -p "$2" && out=$(cd "$2" && pwd) && cd "$(dirname "$0")/../.." || exit 1
failed=0

step() { # SECONDS COMMAND...
    local seconds=$1 status
    shift
    echo "##### $(date -u +%H:%M:%S) at most $seconds s: $*" >>"$out/steps.txt"
    timeout --kill-after=10 "$seconds" "$@" >>"$out/steps.txt" 2>&1
    status=$?
    echo "##### $(date -u +%H:%M:%S) exit status $status" >>"$out/steps.txt"
    [ $status = 0 ] || failed=1
}

place=$(mktemp -d /tmp/bus.XXXXXX)
scripts/bus-conf.sh "$place"
dbus-daemon --config-file="$place/bus.conf" --nofork --nopidfile >"$place/log" 2>&1 &
bus=$!
trap 'kill $bus; rm -rf "$place"' EXIT
export DBUS_SYSTEM_BUS_ADDRESS=unix:path=$place/socket
for _ in $(seq 100); do
    [ ! -S "$place/socket" ] || break
    sleep 0.05
done

step 20 nvidia-smi --query-gpu=index,name,driver_version,compute_mode,pci.bus_id --format=csv
step 20 "$bin/yunion-mps-daemon" --version
step 20 nvcc --version
step 270 benches/gpu/service.py "$bin" "$out"
export RUNS=3
SECONDS_EACH=2 SECONDS_AT_MOST=75 step 85 benches/gpu/run.py "$bin" "$out/beside" beside
export MODES="without MPS,bare,equal,balanced"
SECONDS_EACH=1 SECONDS_AT_MOST=200 step 215 benches/gpu/run.py "$bin" "$out/works" train+wide@16,8,1,4 jpeg@16,1
exit $failed
