//! Limits how much of a control daemon's log is passed on. Tenants can have lines written as fast as they like, and all
//! services share the journal of the host.

use std::time::Duration;

use tokio::time::Instant;

/// The most lines that are passed on in a period. A server's start writes 20, a fault 10 for each client.
const LINES: u32 = 500;
const PERIOD: Duration = Duration::from_secs(10);

/// The count of lines in the present period.
#[derive(Debug)]
pub(super) struct Allowance {
    since: Instant,
    passed_on: u32,
    left_out: u64,
}

impl Default for Allowance {
    fn default() -> Self {
        Self { since: Instant::now(), passed_on: 0, left_out: 0 }
    }
}

impl Allowance {
    /// Counts one more line. True if it may be passed on.
    pub(super) fn one_more(&mut self) -> bool {
        let free = self.passed_on < LINES;
        if free {
            self.passed_on += 1;
        } else {
            self.left_out += 1;
        }
        free
    }

    /// Once a period is over: how many lines were left out in it, if any were.
    pub(super) fn left_out(&mut self, now: Instant) -> Option<u64> {
        if now < self.since + PERIOD {
            return None;
        }
        let left_out = self.left_out_by_now();
        *self = Self::default();
        left_out
    }

    /// At the end of a run: how many lines were left out, if that was not told yet. The period goes on.
    pub(super) fn left_out_by_now(&mut self) -> Option<u64> {
        let left_out = std::mem::take(&mut self.left_out);
        (left_out > 0).then_some(left_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_much_is_counted_and_told_once() {
        let mut allowance = Allowance::default();
        let passed_on = (0..LINES + 7).filter(|_| allowance.one_more()).count();
        assert_eq!(passed_on, LINES as usize);
        assert_eq!(allowance.left_out(allowance.since), None, "the period is not over");
        assert_eq!(allowance.left_out(allowance.since + PERIOD), Some(7));
        assert!(allowance.one_more());
        let passed_on = (0..LINES + 2).filter(|_| allowance.one_more()).count();
        assert_eq!(allowance.left_out_by_now(), Some(3), "{passed_on} were passed on");
        assert!(!allowance.one_more(), "another run gets no more");
        assert_eq!(allowance.left_out_by_now(), Some(1));
        assert_eq!(allowance.left_out(allowance.since + PERIOD), None);
    }
}
