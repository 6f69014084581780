//! The functions by which all tests wait for conditions.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// The longest wait for a condition. Even on a busy machine, only a defect makes a test wait so long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

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
