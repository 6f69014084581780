//! Asks a question about several things, such as GPUs, each on its own thread. A GPU that has fallen off the bus can block a
//! call for ever, and the answers about the other GPUs must come nevertheless.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// The questions that have no answer yet, each by the thing that it asks about. There is at most one question about each thing,
/// so a thing that hangs occupies only one thread.
#[derive(Debug)]
pub(super) struct ParallelQuestions<K, T> {
    running: BTreeMap<K, JoinHandle<()>>,
    sender: Sender<(K, T)>,
    /// A receiver is not `Sync`, so it needs the mutex.
    answers: Mutex<Receiver<(K, T)>>,
}

impl<K, T> Default for ParallelQuestions<K, T> {
    fn default() -> Self {
        let (sender, answers) = mpsc::channel();
        Self { running: BTreeMap::new(), sender, answers: Mutex::new(answers) }
    }
}

impl<K: Clone + Ord + Send + 'static, T: Send + 'static> ParallelQuestions<K, T> {
    /// Asks a question about each of `things` on a thread of its own, and collects the answers. While a question of this call
    /// has no answer, the call waits for `patience` after the last answer. While only questions of earlier calls have no
    /// answer, the call waits for `remainder`. A thing without an answer is missing in the result.
    pub(super) fn ask(
        &mut self,
        things: impl IntoIterator<Item = K>,
        patience: Duration,
        remainder: Duration,
        question: impl Fn(&K) -> T + Clone + Send + 'static,
    ) -> BTreeMap<K, T> {
        // A late answer to a question of an earlier call is outdated, so the answer is dropped. The question's thread has
        // ended, so a new question about the same thing can be asked.
        while let Ok((thing, _)) = self.answers().try_recv() {
            self.running.remove(&thing);
        }
        // A thread that has panicked has ended without an answer, so it no longer counts as running.
        self.running.retain(|_, thread| !thread.is_finished());
        let (mut new, mut old) = (Vec::new(), Vec::new());
        for thing in things {
            if self.running.contains_key(&thing) {
                old.push(thing);
            } else if let Ok(thread) = self.begin(thing.clone(), question.clone()) {
                self.running.insert(thing.clone(), thread);
                new.push(thing);
            }
        }
        let mut answered = BTreeMap::new();
        let mut last = Instant::now();
        loop {
            let is_awaited = |thing: &K| !answered.contains_key(thing);
            let longest = match (new.iter().any(is_awaited), old.iter().any(is_awaited)) {
                (true, _) => patience,
                (false, true) => remainder,
                (false, false) => break,
            };
            let left = longest.saturating_sub(last.elapsed());
            let Ok((thing, answer)) = self.answers().recv_timeout(left) else { break };
            last = Instant::now();
            self.running.remove(&thing);
            answered.insert(thing, answer);
        }
        answered
    }

    fn answers(&mut self) -> &mut Receiver<(K, T)> {
        self.answers.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(
        &self,
        thing: K,
        question: impl Fn(&K) -> T + Send + 'static,
    ) -> std::io::Result<JoinHandle<()>> {
        let sender = self.sender.clone();
        thread::Builder::new().spawn(move || {
            let answer = question(&thing);
            // Sending fails if the `ParallelQuestions` was dropped. Then no caller needs the answer.
            let _ = sender.send((thing, answer));
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    #[test]
    fn a_question_that_hangs_is_missing_alone_until_it_is_answered() {
        let hangs = Arc::new(Mutex::new(()));
        let held = hangs.lock().unwrap();
        let of_thread = Arc::clone(&hangs);
        let question = move |thing: &u32| {
            if *thing == 7 {
                drop(of_thread.lock());
            }
            thing * 2
        };
        let mut questions = ParallelQuestions::default();
        let mut ask = |patience| questions.ask([1, 7, 9], patience, SHORT, question.clone());
        let others = BTreeMap::from([(1, 2), (9, 18)]);
        // The first wait is long, since threads may start late on a busy machine.
        assert_eq!(ask(SHORT * 100), others);
        // The question about 7 still runs, so the second wait for it is short.
        let begun = Instant::now();
        assert_eq!(ask(LONG), others);
        assert!(begun.elapsed() < LONG / 2);
        drop(held);
        let all = BTreeMap::from([(1, 2), (7, 14), (9, 18)]);
        let deadline = Instant::now() + LONG;
        while ask(LONG) != all {
            assert!(Instant::now() < deadline);
        }
    }

    #[test]
    fn a_question_that_panics_is_asked_again() {
        let mut questions = ParallelQuestions::<u32, u32>::default();
        let mut ask = |panics: bool| {
            let answer = move |thing: &u32| if panics { panic!("no answer for {thing}") } else { *thing };
            questions.ask([3], LONG.min(SHORT * 10), SHORT, answer)
        };
        assert!(ask(true).is_empty());
        let deadline = Instant::now() + LONG;
        while ask(false).is_empty() {
            assert!(Instant::now() < deadline);
        }
    }
}
