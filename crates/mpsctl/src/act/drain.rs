//! `yunion-mpsctl drain` and `yunion-mpsctl undrain`.

use std::collections::BTreeSet;
use std::io::Write;
use std::ops::Deref;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::process::Signal;
use tokio::time::sleep;

use crate::complete;
use crate::screen::replace;
use crate::show::columns::{WAITED_FOR, short_id, slice_or_not_known, table_of};
use crate::show::table::{Shown, is_drawn_on, prose};
use crate::signals::CaughtSignals;
use crate::{Error, FAILED, Result};
use common::bus::answers::{given, is_called, published_name};
use common::bus::proxy::{BusError, DaemonProxy, Listed};
use common::bus::rows::{Client, ControlDaemon, Device};
use common::counted::counted;
use common::published::control_daemon::ControlDaemonState;
use common::published::snapshot::State;
use common::text::printable;

const PAUSE: Duration = Duration::from_secs(1);

/// If the service does not answer for this time, for example during an upgrade, `drain --wait` fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// The most clients that a table or a message names.
const ROWS: usize = 15;

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct What {
    /// Slices as `list` shows them (00:06.0-1), and GPUs with all their slices (by address or UUID)
    #[arg(value_name = "NAME", add = complete::devices())]
    pub(crate) names: Vec<String>,
    /// Every slice of every GPU, also of a GPU that comes later
    #[arg(long)]
    all: bool,
}

pub(crate) async fn drain(
    daemon: &DaemonProxy,
    names: &[String],
    waits: bool,
    out: &mut dyn Write,
) -> Result<u8> {
    match drain_and_wait(daemon, names, waits, out).await {
        // For other subcommands a closed pipe is no error. With `--wait`, exit status 0 means that no client remains, so a wait
        // that ends early must be an error.
        Err(error) if waits && error.is_closed_pipe() => Err(Error::Failed(
            "standard output was closed, so drain no longer waits for clients; the slices stay drained"
                .to_owned(),
        )),
        done => done,
    }
}

async fn drain_and_wait(
    daemon: &DaemonProxy,
    names: &[String],
    waits: bool,
    out: &mut dyn Write,
) -> Result<u8> {
    // The signals are caught before the drain begins. Otherwise an early signal would end this process before it prints that
    // the slices stay drained.
    let signals = if waits { &[Signal::INT, Signal::TERM, Signal::HUP][..] } else { &[] };
    let mut signals = CaughtSignals::catch(signals)?;
    daemon.drain(names).await?;
    let scope = Scope::new(daemon, names).await?;
    let drained = subject(names, "is", "are");
    let done = match scope.open_directory(&daemon.control_daemons().await?) {
        None => format!("{drained} drained: no new client gets {slices}.", slices = pronoun(names)),
        Some(directory) => format!(
            "{drained} drained: no new program is given {slices}. But a program that has the directory \
             {directory} already can start new clients, since the control daemon still listens there.",
            slices = pronoun(names),
            directory = printable(directory)
        ),
    };
    writeln!(out, "{}", prose(&done))?;
    out.flush()?;
    if !waits {
        writeln!(out, "{}", prose(&still_there(&scope.remaining_clients(daemon).await)))?;
        return Ok(0);
    }
    let signal = tokio::select! {
        waited = wait(daemon, &scope, out) => return waited.map(|()| 0),
        signal = signals.next() => signal,
    };
    if is_drawn_on() {
        // The terminal has printed "^C" on this line, so the message begins on a new line.
        writeln!(out)?;
    }
    let again = if names.is_empty() { "--all".to_owned() } else { printable(&names.join(" ")) };
    writeln!(
        out,
        "The command no longer waits, but the slices stay drained: yunion-mpsctl undrain {again} ends the \
         drain."
    )?;
    Ok(u8::try_from(128 + signal.as_raw()).unwrap_or(FAILED))
}

pub(crate) async fn undrain(daemon: &DaemonProxy, names: &[String], out: &mut dyn Write) -> Result<()> {
    daemon.undrain(names).await?;
    writeln!(out, "{}", prose(&format!("{} clients again.", subject(names, "takes", "take"))))?;
    Ok(())
}

fn subject(names: &[String], one: &str, several: &str) -> String {
    match names {
        [] => format!("Every slice {one}"),
        [name] => format!("{} {one}", printable(name)),
        names => format!("{} {several}", printable(&names.join(", "))),
    }
}

fn pronoun(names: &[String]) -> &'static str {
    if names.len() > 1 { "them" } else { "it" }
}

/// The drained slices, which decide for which clients the drain waits.
struct Scope {
    /// True if every slice is drained, so that the drain waits for every client of the service.
    all: bool,
    /// All slices of each GPU that has a drained slice. The bool is true if the slice is drained.
    slices: Vec<(Device, bool)>,
}

