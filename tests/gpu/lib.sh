# shellcheck shell=bash
# The parts that the scripts beside this one share. A script sources this file and calls set_up first.
#
#   BINARIES: where yunion-mps-daemon and yunion-mpsctl are. DIR: for everything that is written, a new directory otherwise.
#
# Needs a bus with a policy that lets this user own io.yunion.Mps1, in DBUS_SYSTEM_BUS_ADDRESS.
set -u
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
failures=0
# shellcheck disable=SC2034 # for the scripts
nobody=(setpriv --reuid=65534 --regid=65534 --clear-groups --)

set_up() { # BINARIES [DIR]
    bin=$(cd "$1" && pwd)
    dir=${2:-$(mktemp -d /tmp/mps-gpu.XXXXXX)}
    mkdir -p "$dir/etc"
    # Other users' clients are in it.
    chmod 755 "$dir"
    dir=$(cd "$dir" && pwd)
    export PATH=$bin:$PATH RUNTIME_DIRECTORY=$dir/run
}

say() { printf '\n##### %s [%s]\n' "$*" "$(date +%H:%M:%S.%3N)"; }

show() { # COMMAND...
    echo "\$ $*"
    timeout 90 "$@"
    echo "  rc=$?"
}

result() { # SUBJECT FOUND EXPECTED
    if [ "$2" = "$3" ]; then echo "  ok: $1 is $2"; else
        echo "  FAILED: $1 is $2, not $3"
        failures=$((failures + 1))
    fi
}

build_client() { # the program client.cu, once: sets the variable client
    [ -x "$dir/client" ] || nvcc -O2 -arch=native -o "$dir/client" "$here/client.cu" || exit 1
    # shellcheck disable=SC2034 # for the scripts
    client=$dir/client
}

host_conf() { # REPLICAS [LINES]: that number of slices, compute modes left alone, and these lines
    cat >"$dir/etc/host.conf" <<END
enable_cuda_mps: true
cuda_mps_replicas: $1
cuda_mps_set_compute_mode: false
cuda_mps_pipe_directory: $dir/pipe
cuda_mps_log_directory: $dir/log
${2:-}
END
}

start_service() { # with a new log: sets the variable daemon
    : >"$dir/daemon.log"
    start_service_again
}

start_service_again() { # the same, and the log goes on
    yunion-mps-daemon --config "$dir/etc/host.conf" >>"$dir/daemon.log" 2>&1 &
    daemon=$!
}

stop_service() { # returns its exit status
    kill -TERM "$daemon"
    wait "$daemon"
}

is_ready() { timeout 15 yunion-mpsctl status --json 2>/dev/null | grep -q '"state": *"ready"'; }

ready() { # until the state is ready
    for _ in $(seq 600); do
        is_ready && return
        sleep 0.05
    done
    echo "NOT READY"
    timeout 15 yunion-mpsctl status
    return 1
}

of_status() { # PYTHON-EXPRESSION over s
    timeout 10 yunion-mpsctl status --json 2>/dev/null | python3 -c "import json,sys; s=json.load(sys.stdin); print($1)" 2>/dev/null
}

state() { of_status 's["service"]["state"]'; }

becomes() { # STATE SECONDS
    local end=$((SECONDS + $2))
    until [ "$(state)" = "$1" ]; do
        [ "$SECONDS" -lt "$end" ] || break
        sleep 0.1
    done
    result "state" "$(state)" "$1"
}

a_slice() { timeout 20 yunion-mpsctl list --json | python3 -c 'import json,sys; print(json.load(sys.stdin)[1]["addr"])'; }

control_daemon() { pgrep -f '^[^ ]*nvidia-cuda-mps-control -f'; }

ask() { # COMMAND... to the control daemon
    echo "$*" | CUDA_MPS_PIPE_DIRECTORY=$dir/pipe timeout 10 nvidia-cuda-mps-control
}
