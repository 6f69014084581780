//! The acts of a simulated control daemon's clients: clients connect, meet fatal GPU errors, lose their work, and end.

use std::collections::BTreeSet;
use std::time::Duration;

use mps_core::mps::{Meaning, ServerStatus};
use mps_core::terms::ProcessId;

use super::budgets::Program;
use super::mps::{CAPACITY, Later, Mps, SimServer};
use super::tenants::{Tenant, slice_of};
use super::ways::slices_of;

/// The longest time from the connection of a program until the control daemon admits the program.
const ADMISSION: Duration = Duration::from_millis(100);

/// The time from the end of the last client that a fatal GPU error has hit until the server has recovered.
const RECOVERY: Duration = Duration::from_millis(200);

#[derive(Debug, Clone)]
pub(crate) struct SimClient {
    pub(crate) server: u32,
    /// The positions of the client's GPUs in the control daemon's list of GPUs.
    pub(crate) ordinals: BTreeSet<usize>,
    /// Each connection of the client takes one of the [`CAPACITY`] places on each GPU of the client.
    pub(crate) connections: usize,
    /// True once a fatal GPU error on one GPU has destroyed the client's work on all of its GPUs.
    pub(crate) is_hit: bool,
    pub(crate) program: Program,
    pub(crate) tenant: Tenant,
}

impl SimClient {
    pub(crate) fn is_at_work(&self) -> bool {
        self.tenant.has_work && !self.is_hit
    }
}

impl Mps {
    /// A client comes to the GPUs with these ordinals. Returns the client's PID. `None` means that no directory of a slice
    /// leads to this control daemon, or that the client has to wait.
    pub(crate) fn client_comes(&mut self, ordinals: BTreeSet<usize>) -> Option<u32> {
        if !ordinals.iter().all(|ordinal| self.is_led_to(*ordinal)) {
            return None;
        }
        if self.goes_wrong(6) {
            let pause = ADMISSION / 4 * u32::try_from(self.dice.below(5)).unwrap();
            self.after(pause, Later::IsAdmitted(ordinals));
            return None;
        }
        let pid = if self.goes_wrong(6) { self.free_pid.take() } else { None };
        self.client_is_admitted(ordinals, pid)
    }

    /// A program comes to a slice of a GPU through the directory of the slice. Returns the program's PID, or `None` if the
    /// program has to wait.
    pub(crate) fn program_comes(&mut self, gpu: &str, slice: u32, group: &'static str) -> Option<u32> {
        let ordinal = self.gpus.iter().position(|one| one == gpu)?;
        let pid = self.client_is_admitted([ordinal].into(), None)?;
        let client = self.clients.get_mut(&pid)?;
        (client.program.slice, client.program.group) = (Some(slice), group);
        client.tenant.slice = slice_of(gpu, slice);
        Some(pid)
    }

    /// True if something has happened to this control daemon that the service can't know yet.
    pub(crate) fn has_news(&self) -> bool {
        let is_stopped = |server: &SimServer| server.is_stopped || server.is_ending;
        self.is_hung()
            || self.listener() != Some(self.pid)
            || self.log_is_lost
            || self.reader.position < self.log.len()
            || !self.reader.ended.is_empty()
            || self.servers.values().any(is_stopped)
    }

    fn is_led_to(&self, ordinal: usize) -> bool {
        let Some(ways) = &self.ways else { return true };
        let Some(gpu) = self.gpus.get(ordinal) else { return false };
        let ways = ways.lock().unwrap();
        slices_of(gpu).any(|name| ways.get(&name) == Some(&self.pid))
    }

    /// The client with this PID ends, and the kernel gives the PID to the next client.
    pub(crate) fn is_succeeded(&mut self, pid: u32) {
        let Some(ordinals) = self.clients.get(&pid).map(|client| client.ordinals.clone()) else { return };
        self.client_leaves(pid);
        if ordinals.iter().all(|ordinal| self.is_led_to(*ordinal))
            && let Some(pid) = self.free_pid.take_if(|free| *free == pid)
        {
            self.client_is_admitted(ordinals, Some(pid));
        }
    }

    /// Decides at random if the next client belongs to another user than the present server. In this case the server ends if it
    /// has no client, and a server for the other user can start.
    fn is_for_another_user(&mut self) -> bool {
        let Some(server) = self.servers.keys().next_back().copied() else { return false };
        let is_another = self.dice.one_in(2);
        if is_another && !self.clients.values().any(|client| client.server == server) {
            self.end_server(server, false, None);
        }
        is_another
    }

