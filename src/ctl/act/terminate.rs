//! `yunion-mpsctl terminate`.

use std::io::Write;

use clap::Args;
use serde_json::json;

use crate::ctl::published::{published_name, text};
use crate::ctl::show::table::{cell, printable};
use crate::ctl::{Error, print_json};
use crate::dbus::proxy::{Client, Object};

#[derive(Debug, Args)]
pub(in crate::ctl) struct Arguments {
    #[command(flatten)]
    whom: Whom,
    /// Whose GPU work has ended, as a JSON object
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
        refuse_unnamed(client, device).await?;
        (json!({"devices": device}), format!("No process uses {} any more.", printable(&device.join(", "))))
    };
    if arguments.json {
        return print_json(out, &ended);
    }
    writeln!(out, "{words}")?;
    Ok(())
}

/// Fails where a client has a GPU of these devices and does not say which of them it was given: nobody has ended its work,
/// and nobody can know whether that was wanted.
async fn refuse_unnamed(client: &Client, devices: &[String]) -> Result<(), Error> {
    let gpus: Vec<String> = gpus_of(client, devices).await?;
    let is_unnamed = |one: &&Object| {
        !one.contains_key("device")
            && one.get("bypass") != Some(&json!(true))
            && gpus.iter().any(|gpu| gpu == text(one, "gpu"))
    };
    let listed = client.clients().await?;
    let who: Vec<String> = listed
        .iter()
        .filter(is_unnamed)
        .map(|one| format!("{} ({})", cell(one, "pid"), cell(one, "command")))
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
async fn gpus_of(client: &Client, devices: &[String]) -> Result<Vec<String>, Error> {
    let known = client.devices().await?;
    let names: Vec<String> = devices.iter().map(|name| published_name(name, &known)).collect();
    let is_one = |device: &&Object| names.iter().any(|name| name == text(device, "addr"));
    Ok(known.iter().filter(is_one).map(|device| text(device, "device_path").to_owned()).collect())
}
