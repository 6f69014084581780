#!/bin/bash
# On a host with a real GPU, its driver and nvcc: the release binaries serve it in four slices, without a device file
# and without touching its compute mode; a client of one slice sees its share; nothing is left afterwards.
#
#   tests/gpu/serve.sh BINARIES [DIR]   BINARIES: where yunion-mps-daemon and yunion-mpsctl are
#
# Needs a bus with a policy that lets this user own io.yunion.Mps1, in DBUS_SYSTEM_BUS_ADDRESS.
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$@"
processes() { ps -eo pid,ppid,sid,rss,args | grep -E 'yunion-mps|nvidia-cuda-mps' | grep -v -e grep -e serve.sh || echo "  none"; }

say "before"
nvidia-smi --query-gpu=index,uuid,name,pci.bus_id,memory.total,compute_mode,driver_version --format=csv
build_client
host_conf 4 "log_level: ${LOG_LEVEL:-info}"
cat "$dir/etc/host.conf"
show yunion-mps-daemon --config "$dir/etc/host.conf" --check

say "start"
start_service
ready
cat "$dir/daemon.log"
show yunion-mpsctl status
show yunion-mpsctl list
show yunion-mpsctl env 00:06.0-1
processes

say "a client of one slice"
slice=$(a_slice)
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
stop_service
echo "daemon rc=$?"
processes
nvidia-smi --query-gpu=index,compute_mode,memory.used --format=csv
tail -n +1 "$dir/daemon.log" | tail -n 12
say "control.log"
grep -E 'limit|Percentage|Ready|exited' "$dir/log/control.log"
