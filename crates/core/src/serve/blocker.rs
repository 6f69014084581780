//! The blockers of a running control daemon: the reasons why it does not serve its order. The kind of a blocker decides which
//! part of the code clears it, and which state is published. `docs/architecture.md` shows the states and blockers in a diagram.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::mem;

use super::fault::Fault;
use crate::CoreTime;
use crate::view::{ControlDaemonState, DaemonView};

/// A control daemon that does not answer this number of checks in a row counts as hung.
const MISSES: u32 = 5;

/// A reason why a running control daemon does not serve its order. [`Blocker::cleared_by`] says which part of the code clears
/// the blocker.
#[derive(Debug)]
pub(super) enum Blocker {
    /// A fatal GPU error has hit a server. The blocker is cleared when the server has recovered or has ended.
    Faulted(Fault),
    /// Another control daemon, with this PID, answers in the control daemon's directory. The blocker is cleared when the
    /// service's own control daemon answers there again.
    PlaceTaken(u32),
    /// The pipe directory was removed or replaced. The blocker is cleared when the control daemon can be reached.
    DirectoryGone(String),
    /// The control daemon has not answered `looks` checks in a row, at least `MISSES`, so the service ends it once it has no
    /// clients. An answer clears the blocker.
    Hung { looks: u32, error: String },
    /// The control daemon has not answered `looks` checks in a row, fewer than `MISSES`. An answer clears the blocker.
    Silent { looks: u32, error: String },
    /// Some users can't reach the control daemon's socket. The blocker is cleared when clients of every user can reach it.
    BadDirectory(String),
    /// The server has ended, and the next server starts at the moment `revive_at`. The start of a server clears the blocker.
    ServerEnded { reason: String, revive_at: CoreTime },
    /// The order needs another control daemon than the running one. An order that the running control daemon can serve clears
    /// the blocker.
    Misfit(String),
}

/// The part of the code that clears a blocker. The variants are in the order of gravity: `Healing` clears the gravest blocker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ClearedBy {
    Healing,
    /// The first part of each health check: it finds out which process answers in the control daemon's directory.
    Look,
    /// The second part of each health check: it examines the directories.
    Access,
    Revival,
    Order,
}

impl Blocker {
    pub(super) fn no_answer(error: String) -> Self {
        Self::unanswered(1, error)
    }

    fn unanswered(looks: u32, error: String) -> Self {
        if looks < MISSES { Self::Silent { looks, error } } else { Self::Hung { looks, error } }
    }

    pub(super) fn cleared_by(&self) -> ClearedBy {
        match self {
            Self::Faulted(_) => ClearedBy::Healing,
            Self::PlaceTaken(_) | Self::DirectoryGone(_) | Self::Hung { .. } | Self::Silent { .. } => {
                ClearedBy::Look
            }
            Self::BadDirectory(_) => ClearedBy::Access,
            Self::ServerEnded { .. } => ClearedBy::Revival,
            Self::Misfit(_) => ClearedBy::Order,
        }
    }

    fn ends_when_idle(&self) -> bool {
        match self {
            Self::PlaceTaken(_)
            | Self::DirectoryGone(_)
            | Self::BadDirectory(_)
            | Self::Hung { .. }
            | Self::Misfit(_) => true,
            Self::Faulted(_) | Self::Silent { .. } | Self::ServerEnded { .. } => false,
        }
    }