impl Scope {
    /// Asks the service which slices the names mean. This answer is used until the wait ends, since a reload may remove a GPU
    /// that still has clients.
    async fn new(daemon: &DaemonProxy, names: &[String]) -> Result<Self, BusError> {
        if names.is_empty() {
            return Ok(Self { all: true, slices: Vec::new() });
        }
        Ok(Self::choose(&daemon.devices().await?, names))
    }

    fn choose(devices: &[Listed<Device>], names: &[String]) -> Self {
        let named: Vec<String> = names.iter().map(|name| published_name(name, devices)).collect();
        let is_drained = |device: &Device| named.iter().any(|name| is_called(device, name));
        let gpus: BTreeSet<&str> =
            devices.iter().filter(|one| is_drained(one)).map(|one| one.base_addr.as_str()).collect();
        let of_them = devices.iter().filter(|device| gpus.contains(device.base_addr.as_str()));
        let slices = of_them.map(|device| (Device::clone(device), is_drained(device))).collect();
        Self { all: false, slices }
    }

    /// Finds a pipe directory through which programs can still become clients in spite of the drain. This directory contains
    /// the control daemon's own socket. Other pipe directories contain only a link to the socket, and the drain removes this
    /// link.
    fn open_directory<'a>(&self, control_daemons: &'a [Listed<ControlDaemon>]) -> Option<&'a str> {
        let mut theirs = control_daemons.iter().filter(|daemon| {
            self.all || self.slices.iter().any(|(slice, _)| slice.pipe_directory == daemon.pipe_directory)
        });
        let open = theirs.find(|daemon| daemon.control_directory == daemon.pipe_directory)?;
        Some(&open.pipe_directory)
    }

    /// True if the drain waits for the client, since the client may use a drained slice. A client without a known slice may use
    /// any slice.
    fn has(&self, client: &Client) -> bool {
        let given: Vec<&str> = given(client).collect();
        let names = |name: &String| given.contains(&name.as_str());
        // The service does not know yet which GPU a waiting client will use.
        let waits = client.gpu.is_empty();
        let its = || self.slices.iter().filter(|(slice, _)| waits || is_on(client, slice));
        let mut known = its().filter(|(slice, _)| names(&slice.addr)).peekable();
        let says_no_slice = if waits {
            given.is_empty() || its().any(|(slice, _)| names(&slice.base_addr))
        } else {
            its().next().is_some() && known.peek().is_none()
        };
        self.all || says_no_slice || known.any(|(_, is_drained)| *is_drained)
    }

    /// True if the client bypasses MPS on a GPU, and all slices of this GPU are drained. The drain reports this client, but
    /// does not wait for its end.
    fn bypasses(&self, client: &Client) -> bool {
        let mut its = self.slices.iter().filter(|(slice, _)| is_on(client, slice)).peekable();
        client.bypass && (self.all || its.peek().is_some() && its.all(|(_, is_drained)| *is_drained))
    }

    /// The clients for which the drain waits. None while the service or a control daemon is starting, since the service does
    /// not know all clients yet.
    async fn remaining_clients(&self, daemon: &DaemonProxy) -> Result<Option<RemainingClients>, BusError> {
        if !knows_its_clients(daemon).await? {
            return Ok(None);
        }
        let (mut bypassing, mut clients): (Vec<_>, Vec<_>) =
            daemon.clients().await?.into_iter().partition(|client| client.bypass);
        bypassing.retain(|client| self.bypasses(client));
        clients.retain(|client| self.has(client));
        // An empty list may come from a service that has just restarted and does not know its clients yet. So an empty list
        // counts only if the service knows its clients afterwards.
        let is_known = !clients.is_empty() || knows_its_clients(daemon).await?;
        Ok(is_known.then_some(RemainingClients { clients, bypassing }))
    }
}

fn is_on(client: &Client, slice: &Device) -> bool {
    slice.device_path.as_ref() == Some(&client.gpu)
}

struct RemainingClients {
    clients: Vec<Listed<Client>>,
    /// The processes that use a drained GPU without MPS. The drain does not wait for these processes.
    bypassing: Vec<Listed<Client>>,
}

/// False while the service or a control daemon is starting. The service lists the clients of a running control daemon only
/// after it has taken over the control daemon.
async fn knows_its_clients(daemon: &DaemonProxy) -> Result<bool, BusError> {
    let service = daemon.service().await?;
    let daemons = daemon.control_daemons().await?;
    let is_starting = |one: &Listed<ControlDaemon>| one.state == ControlDaemonState::Starting;
    Ok(service.state != State::Starting && !daemons.iter().any(is_starting))
}

