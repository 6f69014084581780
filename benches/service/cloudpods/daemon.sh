#!/bin/sh
# Cloudpods' daemon, mps-daemon in the PATH, on a simulated host, for make bench PEER=. The benchmark starts this as daemon.sh
# --sysroot SYSROOT. No command here starts a process, because its time would be counted as the daemon's.
host=$YUNION_MPS_SIM
# Without a device in the file, the daemon serves every GPU, with this number of slices.
while read -r key slices && [ "$key" != virtual_number: ]; do :; done < "$2/etc/yunion/host_container_device.yml"
echo 'devices: []' > "$host/devices.yml"
echo "enable_cuda_mps: true
cuda_mps_replicas: $slices
cuda_mps_pipe_directory: $host/pipe
cuda_mps_log_directory: $host/log
container_device_config_file: $host/devices.yml" > "$host/host.conf"
PATH=${0%/*}:$PATH exec mps-daemon --config "$host/host.conf"