    fn describe(&self) -> String {
        match self {
            Self::Faulted(fault) => fault.reason(),
            Self::PlaceTaken(by) => {
                format!("another control daemon (PID {by}) listens in the directory of this control daemon")
            }
            Self::DirectoryGone(error) => {
                format!("the directory of the control daemon was removed or replaced ({error})")
            }
            Self::Hung { looks, error } => format!("{looks} times in a row: {error}"),
            Self::BadDirectory(text)
            | Self::Silent { error: text, .. }
            | Self::ServerEnded { reason: text, .. }
            | Self::Misfit(text) => text.clone(),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    None,
    /// The control daemon has answered the previous check, but not this check.
    FirstMiss,
    /// The control daemon answers again. It may have missed commands while it did not answer.
    AnswersAgain,
}

/// The present blockers, the gravest first. There is at most one blocker of each kind, except that each bad directory has its
/// own.
#[derive(Debug, Default)]
pub(super) struct Blockers(Vec<Blocker>);

impl Blockers {
    pub(super) fn put(&mut self, blocker: Blocker) {
        let is_replaced = |one: &Blocker| match (one, &blocker) {
            (Blocker::BadDirectory(one), Blocker::BadDirectory(other)) => one == other,
            _ => mem::discriminant(one) == mem::discriminant(&blocker),
        };
        if let Some(one) = self.0.iter_mut().find(|one| is_replaced(one)) {
            *one = blocker;
            return;
        }
        let place = self.0.partition_point(|one| one.cleared_by() <= blocker.cleared_by());
        self.0.insert(place, blocker);
    }

    pub(super) fn clear(&mut self, by: ClearedBy) {
        self.0.retain(|one| one.cleared_by() != by);
    }

    pub(super) fn has(&self, by: ClearedBy) -> bool {
        self.all_cleared_by(by).next().is_some()
    }

    fn all_cleared_by(&self, by: ClearedBy) -> impl Iterator<Item = &Blocker> {
        self.0.iter().filter(move |one| one.cleared_by() == by)
    }

    fn describe(&self, by: ClearedBy) -> String {
        self.all_cleared_by(by).map(Blocker::describe).collect::<Vec<_>>().join("; ")
    }

    /// Records the result of the first part of a health check. `look` is None if the service's own control daemon answers in
    /// its directory, as it should.
    pub(super) fn observe(&mut self, look: Option<Blocker>) -> Change {
        let before = self.0.extract_if(.., |one| one.cleared_by() == ClearedBy::Look).next();
        let change = match (&look, &before) {
            (None, Some(_)) => Change::AnswersAgain,
            (Some(Blocker::Silent { .. }), None) => Change::FirstMiss,
            _ => Change::None,
        };
        let after = match (look, before) {
            (
                Some(Blocker::Silent { error, .. }),
                Some(Blocker::Silent { looks, .. } | Blocker::Hung { looks, .. }),
            ) => Some(Blocker::unanswered(looks + 1, error)),
            // A graver blocker already makes the service end the control daemon once it has no client. A missing answer does
            // not replace the graver blocker.
            (Some(Blocker::Silent { .. }), Some(graver)) => Some(graver),
            (found, _) => found,
        };
        if let Some(after) = after {
            self.put(after);
        }
        change
    }

    pub(super) fn has_failed_check(&self) -> bool {
        self.is_unreached() || self.has(ClearedBy::Access)
    }

    pub(super) fn is_silent(&self) -> bool {
        self.0.iter().any(|one| matches!(one, Blocker::Silent { .. } | Blocker::Hung { .. }))
    }

    /// Returns whether commands can't reach the control daemon: at the last check, another control daemon has answered in its
    /// directory, or no process has answered.
    pub(super) fn is_unreached(&self) -> bool {
        self.has(ClearedBy::Look)
    }

    pub(super) fn fault(&self) -> Option<&Fault> {
        self.0.iter().find_map(|one| match one {
            Blocker::Faulted(fault) => Some(fault),
            _ => None,
        })
    }

    pub(super) fn fault_mut(&mut self) -> Option<&mut Fault> {
        self.0.iter_mut().find_map(|one| match one {
            Blocker::Faulted(fault) => Some(fault),
            _ => None,
        })
    }

    pub(super) fn revival(&self) -> Option<(CoreTime, &str)> {
        self.0.iter().find_map(|one| match one {
            Blocker::ServerEnded { reason, revive_at } => Some((*revive_at, reason.as_str())),
            _ => None,
        })
    }

    pub(super) fn ends_when_idle(&self) -> bool {
        self.0.iter().any(Blocker::ends_when_idle)
    }

    /// The reason why the service ends the control daemon once it has no client. None if the service does not end it.
    pub(super) fn why_it_ends(&self) -> Option<String> {
        let blocker = self.0.iter().rev().find(|blocker| blocker.ends_when_idle())?;
        Some(self.describe(blocker.cleared_by()))
    }

    /// Publishes the state of a running control daemon. Without a blocker, the published state changes only once the control
    /// daemon has its limits and a server. `clients_unknown` is the reason why the service can't find out if the control daemon
    /// has clients.
    pub(super) fn show(&self, view: &mut DaemonView, progress: Progress, clients_unknown: Option<&str>) {
        let Progress { configured, in_place, leads, retiring } = progress;
        (view.ends_when_idle, view.retiring) = (self.ends_when_idle(), retiring);
        let ended = if retiring { "ended" } else { "restarted" };
        let gravest = self.0.first();
        let (state, then) = match gravest {
            None if !configured => return,
            None => (ControlDaemonState::Ready, String::new()),
            Some(Blocker::Faulted(_)) => (ControlDaemonState::Faulted, String::new()),
            Some(Blocker::ServerEnded { .. }) => (ControlDaemonState::Backoff, String::new()),
            Some(
                Blocker::PlaceTaken(_)
                | Blocker::DirectoryGone(_)
                | Blocker::BadDirectory(_)
                | Blocker::Hung { .. },
            ) => (
                ControlDaemonState::Waiting,
                format!("; the control daemon is {ended} when its clients have ended"),
            ),
            Some(Blocker::Silent { .. }) => {
                let then = format!(
                    "; the service asks the control daemon again, and the control daemon is {ended} if it \
                     still does not answer and has no clients"
                );
                (ControlDaemonState::Waiting, then)
            }
            Some(Blocker::Misfit(_)) => {
                let then =
                    if retiring { " and ends" } else { ", for which the control daemon has to restart" };
                let force = "`yunion-mpsctl apply --force` ends the clients";
                (ControlDaemonState::Waiting, format!("{then} when its clients have ended; {force}"))
            }
        };
        let why = gravest.map(|gravest| self.describe(gravest.cleared_by())).unwrap_or_default();
        let unknown = clients_unknown.map(|why| {
            format!(
                "; the clients of the control daemon are not known ({why}), and `yunion-mpsctl apply \
                 --force` ends the control daemon with its clients"
            )
        });
        let unknown = unknown.unwrap_or_default();
        // A control daemon that does not fit its order still serves clients. The service ends the control daemon once a check
        // finds no client.
        let misfit = matches!(gravest, Some(Blocker::Misfit(_)));
        let may_serve = configured && (misfit || gravest.is_none());
        if may_serve && !leads && !retiring {
            let why = if why.is_empty() { why } else { why + ": " };
            let reason =
                format!("{why}the control daemon is about to restart, and new programs wait{unknown}");
            view.settled = false;
            return view.pass_through(ControlDaemonState::Starting, false, &reason);
        }
        let (serving, reason) = (may_serve && in_place && leads, why + &then + &unknown);
        if misfit {
            view.pass_through(state, serving, &reason);
        } else {
            view.enter(state, serving, &reason);
        }
    }
}

// Each bool is an independent fact, so an enum can't replace the bools.
#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    pub(super) configured: bool,
    /// True if the control daemon uses the pipe directory that the order names.
    pub(super) in_place: bool,
    /// True if new programs can reach the control daemon through its links.
    pub(super) leads: bool,
    pub(super) retiring: bool,
}

#[cfg(test)]
mod tests {
    use alloc::borrow::ToOwned;
    use alloc::vec;
    use alloc::vec::Vec;

