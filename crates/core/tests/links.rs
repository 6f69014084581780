//! Stories of the links through which clients find a control daemon, with directories in memory.

// clippy.toml allows calls such as `unwrap` only in functions with `#[test]`. Other functions of this file make such calls too.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use mps_core::links::{Bad, ClosedSlices, Directories, Linked, Links, SocketId, WantedLinks, Way};

type Path = &'static str;

/// The socket of the control daemon, the socket of another control daemon, and the socket at which programs wait for a control
/// daemon.
const OURS: SocketId = (1, 7);
const ANOTHERS: SocketId = (1, 8);
const WAITING: SocketId = (1, 9);

/// The directories in memory, each with the socket to which its link points.
struct Disk {
    socket: Result<Option<SocketId>, Bad>,
    /// The socket that the service last found in the control daemon's directory.
    found: Option<SocketId>,
    pipes: BTreeMap<Path, SocketId>,
    slices: BTreeMap<(Path, String), SocketId>,
    /// The reason why the parent directory of the slices' directories can't be used. `None` if it can be used.
    bad: Option<Bad>,
    /// True if the parent directory of the slices' directories exists.
    is_there: bool,
    opened: Option<Path>,
    /// True if the names of other slices' directories can't be listed.
    is_hidden: bool,
    /// The names of the directories with links that can't be changed.
    stuck: BTreeSet<String>,
    /// The number of links that another user will remove right after the service has made them.
    removals: usize,
    /// The number of the service's attempts to make a link of a slice.
    attempts: usize,
    /// The names of the directories that the service protects from other users.
    kept: BTreeSet<String>,
}

impl Disk {
    fn new() -> Self {
        Self {
            socket: Ok(Some(OURS)),
            found: None,
            pipes: BTreeMap::new(),
            slices: BTreeMap::new(),
            bad: None,
            is_there: false,
            opened: None,
            is_hidden: false,
            stuck: BTreeSet::new(),
            removals: 0,
            attempts: 0,
            kept: BTreeSet::new(),
        }
    }

    fn leading_to_ours(&self) -> Vec<&str> {
        let pipes = self.pipes.iter().map(|(path, socket)| (*path, socket));
        let slices = self.slices.iter().map(|((_, name), socket)| (name.as_str(), socket));
        pipes.chain(slices).filter(|(_, socket)| **socket == OURS).map(|(name, _)| name).collect()
    }

    fn others_lead(&mut self, name: &str, socket: SocketId) {
        self.is_there = true;
        self.slices.insert(("slices", name.to_owned()), socket);
    }

    fn change(&mut self, name: &str) -> Result<(), Bad> {
        if self.stuck.contains(name) { Err(format!("{name} can't be changed")) } else { Ok(()) }
    }
}

impl Directories<Path> for Disk {
    fn find_socket(&mut self) -> Result<Option<SocketId>, Bad> {
        self.found = self.socket.clone().unwrap_or_default();
        self.socket.clone()
    }

    fn find_waiting_socket(&mut self) -> Result<SocketId, Bad> {
        self.found = Some(WAITING);
        Ok(WAITING)
    }

    fn lead_pipe(&mut self, pipe: &Path) -> Result<bool, Bad> {
        self.change(pipe)?;
        let socket = self.found.unwrap();
        Ok(self.pipes.insert(pipe, socket) != Some(socket))
    }

    fn close_pipe(&mut self, pipe: &Path, socket: SocketId) -> Result<(), Bad> {
        self.change(pipe)?;
        if self.pipes.get(pipe) == Some(&socket) {
            self.pipes.remove(pipe);
        }
        Ok(())
    }

    fn open_slices(&mut self, slices_in: &Path, make: bool) -> Result<bool, Bad> {
        if let Some(bad) = &self.bad {
            return Err(bad.clone());
        }
        self.is_there |= make;
        self.opened = Some(slices_in);
        Ok(self.is_there)
    }

    fn other_slices(&self, names: &BTreeSet<String>) -> (BTreeSet<String>, Option<Bad>) {
        let here = self.slices.keys().filter(|(path, _)| Some(*path) == self.opened);
        let others = here.map(|(_, name)| name.clone()).filter(|name| !names.contains(name));
        if self.is_hidden {
            (BTreeSet::new(), Some("slices can't be listed".to_owned()))
        } else {
            (others.collect(), None)
        }
    }

