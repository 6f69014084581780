//! The budget of a slice: the memory and the number of clients that all clients of the slice may have together. This file
//! chooses the clients that lose their work if the slice exceeds its budget. The driver does not enforce the budget, since it
//! limits only the memory of single processes.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use crate::serve::clients_counted;
use crate::terms::{ProcessId, SliceSize};
use crate::{Cause, Permit};

/// NVML's figure for the memory of a client can be higher than the memory that the driver counts against the client's limit. On
/// an H200, NVML reported 71,888 MiB for a client that had filled its limit of 71,885 MiB. A client within its limit must not
/// appear to exceed the budget, so the budget of a slice allows this many MiB more for each of the slice's clients.
pub const NVML_ERROR_MIB: u64 = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InUse {
    pub clients: u32,
    /// None if the driver does not report the memory of one of the clients.
    pub memory_mib: Option<u64>,
}

impl InUse {
    /// The sum over all clients. `clients` has the memory of each client.
    pub fn sum(clients: impl IntoIterator<Item = Option<u64>>) -> Self {
        let nothing = Self { clients: 0, memory_mib: Some(0) };
        clients.into_iter().fold(nothing, |all, memory_mib| Self {
            clients: all.clients.saturating_add(1),
            memory_mib: all.memory_mib.and_then(|memory| memory.checked_add(memory_mib?)),
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    Memory,
    Clients,
}

impl Part {
    /// The word that stands for the part of the budget on D-Bus.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Clients => "clients",
        }
    }
}

/// A client of a slice. The type `T` identifies a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member<T> {
    pub process: ProcessId,
    /// None if the driver does not report the client's memory.
    pub memory_mib: Option<u64>,
    /// True if only the client's environment names the slice. Any program can set its environment.
    pub only_claims: bool,
    pub tenant: Option<T>,
    /// True if the service must not or can't end the client's work.
    pub stays: bool,
}

pub fn in_use<'m, T: 'm>(members: impl IntoIterator<Item = &'m Member<T>>) -> InUse {
    InUse::sum(members.into_iter().map(|member| member.memory_mib))
}

/// The parts of the budget that are exceeded. Unknown memory does not exceed a budget.
pub fn exceeded(budget: SliceSize, all: InUse) -> BTreeSet<Part> {
    let allowed = budget.memory_mib.saturating_add(NVML_ERROR_MIB.saturating_mul(all.clients.into()));
    let memory = all.memory_mib.is_some_and(|memory| memory > allowed);
    let parts = [(Part::Memory, memory), (Part::Clients, all.clients > budget.max_clients)];
    parts.into_iter().filter_map(|(part, exceeded)| exceeded.then_some(part)).collect()
}

/// The permit to end work of the members of a slice that is over its budget.
///
/// # Errors
/// The members may belong to several tenants. The service then can't know which tenant exceeds the budget, and ends no work of
/// the slice: any program can name a slice in its environment. If a foreign program is older than the clients of the slice's
/// tenant, the tenant's clients would lose their work, since the newest clients are ended first.
pub fn may_cut_back<T: PartialEq>(members: &[Member<T>]) -> Result<Permit, String> {
    if let Some(claims) = members.iter().find(|member| member.only_claims) {
        let pid = claims.process.pid;
        return Err(format!(
            "only the environment of process {pid} names this slice, so the process may belong to another \
             tenant"
        ));
    }
    let permit = Ok(Permit::new(Cause::OverBudget));
    let Some((first, others)) = members.split_first() else { return permit };
    let is_anothers = |member: &&Member<T>| member.tenant.is_none() || member.tenant != first.tenant;
    let Some(other) = others.iter().find(is_anothers) else { return permit };
    let (one, two) = (first.process.pid, other.process.pid);
    Err(format!("processes {one} and {two} may belong to different users or containers"))
}

/// The member of a slice that loses its work next. None if the other members fit into the budget, or if no member may be ended.
/// The newest member comes first. A member that may already have lost its work comes before all other members, until the
/// service knows if this member has work. The oldest member always fits, since the driver limits a single process.
pub fn next_victim<T>(
    budget: SliceSize,
    members: &[Member<T>],
    may_have_lost: impl Fn(ProcessId) -> bool,
) -> Option<ProcessId> {
    if members.len() < 2 || exceeded(budget, in_use(members)).is_empty() {
        return None;
    }
    let age = |member: &&Member<T>| member.process.age();
    let first = members.iter().filter(|member| may_have_lost(member.process)).max_by_key(age);
    let newest = || members.iter().filter(|member| !member.stays).max_by_key(age);
    first.or_else(newest).filter(|member| !member.stays).map(|member| member.process)
}