    use super::*;

    const NOW: CoreTime = CoreTime::ZERO;

    fn silent(looks: u32) -> Blocker {
        Blocker::Silent { looks, error: "no answer".to_owned() }
    }

    fn hung(looks: u32) -> Blocker {
        Blocker::Hung { looks, error: "no answer".to_owned() }
    }

    fn directory_gone() -> Blocker {
        Blocker::DirectoryGone("gone".to_owned())
    }

    fn bad_directory() -> Blocker {
        Blocker::BadDirectory("mode 0700".to_owned())
    }

    fn misfit() -> Blocker {
        Blocker::Misfit("it has other GPUs".to_owned())
    }

    fn server_ended() -> Blocker {
        Blocker::ServerEnded { reason: "server 9 has ended".to_owned(), revive_at: NOW }
    }

    /// The view of a control daemon with these blockers. The state is `Stopping` if `show` has not changed the state.
    fn view(blockers: &Blockers, progress: Progress) -> DaemonView {
        let mut view = DaemonView { state: ControlDaemonState::Stopping, ..DaemonView::default() };
        blockers.show(&mut view, progress, None);
        view
    }

    fn all_of(blockers: impl IntoIterator<Item = Blocker>) -> Blockers {
        let mut all = Blockers::default();
        blockers.into_iter().for_each(|blocker| all.put(blocker));
        all
    }

