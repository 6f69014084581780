#!/bin/bash
# On a host with a real GPU, its driver and nvcc, as root where control groups can be made: containers are killed in the middle of a
# kernel, behind yunion-mps-runc and without it, and a neighbour on the same GPU computes through that or not. The runtime is a
# script that signals. The compute mode is left alone.
#
#   tests/gpu/stops.sh BINARIES [DIR]   as serve.sh; STOPS=20 for each way
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$@"
host_conf 4
stops=${STOPS:-20}

mkdir -p "$dir/runtime"
cat >"$dir/runtime/runc" <<'END'
#!/bin/sh
pid=$(cat "$(dirname "$0")/$2.pid")
case $1 in
state) echo "{\"pid\": $pid}" ;;
kill) kill "-$3" "$pid" ;;
esac
END
chmod 755 "$dir/runtime/runc"
ln -sf "$bin/yunion-mpsctl" "$dir/runtime/yunion-mps-runc"
PATH=$dir/runtime:$PATH

build_client
start_service_again
ready
slice=$(a_slice)
gpu=${slice%-*}
for root in /sys/fs/cgroup/systemd /sys/fs/cgroup; do
    mkdir "$root/mps-stops-$$" 2>/dev/null && group=$root/mps-stops-$$ && break
done
[ -n "${group:-}" ] || { echo "FAILED: no control group can be made here"; exit 1; }
trap 'rmdir "$group"/* "$group" 2>/dev/null' EXIT

neighbour() { # on slice 0: sets the variable neighbour
    eval "$(yunion-mpsctl env "$gpu-0" --share)"
    "$client" hold 600 >"$dir/neighbour" 2>&1 &
    neighbour=$!
    for _ in $(seq 100); do
        yunion-mpsctl clients --json | grep -q "\"pid\": $neighbour\b" && break
        sleep 0.1
    done
    sleep 1
}

container() { # NAME: a client in a long kernel
    mkdir -p "$group/$1"
    eval "$(yunion-mpsctl env "$gpu-1" --share)"
    : >"$dir/long"
    # shellcheck disable=SC2016 # the shell that enters says it
    sh -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$group/$1" "$client" long 60 >"$dir/long" 2>&1 &
    long=$!
    echo "$long" >"$dir/runtime/$1.pid"
    for _ in $(seq 200); do grep -q begins "$dir/long" && break; sleep 0.05; done
    sleep 0.5
}

for way in yunion-mps-runc runc; do
    for signal in 9 15; do
        say "$stops containers are killed by $way kill $signal"
        lost=0 slowest=0
        neighbour
        for round in $(seq "$stops"); do
            container "job-$signal-$round"
            before=$(date +%s%N)
            timeout 20 "$way" kill "job-$signal-$round" "$signal" || echo "  FAILED: $way"
            took=$((($(date +%s%N) - before) / 1000000))
            [ "$took" -le "$slowest" ] || slowest=$took
            wait "$long" 2>/dev/null
            sleep 0.5
            kill -0 "$neighbour" 2>/dev/null || { lost=$((lost + 1)); wait "$neighbour"; ready; neighbour; }
            [ "$way" = yunion-mps-runc ] || [ "$round" -lt "${PLAIN:-4}" ] || break
        done
        { kill "$neighbour"; wait "$neighbour"; } 2>/dev/null
        echo "$way, signal $signal: $lost neighbours lost in $round stops; the slowest command took $slowest ms"
        [ "$way" = runc ] || result "the number of lost neighbours" "$lost" 0
        ready
    done
done
stop_service
exit "$failures"
