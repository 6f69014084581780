//! The door of a control daemon: the ways by which programs come to it. The door is closed before a decision by a
//! count of clients, since a client that comes between the count and the act would lose its work, or keep all others out.
//!
//! Measured: a program that finds no control daemon runs without MPS, and a program that finds a socket on which no process
//! answers waits for it. So programs wait while the door is closed, until a server has the GPUs: then compute mode
//! `EXCLUSIVE_PROCESS` refuses them (error 46). In compute mode `DEFAULT` nothing does.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use core::time::Duration;

use super::Serving;
use super::limits::TAKES_LIMITS;
use super::shell::Shell;

/// The time that a program which has just come gets to be listed as a client. Measured: its connection is admitted in
/// milliseconds.
const SETTLING: Duration = Duration::from_millis(250);

/// The time without a client after which a control daemon counts as idle, where its end at once was not asked for. Between two
/// programs of a script lie some milliseconds.
pub(super) const QUIET: Duration = Duration::from_secs(2);

/// The ways by which programs come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Door {
    /// The links lead to the control daemon.
    Open,
    /// The links lead to the control daemon again. Programs that came before still wait.
    Opened,
    /// Programs that come wait.
    Closed,
    /// Programs that come wait, and the control daemon was asked to end: it answers no program any more, unless the question
    /// got lost.
    ClosedForGood,
}

impl<S: Shell> Serving<'_, S> {
    /// Closes the door, and gives programs that have just come through it the time to become known as clients.
    ///
    /// # Errors
    /// The door stays open, since it can't be closed, or a client has come.
    pub(super) async fn close_door(&mut self) -> Result<(), String> {
        let begun = self.shell.now();
        if let Err(why) = self.shell.keep_waiting()
            && !self.run.blockers.is_unreached()
        {
            self.shell.reopen_ways();
            return Err(format!("programs that come can't be kept waiting: {why}"));
        }
        self.run.door = Door::Closed;
        self.show_state();
        self.shell.pause(SETTLING).await;
        self.read_on().await;
        if self.run.quiet_since > begun {
            self.open_door();
            return Err("a client came or left in between".to_owned());
        }
        Ok(())
    }

    /// Opens the door again, unless the control daemon was asked to end.
    pub(super) fn open_door(&mut self) {
        if self.run.door == Door::Closed {
            self.shell.reopen_ways();
            self.run.door = Door::Opened;
            self.show_state();
        }
    }

    /// Clients are led to the control daemon, which has its limits.
    pub(super) fn door_is_open(&mut self) {
        if self.run.door != Door::Open {
            self.run.door = Door::Opened;
        }
    }

    /// Lets programs go that have waited at the closed door, once a server keeps them off the GPUs. Where the next client
    /// brings the server, no other code does. No way leads to a control daemon that retires, so no program waits for it.
    pub(super) async fn let_go(&mut self) {
        if self.run.door != Door::Opened || self.wanted.retiring {
            return;
        }
        if self.run.multiuser && self.wanted.prewarm {
            let servers = self.run.servers.ready();
            if servers.is_empty() {
                return;
            }
            // A server may have ended without a line in the log yet.
            let look = self.shell.inspect(&servers, None).await;
            if !look.is_ok_and(|look| look.with(&TAKES_LIMITS).next().is_some()) {
                return;
            }
        }
        self.shell.let_go();
        self.run.door = Door::Open;
    }
}
