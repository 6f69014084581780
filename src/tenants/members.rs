//! The clients of a GPU, each with its slice.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mps_core::terms::{DeviceName, GpuId, ProcessId};
use tokio::task::JoinSet;
use tokio::time::Instant;

use common::host::blocking::Blocking;
use common::host::identity;
use common::host::nvml::GpuProcess;
use common::membership::{
    KnownBy, Membership, ProcessMounts, RecordedContainer, SliceMounts, Slices, Tenant,
};
use mps_core::tenants::budget::Member;

/// The time that the kernel gets for a question about a process. It takes microseconds, but a program can hold up
/// everybody who reads its memory, where its environment is.
const PATIENCE: Duration = Duration::from_secs(1);

/// The most questions at a time. A client that holds up its question hides no client in a container with its slice's
/// directory: the mounts of all clients are looked at first, which nobody can hold up.
const QUESTIONS: usize = 32;

/// The time after which a process is looked at again that has no slice, or only claims one. The directory of its slice may have
/// been away, or its container may not have been recorded yet.
const AGAIN: Duration = Duration::from_secs(60);

/// A GPU as its members are told apart.
#[derive(Debug, Clone)]
pub(super) struct SlicedGpu {
    pub gpu: GpuId,
    /// The number of its slices.
    pub slices: u32,
    /// The slices of all control daemons.
    pub all: Slices,
}

/// The slice of a process on this GPU.
#[derive(Debug, Clone)]
enum MemberSlice {
    /// As of this moment. The tenant is None if the process has not let itself be looked at.
    Slice(u32, KnownBy, Option<Tenant>, Instant),
    /// It has none, as of this moment.
    Nowhere(Instant),
    /// It does not let itself be looked at, and is not asked again.
    Hidden,
}

/// The clients of each slice, by its ordinal.
pub(super) type SliceMembers = BTreeMap<u32, Vec<Member<Tenant>>>;

/// The clients that were looked at.
#[derive(Debug)]
pub(super) struct Members {
    kernel: Blocking,
    /// The slice of each client, by PID. The slice of a process does not change.
    known: BTreeMap<u32, (ProcessId, MemberSlice)>,
    /// The containers of clients that only the host agent's records tell, until somebody takes them.
    pub(super) recorded: Vec<RecordedContainer>,
}

impl Members {
    pub(super) fn new() -> Self {
        Self { kernel: Blocking::new(QUESTIONS), known: BTreeMap::new(), recorded: Vec::new() }
    }

    /// Looks at all clients once more, since the slices may be others.
    pub(super) fn look_again(&mut self) {
        self.known.retain(|_, (_, place)| matches!(place, MemberSlice::Hidden));
    }

    /// The clients among these processes, and by the ordinal of a slice the clients that are known to have it.
    pub(super) async fn by_slice(
        &mut self,
        processes: &[GpuProcess],
        cut: &SlicedGpu,
    ) -> (Vec<ProcessId>, SliceMembers) {
        let clients: BTreeMap<u32, (ProcessId, Option<u64>)> = processes
            .iter()
            .filter(|process| process.via_mps)
            .filter_map(|process| {
                Some((process.pid, (identity::read(process.pid).ok()?, process.memory_mib)))
            })
            .collect();
        let there = |pid: &u32, known: &mut ProcessId| clients.get(pid).is_some_and(|(now, _)| now == known);
        self.known.retain(|pid, (known, _)| there(pid, known));
        self.ask(clients.iter().map(|(pid, (process, _))| (*pid, *process)), cut).await;
        let found = clients.values().map(|(process, _)| *process).collect();
        let mut members = SliceMembers::new();
        for (pid, (process, memory_mib)) in clients {
            if let Some((_, MemberSlice::Slice(slice, known_by, tenant, _))) = self.known.get(&pid) {
                let (only_claims, tenant) = (!known_by.is_certain(), tenant.clone());
                let member = Member { process, memory_mib, only_claims, tenant, stays: false };
                members.entry(*slice).or_default().push(member);
            }
        }
        (found, members)
    }

