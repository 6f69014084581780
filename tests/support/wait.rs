//! The functions by which all tests wait for conditions.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// The longest wait for any step, which only a defect can reach, even on a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

/// The pause between two checks of the condition.
pub(crate) const PAUSE: Duration = Duration::from_millis(20);

/// Calls `look` until it returns a value, and returns the value. At the deadline the test fails, and the failure names `what`.
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
