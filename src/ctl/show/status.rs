//! `yunion-mpsctl status`.

use std::io::Write;
use std::time::SystemTime;

use clap::Args;
use serde_json::json;

use crate::ctl::show::table::{Shown, health, pairs, table, with_unit};
use crate::ctl::show::time;
use crate::ctl::{Error, print_json};
use crate::dbus::proxy::{DaemonProxy, Listed};
use crate::dbus::rows::{ControlDaemon, Event, Gpu, Service};

#[derive(Debug, Args)]
pub(in crate::ctl) struct Arguments {
    /// Everything, as one JSON object
    #[arg(long)]
    json: bool,
}

pub(in crate::ctl) async fn status(
    daemon: &DaemonProxy,
    arguments: &Arguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let service = daemon.service().await?;
    let control_daemons = daemon.control_daemons().await?;
    let events = daemon.events().await?;
    let gpus = match daemon.gpus().await {
        // The service's own state says that it is still starting; the rest of the screen is worth showing.
        Err(error) if error.is("NotReady") => Vec::new(),
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

fn print_service(out: &mut dyn Write, service: &Service) -> Result<(), Error> {
    let driver = match (service.driver_version.as_str(), service.state.as_str()) {
        ("", "disabled") => "not looked for".to_owned(),
        ("", _) => "none".to_owned(),
        _ => service.driver_version.shown(),
    };
    let mut lines = pairs();
    lines.add_row(["State:".to_owned(), service.state.shown()]);
    if !service.state_reason.is_empty() {
        lines.add_row(["Reason:".to_owned(), service.state_reason.shown()]);
    }
    lines.add_row(["Version:".to_owned(), service.version.shown()]);
    lines.add_row(["Driver:".to_owned(), driver]);
    lines.add_row(["Generation:".to_owned(), service.generation.shown()]);
    lines.add_row(["Pipe directory:".to_owned(), service.pipe_directory.shown()]);
    lines.add_row(["Log directory:".to_owned(), service.log_directory.shown()]);
    writeln!(out, "{lines}")?;
    Ok(())
}

fn print_control_daemons(
    out: &mut dyn Write,
    daemons: &[Listed<ControlDaemon>],
    now: SystemTime,
) -> Result<(), Error> {
    if daemons.is_empty() {
        return Ok(());
    }
    let heads =
        ["Control daemon", "State", "Since", "For", "PID", "Servers", "Multi-user", "Starts", "Reason"];
    let mut table = table(&heads).leave_out(&["Since", "Multi-user", "Starts", "Servers", "For"]);
    for daemon in daemons {
        let since = time::from_seconds(daemon.since);
        table.add_row([
            daemon.id.shown(),
            daemon.state.shown(),
            time::local(since),
            time::age(since, now),
            daemon.pid.shown(),
            daemon.servers.shown(),
            daemon.multiuser.shown(),
            daemon.starts.shown(),
            daemon.reason.shown(),
        ]);
    }
    writeln!(out, "\n{table}")?;
    Ok(())
}

fn print_gpus(out: &mut dyn Write, gpus: &[Listed<Gpu>]) -> Result<(), Error> {
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
            gpu.addr.shown(),
            gpu.model.shown(),
            gpu.compute_mode.shown(),
            gpu.virtual_num.shown(),
            with_unit(Some(gpu.mps_thread_percentage), "%"),
            with_unit(gpu.confirmed_thread_percentage, "%"),
            with_unit(gpu.mps_memory_limit, "MiB"),
            with_unit(gpu.confirmed_memory_limit, "MiB"),
            gpu.limits_enforced.shown(),
            health(gpu.healthy, &gpu.reason),
        ]);
    }
    writeln!(out, "\n{table}")?;
    Ok(())
}

fn print_events(out: &mut dyn Write, events: &[Listed<Event>], now: SystemTime) -> Result<(), Error> {
    if events.is_empty() {
        return Ok(());
    }
    let mut lines = pairs();
    for event in events {
        let at = time::local_and_age(time::from_microseconds(event.at), now);
        lines.add_row([format!("  {at}"), event.text.shown()]);
    }
    writeln!(out, "\nLast events:\n{lines}")?;
    Ok(())
}
