//! Binds control groups to slices, for root and for containers in the host agent's records.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mps_core::access::Asker;
use mps_core::bindings::{Binding, Bindings, BoundBy, ControlGroup, GroupUse, NotBound};
use mps_core::register::RecordedContainer;
use mps_core::terms::{DeviceName, SliceId};
use tokio::time::Instant;

use super::Daemon;
use crate::dbus::{Reply, WantedBinding, WantedSlices};
use common::bindings::bytes_of;
use common::bus::error::RequestError;
use common::bus::proxy::GroupOf;
use common::host::{control_groups, proc};
use common::published::access::choose;
use common::published::container::{ChosenSlice, none_named};
use common::published::free;
use common::published::snapshot::Snapshot;

const LOOK_PERIOD: Duration = Duration::from_secs(5);

impl Daemon {
    /// Binds a control group to slices, and answers with the names of the slices. Before the answer the binding is saved and
    /// published, and the kernel enforces the memory limit if it can. A program may start right after the answer.
    pub(super) fn bind(&mut self, wanted: &WantedBinding, reply: Reply<Vec<String>>) {
        let bound = self.bound(wanted);
        let tried = self.limit_keeper.tried();
        tokio::spawn(async move {
            tried.await;
            let _ = reply.send(bound);
        });
    }

    fn bound(&mut self, wanted: &WantedBinding) -> Result<Vec<String>, RequestError> {
        let group = find(&wanted.group)?;
        let mut bindings = Bindings::clone(self.state_file.lock().bindings());
        let (ended, slices) = {
            let snapshot = self.snapshot.borrow();
            let named: Vec<DeviceName> = match &wanted.slices {
                // No binding excludes a request for a shared slice, so no old binding has to end first. A search for ended
                // bindings would be slow: a shared slice may have thousands of bindings, and the service reads kernel files for
                // each of them.
                _ if wanted.shares => Vec::new(),
                WantedSlices::All(names) => {
                    names.iter().filter_map(|name| Some(snapshot.find(name)?.1)).collect()
                }
                WantedSlices::OneOf(all) => all.iter().map(|(slice, _)| DeviceName::Slice(*slice)).collect(),
            };
            let ended = make_way(&mut bindings, &group, &named);
            let asker = Asker { control_group: Some(&group.path), by: BoundBy::Root, shares: wanted.shares };
            (ended, slices(&snapshot, &wanted.slices, &bindings, asker)?)
        };
        let names: Vec<String> = slices.iter().map(ToString::to_string).collect();
        let path = group.path.clone();
        let binding = new_binding(group, slices, BoundBy::Root, wanted.label.clone());
        bindings.bind(binding, wanted.shares, bytes_of).map_err(|error| refused(&error))?;
        let change = match wanted.label.as_str() {
            "" => format!("{} bound to control group {path}", names.join(", ")),
            label => {
                format!("{slices} bound to {label} (control group {path})", slices = names.join(", "))
            }
        };
        self.change_bindings(bindings, &change)?;
        tell_ended(&ended);
        Ok(names)
    }

    /// Binds a container to the slice in the host agent's records. If the records name a GPU, the container gets the first free
    /// slice of the GPU. Only the binding records which slice this is. So the binding lasts as long as the control group, even
    /// over restarts of the service.
    pub(super) fn bind_recorded(&mut self, container: RecordedContainer, device: DeviceName) {
        if let Err(error) = self.bound_recorded(container, device) {
            tracing::debug!("a container in the host agent's records can't be bound to {device}: {error}");
        }
    }

    fn bound_recorded(
        &mut self,
        container: RecordedContainer,
        device: DeviceName,
    ) -> Result<(), RequestError> {
        let RecordedContainer { group, label, devices: _ } = container;
        let group = find(&GroupOf::Path(group))?;
        let mut bindings = Bindings::clone(self.state_file.lock().bindings());
        let ended = make_way(&mut bindings, &group, &[device]);
        let slice = {
            let snapshot = self.snapshot.borrow();
            match snapshot.find(&device.to_string()) {
                // The records name this slice, so the container has it already. The control group is bound to the slice even if
                // the slice is drained.
                Some((_, DeviceName::Slice(slice))) => slice,
                _ => {
                    let asker =
                        Asker { control_group: Some(&group.path), by: BoundBy::Platform, shares: false };
                    let names = [device.to_string()];
                    match choose(&snapshot, &names, &bindings, asker)?.first() {
                        Some(chosen) => chosen.slice(),
                        None => return Err(none_named()),
                    }
                }
            }
        };
        let change =
            format!("slice {slice} bound to {label}: the host agent's records give {device} to {label}");
        let binding = new_binding(group, vec![slice], BoundBy::Platform, label);
        bindings.bind(binding, false, bytes_of).map_err(|error| refused(&error))?;
        self.change_bindings(bindings, &change)?;
        tell_ended(&ended);
        Ok(())
    }

    /// Ends the binding of a control group. The processes in the control group, and their GPU work, go on.
    pub(super) fn unbind(&mut self, group: &GroupOf, reply: Reply<()>) {
        let _ = reply.send(self.unbound(group));
    }

    fn unbound(&mut self, group: &GroupOf) -> Result<(), RequestError> {
        let path = path_of(group)?;
        let mut bindings = Bindings::clone(self.state_file.lock().bindings());
        match bindings.unbind(&path) {
            Some(ended) => self.change_bindings(bindings, &said(&ended, "")),
            None => Err(RequestError::Failed(format!("control group {path} is not bound"))),
        }
    }