    #[test]
    fn a_look_leads_from_each_blocker_to_the_next() {
        let taken = || Blocker::PlaceTaken(7);
        let no_answer = || Some(Blocker::no_answer("no answer".to_owned()));
        let answers = || None;
        let table = [
            (None, answers(), None, Change::None),
            (None, no_answer(), Some(silent(1)), Change::FirstMiss),
            (Some(silent(1)), no_answer(), Some(silent(2)), Change::None),
            (Some(silent(MISSES - 1)), no_answer(), Some(hung(MISSES)), Change::None),
            (Some(hung(MISSES)), no_answer(), Some(hung(MISSES + 1)), Change::None),
            (Some(silent(1)), answers(), None, Change::AnswersAgain),
            (Some(hung(MISSES)), answers(), None, Change::AnswersAgain),
            (None, Some(taken()), Some(taken()), Change::None),
            (Some(silent(3)), Some(taken()), Some(taken()), Change::None),
            (Some(taken()), no_answer(), Some(taken()), Change::None),
            (Some(taken()), answers(), None, Change::AnswersAgain),
            (None, Some(directory_gone()), Some(directory_gone()), Change::None),
            (Some(silent(1)), Some(directory_gone()), Some(directory_gone()), Change::None),
            (Some(directory_gone()), no_answer(), Some(directory_gone()), Change::None),
            (Some(directory_gone()), answers(), None, Change::AnswersAgain),
        ];
        for (before, look, after, change) in table {
            let row = format!("{before:?}, then {look:?}");
            let mut blockers = all_of(before);
            assert_eq!(blockers.observe(look), change, "{row}");
            assert_eq!(format!("{:?}", blockers.0.into_iter().next()), format!("{after:?}"), "{row}");
        }
    }

    #[test]
    fn each_is_cleared_by_its_own_alone() {
        use ClearedBy::{Access, Healing, Look, Order, Revival};
        let faulted = Blocker::Faulted(Fault::new(9, NOW));
        let mut all = all_of([faulted, hung(MISSES), bad_directory(), server_ended(), misfit()]);
        let kept = |blockers: &Blockers| blockers.0.iter().map(Blocker::cleared_by).collect::<Vec<_>>();
        assert_eq!(kept(&all), [Healing, Look, Access, Revival, Order], "none takes the place of another");
        all.observe(None);
        assert_eq!(kept(&all), [Healing, Access, Revival, Order]);
        for by in [Healing, Access, Revival, Order] {
            let before = kept(&all).len();
            all.clear(by);
            assert!(!all.has(by) && kept(&all).len() == before - 1, "{by:?}");
        }
    }

    #[test]
    fn each_bad_directory_is_named_once() {
        let bad = |name: &str| Blocker::BadDirectory(format!("{name}: mode 0700"));
        let mut all = all_of([bad("/a"), misfit(), bad("/b"), bad("/a")]);
        let progress = Progress { configured: true, in_place: true, leads: true, retiring: false };
        let reason = view(&all, progress).reason;
        assert!(
            reason.starts_with("/a: mode 0700; /b: mode 0700; the control daemon is restarted"),
            "{reason}"
        );
        all.clear(ClearedBy::Access);
        assert!(!all.has(ClearedBy::Access) && all.has(ClearedBy::Order));
    }

    /// A hung control daemon may have a bad directory too. The service must then still know that no command reaches the control
    /// daemon.
    #[test]
    fn a_bad_directory_hides_no_silence() {
        let mut blockers = all_of([bad_directory()]);
        for _ in 0..MISSES {
            blockers.observe(Some(Blocker::no_answer("no answer".to_owned())));
        }
        assert!(blockers.is_unreached() && blockers.is_silent());
        blockers.observe(None);
        assert!(!blockers.is_unreached() && blockers.has(ClearedBy::Access));
    }

