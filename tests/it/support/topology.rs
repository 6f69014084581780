//! Runs tests twice: with one control daemon for all GPUs, and with a control daemon for each slice. In the second case, each
//! test is about the control daemon of the first slice.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

use super::host::{Host, control_daemon};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Topology {
    Shared,
    PerSlice,
}

/// Makes two tests of each function, one for each topology. The functions after `soak:` hardly depend on the topology. Their
/// tests with a control daemon for each slice run only in `make soak`.
macro_rules! in_both_topologies {
    ($($test:ident),* $(,)? $(; soak: $($in_soak:ident),* $(,)?)?) => {
        mod shared {
            use $crate::support::topology::Topology::Shared;
            $(#[test] fn $test() { super::$test(Shared) })*
            $($(#[test] fn $in_soak() { super::$in_soak(Shared) })*)?
        }
        mod per_slice {
            use $crate::support::topology::Topology::PerSlice;
            $(#[test] fn $test() { super::$test(PerSlice) })*
        }
        $(mod soak {
            use $crate::support::topology::Topology::PerSlice;
            $(#[test] #[ignore = "the other topology: make soak"] fn $in_soak() { super::$in_soak(PerSlice) })*
        })?
    };
}
pub(crate) use in_both_topologies;

impl Topology {
    /// The board with the oldest GPU that can be served in this topology.
    pub(crate) fn oldest_board(self) -> &'static str {
        match self {
            Self::Shared => "tesla-p40",
            Self::PerSlice => "h200",
        }
    }
}

/// These methods are about one control daemon: the only one, or that of the first slice.
impl Host {
    pub(crate) fn with_topology(topology: Topology, board: &str) -> Self {
        let mut host = Self::new(board);
        if topology == Topology::PerSlice {
            host.configure("cuda_mps_topology: per_slice");
            let address = fs::read_to_string(host.path("gpus/0/pci")).unwrap().to_lowercase();
            host.first_slice = Some(format!("{}-0", address.trim().trim_start_matches("00000000:")));
        }
        host
    }

    pub(crate) fn serving_as(topology: Topology, board: &str) -> Self {
        let mut host = Self::with_topology(topology, board);
        host.start();
        host.wait_for_state("ready");
        host
    }

    pub(crate) fn control_daemon_id(&self) -> String {
        self.first_slice.clone().unwrap_or_else(|| "shared".to_owned())
    }

    /// The pipe directory, in which clients connect to the control daemon.
    pub(crate) fn pipe(&self) -> PathBuf {
        self.its_own_below("mps/pipe")
    }

    /// The private directory of the control daemon. The socket in it accepts every command.
    pub(crate) fn private(&self) -> PathBuf {
        self.its_own_below("mps/pipe.private")
    }

    pub(crate) fn control_log(&self) -> PathBuf {
        self.its_own_below("mps/log").join("control.log")
    }

    fn its_own_below(&self, directory: &str) -> PathBuf {
        let directory = self.path(directory);
        let below = self.first_slice.as_ref().map(|slice| directory.join(slice.replace(':', "_")));
        below.unwrap_or(directory)
    }

    pub(crate) fn its_slices(&self) -> Vec<Value> {
        let is_its =
            |slice: &Value| self.first_slice.as_ref().is_none_or(|first| slice["addr"] == first.as_str());
        self.list().into_iter().filter(is_its).collect()
    }

    /// Waits until the service is `degraded` or `failed`, and the reason for this state or for the control daemon's state
    /// contains this text. Returns the status.
    pub(crate) fn wait_until_it_fails(&self, reason: &str) -> Value {
        if self.first_slice.is_none() {
            return self.wait_for_failure(reason);
        }
        self.wait_for_status(reason, |status| {
            let has_reason = |text: &Value| text.as_str().unwrap_or_default().contains(reason);
            ["degraded", "failed"].iter().any(|state| status["service"]["state"] == *state)
                && (has_reason(&status["service"]["state_reason"])
                    || has_reason(&control_daemon(status)["reason"]))
        })
    }

    pub(crate) fn compute_mode_while_served(&self) -> &'static str {
        if self.first_slice.is_none() { "Exclusive_Process" } else { "Default" }
    }

    /// Makes a command that runs a client in the second slice, which has its own control daemon. Returns None if one control
    /// daemon serves all slices.
    pub(crate) fn program_of_another(&self, arguments: &[&str]) -> Option<Command> {
        let first = self.first_slice.as_ref()?;
        Some(self.program_of(&first.replace("-0", "-1"), arguments))
    }
}
