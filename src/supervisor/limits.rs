//! Sets the limits of the order and keeps them in force. A container that runs as the host's root and has the whole
//! pipe directory can change them as well as we can.

use std::time::Duration;

use tokio::time::Instant;

use crate::mps::control::{Control, ControlError, ServerStatus};

use super::heal::still_faulted;
use super::servers::{Limits, Server};
use super::{Failure, Serving};

/// The longest time for a server to write its limits to the log. Measured: below 1 ms.
pub(super) const LIMITS_TIMEOUT: Duration = Duration::from_secs(2);

impl Serving<'_> {
    /// The limits that the order has for the GPUs of the control daemon that runs.
    pub(super) fn limits(&self) -> Limits {
        self.run.limits(&self.worker.order)
    }

    /// Reads the limits in force back, and sets the limits again that others have changed.
    pub(super) async fn keep_limits(&mut self) -> Result<(), Failure> {
        if self.worker.retiring || !self.run.configured {
            return Ok(());
        }
        let limits = self.limits();
        self.keep_defaults(&limits).await?;
        for server in self.run.servers.alive() {
            let Some(found) = self.difference(server, &limits).await? else { continue };
            if self.takes_limits(server).await? {
                self.worker
                    .reporter
                    .warning(format!("limits of server {server} were changed by others: {found}; set again"));
                self.give(server, &limits).await?;
            }
        }
        Ok(())
    }

    /// The same for the limits of servers to come alone.
    pub(super) async fn keep_defaults(&mut self, limits: &Limits) -> Result<(), Failure> {
        let percentage = limits.thread_percentage;
        let found = self.run.control.differing_limits(None, percentage, &limits.memory_mib).await?;
        if !found.is_empty() {
            let found = found.join(", ");
            self.worker
                .reporter
                .warning(format!("limits for new servers were changed by others: {found}; set again"));
            set_limits(&self.run.control, None, limits).await?;
        }
        Ok(())
    }

    /// Gives a running server the limits for its next clients. Its present clients keep their limits.
    pub(super) async fn set_live(&mut self, server: u32, limits: &Limits) -> Result<(), Failure> {
        if !self.takes_limits(server).await? {
            return Ok(());
        }
        let has_written = self.run.servers.get(server).is_some_and(|known| known.has_written(limits));
        if has_written && self.difference(server, limits).await?.is_none() {
            return Ok(());
        }
        tracing::debug!(step = "live", "server {server} gets other limits");
        self.give(server, limits).await
    }

    /// True if the server can be told limits now.
    async fn takes_limits(&mut self, server: u32) -> Result<bool, Failure> {
        match self.run.control.server_status(server).await? {
            ServerStatus::Active | ServerStatus::Unsupported => Ok(true),
            // A former service may have read the lines that tell of it.
            ServerStatus::Fault => {
                if still_faulted(&self.run.control, server).await? {
                    self.fault_seen(server);
                }
                Ok(false)
            }
            ServerStatus::Initializing | ServerStatus::Gone => Ok(false),
        }
    }

    /// The limits in force that differ from the order. The log is exact, but does not tell of a percentage that is
    /// changed while the server runs.
    async fn difference(&mut self, server: u32, limits: &Limits) -> Result<Option<String>, Failure> {
        let written = self.run.servers.get(server).and_then(|known| known.differs_from(limits));
        if written.is_some() || limits.enforced.is_empty() {
            return Ok(written);
        }
        let memory_mib = limits.memory_mib.iter().filter(|(ordinal, _)| limits.enforced.contains(ordinal));
        let memory_mib = memory_mib.map(|(ordinal, mib)| (*ordinal, *mib)).collect();
        let found =
            self.run.control.differing_limits(Some(server), limits.thread_percentage, &memory_mib).await?;
        Ok((!found.is_empty()).then(|| found.join(", ")))
    }

    async fn give(&mut self, server: u32, limits: &Limits) -> Result<(), Failure> {
        self.run.servers.expect_limits(server);
        set_limits(&self.run.control, Some(server), limits).await?;
        self.run.servers.thread_percentage_answered(server, limits.thread_percentage);
        match self.confirm(server, limits).await? {
            Some(difference) => Err(Failure::Failed(format!("server {server}: {difference}"))),
            None => Ok(()),
        }
    }

    /// Waits until a new server has written its limits. They differ if somebody has changed the defaults before it
    /// started; then they are set again.
    pub(super) async fn confirm_or_correct(&mut self, server: u32, limits: &Limits) -> Result<(), Failure> {
        let Some(difference) = self.confirm(server, limits).await? else { return Ok(()) };
        self.worker
            .reporter
            .warning(format!("server {server} has come with other limits: {difference}; set again"));
        set_limits(&self.run.control, None, limits).await?;
        self.give(server, limits).await
    }

    /// Waits until a server has written its limits: only these are exact. Returns the difference to the order.
    async fn confirm(&mut self, server: u32, limits: &Limits) -> Result<Option<String>, Failure> {
        let deadline = Instant::now() + LIMITS_TIMEOUT;
        // Its first lines may still answer the order before this one.
        let in_force = |known: &Server| known.has_written(limits) && known.differs_from(limits).is_none();
        while !self.run.servers.get(server).is_some_and(in_force) && self.step(deadline).await? {}
        if !self.run.servers.get(server).is_some_and(|known| known.has_written(limits)) {
            // The disk may be full. The settings are read back, to the GiB.
            set_limits(&self.run.control, Some(server), limits).await?;
            self.worker.reporter.warning(format!(
                "server {server} wrote no limits to the log; they are confirmed to the GiB only"
            ));
            return Ok(None);
        }
        Ok(self.run.servers.get(server).and_then(|known| known.differs_from(limits)))
    }
}

/// Sets the limits of a server, or of the servers to come; each is read back. Returns the servers.
pub(super) async fn set_limits(
    control: &Control,
    server: Option<u32>,
    limits: &Limits,
) -> Result<Vec<u32>, ControlError> {
    control.set_limits(server, limits.thread_percentage, &limits.memory_mib).await
}
