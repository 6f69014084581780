#!/bin/bash
# On a host with a real GPU, its driver and nvcc: changes that need another control daemon, while programs follow one another. No
# program gets error 805 or begins without MPS, and each change comes into force in the first quiet moment. The compute mode is left
# alone, so a program that came while no control daemon takes clients would begin without MPS: the programs pause for that long.
#
#   tests/gpu/changes.sh BINARIES [DIR]   as serve.sh; CHANGES=50 of them, PAUSE=0.25 between two programs
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$@"
changes=${CHANGES:-50} pause=${PAUSE:-0.25}

# Another log directory is a control daemon's own from its start on.
configure() { host_conf 4 && sed -i "s|^cuda_mps_log_directory:.*|cuda_mps_log_directory: $dir/log-$1|" "$dir/etc/host.conf"; } # NUMBER

log_of() { of_status 's["control_daemons"][0]["log_directory"]'; }

build_client
configure 0
start_service
ready
slice=$(a_slice)
# The program itself, as in a container: it starts without a question to the service.
eval "$(yunion-mpsctl env "$slice")"
limited=$("$client" props | grep -o 'sms [0-9]*' | head -1)
say "a program of the slice has $limited"

programs() { # until the file $dir/quiet is there
    until [ -e "$dir/quiet" ]; do
        timeout 60 "$client" props 2>&1 | tail -1 >>"$dir/programs"
        sleep "$pause"
    done
}

slowest=0
for number in $(seq "$changes"); do
    rm -f "$dir/quiet"
    programs &
    busy=$!
    configure $((number % 2))
    timeout 20 yunion-mpsctl reload >/dev/null
    sleep 2
    [ "$(log_of)" = "$dir/log-$((number % 2))" ] && result "change $number among programs" "in force" "put off"
    touch "$dir/quiet"
    wait "$busy"
    begun=$(date +%s%N)
    for _ in $(seq 200); do
        [ "$(log_of)" = "$dir/log-$((number % 2))" ] && is_ready && break
        sleep 0.05
    done
    [ "$(log_of)" = "$dir/log-$((number % 2))" ] || result "change $number" "put off" "in force"
    took=$((($(date +%s%N) - begun) / 1000000))
    [ "$took" -gt "$slowest" ] && slowest=$took
done
say "$changes changes, the slowest in force $slowest ms after the last program"
ran=$(grep -c . "$dir/programs")
result "programs with the slice's limits" "$(grep -c "$limited\b" "$dir/programs")" "$ran"
result "programs with error 805" "$(grep -c 805 "$dir/programs")" 0
grep -v "$limited\b" "$dir/programs" | sort | uniq -c | head -5
stop_service
result "exit status" $? 0
[ "$failures" = 0 ]
