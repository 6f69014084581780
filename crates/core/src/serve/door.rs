//! The door of a control daemon: the links through which programs reach it. The service closes the door before a decision that
//! depends on the number of clients. Otherwise a client could come between the count and the act, and the client would lose its
//! work or delay the act.
//!
//! Measured: a program that finds no control daemon runs without MPS. A program that finds a socket on which no process answers
//! waits. While the door is closed, the links point to a socket on which no process answers, so programs wait.
//!
//! The waiting programs are released once a server has the GPUs. In compute mode `EXCLUSIVE_PROCESS`, the driver then refuses
//! programs without MPS (error 46). In compute mode `DEFAULT`, the driver lets the released programs use the GPUs without MPS.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use core::time::Duration;

use super::Serving;
use super::effect::RunEffect;
use super::limits::TAKES_LIMITS;
use super::shell::Shell;

/// The time after which a program that has just connected appears in the list of clients. Measured: milliseconds.
const SETTLING: Duration = Duration::from_millis(250);

/// A control daemon counts as idle only after this time without a client. A script that runs one program after the other leaves
/// gaps of some milliseconds. An administrator can ask for an end without this delay.
pub(super) const QUIET: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Door {
    /// The links point to the control daemon, and no program waits.
    Open,
    /// The links point to the control daemon again. Programs that came while the door was closed still wait.
    Opened,
    /// The links point to the waiting socket: new programs wait.
    Closed,
    /// The links point to the waiting socket, and the control daemon was asked to end. Unless the request was lost, the control
    /// daemon does not answer programs any more.
    ClosedForGood,
}

impl<S: Shell> Serving<'_, S> {
    /// Closes the door, and waits until programs that have just connected appear as clients.
    ///
    /// # Errors
    /// The door stays open: it can't be closed, or a client has connected or ended meanwhile.
    pub(super) async fn close_door(&mut self) -> Result<(), String> {
        let begun = self.shell.now();
        if let Err(why) = self.shell.keep_waiting()
            && !self.run.blockers.is_unreached()
        {
            self.shell.carry_out(RunEffect::ReopenWays);
            return Err(format!("the service can't make new programs wait for a control daemon: {why}"));
        }
        self.run.door = Door::Closed;
        self.show_state();
        self.shell.pause(SETTLING).await;
        self.read_on().await;
        if self.run.quiet_since > begun {
            self.open_door();
            return Err("a client connected or ended while the service counted the clients".to_owned());
        }
        Ok(())
    }

    /// Opens the closed door, unless the control daemon was asked to end.
    pub(super) fn open_door(&mut self) {
        if self.run.door == Door::Closed {
            self.shell.carry_out(RunEffect::ReopenWays);
            self.run.door = Door::Opened;
            self.show_state();
        }
    }

    /// Records that the links point to the control daemon, and that the control daemon has its limits.
    pub(super) fn door_is_open(&mut self) {
        if self.run.door != Door::Open {
            self.run.door = Door::Opened;
        }
    }

    /// Releases the programs that wait at the closed door, once a server prevents them from using the GPUs without MPS. If
    /// servers start only with the first client, the programs are released at once. A retiring control daemon has no link, so
    /// no program waits for it.
    pub(super) async fn let_go(&mut self) {
        if self.run.door != Door::Opened || self.wanted.retiring {
            return;
        }
        if self.run.multiuser && self.wanted.prewarm {
            let servers = self.run.servers.ready();
            if servers.is_empty() {
                return;
            }
            // A server may have ended although the log does not report it yet, so the service asks the control daemon if a
            // server is ready.
            let look = self.shell.inspect(&servers, None).await;
            if !look.is_ok_and(|look| look.with(&TAKES_LIMITS).next().is_some()) {
                return;
            }
        }
        self.shell.carry_out(RunEffect::LetGo);
        self.run.door = Door::Open;
    }
}
