//! Which directories lead clients to a control daemon. The supervisor and the daemon share this, so that a drain holds at the
//! moment of its answer, whatever the supervisor waits for.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::mps::links::{self, SliceDirectories, Socket, SocketId, close_pipe};
use common::directories::{ATTEMPTS, BadDirectory};
use common::host::device_name::SliceId;
use common::plan::{ControlDaemonPlan, ServedGpu};

use super::state_file::SharedStateFile;
use common::drained::Drained;
use common::state_file::Running;

/// The directories that lead to one control daemon, in the hands of everybody who changes them.
#[derive(Debug, Clone)]
pub(super) struct SharedAdmission {
    admission: Arc<Mutex<Admission>>,
    state_file: SharedStateFile,
    changed: Arc<Notify>,
}

/// The part of an order that says where links shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
struct WantedLinks {
    pipe_directory: PathBuf,
    slice_directories: Option<PathBuf>,
    /// Its slices, by the names of their directories.
    slices: BTreeMap<String, WantedSlice>,
    /// It takes no new client, since it ends as soon as it has none.
    retiring: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct WantedSlice {
    id: SliceId,
    gpu_uuid: String,
}

/// The directories of slices that an order leaves without a link, and why; and the same for its pipe directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Unlinked {
    /// The reasons. A drained slice is not here.
    pub slices: BTreeMap<SliceId, String>,
    pub pipe: Option<String>,
}

/// What is told to people about the links.
#[derive(Debug, Default)]
pub(super) struct LinkEvents {
    /// The directories that led to the control daemon until somebody else changed them, and do again.
    pub(super) renewed: BTreeSet<PathBuf>,
    /// The things in the way that were renamed.
    pub(super) moved: Vec<String>,
    /// The links that can't be taken away.
    pub(super) stuck: BTreeSet<String>,
}

#[derive(Debug)]
struct Admission {
    /// None for a control daemon that nobody has an order for: its links stay, except for drained slices.
    wanted: Option<WantedLinks>,
    /// The control daemon that runs, or may run.
    running: Option<Running>,
    /// Its socket, as last seen: links to it work even if it was removed from its directory.
    socket: Option<SocketId>,
    /// It has been told the limits of the order, so links may be made. Before, they are only taken away.
    may_lead: bool,
    /// The directories that lead to it, unless somebody else has changed them.
    lead: BTreeSet<PathBuf>,
    /// A link was made in this pass over the directories.
    made: bool,
    /// Nothing is kept from people any more: the service ends, or has no use for the directories.
    released: bool,
    unlinked: Unlinked,
    events: LinkEvents,
}

/// What shall become of the link in a slice's directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinkTarget {
    /// It leads to this control daemon.
    Leads,
    /// It leads to no control daemon at all: the slice is drained.
    Closed,
    /// It does not lead to this control daemon.
    NotHere,
}

impl WantedLinks {
    fn from_plan(plan: &ControlDaemonPlan, retiring: bool) -> Self {
        let slice = |gpu: &ServedGpu, id: SliceId| {
            (id.directory_name(), WantedSlice { id, gpu_uuid: gpu.uuid.clone() })
        };
        Self {
            pipe_directory: plan.pipe_directory.clone(),
            slice_directories: plan.slice_directories.clone(),
            slices: plan.gpus.iter().flat_map(|gpu| gpu.slices().map(move |id| slice(gpu, id))).collect(),
            retiring,
        }
    }

    /// Whether the directory of this name shall lead to a control daemon with these GPUs. A GPU that another one still has is
    /// not among them, and its slices stay with that one.
    fn leads(&self, directory: &str, gpus: &[String]) -> bool {
        !self.retiring && self.slices.get(directory).is_some_and(|slice| gpus.contains(&slice.gpu_uuid))
    }

    /// The directory of the directories of slices, for this control daemon. An order with another pipe directory needs
    /// another control daemon, and this one keeps its directories until then.
    fn slice_directories(&self, running: &Running) -> Option<PathBuf> {
        let stays = running.pipe_directory == self.pipe_directory;
        if stays { self.slice_directories.clone() } else { running.slice_directories.clone() }
    }
}

