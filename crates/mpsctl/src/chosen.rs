//! The slices that a command uses: named on the command line, chosen by the service (`--free`), or given by Slurm (`--slurm`).

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

/// The longest wait for a slice that the service will soon serve, for example while a control daemon starts or the service
/// restarts. A container runtime may limit a hook to 30 s, so the wait is shorter.
const PATIENCE: Duration = Duration::from_secs(25);
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug, Args)]
pub(crate) struct Devices {
    /// Names as `list` shows them: 00:06.0-1; a GPU's address or UUID stands for one slice of it
    #[arg(required_unless_present_any = ["free", "slurm"], value_name = "SLICE", add = complete::devices())]
    names: Vec<String>,
    /// Take the slice with the fewest clients: of all slices, or of the slices that SLICE names. Here SLICE may also be a part
    /// of a GPU model's name: h200
    #[arg(long)]
    free: bool,
    /// Take the slices that Slurm has given to this step or job
    #[arg(long, conflicts_with_all = ["free", "names"])]
    slurm: bool,
    /// Share the slices with other programs. Without --share, a slice that has an owner is refused, and the slices of a command
    /// that root has started are refused to other programs
    #[arg(long)]
    share: bool,
}

impl Devices {
    pub(crate) fn are_from_slurm(&self) -> bool {
        self.slurm
    }

    pub(crate) fn wish(&self) -> Result<SliceWish> {
        let names = if self.slurm { slurm::given()? } else { self.names.clone() };
        Ok(SliceWish { names, free: self.free, share: self.share })
    }
}

/// Repeats the request `ask` as long as its error is `worth_waiting` for, at most for [`PATIENCE`]. Before the first
/// repetition, this function prints a note.
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
                    say(&format!(
                        "waiting up to {seconds} s for the service to serve the slice: {error}",
                        seconds = PATIENCE.as_secs()
                    ));
                }
                sleep(PAUSE).await;
            }
            answer => return answer,
        }
    }
}

/// True if the service may grant the same request a moment later.
pub(crate) fn passes(error: &BusError) -> bool {
    matches!(error, BusError::Refused(RequestError::NotReady(_) | RequestError::NotServed(_)))
}

/// Asks the service for slices, and waits if they are not served yet. Returns the settings for a program that uses the slices.
pub(crate) async fn take(daemon: &DaemonProxy, wish: &SliceWish) -> Result<ContainerConfig> {
    let (taken, answer) = until_served(async || daemon.take(wish).await, passes).await?;
    if wish.free {
        tell_choice(daemon, &taken).await?;
    }
    Ok(answer)
}

pub(crate) async fn tell_choice(daemon: &DaemonProxy, taken: &[String]) -> Result<()> {
    let devices = daemon.devices().await?;
    for device in devices.iter().filter(|device| taken.contains(&device.addr)) {
        let model = device.model.as_ref().or(device.nvidia_name.as_ref());
        say(&format!("takes {} ({})", device.addr, model.map_or("unknown model", String::as_str)));
    }
    Ok(())
}
