#!/bin/bash
# On a host with a real GPU, its driver and nvcc: jobs of users as Slurm starts and cancels them (docs/slurm.md), without
# Slurm itself. With cuda_mps_may_terminate: owner a user's job that gets SIGTERM twice in the middle of a kernel leaves the
# neighbour alone, another user ends nothing, and root goes before users. Also the metrics of each client. Compute modes
# are not touched; /etc/yunion/gres.conf is written. The users read on the bus, which needs the file of docs/security.md that
# lets every local user read. Exit status 1 if anything is not as expected.
#
#   tests/gpu/jobs.sh BINARIES [DIR]   as serve.sh
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$@"
mkdir -p /etc/yunion
# The bus has to know them.
alice=(setpriv --reuid=65534 --regid=65534 --clear-groups --)
bob=(setpriv --reuid=1 --regid=1 --clear-groups --)
begun() { # LOG: until its client computes
    for _ in $(seq 600); do
        grep -q begins "$1" 2>/dev/null && break
        sleep 0.05
    done
    # The kernel is launched a moment after the word.
    sleep 1
}

build_client
host_conf 4 "cuda_mps_may_terminate: owner"
start_service
ready
yunion-mpsctl slurm >/etc/yunion/gres.conf
cat /etc/yunion/gres.conf

job() { # NUMBER LOG USER... : a long kernel on that slice of Slurm's
    local number=$1 log=$2
    shift 2
    SLURM_STEP_GPUS=$number "$@" "$bin/yunion-mpsctl" run --slurm -- "$client" long "${SECONDS_OF_KERNEL:-60}" \
        >"$log" 2>&1 &
}

say "scancel: SIGTERM, twice, in the middle of a kernel"
for round in 1 2 3; do
    SECONDS_OF_KERNEL=25 job 2 "$dir/neighbour$round.log" "${bob[@]}"
    neighbour=$!
    job 1 "$dir/victim$round.log" "${alice[@]}"
    victim=$!
    begun "$dir/neighbour$round.log"
    begun "$dir/victim$round.log"
    [ $round != 1 ] || yunion-mpsctl clients
    [ $round != 1 ] || yunion-mpsctl metrics --clients --format prometheus | grep -E '^yunion_mps_client'
    pid=$(sed -n 's/^long pid \([0-9]*\) begins.*/\1/p' "$dir/victim$round.log")
    if [ $round = 1 ]; then
        "${bob[@]}" "$bin/yunion-mpsctl" terminate "$pid"
        result "what another user's terminate gives" $((! $?)) 0
    fi
    began=$(date +%s%N)
    # As slurmstepd does at a time limit.
    kill -TERM "$victim"
    kill -TERM "$victim"
    wait "$victim"
    echo "  the victim: status $?, after $((($(date +%s%N) - began) / 1000000)) ms: $(tail -n 1 "$dir/victim$round.log")"
    result "round $round: the victim's GPU work was ended first" "$(grep -c 'gets the signal while its GPU work may go on' "$dir/victim$round.log")" 0
    wait "$neighbour"
    result "round $round: the neighbour's status" $? 0
    result "round $round: the neighbour's kernel ended by itself" "$(grep -c ' ok$' "$dir/neighbour$round.log")" 1
    cat "$dir/victim$round.log" "$dir/neighbour$round.log" | sed 's/^/    /'
done

say "by terminate, as its owner"
job 1 "$dir/owned.log" "${alice[@]}"
owned=$!
begun "$dir/owned.log"
pid=$(sed -n 's/^long pid \([0-9]*\) begins.*/\1/p' "$dir/owned.log")
"${alice[@]}" "$bin/yunion-mpsctl" terminate "$pid"
result "the owner's terminate" $? 0
wait "$owned"
sed 's/^/    /' "$dir/owned.log"
result "the program got CUDA error 810" "$(grep -c 810 "$dir/owned.log")" 1

say "without the key: users end nothing"
host_conf 4
yunion-mpsctl reload
job 1 "$dir/refused.log" "${alice[@]}"
refused=$!
begun "$dir/refused.log"
pid=$(sed -n 's/^long pid \([0-9]*\) begins.*/\1/p' "$dir/refused.log")
"${alice[@]}" "$bin/yunion-mpsctl" terminate "$pid"
result "the owner's terminate is refused" $((! $?)) 0
yunion-mpsctl terminate "$pid"
result "root's terminate" $? 0
wait "$refused"

say "the service afterwards"
yunion-mpsctl status
yunion-mpsctl doctor

say "stop"
stop_service
result "the daemon's status" $? 0
say "what the service said"
cat "$dir/daemon.log"
exit $((failures > 0))
