//! Waiting for a condition, in every test.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// The time that any step gets on a busy machine. It is reached only if something is broken.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// The pause between two looks.
pub(crate) const PAUSE: Duration = Duration::from_millis(20);

/// Waits until a look finds something, and returns it.
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