    /// The control daemon admits a client that has connected. Returns the client's PID, or `None` if the client has to wait.
    /// Checks the promise `the-door-is-closed-first`: no client connects to a control daemon after the service has asked the
    /// control daemon to end. Such a client would get CUDA error 805.
    pub(crate) fn client_is_admitted(&mut self, ordinals: BTreeSet<usize>, pid: Option<u32>) -> Option<u32> {
        assert!(!self.quits_when_idle, "the-door-is-closed-first: a client of {} gets error 805", self.pid);
        if self.is_hung() || self.listener() != Some(self.pid) {
            return None;
        }
        let is_open = |one: &SimServer| {
            !one.is_ending
                && !one.is_stopped
                && matches!(one.status, ServerStatus::Active | ServerStatus::Initializing)
        };
        if self.servers.values().any(|one| !is_open(one)) {
            return None;
        }
        if self.serves_one_user && self.is_for_another_user() {
            return None;
        }
        let server = self.start_server();
        let is_full = |ordinal: &usize| {
            self.clients.values().filter(|one| one.ordinals.contains(ordinal)).count() >= CAPACITY
        };
        if ordinals.iter().any(is_full) {
            self.say(Meaning::ClientRefused { server, capacity: 3 });
            return None;
        }
        let process = self.next_pid();
        let pid = pid.unwrap_or(process);
        let start_time = u64::from(self.came) + 1000 * u64::try_from(self.now.as_millis()).unwrap();
        let program = Program::new(pid, start_time);
        let first = ordinals.first().copied().unwrap_or_default();
        let tenant = Tenant::new(process, &self.gpus, first, &mut self.dice);
        self.clients
            .insert(pid, SimClient { server, ordinals, connections: 1, is_hit: false, program, tenant });
        self.say(Meaning::ClientAdmitted(pid));
        Some(pid)
    }

    pub fn client_leaves(&mut self, pid: u32) {
        let Some(client) = self.clients.remove(&pid) else { return };
        if !self.hits.iter().any(|(.., hit)| *hit == pid) {
            self.free_pid = Some(pid);
        }
        self.say(Meaning::ClientLeft(pid));
        let is_hit = |one: &SimClient| one.server == client.server && one.is_hit;
        if client.is_hit && !self.clients.values().any(is_hit) {
            self.after(RECOVERY, Later::IsWell(client.server));
        }
        self.ends_if_idle();
    }

    /// The service ends the work of a client. Returns true if the client exists. Half of the clients end after the loss of
    /// their work.
    pub(crate) fn loses_work(&mut self, process: ProcessId) -> bool {
        let is_it = |client: &SimClient| client.program.process == process;
        let is_there = self.clients.get(&process.pid).is_some_and(is_it);
        if is_there && self.dice.one_in(2) {
            self.after(Duration::from_millis(50), Later::Leaves(process));
        }
        is_there
    }

    /// A client causes a fatal GPU error. The error hits every client of the same server on the same GPU, and no other client.
    pub(crate) fn fault(&mut self, pid: u32) {
        let Some(SimClient { server, ordinals, is_hit: false, .. }) = self.clients.get(&pid).cloned() else {
            return;
        };
        let ordinals: Vec<usize> = ordinals.into_iter().collect();
        let Some(ordinal) = self.dice.pick(&ordinals).copied() else { return };
        // A control daemon of an old driver can't report the status of a server, but it still lists the server's clients.
        let lists = self.is_old || self.dice.one_in(2);
        let Some(one) = self.servers.get_mut(&server).filter(|one| one.status == ServerStatus::Active) else {
            return;
        };
        one.status = ServerStatus::Fault;
        one.lists = lists;
        self.faults += 1;
        let line = self.log.len();
        self.say(Meaning::FaultHandling { server });
        let line = (self.log.len() > line).then_some(line);
        if let Some(one) = self.servers.get_mut(&server) {
            one.fault_line = line;
        }
        let mut pause = Duration::ZERO;
        let there = self.clients.iter_mut().filter(|(_, one)| one.server == server);
        let mut hit = Vec::new();
        for (client, one) in there.filter(|(_, one)| one.ordinals.contains(&ordinal)) {
            one.is_hit = true;
            self.hit_processes.insert(*client, one.program.process);
            // Sometimes the log reports a client as hit on its other GPUs, too.
            let everywhere = self.dice.one_in(2);
            let named = one.ordinals.iter().filter(|one| everywhere || **one == ordinal);
            hit.extend(named.map(|ordinal| (server, *ordinal, *client)));
        }
        for (server, ordinal, client) in hit {
            self.hits.insert((server, ordinal, client));
            let line = Meaning::TornDown { server, client, ordinal };
            if self.dice.one_in(2) {
                pause += Duration::from_millis(200);
                self.after(pause, Later::Says(line));
            } else {
                self.say(line);
            }
        }
    }
}
