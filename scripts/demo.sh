#!/bin/bash
# The whole way once, on a simulated host: the programs, a real dbus-daemon, a board of the simulator's. With RELEASE=1 the
# programs are those in the packages of `make deb rpm`, which has built them before; otherwise they are those of the tests.
# Shows what an administrator would see and checks it; exit status 0 means that every check held.
set -euo pipefail
cd "$(dirname "$0")/.."

board=${1:-tesla-p40}
python=/usr/bin/python3
query=(nvidia-smi "--query-gpu=gpu_uuid,gpu_name,gpu_bus_id,memory.total,compute_mode" --format=csv)
manager=(io.yunion.Mps1 /io/yunion/Mps1/Manager io.yunion.Mps1.Manager)
dir=''
daemon=''

fail() {
    echo "demo: FAILED: $*" >&2
    exit 1
}

# The PIDs of everything that was started for this demo, however far down: they all inherit the mark. (A process
# without an environment, such as one that has ended and is not yet collected, doesn't count.)
marked() {
    local environ pid
    for environ in /proc/[0-9]*/environ; do
        if grep -qzxF "YUNION_MPS_DEMO=$dir" "$environ" 2>/dev/null; then
            pid=${environ#/proc/}
            echo "${pid%/environ}"
        fi
    done
}

only_the_bus_marked() {
    [ -z "$(marked | grep -vx "$bus")" ]
}

none_marked() {
    [ -z "$(marked)" ]
}

names() { # PID...
    local pid
    for pid in "$@"; do
        echo "$pid ($(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null))"
    done
}

# Waits until a command succeeds; polls, with a deadline.
wait_for() { # SECONDS COMMAND...
    local deadline=$((SECONDS + $1))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$deadline" ] || return 1
        sleep 0.1
    done
}

is_gone() { # PID
    ! kill -0 "$1" 2>/dev/null
}

cleanup() {
    local status=$? pids
    set +e
    [ -n "$dir" ] || exit "$status"
    if [ "$status" -ne 0 ] && [ -s "$dir/daemon.log" ]; then
        echo "--- the end of the daemon's log" >&2
        tail -n 30 "$dir/daemon.log" >&2
    fi
    # The daemon first: it ends what it started.
    if [ -n "$daemon" ] && kill -TERM "$daemon" 2>/dev/null; then
        wait_for 20 is_gone "$daemon"
    fi
    mapfile -t pids < <(marked)
    [ ${#pids[@]} -eq 0 ] || kill -TERM "${pids[@]}" 2>/dev/null
    wait_for 5 none_marked
    mapfile -t pids < <(marked)
    [ ${#pids[@]} -eq 0 ] || kill -KILL "${pids[@]}" 2>/dev/null
    chattr -R -f -i "$dir" 2>/dev/null || :
    rm -rf "$dir"
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

show() { # COMMAND...
    echo
    echo "\$ $*"
    "$@"
}

check() { # ARGUMENT...
    "$python" scripts/demo-check.py "$@" || fail "see the line above"
}

scripts/deps.sh
cargo build --workspace --locked
target=$(cargo metadata --format-version 1 --no-deps --locked |
    "$python" -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')
programs=$target/debug
[ -z "${RELEASE:-}" ] || programs=$PWD/target/packaged
[ -x "$programs/yunion-mps-daemon" ] || fail "there is no $programs/yunion-mps-daemon; make deb rpm builds it"
# The simulator is in none of the packages.
export PATH="$programs:$target/debug:$PATH"

# Short: the path of a socket below it must fit in 107 bytes.
dir=$(mktemp -d /tmp/mps-demo.XXXXXX)
chmod 755 "$dir"

host=$dir/host
exports=$(yunion-mps-sim create "$board" "$host") || fail "no simulated host of board $board"
eval "$exports"

# A bus as closed as the system's.
scripts/bus-conf.sh "$dir"
env YUNION_MPS_DEMO="$dir" dbus-daemon --config-file="$dir/bus.conf" --nofork --nopidfile --print-address \
    >"$dir/bus.address" 2>"$dir/bus.log" &
bus=$!
# It prints its address once it listens.
wait_for 10 test -s "$dir/bus.address" || fail "dbus-daemon did not start: $(cat "$dir/bus.log")"
export DBUS_SYSTEM_BUS_ADDRESS="unix:path=$dir/socket"
# Nothing here reports to a systemd that may have started us.
unset NOTIFY_SOCKET JOURNAL_STREAM WATCHDOG_USEC WATCHDOG_PID

"${query[@]}" >"$dir/before.csv" || fail "the simulated nvidia-smi does not answer"

echo
echo "\$ yunion-mps-daemon --sysroot $host/sysroot &"
env YUNION_MPS_DEMO="$dir" yunion-mps-daemon --sysroot "$host/sysroot" >"$dir/daemon.log" 2>&1 &
daemon=$!

list_json() { # METHOD FILE
    busctl call --json=short "${manager[@]}" "$1" >"$2" 2>"$dir/busctl.log"
}

# The state alone may be true too early on a board with a GPU that can't be served: wait for the others as well.
settled() {
    is_gone "$daemon" && fail "the daemon ended before it was ready"
    yunion-mpsctl status --json >"$dir/status.json" 2>"$dir/status.log" &&
        list_json ListDevices "$dir/devices.json" && list_json ListGpus "$dir/gpus.json" &&
        "$python" scripts/demo-check.py settled "$board" "$dir" >"$dir/settled.log" 2>&1
}
wait_for 60 settled || fail "not ready after 60 s: $(cat "$dir"/{settled,status,busctl}.log 2>/dev/null)"

show "${query[@]}" | tee "$dir/serving.csv.shown"
sed 1,2d "$dir/serving.csv.shown" >"$dir/serving.csv"
show yunion-mpsctl list
show yunion-mpsctl list --platform | tee "$dir/table.shown"
sed 1,2d "$dir/table.shown" >"$dir/table.txt"
echo
echo "\$ busctl call ${manager[*]} ListDevices"
busctl call "${manager[@]}" ListDevices >"$dir/devices.text"
echo "$(head -c 400 "$dir/devices.text")... ($(wc -c <"$dir/devices.text") bytes)"
check serving "$board" "$dir"

echo
echo "\$ kill -TERM <yunion-mps-daemon>"
kill -TERM "$daemon"
wait_for 60 is_gone "$daemon" || fail "the daemon runs on, 60 s after SIGTERM"
status=0
wait "$daemon" || status=$?
daemon=''
[ "$status" -eq 0 ] || fail "the daemon ended with exit status $status"
# shellcheck disable=SC2046 # PIDs
wait_for 10 only_the_bus_marked || fail "left running by the daemon: $(names $(marked | grep -vx "$bus"))"

show "${query[@]}" | tee "$dir/stopped.csv.shown"
sed 1,2d "$dir/stopped.csv.shown" >"$dir/stopped.csv"
check stopped "$board" "$dir"

kill -TERM "$bus"
wait_for 10 is_gone "$bus" || fail "dbus-daemon runs on"
# shellcheck disable=SC2046 # PIDs
wait_for 10 none_marked || fail "left running: $(names $(marked))"

echo
echo "demo: $board: every check held"
