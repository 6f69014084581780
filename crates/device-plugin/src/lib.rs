//! yunion-mps-device-plugin: hands the slices of yunion-mps-daemon to the kubelet of a Kubernetes node. The program asks the
//! service over D-Bus and knows nothing else of MPS.
//!
//! Decisions are pure functions of the service's list of slices. `plugin` carries out the decisions.
//!
//! | floor | module | its job |
//! |---|---|---|
//! | 7 | `plugin` | the loop: serves sockets and registers resources |
//! | 6 | `resource` | one resource: its socket, and the answers to the kubelet |
//! | 5 | `kubelet`, `service` | the connections to the kubelet and to the service, which may both restart |
//! | 4 | `counters` | the metrics |
//! | 3 | `allocation` | the settings of a container; pure |
//! | 2 | `offers` | the resources and their devices, healthy or not; pure |
//! | 1 | `names`, `preference` | the name of a size; the best slice for a container; pure |
//! | 0 | `slice`, `api`, `codec`, `logging` | a slice; the kubelet's messages, and their encoding; the log |

#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "this workspace alone uses it")]

mod allocation;
mod api;
mod codec;
mod counters;
mod kubelet;
mod logging;
mod names;
mod offers;
mod plugin;
mod preference;
mod resource;
mod service;
mod slice;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser};

use names::{NamedSize, Naming, domain};
use plugin::{Choices, run};
use preference::Placement;

/// Hands the slices of yunion-mps-daemon to the kubelet, one resource for each size of slice.
///
/// A size is named after its memory in GiB, rounded down: yunion.io/mps-20gib. A pod asks for one of it in
/// resources.limits. docs/kubernetes.md has the whole rule, and examples.
#[derive(Debug, Parser)]
#[command(name = "yunion-mps-device-plugin", version)]
#[command(
    after_help = "The program needs root, yunion-mps-daemon on this host, and the system bus of the host (/run/dbus in a pod). It waits for the service and for the kubelet, and registers again when the kubelet restarts.\n\n\
    Exit status: 0 (stopped by a signal), 1 (failed), 2 (wrong usage).\n\n\
    Examples:\n  \
    yunion-mps-device-plugin\n  \
    yunion-mps-device-plugin --resource small=20GiB --resource fast=20GiB:50 --preferred spread\n  \
    yunion-mps-device-plugin --without-cdi --metrics /var/lib/prometheus/node-exporter/yunion-mps-device-plugin.prom"
)]
struct Arguments {
    /// The kubelet's directory, with device-plugins in it
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    kubelet_directory: PathBuf,
    /// The domain in front of the names of resources
    #[arg(long, value_name = "DOMAIN", default_value = "yunion.io", value_parser = domain)]
    domain: String,
    /// Name a size: small=20GiB (whole GiB, rounded down), small=20480MiB (exactly), small=20GiB:25 (with this percentage
    /// of the threads). May be given several times; the first that fits counts
    #[arg(long = "resource", value_name = "NAME=SIZE")]
    resources: Vec<NamedSize>,
    /// The GPU that a container gets a slice of
    #[arg(long, value_enum, default_value_t = Placement::Pack)]
    preferred: Placement,
    /// Give containers environment variables, mounts and device nodes, but no CDI devices: for container engines without CDI
    /// that use NVIDIA's runtime. Nothing then binds a container to its slice
    #[arg(long)]
    without_cdi: bool,
    /// The time that the service may be away before its slices are unhealthy
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(..=3600))]
    grace: u64,
    /// Keep metrics in this file, for the textfile collector of Prometheus's node exporter
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
}

/// The command line as data, for its manual page.
pub fn command() -> clap::Command {
    Arguments::command()
}

/// Runs the program to its end.
pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    logging::init();
    let choices = Choices {
        kubelet_directory: arguments.kubelet_directory,
        naming: Naming { domain: arguments.domain, named: arguments.resources },
        grace: Duration::from_secs(arguments.grace),
        metrics: arguments.metrics,
        placement: arguments.preferred,
        without_cdi: arguments.without_cdi,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.and_then(|runtime| runtime.block_on(run(choices))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("yunion-mps-device-plugin ends: {error}");
            ExitCode::FAILURE
        }
    }
}
