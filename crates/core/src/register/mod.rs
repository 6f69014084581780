//! The register of clients: the process, the owner and the slices of each client. The service examines processes to fill the
//! register. Messages, answers and requests about clients all use the register, so that all name the same owner and slices of a
//! client.
//!
//! The register has a client from the first line of the control daemon's log about the client until some time after the
//! client's end, since most messages about a client are written after its end. A running process replaces an ended process with
//! the same PID.
//!
//! | file | its job |
//! |---|---|
//! | `client.rs` | a client, and the text that describes it |
//! | `evidence.rs` | the slices of a process, from several sources in their order of trust |

mod client;
mod evidence;

use alloc::collections::{BTreeMap, BTreeSet, btree_map};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::time::Duration;

pub use client::{GuestContainer, KnownClient, MayCommand, RecordedContainer, SHORT_ID, Tenant, shortened};
pub use evidence::{Evidence, KnownBy, Membership};

use crate::terms::{DaemonId, ProcessId};
use crate::{CoreTime, GpuUuid};

/// At this number of clients, the register begins to remove clients that have ended. Sixteen full GPUs have fewer clients.
const KEPT: usize = 1024;

/// The most clients in the register. Sixteen GPUs with a control daemon for each slice have fewer clients.
const MOST: usize = 8 * KEPT;

/// If the slice of a process is not known with certainty, the process is examined again after this time. At the last
/// examination the directory of its slice may have been missing, or its container may not have been recorded yet.
const AGAIN: Duration = Duration::from_secs(60);

/// A client from the control daemon's log is removed after this time if the control daemon does not list the client. A control
/// daemon lists a new client within milliseconds.
const LISTED_AFTER: Duration = Duration::from_secs(1);

// Each bool is an independent fact, so an enum can't replace the bools.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone)]
struct RegisteredClient {
    client: KnownClient,
    /// True if the service should examine the process, as soon as no examination of the process is under way.
    is_wanted: bool,
    is_looked_at: bool,
    /// True if the client's slices may have changed since the last examination.
    may_have_changed: bool,
    /// The end of the last examination. None before the first examination has ended.
    answered: Option<CoreTime>,
    /// True if an examination has found all facts about the client.
    is_found: bool,
    /// True if a line of the control daemon's log has named the process. A later line about a new client with the same PID is
    /// then about another process.
    is_logged: bool,
}

impl RegisteredClient {
    fn new(process: ProcessId) -> Self {
        Self {
            client: KnownClient::only(process),
            is_wanted: true,
            is_looked_at: false,
            may_have_changed: false,
            answered: None,
            is_found: false,
            is_logged: false,
        }
    }

    fn is_old(&self, now: CoreTime) -> bool {
        let is_certain = self.client.slices.as_ref().is_some_and(|its| its.known_by.is_certain());
        self.answered.is_none_or(|at| !is_certain && now >= at + AGAIN)
    }
}

#[derive(Debug, Clone)]
struct ServedClient {
    since: CoreTime,
    /// True if a fatal GPU error has ended the client's work.
    is_hit: bool,
    gpus: BTreeSet<GpuUuid>,
}

impl ServedClient {
    fn new(since: CoreTime) -> Self {
        Self { since, is_hit: false, gpus: BTreeSet::new() }
    }
}

#[derive(Debug, Clone, Default)]
pub struct Register {
    clients: BTreeMap<u32, RegisteredClient>,
    /// The PIDs of each control daemon's clients. A PID stays until the control daemon's log, or its list of clients, shows
    /// that the client has ended.
    served: BTreeMap<DaemonId, BTreeMap<u32, ServedClient>>,
}

impl Register {
    /// Records that the log reports a new client of a control daemon. `running` is the process that has the PID now, or None if
    /// the new client has already ended. If the new client has ended, an older client with this PID is removed from the
    /// register, since the new client is another process. There are two exceptions. If the older client still has work, the
    /// log's line is about another connection of this client. If the log has not named the older client yet, it may be the new
    /// client, which the service has examined before reading the log's line.
    pub fn came(&mut self, daemon: &DaemonId, pid: u32, running: Option<ProcessId>, now: CoreTime) {
        let served = self.served.entry(daemon.clone()).or_default();
        if served.len() >= MOST {
            // So many clients mean that lines of the log about the ends of clients were lost, so the service forgets all
            // clients of this control daemon.
            served.clear();
        }
        let before = served.insert(pid, ServedClient::new(now));
        let is_at_work = before.is_some_and(|client| !client.is_hit);
        match running {
            Some(process) => self.want([process], now),
            None if is_at_work || self.clients.get(&pid).is_some_and(|entry| !entry.is_logged) => {}
            None => _ = self.clients.remove(&pid),
        }
        self.note_line_of(pid);
    }