/// What shall become of the link in the directory of this name, where a control daemon has these GPUs.
fn target(directory: &str, wanted: Option<&WantedLinks>, gpus: &[String], drained: &Drained) -> LinkTarget {
    let wants = |wanted: &WantedLinks| wanted.leads(directory, gpus);
    match SliceId::with_directory_name(directory) {
        Some(slice) if drained.has(slice) => LinkTarget::Closed,
        Some(_) if wanted.is_none_or(wants) => LinkTarget::Leads,
        _ => LinkTarget::NotHere,
    }
}

/// Whether a pipe directory with a link leads to the control daemon: as long as one of its slices takes clients.
fn pipe_leads(wanted: Option<&WantedLinks>, drained: &Drained) -> bool {
    match wanted {
        Some(wanted) => !wanted.retiring && wanted.slices.values().any(|slice| !drained.has(slice.id)),
        None => !drained.is_all(),
    }
}

impl SharedAdmission {
    /// The links to the control daemon of an order, which may run already.
    pub(super) fn new(
        plan: &ControlDaemonPlan,
        retiring: bool,
        state_file: SharedStateFile,
        changed: Arc<Notify>,
    ) -> Self {
        let running = state_file.lock().control_daemon(&plan.id).cloned();
        let admission = Admission::new(Some(WantedLinks::from_plan(plan, retiring)), running);
        if retiring {
            admission.release();
        }
        let shared = Self { admission: Arc::new(Mutex::new(admission)), state_file, changed };
        // Nothing is made before the order is told, and an error in taking links away is in the events.
        let _ = shared.apply();
        shared
    }

    /// Follows another order, or that the control daemon shall retire. The links that it does not want go at once.
    pub(super) fn pursue(&self, plan: &ControlDaemonPlan, retiring: bool) {
        let wanted = WantedLinks::from_plan(plan, retiring);
        {
            let mut admission = self.lock();
            let before = admission.wanted.as_ref().map(|before| WantedLinks { retiring, ..before.clone() });
            if admission.wanted.as_ref() == Some(&wanted) {
                return;
            }
            admission.may_lead &= before.as_ref() == Some(&wanted);
            admission.wanted = Some(wanted);
            if retiring {
                admission.release();
            }
        }
        let _ = self.apply();
    }

    /// The control daemon is told the limits of this order: from now on links lead to it.
    pub(super) fn lead(&self, running: &Running, plan: &ControlDaemonPlan) -> Result<(), BadDirectory> {
        {
            let mut admission = self.lock();
            admission.running = Some(running.clone());
            let wanted = admission.wanted.as_ref();
            // Another order may have come meanwhile.
            admission.may_lead =
                wanted.is_some_and(|wanted| *wanted == WantedLinks::from_plan(plan, wanted.retiring));
        }
        self.apply()
    }

    /// No control daemon runs. The next one makes another socket.
    pub(super) fn end(&self) {
        let mut admission = self.lock();
        // The next one of the same order has the same directories.
        if let (Some(running), Some(wanted)) = (&admission.running, &admission.wanted)
            && (running.pipe_directory != wanted.pipe_directory
                || running.slice_directories != wanted.slice_directories)
        {
            let slices = running.slice_directories.as_deref();
            links::release(&running.pipe_directory, slices, &admission.slices_of_order());
        }
        let (wanted, events) = (admission.wanted.take(), std::mem::take(&mut admission.events));
        *admission = Admission { events, ..Admission::new(wanted, None) };
    }

    /// Makes and takes away links, as the state file has slices drained. The error is the control daemon's own directory.
    pub(super) fn apply(&self) -> Result<(), BadDirectory> {
        let drained = self.state_file.lock().drained().clone();
        let mut admission = self.lock();
        let before = admission.unlinked.clone();
        let done = admission.apply(&drained);
        if admission.unlinked != before {
            self.changed.notify_one();
        }
        done
    }

    /// Lets people change and remove the directories from now on.
    pub(super) fn release(&self) {
        let mut admission = self.lock();
        admission.released = true;
        admission.release();
    }

    pub(super) fn unlinked(&self) -> Unlinked {
        self.lock().unlinked.clone()
    }

