//! Chooses a slice for a caller that names no single slice: the slice with the fewest clients.

use std::collections::{BTreeMap, BTreeSet};

use mps_core::access::{Asker, Obstacle};
use mps_core::bindings::Bindings;
use mps_core::terms::{DeviceName, SliceId};

use crate::counted::counted;
use crate::published::access::may_have;
use crate::published::client::ClientView;
use crate::published::container::{ChosenSlice, not_ready, refused_by};
use crate::published::request_error::RequestError;
use crate::published::snapshot::{GpuView, Snapshot};

const REASONS: usize = 2;

/// The slices that a caller can get, best first: all slices of the host, or the slices that match one of `names`. Each name is
/// the name of a slice or a GPU, or a part of the name of a GPU model.
///
/// The slice with the fewest clients comes first. Slices with equal numbers are sorted by the number of clients on their GPU,
/// then by the order of the configuration. `recent` has the slices that were just handed out. Each of its entries counts as one
/// more client, since a program becomes a client only when it starts to use CUDA.
///
/// The second part of each result is None if the slice has room for a client. Otherwise it is the most clients that the slice
/// may have. Fails if a name is unknown, or if the GPUs are not known yet.
pub fn candidates(
    snapshot: &Snapshot,
    names: &[String],
    clients: &[ClientView],
    recent: &[SliceId],
) -> Result<Vec<(SliceId, Option<u32>)>, RequestError> {
    if snapshot.gpus.is_none() {
        return Err(not_ready(snapshot));
    }
    let all = || snapshot.slices();
    let meant = |gpu: &GpuView, ordinal: u32, name: &str| match snapshot.find(name) {
        Some((_, DeviceName::Slice(slice))) => slice == gpu.plan.slice(ordinal),
        Some((_, DeviceName::Gpu(id))) => id == gpu.plan.gpu.id(),
        None => is_model(gpu, name),
    };
    let is_nothing = |name: &&String| !all().any(|(gpu, ordinal)| meant(gpu, ordinal, name));
    if let Some(asked) = names.iter().find(is_nothing) {
        return Err(RequestError::NoSuchDevice(format!(
            "no slice, GPU or model is called {asked:?}; the service manages {there}",
            there = gpus(snapshot)
        )));
    }
    let wanted = all()
        .filter(|(gpu, ordinal)| names.is_empty() || names.iter().any(|name| meant(gpu, *ordinal, name)));
    let mut counted: Vec<_> = wanted
        .map(|(gpu, ordinal)| {
            let slice = gpu.plan.slice(ordinal);
            let own = count(clients, |client| uses(client, gpu) && has(client, slice));
            let given = |of: &dyn Fn(&SliceId) -> bool| recent.iter().filter(|slice| of(slice)).count();
            let on_slice = own + given(&|recent| *recent == slice);
            let on_gpu =
                count(clients, |client| uses(client, gpu)) + given(&|recent| recent.gpu == slice.gpu);
            let full = gpu.plan.max_clients(ordinal);
            let full = full.filter(|most| usize::try_from(*most).is_ok_and(|most| own >= most));
            ((on_slice, on_gpu), (slice, full))
        })
        .collect();
    // The sort is stable: slices with the same number of clients stay in the order of the configuration.
    counted.sort_by_key(|(clients, _)| *clients);
    Ok(counted.into_iter().map(|(_, candidate)| candidate).collect())
}

