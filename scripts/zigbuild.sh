#!/bin/bash
# Builds programs for TARGET against the C library that the packages need (packaging/glibc-version), with zig as the linker: it
# brings the symbols of every version of the C library, for every architecture.
#   scripts/zigbuild.sh TARGET ARGUMENT...   the arguments are those of cargo build
set -euo pipefail
cd "$(dirname "$0")/.."

target=$1
shift
tools=$(scripts/fetch-zig.sh)
std=$(scripts/fetch-std.sh "$target")
# What runs on this machine while this is built, such as build scripts, doesn't get these flags.
[ -z "$std" ] || export "CARGO_TARGET_$(tr a-z- A-Z_ <<<"$target")_RUSTFLAGS=$std"
CARGO_ZIGBUILD_ZIG_PATH=$tools/ziglang/zig CARGO_ZIGBUILD_CACHE_DIR=$PWD/target/zig \
    ZIG_GLOBAL_CACHE_DIR=$PWD/target/zig/cache ZIG_LOCAL_CACHE_DIR=$PWD/target/zig/cache \
    "$tools/bin/cargo-zigbuild" zigbuild --locked --target "$target.$(cat packaging/glibc-version)" "$@"
