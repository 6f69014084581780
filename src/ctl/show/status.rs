//! `yunion-mpsctl status`.

use std::io::Write;
use std::time::SystemTime;

use clap::Args;
use serde_json::{Value, json};

use crate::ctl::show::table::{cell, cell_with_unit, health, pairs, table};
use crate::ctl::show::time;
use crate::ctl::{Error, print_json};
use crate::dbus::proxy::{Client, ClientError, Object};

#[derive(Debug, Args)]
pub(in crate::ctl) struct Arguments {
    /// Everything, as one JSON object
    #[arg(long)]
    json: bool,
}

pub(in crate::ctl) async fn status(
    client: &Client,
    arguments: &Arguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let service = client.service().await?;
    let control_daemons = client.control_daemons().await?;
    let events = client.events().await?;
    let gpus = match client.gpus().await {
        // The service's own state says that it is still starting; the rest of the screen is worth showing.
        Err(ClientError::Refused { name, .. }) if name.ends_with(".NotReady") => Vec::new(),
        answer => answer?,
    };
    if arguments.json {
        let all = json!({
            "service": service, "control_daemons": control_daemons, "gpus": gpus, "events": events,
        });
        return print_json(out, &all);
    }
    let now = SystemTime::now();
    print_service(out, &service)?;
    print_control_daemons(out, &control_daemons, now)?;
    print_gpus(out, &gpus)?;
    print_events(out, &events, now)
}

fn print_service(out: &mut dyn Write, service: &Object) -> Result<(), Error> {
    let text = |key| cell(service, key);
    let driver = match (text("driver_version"), text("state").as_str()) {
        (version, "disabled") if version.is_empty() => "not looked for".to_owned(),
        (version, _) if version.is_empty() => "none".to_owned(),
        (version, _) => version,
    };
    let mut lines = pairs();
    lines.add_row(["State:".to_owned(), text("state")]);
    if !text("state_reason").is_empty() {
        lines.add_row(["Reason:".to_owned(), text("state_reason")]);
    }
    lines.add_row(["Version:".to_owned(), text("version")]);
    lines.add_row(["Driver:".to_owned(), driver]);
    lines.add_row(["Generation:".to_owned(), text("generation")]);
    lines.add_row(["Pipe directory:".to_owned(), text("pipe_directory")]);
    lines.add_row(["Log directory:".to_owned(), text("log_directory")]);
    writeln!(out, "{lines}")?;
    Ok(())
}

fn print_control_daemons(out: &mut dyn Write, daemons: &[Object], now: SystemTime) -> Result<(), Error> {
    if daemons.is_empty() {
        return Ok(());
    }
    let heads =
        ["Control daemon", "State", "Since", "For", "PID", "Servers", "Multi-user", "Starts", "Reason"];
    let mut table = table(&heads).leave_out(&["Since", "Multi-user", "Starts", "Servers", "For"]);
    for daemon in daemons {
        let text = |key| cell(daemon, key);
        let since = daemon.get("since").and_then(Value::as_u64).map(time::from_seconds);
        table.add_row([
            text("id"),
            text("state"),
            since.map_or_else(|| "-".to_owned(), time::local),
            since.map_or_else(|| "-".to_owned(), |since| time::age(since, now)),
            text("pid"),
            text("servers"),
            text("multiuser"),
            text("starts"),
            text("reason"),
        ]);
    }
    writeln!(out, "\n{table}")?;
    Ok(())
}

fn print_gpus(out: &mut dyn Write, gpus: &[Object]) -> Result<(), Error> {
    if gpus.is_empty() {
        return Ok(());
    }
    let heads = [
        "GPU",
        "Model",
        "Compute mode",
        "Slices",
        "Threads",
        "confirmed",
        "Memory",
        "confirmed",
        "Enforced",
        "Health",
    ];
    let mut table = table(&heads).leave_out(&["Enforced", "Compute mode", "Model", "confirmed"]);
    for gpu in gpus {
        table.add_row([
            cell(gpu, "addr"),
            cell(gpu, "model"),
            cell(gpu, "compute_mode"),
            cell(gpu, "virtual_num"),
            cell_with_unit(gpu, "mps_thread_percentage", "%"),
            cell_with_unit(gpu, "confirmed_thread_percentage", "%"),
            cell_with_unit(gpu, "mps_memory_limit", "MiB"),
            cell_with_unit(gpu, "confirmed_memory_limit", "MiB"),
            cell(gpu, "limits_enforced"),
            health(gpu),
        ]);
    }
    writeln!(out, "\n{table}")?;
    Ok(())
}

fn print_events(out: &mut dyn Write, events: &[Object], now: SystemTime) -> Result<(), Error> {
    if events.is_empty() {
        return Ok(());
    }
    let mut lines = pairs();
    for event in events {
        let at = event.get("at").and_then(Value::as_u64).map(time::from_microseconds);
        let at = at.map_or_else(|| "-".to_owned(), |at| time::local_and_age(at, now));
        lines.add_row([format!("  {at}"), cell(event, "text")]);
    }
    writeln!(out, "\nLast events:\n{lines}")?;
    Ok(())
}