    /// Records that the log reports the end of a client. The process stays in the register, since a message about its end may
    /// follow.
    pub fn left(&mut self, daemon: &DaemonId, pid: u32) {
        if let Some(served) = self.served.get_mut(daemon) {
            served.remove(&pid);
        }
        self.note_line_of(pid);
    }

    fn note_line_of(&mut self, pid: u32) {
        if let Some(entry) = self.clients.get_mut(&pid) {
            entry.is_logged = true;
        }
    }

    /// Records that a fatal GPU error has ended the work of a client. `running` is the process that has the PID now, if any.
    /// The service examines this process, since the log's line about the client's start may have been lost.
    pub fn hit(&mut self, daemon: &DaemonId, pid: u32, running: Option<ProcessId>, now: CoreTime) {
        if let Some(client) = self.served.get_mut(daemon).and_then(|served| served.get_mut(&pid)) {
            client.is_hit = true;
        }
        self.want(running, now);
        self.note_line_of(pid);
    }

    /// Records that all clients of a control daemon have ended, with its server or with the control daemon itself.
    pub fn all_left(&mut self, daemon: &DaemonId) {
        self.served.remove(daemon);
    }

    /// Records the clients that a control daemon lists, each with the GPUs that it is known to use. The list is more complete
    /// than the log: lines may have been lost, or an earlier process of the service may have read them.
    pub fn listed(
        &mut self,
        daemon: &DaemonId,
        listed: BTreeMap<ProcessId, BTreeSet<GpuUuid>>,
        now: CoreTime,
    ) {
        let served = self.served.entry(daemon.clone()).or_default();
        let is_listed = |pid: &u32| listed.keys().any(|process| process.pid == *pid);
        served.retain(|pid, client| is_listed(pid) || now < client.since + LISTED_AFTER);
        for (process, gpus) in &listed {
            let known = self.clients.get(&process.pid).map(|entry| entry.client.process);
            if known.is_some_and(|known| known != *process) {
                served.remove(&process.pid);
            }
            let client = served.entry(process.pid).or_insert_with(|| ServedClient::new(now));
            if !gpus.is_empty() {
                client.gpus.clone_from(gpus);
            }
        }
        self.want(listed.into_keys(), now);
    }

    pub fn served(&self) -> Vec<(DaemonId, ProcessId, BTreeSet<GpuUuid>)> {
        let all = self.served.iter().flat_map(|(daemon, served)| served.iter().map(move |one| (daemon, one)));
        let known = all.filter_map(|(daemon, (pid, client))| {
            Some((daemon.clone(), self.get(*pid)?.process, client.gpus.clone()))
        });
        known.collect()
    }

    pub fn has_clients(&self, daemon: &DaemonId) -> bool {
        self.served.get(daemon).is_some_and(|served| !served.is_empty())
    }

    pub fn at_work(&self, daemon: &DaemonId) -> Vec<u32> {
        let served = self.served.get(daemon).into_iter().flatten();
        served.filter(|(_, client)| !client.is_hit).map(|(pid, _)| *pid).collect()
    }

    /// Requests an examination of these running processes. A process is skipped if its slices are certain, or if it was
    /// examined recently.
    pub fn want(&mut self, processes: impl IntoIterator<Item = ProcessId>, now: CoreTime) {
        for process in processes {
            if let Some(entry) = self.entry_or_new(process) {
                entry.is_wanted |= !entry.is_looked_at && entry.is_old(now);
            }
        }
    }

    /// Requests an examination of these running processes, even if their slices are known. A process that is being examined is
    /// skipped.
    pub fn want_anew(&mut self, processes: impl IntoIterator<Item = ProcessId>) {
        for process in processes {
            if let Some(entry) = self.entry_or_new(process) {
                entry.is_wanted |= !entry.is_looked_at;
            }
        }
    }

