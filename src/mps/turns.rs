//! Whose turn it is to ask a control daemon, which fails now and then when it is asked several things at once. Who stands
//! higher goes first, however many wait below.

use tokio::sync::watch;

/// Who asks, the first of them first.
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
    /// How many wait, by rank.
    waiting: [usize; RANKS],
}

impl State {
    fn waiting(&mut self, rank: Rank) -> impl Iterator<Item = &mut usize> {
        self.waiting.iter_mut().skip(rank as usize).take(1)
    }

    /// Takes the turn for one who waits, if nobody has it and nobody above waits.
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
    /// Waits for one's turn.
    pub(super) async fn next(&self, rank: Rank) -> Turn<'_> {
        let waiting = Waiting::new(self, rank);
        let mut changes = self.0.subscribe();
        while !self.0.send_if_modified(|state| state.take(rank)) {
            // It ends with the sender, which is ours.
            let _ = changes.changed().await;
        }
        drop(waiting);
        Turn(self)
    }
}

/// One who waits, or has lost patience.
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

/// A turn, until it is dropped.
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
        // Who gives up while it waits is in nobody's way.
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
