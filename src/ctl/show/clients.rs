//! `yunion-mpsctl clients`.

use std::io::Write;
use std::time::SystemTime;

use clap::Args;
use serde_json::Value;

use crate::ctl::show::table::{cell, printable, table};
use crate::ctl::show::time;
use crate::ctl::{Error, print_json};
use crate::dbus::proxy::{Client, Object};

const HEADS: [&str; 10] =
    ["PID", "User", "Command", "MPS", "Device", "GPU", "Container", "Memory (MiB)", "Since", "Age"];

/// As much of a container's id as its runtime shows in tables.
const SHORT_ID: usize = 12;

#[derive(Debug, Args)]
pub(in crate::ctl) struct Arguments {
    /// Everything the daemon publishes, as a JSON array
    #[arg(long)]
    json: bool,
}

pub(in crate::ctl) async fn clients(
    client: &Client,
    arguments: &Arguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let listed = client.clients().await?;
    if arguments.json {
        return print_json(out, &listed);
    }
    if listed.is_empty() {
        writeln!(out, "{}", why_none(&client.service().await?))?;
        return Ok(());
    }
    let gpus = client.gpus().await?;
    let now = SystemTime::now();
    let mut table = table(&HEADS).leave_out(&["Container", "Since", "GPU", "User"]);
    for one in &listed {
        let since = one.get("since").and_then(Value::as_u64).map(time::from_seconds);
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        table.add_row([
            cell(one, "pid"),
            cell(one, "user"),
            cell(one, "command"),
            mps(one).to_owned(),
            cell(one, "device"),
            gpu_name(one, &gpus),
            cell(one, "container_id").chars().take(SHORT_ID).collect(),
            cell(one, "memory_mib"),
            or_dash(since.map(time::local)),
            or_dash(since.map(|since| time::age(since, now))),
        ]);
    }
    writeln!(out, "{table}")?;
    let bypassing = listed.iter().filter(|one| bypasses(one)).count();
    if bypassing > 0 {
        writeln!(
            out,
            "BYPASS: {bypassing} of these use a GPU without our MPS server; nothing holds them to a share."
        )?;
    }
    let waiting = listed.iter().filter(|one| waits(one)).count();
    if waiting > 0 {
        writeln!(
            out,
            "WAITS: {waiting} of these wait for a server; yunion-mpsctl status says in its events for whom."
        )?;
    }
    Ok(())
}

fn waits(client: &Object) -> bool {
    client.get("waiting") == Some(&Value::Bool(true))
}

fn bypasses(client: &Object) -> bool {
    client.get("bypass") == Some(&Value::Bool(true))
}

fn mps(client: &Object) -> &'static str {
    if bypasses(client) {
        "BYPASS"
    } else if waits(client) {
        "WAITS"
    } else {
        "yes"
    }
}

/// The address of the GPU, by which its slices are named; its UUID where it is none of those that are configured now.
fn gpu_name(client: &Object, gpus: &[Object]) -> String {
    let gpu = gpus.iter().find(|gpu| gpu.get("device_path") == client.get("gpu"));
    gpu.map_or_else(|| cell(client, "gpu"), |gpu| cell(gpu, "addr"))
}

/// An empty list in words.
fn why_none(service: &Object) -> String {
    let text = |key| service.get(key).and_then(Value::as_str).map(printable).unwrap_or_default();
    let state = text("state");
    match text("state_reason") {
        _ if state == "ready" => "No clients: no process uses a GPU that is served.".to_owned(),
        reason if reason.is_empty() => format!("No clients: the service is {state}."),
        reason => format!("No clients: the service is {state}: {reason}"),
    }
}