    fn entry_or_new(&mut self, process: ProcessId) -> Option<&mut RegisteredClient> {
        let has_room = self.clients.len() < MOST;
        match self.clients.entry(process.pid) {
            btree_map::Entry::Vacant(vacant) => {
                has_room.then(|| vacant.insert(RegisteredClient::new(process)))
            }
            btree_map::Entry::Occupied(occupied) => {
                let entry = occupied.into_mut();
                if entry.client.process != process {
                    *entry = RegisteredClient::new(process);
                }
                Some(entry)
            }
        }
    }

    /// Requests another examination of every client, since the slices of clients may have changed.
    pub fn look_again(&mut self) {
        for entry in self.clients.values_mut() {
            (entry.is_wanted, entry.may_have_changed) = (true, true);
        }
    }

    pub fn wants_look(&self) -> bool {
        self.clients.values().any(|entry| entry.is_wanted && !entry.is_looked_at)
    }

    /// Begins an examination, and returns the processes to examine. The caller must report the result for each process with
    /// [`Register::answer`].
    pub fn begin_look(&mut self) -> Vec<ProcessId> {
        let due = self.clients.values_mut().filter(|entry| entry.is_wanted && !entry.is_looked_at);
        due.map(|entry| {
            (entry.is_wanted, entry.is_looked_at) = (false, true);
            entry.client.process
        })
        .collect()
    }

    /// Records the facts about a client that the service can read without the risk of a hang. [`Register::answer`] follows with
    /// the other facts.
    pub fn first_answer(&mut self, client: KnownClient) {
        if let Some(entry) = self.entry(client.process) {
            let before = entry.client.slices.take();
            entry.client = KnownClient { slices: before.or(client.slices), ..client };
        }
    }

    /// Records the result of an examination. If `found` is None, the process has ended or the examination has hung, and the
    /// known facts stay. A result without slices does not remove the known slices, since a process that is just ending has no
    /// environment any more. The known slices are removed only if [`Register::look_again`] has reported that slices may have
    /// changed. Returns whether the result is new.
    pub fn answer(&mut self, process: ProcessId, found: Option<KnownClient>, now: CoreTime) -> bool {
        let Some(entry) = self.entry(process) else { return false };
        (entry.is_looked_at, entry.answered) = (false, Some(now));
        let Some(found) = found else { return false };
        let before = entry.client.slices.clone().filter(|_| !entry.may_have_changed);
        let found = KnownClient { slices: found.slices.or(before), ..found };
        let is_news = !entry.is_found || entry.client != found;
        entry.client = found;
        // If another examination is already requested, `may_have_changed` stays true, since the slices may have changed after
        // this examination began.
        entry.may_have_changed &= entry.is_wanted;
        entry.is_found = true;
        is_news
    }

    fn entry(&mut self, process: ProcessId) -> Option<&mut RegisteredClient> {
        self.clients.get_mut(&process.pid).filter(|entry| entry.client.process == process)
    }

    /// The last client with this PID. Its process may have ended.
    pub fn get(&self, pid: u32) -> Option<&KnownClient> {
        self.clients.get(&pid).map(|entry| &entry.client)
    }

    pub fn has_found(&self, process: ProcessId) -> bool {
        let entry = self.clients.get(&process.pid).filter(|entry| entry.client.process == process);
        entry.is_some_and(|entry| entry.is_found)
    }

    /// Describes the last client with this PID. The text quotes the name of the process's program, since a tenant chooses the
    /// name and could imitate the description of another client.
    pub fn describe(&self, pid: u32) -> String {
        match self.get(pid).filter(|client| client.user.is_some()) {
            Some(client) => format!("{client}, command {:?}", client.command),
            None => format!("PID {pid} of an unknown user"),
        }
    }

    pub fn is_full(&self) -> bool {
        self.clients.len() >= KEPT
    }