    pub(super) fn take_events(&self) -> LinkEvents {
        std::mem::take(&mut self.lock().events)
    }

    /// The directory of the directories of slices that lead to the control daemon.
    pub(super) fn slice_directories(&self) -> Option<PathBuf> {
        self.lock().slice_directories()
    }

    /// The links that could not be taken away at the last attempt, in words.
    pub(super) fn stuck(&self) -> BTreeSet<String> {
        self.lock().events.stuck.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Admission> {
        self.admission.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the links of drained slices away from a control daemon that no supervisor has. The error says which link stays.
pub(crate) fn close_unsupervised(running: &Running, drained: &Drained) -> Result<(), String> {
    let mut admission = Admission::new(None, Some(running.clone()));
    admission.apply(drained).map_err(|bad| bad.to_string())?;
    if admission.events.stuck.is_empty() {
        return Ok(());
    }
    Err(admission.events.stuck.into_iter().collect::<Vec<_>>().join("; "))
}

impl Admission {
    fn new(wanted: Option<WantedLinks>, running: Option<Running>) -> Self {
        Self {
            wanted,
            running,
            socket: None,
            may_lead: false,
            lead: BTreeSet::new(),
            made: false,
            released: false,
            unlinked: Unlinked::default(),
            events: LinkEvents::default(),
        }
    }

    fn slice_directories(&self) -> Option<PathBuf> {
        let running = self.running.as_ref()?;
        match &self.wanted {
            Some(wanted) => wanted.slice_directories(running),
            None => running.slice_directories.clone(),
        }
    }

    /// Whether nobody else shall be able to change the directories.
    fn keeps(&self) -> bool {
        self.may_lead && !self.released && self.wanted.as_ref().is_some_and(|wanted| !wanted.retiring)
    }

    fn release(&self) {
        let of_running =
            self.running.iter().map(|running| (&running.pipe_directory, &running.slice_directories));
        let of_order = self.wanted.iter().map(|wanted| (&wanted.pipe_directory, &wanted.slice_directories));
        let (places, names) = (of_running.chain(of_order).collect::<BTreeSet<_>>(), self.slices_of_order());
        for (pipe, slices) in places {
            links::release(pipe, slices.as_deref(), &names);
        }
    }

    /// The names of the directories of its slices.
    fn slices_of_order(&self) -> BTreeSet<String> {
        self.wanted.iter().flat_map(|wanted| wanted.slices.keys().cloned()).collect()
    }

    /// Makes and takes away links. The last pass changes nothing: the links were there when nobody else could change them.
    fn apply(&mut self, drained: &Drained) -> Result<(), BadDirectory> {
        self.unlinked = Unlinked::default();
        self.events.stuck.clear();
        let Some(running) = self.running.clone() else { return Ok(()) };
        let slices = self.slice_directories();
        if running.private_directory.is_none() && slices.is_none() {
            return Ok(());
        }
        let mut done = Ok(());
        for _ in 0..ATTEMPTS {
            self.made = false;
            done = self.pass(&running, slices.as_deref(), drained);
            if !self.made {
                break;
            }
        }
        done
    }

    fn pass(
        &mut self,
        running: &Running,
        slices: Option<&Path>,
        drained: &Drained,
    ) -> Result<(), BadDirectory> {
        self.unlinked = Unlinked::default();
        let found = Socket::find(running.control_directory());
        if let Ok(Some(socket)) = &found {
            self.socket = Some(socket.id);
        }
        let socket = found.as_ref().ok().and_then(Option::as_ref).filter(|_| self.may_lead);
        let mut lead = BTreeSet::new();
        if running.private_directory.is_some() {
            self.apply_to_pipe(running, socket, drained, &mut lead);
        }
        if let Some(parent) = slices {
            self.apply_to_slices(parent, &running.gpus, socket, drained, &mut lead);
        } else if let Some(why) = &self.unlinked.pipe {
            // Its slices have no other way.
            let all = self.wanted.iter().flat_map(|wanted| wanted.slices.values());
            let open = all.filter(|slice| !drained.has(slice.id));
            self.unlinked.slices = open.map(|slice| (slice.id, why.clone())).collect();
        }
        if self.keeps() && running.private_directory.is_some() {
            links::keep_pipe(&running.pipe_directory, &running.log_directory);
        }
        self.lead = lead;
        found.map(drop)
    }

    fn apply_to_pipe(
        &mut self,
        running: &Running,
        socket: Option<&Socket>,
        drained: &Drained,
        lead: &mut BTreeSet<PathBuf>,
    ) {
        let pipe = &running.pipe_directory;
        if !pipe_leads(self.wanted.as_ref(), drained) {
            if let Some(Err(stuck)) = self.socket.map(|socket| close_pipe(pipe, socket)) {
                self.events.stuck.insert(stuck.to_string());
            }
            return;
        }
        match socket.map(|socket| socket.lead_from_pipe(pipe, &mut self.events.moved)) {
            Some(Ok(made)) => self.leads(pipe, made, lead),
            Some(Err(bad)) => self.unlinked.pipe = Some(bad.to_string()),
            None if self.lead.contains(pipe) => _ = lead.insert(pipe.clone()),
            None => self.unlinked.pipe = Some(format!("{} leads to no control daemon yet", pipe.display())),
        }
    }

    fn apply_to_slices(
        &mut self,
        parent: &Path,
        gpus: &[String],
        socket: Option<&Socket>,
        drained: &Drained,
        lead: &mut BTreeSet<PathBuf>,
    ) {
        let found = match socket {
            Some(_) => SliceDirectories::make(parent, &mut self.events.moved).map(Some),
            None => SliceDirectories::existing(parent),
        };
        let found = found.map_err(|bad| bad.to_string());
        let wanted = self.wanted.clone();
        let directories = found.as_ref().ok().and_then(Option::as_ref);
        let names = self.names(parent, directories);
        for name in &names {
            let path = parent.join(name);
            let led = match (target(name, wanted.as_ref(), gpus, drained), &found) {
                (LinkTarget::Leads, Err(bad)) => Err(bad.clone()),
                (LinkTarget::Leads, Ok(_)) => self.lead_slice(&path, directories.zip(socket), lead),
                (LinkTarget::Closed, Err(bad)) => {
                    self.events.stuck.insert(bad.clone());
                    Ok(())
                }
                (target, Ok(Some(directories))) => {
                    self.close_slice(name, target, directories);
                    Ok(())
                }
                (LinkTarget::Closed | LinkTarget::NotHere, _) => Ok(()),
            };
            let slice = wanted.as_ref().and_then(|wanted| wanted.slices.get(name));
            if let (Err(why), Some(slice)) = (led, slice) {
                self.unlinked.slices.insert(slice.id, why);
            }
        }
        if let Some(directories) = directories.filter(|_| self.keeps()) {
            // Whoever has the other slices keeps their directories.
            directories.keep(&self.slices_of_order());
        }
    }

    /// The names of the directories that may have a link: those of the order, those that have one, and others that are there.
    fn names(&self, parent: &Path, directories: Option<&SliceDirectories>) -> BTreeSet<String> {
        let former = self.lead.iter().filter(|path| path.parent() == Some(parent));
        let former = former.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()));
        let mut names = self.slices_of_order();
        names.extend(former);
        match directories.map(|directories| directories.others(&names)) {
            Some(Ok(others)) => names.extend(others),
            Some(Err(bad)) => tracing::debug!("{bad}"),
            None => {}
        }
        names
    }

    fn lead_slice(
        &mut self,
        path: &Path,
        way: Option<(&SliceDirectories, &Socket)>,
        lead: &mut BTreeSet<PathBuf>,
    ) -> Result<(), String> {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        match way.map(|(directories, socket)| directories.lead(name, socket, &mut self.events.moved)) {
            Some(Ok(made)) => self.leads(path, made, lead),
            Some(Err(bad)) => return Err(bad.to_string()),
            None if self.lead.contains(path) => _ = lead.insert(path.to_owned()),
            None => return Err(format!("{} leads to no control daemon yet", path.display())),
        }
        Ok(())
    }

    fn close_slice(&mut self, name: &str, target: LinkTarget, directories: &SliceDirectories) {
        // Whichever control daemon the link of a drained slice leads to, it goes.
        let only = (target != LinkTarget::Closed).then_some(self.socket);
        let closed = match only {
            None => directories.close(name, None),
            Some(Some(socket)) => directories.close(name, Some(socket)),
            Some(None) => Ok(()),
        };
        if let Err(stuck) = closed {
            self.events.stuck.insert(stuck.to_string());
        }
    }

    /// Takes note of a directory that leads to the control daemon; `made` says that it did not before.
    fn leads(&mut self, path: &Path, made: bool, lead: &mut BTreeSet<PathBuf>) {
        self.made |= made;
        if made && self.lead.contains(path) {
            self.events.renewed.insert(path.to_owned());
        }
        lead.insert(path.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use common::host::device_name::GpuId;

    use super::*;

    const DIRECTORY: &str = "00_06.0-1";

    const GPU: &str = "GPU-1";

    fn wanted(retiring: bool) -> WantedLinks {
        let slice = |id: SliceId| WantedSlice { id, gpu_uuid: GPU.to_owned() };
        let slices = "00:06.0".parse::<GpuId>().unwrap().slices(2).map(|id| (id.directory_name(), slice(id)));
        WantedLinks {
            pipe_directory: "/mps/pipe".into(),
            slice_directories: Some("/mps/pipe/slices".into()),
            slices: slices.collect(),
            retiring,
        }
    }

    /// The target where the control daemon has the GPU.
    fn target_there(directory: &str, wanted: Option<&WantedLinks>, drained: &Drained) -> LinkTarget {
        target(directory, wanted, &[GPU.to_owned()], drained)
    }

    fn drained(names: &[&str]) -> Drained {
        let mut drained = Drained::default();
        if !names.is_empty() {
            drained.drain(&names.iter().map(|name| name.parse().unwrap()).collect::<Vec<_>>());
        }
        drained
    }

    #[test]
    fn a_drained_slice_leads_nowhere_whatever_runs() {
        let (serving, retiring) = (wanted(false), wanted(true));
        let other = drained(&["00:06.0-0"]);
        let table = [
            (Some(&serving), LinkTarget::Leads),
            (Some(&retiring), LinkTarget::NotHere),
            // Nobody has an order for it: its links stay.
            (None, LinkTarget::Leads),
        ];
        for (wanted, open) in table {
            let row = format!("{wanted:?}");
            assert_eq!(target_there(DIRECTORY, wanted, &other), open, "{row}");
            for names in [&["00:06.0-1"], &["00:06.0"]] {
                assert_eq!(target_there(DIRECTORY, wanted, &drained(names)), LinkTarget::Closed, "{row}");
            }
            let mut all = Drained::default();
            all.drain(&[]);
            assert_eq!(target_there(DIRECTORY, wanted, &all), LinkTarget::Closed, "{row}");
            assert!(!pipe_leads(wanted, &all), "{row}");
        }
        assert_eq!(
            target_there("00_06.0-2", Some(&serving), &other),
            LinkTarget::NotHere,
            "a slice of an earlier order"
        );
        for name in ["file", "00_06.0-1.refused-1", "00:06.0-1", ".control.new"] {
            assert_eq!(
                target_there(name, Some(&serving), &drained(&["00:06.0"])),
                LinkTarget::NotHere,
                "{name}"
            );
        }
    }

    #[test]
    fn a_slice_of_a_gpu_that_another_control_daemon_has_does_not_lead_here() {
        let gpus = ["GPU-2".to_owned()];
        assert_eq!(target(DIRECTORY, Some(&wanted(false)), &gpus, &drained(&[])), LinkTarget::NotHere);
        assert_eq!(
            target(DIRECTORY, Some(&wanted(false)), &gpus, &drained(&["00:06.0"])),
            LinkTarget::Closed
        );
    }

    #[test]
    fn a_pipe_directory_leads_while_a_slice_takes_clients() {
        assert!(pipe_leads(Some(&wanted(false)), &drained(&["00:06.0-0"])));
        assert!(!pipe_leads(Some(&wanted(false)), &drained(&["00:06.0"])));
        assert!(!pipe_leads(Some(&wanted(true)), &drained(&[])));
        assert!(pipe_leads(None, &drained(&["00:06.0"])));
    }
}
