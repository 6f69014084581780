//! The links by which clients find a control daemon. The main loop and the supervisor share the links: the main loop removes
//! those of a drained slice at once, even while the supervisor waits. The core (`crates/core`) decides which links there should
//! be.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mps_core::links::{Bad, Directories, Linked, Links, SocketId, WantedLinks, Way};
use tokio::sync::Notify;

use crate::mps::links_on_disk::{self, SliceDirectories, Socket, close_pipe};
use crate::mps::waiting::WaitingSocket;
use common::plan::ControlDaemonPlan;

use super::state_file::SharedStateFile;
use common::drained::ClosedDevices;
use common::state_file::Running;

#[derive(Debug, Clone)]
pub(super) struct SharedAdmission {
    admission: Arc<Mutex<Admission>>,
    state_file: SharedStateFile,
    changed: Arc<Notify>,
}

#[derive(Debug)]
struct Admission {
    links: Links<PathBuf>,
    directories: FileDirectories,
}

fn wanted(plan: &ControlDaemonPlan, retiring: bool) -> WantedLinks<PathBuf> {
    let slices = plan
        .gpus
        .iter()
        .flat_map(|gpu| gpu.slices().map(move |slice| (slice.directory_name(), gpu.uuid.clone())));
    WantedLinks {
        pipe: plan.pipe_directory.clone(),
        slices_in: plan.slice_directories.clone(),
        slices: slices.collect(),
        retiring,
    }
}

fn linked(running: &Running) -> Linked<PathBuf> {
    Linked {
        pipe: running.pipe_directory.clone(),
        has_link: running.private_directory.is_some(),
        slices_in: running.slice_directories.clone(),
        gpus: running.gpus.iter().cloned().collect(),
    }
}

impl SharedAdmission {
    /// If the control daemon of `plan` runs already, it may have links from an earlier service. So the state file is searched
    /// for this control daemon, and the links that `plan` does not need are removed.
    pub(super) fn new(
        plan: &ControlDaemonPlan,
        retiring: bool,
        state_file: SharedStateFile,
        changed: Arc<Notify>,
    ) -> Self {
        let running = state_file.lock().control_daemon(&plan.id).cloned();
        let mut admission = Admission::new(Some(wanted(plan, retiring)), running);
        if retiring {
            admission.links.release(&mut admission.directories);
        }
        let shared = Self { admission: Arc::new(Mutex::new(admission)), state_file, changed };
        // The error is ignored: this call only removes links, since `lead` makes new links after the limits are set. Links that
        // can't be removed are reported later.
        let _ = shared.apply();
        shared
    }

    /// Takes a new order, and immediately removes the links that the order does not need. `retiring` is true if the control
    /// daemon ends as soon as its clients have ended.
    pub(super) fn pursue(&self, plan: &ControlDaemonPlan, retiring: bool) {
        {
            let Admission { links, directories } = &mut *self.lock();
            if !links.pursue(wanted(plan, retiring)) {
                return;
            }
            if retiring {
                links.release(directories);
                // A retiring control daemon gets no new link, so programs at its waiting socket would wait for ever. The socket
                // is closed.
                directories.waiting = None;
            }
        }
        let _ = self.apply();
    }

    /// Makes the links point to the control daemon, which must have the limits of `plan` already.
    pub(super) fn lead(&self, running: &Running, plan: &ControlDaemonPlan) -> Result<(), Bad> {
        {
            let Admission { links, directories } = &mut *self.lock();
            directories.running = Some(running.clone());
            links.lead(linked(running), &wanted(plan, false));
        }
        self.apply()
    }

    /// Makes the links point to the waiting socket, so that new programs wait. The error names links that still lead to the
    /// control daemon.
    pub(super) fn keep_waiting(&self) -> Result<(), String> {
        self.lock().links.keep_waiting();
        self.apply()?;
        let open: Vec<String> = self.missing().into_values().collect();
        if open.is_empty() { Ok(()) } else { Err(open.join("; ")) }
    }

