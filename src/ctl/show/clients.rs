//! `yunion-mpsctl clients`.

use std::io::Write;

use clap::Args;

use crate::ctl::show::list::Output;
use crate::ctl::show::table::{Shown, printable, prose, table, with_unit};
use crate::ctl::show::time;
use crate::ctl::{Error, print_json};
use crate::dbus::proxy::{DaemonProxy, Listed};
use crate::dbus::rows::{Client, Gpu, Service};
use crate::tenants::in_words::SHORT_ID;

/// Columns that only some people want, and that `-o wide` has.
const WIDE: [&str; 4] = ["GPU", "KNOWN BY", "MAY COMMAND", "SINCE"];

#[derive(Debug, Args)]
pub(in crate::ctl) struct Arguments {
    /// `wide` adds columns: the GPU, how the slice is known, the client's power over the control daemon, the start
    #[arg(short, long, value_name = "FORMAT", hide_possible_values = true)]
    output: Option<Output>,
    /// Print everything that the service publishes as a JSON array
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

pub(in crate::ctl) async fn clients(
    daemon: &DaemonProxy,
    arguments: &Arguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let listed = daemon.clients().await?;
    if arguments.json {
        return print_json(out, &listed);
    }
    if listed.is_empty() {
        writeln!(out, "{}", prose(&why_none(&*daemon.service().await?)))?;
        return Ok(());
    }
    let wide = arguments.output == Some(Output::Wide);
    let gpus = daemon.gpus().await?;
    let mut heads = vec!["PID", "USER", "COMMAND", "MPS", "DEVICE", "MEMORY", "AGE"];
    heads.extend(WIDE.iter().filter(|_| wide));
    heads.push("CONTAINER");
    let expendable = ["SINCE", "MAY COMMAND", "KNOWN BY", "GPU", "AGE", "USER"];
    let mut table = table(&heads).numbers(&["PID", "MEMORY"]).leave_out(&expendable);
    for one in &listed {
        let since = one.since.map(time::from_seconds);
        let mut row = vec![
            one.pid.shown(),
            one.user.shown(),
            one.command.shown(),
            mps(one).to_owned(),
            one.device.shown(),
            with_unit(one.memory_mib, "MiB"),
            since.map(time::age).shown(),
        ];
        if wide {
            let power = [gpu_name(one, &gpus), one.known_by.shown(), one.may_command.shown()];
            row.extend(power.into_iter().chain([since.map(time::local).shown()]));
        }
        row.push(one.container_id.shown().chars().take(SHORT_ID).collect());
        table.add_row(row);
    }
    writeln!(out, "{table}")?;
    let bypassing = listed.iter().filter(|one| one.bypass).count();
    if bypassing > 0 {
        let (use_a_gpu, them) = if bypassing == 1 { ("uses", "it") } else { ("use", "them") };
        let said = format!(
            "BYPASS: {bypassing} of these {use_a_gpu} a GPU without our MPS server; nothing holds {them} to a share."
        );
        writeln!(out, "\n{}", prose(&said))?;
    }
    let waiting = listed.iter().filter(|one| one.waiting).count();
    if waiting > 0 {
        let wait = if waiting == 1 { "waits" } else { "wait" };
        let said = format!(
            "WAITS: {waiting} of these {wait} for a server; yunion-mpsctl status says in its events for whom."
        );
        writeln!(out, "\n{}", prose(&said))?;
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

/// Not every state explains that there is no client: a service that is degraded may serve most of its GPUs.
fn why_none(service: &Service) -> String {
    match service.state.as_str() {
        "ready" => "No clients: no process uses a GPU that is served.".to_owned(),
        "degraded" => {
            format!("No clients: no process uses a GPU that is served. Note that {}", state_in_words(service))
        }
        _ => format!("No clients: {}", state_in_words(service)),
    }
}

/// The state of the service, for a list that it leaves empty.
pub(in crate::ctl) fn state_in_words(service: &Service) -> String {
    match (printable(&service.state), printable(&service.state_reason)) {
        (state, reason) if reason.is_empty() => format!("the service is {state}."),
        (state, reason) => format!("the service is {state}: {reason}"),
    }
}