    /// If the register has `KEPT` clients or more, removes clients that have ended, the oldest first. `runs` returns whether a
    /// process still runs.
    pub fn make_room(&mut self, runs: impl Fn(ProcessId) -> bool) {
        if !self.is_full() {
            return;
        }
        let is_served = |pid: u32| self.served.values().any(|served| served.contains_key(&pid));
        let processes = self.clients.values().map(|entry| entry.client.process);
        let mut ended: Vec<ProcessId> =
            processes.filter(|process| !is_served(process.pid) && !runs(*process)).collect();
        ended.sort_by_key(|process| process.start_time);
        for process in ended.iter().take(self.clients.len().saturating_sub(KEPT / 2)) {
            self.clients.remove(&process.pid);
        }
        for served in self.served.values_mut() {
            served.retain(|pid, _| self.clients.get(pid).is_some_and(|entry| runs(entry.client.process)));
        }
    }

    pub fn processes(&self) -> Vec<ProcessId> {
        self.clients.values().map(|entry| entry.client.process).collect()
    }
}

#[cfg(test)]
mod tests {
    use alloc::borrow::ToOwned;

    use super::*;

    const NOW: CoreTime = CoreTime::from_secs(100);

    fn process(pid: u32, start_time: u64) -> ProcessId {
        ProcessId { pid, start_time }
    }

    fn slice(name: &str, known_by: KnownBy) -> Membership {
        Membership { slices: [name.parse().unwrap()].into(), known_by }
    }

    fn client(process: ProcessId, user: &str, slices: Option<Membership>) -> KnownClient {
        KnownClient { user: Some(user.to_owned()), slices, ..KnownClient::only(process) }
    }

    fn register_with(known: KnownClient) -> Register {
        let mut register = Register::default();
        register.came(&DaemonId::Shared, known.process.pid, Some(known.process), NOW);
        assert_eq!(register.begin_look(), [known.process]);
        _ = register.answer(known.process, Some(known), NOW);
        register
    }

    #[test]
    fn a_client_is_known_after_its_end_until_another_has_its_pid() {
        let one = client(process(7, 1), "alice", Some(slice("00:06.0-1", KnownBy::Mount)));
        let mut register = register_with(one.clone());
        register.left(&DaemonId::Shared, 7);
        register.make_room(|_| false);
        let words = "PID 7 of user alice, slice 00:06.0-1, command \"\"";
        assert_eq!(register.describe(7), words);
        // A new process with the same PID replaces the client. No fact about the old client counts for the new process.
        register.came(&DaemonId::Shared, 7, Some(process(7, 2)), NOW);
        assert_eq!(register.describe(7), "PID 7 of an unknown user");
        _ = register.answer(one.process, Some(one), NOW);
        assert_eq!(register.describe(7), "PID 7 of an unknown user");
        assert_eq!(register.begin_look(), [process(7, 2)]);
    }

    #[test]
    fn a_client_whose_process_has_ended_when_its_line_is_read_is_the_one_at_work_or_unknown() {
        let mut register = register_with(client(process(7, 1), "alice", None));
        register.came(&DaemonId::Shared, 7, None, NOW);
        assert!(register.describe(7).contains("alice"));
        assert_eq!(register.at_work(&DaemonId::Shared), [7]);
        register.left(&DaemonId::Shared, 7);
        register.came(&DaemonId::Shared, 7, None, NOW);
        assert_eq!(register.describe(7), "PID 7 of an unknown user");
        register.all_left(&DaemonId::Shared);
        assert_eq!(register.at_work(&DaemonId::Shared), [] as [u32; 0]);
        // The service may examine a process before it reads the log's line about the process.
        register.want([process(8, 1)], NOW);
        register.begin_look();
        _ = register.answer(process(8, 1), Some(client(process(8, 1), "bob", None)), NOW);
        register.came(&DaemonId::Shared, 8, None, NOW);
        assert!(register.describe(8).contains("bob"));
        register.left(&DaemonId::Shared, 8);
        register.came(&DaemonId::Shared, 8, None, NOW);
        assert_eq!(register.describe(8), "PID 8 of an unknown user");
    }