    pub(super) fn reopen_ways(&self) {
        self.lock().links.reopen_ways();
        if let Err(bad) = self.apply() {
            tracing::debug!("{bad}");
        }
    }

    /// Stops the wait of programs at the waiting socket, and returns the PIDs of these programs.
    pub(super) fn let_go(&self) -> Vec<u32> {
        let Admission { links, directories } = &mut *self.lock();
        links.let_go();
        let waiting = directories.waiting.take();
        waiting.map(|waiting| waiting.let_go(std::process::id())).unwrap_or_default()
    }

    /// Records that no control daemon runs. New programs then wait for the next control daemon.
    pub(super) fn end(&self) {
        {
            let Admission { links, directories } = &mut *self.lock();
            links.end(directories);
        }
        if let Err(bad) = self.apply() {
            tracing::warn!("the service can't make new programs wait for a control daemon: {bad}");
        }
    }

    /// Makes and removes links, so that no slice that the state file closes to new clients has a link. The error says that the
    /// control daemon's own directory can't be used.
    pub(super) fn apply(&self) -> Result<(), Bad> {
        let closed = self.state_file.lock().closed();
        let mut admission = self.lock();
        let before = admission.links.missing().clone();
        let done = admission.apply(&closed);
        if *admission.links.missing() != before {
            self.changed.notify_one();
        }
        done
    }

    /// Removes the immutable flag from the directories of the links, so that other users can change and remove them.
    pub(super) fn release(&self) {
        let Admission { links, directories } = &mut *self.lock();
        links.release_for_good(directories);
    }

    /// Makes and removes links after slices were closed to new clients or opened again. Returns the links that can't be
    /// removed, in words.
    pub(super) fn link(&self) -> BTreeSet<String> {
        self.lock().links.search();
        if let Err(bad) = self.apply() {
            tracing::debug!("{bad}");
        }
        self.lock().links.stuck().clone()
    }

    pub(super) fn missing(&self) -> BTreeMap<Way, String> {
        self.lock().links.missing().clone()
    }

    /// The changes since the last call, for the log: directories with a link that another program had changed and the service
    /// has restored; messages about renamed files; links that can't be removed.
    pub(super) fn take_news(&self) -> (BTreeSet<PathBuf>, Vec<String>, BTreeSet<String>) {
        let Admission { links, directories } = &mut *self.lock();
        let ((renewed, stuck), slices_in) = (links.take_events(), links.slices_in());
        let path = |way| match way {
            Way::Pipe => directories.running.as_ref().map(|running| running.pipe_directory.clone()),
            Way::Slice(name) => slices_in.as_ref().map(|parent| parent.join(name)),
        };
        let renewed = renewed.into_iter().filter_map(path).collect();
        (renewed, std::mem::take(&mut directories.moved), stuck)
    }

    pub(super) fn slice_directories(&self) -> Option<PathBuf> {
        self.lock().links.slices_in()
    }

    fn lock(&self) -> MutexGuard<'_, Admission> {
        self.admission.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes the links to a control daemon without a supervisor from the directories of slices that are closed to new clients.
/// The error names the links that can't be removed.
pub(crate) fn close_unsupervised(running: &Running, closed: &ClosedDevices) -> Result<(), String> {
    let mut admission = Admission::new(None, Some(running.clone()));
    admission.apply(closed)?;
    let stuck = admission.links.stuck();
    if stuck.is_empty() { Ok(()) } else { Err(stuck.iter().cloned().collect::<Vec<_>>().join("; ")) }
}

impl Admission {
    fn new(wanted: Option<WantedLinks<PathBuf>>, running: Option<Running>) -> Self {
        let links = Links::new(wanted, running.as_ref().map(linked));
        Self {
            links,
            directories: FileDirectories {
                running,
                socket: None,
                waiting: None,
                slices: None,
                moved: Vec::new(),
            },
        }
    }