    #[test]
    fn what_is_shown_is_the_gravest() {
        use ControlDaemonState::{Backoff, Faulted, Ready, Waiting};
        let taken = Blocker::PlaceTaken(7);
        let table: [(Vec<Blocker>, _, bool, bool, &str); 11] = [
            (vec![], Ready, true, true, ""),
            (vec![misfit()], Waiting, true, false, "for which the control daemon has to restart"),
            (vec![misfit(), server_ended()], Backoff, false, true, "server 9 has ended"),
            (vec![silent(1), server_ended()], Waiting, false, true, "asks the control daemon again"),
            (
                vec![hung(5)],
                Waiting,
                false,
                true,
                "5 times in a row: no answer; the control daemon is restarted",
            ),
            (vec![taken], Waiting, false, true, "another control daemon (PID 7) listens in"),
            (vec![directory_gone()], Waiting, false, true, "was removed or replaced (gone)"),
            (
                vec![bad_directory(), misfit()],
                Waiting,
                false,
                true,
                "mode 0700; the control daemon is restarted",
            ),
            (vec![Blocker::Faulted(Fault::new(9, NOW))], Faulted, false, true, "server 9 met a fatal"),
            (vec![Blocker::Faulted(Fault::new(9, NOW)), silent(1)], Faulted, false, true, "server 9 met"),
            (vec![Blocker::Faulted(Fault::new(9, NOW)), misfit()], Faulted, false, true, "server 9 met"),
        ];
        for (blockers, state, serving, settled, words) in table {
            let row = format!("{blockers:?}");
            let progress = Progress { configured: true, in_place: true, leads: true, retiring: false };
            let shown = view(&all_of(blockers), progress);
            assert_eq!((shown.state, shown.serving, shown.settled), (state, serving, settled), "{row}");
            assert!(shown.reason.contains(words), "{row}: {}", shown.reason);
        }
    }

    #[test]
    fn progress_decides_who_is_served() {
        let progress =
            |configured, in_place, retiring| Progress { configured, in_place, leads: true, retiring };
        let on_its_way = view(&all_of([]), progress(false, true, false));
        assert_eq!(on_its_way.state, ControlDaemonState::Stopping, "the state stays");
        let ready = view(&all_of([]), progress(true, true, false));
        assert!(ready.serving && ready.reason.is_empty());
        assert!(!view(&all_of([]), progress(true, false, false)).serving);
        assert!(!view(&all_of([misfit()]), progress(true, false, false)).serving);
        let closed = Progress { leads: false, ..progress(true, true, false) };
        let closed = view(&all_of([misfit()]), closed);
        assert_eq!(
            (closed.state, closed.serving, closed.settled),
            (ControlDaemonState::Starting, false, false)
        );
        let retiring = view(&all_of([misfit()]), progress(true, true, true)).reason;
        assert!(retiring.starts_with("it has other GPUs and ends when its clients have ended"), "{retiring}");
        let retiring = view(&all_of([hung(5)]), progress(true, true, true)).reason;
        assert!(retiring.ends_with("the control daemon is ended when its clients have ended"), "{retiring}");
    }

    #[test]
    fn it_ends_when_idle_for_some_alone() {
        let ends = [directory_gone(), bad_directory(), hung(MISSES), Blocker::PlaceTaken(7), misfit()];
        for blocker in ends {
            let row = format!("{blocker:?}");
            let blockers = all_of([silent(1), blocker]);
            assert!(blockers.ends_when_idle() && blockers.why_it_ends().is_some(), "{row}");
        }
        let stays = all_of([Blocker::Faulted(Fault::new(9, NOW)), silent(MISSES - 1), server_ended()]);
        assert!(!stays.ends_when_idle() && stays.why_it_ends().is_none());
        assert_eq!(all_of([hung(MISSES), misfit()]).why_it_ends().as_deref(), Some("it has other GPUs"));
    }

    #[test]
    fn the_document_has_the_same_table() {
        const DOCUMENT: &str = include_str!("../../../../docs/architecture.md");
        let taken = Blocker::PlaceTaken(7);
        let fault = Blocker::Faulted(Fault::new(9, NOW));
        let in_order =
            [fault, taken, directory_gone(), hung(5), silent(1), bad_directory(), server_ended(), misfit()];
        let section = DOCUMENT.split("## States of a control daemon").nth(1).unwrap();
        let mut rows = section.lines().skip_while(|line| !line.starts_with("|---")).skip(1);
        for blocker in in_order {
            let (debug, by, ends) = (format!("{blocker:?}"), blocker.cleared_by(), blocker.ends_when_idle());
            let name = debug.split(|c: char| !c.is_ascii_alphabetic()).next().unwrap();
            let progress = Progress { configured: true, in_place: true, leads: true, retiring: false };
            let state = format!("{:?}", view(&all_of([blocker]), progress).state).to_lowercase();
            let row = format!("| `{name}` | `{by:?}` | {state} | {} | ", if ends { "yes" } else { "no" });
            let found = rows.next().unwrap_or_default();
            assert!(found.starts_with(&row), "{found}: {row}");
        }
    }
}