    /// Removes the bindings of control groups that have ended. The kernel does not notify the service when the last process of
    /// a control group of version 1 ends, so the service repeats this search while there are bindings.
    pub(super) fn end_bindings(&mut self) {
        let before = Arc::clone(self.state_file.lock().bindings());
        let mut bindings = Bindings::clone(&before);
        let ended = bindings.end(now(), control_groups::use_of);
        self.next_look_at_groups = before.iter().next().map(|_| Instant::now() + LOOK_PERIOD);
        if *before == bindings {
            return;
        }
        if let Err(error) = self.state_file.lock().set_bindings(bindings) {
            // The state file still has the ended bindings. The next service ends these bindings again, since their control
            // groups have no process.
            tracing::warn!(
                "the bindings of ended control groups can't be removed from the state file: {error}"
            );
            return;
        }
        tell_ended(&ended);
        if !ended.is_empty()
            && let Ok(plan) = &self.plan
        {
            self.keep_kernel_limits(plan);
        }
    }

    fn change_bindings(&mut self, bindings: Bindings, change: &str) -> Result<(), RequestError> {
        let before = Arc::clone(self.state_file.lock().bindings());
        if *before == bindings {
            return Ok(());
        }
        if let Err(error) = self.state_file.lock().set_bindings(bindings) {
            let text = format!(
                "no control group was bound or unbound, since the state file can't be written: {error}"
            );
            return Err(RequestError::Failed(text));
        }
        self.next_look_at_groups.get_or_insert_with(|| Instant::now() + LOOK_PERIOD);
        if let Ok(plan) = self.plan.clone() {
            self.keep_kernel_limits_since(&before, &plan);
            // A client that came before the binding may now belong to another slice, so the budgets are computed again.
            self.keep_budgets(&plan);
        }
        tracing::debug!("{change}");
        self.settle();
        Ok(())
    }
}

/// The present time, in seconds since the boot.
fn now() -> u64 {
    proc::uptime().unwrap_or_default().as_secs()
}

/// Ends bindings that prevent the binding of `group` to a wanted slice, if no process uses their control groups any more.
fn make_way(bindings: &mut Bindings, group: &ControlGroup, wanted: &[DeviceName]) -> Vec<Arc<Binding>> {
    let is_wanted = |slice: &SliceId| {
        wanted.contains(&DeviceName::Slice(*slice)) || wanted.contains(&DeviceName::Gpu(slice.gpu))
    };
    bindings.make_way(&group.path, is_wanted, now(), control_groups::use_of)
}

fn new_binding(group: ControlGroup, slices: Vec<SliceId>, by: BoundBy, label: String) -> Binding {
    let was_used = control_groups::use_of(&group) == GroupUse::Used;
    Binding { group, slices: slices.into_iter().collect(), by, label, since: now(), was_used }
}

fn tell_ended(ended: &[Arc<Binding>]) {
    for one in ended {
        tracing::debug!("{}", said(one, ", since the control group has ended"));
    }
}

fn said(binding: &Binding, why: &str) -> String {
    let names: Vec<String> = binding.slices.iter().map(ToString::to_string).collect();
    format!("{} not bound to {} any more{why}", names.join(", "), binding.name())
}

pub(super) fn path_of(group: &GroupOf) -> Result<String, RequestError> {
    match group {
        GroupOf::Path(path) => Ok(path.clone()),
        GroupOf::Process(pid) => control_groups::path_of(*pid).map_err(|error| {
            let what =
                if proc::is_gone(&error) { "there is no such process".to_owned() } else { error.to_string() };
            RequestError::Failed(format!("the control group of process {pid} is not known: {what}"))
        }),
    }
}

fn find(group: &GroupOf) -> Result<ControlGroup, RequestError> {
    let path = path_of(group)?;
    if let Some(what) = control_groups::shared_by(&path) {
        return Err(RequestError::SharedControlGroup(format!(
            "control group {path} is {what}: every process in this control group would get the GPU \
             slices; start the program in a separate control group, for example by systemd-run --scope"
        )));
    }
    control_groups::find(&path).map_err(|error| {
        let what = match error.kind() {
            io::ErrorKind::NotFound => "no control group has this path".to_owned(),
            _ => error.to_string(),
        };
        RequestError::Failed(format!("control group {path}: {what}"))
    })
}

fn slices(
    snapshot: &Snapshot,
    wanted: &WantedSlices,
    bindings: &Bindings,
    asker: Asker<'_>,
) -> Result<Vec<SliceId>, RequestError> {
    let chosen = match wanted {
        WantedSlices::All(names) => choose(snapshot, names, bindings, asker)?,
        WantedSlices::OneOf(candidates) => vec![free::choose(snapshot, candidates, bindings, asker)?],
    };
    Ok(chosen.iter().map(ChosenSlice::slice).collect())
}

fn refused(error: &NotBound) -> RequestError {
    let text = error.to_string();
    match error {
        NotBound::Taken { .. } => {
            RequestError::Taken(format!("{text}; yunion-mpsctl list -o wide shows who has which slice"))
        }
        NotBound::TooMany | NotBound::TooLarge => RequestError::Busy(text),
    }
}
