//! Slices and GPUs that an administrator takes out of use for new clients, and gives back.

use tokio::sync::mpsc;

use super::Daemon;
use crate::dbus::{Reply, RequestError};
use crate::publish::container::ContainerError;
use crate::publish::snapshot::Snapshot;
use crate::supervisor::drained::{Cut, Drained};

/// The slices that are published as drained. A slice is drained in the state file before its link goes, and has its link
/// before it is published as not drained: no client is sent to a directory that leads nowhere.
#[derive(Debug)]
pub(super) struct Draining {
    pub(super) published: Drained,
    /// The number of changes, and of the changes that are published.
    changes: (u64, u64),
    linked: mpsc::Sender<Linked>,
}

/// The links are as a change wants them.
#[derive(Debug)]
pub(super) struct Linked {
    change: u64,
    drained: Drained,
    event: String,
    reply: Reply<()>,
}

impl Draining {
    pub(super) fn new(published: Drained, linked: mpsc::Sender<Linked>) -> Self {
        Self { published, changes: (0, 0), linked }
    }
}

impl Daemon {
    /// Takes what the caller names out of use; everything if nothing is named. It is published at once, and the answer comes
    /// when their links have gone.
    pub(super) fn drain(&mut self, asked: &[String], reply: Reply<()>) {
        let names = match published(&self.snapshot.borrow(), asked, &Drained::default()) {
            Ok(names) => names,
            Err(error) => return drop(reply.send(Err(error))),
        };
        let mut drained = self.state_file.lock().drained().clone();
        drained.drain(&names);
        if self.change_links(drained, in_words(&names, "is", "are", "drained"), reply) {
            self.draining.published.drain(&names);
            self.settle();
        }
    }

    /// Gives back what the caller names; everything if nothing is named. It is published at the answer, which comes when
    /// their links are there.
    pub(super) fn undrain(&mut self, asked: &[String], reply: Reply<()>) {
        let mut drained = self.state_file.lock().drained().clone();
        let named = {
            let snapshot = self.snapshot.borrow();
            published(&snapshot, asked, &drained).map(|names| (names, cut(&snapshot)))
        };
        let (names, there) = match named {
            Ok(named) => named,
            Err(error) => return drop(reply.send(Err(error))),
        };
        drained.undrain(&names, &there);
        self.change_links(drained, in_words(&names, "takes", "take", "clients again"), reply);
    }

    /// Writes the change down and has the links changed. Whether there is a change.
    fn change_links(&mut self, drained: Drained, event: String, reply: Reply<()>) -> bool {
        if *self.state_file.lock().drained() == drained && self.draining.published == drained {
            let _ = reply.send(Ok(()));
            return false;
        }
        if let Err(error) = self.state_file.lock().set_drained(drained.clone()) {
            let text = format!("nothing is changed, since it can't be written down: {error}");
            let _ = reply.send(Err(RequestError::Failed(text)));
            return false;
        }
        self.draining.changes.0 += 1;
        let done = Linked { change: self.draining.changes.0, drained, event, reply };
        let (links, linked) = (self.fleet.link(), self.draining.linked.clone());
        tokio::spawn(async move {
            links.await;
            let _ = linked.send(done).await;
        });
        true
    }

    /// Publishes a change of which the links are as they are to be, unless a later one is published.
    pub(super) fn linked(&mut self, linked: Linked) {
        let Linked { change, drained, event, reply } = linked;
        if change > self.draining.changes.1 {
            self.draining.changes.1 = change;
            self.draining.published = drained;
        }
        self.event(event);
        self.settle();
        let _ = reply.send(Ok(()));
    }
}

/// The published names of what a caller names. A name that only `drained` has was published once.
fn published(snapshot: &Snapshot, asked: &[String], drained: &Drained) -> Result<Vec<String>, RequestError> {
    if !asked.is_empty() && snapshot.gpus.is_none() {
        return Err(ContainerError::not_ready(snapshot).into());
    }
    let name = |asked: &String| match snapshot.find(asked) {
        Some(found) => Ok(found.name()),
        None if drained.names(asked) => Ok(asked.clone()),
        None => Err(ContainerError::no_such_device(snapshot, asked).into()),
    };
    asked.iter().map(name).collect()
}

fn cut(snapshot: &Snapshot) -> Cut {
    let gpus = snapshot.gpus.iter().flatten();
    gpus.map(|gpu| (gpu.plan.gpu.pci.address.short(), gpu.plan.slices)).collect()
}

fn in_words(names: &[String], one: &str, several: &str, what: &str) -> String {
    match names {
        [] => format!("every device {one} {what}"),
        [name] => format!("{name} {one} {what}"),
        names => format!("{} {several} {what}", names.join(", ")),
    }
}
