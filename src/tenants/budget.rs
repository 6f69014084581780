//! The budget of a slice: the memory and the number of all its clients together. The driver limits each process alone.
//! Nothing here asks a process, a GPU or a clock.

use std::collections::BTreeSet;

use crate::counted::counted;
use crate::membership::KnownBy;
use crate::mps::identity::Identity;

/// The most that the clients of a slice may have together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Budget {
    pub memory_mib: u64,
    pub max_clients: u32,
}

/// A part of a budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Memory,
    Clients,
}

impl Part {
    /// The word in the signal on D-Bus.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Clients => "clients",
        }
    }
}

/// A client of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Member {
    pub process: Identity,
    /// None if the driver does not report it.
    pub memory_mib: Option<u64>,
    pub known_by: KnownBy,
    /// Whether its work must not be ended, or can't be.
    pub stays: bool,
}

/// All that the clients of a slice have together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct InUse {
    pub clients: u32,
    /// None if the driver does not report it for one of them.
    pub memory_mib: Option<u64>,
}

impl InUse {
    pub(super) fn by<'m>(members: impl IntoIterator<Item = &'m Member>) -> Self {
        let nothing = Self { clients: 0, memory_mib: Some(0) };
        members.into_iter().fold(nothing, |all, member| Self {
            clients: all.clients.saturating_add(1),
            memory_mib: all.memory_mib.and_then(|memory| memory.checked_add(member.memory_mib?)),
        })
    }

    /// The parts of the budget that this is more than. Memory that is not known is never too much.
    pub(super) fn exceeds(&self, budget: Budget) -> BTreeSet<Part> {
        let memory = self.memory_mib.is_some_and(|memory| memory > budget.memory_mib);
        let parts = [(Part::Memory, memory), (Part::Clients, self.clients > budget.max_clients)];
        parts.into_iter().filter_map(|(part, exceeded)| exceeded.then_some(part)).collect()
    }
}

/// The members that have to end their work so that the rest fits, in this order. The newest goes first. A process that is known
/// by its environment goes before all that are known by a mount: a program on the host can forge an environment, and so
/// must not be able to have the work of a container ended. The last member fits, since the driver binds it by itself.
pub(super) fn victims(budget: Budget, members: &[Member]) -> Vec<Identity> {
    let mut rest: Vec<&Member> = members.iter().collect();
    let newest_last = |member: &&Member| {
        (member.known_by == KnownBy::Environment, member.process.start_time, member.process.pid)
    };
    rest.sort_by_key(newest_last);
    let mut victims = Vec::new();
    while rest.len() > 1 && !InUse::by(rest.iter().copied()).exceeds(budget).is_empty() {
        let Some(next) = rest.iter().rposition(|member| !member.stays) else { break };
        victims.push(rest.remove(next).process);
    }
    victims
}