    /// The slice of a client that has held up the question: the slice that it had before, if it had one.
    fn without_answer(&self, pid: u32, process: &ProcessId) -> MemberSlice {
        match self.known.get(&pid) {
            Some((known, MemberSlice::Slice(slice, known_by, tenant, _))) if known == process => {
                MemberSlice::Slice(*slice, *known_by, tenant.clone(), Instant::now())
            }
            _ => MemberSlice::Hidden,
        }
    }

    /// Asks the kernel about the clients that are not known.
    async fn ask(&mut self, clients: impl Iterator<Item = (u32, ProcessId)>, cut: &SlicedGpu) {
        let is_known = |pid: &u32| match self.known.get(pid) {
            None => false,
            Some((_, MemberSlice::Slice(_, known_by, ..))) if known_by.is_certain() => true,
            Some((_, MemberSlice::Nowhere(since) | MemberSlice::Slice(.., since))) => since.elapsed() < AGAIN,
            Some((_, MemberSlice::Hidden)) => true,
        };
        let unknown: Vec<(u32, ProcessId)> = clients.filter(|(pid, _)| !is_known(pid)).collect();
        if unknown.is_empty() {
            return;
        }
        let (all, gpu) = (cut.all.clone(), cut.gpu);
        let looked = self.kernel.ask(PATIENCE, move || {
            let mounts = SliceMounts::find(&all);
            let certain = |pid| mounts.see(pid).ok().and_then(ProcessMounts::without_memory);
            let certain = unknown.into_iter().map(|(pid, process)| (pid, process, certain(pid)));
            let certain: Vec<_> = certain.collect();
            let by_records = certain.iter().filter(|(.., known)| is_by_records(known.as_ref()));
            let mut recorded: Vec<_> =
                by_records.filter_map(|(pid, ..)| mounts.recorded_container(*pid, gpu)).collect();
            recorded.dedup();
            (Arc::new(mounts), certain, recorded)
        });
        let Some((mounts, certain, recorded)) = looked.await else { return };
        self.recorded = recorded;
        let mut asked = JoinSet::new();
        for (pid, process, certain) in certain {
            let (kernel, mounts) = (self.kernel.clone(), Arc::clone(&mounts));
            asked.spawn(async move {
                let membership = match certain {
                    Some(certain) if !certain.is_ambiguous() => Some(Some(certain)),
                    several => {
                        let answer = kernel.ask(PATIENCE, move || mounts.slices_of(pid).ok().flatten()).await;
                        // Who holds up the question has the first of the slices.
                        answer.or_else(|| several.map(Some))
                    }
                };
                (pid, process, membership)
            });
        }
        while let Some(answer) = asked.join_next().await {
            let Ok((pid, process, membership)) = answer else { continue };
            let place = match membership.map(|known| slice_on(cut, known?)) {
                None => self.without_answer(pid, &process),
                Some(None) => MemberSlice::Nowhere(Instant::now()),
                Some(Some((slice, known_by))) => {
                    MemberSlice::Slice(slice, known_by, Tenant::read(pid).ok(), Instant::now())
                }
            };
            // If the process has ended, its PID may have been another's while it was looked at.
            if identity::read(pid).ok() == Some(process) {
                self.known.insert(pid, (process, place));
            }
        }
    }
}

fn is_by_records(membership: Option<&Membership>) -> bool {
    membership.is_some_and(|its| its.known_by == KnownBy::Platform)
}

