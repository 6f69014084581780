#!/bin/sh
# Runs every test, and names in the end what failed and why, and what was left out and why: make test. Where
# YUNION_MPS_SKIP_NOTHING is set, what is left out is a failure, but for the reasons that tests/support/skip.rs has.
set -eu
cd "$(dirname "$0")/.."

directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
export YUNION_MPS_SKIPPED="$directory/skipped"
: >"$YUNION_MPS_SKIPPED"

# Whoever starts this with nohup or in the background wants to be left alone by the terminal: these signals are ignored then.
# The tests send them to programs that would ignore them too. So the tests have them as usual, and no terminal.
own=
for number in 1 2 3; do
    if [ $((0x$(sed -n 's/^SigIgn:\s*//p' /proc/self/status) >> (number - 1) & 1)) = 1 ]; then
        own='setsid --wait env --default-signal=HUP --default-signal=INT --default-signal=QUIT'
    fi
done

# A pipe has the status of its last command, so the first one writes its own down.
echo 0 >"$directory/status"
# shellcheck disable=SC2086 # several words, or none
{ $own cargo test --workspace --locked --no-fail-fast 2>&1 || echo $? >"$directory/status"; } | tee "$directory/output"
# A test that fails says why long before the end, and hundreds of lines may follow.
grep -a -A 2 ' panicked at ' "$directory/output" || :
echo "skipped: $(wc -l <"$YUNION_MPS_SKIPPED")"
sort "$YUNION_MPS_SKIPPED"
exit "$(cat "$directory/status")"
