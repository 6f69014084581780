#!/bin/sh
# Changes the core in one place after another, like a mistake in writing, and finds out if a test fails then: make mutants. Names
# the changes after which no test fails, and fails if tests catch less than 95 % of all changes. Further options for cargo-mutants
# are in MUTANTS: MUTANTS="--file crates/core/src/links/*".
set -eu
cd "$(dirname "$0")/.."

LEAST=95

if ! command -v cargo-mutants >/dev/null 2>&1; then
    echo "cargo-mutants is not in PATH; this installs it: cargo install cargo-mutants --locked" >&2
    exit 1
fi

# The changes are made in a copy of the core and its world. The copy lacks the test that itself makes such copies. The tests read
# a page of the documents. Former builds there can still be used.
copy=target/mutants
rm -rf "$copy/crates" "$copy/tests" "$copy/docs"
mkdir -p "$copy/crates" "$copy/tests"
cp -r crates/core "$copy/crates"
cp -r tests/world "$copy/tests"
rm "$copy/crates/core/tests/defects.rs"
ln -s "$PWD/docs" "$copy/docs"
cp Cargo.lock clippy.toml "$copy"
{
    sed -e '/^\[package\]/,$d' -e 's,^members = .*,members = ["crates/core"\, "tests/world"],' Cargo.toml
    # Without optimisation, since building takes most of the time, although the tests take longer then.
    printf '[profile.dev]\nopt-level = 0\ndebug = false\n'
} >"$copy/Cargo.toml"

status=0
# Patterns are for cargo-mutants, not for the shell.
set -f
# shellcheck disable=SC2086 # several words, or none
(cd "$copy" && HISTORIES="${HISTORIES:-300}" cargo mutants --in-place --package yunion-mps-core \
    --config crates/core/mutants.toml ${MUTANTS-}) ||
    status=$?
# 2: some changes were not caught. 3: with some the tests did not end, which counts as caught.
case $status in
0 | 2 | 3) ;;
*) exit "$status" ;;
esac

count() { cat "$@" | wc -l; }
results=$copy/mutants.out
uncaught=$(count "$results/missed.txt")
caught=$(count "$results/caught.txt" "$results/timeout.txt")
cat "$results/missed.txt"
echo "$uncaught of $((caught + uncaught)) changes are not caught; at most $((100 - LEAST)) % may be"
[ $((uncaught * 100)) -le $(((caught + uncaught) * (100 - LEAST))) ]
