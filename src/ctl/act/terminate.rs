//! `yunion-mpsctl terminate`.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use serde_json::json;

use crate::ctl::complete;
use crate::ctl::published::published_name;
use crate::ctl::show::table::{printable, prose};
use crate::ctl::{Error, print_json};
use crate::dbus::proxy::{DaemonProxy, Listed};
use crate::dbus::rows::{Client, Event};
use crate::tenants::terminate::{ContainerId, Wanted};

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
    #[arg(value_name = "PID", add = complete::clients())]
    pid: Option<u32>,
    /// Every process that was given this virtual device; may be repeated
    #[arg(long, value_name = "NAME", add = complete::devices())]
    device: Vec<String>,
    /// Every process in this container: its 64 hexadecimal digits, or at least the first 12
    #[arg(long, value_name = "ID", add = complete::containers())]
    container: Option<String>,
}

pub(in crate::ctl) async fn terminate(
    daemon: &DaemonProxy,
    arguments: &Arguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let Whom { pid, device, container } = &arguments.whom;
    let asked = SystemTime::now();
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
    writeln!(out, "{}", prose(&words))?;
    if let Some(whose) = whose(daemon, &arguments.whom, asked).await {
        writeln!(out, "{}", prose(&format!("Ended the GPU work of {whose}.")))?;
    }
    Ok(())
}

/// The clients that had work, as the service names them in an event. A control daemon is not asked for them: one that
/// hangs would be busy with that question first. None if there were none, or the service does not answer.
async fn whose(daemon: &DaemonProxy, whom: &Whom, asked: SystemTime) -> Option<String> {
    let wanted = match whom {
        Whom { pid: Some(pid), .. } => Wanted::Process(*pid),
        Whom { container: Some(id), .. } => Wanted::Container(ContainerId::new(id).ok()?),
        Whom { device, .. } => {
            let known = daemon.devices().await.ok()?;
            Wanted::Slices(device.iter().map(|name| published_name(name, &known)).collect())
        }
    };
    let beginning = wanted.event();
    let asked = asked.duration_since(UNIX_EPOCH).ok()?.as_micros();
    let is_new = |event: &&Listed<Event>| u128::try_from(event.at).is_ok_and(|at| at >= asked);
    let events = daemon.events().await.ok()?;
    let event = events.iter().rev().filter(is_new).find_map(|event| event.text.strip_prefix(&beginning));
    event.map(str::to_owned)
}

/// Fails if nobody knows which device a client on a GPU of these devices was given: its work goes on, and nobody can
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
        "no process that is known to have {} uses it any more; not known of {}: neither a mounted directory nor \
         YUNION_MPS_DEVICE in the environment says which slice they have; terminate them by PID or container",
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
