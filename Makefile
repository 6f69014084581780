# The commands for developers. Each target does its own set-up: missing programs are installed (as root) or named.
BOARD ?= h200

# The architecture of the packages if it is not that of this machine: amd64 or arm64.
export ARCH

# Each target uses all cores by itself, and installs and fetches what the next ones need.
.NOTPARALLEL:

.PHONY: help build install deb rpm packages dist check-dist fetch test test-arm64 check demo model mutants soak bench cluster

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

build: ## the release binaries, in target/release, and manual pages and completions, in target/pages
	scripts/deps.sh build
	scripts/build.sh

install: ## what make build has built, on this host: make install, or with PREFIX= and DESTDIR=
	packaging/install.sh
	packaging/install-device-plugin.sh
	[ -n "$$DESTDIR" ] || systemd-sysusers "$${PREFIX:-/usr}/lib/sysusers.d/yunion-mps-daemon.conf"

packages: deb rpm ## both

deb: target/packaged ## the Debian packages, in dist, for every distribution from Debian 10 and Ubuntu 20.04 on (ARCH=arm64: in dist/arm64)
	packaging/deb/build.sh

rpm: target/packaged ## the rpms, in dist, for RHEL 8 and 9, openEuler 20.03 and newer, Fedora
	packaging/rpm/build.sh

# cargo knows if it is up to date.
.PHONY: target/packaged
target/packaged:
	scripts/deps.sh packages
	scripts/build-packaged.sh

dist: ## the sources with those of all crates, a debian/ and a spec, in dist, from which packages are built without a network
	scripts/deps.sh dist
	scripts/dist.sh

check-dist: ## builds both packages from make dist in a clean root without a network, and compares them with make deb rpm
	scripts/deps.sh clean_root
	scripts/check-dist.sh

fetch: ## all that make deb rpm takes from the network, which it needs no more then
	scripts/deps.sh packages
	scripts/fetch-zig.sh
	$(if $(ARCH),. packaging/architecture.sh && scripts/fetch-std.sh "$$RPM_ARCH-unknown-linux-gnu")
	cargo fetch --locked

demo: ## what the service is for, on one screen, on a simulated host: make demo BOARD=h200, h200x8, mixed, gh200x4, gb10 or tesla-p40 (RELEASE=1 as in make test)
	scripts/demo.sh $(BOARD)

# Only root can boot a systemd, where the packages are tested. With RELEASE=1 these are the packages of make deb rpm, which have
# to be built before. Otherwise they have the programs of the tests, which saves some minutes.
export RELEASE STRESS
PACKAGES_TO_TEST = $(if $(RELEASE),,$(if $(filter 0,$(shell id -u)),under-test))

.PHONY: under-test
under-test:
	scripts/deps.sh packages
	scripts/build-under-test.sh

.PHONY: ready-to-test
ready-to-test: $(PACKAGES_TO_TEST)
	scripts/deps.sh
	scripts/fetch-mps-control.sh .cache/mps
	scripts/fetch-kubernetes-api.sh .cache/kubernetes-api
	scripts/fetch-cel.sh .cache/cel
	scripts/fetch-programs.sh .cache/programs
	$(if $(filter 0,$(shell id -u)),scripts/machine-root.sh .cache/machine)
	$(if $(filter 0,$(shell id -u)),scripts/arm64-under-test.sh)
	cargo build --workspace --locked

test: ready-to-test ## every test, also against the real MPS control daemons 535, 550 and 555 and, as root, of the packages in a booted systemd (no GPU needed); what was skipped is named in the end; STRESS=2 for two busy loops on each core beside them
	scripts/test.py

test-arm64: ready-to-test ## as root: many of the tests on simulated hosts with programs for aarch64 in an emulator, and what make test does with them
	cargo test --locked --workspace --test it -- --include-ignored arm64::

check: ## format, lints, links of the documentation, licences and sources of the dependencies
	scripts/deps.sh
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --document-private-items --workspace --locked
	scripts/cargo-deny.sh

model: ## histories of the core in a world in memory, for five minutes (or MODEL_SECONDS), from MODEL_SEED on
	MODEL_SECONDS=$${MODEL_SECONDS:-300} MODEL_SEED=$${MODEL_SEED:-$$(date +%s)} cargo test --locked -p yunion-mps-core --test histories -- --nocapture

mutants: ## changes the core in one place after another, and names the changes that no test notices: hours (MUTANTS= for options)
	scripts/mutants.sh

soak: ready-to-test ## ten minutes (or SOAK_SECONDS) of clients, reloads, faults and kills: what grows in the daemon, who is lost; and the tests that make test leaves to it
	cargo test --locked --test it --test e2e -- --ignored --nocapture soak::
	ROUNDS=10 cargo test --locked --test e2e -- comes_back docker_with_cdi
	ROUNDS=50 cargo test --locked --test it -- pods::rolling_updates

bench: ## the service's own times, memory and wake-ups, as one table (N= runs, BASE=REV or PEER=PROGRAM to compare with)
	scripts/deps.sh bench
	cargo build --release --workspace --locked
	benches/service/run.py

cluster: ## service and device plugin on a real cluster of one node, as root, after make deb: make cluster KUBERNETES=DIRECTORY with the programs of Kubernetes (TRIALS= for some of the trials)
	tests/kubernetes/cluster/run.py --check
	scripts/deps.sh
	scripts/machine-root.sh .cache/machine
	cargo build --workspace --locked
	tests/kubernetes/cluster/run.py $(TRIALS)
