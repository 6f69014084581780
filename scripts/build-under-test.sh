#!/bin/sh
# Builds the debs and the rpms that are only for tests, in target/under-test. They have the programs that the tests run too, so
# that nothing has to be compiled for them: without optimisation, and with this machine's C library. Their names say that they are
# no release. Everything else is the same as in the packages of `make deb rpm`.
set -eu
cd "$(dirname "$0")/.."

rm -rf target/under-test
mkdir -p target/under-test/programs
cargo build --workspace --locked
# Without the symbols, as in the release profile.
for program in yunion-mps-daemon yunion-mpsctl yunion-mps-device-plugin; do
    install -s -m 755 "target/debug/$program" target/under-test/programs/
done
scripts/pages.sh target/debug/yunion-mps-pages
for format in deb rpm; do
    "packaging/$format/build.sh" target/under-test/programs target/under-test .no-release
done
echo "build-under-test: these are for tests; make deb rpm builds the packages for users"