fn still_there(look: &Result<Option<RemainingClients>, BusError>) -> String {
    let unknown = "The service does not know the remaining clients now";
    match look {
        Err(error) => format!("{unknown}: {}.", printable(&error.to_string())),
        Ok(None) => format!("{unknown}: the service is starting."),
        Ok(Some(RemainingClients { clients, bypassing })) if clients.is_empty() => no_client(bypassing),
        Ok(Some(RemainingClients { clients, .. })) => {
            format!("Still there: {}.{}", describe(clients), unplaced(clients))
        }
    }
}

fn no_client(bypassing: &[Listed<Client>]) -> String {
    if bypassing.is_empty() {
        return "No client is left.".to_owned();
    }
    format!(
        "No client is left. The drain does not wait for programs without MPS: {programs}.",
        programs = describe(bypassing)
    )
}

/// A note about clients for which the drain waits only because their slices are unknown. Empty if all slices are known.
fn unplaced(clients: &[Listed<Client>]) -> String {
    let unplaced = clients.iter().filter(|client| client.device.is_none());
    let pids: Vec<String> = unplaced.take(ROWS).map(|client| client.pid.to_string()).collect();
    if pids.is_empty() {
        return String::new();
    }
    format!(
        " The slice of process {pids} is not known and may be a drained slice, so the drained slices may \
         not be free yet.",
        pids = pids.join(", ")
    )
}

fn describe(clients: &[Listed<Client>]) -> String {
    clients.iter().map(|client| describe_one(client)).collect::<Vec<_>>().join(", ")
}

/// Describes a client: `process 1153 (python3, user worker, 00:06.0-1, container 4f1c2d3e5a6b)`.
fn describe_one(client: &Client) -> String {
    let Client { pid, command, user, .. } = client;
    let mut facts = vec![command.shown()];
    facts.extend(user.as_ref().map(|user| format!("user {}", user.shown())));
    if !client.bypass {
        facts.push(slice_or_not_known(client));
    }
    facts.extend(short_id(client).map(|id| format!("container {id}")));
    format!("process {pid} ({})", facts.join(", "))
}

async fn wait(daemon: &DaemonProxy, scope: &Scope, out: &mut dyn Write) -> Result<()> {
    let mut screen = DrainScreen { redraws: is_drawn_on(), ..DrainScreen::default() };
    let mut seen = Instant::now();
    loop {
        match scope.remaining_clients(daemon).await {
            Ok(Some(RemainingClients { clients, bypassing })) => {
                screen.show(&clients, out)?;
                if clients.is_empty() {
                    writeln!(out, "{}", prose(&no_client(&bypassing)))?;
                    return Ok(());
                }
                seen = Instant::now();
            }
            Err(error) if seen.elapsed() > PATIENCE => return Err(error.into()),
            unknown => {
                if unknown.is_ok() {
                    seen = Instant::now();
                }
                screen.say(&still_there(&unknown), out)?;
            }
        }
        out.flush()?;
        sleep(PAUSE).await;
    }
}

#[derive(Default)]
struct DrainScreen {
    /// True if the output is a terminal, on which a table shows the present clients. Any other output gets a line when a client
    /// appears or ends.
    redraws: bool,
    /// The text at the bottom of the terminal, which the next text replaces.
    drawn: String,
    /// The message that was printed last. An equal message is not printed again.
    last: String,
    /// The PIDs of the clients for which a line was printed.
    told: Vec<u32>,
}

impl DrainScreen {
    fn show(&mut self, clients: &[Listed<Client>], out: &mut dyn Write) -> Result<()> {
        if self.redraws {
            return Ok(replace(&mut self.drawn, &drawn(clients), out)?);
        }
        self.last.clear();
        for pid in self.told.iter().filter(|pid| !clients.iter().any(|client| client.pid == **pid)) {
            writeln!(out, "Process {pid} is no longer a client.")?;
        }
        for client in clients.iter().filter(|client| !self.told.contains(&client.pid)) {
            let unknown = unplaced(std::slice::from_ref(client));
            writeln!(out, "Waiting for {}.{unknown}", describe_one(client))?;
        }
        self.told = clients.iter().map(|client| client.pid).collect();
        Ok(())
    }

    fn say(&mut self, sentence: &str, out: &mut dyn Write) -> Result<()> {
        if self.redraws {
            return Ok(replace(&mut self.drawn, &prose(sentence), out)?);
        }
        if self.last != sentence {
            writeln!(out, "{sentence}")?;
            sentence.clone_into(&mut self.last);
        }
        Ok(())
    }
}

