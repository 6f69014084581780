//! The queue for one control daemon, which sometimes fails if it is asked several things at once. A caller of a higher
//! rank goes first, however many callers of a lower rank wait.

use tokio::sync::watch;

/// The caller's rank, the highest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rank {
    Supervisor,
    Root,
    User,
}

const RANKS: usize = 3;

#[derive(Debug, Default)]
struct State {
    taken: bool,
    /// The number of waiting callers, by rank.
    waiting: [usize; RANKS],
}

impl State {
    fn waiting(&mut self, rank: Rank) -> impl Iterator<Item = &mut usize> {
        self.waiting.iter_mut().skip(rank as usize).take(1)
    }

    /// Takes the turn for a waiting caller, if nobody has the turn and nobody of a higher rank waits.
    fn take(&mut self, rank: Rank) -> bool {
        let free = !self.taken && self.waiting.iter().take(rank as usize).all(|above| *above == 0);
        self.taken |= free;
        free
    }
}

/// The turns at one control daemon.
#[derive(Debug, Default)]
pub(super) struct Turns(watch::Sender<State>);

impl Turns {
    /// Waits for the caller's turn.
    pub(super) async fn next(&self, rank: Rank) -> Turn<'_> {
        let waiting = Waiting::new(self, rank);
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

impl<'a> Waiting<'a> {
    fn new(turns: &'a Turns, rank: Rank) -> Self {
        turns.0.send_modify(|state| state.waiting(rank).for_each(|waiting| *waiting += 1));
        Self(turns, rank)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let Self(turns, rank) = *self;
        turns.0.send_modify(|state| state.waiting(rank).for_each(|waiting| *waiting -= 1));
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

    #[tokio::test]
    async fn the_higher_go_first_and_none_is_forgotten() {
        let turns = Arc::new(Turns::default());
        let order = Arc::new(Mutex::new(Vec::new()));
        let first = turns.next(Rank::User).await;
        let mut asked = Vec::new();
        for rank in [Rank::User, Rank::User, Rank::Root, Rank::Supervisor, Rank::Root] {
            let (turns, order) = (Arc::clone(&turns), Arc::clone(&order));
            asked.push(tokio::spawn(async move {
                let _turn = turns.next(rank).await;
                order.lock().unwrap().push(rank);
                tokio::task::yield_now().await;
            }));
            tokio::task::yield_now().await;
        }
        // A caller that gives up its wait holds up nobody.
        let gives_up = tokio::time::timeout(std::time::Duration::ZERO, turns.next(Rank::Supervisor));
        assert!(gives_up.await.is_err());
        drop(first);
        for asked in asked {
            asked.await.unwrap();
        }
        let expected = [Rank::Supervisor, Rank::Root, Rank::Root, Rank::User, Rank::User];
        assert_eq!(*order.lock().unwrap(), expected);
    }
}
