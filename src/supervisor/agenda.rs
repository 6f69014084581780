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

/// The task that comes first, and its time. Nothing asks for a task without a time.
pub(super) fn first(check: Instant, others: &[(Option<Instant>, Task)]) -> (Instant, Task) {
    let wanted = others.iter().filter_map(|(at, task)| Some(((*at)?, *task)));
    wanted.fold((check, Task::Check), Ord::min)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    type Others<'o> = &'o [(Option<Instant>, Task)];

    #[test]
    fn the_earliest_task_comes_first_and_then_the_upper_one() {
        let now = Instant::now();
        let after = |seconds| now + Duration::from_secs(seconds);
        let [soon, late] = [after(1), after(9)];
        let table: [(Instant, Others<'_>, _); _] = [
            (late, &[], (late, Task::Check)),
            (late, &[(None, Task::Links), (Some(soon), Task::Heal)], (soon, Task::Heal)),
            (soon, &[(Some(late), Task::Heal)], (soon, Task::Check)),
            (now, &[(Some(now), Task::EndIfIdle), (Some(now), Task::Heal)], (now, Task::Check)),
            (soon, &[(Some(now), Task::Revive), (Some(now), Task::Heal)], (now, Task::Heal)),
            (soon, &[(Some(now), Task::Revive), (Some(soon), Task::Heal)], (now, Task::Revive)),
            (soon, &[(Some(now), Task::Pending), (Some(now), Task::Places)], (now, Task::Places)),
            (soon, &[(Some(now), Task::Pending), (Some(soon), Task::Bypasses)], (now, Task::Pending)),
            (soon, &[(Some(now), Task::EndIfIdle)], (now, Task::EndIfIdle)),
        ];
        for (check, others, expected) in table {
            assert_eq!(first(check, others), expected, "{check:?} {others:?}");
        }
    }
}