fn drawn(clients: &[Listed<Client>]) -> String {
    if clients.is_empty() {
        return String::new();
    }
    let table = table_of(WAITED_FOR, clients.iter().take(ROWS).map(Deref::deref), false);
    let more = clients.len().saturating_sub(ROWS);
    let more = if more > 0 { format!("\nand {more} more") } else { String::new() };
    let unknown = match unplaced(clients) {
        unknown if unknown.is_empty() => unknown,
        unknown => format!("\n{}", unknown.trim_start()),
    };
    format!("Waiting for {}:\n{table}{more}{unknown}", counted(clients.len(), "client"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(addr: &str, uuid: &str) -> Listed<Device> {
        let base = addr.split('-').next().unwrap();
        let pci = format!("0000:{base}");
        let row = serde_json::json!({"addr": addr, "base_addr": base, "pci_bdf": pci, "device_path": uuid});
        Listed::read(row.as_object().unwrap().clone()).unwrap()
    }

    fn client(gpu: &str, device: Option<&str>) -> Client {
        Client { gpu: gpu.to_owned(), device: device.map(str::to_owned), ..Client::default() }
    }

    fn scope(names: &[&str]) -> Scope {
        let devices = [("06", 0), ("06", 1), ("07", 0), ("07", 1)]
            .map(|(bus, ordinal)| device(&format!("00:{bus}.0-{ordinal}"), &format!("GPU-{bus}")));
        Scope::choose(&devices, &names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn a_slice_has_its_clients_and_those_that_say_no_slice() {
        for name in ["00:06.0-1", "0000:00:06.0-1"] {
            let slice = scope(&[name]);
            for (gpu, device, waited_for) in [
                ("GPU-06", Some("00:06.0-1"), true),
                ("GPU-06", Some("00:07.0-0, 00:06.0-1"), true),
                ("GPU-06", Some("00:06.0-0"), false),
                ("GPU-06", Some("00:06.0"), true),
                ("GPU-06", Some("nonsense"), true),
                ("GPU-06", None, true),
                ("GPU-07", Some("00:06.0-1"), false),
                ("GPU-07", None, false),
                ("", None, true),
                ("", Some("00:06.0"), true),
                ("", Some("00:06.0-1"), true),
                ("", Some("00:06.0-0"), false),
                ("", Some("00:07.0-1"), false),
            ] {
                assert_eq!(slice.has(&client(gpu, device)), waited_for, "{name}: {gpu} {device:?}");
            }
        }
    }

    #[test]
    fn a_gpu_has_all_its_clients_and_a_host_those_of_every_gpu() {
        for name in ["00:06.0", "gpu-06"] {
            let gpu = scope(&[name]);
            for device in [None, Some("00:06.0-0"), Some("00:06.0-7")] {
                assert!(gpu.has(&client("GPU-06", device)) && !gpu.has(&client("GPU-07", device)), "{name}");
            }
            let bypass = |gpu| Client { bypass: true, ..client(gpu, None) };
            assert!(gpu.bypasses(&bypass("GPU-06")) && !gpu.bypasses(&bypass("GPU-07")));
            assert!(!scope(&["00:06.0-1"]).bypasses(&bypass("GPU-06")));
        }
        let all = Scope { all: true, slices: Vec::new() };
        assert!(all.has(&client("GPU-gone", None)) && all.has(&client("", Some("00:06.0-1"))));
    }

    #[test]
    fn a_terminal_is_drawn_anew_and_anything_else_gets_the_news() {
        let listed = |pid: u32, device: Option<&str>| -> Listed<Client> {
            let mut row = serde_json::json!({"pid": pid, "command": "job\u{1b}", "user": "worker"});
            if let Some(device) = device {
                row["device"] = device.into();
            }
            Listed::read(row.as_object().unwrap().clone()).unwrap()
        };
        let (one, two) = (listed(1, Some("00:06.0-1")), listed(2, None));
        let looks = [vec![one.clone(), two.clone()], vec![two], Vec::new()];
        let mut out = Vec::new();
        let mut screen = DrainScreen::default();
        for look in &looks {
            screen.show(look, &mut out).unwrap();
        }
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "Waiting for process 1 (job\u{fffd}, user worker, 00:06.0-1).\n\
             Waiting for process 2 (job\u{fffd}, user worker, slice not known). The slice of process 2 is not known and may be a drained slice, so the drained slices may not be free yet.\n\
             Process 1 is no longer a client.\nProcess 2 is no longer a client.\n"
        );
        let mut out = Vec::new();
        let mut screen = DrainScreen { redraws: true, ..DrainScreen::default() };
        for look in looks.iter().chain(&looks) {
            screen.show(look, &mut out).unwrap();
        }
        let text = String::from_utf8(out).unwrap();
        assert!(text.starts_with("Waiting for 2 clients:\nPID  USER"), "{text}");
        assert!(text.contains("\u{1b}[5A\u{1b}[JWaiting for 1 client:\n"), "{text:?}");
        assert!(
            text.contains("\nThe slice of process 2 is not known and may be a drained slice"),
            "{text:?}"
        );
        assert!(text.ends_with("\u{1b}[4A\u{1b}[J"), "{text:?}");
    }
}
