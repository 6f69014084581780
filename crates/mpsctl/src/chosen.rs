//! The devices for a command: named, chosen by the service (`--free`), or given by Slurm (`--slurm`).

use std::time::{Duration, Instant};

use clap::Args;
use tokio::time::sleep;

use crate::Result;
use crate::complete;
use crate::screen::say;
use crate::slurm;
use common::bus::error::RequestError;
use common::bus::proxy::{BusError, DaemonProxy, SliceWish};
use common::published::container::ContainerConfig;

/// The longest wait for a slice that will be served soon: a control daemon starts, a server recovers from a fault, or the service
/// restarts. A hook of a container runtime may take 30 s.
const PATIENCE: Duration = Duration::from_secs(25);
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub(crate) struct Devices {
    /// Names as `list` shows them: 00:06.0-1; a GPU's address or UUID stands for one slice of it
    #[arg(required_unless_present_any = ["free", "slurm"], value_name = "SLICE", add = complete::devices())]
    names: Vec<String>,
    /// Take the slice with the fewest clients, of all or of the slices that SLICE names; part of a model's name will do: h200
    #[arg(long)]
    free: bool,
    /// Take the slices that Slurm has given to this step or job
    #[arg(long, conflicts_with_all = ["free", "names"])]
    slurm: bool,
    /// Share the slices: other programs may have them too. Without it, a slice with an owner is refused, and the slices of root's
    /// command are refused to others
    #[arg(long)]
    share: bool,
}

impl Devices {
    pub(crate) fn are_from_slurm(&self) -> bool {
        self.slurm
    }

    /// The slices that the options ask the service for.
    pub(crate) fn wish(&self) -> Result<SliceWish> {
        let names = if self.slurm { slurm::given()? } else { self.names.clone() };
        Ok(SliceWish { names, free: self.free, share: self.share })
    }
}

/// Repeats a question to the service until the slices are served, if they may be served soon, and prints a note while
/// it waits.
pub(crate) async fn until_served<T>(
    ask: impl AsyncFn() -> Result<T, BusError>,
    worth_waiting: impl Fn(&BusError) -> bool,
) -> Result<T, BusError> {
    let deadline = Instant::now() + PATIENCE;
    let mut is_told = false;
    loop {
        match ask().await {
            Err(error) if worth_waiting(&error) && Instant::now() < deadline => {
                if !std::mem::replace(&mut is_told, true) {
                    say(&format!("waiting up to {seconds} s, since {error}", seconds = PATIENCE.as_secs()));
                }
                sleep(PAUSE).await;
            }
            answer => return answer,
        }
    }
}

/// Returns true if the service may answer with the slices a moment after this error.
pub(crate) fn passes(error: &BusError) -> bool {
    matches!(error, BusError::Refused(RequestError::NotReady(_) | RequestError::NotServed(_)))
}

/// Waits until the service gives the program these slices, and returns the settings for a program that uses them.
/// Prints which slice the service has chosen.
pub(crate) async fn take(daemon: &DaemonProxy, wish: &SliceWish) -> Result<ContainerConfig> {
    let (taken, answer) = until_served(async || daemon.take(wish).await, passes).await?;
    if wish.free {
        tell_choice(daemon, &taken).await?;
    }
    Ok(answer)
}

/// Prints which slices the service has chosen, and their models.
pub(crate) async fn tell_choice(daemon: &DaemonProxy, taken: &[String]) -> Result<()> {
    let devices = daemon.devices().await?;
    for device in devices.iter().filter(|device| taken.contains(&device.addr)) {
        let model = device.model.as_ref().or(device.nvidia_name.as_ref());
        say(&format!("takes {} ({})", device.addr, model.map_or("unknown model", String::as_str)));
    }
    Ok(())
}