    fn lead_slice(&mut self, name: &str) -> Result<bool, Bad> {
        self.attempts += 1;
        self.change(name)?;
        let socket = self.found.unwrap();
        let key = (self.opened.unwrap(), name.to_owned());
        let is_new = self.slices.insert(key.clone(), socket) != Some(socket);
        if is_new && self.removals > 0 {
            self.removals -= 1;
            self.slices.remove(&key);
        }
        Ok(is_new)
    }

    fn close_slice(&mut self, name: &str, only: Option<SocketId>) -> Result<(), Bad> {
        let key = (self.opened.unwrap(), name.to_owned());
        let Some(leads) = self.slices.get(&key) else { return Ok(()) };
        if only.is_none_or(|only| only == *leads) {
            self.change(name)?;
            self.slices.remove(&key);
        }
        Ok(())
    }

    fn keep_pipe(&mut self, pipe: &Path) {
        self.kept.insert((*pipe).to_owned());
    }

    fn keep_slices(&mut self, names: &BTreeSet<String>) {
        self.kept.extend(names.iter().cloned());
    }

    fn release(&mut self, pipe: &Path, slices_in: Option<&Path>, names: &BTreeSet<String>) {
        self.kept.remove(*pipe);
        // `names` are names of directories in `slices_in`. Without `slices_in` there are no such directories.
        if slices_in.is_some() {
            self.kept.retain(|name| !names.contains(name));
        }
    }

    fn shown(&self, pipe: &Path, slice: Option<&str>) -> String {
        slice.map_or((*pipe).to_owned(), |slice| format!("{pipe}/{slice}"))
    }
}

#[derive(Default)]
struct Drained {
    names: BTreeSet<&'static str>,
    all: bool,
}

impl ClosedSlices for Drained {
    fn is_all(&self) -> bool {
        self.all
    }

    fn closes(&self, directory: &str) -> Option<bool> {
        directory.starts_with('s').then(|| self.all || self.names.contains(directory))
    }
}

fn none_drained() -> Drained {
    Drained::default()
}

fn drained<const N: usize>(names: [&'static str; N]) -> Drained {
    Drained { names: names.into(), all: false }
}

fn wanted() -> WantedLinks<Path> {
    let slices = ["s-0", "s-1"].map(|name| (name.to_owned(), "A".to_owned()));
    WantedLinks { pipe: "pipe", slices_in: Some("slices"), slices: slices.into(), retiring: false }
}

fn retiring() -> WantedLinks<Path> {
    WantedLinks { retiring: true, ..wanted() }
}

fn linked() -> Linked<Path> {
    let gpus = ["A".to_owned()].into();
    Linked { pipe: "pipe", has_link: true, slices_in: Some("slices"), gpus }
}

/// Returns the links to a control daemon that has the limits of its order.
fn leading(disk: &mut Disk) -> Links<Path> {
    let mut links = Links::new(Some(wanted()), None);
    links.lead(linked(), &wanted());
    links.apply(disk, &none_drained()).unwrap();
    links
}

fn missing(pipe: Option<&str>, slices: &[(&str, &str)]) -> BTreeMap<Way, String> {
    let slices = slices.iter().map(|(name, why)| (Way::Slice((*name).to_owned()), (*why).to_owned()));
    pipe.map(|why| (Way::Pipe, why.to_owned())).into_iter().chain(slices).collect()
}

fn no_news() -> (BTreeSet<Way>, BTreeSet<Bad>) {
    (BTreeSet::new(), BTreeSet::new())
}

fn texts<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.map(str::to_owned).into()
}

#[test]
fn nobody_is_led_to_a_control_daemon_without_limits() {
    let mut disk = Disk::new();
    let mut links = Links::new(Some(wanted()), Some(linked()));
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), [""; 0]);
    let not_yet = [
        ("s-0", "slices/s-0 has no socket of a control daemon yet"),
        ("s-1", "slices/s-1 has no socket of a control daemon yet"),
    ];
    assert_eq!(links.missing(), &missing(Some("pipe has no socket of a control daemon yet"), &not_yet));
    assert!(!disk.is_there && disk.kept.is_empty(), "nothing is made and kept before its time");
    links.lead(linked(), &wanted());
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), ["pipe", "s-0", "s-1"]);
    assert_eq!(links.missing(), &missing(None, &[]));
    assert_eq!(disk.kept, texts(["pipe", "s-0", "s-1"]));
    assert_eq!(links.take_events(), no_news(), "the first links are no news");
}

