//! Which directories lead clients to a control daemon. The supervisor and the daemon share this, so that a drain holds at the
//! moment of its answer, whatever the supervisor waits for.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::mps::links::{self, SliceDirectories, Socket, SocketId, close_pipe};
use common::directories::{ATTEMPTS, BadDirectory};
use common::plan::{ControlDaemonPlan, slice_names};

use super::state_file::SharedStateFile;
use common::drained::Drained;
use common::state_file::Running;

/// The directories that lead to one control daemon, in the hands of everybody who changes them.
#[derive(Debug, Clone)]
pub(super) struct SharedLeading {
    leading: Arc<Mutex<Leading>>,
    state_file: SharedStateFile,
    changed: Arc<Notify>,
}

/// The part of an order that says where links shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Wanted {
    pipe_directory: PathBuf,
    slice_directories: Option<PathBuf>,
    /// Its slices, by the names of their directories.
    slices: BTreeMap<String, WantedSlice>,
    /// It takes no new client, since it ends as soon as it has none.
    retiring: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct WantedSlice {
    name: String,
    gpu_uuid: String,
}

/// The directories of slices that an order leaves without a link, and why; and the same for its pipe directory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Unled {
    /// The reasons, by the names of the slices. A drained slice is not here.
    pub slices: BTreeMap<String, String>,
    pub pipe: Option<String>,
}

/// What is told to people about the links.
#[derive(Debug, Default)]
pub(super) struct LinkNews {
    /// The directories that led to the control daemon until somebody else changed them, and do again.
    pub(super) renewed: BTreeSet<PathBuf>,
    /// The things in the way that were renamed.
    pub(super) moved: Vec<String>,
    /// The links that can't be taken away.
    pub(super) stuck: BTreeSet<String>,
}

#[derive(Debug)]
struct Leading {
    /// None for a control daemon that nobody has an order for: its links stay, except for drained slices.
    wanted: Option<Wanted>,
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
    unled: Unled,
    news: LinkNews,
}

/// What shall become of the link in a slice's directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It leads to this control daemon.
    Leads,
    /// It leads to no control daemon at all: the slice is drained.
    Closed,
    /// It does not lead to this control daemon.
    NotHere,
}

