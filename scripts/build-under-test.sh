#!/bin/sh
# Builds the debs and the rpms for tests alone, in target/under-test. They hold the programs that the tests run too, so that
# nothing is compiled for them: no optimisation, this machine's C library. Their names say that they are no release.
# All else in them is what `make deb rpm` packs.
set -eu
cd "$(dirname "$0")/.."

rm -rf target/under-test
mkdir -p target/under-test/programs
cargo build --workspace --locked
# Without the symbols, as the profile of the release has it.
for program in yunion-mps-daemon yunion-mpsctl yunion-mps-device-plugin; do
    install -s -m 755 "target/debug/$program" target/under-test/programs/
done
scripts/pages.sh target/debug/yunion-mps-pages
for format in deb rpm; do
    "packaging/$format/build.sh" target/under-test/programs target/under-test .no-release
done
echo "build-under-test: these are for tests; make deb rpm builds the packages for users"