/// The first candidate that is not full and that the program may have. If there is none, the error has the reasons for each
/// GPU.
pub fn choose<'s>(
    snapshot: &'s Snapshot,
    candidates: &[(SliceId, Option<u32>)],
    bindings: &Bindings,
    asker: Asker<'_>,
) -> Result<ChosenSlice<'s>, RequestError> {
    let mut easiest: Option<Obstacle> = None;
    // For each GPU, by its position in the configuration: the reasons why its slices were refused, and the number of slices for
    // each reason.
    let mut refused: BTreeMap<Option<usize>, (&GpuView, BTreeMap<String, usize>)> = BTreeMap::new();
    for (slice, full) in candidates {
        let Some((gpu, DeviceName::Slice(SliceId { ordinal, .. }))) = snapshot.find(&slice.to_string())
        else {
            continue;
        };
        let reason = match (may_have(gpu, ordinal, bindings, asker), full) {
            (Ok(()), None) => return Ok(ChosenSlice { gpu, ordinal, name: slice.to_string() }),
            (Ok(()), Some(most)) => {
                format!("full: {clients} at most (max_clients)", clients = counted(*most as usize, "client"))
            }
            (Err(obstacle), _) => {
                let words = obstacle_in_words(&obstacle);
                easiest = easiest.into_iter().chain([obstacle]).min();
                words
            }
        };
        let (_, reasons) = refused.entry(place(snapshot, gpu)).or_insert_with(|| (gpu, BTreeMap::new()));
        *reasons.entry(reason).or_default() += 1;
    }
    let why = refused.into_values().map(|(gpu, reasons)| reasons_of(gpu, &reasons)).collect::<Vec<_>>();
    let text = format!("no slice is free: {}", why.join("; "));
    // If no slice has an obstacle, all slices are full.
    Err(match easiest {
        Some(obstacle) => refused_by(&obstacle, text),
        None => RequestError::Taken(text),
    })
}

fn place(snapshot: &Snapshot, gpu: &GpuView) -> Option<usize> {
    snapshot.gpus.iter().flatten().position(|one| one.plan.gpu.id() == gpu.plan.gpu.id())
}

fn obstacle_in_words(obstacle: &Obstacle) -> String {
    match obstacle {
        Obstacle::Unserved(reason) => format!("not served: {reason}"),
        Obstacle::Taken(by) => format!("bound to {by}"),
        Obstacle::Drained => "drained".to_owned(),
        Obstacle::Unusable(reason) => format!("can't be served: {reason}"),
    }
}

/// Describes why the slices of a GPU were refused. The text names at most `REASONS` different reasons. Slices of one GPU can
/// have different reasons if each has its own control daemon.
fn reasons_of(gpu: &GpuView, reasons: &BTreeMap<String, usize>) -> String {
    let mut named: Vec<String> = match reasons.keys().next() {
        Some(only) if reasons.len() == 1 => vec![only.clone()],
        _ => reasons
            .iter()
            .take(REASONS)
            .map(|(why, slices)| format!("{} {why}", counted(*slices, "slice")))
            .collect(),
    };
    let others: usize = reasons.values().skip(REASONS).sum();
    if others > 0 {
        named.push(format!("{} more", counted(others, "slice")));
    }
    format!("{}: {}", gpu.plan.gpu.id(), named.join(", "))
}

fn is_model(gpu: &GpuView, name: &str) -> bool {
    let part = name.to_lowercase();
    let by_nvidia = gpu.plan.gpu.facts().map(|facts| facts.name.to_lowercase());
    !part.is_empty()
        && [Some(gpu.plan.gpu.model().to_lowercase()), by_nvidia]
            .into_iter()
            .flatten()
            .any(|model| model.contains(&part))
}

fn gpus(snapshot: &Snapshot) -> String {
    let named = snapshot.gpus.iter().flatten().map(|gpu| format!("{} ({})", gpu.plan.gpu.id(), model(gpu)));
    let named = named.collect::<Vec<_>>().join(", ");
    if named.is_empty() { "no GPU".to_owned() } else { named }
}

fn model(gpu: &GpuView) -> String {
    let model = Some(gpu.plan.gpu.model()).filter(|model| !model.is_empty());
    let by_nvidia = || gpu.plan.gpu.facts().map(|facts| facts.name.clone());
    model.or_else(by_nvidia).unwrap_or_else(|| "unknown model".to_owned())
}

/// The number of processes among the clients for which `of` is true. A process on several GPUs counts once.
fn count(clients: &[ClientView], of: impl Fn(&ClientView) -> bool) -> usize {
    let pids =
        clients.iter().filter(|client| !client.bypass && of(client)).map(|client| client.client.process.pid);
    pids.collect::<BTreeSet<u32>>().len()
}

fn names(client: &ClientView) -> impl Iterator<Item = &DeviceName> {
    client.client.slices.iter().flat_map(|known| &known.slices)
}

fn has(client: &ClientView, slice: SliceId) -> bool {
    names(client).any(|name| *name == DeviceName::Slice(slice))
}

