//! That the limits in force are those of the order, and stay so: a container whose root is the host's and that has the
//! whole pipe directory can change them as well as we can.

use std::time::Duration;

use tokio::time::Instant;

use crate::mps::control::{Control, ControlError, ServerStatus};

use super::heal::still_faulted;
use super::servers::Limits;
use super::{Failure, Worker};

/// How long a server may take to write its limits down. Measured: within the same millisecond.
pub(super) const LIMITS_TIMEOUT: Duration = Duration::from_secs(2);

impl Worker {
    /// The limits that the order has for the GPUs of the control daemon that runs.
    pub(super) fn limits(&self) -> Result<Limits, Failure> {
        self.run.as_ref().map(|run| run.limits(&self.order)).ok_or_else(Failure::not_running)
    }

    /// Reads back what is in force, and sets again what others have changed.
    pub(super) async fn keep_limits(&mut self, control: &Control) -> Result<(), Failure> {
        if self.retiring || !self.present()?.configured {
            return Ok(());
        }
        let limits = self.limits()?;
        self.keep_defaults(control, &limits).await?;
        for server in self.present()?.servers.alive() {
            let Some(found) = self.difference(control, server, &limits).await? else { continue };
            if self.takes_limits(control, server).await? {
                self.reporter
                    .warning(format!("limits of server {server} were changed by others: {found}; set again"));
                self.give(control, server, &limits).await?;
            }
        }
        Ok(())
    }

    /// The same of those for the servers to come alone.
    pub(super) async fn keep_defaults(&mut self, control: &Control, limits: &Limits) -> Result<(), Failure> {
        let percentage = limits.thread_percentage;
        let found = control.differing_limits(None, percentage, &limits.memory_mib).await?;
        if !found.is_empty() {
            let found = found.join(", ");
            self.reporter
                .warning(format!("limits for new servers were changed by others: {found}; set again"));
            set_defaults(control, limits).await?;
        }
        Ok(())
    }

    /// Gives a running server the limits, for its clients to come; those that run keep theirs.
    pub(super) async fn set_live(
        &mut self,
        control: &Control,
        server: u32,
        limits: &Limits,
    ) -> Result<(), Failure> {
        if !self.takes_limits(control, server).await? {
            return Ok(());
        }
        let has_written = self.present()?.servers.get(server).is_some_and(|known| known.has_written(limits));
        if has_written && self.difference(control, server, limits).await?.is_none() {
            return Ok(());
        }
        tracing::debug!(step = "live", "server {server} gets other limits");
        self.give(control, server, limits).await
    }

    /// Whether it can be told limits now.
    async fn takes_limits(&mut self, control: &Control, server: u32) -> Result<bool, Failure> {
        match control.server_status(server).await? {
            ServerStatus::Active | ServerStatus::Unsupported => Ok(true),
            // Whoever was here before may have read the lines that tell of it.
            ServerStatus::Fault => {
                if still_faulted(control, server).await? {
                    self.fault_seen(server);
                }
                Ok(false)
            }
            ServerStatus::Initializing | ServerStatus::Gone => Ok(false),
        }
    }

    /// What a server has in force that is not as it shall be. The log is exact, but says nothing of a percentage that is
    /// changed while the server runs.
    async fn difference(
        &mut self,
        control: &Control,
        server: u32,
        limits: &Limits,
    ) -> Result<Option<String>, Failure> {
        let written = self.present()?.servers.get(server).and_then(|known| known.differs_from(limits));
        if written.is_some() || limits.enforced.is_empty() {
            return Ok(written);
        }
        let memory_mib = limits.memory_mib.iter().filter(|(ordinal, _)| limits.enforced.contains(ordinal));
        let memory_mib = memory_mib.map(|(ordinal, mib)| (*ordinal, *mib)).collect();
        let found = control.differing_limits(Some(server), limits.thread_percentage, &memory_mib).await?;
        Ok((!found.is_empty()).then(|| found.join(", ")))
    }

    async fn give(&mut self, control: &Control, server: u32, limits: &Limits) -> Result<(), Failure> {
        self.present()?.servers.expect_limits(server);
        control.set_thread_percentage(server, limits.thread_percentage).await?;
        self.present()?.servers.thread_percentage_answered(server, limits.thread_percentage);
        for (ordinal, mib) in &limits.memory_mib {
            control.set_memory_limit(server, *ordinal, *mib).await?;
        }
        match self.confirm(control, server, limits).await? {
            Some(difference) => Err(Failure::Failed(format!("server {server}: {difference}"))),
            None => Ok(()),
        }
    }

    /// Waits for a new server's own words on its limits. It has others where somebody has changed the defaults before it
    /// started.
    pub(super) async fn confirm_or_correct(
        &mut self,
        control: &Control,
        server: u32,
        limits: &Limits,
    ) -> Result<(), Failure> {
        let Some(difference) = self.confirm(control, server, limits).await? else { return Ok(()) };
        self.reporter.warning(format!("server {server} has come with other limits: {difference}; set again"));
        set_defaults(control, limits).await?;
        self.give(control, server, limits).await
    }

    /// Waits for a server's own words on its limits; they alone are exact. Says what is not as it shall be.
    async fn confirm(
        &mut self,
        control: &Control,
        server: u32,
        limits: &Limits,
    ) -> Result<Option<String>, Failure> {
        let deadline = Instant::now() + LIMITS_TIMEOUT;
        // What it writes first may be the answer to an order that was replaced by this one a moment ago.
        let in_force = |worker: &Self| {
            let server = worker.run.as_ref().and_then(|run| run.servers.get(server));
            server.is_some_and(|known| known.has_written(limits) && known.differs_from(limits).is_none())
        };
        while !in_force(self) && self.step(deadline).await? {}
        if !self.present()?.servers.get(server).is_some_and(|known| known.has_written(limits)) {
            // On a full disk, for one. What was set is read back, to the GiB.
            control.set_thread_percentage(server, limits.thread_percentage).await?;
            for (ordinal, mib) in &limits.memory_mib {
                control.set_memory_limit(server, *ordinal, *mib).await?;
            }
            self.reporter.warning(format!(
                "server {server} wrote no limits to the log; they are confirmed to the GiB only"
            ));
            return Ok(None);
        }
        Ok(self.present()?.servers.get(server).and_then(|known| known.differs_from(limits)))
    }
}

/// Sets the limits of the servers to come; each is read back.
pub(super) async fn set_defaults(control: &Control, limits: &Limits) -> Result<(), ControlError> {
    control.set_default_thread_percentage(limits.thread_percentage).await?;
    for (ordinal, mib) in &limits.memory_mib {
        control.set_default_memory_limit(*ordinal, *mib).await?;
    }
    Ok(())
}
