//! Slices and GPUs that an administrator takes out of use for new clients, and gives back.

use super::Daemon;
use crate::dbus::RequestError;
use crate::publish::container::ContainerError;
use crate::publish::snapshot::Snapshot;
use crate::supervisor::drained::{Cut, Drained};

impl Daemon {
    /// Takes what the caller names out of use; everything if nothing is named. It is published at the return.
    pub(super) fn drain(&mut self, asked: &[String]) -> Result<(), RequestError> {
        let names = published(&self.snapshot.borrow(), asked, &Drained::default())?;
        let mut drained = self.state_file.lock().drained().clone();
        drained.drain(&names);
        self.put_drained(drained, &in_words(&names, "is", "are", "drained"))
    }

    /// Gives back what the caller names; everything if nothing is named. It is published at the return.
    pub(super) fn undrain(&mut self, asked: &[String]) -> Result<(), RequestError> {
        let mut drained = self.state_file.lock().drained().clone();
        let (names, there) = {
            let snapshot = self.snapshot.borrow();
            (published(&snapshot, asked, &drained)?, cut(&snapshot))
        };
        drained.undrain(&names, &there);
        self.put_drained(drained, &in_words(&names, "takes", "take", "clients again"))
    }

    fn put_drained(&mut self, drained: Drained, event: &str) -> Result<(), RequestError> {
        if *self.state_file.lock().drained() == drained {
            return Ok(());
        }
        self.state_file.lock().set_drained(drained).map_err(|error| {
            RequestError::Failed(format!("nothing is changed, since it can't be written down: {error}"))
        })?;
        self.event(event.to_owned());
        self.settle();
        Ok(())
    }
}

/// The published names of what a caller names. A name that only `drained` has was published once.
fn published(snapshot: &Snapshot, asked: &[String], drained: &Drained) -> Result<Vec<String>, RequestError> {
    if !asked.is_empty() && snapshot.gpus.is_none() {
        return Err(ContainerError::NotReady.into());
    }
    let name = |asked: &String| match snapshot.find(asked) {
        Some(found) => Ok(found.name()),
        None if drained.names(asked) => Ok(asked.clone()),
        None => Err(ContainerError::NoSuchDevice(asked.clone()).into()),
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
