//! The events for administrators. The service stores a limited number of events, and stores faults longer than other events.

use std::collections::{VecDeque, vec_deque};
use std::time::{Instant, SystemTime};

pub const EVENTS_KEPT: usize = 32;

/// The number of faults that stay stored, even if many other events follow.
pub const FAULTS_KEPT: usize = 8;

#[derive(Debug, Clone, PartialEq)]
pub struct Event {
    pub at: SystemTime,
    /// The time on a clock that is never set back. Events are sorted by this time.
    pub seen: Instant,
    pub text: String,
    /// True if a GPU or a server has failed, or clients have lost their work.
    pub fault: bool,
    /// For a request to end GPU work: the PID, the container or the slices that the request has named. Empty for every other
    /// event.
    pub ended_for: Vec<String>,
    /// For a request to end GPU work: the clients with the work that has ended, in words. Empty for every other event.
    pub ended_clients: String,
}

impl Event {
    pub fn now(text: String) -> Self {
        Self {
            at: SystemTime::now(),
            seen: Instant::now(),
            text,
            fault: false,
            ended_for: Vec::new(),
            ended_clients: String::new(),
        }
    }

    /// The event that a request has ended the GPU work of `clients`. `whom` and `ended_for` are the PID, the container or the
    /// slices that the request has named, in words and as a list.
    pub fn ended(whom: &str, ended_for: Vec<String>, clients: String) -> Self {
        let text = format!("a request for {whom} has ended the GPU work of {clients}");
        Self { ended_for, ended_clients: clients, ..Self::now(text) }
    }
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Events(VecDeque<Event>);

impl Events {
    /// Adds an event. If too many events are stored, removes the oldest event that is not among the last [`FAULTS_KEPT`]
    /// faults.
    pub fn push(&mut self, event: Event) {
        if self.0.len() >= EVENTS_KEPT {
            let faults = self.0.iter().filter(|event| event.fault).count();
            let oldest = self.0.iter().position(|event| !event.fault || faults > FAULTS_KEPT);
            self.0.remove(oldest.unwrap_or_default());
        }
        self.0.push_back(event);
    }

    pub fn iter(&self) -> vec_deque::Iter<'_, Event> {
        self.0.iter()
    }
}

impl<'e> IntoIterator for &'e Events {
    type Item = &'e Event;
    type IntoIter = vec_deque::Iter<'e, Event>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

impl FromIterator<Event> for Events {
    fn from_iter<I: IntoIterator<Item = Event>>(events: I) -> Self {
        let mut all = Self::default();
        events.into_iter().for_each(|event| all.push(event));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(events: &Events) -> Vec<&str> {
        events.iter().map(|event| event.text.as_str()).collect()
    }

    fn event(text: String, fault: bool) -> Event {
        Event { fault, ..Event::now(text) }
    }

    #[test]
    fn a_fault_outlasts_all_that_comes_later() {
        let mut events = Events::default();
        events.push(event("started".to_owned(), false));
        events.push(event("fault".to_owned(), true));
        for number in 0..3 * EVENTS_KEPT {
            events.push(event(number.to_string(), false));
        }
        let kept = texts(&events);
        let last: Vec<String> =
            (2 * EVENTS_KEPT + 1..3 * EVENTS_KEPT).map(|number| number.to_string()).collect();
        assert_eq!((kept[0], kept.len()), ("fault", EVENTS_KEPT));
        assert_eq!(kept[1..], last);
    }

    #[test]
    fn only_the_last_faults_outlast_other_events() {
        let fault = |number: usize| event(format!("fault {number}"), true);
        let mut events: Events = (0..2 * EVENTS_KEPT).map(fault).collect();
        assert_eq!(texts(&events)[0], format!("fault {EVENTS_KEPT}"));
        for number in 0..EVENTS_KEPT {
            events.push(event(number.to_string(), false));
        }
        let last: Vec<String> = (2 * EVENTS_KEPT - FAULTS_KEPT..2 * EVENTS_KEPT)
            .map(|number| format!("fault {number}"))
            .collect();
        assert_eq!(texts(&events)[..FAULTS_KEPT], last);
        assert_eq!(texts(&events)[FAULTS_KEPT..].last(), Some(&(EVENTS_KEPT - 1).to_string().as_str()));
        assert_eq!(texts(&events).len(), EVENTS_KEPT);
    }
}
