#!/bin/bash
# The service's purpose on one screen of 80 columns and 40 rows: a simulated host, a real dbus-daemon, and the programs of the
# tests; with RELEASE=1 those in the packages of `make deb rpm`, which have to be built before. BINARIES names a directory of
# programs that are built already. Every step is checked as well as shown, and exit status 0 means that every check held.
set -euo pipefail
cd "$(dirname "$0")/.."

board=${1:-h200}
dir=''
daemon=''
runs=()

fail() {
    echo "demo: FAILED: $*" >&2
    exit 1
}

# Prints the heading of a step, bold on a terminal.
step() { # WORDS
    if [ -t 1 ]; then printf '\033[1m%s\033[0m\n' "$*"; else echo "$*"; fi
}

# Shows a command with its standard output.
show() { # COMMAND...
    echo "\$ $*"
    "$@" 2>"$dir/errors" || fail "$*: exit status $?: $(cat "$dir/errors")"
}

# Shows a command that must fail, with its standard output.
show_failing() { # COMMAND...
    echo "\$ $*"
    if "$@" 2>"$dir/errors"; then fail "$*: exit status 0"; fi
}

wait_for() { # WORDS COMMAND...
    local words=$1 deadline=$((SECONDS + 60))
    shift
    until "$@"; do
        [ "$SECONDS" -lt "$deadline" ] || fail "waited in vain for $words"
        sleep 0.05
    done
}

is_gone() { # PID
    ! kill -0 "$1" 2>/dev/null
}

# The PIDs of all processes of this demo: they inherit the mark.
marked() {
    grep -lszxF "YUNION_MPS_DEMO=$dir" /proc/[0-9]*/environ | tr -dc '0-9\n'
}

only_the_bus_runs() {
    [ "$(marked)" = "$bus" ]
}

nothing_runs() {
    [ -z "$(marked)" ]
}

