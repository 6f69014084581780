//! `yunion-mpsctl status`.

use std::io::{self, Write};

use serde_json::json;

use crate::ctl::published::known;
use crate::ctl::show::table::{Column, Shown, health, pairs, table_of, with_unit};
use crate::ctl::show::time;
use crate::ctl::{Error, print_json};
use crate::dbus::proxy::{DaemonProxy, Listed};
use crate::dbus::rows::{ControlDaemon, Gpu, Service};
use crate::supervisor::PROGRAM;

const CONTROL_DAEMONS: [Column<ControlDaemon>; 9] = [
    ("Control daemon", |daemon| daemon.id.shown()),
    ("State", |daemon| daemon.state.shown()),
    ("Since", |daemon| time::local(time::from_seconds(daemon.since))),
    ("For", |daemon| time::age(time::from_seconds(daemon.since))),
    ("PID", |daemon| daemon.pid.shown()),
    ("Servers", |daemon| daemon.servers.shown()),
    ("Multi-user", |daemon| daemon.multiuser.shown()),
    ("Starts", |daemon| daemon.starts.shown()),
    ("Reason", |daemon| daemon.reason.shown()),
];

const GPUS: [Column<Gpu>; 10] = [
    ("GPU", |gpu| gpu.addr.shown()),
    ("Model", |gpu| gpu.model.shown()),
    ("Compute mode", |gpu| gpu.compute_mode.shown()),
    ("Slices", |gpu| gpu.virtual_num.shown()),
    ("Threads", |gpu| with_unit(Some(gpu.mps_thread_percentage), "%")),
    ("confirmed", |gpu| with_unit(gpu.confirmed_thread_percentage, "%")),
    ("Memory", |gpu| with_unit(gpu.mps_memory_limit, "MiB")),
    ("confirmed", |gpu| with_unit(gpu.confirmed_memory_limit, "MiB")),
    ("Enforced", |gpu| gpu.limits_enforced.shown()),
    ("Health", |gpu| health(gpu.healthy, &gpu.reason)),
];

pub(in crate::ctl) async fn status(
    daemon: &DaemonProxy,
    json: bool,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let service = daemon.service().await?;
    let control_daemons = daemon.control_daemons().await?;
    let events = daemon.events().await?;
    // The state of the service says that it is still starting; the rest is worth showing.
    let gpus = known(daemon.gpus().await)?.unwrap_or_default();
    if json {
        let all = json!({
            "service": service, "control_daemons": control_daemons, "gpus": gpus, "events": events,
        });
        return print_json(out, &all);
    }
    print_service(out, &service)?;
    if !control_daemons.is_empty() {
        let expendable = ["Since", "Multi-user", "Starts", "Servers", "For"];
        writeln!(out, "\n{}", table_of(&CONTROL_DAEMONS, &control_daemons).leave_out(&expendable))?;
        print_front_ends(out, &control_daemons)?;
    }
    if !gpus.is_empty() {
        let expendable = ["Enforced", "Compute mode", "Model", "confirmed"];
        writeln!(out, "\n{}", table_of(&GPUS, &gpus).leave_out(&expendable))?;
    }
    if !events.is_empty() {
        let mut lines = pairs();
        for event in &events {
            let at = time::from_microseconds(event.at);
            lines.add_row([format!("  {} ({} ago)", time::local(at), time::age(at)), event.text.shown()]);
        }
        writeln!(out, "\nLast events:\n{lines}")?;
    }
    Ok(())
}

/// The way for root to a control daemon that is not in the pipe directory.
fn print_front_ends(out: &mut dyn Write, control_daemons: &[Listed<ControlDaemon>]) -> io::Result<()> {
    let private = |daemon: &&Listed<ControlDaemon>| daemon.control_directory != daemon.pipe_directory;
    for daemon in control_daemons.iter().filter(private) {
        let (id, directory) = (daemon.id.shown(), daemon.control_directory.shown());
        writeln!(out, "NVIDIA's front end of {id}: CUDA_MPS_PIPE_DIRECTORY={directory} {PROGRAM}")?;
    }
    Ok(())
}

fn print_service(out: &mut dyn Write, service: &Service) -> io::Result<()> {
    let driver = match (service.driver_version.as_str(), service.state.as_str()) {
        ("", "disabled") => "not looked for".to_owned(),
        ("", _) => "none".to_owned(),
        _ => service.driver_version.shown(),
    };
    let rows = [
        ("State:", service.state.shown()),
        ("Reason:", service.state_reason.shown()),
        ("Version:", service.version.shown()),
        ("Driver:", driver),
        ("Generation:", service.generation.shown()),
        ("Pipe directory:", service.pipe_directory.shown()),
        ("Log directory:", service.log_directory.shown()),
    ];
    let mut lines = pairs();
    for (name, text) in rows.iter().filter(|(name, text)| *name != "Reason:" || !text.is_empty()) {
        lines.add_row([*name, text]);
    }
    writeln!(out, "{lines}")
}
