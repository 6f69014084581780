//! A check of the container engines on this host, and of the runtime with which they stop containers.

use std::path::Path;

use super::facts::Facts;
use super::{Check, Outcome, each, info};
use common::config::below;

pub(super) const CHECKS: &[Check] = &[("the runtimes of container engines", runtimes)];

/// The names of all OCI runtimes of this service begin with this text.
const OURS: &str = "yunion-mps-";

struct Engine {
    name: &'static str,
    /// The engine is installed if one of these files exists.
    traces: &'static [&'static str],
    /// The configuration files in which an administrator may name this service's runtime. The most usual file is the first.
    files: &'static [&'static str],
    /// The instruction for an administrator who configures this service's runtime.
    lines: &'static str,
}

const ENGINES: [Engine; 3] = [
    Engine {
        name: "Docker",
        traces: &["/usr/bin/dockerd", "/usr/sbin/dockerd", "/usr/local/bin/dockerd"],
        files: &["/etc/docker/daemon.json"],
        lines: "add a runtime with the path /usr/bin/yunion-mps-runc, make this runtime the default, then \
                run systemctl reload docker",
    },
    Engine {
        name: "podman",
        traces: &["/usr/bin/podman", "/usr/local/bin/podman"],
        files: &["/etc/containers/containers.conf", "/usr/share/containers/containers.conf"],
        lines: "add the runtime yunion-mps-runc with the path /usr/bin/yunion-mps-runc in \
                [engine.runtimes], and write runtime = \"yunion-mps-runc\" in [engine]",
    },
    Engine {
        name: "containerd",
        traces: &["/etc/containerd/config.toml"],
        files: &["/etc/containerd/config.toml"],
        lines: "write BinaryName = /usr/bin/yunion-mps-runc in the options of the CRI plugin's runtime \
                runc, then run systemctl restart containerd",
    },
];

/// Finds container engines that do not use this service's runtime. An engine passes this check if one of its configuration
/// files contains the name of the runtime: the files are not parsed.
fn runtimes(facts: &Facts) -> Outcome {
    let place = |path: &&str| below(&facts.sources.sysroot, Path::new(path));
    let is_there = |engine: &&Engine| engine.traces.iter().any(|trace| place(trace).exists());
    let names_ours = |path: &&str| std::fs::read_to_string(place(path)).is_ok_and(|text| text.contains(OURS));
    let without = ENGINES.iter().filter(is_there).filter(|engine| !engine.files.iter().any(names_ours));
    each(without, |engine| {
        let file = engine.files.first()?;
        Some(info(
            "stop-harms-neighbours",
            file,
            format!(
                "the configuration of {name} names no runtime that ends GPU work before a signal: a \
                 container that is stopped in the middle of a kernel ends the work of its neighbours on the \
                 GPU",
                name = engine.name
            ),
            format!("{lines}; docs/stops.md shows what to write", lines = engine.lines),
        ))
    })
}
