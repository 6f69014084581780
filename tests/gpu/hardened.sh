#!/bin/bash
# On a host with a real GPU, its driver and nvcc: the service, its control daemons and servers in the sandbox that the
# shipped unit describes (capabilities, no new privileges, read-only files, denied system calls, see sandbox.py). Whatever
# serve.sh and survive.sh show, clients of another user, and servers that run as another user.
# The compute mode is left alone, so setting it is not tried.
#
#   tests/gpu/hardened.sh BINARIES SYSTEM-CALLS [DIR]   SYSTEM-CALLS: what `systemd-analyze syscall-filter` prints
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$1" "${3:-}"
calls=$(realpath "$2")
mkdir -p "$dir/bin"

# serve.sh and survive.sh take the service from here.
cat >"$dir/bin/yunion-mps-daemon" <<END
#!/bin/sh
exec "$here/sandbox.py" "$here/../../systemd/yunion-mps-daemon.service" "$calls" "$bin/yunion-mps-daemon" "\$@"
END
chmod +x "$dir/bin/yunion-mps-daemon"
ln -sf "$bin/yunion-mpsctl" "$dir/bin/"

say "serve.sh in the sandbox"
"$here/serve.sh" "$dir/bin" "$dir"
say "survive.sh in the sandbox"
HOLD=${HOLD:-20} "$here/survive.sh" "$dir/bin" "$dir"

export PATH=$dir/bin:$PATH
client=$dir/client
for multiuser in true false; do
    say "clients of another user; cuda_mps_multiuser: $multiuser"
    host_conf 4 "cuda_mps_multiuser: $multiuser"
    start_service
    ready
    for status in /proc/$daemon/status /proc/$(control_daemon)/status; do
        grep -E '^(Name|CapBnd|NoNewPrivs|Seccomp):' "$status" | tr '\n' ' '
        echo
    done
    slice=$(a_slice)
    # Like `run`, but as another user: its environment names the slice.
    eval "$(yunion-mpsctl env "$slice")"
    show "${nobody[@]}" "$client" props
    "${nobody[@]}" "$client" hold 30 &
    holder=$!
    sleep 3
    ps -eo pid,uid,stat,args | grep -E 'nvidia-cuda-mps|client hold' | grep -v grep
    # It is found by the environment of another user's process.
    show yunion-mpsctl terminate --device "$slice"
    wait "$holder"
    echo "the holder: rc=$?"
    # A client that has been stopped must be continued by a signal first.
    "${nobody[@]}" "$client" hold 30 &
    holder=$!
    sleep 3
    kill -STOP "$holder"
    show yunion-mpsctl terminate --device "$slice"
    wait "$holder"
    echo "the stopped holder: rc=$?"
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_ACTIVE_THREAD_PERCENTAGE CUDA_MPS_PINNED_DEVICE_MEM_LIMIT CUDA_VISIBLE_DEVICES
    kill -TERM "$daemon"
    for _ in $(seq 300); do [ -e "/proc/$daemon" ] || break; sleep 0.1; done
    cat "$dir/daemon.log"
done
