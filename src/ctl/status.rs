//! `yunion-mpsctl status`.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use serde_json::{Value, json};

use super::table::{cell, cell_with_unit, health, table};
use super::{Error, print_json};
use crate::dbus::proxy::{Client, ClientError, Object};

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Everything, as one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) async fn status(client: &Client, arguments: &Arguments, out: &mut dyn Write) -> Result<(), Error> {
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
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    print_service(out, &service)?;
    print_control_daemons(out, &control_daemons, now)?;
    print_gpus(out, &gpus)?;
    print_events(out, &events, now)
}

fn print_service(out: &mut dyn Write, service: &Object) -> Result<(), Error> {
    let text = |key| cell(service, key);
    let or_none = |key| Some(text(key)).filter(|text| !text.is_empty()).unwrap_or_else(|| "none".to_owned());
    writeln!(out, "State:           {}", text("state"))?;
    if !text("state_reason").is_empty() {
        writeln!(out, "Reason:          {}", text("state_reason"))?;
    }
    writeln!(out, "Version:         {}", text("version"))?;
    writeln!(out, "Driver:          {}", or_none("driver_version"))?;
    writeln!(out, "Generation:      {}", text("generation"))?;
    writeln!(out, "Pipe directory:  {}", text("pipe_directory"))?;
    writeln!(out, "Log directory:   {}", text("log_directory"))?;
    Ok(())
}

fn print_control_daemons(out: &mut dyn Write, daemons: &[Object], now: u64) -> Result<(), Error> {
    if daemons.is_empty() {
        return Ok(());
    }
    let mut table =
        table(&["Control daemon", "State", "For", "PID", "Servers", "Multi-user", "Starts", "Reason"]);
    for daemon in daemons {
        let text = |key| cell(daemon, key);
        let since = daemon.get("since").and_then(Value::as_u64);
        let age = since.map_or_else(|| "-".to_owned(), |since| span(now.saturating_sub(since)));
        table.add_row([
            text("id"),
            text("state"),
            age,
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
    let mut table = table(&[
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
    ]);
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

fn print_events(out: &mut dyn Write, events: &[Object], now: u64) -> Result<(), Error> {
    if events.is_empty() {
        return Ok(());
    }
    writeln!(out, "\nLast events:")?;
    for event in events {
        let at = event.get("at").and_then(Value::as_u64).unwrap_or(0) / 1_000_000;
        let ago = format!("{} ago", span(now.saturating_sub(at)));
        writeln!(out, "  {ago:>13}  {}", cell(event, "text"))?;
    }
    Ok(())
}

/// A span of time at a glance. JSON has the exact moment.
fn span(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86400 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_change_their_unit() {
        let texts = [0, 59, 60, 3599, 3600, 86399, 86400, 864_000].map(span);
        assert_eq!(texts, ["0 s", "59 s", "1 min", "59 min", "1 h", "23 h", "1 days", "10 days"]);
    }
}
