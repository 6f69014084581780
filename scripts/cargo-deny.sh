#!/bin/sh
# Checks the dependency tree against deny.toml, with cargo-deny from PATH or, failing that, built once into .cache/tools.
# Advisories are left out: they need an online database, and a new one would make an unchanged tree fail.
set -eu

VERSION=0.20.2

if command -v cargo-deny >/dev/null 2>&1; then
    program=cargo-deny
else
    program=.cache/tools/bin/cargo-deny
    # cargo install does nothing if this version is installed. It is not optimised: it runs for two seconds, and an optimised
    # build takes three times as long.
    CARGO_PROFILE_DEV_DEBUG=0 cargo install --debug --quiet --locked --root .cache/tools --version "$VERSION" cargo-deny
fi
# With the metadata of every crate on disk, the check itself needs no network.
cargo fetch --quiet --locked
"$program" --offline --locked --log-level error check bans licenses sources
