//! Sets the limits of the order, and sets them again when another program has changed them. A container that runs as the host's
//! root and mounts the whole pipe directory can send the same commands as the service.

use alloc::format;
use alloc::string::String;
use core::time::Duration;

use super::Serving;
use super::news::News;
use super::servers::{SERVER_PAUSE, SERVER_TIMEOUT, Server};
use super::shell::{Failure, Shell};
use crate::mps::{Inspection, Limits, ServerStatus};

/// The time that a server has to write its limits to the log. Measured: below 1 ms.
pub(super) const LIMITS_TIMEOUT: Duration = Duration::from_secs(2);

pub(super) const TAKES_LIMITS: [ServerStatus; 2] = [ServerStatus::Active, ServerStatus::Unsupported];

impl<S: Shell> Serving<'_, S> {
    pub(super) fn limits(&self) -> Limits {
        self.run.limits(&self.wanted)
    }

    /// Asks the control daemon for its servers, their statuses, and the limits that differ from the order. The question omits a
    /// server that handles a fatal GPU error, since such a server takes no limits, and `heal.rs` asks for its status.
    pub(super) async fn inspect(&mut self) -> Result<Inspection, Failure> {
        let healing = self.run.blockers.fault().map(|fault| fault.server);
        let mut servers = self.run.servers.alive();
        servers.retain(|server| Some(*server) != healing);
        let limits = self.limits();
        self.shell.inspect(&servers, Some(&limits)).await
    }

    /// Sets the limits of the order again if another program has changed the limits in force.
    pub(super) async fn keep_limits(&mut self, look: &Inspection) -> Result<(), Failure> {
        if self.wanted.retiring || !self.run.configured {
            return Ok(());
        }
        let limits = self.limits();
        self.keep_defaults(look, &limits).await?;
        for server in look.with(&TAKES_LIMITS) {
            let Some(found) = self.difference(look, server, &limits) else { continue };
            self.shell.tell(
                News::Warning,
                format!(
                    "another program changed the limits of server {server}: {found}; the service has \
                     restored the limits"
                ),
            );
            self.give(server, &limits).await?;
        }
        Ok(())
    }

    /// Sets the control daemon's defaults again if another program has changed them. The defaults are the limits of servers
    /// that start later.
    pub(super) async fn keep_defaults(&mut self, look: &Inspection, limits: &Limits) -> Result<(), Failure> {
        if let Some(found) = look.differences.get(&None) {
            self.shell.tell(
                News::Warning,
                format!(
                    "another program changed the limits for new servers of control daemon {id}: {found}; \
                     the service has restored the limits",
                    id = self.wanted.id
                ),
            );
            self.shell.set_limits(None, limits).await?;
        }
        Ok(())
    }

    /// Sets the limits of a running server for its next clients. The present clients of the server keep their limits. A server
    /// that is just starting has the defaults of the moment of its start, so this function waits until the server has started.
    pub(super) async fn set_live(&mut self, server: u32, limits: &Limits) -> Result<(), Failure> {
        let deadline = self.shell.now() + SERVER_TIMEOUT;
        let look = loop {
            let look = self.shell.inspect(&[server], Some(limits)).await?;
            match look.status(server) {
                ServerStatus::Initializing => {
                    if self.shell.now() >= deadline {
                        return Err(self.no_server_is_ready());
                    }
                    let ask_at = self.shell.now() + SERVER_PAUSE;
                    while self.step(ask_at).await? {}
                }
                // An earlier process of the service may have read the log's lines about the fatal GPU error, so only the
                // server's status shows the error now. A faulted server gets its limits after it has recovered.
                ServerStatus::Fault if self.still_faulted(server).await? => {
                    self.fault_seen(server);
                    return Ok(());
                }
                ServerStatus::Fault => {}
                ServerStatus::Gone => return Ok(()),
                ServerStatus::Active | ServerStatus::Unsupported => break look,
            }
        };
        // The start of a server can take long, and another program may have changed the defaults of the control daemon
        // meanwhile.
        self.keep_defaults(&look, limits).await?;
        let has_written = self.run.servers.get(server).is_some_and(|known| known.has_written(limits));
        if has_written && self.difference(&look, server, limits).is_none() {
            return Ok(());
        }
        self.shell.passed("live", &format!("server {server} gets the new limits"));
        self.give(server, limits).await
    }

    /// The limits of a server that differ from the order, in words. The limits in the log are exact, but the log does not
    /// report a percentage that is set while the server runs. The control daemon's answer is therefore used too.
    fn difference(&self, look: &Inspection, server: u32, limits: &Limits) -> Option<String> {
        let written = self.run.servers.get(server).and_then(|known| known.differs_from(limits));
        written.or_else(|| look.differences.get(&Some(server)).cloned())
    }

    /// Sets the limits of a running server, and waits until they are in force. A server that has ended takes no limits, and its
    /// end is handled elsewhere.
    async fn give(&mut self, server: u32, limits: &Limits) -> Result<(), Failure> {
        if self.run.servers.running(server).is_none() {
            return Ok(());
        }
        self.run.servers.expect_limits(server);
        if !self.shell.set_limits(Some(server), limits).await?.contains(&server) {
            return Ok(());
        }
        self.run.servers.thread_percentage_answered(server, limits.thread_percentage);
        match self.confirm(server, limits).await? {
            Some(difference) => Err(Failure::Failed(format!("server {server}: {difference}"))),
            None => Ok(()),
        }
    }

    /// Waits until a new server has written its limits to the log. If another program has changed the defaults before the start
    /// of the server, the limits differ, and are set again.
    pub(super) async fn confirm_or_correct(&mut self, server: u32, limits: &Limits) -> Result<(), Failure> {
        let Some(difference) = self.confirm(server, limits).await? else { return Ok(()) };
        self.shell.tell(
            News::Warning,
            format!(
                "server {server} started with wrong limits: {difference}; the service has corrected the \
                 limits"
            ),
        );
        self.shell.set_limits(None, limits).await?;
        self.give(server, limits).await
    }

    /// Waits until a server has written its limits to the log, since only the log is exact. Returns the difference from the
    /// order, in words. None if there is no difference, or if the server has ended.
    async fn confirm(&mut self, server: u32, limits: &Limits) -> Result<Option<String>, Failure> {
        let deadline = self.shell.now() + LIMITS_TIMEOUT;
        // The first lines of the server in the log may have the limits of an earlier order, so the service waits for lines with
        // the new limits.
        let in_force = |known: &Server| known.has_written(limits) && known.differs_from(limits).is_none();
        while self.run.servers.running(server).is_some_and(|known| !in_force(known))
            && self.step(deadline).await?
        {}
        let Some(known) = self.run.servers.running(server) else { return Ok(None) };
        if !known.has_written(limits) {
            // The log lacks the lines with the server's limits, for example since the disk is full. The service sets the
            // limits, and then can only compare them with the control daemon's answer, which is rounded to GiB.
            if !self.shell.set_limits(Some(server), limits).await?.contains(&server) {
                return Ok(None);
            }
            self.shell.tell(
                News::Warning,
                format!(
                    "server {server} wrote no limits to the log, so the service can check the server's \
                     memory limits only in whole GiB; see if the file system of the log is full"
                ),
            );
            return Ok(None);
        }
        Ok(known.differs_from(limits))
    }
}
