//! The clients of a GPU, each with its slice.

use std::collections::BTreeMap;

use mps_core::register::{KnownClient, Membership, Tenant};
use mps_core::tenants::budget::Member;
use mps_core::terms::{DeviceName, GpuId, GpuProcess, ProcessId};

pub(super) type SliceMembers = BTreeMap<u32, Vec<Member<Tenant>>>;

pub(super) fn by_slice(
    found: &[ProcessId],
    processes: &[GpuProcess],
    known: &BTreeMap<u32, KnownClient>,
    gpu: GpuId,
    slices: u32,
) -> SliceMembers {
    let mut members = SliceMembers::new();
    for process in found {
        let Some(client) = known.get(&process.pid) else { continue };
        let Some((slice, only_claims)) = slice_on(gpu, slices, client.slices.clone()) else { continue };
        let listed = processes.iter().find(|listed| listed.pid == process.pid);
        let memory_mib = listed.and_then(|listed| listed.memory_mib);
        let tenant = client.tenant.clone();
        let member = Member { process: *process, memory_mib, only_claims, tenant, stays: false };
        members.entry(slice).or_default().push(member);
    }
    members
}

/// The ordinal of a process's slice on this GPU, and true if only the environment of the process claims the slice. If the
/// process has several slices, the first counts, since MPS can't combine slices.
fn slice_on(gpu: GpuId, slices: u32, membership: Option<Membership>) -> Option<(u32, bool)> {
    let membership = membership?.on(gpu)?;
    let ordinal = |name: &DeviceName| match name {
        DeviceName::Slice(slice) if slice.gpu == gpu && slice.ordinal < slices => Some(slice.ordinal),
        _ => None,
    };
    Some((membership.slices.iter().find_map(ordinal)?, !membership.known_by.is_certain()))
}

#[cfg(test)]
mod tests {
    use mps_core::register::KnownBy;

    use super::*;

    fn claim(slices: &[&str]) -> Membership {
        let slices = slices.iter().map(|slice| slice.parse().unwrap()).collect();
        Membership { slices, known_by: KnownBy::Environment }
    }

    #[test]
    fn a_client_counts_on_each_gpu_for_its_slice_there() {
        let on = |gpu: &str, slices: &[&str]| {
            slice_on(gpu.parse().unwrap(), 4, Some(claim(slices))).map(|(ordinal, _)| ordinal)
        };
        let both = ["00:06.0-1", "00:07.0-3"];
        assert_eq!(on("00:06.0", &both), Some(1));
        assert_eq!(on("00:07.0", &both), Some(3));
        assert_eq!(on("00:08.0", &both), None);
        assert_eq!(on("00:06.0", &["00:06.0-4", "00:06.0-2", "00:06.0-0"]), Some(2), "the first there is");
        assert_eq!(on("00:06.0", &["00:06.0"]), None, "a GPU is no slice");
        assert_eq!(on("0001:00:06.0", &["00:06.0-1", "0001:00:06.0-2"]), Some(2));
    }

    #[test]
    fn a_client_with_a_slice_is_a_member_of_it() {
        let process = |pid| ProcessId { pid, start_time: 1 };
        let tenant = Some(Tenant { uid: 7, container: "own".to_owned() });
        let client =
            |pid, slices| KnownClient { slices, tenant: tenant.clone(), ..KnownClient::only(process(pid)) };
        let known = [client(1, Some(claim(&["00:06.0-2"]))), client(2, None)];
        let known = known.into_iter().map(|client| (client.process.pid, client)).collect();
        let listed = [1, 2, 3].map(|pid| GpuProcess { pid, memory_mib: Some(7), via_mps: true });
        let found = [process(1), process(2), process(3)];
        let members = by_slice(&found, &listed, &known, "00:06.0".parse().unwrap(), 4);
        let (process, tenant) = (process(1), tenant.clone());
        let member = Member { process, memory_mib: Some(7), only_claims: true, tenant, stays: false };
        assert_eq!(members, BTreeMap::from([(2, vec![member])]));
    }
}
