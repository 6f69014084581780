//! `yunion-mpsctl terminate`.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use serde_json::json;

use crate::complete;
use crate::show::table::prose;
use crate::{Result, print_json};
use common::bus::answers::published_name;
use common::bus::proxy::{DaemonProxy, Listed};
use common::bus::rows::Event;
use common::text::printable;

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct Whom {
    /// One process, by its PID on this host
    #[arg(value_name = "PID", add = complete::clients())]
    pid: Option<u32>,
    /// Every process that has this slice; --device can be given several times
    #[arg(long, value_name = "NAME", add = complete::slices())]
    device: Vec<String>,
    /// Every process in this container: its 64 hexadecimal digits, or at least the first 12
    #[arg(long, value_name = "ID", add = complete::containers())]
    container: Option<String>,
}

pub(crate) async fn terminate(
    daemon: &DaemonProxy,
    whom: &Whom,
    json: bool,
    out: &mut dyn Write,
) -> Result<()> {
    let Whom { pid, device, container } = whom;
    let asked = SystemTime::now();
    let (ended, words) = if let Some(pid) = pid {
        daemon.terminate_client(*pid).await?;
        (json!({"pid": pid}), format!("Process {pid} uses no GPU any more."))
    } else if let Some(id) = container {
        daemon.release_container(id).await?;
        (
            json!({"container": id}),
            format!("No process in container {id} uses a GPU any more.", id = printable(id)),
        )
    } else {
        daemon.release_devices(device).await?;
        (
            json!({"devices": device}),
            format!("No process uses {devices} any more.", devices = printable(&device.join(", "))),
        )
    };
    if json {
        return print_json(out, &ended);
    }
    writeln!(out, "{}", prose(&words))?;
    if let Some(clients) = ended_clients(daemon, whom, asked).await {
        writeln!(out, "{}", prose(&format!("Ended the GPU work of {clients}.")))?;
    }
    Ok(())
}

/// Names the clients that have lost their GPU work, as the service's event about this request does. An event from before the
/// time `asked` is about an earlier request. The service's list of clients is not used: for this list the service asks the
/// control daemons, and a hung control daemon would delay the answer. None if no client had GPU work, or if the service does
/// not answer.
async fn ended_clients(daemon: &DaemonProxy, whom: &Whom, asked: SystemTime) -> Option<String> {
    let named = match whom {
        Whom { pid: Some(pid), .. } => vec![pid.to_string()],
        Whom { container: Some(id), .. } => vec![id.to_ascii_lowercase()],
        Whom { device, .. } => {
            let known = daemon.devices().await.ok()?;
            device.iter().map(|name| published_name(name, &known)).collect()
        }
    };
    let asked = asked.duration_since(UNIX_EPOCH).ok()?.as_micros();
    let is_new = |event: &&Listed<Event>| u128::try_from(event.at).is_ok_and(|at| at >= asked);
    let events = daemon.events().await.ok()?;
    let mut new = events.iter().rev().filter(is_new);
    new.find(|event| event.ended_for.as_ref() == Some(&named))?.ended_clients.clone()
}
