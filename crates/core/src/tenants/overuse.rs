//! The time for which a slice is shown as over its budget. Each change of the shown overuse is a message in the journal and a
//! signal on D-Bus. A tenant can let a slice go over its budget any number of times. The service therefore shows overuse at
//! once, and stops showing it only after the slice has fitted into its budget for a while. If overuse comes and goes often, the
//! service shows it for longer.

use alloc::collections::{BTreeMap, BTreeSet};
use core::time::Duration;

use super::budget::Part;
use crate::{CoreTime, RateLimit};

/// The time for which a slice has to fit into its budget before it is no longer shown as over its budget.
const CALM: Duration = Duration::from_secs(3);

/// The rate limit for messages of one kind about one slice.
const MESSAGES: RateLimit = RateLimit::new(4, 1, Duration::from_secs(60));

/// If the service has ended work of a slice this number of times within [`MINUTE`], the service assumes that a tenant starts
/// ended clients again and again.
const TIMES: usize = 3;
const MINUTE: Duration = Duration::from_secs(60);

/// The shown overuse of a slice, and the last ends of clients' work because of overuse.
#[derive(Debug)]
pub(super) struct SliceOveruse {
    /// The parts of the budget that are shown as exceeded. The value is None while the part is exceeded. Otherwise it is the
    /// time since which the slice fits again.
    parts: BTreeMap<Part, Option<CoreTime>>,
    rate_limit: RateLimit,
    /// The rate limit for messages about ended clients.
    pub(super) endings_told: RateLimit,
    /// The times of the last attempts that have ended work of the slice. A tenant who starts a client again after each attempt
    /// exceeds the budget until the next reading. If a tenant starts clients again and again, the service reads the slice as
    /// soon as a client comes.
    endings: [Option<CoreTime>; TIMES],
}

impl SliceOveruse {
    pub(super) fn new() -> Self {
        Self { parts: BTreeMap::new(), rate_limit: MESSAGES, endings_told: MESSAGES, endings: [None; TIMES] }
    }

    pub(super) fn note_ending(&mut self, now: CoreTime) {
        self.endings.rotate_right(1);
        if let Some(last) = self.endings.first_mut() {
            *last = Some(now);
        }
    }

    pub(super) fn starts_over(&self, now: CoreTime) -> bool {
        self.endings.iter().all(|ended| ended.is_some_and(|ended| now < ended + MINUTE))
    }

    pub(super) fn parts(&self) -> BTreeSet<Part> {
        self.parts.keys().copied().collect()
    }

    /// Records which parts of the budget are exceeded now. Returns true if the shown parts change.
    pub(super) fn observe(&mut self, exceeded: &BTreeSet<Part>, now: CoreTime) -> bool {
        let before = self.parts();
        for (part, fits_since) in &mut self.parts {
            if exceeded.contains(part) {
                *fits_since = None;
            } else {
                fits_since.get_or_insert(now);
            }
        }
        self.parts.extend(exceeded.iter().map(|part| (*part, None)));
        let calm = |fits_since: &Option<CoreTime>| fits_since.is_some_and(|since| now >= since + CALM);
        if self.parts.values().any(calm) && self.rate_limit.take(1, now) {
            self.parts.retain(|_, fits_since| !calm(fits_since));
        }
        self.parts() != before
    }

    /// The time at which the service must read the slice again, since it may stop showing a part that fits again. None if no
    /// shown part fits again.
    pub(super) fn next_check(&mut self, now: CoreTime) -> Option<CoreTime> {
        let calm = self.parts.values().flatten().map(|since| *since + CALM).min()?;
        Some(calm.max(self.rate_limit.next(now)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn parts(parts: &[Part]) -> BTreeSet<Part> {
        parts.iter().copied().collect()
    }

    #[test]
    fn overuse_is_shown_at_once_and_taken_back_after_a_while() {
        let start = CoreTime::ZERO;
        let mut shown = SliceOveruse::new();
        assert!(!shown.observe(&parts(&[]), start) && shown.next_check(start).is_none());
        assert!(shown.observe(&parts(&[Part::Memory]), start));
        assert!(!shown.observe(&parts(&[Part::Memory]), start + SECOND), "no news");
        assert_eq!(shown.next_check(start + SECOND), None, "nothing is to be taken back");
        assert!(shown.observe(&parts(&[Part::Clients]), start + 2 * SECOND), "of another kind");
        assert_eq!(shown.parts(), parts(&[Part::Memory, Part::Clients]));
        assert_eq!(shown.next_check(start + 2 * SECOND), Some(start + 2 * SECOND + CALM));
        assert!(!shown.observe(&parts(&[Part::Clients]), start + 4 * SECOND));
        assert!(shown.observe(&parts(&[Part::Clients]), start + 5 * SECOND));
        assert_eq!(shown.parts(), parts(&[Part::Clients]));
        assert!(!shown.observe(&parts(&[]), start + 6 * SECOND));
        assert!(!shown.observe(&parts(&[Part::Clients]), start + 7 * SECOND), "it was shown all the time");
        assert!(!shown.observe(&parts(&[]), start + 8 * SECOND));
        assert!(shown.observe(&parts(&[]), start + 11 * SECOND));
        assert_eq!(shown.parts(), parts(&[]));
    }

    #[test]
    fn three_endings_in_a_minute_are_many() {
        let mut slice = SliceOveruse::new();
        let at = |second: u32| CoreTime::ZERO + second * SECOND;
        for (second, many) in
            [(0, false), (30, false), (59, true), (61, true), (125, false), (130, false), (140, true)]
        {
            slice.note_ending(at(second));
            assert_eq!(slice.starts_over(at(second)), many, "{second}");
        }
        assert!(slice.starts_over(at(184)) && !slice.starts_over(at(185)));
    }

    #[test]
    fn whoever_comes_and_goes_changes_little() {
        let start = CoreTime::ZERO;
        let mut shown = SliceOveruse::new();
        let changes = |shown: &mut SliceOveruse, seconds: core::ops::Range<u32>| {
            let at = |second: u32| (second, start + second * SECOND);
            let looks = seconds.map(at);
            let over =
                |second: u32| if second.is_multiple_of(5) { parts(&[Part::Memory]) } else { parts(&[]) };
            looks.filter(|(second, now)| shown.observe(&over(*second), *now)).count()
        };
        let hour = changes(&mut shown, 0..3600);
        assert!((100..=130).contains(&hour), "{hour}");
        shown.observe(&parts(&[Part::Memory]), start + 3600 * SECOND);
        shown.observe(&parts(&[]), start + 3601 * SECOND);
        let again = shown.next_check(start + 3601 * SECOND).unwrap();
        assert!(again >= start + 3604 * SECOND && again <= start + 3661 * SECOND);
        assert!(shown.observe(&parts(&[]), again));
    }
}
