#!/bin/bash
# On a host with a real GPU in compute mode Default, its driver and PyTorch: the recipe for PyTorch of docs/recipes.md. A process
# takes all memory of its slice and no more, with and without PyTorch's own bound; two processes share a slice; a neighbour
# computes on. Compute modes are not touched. Exit status 1 if anything is not as expected.
#
#   tests/gpu/recipes.sh BINARIES [DIR]   as serve.sh
# shellcheck source=tests/gpu/lib.sh
. "$(dirname "$0")/lib.sh"
set_up "$@"

torch() { # SLICE PART [FILE]
    timeout 120 yunion-mpsctl run --share "$1" -- python3 "$here/recipes.py" "${@:2}"
}

word() { # FILE WORD: the word behind it
    sed -n "s/.*\b$2 \([^ ]*\).*/\1/p" "$1" | head -n 1
}

close_to() { # SUBJECT FOUND EXPECTED: not more, and 512 MiB less at most, since a fraction has three digits
    result "$1 ($2 MiB) close to $3 MiB" "$((${2:-0} <= $3 && ${2:-0} + 512 >= $3))" 1
}

host_conf 4
start_service
ready || exit 1
mapfile -t slices < <(timeout 20 yunion-mpsctl list --json | python3 -c 'import json,sys
for one in json.load(sys.stdin): print(one["addr"])')
yunion-mpsctl env "${slices[1]}"
mib=$(yunion-mpsctl env "${slices[1]}" --format json | python3 -c 'import json,sys
print(json.load(sys.stdin)["environment"]["YUNION_MPS_MEMORY_MIB"])')

say "a neighbour that computes"
torch "${slices[0]}" 0.1 "$dir/go" >"$dir/neighbour" 2>&1 &
neighbour=$!
until grep -q taken "$dir/neighbour"; do
    kill -0 "$neighbour" || break
    sleep 0.1
done

say "with the recipe"
torch "${slices[1]}" 1 >"$dir/bound" 2>&1
cat "$dir/bound"
result "free memory against the fraction" "$(word "$dir/bound" fraction-fits)" True
close_to "memory taken" "$(word "$dir/bound" taken)" "$mib"
result "the error names the bound" "$(grep -c '^error .*allowed' "$dir/bound")" 1
result "computes afterwards" "$(word "$dir/bound" computed)" True

say "without it"
torch "${slices[1]}" 0 >"$dir/unbound" 2>&1
cat "$dir/unbound"
result "the error is out of memory" "$(grep -c '^error .*out of memory' "$dir/unbound")" 1
result "a library finds no memory then" "$(grep -c 'CUBLAS_STATUS_ALLOC_FAILED' "$dir/unbound")" 1

say "two at once in one slice"
pids=()
for one in a b; do
    torch "${slices[1]}" 0.48 "$dir/go" >"$dir/$one" 2>&1 &
    pids+=($!)
done
until [ "$(grep -l taken "$dir/a" "$dir/b" | wc -l)" = 2 ]; do
    kill -0 "${pids[@]}" || break
    sleep 0.1
done
# Budgets are looked at once a second: the slice is judged once both clients are counted.
for _ in $(seq 100); do
    [ "$(timeout 20 yunion-mpsctl list --json | python3 -c 'import json,sys
print(json.load(sys.stdin)[1].get("clients"))')" = 2 ] && break
    sleep 0.1
done
timeout 20 yunion-mpsctl list
result "the slice over its budget" "$(timeout 20 yunion-mpsctl list --json | python3 -c 'import json,sys
print(json.load(sys.stdin)[1]["overuse"])')" ""
touch "$dir/go"
wait "${pids[@]}"
for one in a b; do
    cat "$dir/$one"
    close_to "memory taken" "$(word "$dir/$one" taken)" "$((mib * 48 / 100))"
    result "computes afterwards" "$(word "$dir/$one" computed)" True
done
wait "$neighbour"
cat "$dir/neighbour"
result "the neighbour computes" "$(word "$dir/neighbour" computed)" True

stop_service
result "exit status" $? 0
[ "$failures" = 0 ]
