//! `yunion-mpsctl terminate`.

use std::io::Write;

use clap::Args;
use serde_json::json;

use crate::ctl::published::published_name;
use crate::ctl::show::table::printable;
use crate::ctl::{Error, print_json};
use crate::dbus::proxy::{DaemonProxy, Listed};
use crate::dbus::rows::Client;

#[derive(Debug, Args)]
pub(in crate::ctl) struct Arguments {
    #[command(flatten)]
    whom: Whom,
    /// Print the PID, the container or the devices as a JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Whom {
    /// One process, by its PID on this host
    #[arg(value_name = "PID")]
    pid: Option<u32>,
    /// Every process that was given this virtual device; may be repeated
    #[arg(long, value_name = "NAME")]
    device: Vec<String>,
    /// Every process in this container: its 64 hexadecimal digits, or at least the first 12
    #[arg(long, value_name = "ID")]
    container: Option<String>,
}

pub(in crate::ctl) async fn terminate(
    daemon: &DaemonProxy,
    arguments: &Arguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let Whom { pid, device, container } = &arguments.whom;
    let (ended, words) = if let Some(pid) = pid {
        daemon.terminate_client(*pid).await?;
        (json!({"pid": pid}), format!("Process {pid} uses no GPU any more."))
    } else if let Some(id) = container {
        daemon.release_container(id).await?;
        (json!({"container": id}), format!("No process in container {} uses a GPU any more.", printable(id)))
    } else {
        daemon.release_devices(device).await?;
        refuse_unnamed(daemon, device).await?;
        (json!({"devices": device}), format!("No process uses {} any more.", printable(&device.join(", "))))
    };
    if arguments.json {
        return print_json(out, &ended);
    }
    writeln!(out, "{words}")?;
    Ok(())
}

/// Fails if a client on a GPU of these devices does not say which device it was given: its work goes on, and nobody can
/// know whether it was to end.
async fn refuse_unnamed(daemon: &DaemonProxy, devices: &[String]) -> Result<(), Error> {
    let gpus: Vec<String> = gpus_of(daemon, devices).await?;
    let is_unnamed = |one: &&Listed<Client>| one.device.is_none() && !one.bypass && gpus.contains(&one.gpu);
    let listed = daemon.clients().await?;
    let who: Vec<String> = listed
        .iter()
        .filter(is_unnamed)
        .map(|one| format!("{} ({})", one.pid, printable(&one.command)))
        .collect();
    if who.is_empty() {
        return Ok(());
    }
    Err(Error::Failed(format!(
        "no process that says it was given {} uses it any more; not known of {}, which say in their environment \
         (YUNION_MPS_DEVICE) nothing of what they were given: terminate them by PID or container",
        printable(&devices.join(", ")),
        who.join(", ")
    )))
}

/// The UUIDs of the GPUs of these devices.
async fn gpus_of(daemon: &DaemonProxy, devices: &[String]) -> Result<Vec<String>, Error> {
    let known = daemon.devices().await?;
    let names: Vec<String> = devices.iter().map(|name| published_name(name, &known)).collect();
    let named = known.iter().filter(|device| names.contains(&device.addr));
    Ok(named.filter_map(|device| device.device_path.clone()).collect())
}
