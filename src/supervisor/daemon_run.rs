//! One run of a control daemon, from its start or take-over to its end: its process, its log and the messages about it.

use std::collections::VecDeque;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;

use mps_core::mps::Meaning;
use mps_core::tenants::first_named;
use tokio::task::JoinSet;

use crate::message::{Message, Subject};
use crate::mps::control::Control;
use crate::mps::log::{Follower, Line};
use crate::mps::process::Process;
use crate::register::Clients;
use common::counted::counted;
use common::host::driver;
use common::state_file::Running;

use super::status::Reporter;
use super::{BusSignal, Tools};

/// The explanation of CUDA error 802, which is usual for a while after a boot.
const FABRIC: &str = "error 802: the fabric manager, which connects the GPUs of this host, is not ready \
                      yet; see systemctl status nvidia-fabricmanager";

/// The most characters of each log line in a message about the end of a control daemon.
const WORDS_MAX: usize = 200;

/// The number of log lines in a message about the end of a control daemon or of a server.
const LAST_WORDS: usize = 3;

/// Each message about a fatal GPU error ends with this text. Measured: the client that the log named had not caused the error.
const DOUBT: &str = "the log can't tell which of these clients caused the error: its line \"Client {PID: \
                     ...} encountered a fatal GPU error\" names a client that was hit, not a client that \
                     caused the error";

/// One run of a control daemon, without the facts on which the core decides: [`mps_core::serve::Known`] has those.
#[derive(Debug)]
pub(super) struct DaemonRun {
    pub(super) process: Process,
    /// None until the control daemon has ended. Also None if it is not a child of the service, since only a parent gets the
    /// exit status.
    pub(super) exit_status: Option<ExitStatus>,
    /// The control daemon's entry in the state file. It may differ from the order that the supervisor has now.
    pub(super) running: Running,
    pub(super) control: Arc<Control>,
    pub(super) log: Follower,
    /// An earlier service has passed the log on to the journal up to this offset, in bytes. These lines are not passed on
    /// again.
    pub(super) quiet_until: u64,
    pub(super) log_trouble: Option<&'static str>,
    /// The last log lines that may explain the end of the control daemon or of a server. The start of a server clears the list.
    last_words: VecDeque<String>,
    /// Each task waits for the end of one server, and returns the server's PID.
    pub(super) server_ends: JoinSet<u32>,
}

impl DaemonRun {
    pub(super) fn new(
        process: Process,
        running: Running,
        control: Arc<Control>,
        log: Follower,
        quiet_until: u64,
    ) -> Self {
        Self {
            process,
            exit_status: None,
            running,
            control,
            log,
            quiet_until,
            log_trouble: None,
            last_words: VecDeque::new(),
            server_ends: JoinSet::new(),
        }
    }

    pub(super) fn remember_words(&mut self, line: &Line) {
        if let Meaning::ServerStarting { .. } = line.meaning {
            self.last_words.clear();
        }
        if line.may_explain_an_end() {
            self.last_words.push_back(line.text.chars().take(WORDS_MAX).collect());
            if self.last_words.len() > LAST_WORDS {
                self.last_words.pop_front();
            }
        }
    }

    pub(super) fn tell_clients_of_the_end(&self, reporter: &Reporter, known: &Clients) {
        let id = reporter.id();
        let at_work = known.at_work(&id);
        if at_work.is_empty() {
            return;
        }
        let control = id.to_string();
        let about = Subject { control: Some(&control), ..Subject::default() };
        let named: Vec<String> = at_work.iter().map(|pid| known.describe(*pid)).collect();
        let clients = counted(named.len(), "client");
        let named_first = first_named(named.iter().cloned());
        let text = format!("{end}, which ends the work of {clients}: {named_first}", end = self.end());
        Message::ClientsEnd.log(about, &text);
        for (pid, named) in at_work.iter().zip(named) {
            Message::log_client(
                about,
                *pid,
                format_args!("a client lost its work by the end of control daemon {control}: {named}"),
            );
        }
        reporter.keep_event(Message::ClientsEnd.event(text));
    }

    fn end(&self) -> String {
        let how = self.exit_status.map(|status| format!(" ({status})")).unwrap_or_default();
        format!("the control daemon ended{how}")
    }

    /// Describes the end of the control daemon. After a signal, the description omits the log, which can't explain the end.
    pub(super) fn how_it_ended(&self) -> String {
        let is_killed = self.exit_status.is_some_and(|status| status.signal().is_some());
        if is_killed { self.end() } else { self.end() + &self.words() }
    }

    /// The last log lines as the end of a sentence. Empty if there are none.
    pub(super) fn words(&self) -> String {
        if self.last_words.is_empty() {
            return String::new();
        }
        format!(
            "; its log ends: {last_words}",
            last_words = self.last_words.iter().cloned().collect::<Vec<_>>().join(" | ")
        )
    }

    pub(super) fn too_much_is_written(&self, left_out: usize) -> String {
        let lines = counted(left_out, "line");
        format!(
            "the control daemon writes too much to {log}: {lines} left out of the journal; see this file",
            log = self.log.path().display()
        )
    }

    pub(super) fn not_ready_yet(&self) -> Option<&'static str> {
        self.last_words.iter().any(|line| driver::fabric_is_not_ready(line)).then_some(FABRIC)
    }

    pub(super) fn refuses_multiuser(&self) -> bool {
        self.last_words.iter().any(|line| driver::refuses_an_option(line))
    }

    pub(super) fn tell_hit(
        &self,
        server: u32,
        ordinal: usize,
        pids: Vec<u32>,
        reporter: &Reporter,
        tools: &Tools,
    ) {
        let gpu_uuid = self.running.gpus.get(ordinal).cloned().unwrap_or_default();
        let reason = format!("server {server} met a fatal GPU error on device {ordinal}");
        let control = reporter.id().to_string();
        let about = Subject {
            control: Some(&control),
            server: Some(server),
            ordinal: Some(ordinal),
            ..Subject::gpu(&gpu_uuid)
        };
        let named: Vec<String> = pids.iter().map(|pid| tools.clients.describe(*pid)).collect();
        let text = format!(
            "{reason}; clients that were hit: {clients}",
            clients = first_named(named.iter().cloned())
        );
        Message::ClientsHit.log(about, format_args!("{text}; {DOUBT}"));
        for (pid, named) in pids.iter().zip(named) {
            Message::log_client(
                about,
                *pid,
                format_args!("a client was hit by the fatal GPU error of server {server}: {named}"),
            );
        }
        reporter.keep_event(Message::ClientsHit.event(text.clone()));
        if let Err(error) = tools.signals.try_send(BusSignal::ClientFault { gpu_uuid, pids, reason: text }) {
            tracing::debug!(
                "the D-Bus signal about the fatal GPU error of server {server} can't be sent: {error}"
            );
        }
    }
}