cleanup() {
    local status=$? pids
    trap '' HUP INT PIPE TERM
    set +e
    [ -n "$dir" ] || exit "$status"
    # An end by a signal is no failure of the service.
    if [ "$status" -ne 0 ] && [ "$status" -lt 128 ] && [ -s "$dir/daemon.log" ]; then
        echo "--- the end of the service's log" >&2
        tail -n 30 "$dir/daemon.log" >&2
    fi
    # When the service stops, it removes the immutable flag from its directories.
    if [ -n "$daemon" ] && kill -TERM "$daemon" 2>/dev/null; then
        (wait_for "the service's end" is_gone "$daemon")
    fi
    mapfile -t pids < <(marked)
    # Without this, the shell would report the end of its jobs.
    disown -a
    [ ${#pids[@]} -eq 0 ] || kill -KILL "${pids[@]}" 2>/dev/null
    (wait_for 'the end of all processes' nothing_runs)
    chattr -R -f -i "$dir" 2>/dev/null
    rm -rf "$dir"
    exit "$status"
}

# The first value of a key in a file of JSON.
value() { # KEY FILE
    sed -n "/^ *\"$1\": /{s///; s/,\$//; s/^\"\(.*\)\"\$/\1/; p; q}" "$2"
}

modes() {
    nvidia-smi --query-gpu=gpu_uuid,compute_mode --format=csv,noheader
}

# The compute mode of the GPU of the first slice.
mode() {
    nvidia-smi -i "$uuid" --query-gpu=compute_mode --format=csv,noheader
}

expect_mode() { # MODE
    [ "$(mode)" = "$1" ] || fail "the compute mode of $uuid is $(mode), not $1"
}

start() {
    env YUNION_MPS_DEMO="$dir" yunion-mps-daemon --sysroot "$host/sysroot" >>"$dir/daemon.log" 2>&1 &
    daemon=$!
}

# Every GPU is served, except a GPU that is in MIG mode on purpose.
serves() {
    is_gone "$daemon" && fail "the service ended before it served"
    yunion-mpsctl list --gpus --json >"$dir/gpus" 2>/dev/null || return 1
    [ "$(grep -c '"healthy": false' "$dir/gpus")" -eq "$(grep -c '"reason": "MIG is on' "$dir/gpus")" ]
}

# The PIDs of the control daemons.
control_daemons() {
    yunion-mpsctl status --json | sed -n '/"control_daemons"/,/"events"/s/ *"pid": //p'
}

has_seen_fault() {
    yunion-mpsctl status --json | grep -q '"faults": [1-9]'
}

listed() { # SLICE
    pid=$(sed -n 's/^hold pid \([0-9]*\) begins with MPS$/\1/p' "$dir/$1")
    [ -n "$pid" ] && yunion-mpsctl clients | grep -q "^ *$pid .* $1 "
}

# Starts a program in a slice that computes until it is ended or meets an error. After that its PID is in the variable pid.
client() { # SLICE
    env YUNION_MPS_DEMO="$dir" yunion-mpsctl run "$1" -- cuda-client hold 600 --tell >"$dir/$1" 2>"$dir/errors" &
    runs+=($!)
    wait_for "a client of $1" listed "$1"
}

clients() {
    client "$first"
    one=$pid
    client "$second"
    two=$pid
}

compute() { # PID...
    local pid
    for pid in "$@"; do
        if is_gone "$pid"; then fail "client $pid was lost: $(grep -hs "$pid" "$dir/$first" "$dir/$second")"; fi
    done
}

no_client() {
    [ "$(yunion-mpsctl clients --json)" = '[]' ]
}

end_clients() {
    kill "${runs[@]}" 2>/dev/null || :
    wait "${runs[@]}" || :
    runs=()
    wait_for 'the end of the clients' no_client
}

reload() {
    yunion-mpsctl reload >"$dir/reload" 2>&1 || fail "reload: $(cat "$dir/reload")"
    wait_for 'the service after a reload' serves
}

configure() {
    step '1. host.conf says enable_cuda_mps: true, host_container_device.yml has the GPUs:'
    grep -qx 'enable_cuda_mps: true' "$etc/host.conf" || fail "MPS is not enabled in host.conf"
    awk '/^- / && ++entries > 1 { exit } { print }' "$etc/host_container_device.yml"
}

serve() {
    modes >"$dir/before"
    start
    wait_for 'the service' serves
    yunion-mpsctl list --json >"$dir/slices"
    yunion-mpsctl list --names >"$dir/names"
    { read -r first; read -r second; } <"$dir/names"
    uuid=$(value device_path "$dir/slices")
    expect_mode Exclusive_Process
    [ "$(modes | grep -c Exclusive_Process)" -eq "$(grep -c '"healthy": true' "$dir/gpus")" ] ||
        fail "not every GPU that is served has its compute mode: $(modes)"
    step "2. Compute mode of ${first%-*}: $(sed -n "s/^$uuid, //p" "$dir/before") -> $(mode). The slices:"
    # The 32 slices of a host with eight GPUs do not fit on the screen.
    echo "\$ yunion-mpsctl list | head -n 5     # of $(wc -l <"$dir/names") slices"
    yunion-mpsctl list >"$dir/list"
    head -n 5 "$dir/list"
}

share_memory() {
    local limit got
    limit=$(value mps_memory_limit "$dir/slices")
    if [ "$enforced" = true ]; then
        step "3. A program gets the memory of its slice, $limit MiB, and no more:"
        show_failing yunion-mpsctl run "$first" -- cuda-client alloc "$((2 * limit))" | tee "$dir/alloc"
        got=$(sed -n 's/^alloc stopped at \([0-9]*\) MiB: out of memory$/\1/p' "$dir/alloc")
        ((got <= limit && got >= limit * 9 / 10)) || fail "a program got $got of $limit MiB"
    else
        step "3. MPS holds programs to the memory of their slice from Volta on, but not here:"
        show yunion-mpsctl run "$first" -- cuda-client alloc "$((2 * limit))"
    fi
}

contain_fault() {
    if [ "$enforced" = true ]; then
        step '4. With "isolation: slice" in the device file, a fault stays in its slice:'
        cp "$etc/host_container_device.yml" "$dir/devices"
        sed -i '4s/$/\n  isolation: slice/' "$etc/host_container_device.yml"
        reload
        expect_mode Default
    else
        step '4. One fault ends all programs of a GPU before Volta. The service heals it:'
    fi
    clients
    show_failing yunion-mpsctl run "$second" -- cuda-client fault
    wait_for "the end of the client of $second" is_gone "$two"
    if [ "$enforced" = true ]; then
        compute "$one"
        echo "Client $two in this slice is lost; client $one in $first computes on."
        end_clients
        cp "$dir/devices" "$etc/host_container_device.yml"
        reload
        expect_mode Exclusive_Process
    else
        wait_for "the end of the client of $first" is_gone "$one"
        wait_for 'the fault' has_seen_fault
        end_clients
        wait_for 'the healed service' serves
        echo "Clients $one and $two are lost; the service takes new ones."
    fi
}

survive_kill() {
    local before
    clients
    before=$(control_daemons)
    step '5. kill -9 of the service loses no client: the next service takes over.'
    echo "\$ kill -9 $daemon; yunion-mps-daemon &     # while clients $one and $two compute"
    kill -KILL "$daemon"
    { wait "$daemon" || :; } 2>/dev/null
    compute "$one" "$two"
    start
    wait_for 'the next service' serves
    wait_for "the client of $first" listed "$first"
    wait_for "the client of $second" listed "$second"
    compute "$one" "$two"
    [ "$(control_daemons)" = "$before" ] || fail "the control daemons were $before, and are $(control_daemons)"
    show yunion-mpsctl clients
}

drain() {
    step "6. A drained slice takes no new program, and its clients finish:"
    # The path of a client differs between checkouts.
    show yunion-mpsctl drain "$second" | sed "s|$BINARIES/||"
    show_failing yunion-mpsctl run "$second" -- cuda-client props
    grep -q 'is drained' "$dir/errors" || fail "$second was refused for another reason: $(cat "$dir/errors")"
    # On a booted host, root's run prints a note that this bus has no systemd.
    grep -v ': note: ' "$dir/errors"
    compute "$one" "$two"
    end_clients
}

stop() {
    local status=0
    kill -TERM "$daemon"
    wait_for "the service's end" is_gone "$daemon"
    wait "$daemon" || status=$?
    daemon=''
    [ "$status" -eq 0 ] || fail "the service ended with exit status $status"
    wait_for "the end of all that the service started" only_the_bus_runs
    modes >"$dir/after"
    cmp -s "$dir/before" "$dir/after" || fail "the compute modes are not those from before: $(cat "$dir/after")"
    kill -TERM "$bus"
    wait "$bus" || :
    nothing_runs || fail "processes are left: $(marked)"
    step "7. The service has stopped: compute mode $(mode) again, and no process is left."
}

if [ -z "${BINARIES:-}" ]; then
    scripts/deps.sh demo
    cargo build --workspace --locked
    target=$(cargo metadata --format-version 1 --no-deps --locked | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
    BINARIES=$target/debug
fi
SECONDS=0
programs=$BINARIES
[ -z "${RELEASE:-}" ] || programs=$PWD/target/packaged
[ -x "$programs/yunion-mps-daemon" ] || fail "there is no $programs/yunion-mps-daemon; make deb rpm builds it"
# The simulator is not in the packages.
export PATH="$programs:$BINARIES:$PATH" COLUMNS=80
echo "Board $board is simulated; the service, its commands and the bus are real."

trap cleanup EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 141' PIPE
trap 'exit 143' TERM
# A short path: the path of a socket below it must fit in 107 bytes.
dir=$(mktemp -d /tmp/mps-demo.XXXXXX)
chmod 755 "$dir"
host=$dir/host
etc=$host/sysroot/etc/yunion
exports=$(yunion-mps-sim create "$board" "$host") || fail "no simulated host of board $board"
eval "$exports"
# Nothing here must report to a systemd that may have started this script.
unset NOTIFY_SOCKET JOURNAL_STREAM WATCHDOG_USEC WATCHDOG_PID
# doctor looks for it there.
export RUNTIME_DIRECTORY=$host/sysroot/run/yunion-mps-daemon
mkdir -p "$host/sysroot/run"

# A bus with the same restrictions as the system bus.
scripts/bus-conf.sh "$dir"
env YUNION_MPS_DEMO="$dir" dbus-daemon --config-file="$dir/bus.conf" --nofork --nopidfile --print-address \
    >"$dir/bus.address" 2>"$dir/bus.log" &
bus=$!
# It prints its address once it listens.
wait_for 'dbus-daemon' test -s "$dir/bus.address"
export DBUS_SYSTEM_BUS_ADDRESS="unix:path=$dir/socket"

configure
serve
enforced=$(value limits_enforced "$dir/slices")
share_memory
contain_fault
survive_kill
drain
stop
echo "demo: $board: every check held, in $SECONDS s"