/// True if the client uses this GPU, or waits for an MPS server on this GPU.
fn uses(client: &ClientView, gpu: &GpuView) -> bool {
    if client.gpu_uuid.is_empty() {
        names(client).any(|name| name.gpu() == gpu.plan.gpu.id())
    } else {
        client.gpu_uuid == gpu.uuid()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mps_core::bindings::{Binding, BoundBy, ControlGroup};
    use mps_core::register::{KnownBy, KnownClient, Membership};
    use mps_core::terms::ProcessId;

    use super::*;
    use crate::published::samples::{gpu, snapshot};

    /// A host with a Tesla P40 and an H200. The clients of the Tesla P40 can't be counted. The H200 has at most two clients in
    /// each slice. Each GPU has two slices.
    fn host(change: impl Fn(&mut GpuView)) -> Snapshot {
        let host = [("00:06.0", "GPU-06", "Tesla P40"), ("00:07.0", "GPU-07", "NVIDIA H200")];
        let gpus = host.map(|(address, uuid, name)| {
            let mut view = gpu(address, uuid);
            view.plan.sizes.truncate(2);
            view.plan.clients_counted = name == "NVIDIA H200";
            view.plan.sizes.iter_mut().for_each(|size| size.max_clients = 2);
            view.plan.gpu.nvml.as_mut().unwrap().name = name.to_owned();
            change(&mut view);
            view
        });
        snapshot(Some(gpus.into()))
    }

    fn client(pid: u32, gpu_uuid: &str, slices: &str) -> ClientView {
        let slices: Vec<DeviceName> =
            slices.split(' ').filter(|name| !name.is_empty()).map(|name| name.parse().unwrap()).collect();
        let slices = (!slices.is_empty()).then_some(Membership { slices, known_by: KnownBy::Environment });
        ClientView {
            client: KnownClient { slices, ..KnownClient::only(ProcessId { pid, start_time: 1 }) },
            bypass: false,
            waiting: gpu_uuid.is_empty(),
            command: String::new(),
            gpu_uuid: gpu_uuid.to_owned(),
            memory_mib: None,
            since: None,
        }
    }

    fn clients(of: &[(&str, &str)]) -> Vec<ClientView> {
        (1..).zip(of).map(|(pid, (gpu, slices))| client(pid, gpu, slices)).collect()
    }

    fn slice(name: &str) -> SliceId {
        let Ok(DeviceName::Slice(slice)) = name.parse() else { panic!("{name}") };
        slice
    }

    fn chosen(
        snapshot: &Snapshot,
        names: &[&str],
        clients: &[ClientView],
        recent: &[&str],
    ) -> Result<String, String> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let recent: Vec<SliceId> = recent.iter().map(|name| slice(name)).collect();
        let asker = Asker { control_group: None, by: BoundBy::Platform, shares: false };
        candidates(snapshot, &names, clients, &recent)
            .and_then(|candidates| choose(snapshot, &candidates, &snapshot.bindings, asker))
            .map(|chosen| chosen.name)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_slice_with_the_fewest_clients_is_taken() {
        let host = host(|_| ());
        let (p40, h200) = ("GPU-06", "GPU-07");
        for (of, expected) in [
            (&[][..], "00:06.0-0"),
            // An idle slice of an idle GPU comes before an idle slice of a busy GPU.
            (&[(p40, "00:06.0-0")], "00:07.0-0"),
            (&[(p40, "00:06.0-0"), (h200, "00:07.0-0")], "00:06.0-1"),
            (&[(p40, "00:06.0-0"), (p40, "00:06.0-1"), (h200, "00:07.0-0")], "00:07.0-1"),
            // A client that waits for a server has a slice, but no GPU yet.
            (&[("", "00:06.0-0"), ("", "00:07.0-1"), ("", "00:07.0-1")], "00:06.0-1"),
            // A client without a known slice counts for its GPU.
            (&[(p40, "")], "00:07.0-0"),
            (&[(p40, "00:06.0-0 00:07.0-1"), (p40, "00:06.0-1"), (h200, "00:07.0-0")], "00:07.0-1"),
        ] {
            assert_eq!(chosen(&host, &[], &clients(of), &[]).unwrap(), expected, "{of:?}");
        }
        let bypass = ClientView { bypass: true, ..client(1, p40, "00:06.0-0") };
        assert_eq!(chosen(&host, &[], &[bypass], &[]).unwrap(), "00:06.0-0", "it has no slice");
    }

    #[test]
    fn a_slice_that_was_just_given_has_a_client_more() {
        let host = host(|_| ());
        let (p40, first, other) = ("GPU-06", "00:06.0-0", "00:07.0-0");
        for (recent, of, expected) in [
            (&[first][..], &[][..], "00:07.0-0"),
            (&[first, other], &[], "00:06.0-1"),
            (&[first, other, "00:06.0-1", "00:07.0-1"], &[], "00:06.0-0"),
            (&[first, first, other, "00:06.0-1", "00:07.0-1"], &[], "00:07.0-0"),
            (&[other, "00:07.0-1"], &[(p40, first)], "00:06.0-1"),
        ] {
            assert_eq!(chosen(&host, &[], &clients(of), recent).unwrap(), expected, "{recent:?}");
        }
        // A slice that was just given to a caller can be given again, since a short command may have ended already.
        assert_eq!(chosen(&host, &["00:07.0-1"], &[], &["00:07.0-1"; 3]).unwrap(), "00:07.0-1");
    }

    #[test]
    fn a_name_is_that_of_a_slice_or_a_gpu_or_part_of_a_models() {
        let host = host(|_| ());
        for (names, expected) in [
            (&["h200"][..], "00:07.0-0"),
            (&["NVIDIA H200"], "00:07.0-0"),
            (&["gpu-07"], "00:07.0-0"),
            (&["0000:00:07.0"], "00:07.0-0"),
            (&["00:07.0-1"], "00:07.0-1"),
            (&["h200", "p40"], "00:06.0-0"),
        ] {
            assert_eq!(chosen(&host, names, &[], &[]).unwrap(), expected, "{names:?}");
        }
        for wrong in ["h100", "", "00:08.0", "00:07.0-2"] {
            let refused = chosen(&host, &["p40", wrong], &[], &[]).unwrap_err();
            assert!(
                refused.starts_with(&format!(
                    "no slice, GPU or model is called {wrong:?}; the service manages 00:06.0 ("
                )),
                "{refused}"
            );
        }
    }

    #[test]
    fn without_a_free_slice_each_gpu_has_its_reason() {
        let full = clients(&[("GPU-07", "00:07.0-0"); 2]);
        assert_eq!(chosen(&host(|_| ()), &["h200"], &full, &[]).unwrap(), "00:07.0-1");
        let one_drained = host(|gpu| _ = gpu.drained.insert(1));
        assert_eq!(
            chosen(&one_drained, &["h200"], &full, &[]).unwrap_err(),
            "no slice is free: 00:07.0: 1 slice drained, 1 slice full: 2 clients at most (max_clients)"
        );
        let mut bound = host(|_| ());
        let binding = Binding {
            group: ControlGroup { path: "/".to_owned(), inode: 1 },
            slices: ["00:07.0-0", "00:07.0-1"].map(slice).into(),
            by: BoundBy::Root,
            label: "train-1".to_owned(),
            since: u64::MAX,
            was_used: false,
        };
        bound.bindings = Arc::new([binding].into_iter().collect());
        assert_eq!(chosen(&bound, &[], &clients(&[("GPU-06", "00:06.0-0")]), &[]).unwrap(), "00:06.0-1");
        let lost = host(|gpu| {
            gpu.healthy = false;
            gpu.reason = "GPU is lost".to_owned();
            if gpu.uuid() == "GPU-07" {
                gpu.drained.extend(0..2);
            }
        });
        assert_eq!(
            chosen(&lost, &[], &[], &[]).unwrap_err(),
            "no slice is free: 00:06.0: not served: GPU is lost; 00:07.0: drained"
        );
        let each = host(|gpu| {
            gpu.plan.sizes.resize(4, gpu.plan.size(0));
            gpu.unserved = (0..4).map(|ordinal| (ordinal, format!("{ordinal} starts"))).collect();
        });
        assert_eq!(
            chosen(&each, &["h200"], &[], &[]).unwrap_err(),
            "no slice is free: 00:07.0: 1 slice not served: 0 starts, 1 slice not served: 1 starts, 2 slices more"
        );
    }
}
