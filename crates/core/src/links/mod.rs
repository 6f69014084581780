//! The links through which clients find a control daemon: one link in its pipe directory, and one in the directory of each
//! slice. Clients reach a control daemon only through a link. A closed slice has no link: it is drained, or its GPU needs a
//! reset.
//!
//! A program that finds no control daemon runs without MPS. Therefore the links point to the waiting socket from the moment
//! when one control daemon is about to end until the next control daemon runs. The waiting socket listens, but no process
//! accepts connections, so programs wait.

use alloc::borrow::ToOwned;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::string::String;
use alloc::vec::Vec;

mod directories;

pub use directories::{Bad, ClosedSlices, Directories, Linked, SocketId, WantedLinks};

use crate::GpuUuid;

/// The most passes of [`Links::apply`] over the directories while other programs change them.
const PASSES: usize = 3;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    Pipe,
    Slice(String),
}

// Each bool is an independent fact, so an enum can't replace the bools.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone)]
pub struct Links<D> {
    /// The links that the order asks for. None if the control daemon has no order: the existing links then stay, except for the
    /// links of closed slices.
    wanted: Option<WantedLinks<D>>,
    running: Option<Linked<D>>,
    socket: Option<SocketId>,
    end: WayEnd,
    waiting_socket: Option<SocketId>,
    /// True once the control daemon has the limits of the order, so that new links to it may be made. Before that, the service
    /// only removes links.
    may_lead: bool,
    /// The places that had a link to the control daemon at the last pass over the directories.
    lead: BTreeSet<Way>,
    /// True if a directory that is not in `lead` and not of the order may have a link to the control daemon: an earlier service
    /// or an earlier order may have made the link, or the service could not remove the link. Without an order, the service
    /// searches all directories even if this field is false.
    searches: bool,
    /// True if the links should point to another socket than at the last pass over the directories.
    has_turned: bool,
    made: bool,
    /// True once the service no longer protects the directories from other programs, since the service ends or does not use the
    /// directories any more.
    released: bool,
    /// The places that should have a link and have none, each with the reason. Closed slices are not included.
    missing: BTreeMap<Way, String>,
    /// The places where the service has made the link again, since another program had changed or removed it.
    renewed: BTreeSet<Way>,
    /// The reasons why links can't be removed.
    stuck: BTreeSet<Bad>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WayEnd {
    ControlDaemon,
    /// The links point to the waiting socket while the control daemon still runs, so new programs wait.
    WaitingSocket,
    /// The links point to the waiting socket after the control daemon has ended, so new programs wait for the next control
    /// daemon.
    UntilTheNext,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinkTarget {
    Leads,
    /// The slice is closed: its directory has no link, not even to another control daemon.
    Closed,
    /// The directory has no link to this control daemon. A link to another control daemon stays.
    NotHere,
}

impl<D: Clone + PartialEq> WantedLinks<D> {
    /// Returns whether the slice with this directory should have a link to a control daemon with these GPUs. `gpus` omits the
    /// GPUs that another control daemon still has: the links of their slices must point to that control daemon.
    fn leads(&self, directory: &str, gpus: &BTreeSet<GpuUuid>) -> bool {
        !self.retiring && self.slices.get(directory).is_some_and(|gpu| gpus.contains(gpu))
    }

    /// The directory that contains the slices' directories for the running control daemon. If the order has another pipe
    /// directory, only the next control daemon uses the order's directories.
    fn slices_in(&self, running: &Linked<D>) -> Option<D> {
        if running.pipe == self.pipe { self.slices_in.clone() } else { running.slices_in.clone() }
    }
}

/// Decides if the slice's directory with the name `directory` should have a link. `gpus` are the GPUs of the running control
/// daemon.
fn target<D: Clone + PartialEq>(
    directory: &str,
    wanted: Option<&WantedLinks<D>>,
    gpus: &BTreeSet<GpuUuid>,
    closed: &impl ClosedSlices,
) -> LinkTarget {
    match closed.closes(directory) {
        Some(true) => LinkTarget::Closed,
        Some(false) if wanted.is_none_or(|wanted| wanted.leads(directory, gpus)) => LinkTarget::Leads,
        _ => LinkTarget::NotHere,
    }
}

/// Returns whether the pipe directory should have a link to the control daemon. It needs a link if a slice takes clients.
fn pipe_leads<D>(wanted: Option<&WantedLinks<D>>, closed: &impl ClosedSlices) -> bool {
    match wanted {
        Some(wanted) => {
            !wanted.retiring && wanted.slices.keys().any(|slice| closed.closes(slice) == Some(false))
        }
        None => !closed.is_all(),
    }
}

impl<D: Clone + PartialEq> Links<D> {
    pub fn new(wanted: Option<WantedLinks<D>>, running: Option<Linked<D>>) -> Self {
        Self {
            wanted,
            searches: running.is_some(),
            running,
            socket: None,
            end: WayEnd::ControlDaemon,
            waiting_socket: None,
            may_lead: false,
            lead: BTreeSet::new(),
            has_turned: false,
            made: false,
            released: false,
            missing: BTreeMap::new(),
            renewed: BTreeSet::new(),
            stuck: BTreeSet::new(),
        }
    }

    /// Sets the links of a new order. Returns false if the order asks for the same links as before.
    pub fn pursue(&mut self, wanted: WantedLinks<D>) -> bool {
        if self.wanted.as_ref() == Some(&wanted) {
            return false;
        }
        // `retiring` does not change the limits of the control daemon, so a change of `retiring` alone does not reset
        // `may_lead`.
        let before =
            self.wanted.as_ref().map(|before| WantedLinks { retiring: wanted.retiring, ..before.clone() });
        self.may_lead &= before.as_ref() == Some(&wanted);
        self.wanted = Some(wanted);
        self.searches = true;
        true
    }

    /// Makes the next pass look at the directories of all slices of the host. If the service has closed a slice that no order
    /// names, only such a pass finds the link in the slice's directory.
    pub fn search(&mut self) {
        self.searches = true;
    }

    /// Makes the links point to the running control daemon from now on, since it has the limits of the order `told`. If a newer
    /// order than `told` has come already, no new links are made.
    pub fn lead(&mut self, running: Linked<D>, told: &WantedLinks<D>) {
        self.running = Some(running);
        let is_newest =
            |wanted: &WantedLinks<D>| *wanted == WantedLinks { retiring: wanted.retiring, ..told.clone() };
        self.may_lead = self.wanted.as_ref().is_some_and(is_newest);
        self.end_at(WayEnd::ControlDaemon);
    }

    /// Makes the links point to the waiting socket from now on, so that new programs wait. If programs already wait for the
    /// next control daemon, the call changes nothing.
    pub fn keep_waiting(&mut self) {
        if self.end == WayEnd::ControlDaemon {
            self.end_at(WayEnd::WaitingSocket);
        }
    }

    /// Makes the links point to the control daemon again, if [`Self::keep_waiting`] has made them point to the waiting socket.
    pub fn reopen_ways(&mut self) {
        if self.end == WayEnd::WaitingSocket {
            self.end_at(WayEnd::ControlDaemon);
        }
    }

    fn end_at(&mut self, end: WayEnd) {
        if self.end != end {
            self.end = end;
            self.has_turned = true;
        }
    }

    /// Records that the service closes the waiting socket, so that programs no longer wait for the next control daemon. The
    /// existing links do not change.
    pub fn let_go(&mut self) {
        if self.end == WayEnd::UntilTheNext {
            (self.running, self.end) = (None, WayEnd::ControlDaemon);
        }
    }

    /// Records that the control daemon has ended. If the next control daemon uses the same directories, the links point to the
    /// waiting socket until the next control daemon runs. Directories that the next control daemon does not use are no longer
    /// protected from other programs.
    pub fn end(&mut self, directories: &mut impl Directories<D>) {
        let has_places_of_order = match (&self.running, &self.wanted) {
            (Some(running), Some(wanted)) => {
                let is_same = running.pipe == wanted.pipe && running.slices_in == wanted.slices_in;
                if !is_same {
                    directories.release(&running.pipe, running.slices_in.as_ref(), &self.names_of_order());
                }
                is_same && !wanted.retiring && !self.released
            }
            _ => false,
        };
        let wanted = self.wanted.take();
        let (renewed, stuck) = self.take_events();
        let before = core::mem::replace(self, Self { renewed, stuck, ..Self::new(wanted, None) });
        if has_places_of_order {
            (self.running, self.lead, self.waiting_socket) =
                (before.running, before.lead, before.waiting_socket);
            self.searches = before.searches;
            self.end_at(WayEnd::UntilTheNext);
        }
    }

    /// Ends the protection of the control daemon's directories for good, so that every user with write permission can change
    /// them.
    pub fn release_for_good(&mut self, directories: &mut impl Directories<D>) {
        self.released = true;
        self.release(directories);
    }

    /// Ends the protection of the control daemon's directories, so that every user with write permission can change them. A
    /// later [`Self::apply`] may protect the directories again.
    pub fn release(&self, directories: &mut impl Directories<D>) {
        let names = self.names_of_order();
        let of_running = self.running.iter().map(|running| (&running.pipe, &running.slices_in));
        let of_order = self.wanted.iter().map(|wanted| (&wanted.pipe, &wanted.slices_in));
        let mut places: Vec<_> = of_running.chain(of_order).collect();
        places.dedup();
        for (pipe, slices_in) in places {
            directories.release(pipe, slices_in.as_ref(), &names);
        }
    }

    pub fn missing(&self) -> &BTreeMap<Way, String> {
        &self.missing
    }

    pub fn stuck(&self) -> &BTreeSet<Bad> {
        &self.stuck
    }

    /// The places where links were made again since the last call of this function, and the reasons why links can't be removed.
    /// The caller writes both to the journal.
    pub fn take_events(&mut self) -> (BTreeSet<Way>, BTreeSet<Bad>) {
        (core::mem::take(&mut self.renewed), core::mem::take(&mut self.stuck))
    }

    /// The directory that contains the slices' directories. The links in the slices' directories point to the control daemon.
    /// None if slices have no directories, or if no control daemon runs.
    pub fn slices_in(&self) -> Option<D> {
        let running = self.running.as_ref()?;
        match &self.wanted {
            Some(wanted) => wanted.slices_in(running),
            None => running.slices_in.clone(),
        }
    }

    /// Returns whether the control daemon's directories should be protected, so that only the service can change them.
    fn keeps(&self) -> bool {
        self.may_lead && !self.released && self.wanted.as_ref().is_some_and(|wanted| !wanted.retiring)
    }

    fn names_of_order(&self) -> BTreeSet<String> {
        self.wanted.iter().flat_map(|wanted| wanted.slices.keys().cloned()).collect()
    }

    /// Makes and removes links, until a pass over the directories has no link to make. Another program may remove a new link
    /// before the directory is protected. The last pass confirms that every link still exists under the protection.
    ///
    /// # Errors
    /// The control daemon's own directory can't be used.
    pub fn apply(
        &mut self,
        directories: &mut impl Directories<D>,
        closed: &impl ClosedSlices,
    ) -> Result<(), Bad> {
        self.missing.clear();
        self.stuck.clear();
        let Some(running) = self.running.clone() else { return Ok(()) };
        let slices_in = self.slices_in();
        if !running.has_link && slices_in.is_none() {
            return Ok(());
        }
        let mut done = Ok(());
        for _ in 0..PASSES {
            self.made = false;
            done = self.pass(&running, slices_in.as_ref(), directories, closed);
            self.has_turned = false;
            if !self.made {
                break;
            }
        }
        done
    }

    fn pass(
        &mut self,
        running: &Linked<D>,
        slices_in: Option<&D>,
        directories: &mut impl Directories<D>,
        closed: &impl ClosedSlices,
    ) -> Result<(), Bad> {
        self.missing.clear();
        let mut found = directories.find_socket();
        if let Ok(Some(socket)) = found {
            self.socket = Some(socket);
        }
        if self.end != WayEnd::ControlDaemon {
            found = directories.find_waiting_socket().map(Some);
            self.waiting_socket = found.clone().unwrap_or_default();
        }
        let is_found = matches!(found, Ok(Some(_)));
        let mut lead = BTreeSet::new();
        if running.has_link {
            self.apply_to_pipe(&running.pipe, is_found, directories, closed, &mut lead);
        }
        if let Some(slices_in) = slices_in {
            self.apply_to_slices(slices_in, running, is_found, directories, closed, &mut lead);
        } else if let Some(why) = self.missing.get(&Way::Pipe).cloned() {
            // Slices have no directories, so programs reach all slices through the pipe directory. The pipe directory has no
            // link, for the reason `why`, so no open slice can be reached.
            let all = self.wanted.iter().flat_map(|wanted| wanted.slices.keys());
            let open = all.filter(|slice| closed.closes(slice) == Some(false));
            self.missing.extend(open.map(|slice| (Way::Slice(slice.clone()), why.clone())));
        }
        if self.keeps() && running.has_link {
            directories.keep_pipe(&running.pipe);
        }
        self.lead = lead;
        found.map(drop)
    }

    fn apply_to_pipe(
        &mut self,
        pipe: &D,
        is_found: bool,
        directories: &mut impl Directories<D>,
        closed: &impl ClosedSlices,
        lead: &mut BTreeSet<Way>,
    ) {
        if !pipe_leads(self.wanted.as_ref(), closed) {
            let closed = self.sockets().map(|socket| directories.close_pipe(pipe, socket));
            self.stuck.extend(closed.filter_map(Result::err));
            return;
        }
        let makes = is_found && self.makes(&Way::Pipe);
        let led = self.way(Way::Pipe, makes.then(|| directories.lead_pipe(pipe)), lead);
        if let Err(why) = led {
            let why = why.unwrap_or_else(|| not_yet(&directories.shown(pipe, None)));
            self.missing.insert(Way::Pipe, why);
        }
    }

    fn apply_to_slices(
        &mut self,
        slices_in: &D,
        running: &Linked<D>,
        is_found: bool,
        directories: &mut impl Directories<D>,
        closed: &impl ClosedSlices,
        lead: &mut BTreeSet<Way>,
    ) {
        let found = directories.open_slices(slices_in, is_found && self.makes_all());
        let is_there = matches!(found, Ok(true));
        let mut names = self.names();
        if is_there && (self.searches || self.wanted.is_none()) {
            let (others, incomplete) = directories.other_slices(&names);
            names.extend(others);
            // Without the identity of the control daemon's socket, this pass can't recognize a link to the control daemon, so
            // the next pass has to search again.
            self.searches = incomplete.is_some() || self.socket.is_none();
            self.stuck.extend(incomplete);
        }
        for name in names {
            let target = target(&name, self.wanted.as_ref(), &running.gpus, closed);
            let led = match (target, &found) {
                (LinkTarget::Leads, Err(bad)) => Err(Some(bad.clone())),
                (LinkTarget::Leads, Ok(_)) => {
                    let way = Way::Slice(name.clone());
                    let makes = is_found && is_there && self.makes(&way);
                    self.way(way, makes.then(|| directories.lead_slice(&name)), lead)
                }
                (LinkTarget::Closed, Err(bad)) => {
                    self.stuck.insert(bad.clone());
                    Ok(())
                }
                (_, Ok(true)) => {
                    self.close_slice(&name, target, directories);
                    Ok(())
                }
                (LinkTarget::Closed | LinkTarget::NotHere, _) => Ok(()),
            };
            let is_of_order = self.wanted.as_ref().is_some_and(|wanted| wanted.slices.contains_key(&name));
            if let Err(why) = led
                && is_of_order
            {
                let why = why.unwrap_or_else(|| not_yet(&directories.shown(slices_in, Some(&name))));
                self.missing.insert(Way::Slice(name), why);
            }
        }
        if is_there && self.keeps() {
            // Only the directories of this order's slices are protected here. The supervisors of other control daemons protect
            // the directories of their own slices.
            directories.keep_slices(&self.names_of_order());
        }
    }

    /// Returns whether every open place should get a link: the control daemon has the limits of its order, or new programs
    /// should wait.
    fn makes_all(&self) -> bool {
        self.may_lead || self.end != WayEnd::ControlDaemon
    }

    /// Returns whether this place should get a link. A place that had a link at the last pass gets it again, even if the
    /// control daemon does not have the limits of a newer order yet.
    fn makes(&self, way: &Way) -> bool {
        self.makes_all() || self.lead.contains(way)
    }

    fn sockets(&self) -> impl Iterator<Item = SocketId> + use<D> {
        [self.socket, self.waiting_socket].into_iter().flatten()
    }

    /// The names of the slices' directories in the order, and of the slices' directories that had a link to the control daemon
    /// at the last pass. If `searches` is true, other directories may have a link to the control daemon too.
    fn names(&self) -> BTreeSet<String> {
        let mut names = self.names_of_order();
        names.extend(self.lead.iter().filter_map(|way| match way {
            Way::Slice(name) => Some(name.clone()),
            Way::Pipe => None,
        }));
        names
    }

    /// Records `led`, the result of an attempt to make the link in the place `way`. `led` is None if there was no attempt; an
    /// existing link then still exists. Adds the place to `lead` if its link points to the control daemon, or did so before it
    /// was turned to the waiting socket. The error is the reason why the place has no link, or None if there was no attempt to
    /// make it.
    fn way(
        &mut self,
        way: Way,
        led: Option<Result<bool, Bad>>,
        lead: &mut BTreeSet<Way>,
    ) -> Result<(), Option<Bad>> {
        match led {
            Some(Ok(made)) => {
                self.made |= made;
                if self.end != WayEnd::ControlDaemon && !self.lead.contains(&way) {
                    return Ok(());
                }
                if made && !self.has_turned && self.lead.contains(&way) {
                    self.renewed.insert(way.clone());
                }
            }
            Some(Err(bad)) => return Err(Some(bad)),
            None if self.lead.contains(&way) => {}
            None => return Err(None),
        }
        lead.insert(way);
        Ok(())
    }

    fn close_slice(&mut self, name: &str, target: LinkTarget, directories: &mut impl Directories<D>) {
        // The directory of a closed slice must not have a link to any control daemon, so a link to another control daemon is
        // removed too.
        let closed = match target {
            LinkTarget::Closed => directories.close_slice(name, None),
            _ => self.sockets().try_for_each(|socket| directories.close_slice(name, Some(socket))),
        };
        if let Err(stuck) = closed {
            self.stuck.insert(stuck);
            self.searches = true;
        }
    }
}

fn not_yet(path: &str) -> String {
    path.to_owned() + " has no socket of a control daemon yet"
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIRECTORY: &str = "00_06.0-1";
    const GPU: &str = "GPU-1";

    /// The names of the closed slices' directories, and true if all slices are closed. In this test, the names of slices'
    /// directories begin with `00_`.
    struct Names(&'static [&'static str], bool);

    impl ClosedSlices for Names {
        fn is_all(&self) -> bool {
            self.1
        }

        fn closes(&self, directory: &str) -> Option<bool> {
            directory.starts_with("00_").then(|| self.1 || self.0.contains(&directory))
        }
    }

    fn wanted(retiring: bool) -> WantedLinks<u8> {
        let slices = ["00_06.0-0", DIRECTORY].map(|name| (name.to_owned(), GPU.to_owned()));
        WantedLinks { pipe: 1, slices_in: Some(2), slices: slices.into(), retiring }
    }

    fn gpus(gpu: &str) -> BTreeSet<GpuUuid> {
        [gpu.to_owned()].into()
    }

    #[test]
    fn a_drained_slice_leads_nowhere_whatever_runs() {
        let (serving, retiring) = (wanted(false), wanted(true));
        let other = Names(&["00_06.0-0"], false);
        let table = [
            (Some(&serving), LinkTarget::Leads),
            (Some(&retiring), LinkTarget::NotHere),
            (None, LinkTarget::Leads),
        ];
        for (wanted, open) in table {
            let row = alloc::format!("{wanted:?}");
            let target = |drained: &Names| target(DIRECTORY, wanted, &gpus(GPU), drained);
            assert_eq!(target(&other), open, "{row}");
            assert_eq!(target(&Names(&[DIRECTORY], false)), LinkTarget::Closed, "{row}");
            assert_eq!(target(&Names(&[], true)), LinkTarget::Closed, "{row}");
            assert!(!pipe_leads(wanted, &Names(&[], true)), "{row}");
        }
        let not_here = |name, gpu| target(name, Some(&serving), &gpus(gpu), &other) == LinkTarget::NotHere;
        assert!(not_here("00_06.0-2", GPU), "a slice of an earlier order");
        assert!(not_here("file", GPU), "no slice");
        assert!(not_here(DIRECTORY, "GPU-2"), "another control daemon has its GPU");
        assert_eq!(target("00_06.0-0", Some(&serving), &gpus("GPU-2"), &other), LinkTarget::Closed);
    }

    #[test]
    fn a_pipe_directory_leads_while_a_slice_takes_clients() {
        let (one, both) = (Names(&[DIRECTORY], false), Names(&["00_06.0-0", DIRECTORY], false));
        assert!(pipe_leads(Some(&wanted(false)), &one));
        assert!(!pipe_leads(Some(&wanted(false)), &both));
        assert!(!pipe_leads(Some(&wanted(true)), &Names(&[], false)));
        assert!(pipe_leads(None::<&WantedLinks<u8>>, &both));
    }
}
