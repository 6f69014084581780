//! `yunion-mpsctl clients`.

use std::io::Write;

use crate::ctl::show::table::{Shown, printable, table};
use crate::ctl::show::time;
use crate::ctl::{Error, print_json};
use crate::dbus::proxy::{DaemonProxy, Listed};
use crate::dbus::rows::{Client, Gpu, Service};
use crate::tenants::in_words::SHORT_ID;

const HEADS: [&str; 12] = [
    "PID",
    "User",
    "Command",
    "MPS",
    "Device",
    "GPU",
    "Container",
    "Known by",
    "May command",
    "Memory (MiB)",
    "Since",
    "Age",
];

pub(in crate::ctl) async fn clients(
    daemon: &DaemonProxy,
    json: bool,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let listed = daemon.clients().await?;
    if json {
        return print_json(out, &listed);
    }
    if listed.is_empty() {
        writeln!(out, "{}", why_none(&*daemon.service().await?))?;
        return Ok(());
    }
    let gpus = daemon.gpus().await?;
    let mut table =
        table(&HEADS).leave_out(&["Known by", "May command", "Container", "Since", "GPU", "User"]);
    for one in &listed {
        let since = one.since.map(time::from_seconds);
        table.add_row([
            one.pid.shown(),
            one.user.shown(),
            one.command.shown(),
            mps(one).to_owned(),
            one.device.shown(),
            gpu_name(one, &gpus),
            one.container_id.shown().chars().take(SHORT_ID).collect(),
            one.known_by.shown(),
            one.may_command.shown(),
            one.memory_mib.shown(),
            since.map(time::local).shown(),
            since.map(time::age).shown(),
        ]);
    }
    writeln!(out, "{table}")?;
    let bypassing = listed.iter().filter(|one| one.bypass).count();
    if bypassing > 0 {
        writeln!(
            out,
            "BYPASS: {bypassing} of these use a GPU without our MPS server; nothing holds them to a share."
        )?;
    }
    let waiting = listed.iter().filter(|one| one.waiting).count();
    if waiting > 0 {
        writeln!(
            out,
            "WAITS: {waiting} of these wait for a server; yunion-mpsctl status says in its events for whom."
        )?;
    }
    Ok(())
}

fn mps(client: &Client) -> &'static str {
    match client {
        Client { bypass: true, .. } => "BYPASS",
        Client { waiting: true, .. } => "WAITS",
        _ => "yes",
    }
}

/// The address of the GPU, by which its slices are named; its UUID if it is not configured now.
fn gpu_name(client: &Client, gpus: &[Listed<Gpu>]) -> String {
    let gpu = gpus.iter().find(|gpu| gpu.device_path.as_ref() == Some(&client.gpu));
    gpu.map_or(&client.gpu, |gpu| &gpu.addr).shown()
}

fn why_none(service: &Service) -> String {
    match service.state.as_str() {
        "ready" => "No clients: no process uses a GPU that is served.".to_owned(),
        _ => format!("No clients: {}", state_in_words(service)),
    }
}

/// The state of the service, for a list that it leaves empty.
pub(super) fn state_in_words(service: &Service) -> String {
    match (printable(&service.state), printable(&service.state_reason)) {
        (state, reason) if reason.is_empty() => format!("the service is {state}."),
        (state, reason) => format!("the service is {state}: {reason}"),
    }
}
