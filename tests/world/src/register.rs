//! The service's register of clients, and the checks of the register. The service fills the register from the logs of control
//! daemons and from the processes of clients.

use std::collections::{BTreeMap, BTreeSet};

use mps_core::mps::Meaning;
use mps_core::register::{Evidence, KnownClient, Register, Tenant};
use mps_core::terms::{DaemonId, DeviceName, ProcessId};

use super::mps::Mps;
use super::tenants::SliceKnownBy;

const DAEMON: DaemonId = DaemonId::Shared;

#[derive(Debug, Default)]
pub(crate) struct SimRegister {
    register: Register,
    /// The description of each process that the service has examined. All later messages about the process must use this
    /// description.
    seen: BTreeMap<ProcessId, String>,
}

impl Mps {
    pub(crate) fn note_line(&mut self, meaning: &Meaning) {
        let running = |pid: &u32| self.clients.get(pid).map(|client| client.program.process);
        let (now, register) = (self.now, &mut self.reader.clients.register);
        match meaning {
            Meaning::ClientAdmitted(pid) => register.came(&DAEMON, *pid, running(pid), now),
            Meaning::TornDown { client, .. } => register.hit(&DAEMON, *client, running(client), now),
            Meaning::ClientLeft(pid) => register.left(&DAEMON, *pid),
            Meaning::ServerExited { .. } => register.all_left(&DAEMON),
            _ => {}
        }
        if let Meaning::ClientAdmitted(pid) = meaning
            && register.get(*pid).is_none()
        {
            // The client ended before the service read the first log line about the client. So the service can't distinguish
            // the client from an earlier process with the same PID.
            self.reader.clients.seen.retain(|process, _| process.pid != *pid);
        }
    }

    pub(crate) fn are_listed(&mut self, listed: BTreeMap<u32, BTreeSet<String>>) {
        let running = listed
            .into_iter()
            .filter_map(|(pid, gpus)| Some((self.clients.get(&pid)?.program.process, gpus)));
        let running = running.collect();
        self.reader.clients.register.listed(&DAEMON, running, self.now);
    }

    pub(crate) fn has_known_clients(&self) -> bool {
        self.reader.clients.register.has_clients(&DAEMON)
    }

    /// Checks the promise `everybody-is-known`: after a time without events the register has exactly the clients of the control
    /// daemon, even if log lines of clients were lost.
    pub(crate) fn check_all_clients_are_known(&self) {
        let known: BTreeSet<ProcessId> =
            self.reader.clients.register.served().into_iter().map(|(_, process, _)| process).collect();
        let there: BTreeSet<ProcessId> = self.clients.values().map(|client| client.program.process).collect();
        assert_eq!(known, there, "everybody-is-known: the clients of {} in the register", self.pid);
    }

    /// The service examines the processes of the clients that it does not know. If `anew` is true, it examines all clients.
    pub(crate) fn look_at_clients(&mut self, anew: bool) {
        let now = self.now;
        if anew {
            let there = self.clients.values().map(|client| client.program.process);
            self.reader.clients.register.want_anew(there);
        }
        for process in self.reader.clients.register.begin_look() {
            let client = self.clients.get(&process.pid).filter(|client| client.program.process == process);
            let Some(client) = client.cloned() else {
                _ = self.reader.clients.register.answer(process, None, now);
                continue;
            };
            let (tenant, slice) = (&client.tenant, client.tenant.slice);
            let (mounted, claim) = match tenant.slice_known_by {
                SliceKnownBy::Mount => (Some(vec![slice]), Vec::new()),
                SliceKnownBy::Environment => (None, vec![DeviceName::Slice(slice)]),
                SliceKnownBy::Nothing => (None, Vec::new()),
            };
            let evidence = Evidence { mounted, ..Evidence::default() };
            let uid = tenant.users.first().copied().unwrap_or_default();
            let known = KnownClient {
                user: Some(format!("user{uid}")),
                tenant: Some(Tenant { uid, container: format!("c{uid}") }),
                slices: evidence.slices(&[], |_| false),
                ..KnownClient::only(process)
            };
            let clients = &mut self.reader.clients;
            clients.register.first_answer(known.clone());
            let words = format!("PID {} of user user{uid}", process.pid);
            // The environment of a program is in its memory, which the service can't read while a debugger has stopped the
            // program.
            let is_held_up = tenant.is_held && evidence.asks_environment();
            let slices = evidence.slices(&claim, |_| false);
            let slice = if slices.is_some() { format!(", slice {slice}") } else { String::new() };
            let found = (!is_held_up).then_some(KnownClient { slices, ..known });
            if is_held_up {
                clients.seen.entry(process).or_insert(words);
            } else {
                clients.seen.insert(process, words + &slice);
            }
            _ = clients.register.answer(process, found, now);
        }
    }

    /// Checks the promise `everybody-is-known`: each message about a client names the tenant and the slice that the service
    /// found while the client's process ran. No message names the tenant or the slice of another process with the same PID.
    pub(crate) fn check_everybody_is_known(&self, pid: u32) {
        let SimRegister { register, seen } = &self.reader.clients;
        let Some(process) = self.hit_processes.get(&pid).filter(|_| !self.lines_are_missing) else { return };
        let told = register.describe(pid);
        let unknown = || format!("PID {pid} of an unknown user");
        let words = seen.get(process).map_or_else(unknown, |words| format!("{words}, command \"\""));
        assert_eq!(told, words, "everybody-is-known: {process:?} is told with other words");
    }
}
