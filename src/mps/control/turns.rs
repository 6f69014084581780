//! The queue for one control daemon, which sometimes fails if it is asked several things at once. A caller of a higher
//! rank goes first, however many callers of a lower rank wait.

use std::time::Duration;

use tokio::sync::watch;

/// The longest time that a bus caller's question waits for its turn. Each question before it takes
/// [`ANSWER_TIMEOUT`](super::ANSWER_TIMEOUT) at most.
pub(super) const TURN_TIMEOUT: Duration = Duration::from_secs(10);

/// The kind of user that asks the control daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Caller {
    /// Root, who waits for no other user.
    Root,
    /// Any other user.
    User,
}

impl Caller {
    /// The kind of this user. If the service does not run as root, its own user counts as root.
    pub(crate) fn of(uid: u32) -> Self {
        let is_root = uid == 0 || uid == rustix::process::geteuid().as_raw();
        if is_root { Self::Root } else { Self::User }
    }
}

/// The rank of somebody who asks, the highest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    Supervisor,
    Caller(Caller),
}

#[derive(Debug, Default)]
struct State {
    taken: bool,
    waiting: Vec<Rank>,
}

impl State {
    /// Takes the turn for a waiting caller, if nobody has the turn and nobody of a higher rank waits.
    fn take(&mut self, rank: Rank) -> bool {
        let free = !self.taken && self.waiting.iter().all(|other| *other >= rank);
        self.taken |= free;
        free
    }

    fn leave(&mut self, rank: Rank) {
        if let Some(place) = self.waiting.iter().position(|other| *other == rank) {
            self.waiting.swap_remove(place);
        }
    }
}

/// The turns at one control daemon.
#[derive(Debug, Default)]
pub(super) struct Turns(watch::Sender<State>);

impl Turns {
    /// Waits for the caller's turn.
    pub(super) async fn next(&self, rank: Rank) -> Turn<'_> {
        self.0.send_modify(|state| state.waiting.push(rank));
        let waiting = Waiting(self, rank);
        let mut changes = self.0.subscribe();
        while !self.0.send_if_modified(|state| state.take(rank)) {
            // The channel closes only with `self`.
            let _ = changes.changed().await;
        }
        drop(waiting);
        Turn(self)
    }
}

/// A caller that waits. Dropping it gives up the wait.
struct Waiting<'a>(&'a Turns, Rank);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.0.send_modify(|state| state.leave(self.1));
    }
}

/// A turn, held until it is dropped.
#[derive(Debug)]
pub(super) struct Turn<'a>(&'a Turns);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.0.send_modify(|state| state.taken = false);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    const ROOT: Rank = Rank::Caller(Caller::Root);
    const USER: Rank = Rank::Caller(Caller::User);

    #[tokio::test]
    async fn the_higher_go_first_and_none_is_forgotten() {
        let turns = Arc::new(Turns::default());
        let order = Arc::new(Mutex::new(Vec::new()));
        let first = turns.next(USER).await;
        let mut asked = Vec::new();
        for rank in [USER, USER, ROOT, Rank::Supervisor, ROOT] {
            let (turns, order) = (Arc::clone(&turns), Arc::clone(&order));
            asked.push(tokio::spawn(async move {
                let _turn = turns.next(rank).await;
                order.lock().unwrap().push(rank);
                tokio::task::yield_now().await;
            }));
            tokio::task::yield_now().await;
        }
        // A caller that gives up its wait holds up nobody.
        let gives_up = tokio::time::timeout(Duration::ZERO, turns.next(Rank::Supervisor));
        assert!(gives_up.await.is_err());
        drop(first);
        for asked in asked {
            asked.await.unwrap();
        }
        let expected = [Rank::Supervisor, ROOT, ROOT, USER, USER];
        assert_eq!(*order.lock().unwrap(), expected);
    }
}