impl Wanted {
    fn of(plan: &ControlDaemonPlan, retiring: bool) -> Self {
        let slice = |(gpu, name, directory): (String, String, String)| {
            let gpu = plan.gpus.iter().find(|planned| planned.pci.short() == gpu)?;
            Some((directory, WantedSlice { name, gpu_uuid: gpu.uuid.clone() }))
        };
        Self {
            pipe_directory: plan.pipe_directory.clone(),
            slice_directories: plan.slice_directories.clone(),
            slices: plan.slices().filter_map(slice).collect(),
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

fn is_drained(slice: &str, drained: &Drained) -> bool {
    slice.rsplit_once('-').is_some_and(|(gpu, _)| drained.has(gpu, slice))
}

/// What shall become of the link in the directory of this name, where a control daemon has these GPUs.
fn fate(directory: &str, wanted: Option<&Wanted>, gpus: &[String], drained: &Drained) -> Fate {
    let wants = |wanted: &Wanted| wanted.leads(directory, gpus);
    match slice_names::of_directory_name(directory) {
        Some(slice) if is_drained(&slice, drained) => Fate::Closed,
        Some(_) if wanted.is_none_or(wants) => Fate::Leads,
        _ => Fate::NotHere,
    }
}

/// Whether a pipe directory with a link leads to the control daemon: as long as one of its slices takes clients.
fn pipe_leads(wanted: Option<&Wanted>, drained: &Drained) -> bool {
    match wanted {
        Some(wanted) => {
            !wanted.retiring && wanted.slices.values().any(|slice| !is_drained(&slice.name, drained))
        }
        None => !drained.is_all(),
    }
}

impl SharedLeading {
    /// The links to the control daemon of an order, which may run already.
    pub(super) fn new(
        plan: &ControlDaemonPlan,
        retiring: bool,
        state_file: SharedStateFile,
        changed: Arc<Notify>,
    ) -> Self {
        let running = state_file.lock().control_daemon(&plan.id).cloned();
        let leading = Leading::new(Some(Wanted::of(plan, retiring)), running);
        if retiring {
            leading.release();
        }
        let shared = Self { leading: Arc::new(Mutex::new(leading)), state_file, changed };
        // Nothing is made before the order is told, and an error in taking links away is in the news.
        let _ = shared.apply();
        shared
    }

    /// Takes in another order, or that the control daemon shall retire. The links that it does not want go at once.
    pub(super) fn pursue(&self, plan: &ControlDaemonPlan, retiring: bool) {
        let wanted = Wanted::of(plan, retiring);
        {
            let mut leading = self.lock();
            let before = leading.wanted.as_ref().map(|before| Wanted { retiring, ..before.clone() });
            if leading.wanted.as_ref() == Some(&wanted) {
                return;
            }
            leading.may_lead &= before.as_ref() == Some(&wanted);
            leading.wanted = Some(wanted);
            if retiring {
                leading.release();
            }
        }
        let _ = self.apply();
    }

    /// The control daemon is told the limits of this order: from now on links lead to it.
    pub(super) fn lead(&self, running: &Running, plan: &ControlDaemonPlan) -> Result<(), BadDirectory> {
        {
            let mut leading = self.lock();
            leading.running = Some(running.clone());
            let wanted = leading.wanted.as_ref();
            // Another order may have come meanwhile.
            leading.may_lead = wanted.is_some_and(|wanted| *wanted == Wanted::of(plan, wanted.retiring));
        }
        self.apply()
    }

    /// No control daemon runs. The next one makes another socket.
    pub(super) fn end(&self) {
        let mut leading = self.lock();
        // The next one of the same order has the same directories.
        if let (Some(running), Some(wanted)) = (&leading.running, &leading.wanted)
            && (running.pipe_directory != wanted.pipe_directory
                || running.slice_directories != wanted.slice_directories)
        {
            links::release(&running.pipe_directory, running.slice_directories.as_deref());
        }
        let (wanted, news) = (leading.wanted.take(), std::mem::take(&mut leading.news));
        *leading = Leading { news, ..Leading::new(wanted, None) };
    }

    /// Makes and takes away links, as the state file has slices drained. The error is the control daemon's own directory.
    pub(super) fn apply(&self) -> Result<(), BadDirectory> {
        let drained = self.state_file.lock().drained().clone();
        let mut leading = self.lock();
        let before = leading.unled.clone();
        let done = leading.apply(&drained);
        if leading.unled != before {
            self.changed.notify_one();
        }
        done
    }

    /// Lets people change and remove the directories from now on.
    pub(super) fn release(&self) {
        let mut leading = self.lock();
        leading.released = true;
        leading.release();
    }

    pub(super) fn unled(&self) -> Unled {
        self.lock().unled.clone()
    }

    pub(super) fn take_news(&self) -> LinkNews {
        std::mem::take(&mut self.lock().news)
    }

    /// The directory of the directories of slices that lead to the control daemon.
    pub(super) fn slice_directories(&self) -> Option<PathBuf> {
        self.lock().slice_directories()
    }

    /// The links that could not be taken away at the last attempt, in words.
    pub(super) fn stuck(&self) -> BTreeSet<String> {
        self.lock().news.stuck.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Leading> {
        self.leading.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes the links of drained slices away from a control daemon that no supervisor has. The error says which link stays.
pub(crate) fn close_unsupervised(running: &Running, drained: &Drained) -> Result<(), String> {
    let mut leading = Leading::new(None, Some(running.clone()));
    leading.apply(drained).map_err(|bad| bad.to_string())?;
    if leading.news.stuck.is_empty() {
        return Ok(());
    }
    Err(leading.news.stuck.into_iter().collect::<Vec<_>>().join("; "))
}

impl Leading {
    fn new(wanted: Option<Wanted>, running: Option<Running>) -> Self {
        Self {
            wanted,
            running,
            socket: None,
            may_lead: false,
            lead: BTreeSet::new(),
            made: false,
            released: false,
            unled: Unled::default(),
            news: LinkNews::default(),
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
        of_running.chain(of_order).for_each(|(pipe, slices)| links::release(pipe, slices.as_deref()));
    }

    /// Makes and takes away links. The last pass changes nothing: the links were there when nobody else could change them.
    fn apply(&mut self, drained: &Drained) -> Result<(), BadDirectory> {
        self.unled = Unled::default();
        self.news.stuck.clear();
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
        self.unled = Unled::default();
        let found = Socket::of(running.control_directory());
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
        } else if let Some(why) = &self.unled.pipe {
            // Its slices have no other way.
            let all = self.wanted.iter().flat_map(|wanted| wanted.slices.values());
            let open = all.filter(|slice| !is_drained(&slice.name, drained));
            self.unled.slices = open.map(|slice| (slice.name.clone(), why.clone())).collect();
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
                self.news.stuck.insert(stuck.to_string());
            }
            return;
        }
        match socket.map(|socket| socket.lead_from_pipe(pipe, &mut self.news.moved)) {
            Some(Ok(made)) => self.leads(pipe, made, lead),
            Some(Err(bad)) => self.unled.pipe = Some(bad.to_string()),
            None if self.lead.contains(pipe) => _ = lead.insert(pipe.clone()),
            None => self.unled.pipe = Some(format!("{} leads to no control daemon yet", pipe.display())),
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
            Some(_) => SliceDirectories::make(parent, &mut self.news.moved).map(Some),
            None => SliceDirectories::existing(parent),
        };
        let found = found.map_err(|bad| bad.to_string());
        let wanted = self.wanted.clone();
        let directories = found.as_ref().ok().and_then(Option::as_ref);
        let names = self.names(parent, directories);
        for name in &names {
            let path = parent.join(name);
            let led = match (fate(name, wanted.as_ref(), gpus, drained), &found) {
                (Fate::Leads, Err(bad)) => Err(bad.clone()),
                (Fate::Leads, Ok(_)) => self.lead_slice(&path, directories.zip(socket), lead),
                (Fate::Closed, Err(bad)) => {
                    self.news.stuck.insert(bad.clone());
                    Ok(())
                }
                (fate, Ok(Some(directories))) => {
                    self.close_slice(name, fate, directories);
                    Ok(())
                }
                (Fate::Closed | Fate::NotHere, _) => Ok(()),
            };
            let slice = wanted.as_ref().and_then(|wanted| wanted.slices.get(name));
            if let (Err(why), Some(slice)) = (led, slice) {
                self.unled.slices.insert(slice.name.clone(), why);
            }
        }
        if let Some(directories) = directories.filter(|_| self.keeps()) {
            directories.keep(&names);
        }
    }

    /// The names of the directories that may have a link: those of the order, those that have one, and others that are there.
    fn names(&self, parent: &Path, directories: Option<&SliceDirectories>) -> BTreeSet<String> {
        let of_order = self.wanted.iter().flat_map(|wanted| wanted.slices.keys().cloned());
        let former = self.lead.iter().filter(|path| path.parent() == Some(parent));
        let former = former.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned()));
        let mut names: BTreeSet<String> = of_order.chain(former).collect();
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
        match way.map(|(directories, socket)| directories.lead(name, socket, &mut self.news.moved)) {
            Some(Ok(made)) => self.leads(path, made, lead),
            Some(Err(bad)) => return Err(bad.to_string()),
            None if self.lead.contains(path) => _ = lead.insert(path.to_owned()),
            None => return Err(format!("{} leads to no control daemon yet", path.display())),
        }
        Ok(())
    }

    fn close_slice(&mut self, name: &str, fate: Fate, directories: &SliceDirectories) {
        // Whichever control daemon the link of a drained slice leads to, it goes.
        let only = (fate != Fate::Closed).then_some(self.socket);
        let closed = match only {
            None => directories.close(name, None),
            Some(Some(socket)) => directories.close(name, Some(socket)),
            Some(None) => Ok(()),
        };
        if let Err(stuck) = closed {
            self.news.stuck.insert(stuck.to_string());
        }
    }

    /// Takes note of a directory that leads to the control daemon; `made` says that it did not before.
    fn leads(&mut self, path: &Path, made: bool, lead: &mut BTreeSet<PathBuf>) {
        self.made |= made;
        if made && self.lead.contains(path) {
            self.news.renewed.insert(path.to_owned());
        }
        lead.insert(path.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIRECTORY: &str = "00_06.0-1";

    const GPU: &str = "GPU-1";

    fn wanted(retiring: bool) -> Wanted {
        let slice = |name: &str| WantedSlice { name: name.to_owned(), gpu_uuid: GPU.to_owned() };
        let slices = ["00:06.0-0", "00:06.0-1"].map(|name| (name.replace(':', "_"), slice(name)));
        Wanted {
            pipe_directory: "/mps/pipe".into(),
            slice_directories: Some("/mps/pipe/slices".into()),
            slices: BTreeMap::from(slices),
            retiring,
        }
    }

    /// The fate where the control daemon has the GPU.
    fn fate_there(directory: &str, wanted: Option<&Wanted>, drained: &Drained) -> Fate {
        fate(directory, wanted, &[GPU.to_owned()], drained)
    }

    fn drained(names: &[&str]) -> Drained {
        let mut drained = Drained::default();
        if !names.is_empty() {
            drained.drain(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        }
        drained
    }

    #[test]
    fn a_drained_slice_leads_nowhere_whatever_runs() {
        let (serving, retiring) = (wanted(false), wanted(true));
        let other = drained(&["00:06.0-0"]);
        let table = [
            (Some(&serving), Fate::Leads),
            (Some(&retiring), Fate::NotHere),
            // Nobody has an order for it: its links stay.
            (None, Fate::Leads),
        ];
        for (wanted, open) in table {
            let row = format!("{wanted:?}");
            assert_eq!(fate_there(DIRECTORY, wanted, &other), open, "{row}");
            for names in [&["00:06.0-1"], &["00:06.0"]] {
                assert_eq!(fate_there(DIRECTORY, wanted, &drained(names)), Fate::Closed, "{row}");
            }
            let mut all = Drained::default();
            all.drain(&[]);
            assert_eq!(fate_there(DIRECTORY, wanted, &all), Fate::Closed, "{row}");
            assert!(!pipe_leads(wanted, &all), "{row}");
        }
        assert_eq!(
            fate_there("00_06.0-2", Some(&serving), &other),
            Fate::NotHere,
            "a slice of an earlier order"
        );
        for name in ["file", "00_06.0-1.refused-1", "00:06.0-1", ".control.new"] {
            assert_eq!(fate_there(name, Some(&serving), &drained(&["00:06.0"])), Fate::NotHere, "{name}");
        }
    }

    #[test]
    fn a_slice_of_a_gpu_that_another_control_daemon_has_does_not_lead_here() {
        let gpus = ["GPU-2".to_owned()];
        assert_eq!(fate(DIRECTORY, Some(&wanted(false)), &gpus, &drained(&[])), Fate::NotHere);
        assert_eq!(fate(DIRECTORY, Some(&wanted(false)), &gpus, &drained(&["00:06.0"])), Fate::Closed);
    }

    #[test]
    fn a_pipe_directory_leads_while_a_slice_takes_clients() {
        assert!(pipe_leads(Some(&wanted(false)), &drained(&["00:06.0-0"])));
        assert!(!pipe_leads(Some(&wanted(false)), &drained(&["00:06.0"])));
        assert!(!pipe_leads(Some(&wanted(true)), &drained(&[])));
        assert!(pipe_leads(None, &drained(&["00:06.0"])));
    }
}