    fn apply(&mut self, closed: &ClosedDevices) -> Result<(), Bad> {
        let done = self.links.apply(&mut self.directories, closed);
        // The descriptors of the directories are open only during a pass over the links.
        (self.directories.socket, self.directories.slices) = (None, None);
        done
    }
}

#[derive(Debug)]
struct FileDirectories {
    /// The control daemon that runs now, or that ran last.
    running: Option<Running>,
    socket: Option<Socket>,
    waiting: Option<WaitingSocket>,
    slices: Option<SliceDirectories>,
    moved: Vec<String>,
}

const NOT_OPEN: &str = "a directory is not open";

impl Directories<PathBuf> for FileDirectories {
    fn find_socket(&mut self) -> Result<Option<SocketId>, Bad> {
        self.socket = None;
        let Some(running) = &self.running else { return Ok(None) };
        self.socket = Socket::find(running.control_directory()).map_err(|bad| bad.to_string())?;
        Ok(self.socket.as_ref().map(|socket| socket.id))
    }

    fn find_waiting_socket(&mut self) -> Result<SocketId, Bad> {
        let running = self.running.as_ref().ok_or(NOT_OPEN)?;
        let directory = running.control_directory();
        let is_there = |waiting: &WaitingSocket| waiting.is_in(directory) && waiting.socket().is_ok();
        let waiting = match self.waiting.take().filter(is_there) {
            Some(waiting) => waiting,
            None => WaitingSocket::make(directory).map_err(|bad| bad.to_string())?,
        };
        let socket = waiting.socket().map_err(|bad| bad.to_string())?;
        let id = socket.id;
        (self.socket, self.waiting) = (Some(socket), Some(waiting));
        Ok(id)
    }

    fn lead_pipe(&mut self, pipe: &PathBuf) -> Result<bool, Bad> {
        let socket = self.socket.as_ref().ok_or(NOT_OPEN)?;
        socket.lead_from_pipe(pipe, &mut self.moved).map_err(|bad| bad.to_string())
    }

    fn close_pipe(&mut self, pipe: &PathBuf, socket: SocketId) -> Result<(), Bad> {
        close_pipe(pipe, socket).map_err(|bad| bad.to_string())
    }

    fn open_slices(&mut self, slices_in: &PathBuf, make: bool) -> Result<bool, Bad> {
        self.slices = None;
        self.slices = if make {
            SliceDirectories::make(slices_in, &mut self.moved).map(Some)
        } else {
            SliceDirectories::existing(slices_in)
        }
        .map_err(|bad| bad.to_string())?;
        Ok(self.slices.is_some())
    }

    fn other_slices(&self, names: &BTreeSet<String>) -> (BTreeSet<String>, Option<Bad>) {
        let Some(slices) = &self.slices else { return (BTreeSet::new(), Some(NOT_OPEN.to_owned())) };
        let (others, incomplete) = slices.others(names);
        (others, incomplete.map(|bad| bad.to_string()))
    }

    fn lead_slice(&mut self, name: &str) -> Result<bool, Bad> {
        let (slices, socket) = self.slices.as_ref().zip(self.socket.as_ref()).ok_or(NOT_OPEN)?;
        slices.lead(name, socket, &mut self.moved).map_err(|bad| bad.to_string())
    }

    fn close_slice(&mut self, name: &str, only: Option<SocketId>) -> Result<(), Bad> {
        let slices = self.slices.as_ref().ok_or(NOT_OPEN)?;
        slices.close(name, only).map_err(|bad| bad.to_string())
    }

    fn keep_pipe(&mut self, pipe: &PathBuf) {
        if let Some(running) = &self.running {
            links_on_disk::keep_pipe(pipe, &running.log_directory);
        }
    }

    fn keep_slices(&mut self, names: &BTreeSet<String>) {
        if let Some(slices) = &self.slices {
            slices.keep(names);
        }
    }

    fn release(&mut self, pipe: &PathBuf, slices_in: Option<&PathBuf>, names: &BTreeSet<String>) {
        links_on_disk::release(pipe, slices_in.map(PathBuf::as_path), names);
    }

    fn shown(&self, pipe: &PathBuf, slice: Option<&str>) -> String {
        slice.map_or(pipe.clone(), |slice| pipe.join(slice)).display().to_string()
    }
}
