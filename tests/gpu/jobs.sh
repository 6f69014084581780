#!/bin/bash
# On a host with a real GPU, its driver and nvcc: jobs of users as Slurm starts and cancels them (docs/slurm.md), without
# Slurm itself. With cuda_mps_may_terminate: owner a user's job that gets SIGTERM twice in the middle of a kernel leaves the
# neighbour alone, another user ends nothing, and root goes before users. Also the metrics of each client. Compute modes
# are not touched; /etc/yunion/gres.conf is written. Exit status 1 if anything is not as expected.
#
#   tests/gpu/jobs.sh BINARIES [DIR]   as serve.sh
set -u
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "$1" && pwd)
dir=${2:-$(mktemp -d /tmp/mps-gpu.XXXXXX)}
mkdir -p "$dir/etc" /etc/yunion
chmod 755 "$dir"
export PATH=$bin:$PATH RUNTIME_DIRECTORY=$dir/run
failures=0
say() { printf '\n##### %s [%s]\n' "$*" "$(date +%H:%M:%S.%3N)"; }
result() { # SUBJECT FOUND EXPECTED
    if [ "$2" = "$3" ]; then echo "  ok: $1 is $2"; else
        echo "  FAILED: $1 is $2, not $3"
        failures=$((failures + 1))
    fi
}
# The bus has to know them.
alice=(setpriv --reuid=65534 --regid=65534 --clear-groups --)
bob=(setpriv --reuid=1 --regid=1 --clear-groups --)
ready() { # until the state is ready
    for _ in $(seq 600); do
        yunion-mpsctl status --json 2>/dev/null | grep -q '"state": *"ready"' && return
        sleep 0.05
    done
    echo "NOT READY"
    yunion-mpsctl status
}
begun() { # LOG: until its client computes
    for _ in $(seq 600); do
        grep -q begins "$1" 2>/dev/null && break
        sleep 0.05
    done
    # The kernel is launched a moment after the word.
    sleep 1
}
configure() { # KEYS
    cat >"$dir/etc/host.conf" <<END
enable_cuda_mps: true
cuda_mps_replicas: 4
cuda_mps_set_compute_mode: false
cuda_mps_pipe_directory: $dir/pipe
cuda_mps_log_directory: $dir/log
$1
END
}

[ -x "$dir/client" ] || nvcc -O2 -arch=native -o "$dir/client" "$here/client.cu" || exit 1
client=$dir/client
configure "cuda_mps_may_terminate: owner"
yunion-mps-daemon --config "$dir/etc/host.conf" >"$dir/daemon.log" 2>&1 &
daemon=$!
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
    result "round $round: the victim's GPU work was ended first" "$(grep -c 'not ended first' "$dir/victim$round.log")" 0
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
configure ""
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
kill -TERM "$daemon"
wait "$daemon"
result "the daemon's status" $? 0
say "what the service said"
cat "$dir/daemon.log"
exit $((failures > 0))