#[test]
fn without_a_control_daemon_nothing_is_done() {
    let mut disk = Disk { bad: Some("it is a file".to_owned()), ..Disk::new() };
    let mut links = Links::new(Some(wanted()), None);
    links.apply(&mut disk, &drained(["s-0"])).unwrap();
    assert_eq!((links.missing(), links.slices_in()), (&missing(None, &[]), None));
    assert!(links.stuck().is_empty());
}

#[test]
fn a_drained_slice_loses_its_link_whoever_it_leads_to() {
    let mut disk = Disk::new();
    let mut links = leading(&mut disk);
    disk.others_lead("s-0", ANOTHERS);
    links.apply(&mut disk, &drained(["s-0"])).unwrap();
    assert_eq!(disk.slices.keys().map(|(_, name)| name.as_str()).collect::<Vec<_>>(), ["s-1"]);
    assert!(disk.pipes.contains_key("pipe"), "the other one takes clients");
    assert_eq!(links.missing(), &missing(None, &[]), "it is not missed");
    links.apply(&mut disk, &drained(["s-0", "s-1"])).unwrap();
    assert_eq!(disk.leading_to_ours(), [""; 0]);
    assert_eq!(links.missing(), &missing(None, &[]));
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), ["pipe", "s-0", "s-1"]);
}

#[test]
fn one_that_retires_leads_nobody_and_keeps_nothing() {
    let mut disk = Disk::new();
    let mut links = leading(&mut disk);
    disk.kept.clear();
    disk.others_lead("s-1", ANOTHERS);
    assert!(links.pursue(retiring()));
    assert!(!links.pursue(retiring()), "it is the same");
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), [""; 0]);
    assert_eq!(disk.slices.values().collect::<Vec<_>>(), [&ANOTHERS], "the next one's link stays");
    assert!(disk.kept.is_empty());
    assert_eq!(links.missing(), &missing(None, &[]));
    // The next order lets the control daemon serve again, with the same limits. So the links come back at once.
    assert!(links.pursue(wanted()));
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), ["pipe", "s-0", "s-1"]);
}

#[test]
fn another_order_leads_nobody_new_until_its_limits_are_told() {
    let mut disk = Disk::new();
    let mut links = leading(&mut disk);
    disk.kept.clear();
    let mut more = wanted();
    more.slices.insert("s-2".to_owned(), "A".to_owned());
    more.slices.remove("s-0");
    links.pursue(more.clone());
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), ["pipe", "s-1"], "a slice of before has gone, and the others stay");
    assert_eq!(
        links.missing(),
        &missing(None, &[("s-2", "slices/s-2 has no socket of a control daemon yet")])
    );
    assert!(disk.kept.is_empty());
    // The control daemon has only the limits of the former order. So the service makes only links that both orders have.
    links.lead(linked(), &wanted());
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), ["pipe", "s-1"]);
    // The control daemon has now got the limits of an order with `retiring`. The new order has the same limits and slices, so
    // the service makes all links of the new order.
    links.lead(linked(), &WantedLinks { retiring: true, ..more });
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), ["pipe", "s-1", "s-2"]);
}

#[test]
fn slices_of_a_gpu_that_another_one_has_stay_with_that_one() {
    let mut disk = Disk::new();
    let mut both = wanted();
    both.slices.insert("s-2".to_owned(), "B".to_owned());
    let mut links = Links::new(Some(both.clone()), None);
    disk.others_lead("s-2", ANOTHERS);
    links.lead(linked(), &both);
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), ["pipe", "s-0", "s-1"]);
    assert_eq!(disk.slices.get(&("slices", "s-2".to_owned())), Some(&ANOTHERS));
    assert_eq!(links.missing(), &missing(None, &[]));
}

