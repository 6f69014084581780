//! Drains slices and GPUs for an administrator, and ends their drain.

use mps_core::terms::{DeviceName, SliceId};

use super::Daemon;
use crate::dbus::Reply;
use common::bus::error::RequestError;
use common::drained::{Drained, SliceCounts};
use common::published::container::{no_such_device, not_ready};
use common::published::snapshot::Snapshot;

impl Daemon {
    /// Drains the slices and GPUs in `asked`, or all slices if `asked` is empty. The links of the drained slices are removed
    /// before the caller gets the answer.
    pub(super) fn drain(&mut self, asked: &[String], reply: Reply<()>) {
        let mut drained = self.state_file.lock().drained().clone();
        let names = published(&self.snapshot.borrow(), asked, &Drained::default());
        let done = names.and_then(|names| {
            drained.drain(&names);
            self.change_links(drained, describe(&names, "is", "are", "drained"))
        });
        let _ = reply.send(done);
    }

    /// Ends the drain of the slices and GPUs in `asked`, or of all slices if `asked` is empty. If the control daemon of a slice
    /// serves, the slice has its link again before the caller gets the answer.
    pub(super) fn undrain(&mut self, asked: &[String], reply: Reply<()>) {
        let mut drained = self.state_file.lock().drained().clone();
        let named = {
            let snapshot = self.snapshot.borrow();
            published(&snapshot, asked, &drained).map(|names| (names, cut(&snapshot)))
        };
        let done = named.and_then(|(names, there)| {
            drained.undrain(&names, &there);
            self.change_links(drained, describe(&names, "takes", "take", "clients again"))?;
            not_served(&self.snapshot.borrow(), &names)
        });
        let _ = reply.send(done);
    }

    /// Saves the list of drained slices, changes the links, and publishes the state, in this order. The list is saved first, so
    /// that a drain survives a crash of the service. A slice is published as served only after its link is made.
    fn change_links(&mut self, drained: Drained, event: String) -> Result<(), RequestError> {
        let changed = *self.state_file.lock().drained() != drained;
        if changed && let Err(error) = self.state_file.lock().set_drained(drained) {
            let text =
                format!("no slice is drained or undrained, since the state file can't be written: {error}");
            return Err(RequestError::Failed(text));
        }
        let linked = self.fleet.link();
        if changed {
            self.event(event);
        }
        self.settle();
        linked.map_err(|stuck| {
            RequestError::Failed(format!(
                "the request to drain or undrain is saved, but new clients may still connect to drained \
                 slices: {stuck}"
            ))
        })
    }
}

/// Returns for each name in `asked` the name under which the service publishes the slice or GPU: a GPU's UUID stands for its
/// address, for example. A name that only `drained` has is accepted, since the service has published the name before.
fn published(
    snapshot: &Snapshot,
    asked: &[String],
    drained: &Drained,
) -> Result<Vec<DeviceName>, RequestError> {
    if !asked.is_empty() && snapshot.gpus.is_none() {
        return Err(not_ready(snapshot));
    }
    let name = |asked: &String| match snapshot.find(asked) {
        Some((_, name)) => Ok(name),
        None => match asked.parse() {
            Ok(name) if drained.names(name) => Ok(name),
            _ => Err(no_such_device(snapshot, asked)),
        },
    };
    asked.iter().map(name).collect()
}

fn not_served(snapshot: &Snapshot, names: &[DeviceName]) -> Result<(), RequestError> {
    let is_named = |slice: SliceId| {
        let all = [DeviceName::Slice(slice), DeviceName::Gpu(slice.gpu)];
        names.is_empty() || names.iter().any(|named| all.contains(named))
    };
    let first = snapshot.slices().filter(|(gpu, _)| gpu.healthy).find_map(|(gpu, ordinal)| {
        let slice = gpu.plan.slice(ordinal);
        let why = gpu.unserved.get(&ordinal)?;
        is_named(slice).then(|| format!("slice {slice} is not drained any more, but is not served: {why}"))
    });
    first.map_or(Ok(()), |text| Err(RequestError::Failed(text)))
}

fn cut(snapshot: &Snapshot) -> SliceCounts {
    let gpus = snapshot.gpus.iter().flatten();
    gpus.map(|gpu| (gpu.plan.gpu.id(), gpu.plan.slices())).collect()
}

fn describe(names: &[DeviceName], one: &str, several: &str, what: &str) -> String {
    match names {
        [] => format!("every slice {one} {what}"),
        [name] => format!("{name} {one} {what}"),
        names => {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            format!("{} {several} {what}", names.join(", "))
        }
    }
}
