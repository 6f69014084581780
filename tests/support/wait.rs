//! The functions by which all tests wait for conditions.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// The longest time that a test waits for any step on a busy machine. A test reaches this time only if the condition
/// for which it waits can't come.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

/// The pause between two looks of a waiting test at its condition.
pub(crate) const PAUSE: Duration = Duration::from_millis(20);

/// Calls `look` until it returns a value, and returns the value. The test fails at the deadline. `what` names the
/// condition in the message of the failure.
#[track_caller]
pub(crate) fn wait_for<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "waited in vain for {what}");
        sleep(PAUSE);
    }
}
