//! What keeps a control daemon that runs from serving its order, who clears it, and what is shown meanwhile. Nothing here
//! asks a process or a clock. `docs/architecture.md` has the diagram.

use std::collections::BTreeMap;

use tokio::time::Instant;

use crate::supervisor::view::ControlDaemonState;

use super::heal::Fault;

/// How many looks in a row must end without an answer before a control daemon counts as hung.
const MISSES: u32 = 5;

/// What keeps a control daemon that runs from serving its order. [`Hindrance::cleared_by`] says who clears it.
#[derive(Debug)]
pub(super) enum Hindrance {
    /// A server met a fatal GPU error. Healing clears it when the server is well again or has ended.
    Faulted(Fault),
    /// Another control daemon answers in its pipe directory. A check clears it when ours answers there.
    PlaceTaken {
        /// The PID of the other one.
        by: u32,
    },
    /// Its pipe directory was removed or replaced. A check clears it when the control daemon can be reached.
    DirectoryGone {
        /// What was found.
        error: String,
    },
    /// Clients of other users can't get to its socket. A check clears it when they can.
    BadDirectory {
        /// What was found.
        error: String,
    },
    /// It has not answered for so many looks that it is ended once it has no clients. A check clears it with an answer.
    Hung {
        /// How many looks in a row have ended without an answer.
        looks: u32,
        /// How the last one ended.
        error: String,
    },
    /// It does not answer. A check clears it with an answer.
    Silent {
        /// How many looks in a row have ended without an answer.
        looks: u32,
        /// How the last one ended.
        error: String,
    },
    /// Its server has ended, and the next one is not started yet. Revival clears it by starting one.
    ServerEnded {
        /// How it ended.
        reason: String,
        /// When the next one is to be started.
        revive_at: Instant,
    },
    /// The order needs another control daemon than the one that runs. An order clears it that fits what runs.
    Misfit {
        /// What of the order does not fit.
        why: String,
    },
}

/// Who clears a hindrance. Each has one hindrance at most, and leaves the others alone; the gravest comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ClearedBy {
    /// `heal`.
    Healing,
    /// The regular check.
    Check,
    /// `revive`.
    Revival,
    /// The order, compared with what runs.
    Order,
}

impl Hindrance {
    /// Who clears it. Nobody else does.
    pub(super) fn cleared_by(&self) -> ClearedBy {
        match self {
            Self::Faulted(_) => ClearedBy::Healing,
            Self::PlaceTaken { .. }
            | Self::DirectoryGone { .. }
            | Self::BadDirectory { .. }
            | Self::Hung { .. }
            | Self::Silent { .. } => ClearedBy::Check,
            Self::ServerEnded { .. } => ClearedBy::Revival,
            Self::Misfit { .. } => ClearedBy::Order,
        }
    }

    /// Whether the control daemon is ended for it as soon as it has no client.
    fn ends_when_idle(&self) -> bool {
        match self {
            Self::PlaceTaken { .. }
            | Self::DirectoryGone { .. }
            | Self::BadDirectory { .. }
            | Self::Hung { .. }
            | Self::Misfit { .. } => true,
            Self::Faulted(_) | Self::Silent { .. } | Self::ServerEnded { .. } => false,
        }
    }

    /// What it is, for people.
    fn in_words(&self) -> String {
        match self {
            Self::Faulted(fault) => fault.reason(),
            Self::PlaceTaken { by } => {
                format!("another control daemon (PID {by}) has taken its pipe directory")
            }
            Self::DirectoryGone { error } => format!("its pipe directory was removed or replaced ({error})"),
            Self::Hung { looks, error } => format!("{error}, {looks} times in a row"),
            Self::BadDirectory { error } | Self::Silent { error, .. } => error.clone(),
            Self::ServerEnded { reason, .. } => reason.clone(),
            Self::Misfit { why } => why.clone(),
        }
    }
}

/// What a look at the control daemon finds.
#[derive(Debug)]
pub(super) enum Look {
    /// It answers.
    Answers,
    /// It does not answer.
    NoAnswer(String),
    /// Another one answers, which has this PID.
    Another(u32),
    /// Nobody listens where it should.
    Nobody(String),
    /// Its pipe directory keeps users out, and can't be mended.
    KeptOut(String),
}

/// What a look has changed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum News {
    /// Nothing that is told.
    None,
    /// It has answered until now.
    FirstMiss,
    /// It can be told something again: it may have missed something meanwhile.
    AnswersAgain,
}

/// All that hinders a control daemon at present.
#[derive(Debug, Default)]
pub(super) struct Hindrances(BTreeMap<ClearedBy, Hindrance>);

