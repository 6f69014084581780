//! Watches a control daemon that serves: waits for its next event, or until the next check or other task is due.

use alloc::format;
use alloc::string::String;
use core::time::Duration;

use super::blocker::{Blocker, Change, ClearedBy};
use super::capacity::CLIENT_LEFT_PAUSE;
use super::door::QUIET;
use super::effect::RunEffect;
use super::news::News;
use super::shell::{Failure, Occurrence, Shell};
use super::{Ended, Serving};
use crate::mps::Meaning;
use crate::view::DaemonView;
use crate::{CoreTime, Permit};

/// The time between two health checks of a control daemon without clients, and of a control daemon with clients. The health
/// check should find a control daemon that hangs before its next client comes, since this client would hang too.
const CHECK_PERIOD: Duration = Duration::from_secs(30);
const CHECK_PERIOD_IN_USE: Duration = Duration::from_secs(10);

/// The time between two checks of a control daemon that does not answer.
const MISSED_PERIOD: Duration = Duration::from_secs(1);

/// The time until the next health check after the log has reported limits that differ from the order.
const CHECK_SOON: Duration = Duration::from_millis(100);

/// The time between two counts of the clients, while a change waits for their end. The log reports the end of most clients at
/// once, so the count finds only the other ends.
const CLIENTS_PERIOD: Duration = Duration::from_secs(10);

/// A task for a control daemon that serves. If two tasks are due at the same moment, the upper variant in this list comes
/// first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Task {
    Check,
    /// Take the next step after a fatal GPU error.
    Heal,
    /// Start the next server.
    Revive,
    Bypasses,
    /// Count the clients on each GPU.
    Capacity,
    WaitingClients,
    EndIfIdle,
}

/// The task that is due first, and its time. A task with the time None is not due.
fn first(check: CoreTime, others: &[(Option<CoreTime>, Task)]) -> (CoreTime, Task) {
    let wanted = others.iter().filter_map(|(at, task)| Some(((*at)?, *task)));
    wanted.fold((check, Task::Check), Ord::min)
}