/// The exceeded parts of a budget, in words. The text does not change while clients come and go.
pub fn describe(budget: SliceSize, exceeded: &BTreeSet<Part>) -> String {
    let word = |part: &Part| match part {
        Part::Memory => {
            format!(
                "the clients of the slice hold more than its {memory_mib} MiB together",
                memory_mib = budget.memory_mib
            )
        }
        Part::Clients => format!(
            "the slice has more than {clients}",
            clients = clients_counted(budget.max_clients as usize)
        ),
    };
    exceeded.iter().map(word).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use alloc::borrow::ToOwned;

    use proptest::prelude::*;

    use super::*;

    type Tenant = (u32, String);

    type Member = super::Member<Tenant>;

    const BUDGET: SliceSize = SliceSize { memory_mib: 1000, thread_percentage: 50, max_clients: 2 };

    fn member(pid: u32, start_time: u64, memory_mib: u64) -> Member {
        Member {
            process: ProcessId { pid, start_time },
            memory_mib: Some(memory_mib),
            only_claims: false,
            tenant: Some((7, "own".to_owned())),
            stays: false,
        }
    }

    #[test]
    fn a_slice_of_several_tenants_has_no_victim() {
        let (old, new) = (member(1, 1, 60), member(2, 2, 60));
        let claims = Member { only_claims: true, ..old.clone() };
        let unknown = Member { tenant: None, ..old.clone() };
        let others = Member { tenant: Some((7, "0123".to_owned())), ..old.clone() };
        assert!(may_cut_back::<Tenant>(&[]).is_ok());
        assert_eq!(may_cut_back(&[old, new.clone()]).unwrap().cause(), Cause::OverBudget);
        for (other, reason) in
            [(claims, "environment of process 1"), (unknown, "different"), (others, "different")]
        {
            for members in [[other.clone(), new.clone()], [new.clone(), other]] {
                assert!(may_cut_back(&members).unwrap_err().contains(reason), "{members:?}");
            }
        }
        let in_one =
            |uid, container: &str| Member { tenant: Some((uid, container.to_owned())), ..new.clone() };
        assert!(may_cut_back(&[in_one(7, "a"), in_one(7, "a")]).is_ok());
        assert!(may_cut_back(&[in_one(7, "a"), in_one(8, "a")]).is_err());
        assert!(may_cut_back(&[in_one(7, "a"), in_one(7, "b")]).is_err());
    }

    fn staying(pid: u32, start_time: u64, memory_mib: u64) -> Member {
        Member { stays: true, ..member(pid, start_time, memory_mib) }
    }

    fn victims(budget: SliceSize, members: &[Member]) -> Vec<ProcessId> {
        let (mut rest, mut gone) = (members.to_vec(), Vec::new());
        while let Some(next) = next_victim(budget, &rest, |_| false) {
            rest.retain(|member| member.process != next);
            gone.push(next);
        }
        gone
    }

    fn pids(members: &[Member]) -> Vec<u32> {
        victims(BUDGET, members).into_iter().map(|process| process.pid).collect()
    }

    #[test]
    fn a_client_that_may_have_lost_its_work_goes_first() {
        let next = |members: &[Member]| next_victim(BUDGET, members, |one| one.pid == 2).map(|one| one.pid);
        let others = [member(1, 1, 600), member(3, 3, 600)];
        assert_eq!(next(&others), Some(3));
        let with = |one: Member| [others.to_vec(), [one].to_vec()].concat();
        assert_eq!(next(&with(member(2, 2, 1))), Some(2));
        assert_eq!(next(&with(staying(2, 2, 1))), None, "it is not settled");
        assert_eq!(next(&[member(1, 1, 508), member(2, 2, 508)]), None, "it fits");
    }

    #[test]
    fn the_newest_go_and_only_as_many_as_needed() {
        let table: [(&str, &[Member], &[u32]); 9] = [
            ("no client", &[], &[]),
            ("it fits exactly", &[member(1, 10, 508), member(2, 20, 508)], &[]),
            ("too much memory", &[member(1, 10, 508), member(2, 20, 509)], &[2]),
            ("the newest is not the last", &[member(1, 20, 508), member(2, 10, 509)], &[1]),
            ("of the same time, the larger PID", &[member(7, 10, 600), member(2, 10, 600)], &[7]),
            ("too many", &[member(1, 1, 1), member(2, 2, 1), member(3, 3, 1), member(4, 4, 1)], &[4, 3]),
            ("one alone is bound by the driver", &[member(1, 1, 1100)], &[]),
            ("the next in place of a client that stays", &[member(1, 1, 600), staying(2, 2, 600)], &[1]),
            ("no client can go", &[staying(1, 1, 600), staying(2, 2, 600)], &[]),
        ];
        for (name, members, expected) in table {
            assert_eq!(pids(members), expected, "{name}");
        }
    }

    #[test]
    fn memory_that_is_not_known_is_not_too_much() {
        let unknown = Member { memory_mib: None, ..member(1, 1, 0) };
        let members = [unknown.clone(), member(2, 2, 2000)];
        assert_eq!(in_use(&members), InUse { clients: 2, memory_mib: None });
        assert_eq!(pids(&members), Vec::<u32>::new());
        let members = [unknown.clone(), unknown.clone(), unknown];
        assert_eq!(exceeded(BUDGET, in_use(&members)), BTreeSet::from([Part::Clients]));
        let huge = [member(1, 1, u64::MAX), member(2, 2, 1)];
        assert_eq!(in_use(&huge).memory_mib, None, "no overflow");
    }

    /// Measured on an H200: NVML reports 71,888 MiB for a client that has filled the limit of a slice with 50 % of the GPU.
    #[test]
    fn a_client_that_fills_its_limit_is_within_the_budget() {
        let half = SliceSize { memory_mib: 71_885, ..BUDGET };
        let with = |memory_mib| exceeded(half, in_use(&[member(1, 1, memory_mib)]));
        assert_eq!(with(71_888), BTreeSet::new());
        assert_eq!(with(71_894), BTreeSet::from([Part::Memory]));
    }

    #[test]
    fn the_words_name_the_limits() {
        let both = BTreeSet::from([Part::Clients, Part::Memory]);
        assert_eq!(
            describe(BUDGET, &both),
            "the clients of the slice hold more than its 1000 MiB together; the slice has more than 2 clients"
        );
        assert_eq!(describe(BUDGET, &BTreeSet::new()), "");
        let one = SliceSize { max_clients: 1, ..BUDGET };
        assert_eq!(describe(one, &BTreeSet::from([Part::Clients])), "the slice has more than 1 client");
    }

    prop_compose! {
        fn any_member()(
            start_time in 0u64..8,
            memory_mib in proptest::option::weighted(0.9, 0u64..200),
            stays in proptest::bool::weighted(0.2),
        ) -> Member {
            Member { memory_mib, stays, ..member(0, start_time, 0) }
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
            let budget = SliceSize { memory_mib, max_clients, ..BUDGET };
            let gone = victims(budget, &members);
            let of = |process: &ProcessId| members.iter().find(|member| member.process == *process).unwrap();
            let rest_without = |gone: &[ProcessId]| -> Vec<Member> {
                members.iter().filter(|member| !gone.contains(&member.process)).cloned().collect()
            };
            let rest = rest_without(&gone);
            prop_assert_eq!(rest.len() + gone.len(), members.len(), "each is a member, and goes once");
            prop_assert!(gone.iter().all(|process| !of(process).stays));
            let fits = |rest: &[Member]| rest.len() < 2 || exceeded(budget, in_use(rest)).is_empty();
            prop_assert!(fits(&rest) || rest.iter().all(|member| member.stays));
            if let Some((_, before)) = gone.split_last() {
                prop_assert!(!fits(&rest_without(before)), "the last one went without need");
            }
            // Each member that keeps its work is older than each member that loses it.
            let age = |member: &Member| (member.process.start_time, member.process.pid);
            for stayed in rest.iter().filter(|member| !member.stays) {
                prop_assert!(gone.iter().all(|process| age(of(process)) > age(stayed)));
            }
        }
    }
}
