//! The data that `top` shows.

use std::time::{Duration, Instant, SystemTime};

use crate::watch::describe;
use common::bus::proxy::{BusError, Listed};
use common::bus::rows::{Client, Device, Event, Service};

/// An answer that is older than this is shown as outdated.
const OLD: Duration = Duration::from_secs(4);

/// The answers that the service gives at once. The list of clients may take longer, and is a separate answer.
#[derive(Debug)]
pub(super) struct TopAnswers {
    pub(super) service: Listed<Service>,
    /// None until the service knows its GPUs.
    pub(super) devices: Option<Vec<Listed<Device>>>,
    pub(super) events: Vec<Listed<Event>>,
}

/// The last answers of the service, and the reasons why newer answers are missing.
#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) service: Option<Listed<Service>>,
    pub(super) devices: Vec<Listed<Device>>,
    pub(super) events: Vec<Listed<Event>>,
    pub(super) clients: Vec<Listed<Client>>,
    /// The reason why the service does not answer now.
    pub(super) silent: Option<String>,
    /// The reason why the service does not list its clients now.
    pub(super) unlisted: Option<String>,
    published: Option<Instant>,
    listed: Option<Instant>,
}

impl Model {
    pub(super) fn publish(&mut self, answer: Result<TopAnswers, BusError>) {
        match answer {
            Ok(TopAnswers { service, devices, events }) => {
                (self.service, self.events, self.silent) = (Some(service), events, None);
                // A service that has just restarted does not know its GPUs yet. Until then, the old slices stay on the screen.
                if let Some(devices) = devices {
                    self.devices = devices;
                    self.published = Some(Instant::now());
                }
            }
            Err(error) => self.silent = Some(describe(&error)),
        }
    }

    pub(super) fn list(&mut self, answer: Result<Vec<Listed<Client>>, BusError>) {
        match answer {
            Ok(clients) => {
                (self.clients, self.unlisted) = (clients, None);
                self.listed = Some(Instant::now());
            }
            Err(error) => self.unlisted = Some(describe(&error)),
        }
    }

    pub(super) fn has_clients(&self) -> bool {
        self.listed.is_some()
    }

    /// The time at which the service sent the slices on the screen. None if the slices are not outdated.
    pub(super) fn slices_are_of(&self) -> Option<SystemTime> {
        old(self.published, self.silent.is_some())
    }

    /// The time at which the service sent the clients on the screen. None if the clients are not outdated.
    pub(super) fn clients_are_of(&self) -> Option<SystemTime> {
        old(self.listed, self.unlisted.is_some())
    }
}

fn old(answer: Option<Instant>, is_refused: bool) -> Option<SystemTime> {
    let age = answer?.elapsed();
    if is_refused || age > OLD { SystemTime::now().checked_sub(age) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_old_after_a_while_and_without_a_next_one() {
        let now = Instant::now();
        assert!(old(Some(now), false).is_none() && old(None, true).is_none());
        assert!(old(Some(now), true).is_some() && old(now.checked_sub(OLD * 2), false).is_some());
    }
}
