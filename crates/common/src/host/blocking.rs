//! Runs calls that may never return: calls of NVML about a GPU that has fallen off the bus, or reads of /proc about a process
//! that hangs in the driver. A call that hangs occupies its thread for ever. So each kind of call has a limited number of
//! threads, and hanging calls of one kind can't block the other kinds.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

#[derive(Debug, Clone)]
pub struct Blocking(Arc<Semaphore>);

impl Blocking {
    pub fn new(threads: usize) -> Self {
        Self(Arc::new(Semaphore::new(threads)))
    }

    /// Runs the call `question` on a thread of its own. None if no answer comes within `patience`: the call hangs, calls that
    /// hang occupy all threads, or the call has panicked.
    pub async fn ask<T: Send + 'static>(
        &self,
        patience: Duration,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let answer = async {
            let thread = Arc::clone(&self.0).acquire_owned().await.ok()?;
            // The caller may stop waiting before the thread ends. So the semaphore's permit `thread` moves into the thread, and
            // is released when the thread ends.
            let asked = tokio::task::spawn_blocking(move || (question(), thread));
            asked.await.ok().map(|(answer, _)| answer)
        };
        timeout(patience, answer).await.ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Mutex;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    #[tokio::test]
    async fn hanging_questions_block_only_their_own_kind() {
        let blocking = Blocking::new(2);
        let hangs = Arc::new(Mutex::new(()));
        let held = hangs.lock().await;
        for _ in 0..2 {
            let hangs = Arc::clone(&hangs);
            assert_eq!(
                blocking.ask(Duration::from_millis(1), move || drop(hangs.blocking_lock())).await,
                None
            );
        }
        assert_eq!(blocking.ask(Duration::from_millis(1), || 7).await, None);
        assert_eq!(Blocking::new(1).ask(LONG, || 7).await, Some(7));
        drop(held);
        assert_eq!(blocking.ask(LONG, || 7).await, Some(7));
    }
}
