//! `yunion-mpsctl status`.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::ops::Deref;
use std::time::Duration;

use clap::Args;
use serde_json::json;
use tokio::time::timeout;

use crate::screen::{fitted, rows};
use crate::show::columns::{CONTROL_DAEMONS, GPUS, table_of};
use crate::show::health::tone_of_service;
use crate::show::list::gpu_name;
use crate::show::table::{Shown, Table, pairs, width};
use crate::show::{happened, time};
use crate::{Result, print_json};
use common::bus::answers::known;
use common::bus::proxy::{DaemonProxy, Listed};
use common::bus::rows::{Client, ControlDaemon, Event, Gpu, Service};
use common::counted::counted;
use common::published::control_daemon::ControlDaemonState;
use common::published::snapshot::State;
use common::text::printable;

/// The number of attempts to get consistent answers. The answers are inconsistent if the state of the service changes between
/// two answers.
const ATTEMPTS: usize = 3;

/// The longest wait for the list of clients.
const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// `wide` adds columns, such as the directory in which nvidia-cuda-mps-control reaches each control daemon
    #[arg(short, long, value_name = "FORMAT", hide_possible_values = true, value_parser = ["wide"])]
    output: Option<String>,
    /// Print everything as one JSON object
    #[arg(long, conflicts_with = "output")]
    pub(crate) json: bool,
    /// Draw the status again each second and with each change, until Ctrl-C; with --json print one line each change
    #[arg(long)]
    pub(crate) watch: bool,
}