#[test]
fn one_that_nobody_has_an_order_for_keeps_its_links() {
    let mut disk = Disk::new();
    leading(&mut disk);
    let mut links = Links::new(None, Some(linked()));
    links.apply(&mut disk, &drained(["s-0"])).unwrap();
    assert_eq!(disk.leading_to_ours(), ["pipe", "s-1"]);
    assert_eq!(links.missing().keys().collect::<Vec<_>>(), [&Way::Pipe], "no order misses the slices");
    assert_eq!(links.slices_in(), Some("slices"));
    let all = Drained { all: true, ..Drained::default() };
    links.apply(&mut disk, &all).unwrap();
    assert_eq!(disk.leading_to_ours(), [""; 0]);
}

#[test]
fn strangers_among_the_directories_are_left_alone_unless_they_leading_to_ours() {
    let mut disk = Disk::new();
    leading(&mut disk);
    disk.others_lead("s-8", OURS);
    disk.others_lead("s-9", ANOTHERS);
    disk.others_lead("no slice", ANOTHERS);
    let adopted = || Links::new(Some(wanted()), Some(linked()));
    adopted().apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), ["pipe", "s-0", "s-1"]);
    assert_eq!(disk.slices.len(), 4);
    adopted().apply(&mut disk, &drained(["s-9"])).unwrap();
    assert_eq!(disk.slices.len(), 3, "a drained slice leads nowhere at all");
}

#[test]
fn other_directories_are_searched_until_no_link_can_be_left_there() {
    let mut disk = Disk { stuck: texts(["s-8"]), ..Disk::new() };
    leading(&mut disk);
    disk.others_lead("s-8", OURS);
    let socket = core::mem::replace(&mut disk.socket, Err("its directory is a file".to_owned()));
    let mut links = Links::new(Some(wanted()), Some(linked()));
    links.apply(&mut disk, &none_drained()).unwrap_err();
    assert!(links.stuck().is_empty(), "the socket is not known yet");
    (disk.socket, disk.is_hidden) = (socket, true);
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(links.stuck(), &texts(["slices can't be listed"]));
    disk.is_hidden = false;
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(links.stuck(), &texts(["s-8 can't be changed"]));
    disk.stuck.clear();
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), ["pipe", "s-0", "s-1"]);
    // The service assumes that no other program makes links in the directories of slices. So after a complete search,
    // `apply` looks only at the slices of the order, and the link of `s-8` stays until the next search.
    disk.others_lead("s-8", OURS);
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), ["pipe", "s-0", "s-1", "s-8"]);
    links.search();
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), ["pipe", "s-0", "s-1"]);
    disk.others_lead("s-8", OURS);
    links.pursue(WantedLinks { retiring: true, ..wanted() });
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), [""; 0]);
}

#[test]
fn links_that_others_have_taken_away_are_renewed_and_told_once() {
    let mut disk = Disk::new();
    let mut links = leading(&mut disk);
    disk.pipes.clear();
    disk.slices.remove(&("slices", "s-0".to_owned()));
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), ["pipe", "s-0", "s-1"]);
    let renewed = [Way::Pipe, Way::Slice("s-0".to_owned())].into();
    assert_eq!(links.take_events(), (renewed, BTreeSet::new()));
    assert_eq!(links.take_events(), no_news());
}

#[test]
fn the_last_look_changes_nothing_unless_somebody_else_goes_on() {
    let attempts = |removals| {
        let mut disk = Disk { removals, ..Disk::new() };
        leading(&mut disk);
        (disk.attempts, disk.leading_to_ours().len())
    };
    assert_eq!(attempts(0), (2 * 2, 3), "one pass makes them, and the next one finds them there");
    assert_eq!(attempts(1), (2 * 3, 3));
    assert_eq!(attempts(9), (2 * 3, 1), "whoever goes on for ever keeps nobody waiting");
    let mut disk = Disk::new();
    let mut links = leading(&mut disk);
    disk.attempts = 0;
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.attempts, 2, "all were there");
}

#[test]
fn a_link_that_cannot_be_made_is_missing_with_the_reason() {
    let mut disk = Disk { stuck: texts(["pipe", "s-0"]), ..Disk::new() };
    let mut links = leading(&mut disk);
    assert_eq!(disk.leading_to_ours(), ["s-1"]);
    let reasons = missing(Some("pipe can't be changed"), &[("s-0", "s-0 can't be changed")]);
    assert_eq!(links.missing(), &reasons);
    assert!(links.stuck().is_empty());
    disk.stuck.clear();
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(links.missing(), &missing(None, &[]));
    assert_eq!(links.take_events(), no_news(), "they have not led here before");
}

