//! `yunion-mpsctl terminate`.

use std::io::Write;
use std::time::Duration;

use clap::Args;
use serde_json::json;

use super::table::printable;
use super::{Error, print_json};
use crate::dbus::proxy::{Client, ClientError};

/// How long to wait until the daemon may have time for this user again: another process of his is let go within 50 ms.
const PAUSE: Duration = Duration::from_millis(25);

#[derive(Debug, Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    whom: Whom,
    /// Whose GPU work has ended, as a JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Whom {
    /// One process, by its PID on this host; its user may do this as well as root
    #[arg(value_name = "PID")]
    pid: Option<u32>,
    /// Every process that was given this virtual device; may be repeated
    #[arg(long, value_name = "NAME")]
    device: Vec<String>,
    /// Every process in this container: its 64 hexadecimal digits, or at least the first 12
    #[arg(long, value_name = "ID")]
    container: Option<String>,
}

pub(super) async fn terminate(
    client: &Client,
    arguments: &Arguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let Whom { pid, device, container } = &arguments.whom;
    let (ended, words) = if let Some(pid) = pid {
        client.terminate_client(*pid).await?;
        (json!({"pid": pid}), format!("Process {pid} uses no GPU any more."))
    } else if let Some(id) = container {
        client.release_container(id).await?;
        (json!({"container": id}), format!("No process in container {} uses a GPU any more.", printable(id)))
    } else {
        client.release_devices(device).await?;
        (json!({"devices": device}), format!("No process uses {} any more.", printable(&device.join(", "))))
    };
    if arguments.json {
        return print_json(out, &ended);
    }
    writeln!(out, "{words}")?;
    Ok(())
}

/// Ends the GPU work of a process, and waits where the daemon is busy with another process of this user.
pub(super) async fn terminate_in_turn(client: &Client, pid: u32) -> Result<(), ClientError> {
    loop {
        match client.terminate_client(pid).await {
            Err(ClientError::Refused { name, .. }) if name.ends_with(".Busy") => {
                tokio::time::sleep(PAUSE).await
            }
            answer => return answer,
        }
    }
}