/// Prints the status. If the terminal has too few rows, the end of the status is omitted. Otherwise the first line, with the
/// state, would scroll away.
pub(crate) async fn print(daemon: &DaemonProxy, arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let rows = rows().filter(|_| !arguments.json && arguments.output.is_none());
    let Some(rows) = rows else { return status(daemon, arguments, out).await };
    let mut text = Vec::new();
    status(daemon, arguments, &mut text).await?;
    let lines = String::from_utf8_lossy(&text).lines().map(str::to_owned).collect();
    // The last row of the terminal is for the shell's prompt.
    for line in fitted(lines, usize::from(rows).saturating_sub(1)) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

pub(crate) async fn status(daemon: &DaemonProxy, arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let mut answers = StatusAnswers::ask(daemon, arguments).await?;
    for _ in 1..ATTEMPTS {
        // The service answers one request after the other, and its state may change meanwhile. After a change, all requests are
        // repeated, so that no old state is shown with new control daemons.
        let now = daemon.service().await?;
        if (&now.state, &now.state_reason) == (&answers.service.state, &answers.service.state_reason) {
            break;
        }
        answers = StatusAnswers::ask(daemon, arguments).await?;
    }
    let StatusAnswers { service, control_daemons, gpus, events } = answers;
    if arguments.json {
        let all = json!({
            "service": service, "control_daemons": control_daemons, "gpus": gpus, "events": events,
        });
        return print_json(out, &all);
    }
    let wide = arguments.output.is_some();
    print_service(out, &service)?;
    if let Some(events) = happened::last_events(&events, width()) {
        writeln!(out, "\n{events}")?;
    }
    if !control_daemons.is_empty() {
        // The id of a control daemon can be the UUID of its GPU. The table shows the address of the GPU instead.
        let named = |one: &Listed<ControlDaemon>| ControlDaemon {
            id: gpu_name(&one.id, &gpus),
            ..ControlDaemon::clone(one)
        };
        let named: Vec<ControlDaemon> = control_daemons.iter().map(named).collect();
        writeln!(out, "\n{}", table_of(CONTROL_DAEMONS, &named, wide))?;
    }
    if !gpus.is_empty() {
        writeln!(out, "\n{}", table_of(GPUS, gpus.iter().map(Deref::deref), wide))?;
    }
    let waits = control_daemons.iter().any(|daemon| daemon.state == ControlDaemonState::Waiting);
    // The service asks the control daemons for their clients, and a control daemon may hang. If the answer takes too long, the
    // status is shown without clients.
    let clients =
        if waits { timeout(PATIENCE, daemon.clients()).await.ok().and_then(Result::ok) } else { None };
    let reasons = reasons(&service, &control_daemons, &gpus, clients.as_deref());
    if let Some(reasons) = reasons {
        writeln!(out, "\n{reasons}")?;
    }
    Ok(())
}

struct StatusAnswers {
    service: Listed<Service>,
    control_daemons: Vec<Listed<ControlDaemon>>,
    gpus: Vec<Listed<Gpu>>,
    events: Vec<Listed<Event>>,
}

impl StatusAnswers {
    async fn ask(daemon: &DaemonProxy, arguments: &Arguments) -> Result<Self> {
        let service = daemon.service().await?;
        if !arguments.json {
            daemon.look_at_clients().await;
        }
        let control_daemons = daemon.control_daemons().await?;
        let events = daemon.events().await?;
        // A service that is starting does not know its GPUs yet. The status is then shown without GPUs, and the state says why.
        let gpus = known(daemon.gpus().await)?.unwrap_or_default();
        Ok(Self { service, control_daemons, gpus, events })
    }
}

/// The published reasons of control daemons and GPUs. A reason is omitted if the reason of the service's state, or an earlier
/// reason, already contains the same text.
fn reasons(
    service: &Service,
    control_daemons: &[Listed<ControlDaemon>],
    gpus: &[Listed<Gpu>],
    clients: Option<&[Listed<Client>]>,
) -> Option<Table> {
    let of_daemons = control_daemons.iter().map(|daemon| {
        (gpu_name(&daemon.id, gpus), daemon.reason.as_str(), how_it_waits(daemon, control_daemons, clients))
    });
    let of_gpus = gpus.iter().map(|gpu| (gpu.addr.shown(), gpu.reason.as_str(), None));
    let mut said = vec![service.state_reason.as_str()];
    let mut notes = pairs();
    let mut any = false;
    for (subject, reason, more) in of_daemons.chain(of_gpus) {
        let is_new = !said.iter().any(|said| said.contains(reason));
        if is_new {
            said.push(reason);
        }
        let note: Vec<String> = is_new.then(|| printable(reason)).into_iter().chain(more).collect();
        if !note.is_empty() {
            notes.add_row([subject, note.join("; ")]);
            any = true;
        }
    }
    any.then_some(notes)
}

/// The time since which a control daemon is in the state waiting, and the number of its clients. None in any other state.
fn how_it_waits(
    daemon: &ControlDaemon,
    all: &[Listed<ControlDaemon>],
    clients: Option<&[Listed<Client>]>,
) -> Option<String> {
    if daemon.state != ControlDaemonState::Waiting {
        return None;
    }
    let since = format!(
        "the control daemon has been in the state waiting since {since}",
        since = time::local(time::from_seconds(daemon.since))
    );
    // A new plan may give a GPU of this control daemon to another control daemon.
    let is_of_another =
        |gpu: &String| all.iter().any(|other| other.id != daemon.id && other.gpus.contains(gpu));
    let Some(clients) = clients else { return Some(since) };
    let left = clients.iter().filter(|client| !client.bypass && !is_of_another(&client.gpu));
    let left: BTreeSet<u32> = left.map(|client| client.pid).collect();
    // Clients on GPUs that the plan gives to other control daemons are not counted. So a count of 0 does not prove that the
    // control daemon has no client.
    if left.is_empty() {
        return Some(since);
    }
    Some(format!("{since}, and has {}", counted(left.len(), "client")))
}

pub(crate) fn state_and_reason(service: &Service) -> String {
    match service.state_reason.shown() {
        reason if reason.is_empty() => service.state.shown(),
        reason => format!("{}: {reason}", service.state.shown()),
    }
}

fn print_service(out: &mut dyn Write, service: &Service) -> io::Result<()> {
    let driver = match service.driver_version.as_str() {
        "" if service.state == State::Disabled => "driver not checked".to_owned(),
        "" => "no driver".to_owned(),
        _ => format!("driver {}", service.driver_version.shown()),
    };
    let version = service.version.shown();
    let mut lines = pairs();
    lines.add_toned_row([
        ("State:".to_owned(), None),
        (state_and_reason(service), tone_of_service(&service.state)),
    ]);
    lines.add_row(["Version:", &format!("{version}, {driver}, generation {}", service.generation)]);
    lines.add_row(["Pipe directory:", &service.pipe_directory.shown()]);
    lines.add_row(["Log directory:", &service.log_directory.shown()]);
    writeln!(out, "{lines}")
}