#[test]
fn a_link_that_cannot_be_taken_away_is_told() {
    let mut disk = Disk::new();
    let mut links = leading(&mut disk);
    disk.stuck = texts(["pipe", "s-0"]);
    links.apply(&mut disk, &drained(["s-0", "s-1"])).unwrap();
    assert_eq!(links.stuck(), &texts(["pipe can't be changed", "s-0 can't be changed"]));
    disk.stuck.clear();
    links.apply(&mut disk, &drained(["s-0", "s-1"])).unwrap();
    assert!(links.stuck().is_empty() && disk.leading_to_ours().is_empty());
}

#[test]
fn directories_of_slices_that_cannot_be_used_are_named() {
    let mut disk = Disk::new();
    let mut links = leading(&mut disk);
    disk.bad = Some("slices is a file".to_owned());
    links.apply(&mut disk, &drained(["s-0"])).unwrap();
    assert_eq!(links.missing(), &missing(None, &[("s-1", "slices is a file")]));
    assert_eq!(links.stuck(), &texts(["slices is a file"]), "nobody knows where s-0 leads");
    // If no slice is drained and no link has to be made, a bad directory is no problem.
    links.pursue(retiring());
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!((links.missing(), links.stuck()), (&missing(None, &[]), &BTreeSet::new()));
}

#[test]
fn directories_of_slices_that_are_not_there_are_not_made_for_a_drain() {
    let mut disk = Disk::new();
    let mut links = Links::new(Some(wanted()), Some(linked()));
    links.apply(&mut disk, &drained(["s-0"])).unwrap();
    assert!(!disk.is_there && links.stuck().is_empty());
    let misses = |name: &str| links.missing().contains_key(&Way::Slice(name.to_owned()));
    assert!(misses("s-1") && !misses("s-0"));
}

#[test]
fn a_socket_that_is_not_there_leads_none_drained() {
    let mut disk = Disk::new();
    let mut links = leading(&mut disk);
    // The directory of the control daemon's socket was removed. The existing links still work, since a hard link leads to the
    // socket itself.
    disk.socket = Err("its directory is gone".to_owned());
    disk.pipes.clear();
    assert_eq!(links.apply(&mut disk, &none_drained()), Err("its directory is gone".to_owned()));
    assert_eq!(disk.leading_to_ours(), ["s-0", "s-1"]);
    assert_eq!(links.missing(), &missing(None, &[]));
    assert!(links.apply(&mut disk, &drained(["s-0", "s-1"])).is_err());
    assert_eq!(disk.leading_to_ours(), [""; 0]);
    // A control daemon that has not made its socket yet is no error.
    let mut disk = Disk { socket: Ok(None), ..Disk::new() };
    let mut links = Links::new(Some(wanted()), None);
    links.lead(linked(), &wanted());
    assert_eq!(links.apply(&mut disk, &none_drained()), Ok(()));
    assert!(links.missing().contains_key(&Way::Pipe) && disk.leading_to_ours().is_empty());
    links.pursue(retiring());
    disk.others_lead("s-0", ANOTHERS);
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.slices.len(), 1, "whoever has never seen its socket takes no link away");
}

#[test]
fn a_pipe_directory_alone_is_the_way_of_all_slices() {
    let order = WantedLinks { slices_in: None, ..wanted() };
    let running = Linked { slices_in: None, ..linked() };
    let mut disk = Disk { stuck: texts(["pipe"]), ..Disk::new() };
    let mut links = Links::new(Some(order.clone()), None);
    links.lead(running, &order);
    links.apply(&mut disk, &drained(["s-0"])).unwrap();
    let why = "pipe can't be changed";
    assert_eq!(links.missing(), &missing(Some(why), &[("s-1", why)]), "s-0 is drained");
    disk.stuck.clear();
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!((links.missing(), disk.leading_to_ours()), (&missing(None, &[]), vec!["pipe"]));
    assert_eq!(disk.kept, texts(["pipe"]));
}