    #[test]
    fn a_list_of_clients_corrects_what_the_lines_have_said() {
        let shared = &DaemonId::Shared;
        let mut register = register_with(client(process(7, 1), "alice", None));
        register.came(shared, 8, Some(process(8, 1)), NOW);
        let listed = |processes: &[ProcessId]| {
            processes.iter().map(|process| (*process, BTreeSet::from(["GPU-1".to_owned()]))).collect()
        };
        // A client that has just come may not be in the control daemon's list yet.
        register.listed(shared, listed(&[process(9, 1)]), NOW);
        assert_eq!(register.at_work(shared), [7, 8, 9]);
        let later = NOW + LISTED_AFTER;
        register.listed(shared, listed(&[process(8, 2), process(9, 1)]), later);
        let served: Vec<ProcessId> = register.served().into_iter().map(|(_, process, _)| process).collect();
        assert_eq!(served, [process(8, 2), process(9, 1)], "another process has the PID of one");
        register.listed(shared, [(process(9, 1), BTreeSet::new())].into(), later + LISTED_AFTER);
        assert_eq!(
            register.served(),
            [(shared.clone(), process(9, 1), BTreeSet::from(["GPU-1".to_owned()]))]
        );
        assert!(register.has_clients(shared));
    }

    #[test]
    fn a_client_that_was_hit_stays_and_loses_no_work_again() {
        let shared = &DaemonId::Shared;
        let mut register = register_with(client(process(7, 1), "alice", None));
        register.hit(shared, 7, Some(process(7, 1)), NOW);
        assert_eq!((register.at_work(shared), register.served().len()), (Vec::new(), 1));
        register.came(shared, 7, Some(process(7, 1)), NOW);
        assert_eq!(register.at_work(shared), [7]);
        register.left(shared, 7);
        assert!(!register.has_clients(shared));
    }

    #[test]
    fn a_client_without_an_answer_keeps_the_slice_that_it_had() {
        let its = process(7, 1);
        let mut register =
            register_with(client(its, "alice", Some(slice("00:06.0-1", KnownBy::Environment))));
        let slices = |register: &Register| register.get(7).unwrap().slices.clone();
        register.look_again();
        assert!(register.wants_look());
        register.begin_look();
        register.first_answer(client(its, "alice", None));
        _ = register.answer(its, None, NOW);
        assert_eq!(slices(&register), Some(slice("00:06.0-1", KnownBy::Environment)));
        register.look_again();
        register.begin_look();
        _ = register.answer(its, Some(client(its, "alice", None)), NOW);
        assert_eq!(slices(&register), None);
        register.want_anew([its]);
        register.begin_look();
        _ = register.answer(its, Some(client(its, "alice", Some(slice("00:06.0-2", KnownBy::Bound)))), NOW);
        register.want_anew([its]);
        register.begin_look();
        _ = register.answer(its, Some(client(its, "alice", None)), NOW);
        assert_eq!(slices(&register), Some(slice("00:06.0-2", KnownBy::Bound)));
    }

    #[test]
    fn a_client_that_only_claims_a_slice_is_looked_at_again() {
        let its = process(7, 1);
        for (slices, is_known) in [
            (Some(slice("00:06.0-1", KnownBy::Bound)), true),
            (Some(slice("00:06.0-1", KnownBy::Environment)), false),
            (None, false),
        ] {
            let mut register = register_with(client(its, "alice", slices));
            register.want([its], NOW);
            assert!(!register.wants_look());
            register.want([its], NOW + AGAIN);
            assert_eq!(register.wants_look(), !is_known);
        }
    }

    #[test]
    fn a_look_that_does_not_end_has_no_other_beside_it() {
        let its = process(7, 1);
        let mut register = Register::default();
        register.want([its, its], NOW);
        assert_eq!(register.begin_look(), [its]);
        register.want_anew([its]);
        register.look_again();
        assert_eq!(register.begin_look(), []);
        _ = register.answer(its, None, NOW);
        assert_eq!(register.begin_look(), [its]);
    }

    #[test]
    fn ended_clients_make_room() {
        let mut register = Register::default();
        let of = |pid: u32| process(pid, u64::from(pid));
        register.want((1..2000).map(of), NOW);
        register.came(&DaemonId::Shared, 1, Some(of(1)), NOW);
        register.make_room(|process| process.pid > 1990);
        let left = register.processes();
        assert_eq!(left.len(), KEPT / 2);
        assert!(left.contains(&of(1)) && left.contains(&of(1999)) && !left.contains(&of(2)));
    }

    #[test]
    fn a_command_can_not_look_like_another_client() {
        let known =
            KnownClient { command: "x\"; PID 8\n".to_owned(), ..client(process(7, 7), "alice", None) };
        let register = register_with(known);
        assert_eq!(register.describe(7), r#"PID 7 of user alice, command "x\"; PID 8\n""#);
    }
}