/// These parts of a budget that is exceeded, in words that stay the same while the clients change.
pub(super) fn in_words(budget: Budget, exceeded: &BTreeSet<Part>) -> String {
    let word = |part: &Part| match part {
        Part::Memory => format!("its clients hold more than its {} MiB together", budget.memory_mib),
        Part::Clients => format!("it has more than {}", counted(budget.max_clients as usize, "client")),
    };
    exceeded.iter().map(word).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BUDGET: Budget = Budget { memory_mib: 100, max_clients: 2 };

    fn member(pid: u32, start_time: u64, memory_mib: u64) -> Member {
        Member {
            process: Identity { pid, start_time },
            memory_mib: Some(memory_mib),
            known_by: KnownBy::Mount,
            stays: false,
        }
    }

    fn forged(pid: u32, start_time: u64, memory_mib: u64) -> Member {
        Member { known_by: KnownBy::Environment, ..member(pid, start_time, memory_mib) }
    }

    fn staying(pid: u32, start_time: u64, memory_mib: u64) -> Member {
        Member { stays: true, ..member(pid, start_time, memory_mib) }
    }

    fn pids(members: &[Member]) -> Vec<u32> {
        victims(BUDGET, members).into_iter().map(|process| process.pid).collect()
    }

    #[test]
    fn the_newest_go_and_only_as_many_as_needed() {
        let table: [(&str, &[Member], &[u32]); 11] = [
            ("nobody", &[], &[]),
            ("it fits exactly", &[member(1, 10, 50), member(2, 20, 50)], &[]),
            ("too much memory", &[member(1, 10, 50), member(2, 20, 51)], &[2]),
            ("the newest is not the last", &[member(1, 20, 50), member(2, 10, 51)], &[1]),
            ("of the same time, the larger PID", &[member(7, 10, 60), member(2, 10, 60)], &[7]),
            ("too many", &[member(1, 1, 1), member(2, 2, 1), member(3, 3, 1), member(4, 4, 1)], &[4, 3]),
            ("one alone is bound by the driver", &[member(1, 1, 101)], &[]),
            ("forged goes first", &[forged(1, 1, 60), member(2, 2, 60)], &[1]),
            ("then mounted", &[forged(1, 1, 1), member(2, 2, 60), member(3, 3, 60)], &[1, 3]),
            ("the next in place of one that stays", &[member(1, 1, 60), staying(2, 2, 60)], &[1]),
            ("nobody can go", &[staying(1, 1, 60), staying(2, 2, 60)], &[]),
        ];
        for (name, members, expected) in table {
            assert_eq!(pids(members), expected, "{name}");
        }
    }

    #[test]
    fn memory_that_is_not_known_is_not_too_much() {
        let unknown = Member { memory_mib: None, ..member(1, 1, 0) };
        let members = [unknown, member(2, 2, 1000)];
        assert_eq!(InUse::by(&members), InUse { clients: 2, memory_mib: None });
        assert_eq!(pids(&members), Vec::<u32>::new());
        let members = [unknown, unknown, unknown];
        assert_eq!(InUse::by(&members).exceeds(BUDGET), BTreeSet::from([Part::Clients]));
        let huge = [member(1, 1, u64::MAX), member(2, 2, 1)];
        assert_eq!(InUse::by(&huge).memory_mib, None, "no overflow");
    }

    #[test]
    fn the_words_name_the_limits() {
        let both = BTreeSet::from([Part::Clients, Part::Memory]);
        assert_eq!(
            in_words(BUDGET, &both),
            "its clients hold more than its 100 MiB together; it has more than 2 clients"
        );
        assert_eq!(in_words(BUDGET, &BTreeSet::new()), "");
        let one = Budget { max_clients: 1, ..BUDGET };
        assert_eq!(in_words(one, &BTreeSet::from([Part::Clients])), "it has more than 1 client");
    }

    prop_compose! {
        fn any_member()(
            start_time in 0u64..8,
            memory_mib in proptest::option::weighted(0.9, 0u64..200),
            mounted in any::<bool>(),
            stays in proptest::bool::weighted(0.2),
        ) -> Member {
            let known_by = if mounted { KnownBy::Mount } else { KnownBy::Environment };
            Member { process: Identity { pid: 0, start_time }, memory_mib, known_by, stays }
        }
    }

    proptest! {
        #[test]
        fn the_rest_fits_and_nobody_goes_without_need(
            mut members in proptest::collection::vec(any_member(), 0..12),
            memory_mib in 0u64..500,
            max_clients in 1u32..8,
        ) {
            for (pid, member) in (1..).zip(&mut members) {
                member.process.pid = pid;
            }
            let budget = Budget { memory_mib, max_clients };
            let gone = victims(budget, &members);
            let of = |process: &Identity| members.iter().find(|member| member.process == *process).unwrap();
            let rest_without = |gone: &[Identity]| -> Vec<Member> {
                members.iter().filter(|member| !gone.contains(&member.process)).copied().collect()
            };
            let rest = rest_without(&gone);
            prop_assert_eq!(rest.len() + gone.len(), members.len(), "each is a member, and goes once");
            prop_assert!(gone.iter().all(|process| !of(process).stays));
            let fits = |rest: &[Member]| rest.len() < 2 || InUse::by(rest).exceeds(budget).is_empty();
            prop_assert!(fits(&rest) || rest.iter().all(|member| member.stays));
            if let Some((_, before)) = gone.split_last() {
                prop_assert!(!fits(&rest_without(before)), "the last one went without need");
            }
            // Whoever stays behind is older, or better known, than everybody who goes.
            let age = |member: &Member| {
                (member.known_by == KnownBy::Environment, member.process.start_time, member.process.pid)
            };
            for stayed in rest.iter().filter(|member| !member.stays) {
                prop_assert!(gone.iter().all(|process| age(of(process)) > age(stayed)));
            }
        }
    }
}
