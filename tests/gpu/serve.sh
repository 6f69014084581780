#!/bin/bash
# On a host with a real GPU, its driver and nvcc: the release binaries serve it in four slices, without a device file
# and without touching its compute mode; a client of one slice sees its share; nothing is left afterwards.
#
#   tests/gpu/serve.sh BINARIES [DIR]   BINARIES: where yunion-mps-daemon and yunion-mpsctl are
#
# Needs a bus with a policy that lets this user own io.yunion.Mps1, in DBUS_SYSTEM_BUS_ADDRESS.
set -u
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "$1" && pwd)
dir=${2:-$(mktemp -d /tmp/mps-gpu.XXXXXX)}
mkdir -p "$dir/etc"
export PATH=$bin:$PATH RUNTIME_DIRECTORY=$dir/run
say() { printf '\n##### %s [%s]\n' "$*" "$(date +%H:%M:%S.%3N)"; }
show() { echo "\$ $*"; timeout 60 "$@"; echo "  rc=$?"; }
processes() { ps -eo pid,ppid,sid,rss,args | grep -E 'yunion-mps|nvidia-cuda-mps' | grep -v -e grep -e serve.sh || echo "  none"; }

say "before"
nvidia-smi --query-gpu=index,uuid,name,pci.bus_id,memory.total,compute_mode,driver_version --format=csv
[ -x "$dir/client" ] || nvcc -O2 -arch=native -o "$dir/client" "$here/client.cu" || exit 1
cat >"$dir/etc/host.conf" <<END
enable_cuda_mps: true
cuda_mps_replicas: 4
cuda_mps_set_compute_mode: false
cuda_mps_pipe_directory: $dir/pipe
cuda_mps_log_directory: $dir/log
log_level: ${LOG_LEVEL:-info}
END
cat "$dir/etc/host.conf"
show yunion-mps-daemon --config "$dir/etc/host.conf" --check

say "start"
yunion-mps-daemon --config "$dir/etc/host.conf" >"$dir/daemon.log" 2>&1 &
daemon=$!
for _ in $(seq 300); do
    yunion-mpsctl status --json 2>/dev/null | grep -q '"state": *"ready"' && break
    sleep 0.05
done
cat "$dir/daemon.log"
show yunion-mpsctl status
show yunion-mpsctl list
show yunion-mpsctl env 00:06.0-1
processes

say "a client of one slice"
slice=$(yunion-mpsctl list --json | python3 -c 'import json,sys; print(json.load(sys.stdin)[1]["addr"])')
show yunion-mpsctl run "$slice" -- "$dir/client" props
show yunion-mpsctl run "$slice" -- "$dir/client" alloc 60000
yunion-mpsctl run "$slice" -- "$dir/client" hold 4 &
client=$!
sleep 2
command -v busctl >/dev/null && show busctl --address="$DBUS_SYSTEM_BUS_ADDRESS" call io.yunion.Mps1 \
    /io/yunion/Mps1/Manager io.yunion.Mps1.Manager ListClients
wait "$client"
echo "client rc=$?"

say "stop"
kill -TERM "$daemon"
wait "$daemon"
echo "daemon rc=$?"
processes
nvidia-smi --query-gpu=index,compute_mode,memory.used --format=csv
tail -n +1 "$dir/daemon.log" | tail -n 12
say "control.log"
grep -E 'limit|Percentage|Ready|exited' "$dir/log/control.log"
