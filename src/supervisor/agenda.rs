//! The tasks for a control daemon that serves, and which of them comes first. Nothing here asks a process or a clock.

use tokio::time::Instant;

/// Something to do for a control daemon that serves. Of two that are due at the same moment, the upper one comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Task {
    Check,
    /// Renew the links that somebody has taken away.
    Links,
    /// The next step against a fault.
    Heal,
    /// Start the next server.
    Revive,
    /// Look for processes that use the GPUs without a server.
    Bypasses,
    /// Count the clients on full GPUs.
    Places,
    /// Look for clients that wait for a server.
    Pending,
    /// End the control daemon if it has no client.
    EndIfIdle,
}

/// The time of each task; None for a task that nothing asks for.
#[derive(Debug)]
pub(super) struct Agenda {
    pub(super) check: Instant,
    pub(super) links: Option<Instant>,
    pub(super) heal: Option<Instant>,
    pub(super) revive: Option<Instant>,
    pub(super) bypasses: Option<Instant>,
    pub(super) places: Option<Instant>,
    pub(super) pending: Option<Instant>,
    pub(super) end_if_idle: Option<Instant>,
}

impl Agenda {
    /// The task that comes first, and its time.
    pub(super) fn first(&self) -> (Instant, Task) {
        let tasks = [
            (self.links, Task::Links),
            (self.heal, Task::Heal),
            (self.revive, Task::Revive),
            (self.bypasses, Task::Bypasses),
            (self.places, Task::Places),
            (self.pending, Task::Pending),
            (self.end_if_idle, Task::EndIfIdle),
        ];
        let wanted = tasks.into_iter().filter_map(|(at, task)| Some((at?, task)));
        wanted.fold((self.check, Task::Check), Ord::min)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_earliest_task_comes_first_and_then_the_upper_one() {
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let agenda = |check| Agenda {
            links: None,
            check,
            heal: None,
            revive: None,
            bypasses: None,
            places: None,
            pending: None,
            end_if_idle: None,
        };
        let table = [
            (agenda(after(9)), (after(9), Task::Check)),
            (Agenda { heal: Some(after(1)), ..agenda(after(9)) }, (after(1), Task::Heal)),
            (Agenda { heal: Some(after(9)), ..agenda(after(1)) }, (after(1), Task::Check)),
            (Agenda { end_if_idle: Some(now), heal: Some(now), ..agenda(now) }, (now, Task::Check)),
            (Agenda { revive: Some(now), heal: Some(now), ..agenda(after(1)) }, (now, Task::Heal)),
            (Agenda { revive: Some(now), heal: Some(after(1)), ..agenda(after(1)) }, (now, Task::Revive)),
            (Agenda { pending: Some(now), places: Some(now), ..agenda(after(1)) }, (now, Task::Places)),
            (
                Agenda { pending: Some(now), bypasses: Some(after(1)), ..agenda(after(1)) },
                (now, Task::Pending),
            ),
            (Agenda { end_if_idle: Some(now), ..agenda(after(1)) }, (now, Task::EndIfIdle)),
        ];
        for (agenda, first) in table {
            assert_eq!(agenda.first(), first, "{agenda:?}");
        }
    }
}