/// The first slice of this GPU that a process has: MPS can't join slices.
fn slice_on(cut: &SlicedGpu, membership: Membership) -> Option<(u32, KnownBy)> {
    let membership = membership.on(cut.gpu)?;
    let ordinal = |name: &DeviceName| match name {
        DeviceName::Slice(slice) if slice.gpu == cut.gpu && slice.ordinal < cut.slices => Some(slice.ordinal),
        _ => None,
    };
    Some((membership.slices.iter().find_map(ordinal)?, membership.known_by))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(gpu: &str) -> SlicedGpu {
        SlicedGpu { gpu: gpu.parse().unwrap(), slices: 4, all: Slices::default() }
    }

    #[test]
    fn a_client_counts_on_each_gpu_for_its_slice_there() {
        let on = |gpu: &str, slices: &[&str]| {
            let slices = slices.iter().map(|slice| slice.parse().unwrap()).collect();
            let membership = Membership { slices, known_by: KnownBy::Environment };
            slice_on(&cut(gpu), membership).map(|(ordinal, _)| ordinal)
        };
        let both = ["00:06.0-1", "00:07.0-3"];
        assert_eq!(on("00:06.0", &both), Some(1));
        assert_eq!(on("00:07.0", &both), Some(3));
        assert_eq!(on("00:08.0", &both), None);
        assert_eq!(on("00:06.0", &["00:06.0-4", "00:06.0-2", "00:06.0-0"]), Some(2), "the first there is");
        assert_eq!(on("00:06.0", &["00:06.0"]), None, "a GPU is no slice");
        assert_eq!(on("0001:00:06.0", &["00:06.0-1", "0001:00:06.0-2"]), Some(2));
    }

    /// A process on a GPU, as NVML would list this one.
    fn this_one(via_mps: bool) -> GpuProcess {
        GpuProcess { pid: std::process::id(), memory_mib: Some(7), via_mps }
    }

    #[tokio::test]
    async fn whoever_has_no_slice_or_is_no_client_is_left_out() {
        let mut members = Members::new();
        let gone = GpuProcess { pid: u32::MAX, ..this_one(true) };
        for (processes, clients) in [(vec![], 0), (vec![this_one(false)], 0), (vec![this_one(true), gone], 1)]
        {
            let (found, by_slice) = members.by_slice(&processes, &cut("00:06.0")).await;
            assert_eq!((found.len(), by_slice), (clients, BTreeMap::new()));
        }
        assert_eq!(members.known.len(), 1, "it is not asked again at once");
        members.by_slice(&[], &cut("00:06.0")).await;
        assert_eq!(members.known.len(), 0);
    }

    #[tokio::test]
    async fn a_client_with_a_slice_is_a_member_of_it() {
        let mut members = Members::new();
        let process = identity::read(std::process::id()).unwrap();
        let tenant = Tenant::read(process.pid).ok();
        let place = || MemberSlice::Slice(2, KnownBy::Bound, tenant.clone(), Instant::now());
        members.known.insert(process.pid, (process, place()));
        let found = members.by_slice(&[this_one(true)], &cut("00:06.0")).await;
        let tenant = tenant.clone();
        let member = Member { process, memory_mib: Some(7), only_claims: false, tenant, stays: false };
        assert_eq!(found, (vec![process], BTreeMap::from([(2, vec![member])])));
        // Another process with the same PID is another client.
        let before = ProcessId { start_time: process.start_time - 1, ..process };
        members.known.insert(process.pid, (before, place()));
        assert_eq!(
            members.by_slice(&[this_one(true)], &cut("00:06.0")).await,
            (vec![process], BTreeMap::new())
        );
    }

    /// Its container may have been recorded or bound meanwhile.
    #[tokio::test]
    async fn a_client_that_holds_up_a_question_keeps_the_slice_that_it_had() {
        let mut members = Members::new();
        let process = identity::read(std::process::id()).unwrap();
        let answer = |members: &Members| members.without_answer(process.pid, &process);
        assert!(matches!(answer(&members), MemberSlice::Hidden));
        let claim = MemberSlice::Slice(2, KnownBy::Environment, None, Instant::now());
        members.known.insert(process.pid, (process, claim));
        assert!(matches!(answer(&members), MemberSlice::Slice(2, KnownBy::Environment, None, _)));
        // Another process with the same PID.
        let before = ProcessId { start_time: process.start_time - 1, ..process };
        assert!(matches!(members.without_answer(process.pid, &before), MemberSlice::Hidden));
    }

    #[tokio::test]
    async fn a_client_that_only_claims_a_slice_is_looked_at_again() {
        let process = identity::read(std::process::id()).unwrap();
        let before = Instant::now().checked_sub(AGAIN).unwrap();
        for (known_by, since, again) in [
            (KnownBy::Bound, before, false),
            (KnownBy::Environment, before, true),
            (KnownBy::Environment, Instant::now(), false),
        ] {
            let mut members = Members::new();
            members.known.insert(process.pid, (process, MemberSlice::Slice(2, known_by, None, since)));
            let (_, by_slice) = members.by_slice(&[this_one(true)], &cut("00:06.0")).await;
            assert_eq!(by_slice.is_empty(), again, "{known_by}");
        }
    }
}