impl<S: Shell> Serving<'_, S> {
    /// Watches the control daemon until it ends or needs its order again.
    pub(super) async fn watch(&mut self) -> Result<Ended, Failure> {
        let now = self.shell.now();
        self.run.check_at = if self.run.blockers.is_unreached() { now } else { now + CHECK_PERIOD };
        self.run.count_at = now;
        loop {
            if self.miss_server() {
                self.show_state();
            }
            self.let_go().await;
            let (at, task) = self.next_task();
            let done = match self.next(at, true).await? {
                Occurrence::Nothing => self.act(task).await,
                occurrence => self.take_note(occurrence).await,
            };
            match done {
                Ok(None) => {}
                Ok(Some(ended)) => return Ok(ended),
                // A command without an answer counts as one check without an answer. The health check continues this count.
                Err(Failure::Silent(error)) => {
                    self.missed(error);
                    self.show_state();
                    self.run.check_at = self.shell.now() + self.check_period();
                }
                Err(Failure::Unreachable(error)) => self.is_unreachable(error),
                Err(failure) => return Err(failure),
            }
        }
    }

    fn next_task(&mut self) -> (CoreTime, Task) {
        let run = &mut *self.run;
        let ends = run.blockers.ends_when_idle();
        if ends && core::mem::take(&mut run.client_left) {
            run.count_at = run.count_at.min(self.shell.now() + CLIENT_LEFT_PAUSE);
        }
        // No server can be started while the control daemon can't be reached, so the start of the next server waits.
        let revival = run.blockers.revival().filter(|_| !run.blockers.is_unreached());
        let revival = revival.map(|(at, _)| at);
        let others = [
            (run.blockers.fault().map(|fault| fault.due), Task::Heal),
            (revival, Task::Revive),
            (run.bypasses_at, Task::Bypasses),
            (run.capacity.due, Task::Capacity),
            (run.waiting_clients.due, Task::WaitingClients),
            (ends.then_some(run.count_at), Task::EndIfIdle),
        ];
        first(run.check_at, &others)
    }

    async fn act(&mut self, task: Task) -> Result<Option<Ended>, Failure> {
        match task {
            Task::Check => {
                let checked = self.check().await;
                self.run.check_at = self.shell.now() + self.check_period();
                return checked;
            }
            Task::Heal => self.heal().await?,
            Task::Revive => self.revive().await?,
            Task::Bypasses => {
                self.run.bypasses_at = None;
                let blockers = &self.run.blockers;
                if !blockers.has_failed_check() && !blockers.has(ClearedBy::Healing) {
                    let there = self.read_gpus().await?;
                    self.find_bypasses(there).await;
                }
            }
            Task::Capacity => self.check_capacity().await?,
            Task::WaitingClients => self.tell_waiting(),
            Task::EndIfIdle => return Ok(self.end_if_idle().await),
        }
        Ok(None)
    }

    async fn take_note(&mut self, occurrence: Occurrence) -> Result<Option<Ended>, Failure> {
        let now = self.shell.now();
        match occurrence {
            Occurrence::Nothing => {}
            Occurrence::Ended => return Err(self.ended().await),
            Occurrence::ServerEnded(server) => self.server_gone(server).await,
            Occurrence::Asked(request) => return Ok(self.obey(request).await),
            Occurrence::Said(said) => {
                if let Meaning::ServerReady(server) = said.meaning {
                    self.watch_server(server);
                }
                if said.meaning.is_of_servers() && self.compare_servers() {
                    self.run.check_at = self.run.check_at.min(now + CHECK_SOON);
                }
                if self.run.in_use {
                    self.run.check_at = self.run.check_at.min(now + CHECK_PERIOD_IN_USE);
                }
                self.shell.carry_out(RunEffect::RotateLog);
            }
        }
        Ok(None)
    }

    async fn end_if_idle(&mut self) -> Option<Ended> {
        self.run.count_at = self.shell.now() + CLIENTS_PERIOD;
        let in_use = self.in_use().await;
        if let Some(may_end) = Permit::unused(in_use.as_ref().ok().copied()) {
            let now = self.shell.now();
            let quiet_at = self.run.quiet_since + QUIET;
            if self.takes_clients() && now < quiet_at {
                self.run.count_at = quiet_at;
                return None;
            }
            if self.end(may_end).await.is_ok() {
                return Some(Ended::Stopped);
            }
        } else if in_use.is_ok() {
            self.run.quiet_since = self.shell.now();
        }
        let unknown = in_use.err();
        if let Some(why) = unknown.as_ref().filter(|_| self.run.clients_unknown.is_none()) {
            let text = format!(
                "the service can't end control daemon {id} yet, since its clients are not known: {why}",
                id = self.wanted.id
            );
            self.shell.tell(News::Warning, text);
        }
        self.run.clients_unknown = unknown;
        self.shell.show(DaemonView::put_off);
        self.show_state();
        None
    }

    /// Returns whether new clients can still reach the control daemon, though it should end.
    fn takes_clients(&self) -> bool {
        !self.wanted.retiring && !self.run.blockers.is_unreached()
    }

    fn check_period(&self) -> Duration {
        if self.run.blockers.is_silent() {
            MISSED_PERIOD
        } else if self.run.in_use {
            CHECK_PERIOD_IN_USE
        } else {
            CHECK_PERIOD
        }
    }

    pub(super) fn missed(&mut self, error: String) {
        if self.run.blockers.observe(Some(Blocker::no_answer(error.clone()))) == Change::FirstMiss {
            self.shell.tell(News::Warning, error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Others<'o> = &'o [(Option<CoreTime>, Task)];

    #[test]
    fn the_earliest_task_comes_first_and_then_the_upper_one() {
        let now = CoreTime::ZERO;
        let after = |seconds| now + Duration::from_secs(seconds);
        let [soon, late] = [after(1), after(9)];
        let table: [(CoreTime, Others<'_>, _); _] = [
            (late, &[], (late, Task::Check)),
            (late, &[(None, Task::Revive), (Some(soon), Task::Heal)], (soon, Task::Heal)),
            (soon, &[(Some(late), Task::Heal)], (soon, Task::Check)),
            (now, &[(Some(now), Task::EndIfIdle), (Some(now), Task::Heal)], (now, Task::Check)),
            (soon, &[(Some(now), Task::Revive), (Some(now), Task::Heal)], (now, Task::Heal)),
            (soon, &[(Some(now), Task::Revive), (Some(soon), Task::Heal)], (now, Task::Revive)),
            (soon, &[(Some(now), Task::WaitingClients), (Some(now), Task::Capacity)], (now, Task::Capacity)),
            (
                soon,
                &[(Some(now), Task::WaitingClients), (Some(soon), Task::Bypasses)],
                (now, Task::WaitingClients),
            ),
            (soon, &[(Some(now), Task::EndIfIdle)], (now, Task::EndIfIdle)),
        ];
        for (check, others, expected) in table {
            assert_eq!(first(check, others), expected, "{check:?} {others:?}");
        }
    }
}
