//! The clients of a control daemon as they were while they were there. When the log names the clients that a fault has hit,
//! most of them have ended.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use mps_core::terms::ProcessId;
use tokio::task::JoinSet;

use common::host::blocking::Blocking;
use common::host::identity;
use common::host::proc;
use common::membership::whose::{Whose, users, whose};
use common::membership::{SliceMounts, Slices};

/// The most clients that are kept: those of sixteen full GPUs. A client that has ended makes room for another.
const KEPT: usize = 1024;

/// The time that the kernel gets for a question. It takes microseconds, but a program can hold up everybody who reads its
/// memory, where its environment is.
const PATIENCE: Duration = Duration::from_secs(1);

/// The most questions at a time.
const QUESTIONS: usize = 8;

/// A client with its owner.
#[derive(Debug, Clone, PartialEq, Eq)]
struct KnownClient {
    process: ProcessId,
    whose: Whose,
    /// The name of its program. A tenant chooses that name.
    command: String,
}

impl fmt::Display for KnownClient {
    /// The command is quoted: it could look like another client.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, command {:?}", self.whose, self.command)
    }
}

/// All clones share what is known.
#[derive(Debug, Clone)]
pub(super) struct KnownClients {
    kernel: Blocking,
    known: Arc<Mutex<BTreeMap<u32, KnownClient>>>,
}

impl Default for KnownClients {
    fn default() -> Self {
        Self { kernel: Blocking::new(QUESTIONS), known: Arc::default() }
    }
}

impl KnownClients {
    /// Takes note of a client that has just come. Another process may have had its PID before.
    pub(super) fn came(&self, pid: u32, slices: impl FnOnce() -> Slices) {
        self.with(|known| known.remove(&pid));
        self.remember([pid], slices);
    }

    /// Looks at these clients if they are not known, beside the loop.
    pub(super) fn remember(&self, pids: impl IntoIterator<Item = u32>, slices: impl FnOnce() -> Slices) {
        let now = |pid: u32| identity::read(pid).ok();
        let is_unknown = |pid: &u32| {
            let known = self.with(|known| known.get(pid).map(|client| client.process));
            known.is_none() || known != now(*pid)
        };
        let unknown: Vec<u32> = pids.into_iter().filter(is_unknown).take(KEPT).collect();
        if !unknown.is_empty() {
            tokio::spawn(self.clone().learn(unknown, slices()));
        }
    }

    /// This client in words.
    pub(super) fn describe(&self, pid: u32) -> String {
        let known = self.with(|known| known.get(&pid).map(ToString::to_string));
        known.unwrap_or_else(|| format!("PID {pid} of an unknown user"))
    }

    async fn learn(self, pids: Vec<u32>, slices: Slices) {
        let looked = self.kernel.ask(PATIENCE, move || Arc::new((users(), SliceMounts::find(&slices))));
        let Some(host) = looked.await else { return };
        // One question for each client: a client that holds up its question hides no other client.
        let mut asked = JoinSet::new();
        for pid in pids {
            let (known, host) = (self.clone(), Arc::clone(&host));
            asked.spawn(async move {
                let kernel = known.kernel.clone();
                kernel.ask(PATIENCE, move || known.learn_one(pid, &host.1, &host.0)).await;
            });
        }
        while asked.join_next().await.is_some() {}
    }

    /// Looks at a client. Its memory comes last, since that look can be held up.
    fn learn_one(&self, pid: u32, mounts: &SliceMounts, users: &str) {
        let (Ok(process), Some(command)) = (identity::read(pid), proc::name(pid)) else { return };
        let mut client = KnownClient { process, whose: whose(pid, mounts, users), command };
        self.keep(client.clone());
        if client.whose.slices.is_none()
            && let Ok(Some(membership)) = mounts.slices_of(pid)
        {
            client.whose.slices = Some(membership.slices);
            self.keep(client.clone());
        }
        tracing::debug!("client {client}");
    }

    /// Keeps a client, unless another process has its PID by now. Two looks may be under way, and the client may end during the
    /// later one, which then finds less.
    fn keep(&self, client: KnownClient) {
        let now = |client: &KnownClient| identity::read(client.process.pid).ok();
        if now(&client).is_some_and(|now| now != client.process) {
            return;
        }
        let has_slices = client.whose.slices.is_some();
        self.with(|known| {
            let before = known.get(&client.process.pid).filter(|before| before.process == client.process);
            if before.is_some_and(|before| before.whose.slices.is_some() || !has_slices) {
                return;
            }
            if known.len() >= KEPT {
                known.retain(|_, client| now(client) == Some(client.process));
            }
            if known.len() < KEPT || known.contains_key(&client.process.pid) {
                known.insert(client.process.pid, client);
            }
        });
    }

    fn with<T>(&self, act: impl FnOnce(&mut BTreeMap<u32, KnownClient>) -> T) -> T {
        act(&mut self.known.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_is_known_after_its_end_until_another_has_its_pid() {
        let clients = KnownClients::default();
        let own = std::process::id();
        clients.clone().learn(vec![own, u32::MAX], Slices::default()).await;
        let words = clients.describe(own);
        let command = format!(", command {:?}", proc::name(own).unwrap());
        assert!(words.starts_with(&format!("PID {own} of user ")) && words.ends_with(&command), "{words}");
        let unknown = "PID 4294967295 of an unknown user";
        assert_eq!(clients.describe(u32::MAX), unknown);
        // One that has ended is named all the same.
        clients.with(|known| known.get_mut(&own).unwrap().process.start_time = 7);
        assert_eq!(clients.describe(own), words);
        // Until the next one with its PID comes: it must not be taken for the one before.
        clients.came(own, Slices::default);
        assert!(clients.describe(own).ends_with(" of an unknown user"));
    }

    #[test]
    fn a_later_look_takes_nothing_away() {
        let clients = KnownClients::default();
        let process = identity::read(std::process::id()).unwrap();
        for (user, has_slice, expected) in [
            ("one", false, "one"),
            ("less", false, "one"),
            ("two", true, "two"),
            ("less", true, "two"),
            ("less", false, "two"),
        ] {
            let slices = has_slice.then(|| vec!["00:06.0-1".parse().unwrap()]);
            let whose = Whose { user: Some(user.to_owned()), slices, ..Whose::only(process.pid) };
            clients.keep(KnownClient { process, whose, command: "x".to_owned() });
            let words = clients.describe(process.pid);
            assert!(words.starts_with(&format!("PID {} of user {expected},", process.pid)), "{words}");
        }
    }

    #[test]
    fn a_command_can_not_look_like_another_client() {
        let whose = Whose::only(7);
        let process = ProcessId { pid: 7, start_time: 7 };
        let known = KnownClient { process, whose, command: "x\"; PID 8\n".to_owned() };
        assert_eq!(known.to_string(), r#"PID 7, command "x\"; PID 8\n""#);
    }
}
