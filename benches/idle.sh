#!/bin/sh
# Measures the daemon on a simulated host: its time until it is ready, the time until it sees the death of a control
# daemon, and its wake-ups while it is idle. Usage: benches/idle.sh [SECONDS]. It prints the figures, and fails only if
# the idle daemon wakes up once a second or more often. BINARIES names the folder of the programs (target/release).
set -eu
cd "$(dirname "$0")/.."
seconds=${1:-60}
binaries=$(realpath "${BINARIES:-target/release}")
host=$(mktemp -d /tmp/mpsXXXXXX)
daemon='' bare='' bus=''
# The control daemon outlives its parent; only its own front end ends it in order.
end() {
    [ -z "$daemon" ] || { kill "$daemon" && wait "$daemon"; } 2>/dev/null || :
    [ -z "$bare" ] || { kill "$bare" && wait "$bare"; } 2>/dev/null || :
    [ -z "$bus" ] || kill "$bus" 2>/dev/null || :
    rm -rf "$host"
}
trap end EXIT
trap 'exit 1' INT TERM

eval "$("$binaries/yunion-mps-sim" create h200 "$host/h")"
export RUNTIME_DIRECTORY="$host/h/run" CUDA_MPS_PIPE_DIRECTORY="$host/h/mps/pipe"
now() { date +%s%N; }
milliseconds() { echo $((($2 - $1) / 1000000)); }
# Tries the command until it succeeds, without a pause: a pause would be in the figure.
until_true() {
    give_up=$(($(date +%s) + 30))
    until "$@" >/dev/null 2>&1; do
        [ "$(date +%s)" -lt "$give_up" ] || { echo "waited in vain for: $*" >&2; exit 1; }
    done
}
answers() { echo get_server_list | nvidia-cuda-mps-control; }

# A control daemon alone, with a server, as an administrator would start it.
server_ready() { [ -n "$(echo get_server_list | nvidia-cuda-mps-control)" ] && grep -q 'Ready$' "$host/bare.log"; }
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY"
start=$(now)
nvidia-cuda-mps-control -f -multiuser-server >"$host/bare.log" 2>&1 &
bare=$!
until_true answers
answered=$(milliseconds "$start" "$(now)")
echo 'start_server -uid 0' | nvidia-cuda-mps-control
until_true server_ready
bare_ready=$(milliseconds "$start" "$(now)")
echo quit | nvidia-cuda-mps-control
wait "$bare"
bare=''

scripts/bus-conf.sh "$host"
dbus-daemon --config-file="$host/bus.conf" --nofork --nopidfile 2>/dev/null &
bus=$!
export DBUS_SYSTEM_BUS_ADDRESS="unix:path=$host/socket"
until_true test -S "$host/socket"

# The log says when it is ready: a question on the bus would be work for the daemon too.
ready() { [ "$(grep -c 'ready: 4 devices' "$host/log")" -ge "$1" ]; }
start=$(now)
"$binaries/yunion-mps-daemon" --sysroot "$host/h/sysroot" 2>"$host/log" &
daemon=$!
until_true ready 1
ours=$(milliseconds "$start" "$(now)")
echo "start to ready: $ours ms; a bare control daemon answers after $answered ms, with a server after $bare_ready ms" \
    "(ratio $(awk "BEGIN { printf \"%.1f\", $ours / $bare_ready }"))"

control=$(sed -n 's/.*control daemon shared started as PID \([0-9]*\).*/\1/p' "$host/log")
start=$(now)
kill -KILL "$control"
until_true grep -q 'the control daemon ended' "$host/log"
seen=$(milliseconds "$start" "$(now)")
until_true ready 2
echo "a control daemon's SIGKILL: seen after $seen ms, served again after $(milliseconds "$start" "$(now)") ms"

# Wake-ups, voluntary or not, of all threads: each thread's last count less its first. A new thread counts from 0, and a
# thread that ends counts with its last figure.
counts() {
    for thread in /proc/"$daemon"/task/*; do
        awk -v "thread=${thread##*/}" '/ctxt_switches/ { sum += $2 } END { print thread, sum }' "$thread/status" || :
    done 2>/dev/null
}
sleep 15
counts >"$host/first"
: >"$host/later"
for _ in $(seq "$seconds"); do
    sleep 1
    counts >>"$host/later"
done
woken=$(awk 'NR == FNR { first[$1] = $2; next } { last[$1] = $2 }
    END { for (thread in last) sum += last[thread] - first[thread]; print sum }' "$host/first" "$host/later")
per_second=$(awk "BEGIN { printf \"%.2f\", $woken / $seconds }")
entries() { find "$1" -mindepth 1 -maxdepth 1 | wc -l; }
echo "idle: $woken wake-ups in $seconds s, $per_second a second;" \
    "$(awk '/VmRSS/ { print $2 }' /proc/"$daemon"/status) KiB RSS, $(entries /proc/"$daemon"/fd) files," \
    "$(entries /proc/"$daemon"/task) threads"
awk "BEGIN { exit !($per_second < 1) }"
