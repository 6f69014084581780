//! yunion-mps-device-plugin: offers the slices of a Kubernetes node to the kubelet. The program knows the slices only from the
//! service, which it asks over D-Bus.
//!
//! All decisions are pure functions of the service's list of slices. `plugin` carries out the decisions. A module uses only
//! modules on lower floors.
//!
//! | floor | module | its job |
//! |---|---|---|
//! | 7 | `plugin` | the options, and the loop: serves sockets and registers resources |
//! | 6 | `resource` | one resource: its socket, and the answers to the kubelet |
//! | 5 | `kubelet`, `service` | the connections to the kubelet and to the service, which may both restart |
//! | 4 | `counters` | the metrics |
//! | 3 | `allocation` | the settings of a container, or the refusal; pure |
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

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use plugin::{Arguments, run};

/// The command line as data, for its manual page.
pub fn command() -> clap::Command {
    Arguments::command()
}

pub fn main() -> ExitCode {
    let arguments = Arguments::parse();
    logging::init();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime.and_then(|runtime| runtime.block_on(run(arguments))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("yunion-mps-device-plugin ends: {error}");
            ExitCode::FAILURE
        }
    }
}
