# Everything a person types. Each target does its own set-up: what is missing is installed (as root) or named.
BOARD ?= tesla-p40

.PHONY: help build test check demo soak bench

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 14

build: ## the release binaries, in target/release
	scripts/deps.sh
	cargo build --release --workspace --locked

demo: ## the whole way once, on a simulated host: make demo BOARD=tesla-p40, h200x8 or mixed
	scripts/demo.sh $(BOARD)

test: ## every test, also against the real MPS control daemons 535, 550 and 555 (no GPU needed)
	scripts/deps.sh
	scripts/fetch-mps-control.sh .cache/mps
	cargo build --workspace --locked
	cargo test --workspace --locked

check: ## format, lints, licences and sources of the dependencies
	scripts/deps.sh
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	scripts/cargo-deny.sh

soak: ## ten minutes (or SOAK_SECONDS) of clients, reloads, faults and kills: what grows in the daemon, who is lost
	scripts/deps.sh
	cargo build --workspace --locked
	cargo test --locked --test it -- --ignored --nocapture soak::

bench: build ## how often an idle daemon wakes up, how long it takes to be ready (BENCH_SECONDS: of idling)
	benches/idle.sh $(BENCH_SECONDS)