#[test]
fn one_of_before_with_its_socket_in_the_pipe_directory_needs_no_link_there() {
    let running = Linked { has_link: false, ..linked() };
    let mut disk = Disk::new();
    let mut links = Links::new(Some(wanted()), None);
    links.lead(running.clone(), &wanted());
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), ["s-0", "s-1"]);
    assert_eq!(disk.kept, texts(["s-0", "s-1"]));
    // The control daemon has its own socket in the pipe directory, so it needs no link there. If the order also has no
    // directories of slices, the service reads and changes nothing.
    disk.socket = Err("nobody may ask".to_owned());
    let order = WantedLinks { slices_in: None, ..wanted() };
    let mut links = Links::new(Some(order), Some(Linked { slices_in: None, ..running }));
    assert_eq!(links.apply(&mut disk, &none_drained()), Ok(()));
}

#[test]
fn an_order_with_another_pipe_directory_changes_nothing_until_the_next_one_runs() {
    let mut disk = Disk::new();
    let mut links = leading(&mut disk);
    let other = WantedLinks { pipe: "elsewhere", slices_in: Some("other slices"), ..wanted() };
    links.pursue(other.clone());
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!((links.slices_in(), disk.leading_to_ours()), (Some("slices"), vec!["pipe", "s-0", "s-1"]));
    links.end(&mut disk);
    assert!(disk.kept.is_empty());
    links.lead(Linked { pipe: "elsewhere", slices_in: Some("other slices"), ..linked() }, &other);
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(links.slices_in(), Some("other slices"));
    assert!(disk.pipes.contains_key("elsewhere"));
}

#[test]
fn other_directories_of_slices_are_taken_at_once() {
    let mut disk = Disk::new();
    let mut links = leading(&mut disk);
    let other = WantedLinks { slices_in: Some("other slices"), ..wanted() };
    links.pursue(other.clone());
    assert_eq!(links.slices_in(), Some("other slices"));
    links.end(&mut disk);
    assert!(disk.kept.is_empty(), "nobody comes back to the others");
}

#[test]
fn the_next_one_of_the_same_order_finds_its_directories_kept() {
    let mut disk = Disk::new();
    let mut links = leading(&mut disk);
    disk.pipes.clear();
    links.apply(&mut disk, &none_drained()).unwrap();
    links.end(&mut disk);
    assert_eq!(disk.kept, texts(["pipe", "s-0", "s-1"]));
    assert_eq!(links.take_events().0, [Way::Pipe].into(), "its news are told after its end");
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(links.missing(), &missing(None, &[]), "nobody runs");
    // The next control daemon has its limits, so all links turn from the waiting socket to its socket. A link that is missing
    // at this moment is made like the other links, and is not reported as removed by another program.
    links.lead(linked(), &retiring());
    disk.pipes.clear();
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(links.take_events(), no_news());
}

#[test]
fn the_door_of_the_next_one_leads_nobody_to_it_before_its_limits_are_told() {
    let mut disk = Disk::new();
    let mut links = leading(&mut disk);
    links.end(&mut disk);
    links.apply(&mut disk, &none_drained()).unwrap();
    // The service wants to end the control daemon after a failure, but the control daemon still runs.
    links.keep_waiting();
    links.apply(&mut disk, &none_drained()).unwrap();
    links.reopen_ways();
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), [""; 0]);
    links.lead(linked(), &wanted());
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.leading_to_ours(), ["pipe", "s-0", "s-1"]);
    for is_closed in [true, false] {
        if is_closed {
            links.keep_waiting();
        } else {
            links.reopen_ways();
        }
        links.apply(&mut disk, &none_drained()).unwrap();
        assert_eq!(disk.leading_to_ours().is_empty(), is_closed);
    }
}

#[test]
fn a_service_that_ends_gives_the_directories_back() {
    let mut disk = Disk::new();
    let mut links = leading(&mut disk);
    links.release(&mut disk);
    assert!(disk.kept.is_empty());
    links.apply(&mut disk, &none_drained()).unwrap();
    assert_eq!(disk.kept.len(), 3, "only for a moment");
    disk.kept.insert("elsewhere".to_owned());
    links.pursue(WantedLinks { pipe: "elsewhere", ..wanted() });
    links.release_for_good(&mut disk);
    assert!(disk.kept.is_empty());
    links.pursue(wanted());
    links.lead(linked(), &wanted());
    links.apply(&mut disk, &none_drained()).unwrap();
    assert!(disk.kept.is_empty() && disk.leading_to_ours().len() == 3);
}