impl Hindrances {
    pub(super) fn put(&mut self, hindrance: Hindrance) {
        self.0.insert(hindrance.cleared_by(), hindrance);
    }

    /// To be called by the one who clears them.
    pub(super) fn clear(&mut self, by: ClearedBy) {
        self.0.remove(&by);
    }

    pub(super) fn has(&self, by: ClearedBy) -> bool {
        self.0.contains_key(&by)
    }

    /// Takes in a look at the control daemon.
    pub(super) fn take_in(&mut self, look: Look) -> News {
        let before = self.0.remove(&ClearedBy::Check);
        let unreached = before.as_ref().is_some_and(is_unreached);
        let news = match (&look, &before) {
            (Look::Answers, _) if unreached => News::AnswersAgain,
            (Look::NoAnswer(_), None) => News::FirstMiss,
            _ => News::None,
        };
        if let Some(after) = after(before, look) {
            self.put(after);
        }
        news
    }

    /// Whether it does not answer.
    pub(super) fn is_silent(&self) -> bool {
        let check = self.0.get(&ClearedBy::Check);
        matches!(check, Some(Hindrance::Silent { .. } | Hindrance::Hung { .. }))
    }

    /// Whether there is no use in telling it anything.
    pub(super) fn is_unreached(&self) -> bool {
        self.0.get(&ClearedBy::Check).is_some_and(is_unreached)
    }

    pub(super) fn fault(&self) -> Option<&Fault> {
        match self.0.get(&ClearedBy::Healing) {
            Some(Hindrance::Faulted(fault)) => Some(fault),
            _ => None,
        }
    }

    pub(super) fn fault_mut(&mut self) -> Option<&mut Fault> {
        match self.0.get_mut(&ClearedBy::Healing) {
            Some(Hindrance::Faulted(fault)) => Some(fault),
            _ => None,
        }
    }

    /// When the next server is to be started, and why.
    pub(super) fn revival(&self) -> Option<(Instant, &str)> {
        match self.0.get(&ClearedBy::Revival) {
            Some(Hindrance::ServerEnded { reason, revive_at }) => Some((*revive_at, reason)),
            _ => None,
        }
    }

    /// Whether the control daemon is to be ended as soon as it has no client.
    pub(super) fn ends_when_idle(&self) -> bool {
        self.0.values().any(Hindrance::ends_when_idle)
    }

    /// Why it is to be ended as soon as it has no client.
    pub(super) fn why_it_ends(&self) -> Option<String> {
        self.0.values().rev().find(|hindrance| hindrance.ends_when_idle()).map(Hindrance::in_words)
    }

    /// What is shown of a control daemon that runs; None leaves what was shown before.
    pub(super) fn shown(&self, progress: Progress) -> Option<Shown> {
        let Progress { configured, in_place, retiring } = progress;
        let ended = if retiring { "ended" } else { "started anew" };
        let gravest = self.0.values().next();
        let words = gravest.map(Hindrance::in_words).unwrap_or_default();
        let stays = |state, reason| Shown { state, serving: false, settled: true, reason };
        Some(match gravest {
            Some(Hindrance::Faulted(_)) => stays(ControlDaemonState::Faulted, words),
            Some(
                Hindrance::PlaceTaken { .. }
                | Hindrance::DirectoryGone { .. }
                | Hindrance::BadDirectory { .. }
                | Hindrance::Hung { .. },
            ) => {
                let reason = format!("{words}; it is {ended} when its clients have ended");
                stays(ControlDaemonState::Waiting, reason)
            }
            Some(Hindrance::Silent { .. }) => {
                let reason = format!(
                    "{words}; it is asked again and again, and {ended} if it stays so and has no clients"
                );
                stays(ControlDaemonState::Waiting, reason)
            }
            Some(Hindrance::ServerEnded { .. }) => stays(ControlDaemonState::Backoff, words),
            Some(Hindrance::Misfit { .. }) => {
                let then =
                    if retiring { " and ends" } else { ", for which the control daemon has to start anew" };
                let reason = format!(
                    "{words}{then} when its clients have ended; `yunion-mpsctl apply --force` ends them"
                );
                // Nobody has asked yet whether it has clients.
                Shown { state: ControlDaemonState::Waiting, serving: in_place, settled: false, reason }
            }
            None if configured => Shown {
                state: ControlDaemonState::Ready,
                serving: in_place,
                settled: true,
                reason: String::new(),
            },
            None => return None,
        })
    }
}

