#!/bin/bash
# On a host with a real GPU, its driver and nvcc: a client resists the end of its GPU work. Companions stop it again and
# again, a debugger catches it, a control group freezes it, or its own threads do not get on. For how long does the control
# daemon answer nobody, and does the bystander live? The compute mode is left alone.
#
#   tests/gpu/stopped-client.sh BINARIES [DIR]   as serve.sh
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$@"
now() { date +%s.%N; }
since() { python3 -c "import sys; print(f'{float(sys.argv[2]) - float(sys.argv[1]):.3f} s')" "$1" "$(now)"; }
timed() { # a name, then a command under a limit of 15 s: its exit status, its time and the end of what it says
    local name=$1 began
    shift
    began=$(now)
    timeout -s KILL 15 "$@" >"$dir/said.$name" 2>&1
    local rc=$?
    echo "$name: rc $rc after $(since "$began") $(tail -n 1 "$dir/said.$name" | cut -c1-160)"
}
must_be_ready() {
    ready || {
        tail -n 20 "$dir/daemon.log"
        exit 1
    }
}

build_client
host_conf 4
start_service
must_be_ready
slice=$(a_slice)
gpu=${slice%-*}
start() { # a slice, a file for what it says, then the client's arguments: sets the variable pid
    local slice=$1 file=$2
    shift 2
    (eval "$(timeout 15 yunion-mpsctl env "$slice")" && exec "$client" "$@") >"$file" 2>&1 &
    pid=$!
    for _ in $(seq 200); do grep -q begins "$file" && break; sleep 0.05; done
}

# Companions of a client, each with its PID as the first argument.
cat >"$dir/stop.py" <<'END'
import os, signal, sys, time
pid, pause = int(sys.argv[1]), float(sys.argv[2])
sent = 0
try:
    while True:
        os.kill(pid, signal.SIGSTOP)
        sent += 1
        if pause:
            time.sleep(pause)
except ProcessLookupError:
    pass
END
cat >"$dir/catch.py" <<'END'
# Attaches to every thread as soon as the control daemon has the command, and lets go after some seconds.
import ctypes, os, sys, time
pid, log, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
with open(log) as lines:
    lines.seek(0, 2)
    print("waits", flush=True)
    while "terminate_client" not in lines.read():
        pass
caught = [tid for tid in map(int, os.listdir(f"/proc/{pid}/task")) if ptrace(16, tid, None, None) == 0]
print(f"holds {len(caught)} threads", flush=True)
time.sleep(seconds)
END

# Asks the control daemon again and again until a file is there, and says how long the longest answer took.
cat >"$dir/probe.py" <<'END'
import os, subprocess, sys, time
environment = dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=sys.argv[1])
longest, answers, silent = 0.0, 0, 0
while not os.path.exists(sys.argv[2]):
    time.sleep(0.005)
    began = time.monotonic()
    try:
        front_end = subprocess.run(["nvidia-cuda-mps-control"], input=b"ps\n", env=environment, capture_output=True, timeout=15)
        answers += 1
    except subprocess.TimeoutExpired:
        silent += 1
    longest = max(longest, time.monotonic() - began)
print(f"the control daemon: {answers} answers, {silent} without one in 15 s, the longest after {longest:.3f} s")
END

# A way to resist, and what the victim does meanwhile.
round() {
    local way=$1
    shift
    say "$way; victim: $*"
    start "$gpu-0" "$dir/bystander" hold 12
    local bystander=$pid
    start "$gpu-1" "$dir/victim" "$@"
    local victim=$pid companions=() group=
    case $way in
    nothing*) ;;
    "stopped once"*) kill -STOP "$victim" ;;
    "stopped every 300 us"*) python3 "$dir/stop.py" "$victim" 0.0003 & companions=($!) ;;
    "stopped without a pause"*)
        for _ in 1 2 3 4; do python3 "$dir/stop.py" "$victim" 0 & companions+=($!); done ;;
    "caught by a debugger"*)
        python3 "$dir/catch.py" "$victim" "$dir/log/control.log" 5 >"$dir/catch" 2>&1 & companions=($!)
        for _ in $(seq 100); do grep -q waits "$dir/catch" && break; sleep 0.05; done ;;
    frozen*)
        for group in /sys/fs/cgroup/unified/mps-test.$$ /sys/fs/cgroup/freezer/mps-test.$$ /sys/fs/cgroup/mps-test.$$; do
            mkdir "$group" 2>/dev/null && echo "$victim" 2>/dev/null >"$group/cgroup.procs" &&
                { echo 1 >"$group/cgroup.freeze" || echo FROZEN >"$group/freezer.state"; } 2>/dev/null && break
            rmdir "$group" 2>/dev/null
            group=
        done
        if [ -z "$group" ]; then
            echo "skipped: no control group can be frozen here"
            kill -KILL "$victim" "$bystander"
            wait "$victim" "$bystander" 2>/dev/null
            return
        fi
        echo "frozen in $group" ;;
    esac
    rm -f "$dir/enough"
    python3 "$dir/probe.py" "$dir/pipe" "$dir/enough" >"$dir/probed" 2>&1 &
    local probe=$!
    sleep 0.5
    timed terminate yunion-mpsctl terminate "$victim" &
    local terminate=$! newcomers=()
    for after in 0.02 0.1; do
        (sleep $after && CUDA_MPS_PIPE_DIRECTORY=$dir/pipe timed "newcomer after $after s" "$client" props) &
        newcomers+=($!)
    done
    wait "$terminate" "${newcomers[@]}"
    sleep 0.2
    touch "$dir/enough"
    wait "$probe"
    cat "$dir/probed"
    [ -e "$dir/catch" ] && cat "$dir/catch" && rm "$dir/catch"
    grep -ah "client $victim " "$dir/daemon.log" | cut -c1-200
    for companion in "${companions[@]}"; do kill -KILL "$companion" 2>/dev/null; wait "$companion" 2>/dev/null; done
    if [ -n "$group" ]; then
        echo "the control group says: $(cat "$group/cgroup.freeze" "$group/freezer.state" 2>/dev/null)"
        { echo 0 >"$group/cgroup.freeze" || echo THAWED >"$group/freezer.state"; } 2>/dev/null
    fi
    kill -CONT "$victim" 2>/dev/null
    # Time to note its error. One that is left after that has not been terminated.
    for _ in $(seq 60); do kill -0 "$victim" 2>/dev/null || break; sleep 0.05; done
    if kill -KILL "$victim" 2>/dev/null; then echo "the victim is still there: killed"; fi
    wait "$victim" 2>/dev/null
    echo "victim: rc $? $(tail -n 1 "$dir/victim")"
    wait "$bystander"
    echo "bystander: rc $? $(tail -n 1 "$dir/bystander")"
    [ -n "$group" ] && rmdir "$group"
    must_be_ready
}

round "nothing" long 20
round "stopped once" long 20
for number in 1 2 3; do round "stopped every 300 us, $number" long 20; done
round "stopped every 300 us, 4" hold 20
round "stopped without a pause by four" long 20
round "frozen" long 20
round "nothing, its other threads sleep in a handler" deaf 20
round "caught by a debugger once the command is there" long 20

say "stop"
stop_service
echo "daemon rc=$?"
ps -eo pid,stat,args | grep nvidia-cuda-mps | grep -v -e grep -e ' Z' || echo "no process is left"
say "what the service said"
grep -avE 'Threads Percentage|pinned memory limit|Starting new server|: Ready' "$dir/daemon.log" | tail -n 80
