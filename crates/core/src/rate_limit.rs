//! Limits the rate of log messages, since tenants can cause any number of events, and all services of the host share the
//! journal.

use core::time::Duration;

use crate::CoreTime;

#[derive(Debug, Clone)]
pub struct RateLimit {
    /// The number of messages that may be written at once.
    most: u32,
    /// The number of further messages that each period allows.
    more: u32,
    period: Duration,
    left: u32,
    /// The beginning of the present period. The value has no meaning while `left` equals `most`.
    since: CoreTime,
    suppressed: usize,
}

impl RateLimit {
    pub const fn new(most: u32, more: u32, period: Duration) -> Self {
        Self { most, more, period, left: most, since: CoreTime::ZERO, suppressed: 0 }
    }

    /// Returns whether a message about `count` things may be written now. If the message may not be written, `count` is added
    /// to the number of suppressed things.
    pub fn take(&mut self, count: usize, now: CoreTime) -> bool {
        self.refill(now);
        if self.left == self.most {
            self.since = now;
        }
        let taken = self.left > 0;
        self.left = self.left.saturating_sub(1);
        if !taken {
            self.suppressed += count;
        }
        taken
    }

    /// The number of things in suppressed messages since the last call. None if no message was suppressed.
    pub fn suppressed(&mut self) -> Option<usize> {
        let suppressed = core::mem::take(&mut self.suppressed);
        (suppressed > 0).then_some(suppressed)
    }

    /// Like [`Self::suppressed`], but None while no message may be written.
    pub fn suppressed_before(&mut self, now: CoreTime) -> Option<usize> {
        self.refill(now);
        if self.left > 0 { self.suppressed() } else { None }
    }

    /// The earliest moment at which a message may be written.
    pub fn next(&mut self, now: CoreTime) -> CoreTime {
        self.refill(now);
        if self.left > 0 { now } else { self.since + self.period }
    }

    fn refill(&mut self, now: CoreTime) {
        while self.left < self.most && now >= self.since + self.period {
            self.left = self.most.min(self.left + self.more);
            self.since += self.period;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_secs(10);

    #[test]
    fn what_is_too_much_is_counted_and_told_once() {
        let mut rate_limit = RateLimit::new(500, 500, PERIOD);
        let start = PERIOD;
        let passed = |rate_limit: &mut RateLimit, lines: usize, now| {
            (0..lines).filter(|_| rate_limit.take(1, now)).count()
        };
        assert_eq!(passed(&mut rate_limit, 507, start), 500);
        assert_eq!(rate_limit.suppressed_before(start + PERIOD / 2), None, "the period is not over");
        assert_eq!(rate_limit.suppressed_before(start + PERIOD), Some(7));
        assert_eq!(passed(&mut rate_limit, 503, start + PERIOD), 500);
        assert_eq!(rate_limit.suppressed(), Some(3));
        assert!(!rate_limit.take(1, start + PERIOD), "another run gets no more");
        assert_eq!(rate_limit.suppressed(), Some(1));
        assert_eq!(rate_limit.suppressed_before(start + 2 * PERIOD), None);
    }

    #[test]
    fn after_a_burst_there_is_one_in_each_period() {
        let mut rate_limit = RateLimit::new(4, 1, PERIOD);
        let start = PERIOD;
        let hour = (0..360).filter(|second| rate_limit.take(2, start + *second * PERIOD / 10)).count();
        assert_eq!(hour, 4 + 35);
        assert_eq!(rate_limit.suppressed(), Some(2 * (360 - 39)));
        let now = start + 359 * PERIOD / 10;
        assert_eq!(rate_limit.next(now), start + 36 * PERIOD);
        let quiet = start + 1000 * PERIOD;
        assert_eq!(rate_limit.next(quiet), quiet);
        assert_eq!((0..10).filter(|_| rate_limit.take(1, quiet)).count(), 4);
    }
}