/// How far a control daemon that runs has come on the way to its order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Progress {
    /// It has been made to serve.
    pub(super) configured: bool,
    /// It has the pipe directory of the order.
    pub(super) in_place: bool,
    /// It is to end once it has no clients.
    pub(super) retiring: bool,
}

/// What is shown of a control daemon.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shown {
    pub(super) state: ControlDaemonState,
    /// Whether a client that comes now is served as planned.
    pub(super) serving: bool,
    /// Whether it stays in this state for now.
    pub(super) settled: bool,
    pub(super) reason: String,
}

fn is_unreached(hindrance: &Hindrance) -> bool {
    matches!(
        hindrance,
        Hindrance::Silent { .. }
            | Hindrance::Hung { .. }
            | Hindrance::PlaceTaken { .. }
            | Hindrance::DirectoryGone { .. }
    )
}

/// What hinders the control daemon after a look, of what a check clears.
fn after(before: Option<Hindrance>, look: Look) -> Option<Hindrance> {
    match (look, before) {
        (Look::Answers, _) => None,
        (Look::Another(by), _) => Some(Hindrance::PlaceTaken { by }),
        (Look::Nobody(error), _) => Some(Hindrance::DirectoryGone { error }),
        (Look::KeptOut(error), _) => Some(Hindrance::BadDirectory { error }),
        (Look::NoAnswer(error), None) => Some(Hindrance::Silent { looks: 1, error }),
        (Look::NoAnswer(error), Some(Hindrance::Silent { looks, .. } | Hindrance::Hung { looks, .. })) => {
            let looks = looks + 1;
            Some(if looks < MISSES {
                Hindrance::Silent { looks, error }
            } else {
                Hindrance::Hung { looks, error }
            })
        }
        // It is ended when it has no clients, whether or not it answers.
        (Look::NoAnswer(_), graver) => graver,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn silent(looks: u32) -> Hindrance {
        Hindrance::Silent { looks, error: "no answer".to_owned() }
    }

    fn hung(looks: u32) -> Hindrance {
        Hindrance::Hung { looks, error: "no answer".to_owned() }
    }

    fn no_answer() -> Look {
        Look::NoAnswer("no answer".to_owned())
    }

    fn directory_gone() -> Hindrance {
        Hindrance::DirectoryGone { error: "gone".to_owned() }
    }

    fn bad_directory() -> Hindrance {
        Hindrance::BadDirectory { error: "mode 0700".to_owned() }
    }

    fn misfit() -> Hindrance {
        Hindrance::Misfit { why: "it has other GPUs".to_owned() }
    }

    fn server_ended() -> Hindrance {
        Hindrance::ServerEnded { reason: "server 9 has ended".to_owned(), revive_at: Instant::now() }
    }

    fn of(hindrances: impl IntoIterator<Item = Hindrance>) -> Hindrances {
        let mut all = Hindrances::default();
        hindrances.into_iter().for_each(|hindrance| all.put(hindrance));
        all
    }

    #[test]
    fn a_look_leads_from_each_hindrance_to_the_next() {
        let taken = || Hindrance::PlaceTaken { by: 7 };
        let another = || Look::Another(7);
        let nobody = || Look::Nobody("gone".to_owned());
        let kept_out = || Look::KeptOut("mode 0700".to_owned());
        let table = [
            (None, Look::Answers, None, News::None),
            (None, no_answer(), Some(silent(1)), News::FirstMiss),
            (Some(silent(1)), no_answer(), Some(silent(2)), News::None),
            (Some(silent(MISSES - 1)), no_answer(), Some(hung(MISSES)), News::None),
            (Some(hung(MISSES)), no_answer(), Some(hung(MISSES + 1)), News::None),
            (Some(silent(1)), Look::Answers, None, News::AnswersAgain),
            (Some(hung(MISSES)), Look::Answers, None, News::AnswersAgain),
            (None, another(), Some(taken()), News::None),
            (Some(silent(3)), another(), Some(taken()), News::None),
            (Some(taken()), no_answer(), Some(taken()), News::None),
            (Some(taken()), Look::Answers, None, News::AnswersAgain),
            (None, nobody(), Some(directory_gone()), News::None),
            (Some(silent(1)), nobody(), Some(directory_gone()), News::None),
            (Some(directory_gone()), no_answer(), Some(directory_gone()), News::None),
            (Some(directory_gone()), Look::Answers, None, News::AnswersAgain),
            (None, kept_out(), Some(bad_directory()), News::None),
            (Some(bad_directory()), no_answer(), Some(bad_directory()), News::None),
            (Some(bad_directory()), Look::Answers, None, News::None),
        ];
        for (before, look, after, news) in table {
            let row = format!("{before:?}, then {look:?}");
            let mut hindrances = of(before);
            assert_eq!(hindrances.take_in(look), news, "{row}");
            assert_eq!(format!("{:?}", hindrances.0.into_values().next()), format!("{after:?}"), "{row}");
        }
    }

    #[test]
    fn each_is_cleared_by_its_own_alone() {
        let all = || of([Hindrance::Faulted(Fault::new(9)), hung(MISSES), server_ended(), misfit()]);
        let mut hindrances = all();
        hindrances.take_in(Look::Answers);
        let left: Vec<_> = hindrances.0.keys().copied().collect();
        assert_eq!(left, [ClearedBy::Healing, ClearedBy::Revival, ClearedBy::Order]);
        for by in [ClearedBy::Healing, ClearedBy::Check, ClearedBy::Revival, ClearedBy::Order] {
            let mut hindrances = all();
            hindrances.clear(by);
            assert!(!hindrances.has(by) && hindrances.0.len() == 3, "{by:?}");
        }
    }

    #[test]
    fn what_is_shown_is_the_gravest() {
        use ControlDaemonState::{Backoff, Faulted, Ready, Waiting};
        let taken = Hindrance::PlaceTaken { by: 7 };
        let table: [(Vec<Hindrance>, _, bool, bool, &str); 11] = [
            (vec![], Some(Ready), true, true, ""),
            (vec![misfit()], Some(Waiting), true, false, "for which the control daemon has to start anew"),
            (vec![misfit(), server_ended()], Some(Backoff), false, true, "server 9 has ended"),
            (vec![silent(1), server_ended()], Some(Waiting), false, true, "it is asked again and again"),
            (vec![hung(5)], Some(Waiting), false, true, "no answer, 5 times in a row; it is started anew"),
            (vec![taken], Some(Waiting), false, true, "another control daemon (PID 7) has taken"),
            (vec![directory_gone()], Some(Waiting), false, true, "was removed or replaced (gone)"),
            (vec![bad_directory(), misfit()], Some(Waiting), false, true, "mode 0700; it is started anew"),
            (vec![Hindrance::Faulted(Fault::new(9))], Some(Faulted), false, true, "server 9 met a fatal"),
            (vec![Hindrance::Faulted(Fault::new(9)), silent(1)], Some(Faulted), false, true, "server 9 met"),
            (vec![Hindrance::Faulted(Fault::new(9)), misfit()], Some(Faulted), false, true, "server 9 met"),
        ];
        for (hindrances, state, serving, settled, words) in table {
            let row = format!("{hindrances:?}");
            let progress = Progress { configured: true, in_place: true, retiring: false };
            let shown = of(hindrances).shown(progress).unwrap();
            assert_eq!((Some(shown.state), shown.serving, shown.settled), (state, serving, settled), "{row}");
            assert!(shown.reason.contains(words), "{row}: {}", shown.reason);
        }
    }

    #[test]
    fn progress_decides_who_is_served() {
        let progress = |configured, in_place, retiring| Progress { configured, in_place, retiring };
        assert_eq!(of([]).shown(progress(false, true, false)), None, "it is on its way");
        let ready = of([]).shown(progress(true, true, false)).unwrap();
        assert!(ready.serving && ready.reason.is_empty());
        assert!(!of([]).shown(progress(true, false, false)).unwrap().serving);
        assert!(!of([misfit()]).shown(progress(true, false, false)).unwrap().serving);
        let retiring = of([misfit()]).shown(progress(true, true, true)).unwrap().reason;
        assert!(retiring.starts_with("it has other GPUs and ends when its clients have ended"), "{retiring}");
        let retiring = of([hung(5)]).shown(progress(true, true, true)).unwrap().reason;
        assert!(retiring.ends_with("it is ended when its clients have ended"), "{retiring}");
    }

    #[test]
    fn it_ends_when_idle_for_some_alone() {
        let ends =
            [directory_gone(), bad_directory(), hung(MISSES), Hindrance::PlaceTaken { by: 7 }, misfit()];
        for hindrance in ends {
            let row = format!("{hindrance:?}");
            let hindrances = of([silent(1), hindrance]);
            assert!(hindrances.ends_when_idle() && hindrances.why_it_ends().is_some(), "{row}");
        }
        let stays = of([Hindrance::Faulted(Fault::new(9)), silent(MISSES - 1), server_ended()]);
        assert!(!stays.ends_when_idle() && stays.why_it_ends().is_none());
        assert_eq!(of([hung(MISSES), misfit()]).why_it_ends().as_deref(), Some("it has other GPUs"));
    }
}
