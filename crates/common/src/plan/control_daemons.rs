//! Plans the control daemons for the usable GPUs, and compares a running control daemon with a new plan.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mps_core::Tenure;
use mps_core::terms::{DIRECTORIES, DaemonId, ServedGpu, SliceId, SliceSize};

use super::PlanError;
use super::gpu_plan::GpuPlan;
use super::limits::{Limit, waits_for_default};
use super::warnings::loose;
use crate::config::{self, Isolation, LOG_BESIDE_PIPE, LOG_KEY, MultiUser, Settings, Supervision, Topology};
use crate::host::cpus::Cpus;
use crate::host::driver::{self, LINKED_SOCKET, MULTI_USER};
use crate::host::inventory::Inventory;
use crate::host::nvml::facts::NvmlFacts;
use crate::problem::LocatedProblem;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlDaemonPlan {
    pub id: DaemonId,
    pub pipe_directory: PathBuf,
    /// The directory in which the control daemon makes its sockets, and which only root can read. The pipe directory then has a
    /// hard link to the socket for clients. None if the sockets are in the pipe directory.
    pub private_directory: Option<PathBuf>,
    pub log_directory: PathBuf,
    /// The directory that contains the directories of the control daemon's slices. Each of these has a link to the control
    /// daemon's socket. None if clients have to connect in the pipe directory.
    pub slice_directories: Option<PathBuf>,
    /// The GPUs in the order of `CUDA_VISIBLE_DEVICES`, sorted by address. So a GPU's ordinal does not depend on the order of
    /// entries in the device file.
    pub gpus: Vec<ServedGpu>,
    pub thread_percentage: u8,
    pub multiuser: bool,
    /// True if the control daemon is started without multi-user mode when its driver refuses that mode.
    pub multiuser_optional: bool,
    pub prewarm: bool,
    /// The CPUs near the control daemon's GPUs, to which the control daemon is bound. None if the control daemon is not bound.
    pub cpus: Option<Cpus>,
    pub supervision: Arc<Supervision>,
}

/// The properties of a running control daemon that can't be changed while it runs.
#[derive(Debug, Clone, Copy)]
pub struct Present<'a> {
    pub pipe_directory: &'a Path,
    /// The control daemon's `CUDA_MPS_PIPE_DIRECTORY`.
    pub control_directory: &'a Path,
    pub log_directory: &'a Path,
    pub gpus: &'a [String],
    pub multiuser: bool,
    /// True if the control daemon was bound to the CPUs near its GPUs at its start.
    pub near_cpus: bool,
}

impl ControlDaemonPlan {
    /// The names of the GPUs with these UUIDs, by UUID. GPUs of other control daemons and GPUs without a known name are
    /// skipped.
    pub fn gpu_names(&self, uuids: &[String]) -> BTreeMap<String, String> {
        let its = self.gpus.iter().filter(|gpu| uuids.contains(&gpu.uuid));
        its.filter_map(|gpu| Some((gpu.uuid.clone(), gpu.id?.to_string()))).collect()
    }

    /// The UUIDs of the GPUs with slices that wait for new limits or directories until the control daemon has carried out this
    /// plan. `before` is the plan that the control daemon has carried out last.
    pub fn to_be_set_since<'a>(&'a self, before: &'a Self) -> impl Iterator<Item = &'a str> {
        let waits = |gpu: &&ServedGpu| {
            let Some(known) = before.gpus.iter().find(|known| known.uuid == gpu.uuid) else { return true };
            let moved =
                self.slice_directories.is_some() && self.slice_directories != before.slice_directories;
            let has_new_slices = self.slice_directories.is_some()
                && gpu.sizes.keys().any(|ordinal| !known.sizes.contains_key(ordinal));
            let both = gpu.sizes.iter().filter_map(|(ordinal, size)| Some((size, known.sizes.get(ordinal)?)));
            let mut limits = both.flat_map(|(size, known_size)| {
                self.limits(gpu, size).into_iter().zip(before.limits(known, known_size))
            });
            moved || has_new_slices || limits.any(|(limit, before)| waits_for_default(limit, before))
        };
        self.gpus.iter().filter(waits).map(|gpu| gpu.uuid.as_str())
    }

    pub fn tenure(&self) -> Tenure {
        self.id.tenure()
    }

    /// True if this control daemon has to report programs without MPS on its GPU. Of the control daemons that take turns on a
    /// GPU, only the control daemon of slice 0 reports these programs, so that each program is reported once.
    pub fn stands_guard(&self) -> bool {
        self.tenure() == Tenure::InTurns && self.gpus.iter().any(|gpu| gpu.sizes.contains_key(&0))
    }

    /// The directory in which the control daemon makes its sockets: its `CUDA_MPS_PIPE_DIRECTORY`.
    pub fn control_directory(&self) -> &Path {
        self.private_directory.as_ref().unwrap_or(&self.pipe_directory)
    }

    pub fn slices(&self) -> impl Iterator<Item = SliceId> {
        self.gpus.iter().flat_map(ServedGpu::slices)
    }

    fn limits(&self, gpu: &ServedGpu, size: &SliceSize) -> [Limit; 2] {
        let threads = (size.thread_percentage.into(), self.thread_percentage.into());
        [(size.memory_mib, gpu.memory_limit_mib), threads]
    }

    /// The reason why a running control daemon can't carry out this plan and has to be replaced. None if it can carry out the
    /// plan. The call ignores planned GPUs for which `reachable` is false.
    pub fn misfit(&self, present: &Present<'_>, reachable: impl Fn(&str) -> bool) -> Option<String> {
        let joins = self.gpus.iter().find(|gpu| reachable(&gpu.uuid) && !present.gpus.contains(&gpu.uuid));
        let leaves = present.gpus.iter().find(|uuid| !self.gpus.iter().any(|gpu| gpu.uuid == **uuid));
        if present.pipe_directory != self.pipe_directory {
            Some(format!(
                "the pipe directory becomes {pipe_directory}",
                pipe_directory = self.pipe_directory.display()
            ))
        } else if present.control_directory != self.control_directory() {
            Some(format!(
                "the control daemon's sockets move to {control_directory}",
                control_directory = self.control_directory().display()
            ))
        } else if present.log_directory != self.log_directory {
            Some(format!(
                "the log directory becomes {log_directory}",
                log_directory = self.log_directory.display()
            ))
        } else if let Some(gpu) = joins {
            Some(format!("{} joins the control daemon's GPUs", gpu.uuid))
        } else if let Some(uuid) = leaves {
            Some(format!("{uuid} leaves the control daemon's GPUs"))
        } else if present.multiuser && !self.multiuser {
            Some("multi-user mode is switched off".to_owned())
        } else if !present.multiuser && self.multiuser && !self.multiuser_optional {
            Some("multi-user mode is switched on".to_owned())
        } else if let Some(cpus) = self.cpus.filter(|_| !present.near_cpus) {
            Some(format!("the control daemon's CPUs change to {cpus}"))
        } else if present.near_cpus && self.cpus.is_none() {
            Some("the control daemon's CPUs change to all CPUs of the host".to_owned())
        } else {
            None
        }
    }
}

/// Plans the control daemons for the GPUs that can be served now, and sets `slice_directories` of each of `gpus`.
pub(super) fn control_daemons(
    gpus: &mut [GpuPlan],
    settings: &Settings,
    inventory: &Inventory,
) -> Vec<ControlDaemonPlan> {
    let mut usable: Vec<(&GpuPlan, &NvmlFacts)> = gpus
        .iter()
        .filter(|gpu| gpu.obstacles.is_empty())
        .filter_map(|gpu| Some((gpu, gpu.gpu.facts()?)))
        .collect();
    usable.sort_by_key(|(gpu, _)| gpu.gpu.pci.address);
    let (divided, whole): (Vec<_>, Vec<_>) =
        usable.into_iter().partition(|(gpu, _)| gpu.isolation == Isolation::Slice);
    let together = match settings.topology {
        Topology::Shared => whole.len().max(1),
        Topology::PerGpu | Topology::PerSlice => 1,
    };
    let of_gpus = whole.chunks(together).map(|gpus| (gpus, None));
    let slice = |gpu: &GpuPlan, ordinal| Some((gpu.slice(ordinal), gpu.slice_pipe_directory(ordinal)));
    let of_slices = divided.iter().flat_map(|gpu| {
        (0..gpu.0.slices()).map(move |ordinal| (std::slice::from_ref(gpu), slice(gpu.0, ordinal)))
    });
    let all = of_gpus.chain(of_slices);
    let supervision = Arc::new(settings.supervision.clone());
    let planned = |(gpus, slice)| control_daemon(gpus, slice, settings, inventory, &supervision);
    let control_daemons: Vec<ControlDaemonPlan> = all.filter_map(planned).collect();
    for gpu in gpus {
        // A GPU that can't be served now already gets the directories that its slices will have later.
        let pipe_directory = gpu.slice_pipe_directory(0);
        let its = control_daemons.iter().find(|daemon| daemon.pipe_directory == pipe_directory);
        gpu.slice_directories = its.and_then(|daemon| daemon.slice_directories.clone());
    }
    control_daemons
}

/// The size of `sun_path` in `sockaddr_un`: the most bytes of a socket's path, including the zero byte at its end.
const SOCKET_PATH_BYTES: usize = 108;

/// The private directory of the control daemon with this pipe directory. Hard links need the same file system, so the private
/// directory is next to the configured pipe directory. The pipe directory is mounted in containers with everything in it, so
/// the private directory is outside. None if the path is too long for the sockets.
fn private_directory(pipe_directory: &Path, settings: &Settings) -> Option<PathBuf> {
    let below = pipe_directory.strip_prefix(&settings.pipe_directory).ok()?;
    let base = settings.private_directory();
    // Joining an empty path would add a slash at the end.
    let directory = if below.as_os_str().is_empty() { base } else { base.join(below) };
    config::has_room_for_sockets(&directory).then_some(directory)
}

/// The directory that contains the directories of the slices of these GPUs. None if the path of a socket in it would be too
/// long.
fn slice_directories(gpus: &[(&GpuPlan, &NvmlFacts)], settings: &Settings) -> Option<PathBuf> {
    let directories = settings.pipe_directory.join(DIRECTORIES);
    let names = gpus.iter().map(|(gpu, _)| gpu.slice(gpu.slices().saturating_sub(1)).directory_name());
    let longest = names.map(|name| name.len()).max()?;
    let path = directories.as_os_str().len() + "/".len() + longest + "/control".len();
    (path < SOCKET_PATH_BYTES).then_some(directories)
}

/// Plans one control daemon for these GPUs. `slice` has the only slice that the control daemon serves, and the control daemon's
/// pipe directory. None if the control daemon serves all slices of the GPUs.
fn control_daemon(
    gpus: &[(&GpuPlan, &NvmlFacts)],
    slice: Option<(SliceId, PathBuf)>,
    settings: &Settings,
    inventory: &Inventory,
    supervision: &Arc<Supervision>,
) -> Option<ControlDaemonPlan> {
    let (first, NvmlFacts { uuid, .. }) = gpus.first()?;
    let only = slice.as_ref().map(|(slice, _)| *slice);
    let pipe_directory = slice.map_or_else(|| first.pipe_directory.clone(), |(_, directory)| directory);
    let log = &settings.log_directory;
    let (id, log_directory) = match (only, settings.topology) {
        (Some(slice), _) => (DaemonId::Slice(slice), log.join(slice.directory_name())),
        (None, Topology::Shared) => (DaemonId::Shared, log.clone()),
        (None, Topology::PerGpu | Topology::PerSlice) => (DaemonId::Gpu(uuid.clone()), log.join(uuid)),
    };
    let all_can = gpus.iter().all(|(_, facts)| MULTI_USER.holds_on(facts.compute_capability));
    let if_possible = settings.multiuser == MultiUser::Auto && all_can;
    let multiuser = settings.multiuser == MultiUser::On || if_possible;
    // With the property `LINKED_SOCKET`, clients can connect through a hard link in any directory. Private directories and the
    // directories of slices need this property.
    let series = inventory.series();
    let linked =
        multiuser && gpus.iter().all(|(_, facts)| LINKED_SOCKET.holds(series, facts.compute_capability));
    let private_directory = linked.then(|| private_directory(&pipe_directory, settings)).flatten();
    let slice_directories = linked.then(|| slice_directories(gpus, settings)).flatten();
    // The driver applies a default limit to a GPU by the ordinal that the client sees. In a container with one GPU, that GPU
    // has ordinal 0, even if it has another ordinal on the host. A client's own limit can only lower the default. So the
    // default of every ordinal must be as large as the limit of the largest slice.
    let ordinals =
        |gpu: &GpuPlan| only.map_or(0..gpu.slices(), |slice| slice.ordinal..slice.ordinal.saturating_add(1));
    let sizes: Vec<SliceSize> =
        gpus.iter().flat_map(|(gpu, _)| ordinals(gpu).map(|ordinal| gpu.size(ordinal))).collect();
    let SliceSize { memory_mib: memory_limit_mib, thread_percentage, .. } = SliceSize::largest(&sizes);
    let served = |(gpu, facts): &(&GpuPlan, &NvmlFacts)| ServedGpu {
        uuid: facts.uuid.clone(),
        id: Some(gpu.gpu.id()),
        memory_limit_mib,
        sizes: ordinals(gpu).map(|ordinal| (ordinal, gpu.size(ordinal))).collect(),
        limits_enforced: gpu.limits_enforced,
        capacity: gpu.places,
        // If several control daemons serve a GPU, NVML lists the clients of all of them, and does not say to which control
        // daemon a client belongs.
        clients_listed: gpu.clients_counted && only.is_none(),
    };
    Some(ControlDaemonPlan {
        id,
        pipe_directory,
        log_directory,
        gpus: gpus.iter().map(served).collect(),
        thread_percentage,
        multiuser,
        // The service may go without multi-user mode only if the plan has no private directory and no directories of slices.
        // Without multi-user mode a server runs as the user of its clients, and needs access to the control daemon's directory.
        multiuser_optional: if_possible && slice_directories.is_none() && private_directory.is_none(),
        prewarm: settings.prewarm && multiuser,
        cpus: Cpus::union(gpus.iter().map(|(gpu, _)| gpu.cpus)).and_then(|cpus| inventory.if_not_all(cpus)),
        private_directory,
        slice_directories,
        supervision: Arc::clone(supervision),
    })
}

/// Fails if a log directory is at the path where a control daemon makes its FIFO, since that control daemon would write no log.
pub(super) fn each_writes_a_log(
    control_daemons: &[ControlDaemonPlan],
    settings: &Settings,
) -> Result<(), PlanError> {
    let Some(origin) = &settings.log_in_pipe else { return Ok(()) };
    let silent = |daemon: &&ControlDaemonPlan| {
        daemon.log_directory.starts_with(daemon.control_directory().join(driver::LOG_FIFO))
    };
    let problems = control_daemons.iter().filter(silent).map(|daemon| {
        let found = format!(
            "found {log_directory:?}, where control daemon {id} makes a FIFO: without this FIFO the control \
             daemon writes no log, and the service learns of GPU faults from the log",
            log_directory = daemon.log_directory.display(),
            id = daemon.id
        );
        let remedy = format!("choose a directory outside of the pipe directory, such as {LOG_BESIDE_PIPE}");
        LocatedProblem::new(origin.clone(), LOG_KEY, found, remedy)
    });
    let problems: Vec<_> = problems.collect();
    if problems.is_empty() { Ok(()) } else { Err(PlanError::Problems(problems)) }
}

/// Adds a warning for slices with smaller limits than the control daemon's defaults. The defaults are the limits of the control
/// daemon's largest slice, and a client that sets no limits itself gets the defaults.
pub(super) fn warn_of_loose_defaults(gpus: &mut [GpuPlan], control_daemons: &[ControlDaemonPlan]) {
    for control_daemon in control_daemons {
        let holder = match control_daemon.id {
            DaemonId::Shared => "the shared control daemon",
            _ => "the control daemon",
        };
        let default = control_daemon.thread_percentage;
        for served in control_daemon.gpus.iter().filter(|served| served.limits_enforced) {
            let Some(gpu) = gpus.iter_mut().find(|gpu| Some(gpu.gpu.id()) == served.id) else { continue };
            let default_mib = served.memory_limit_mib;
            let threads = smaller(gpu, served, default.into(), "%", |size| size.thread_percentage.into());
            let memory = smaller(gpu, served, default_mib, "MiB", |size| size.memory_mib);
            let threads =
                threads.map(|own| loose(holder, default, &own, "%", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"));
            let memory =
                memory.map(|own| loose(holder, default_mib, &own, "MiB", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"));
            gpu.warnings.extend(threads.into_iter().chain(memory));
        }
    }
}

fn smaller(
    gpu: &GpuPlan,
    served: &ServedGpu,
    default: u64,
    unit: &str,
    part: impl Fn(&SliceSize) -> u64,
) -> Option<String> {
    let own: Vec<(u32, u64)> = served
        .sizes
        .iter()
        .map(|(ordinal, size)| (*ordinal, part(size)))
        .filter(|(_, own)| *own < default)
        .collect();
    let (_, first) = own.first()?;
    if own.len() == served.sizes.len() && own.iter().all(|(_, own)| own == first) {
        return Some(format!("{first} {unit}"));
    }
    let named = own.iter().map(|(ordinal, own)| format!("{own} {unit} ({})", gpu.slice(*ordinal)));
    Some(named.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::{CpuAffinity, ThreadPolicy};
    use crate::plan::tests::{facts, h200s, limits, node, plan, with};
    use crate::problem::Origin;

    /// A slice waits for new defaults of the control daemon only if the limits of the slice change too.
    #[test]
    fn a_slice_with_unchanged_limits_waits_for_nothing() {
        let plan_of = |slices: [(u64, u8); 3]| {
            let gpus = slices.iter().enumerate().map(|(n, (memory, threads))| ServedGpu {
                uuid: format!("GPU-{n}"),
                id: Some("00:06.0".parse().unwrap()),
                memory_limit_mib: slices.iter().map(|(memory, _)| *memory).max().unwrap(),
                sizes: (0..4)
                    .map(|ordinal| {
                        (
                            ordinal,
                            SliceSize { memory_mib: *memory, thread_percentage: *threads, max_clients: 12 },
                        )
                    })
                    .collect(),
                limits_enforced: true,
                capacity: 48,
                clients_listed: true,
            });
            ControlDaemonPlan {
                id: DaemonId::Shared,
                pipe_directory: "/tmp/nvidia-mps/pipe".into(),
                log_directory: "/tmp/nvidia-mps/log".into(),
                private_directory: None,
                slice_directories: None,
                gpus: gpus.collect(),
                thread_percentage: slices.iter().map(|(_, threads)| *threads).max().unwrap(),
                multiuser: true,
                multiuser_optional: true,
                prewarm: true,
                cpus: None,
                supervision: Arc::default(),
            }
        };
        let (half, quarter, eighth) = ((8000, 50), (4000, 25), (2000, 12));
        for (before, after, expected) in [
            ([quarter; 3], [quarter; 3], &[][..]),
            // The control daemon's default stays the same and is larger than the new limits, so no slice waits for the control
            // daemon.
            ([quarter; 3], [quarter, eighth, quarter], &[]),
            ([quarter; 3], [eighth; 3], &["GPU-0", "GPU-1", "GPU-2"]),
            // The default grows for the new limits on the first GPU. The slices of the other GPUs have the same limits as
            // before.
            ([quarter; 3], [half, quarter, quarter], &["GPU-0"]),
            // The default before the change was smaller than the new limits on the second GPU.
            ([eighth; 3], [half, quarter, eighth], &["GPU-0", "GPU-1"]),
            // The default shrinks to the new limits on the first GPU.
            ([half, quarter, eighth], [quarter, quarter, eighth], &["GPU-0"]),
            ([quarter; 3], [(4000, 12), quarter, quarter], &[]),
            ([quarter; 3], [(4000, 30), quarter, quarter], &["GPU-0"]),
        ] {
            let (before, after) = (plan_of(before), plan_of(after));
            assert_eq!(after.to_be_set_since(&before).collect::<Vec<_>>(), expected, "{before:?} {after:?}");
        }
        let mut fewer = plan_of([quarter; 3]);
        fewer.gpus.truncate(2);
        assert_eq!(plan_of([quarter; 3]).to_be_set_since(&fewer).collect::<Vec<_>>(), ["GPU-2"]);
    }

    #[test]
    fn a_shared_control_daemon_serves_in_pci_order_with_the_largest_percentage() {
        let inventory = h200s();
        let plan = plan(&with(vec![(node(130), 4), (node(128), 10), (node(129), 2)]), &inventory).unwrap();
        let configured: Vec<_> = plan.gpus.iter().map(|gpu| gpu.gpu.pci.address.bus).collect();
        assert_eq!(configured, [0x1c, 0x1a, 0x1b]);
        assert_eq!(limits(&plan), [(30720, 25), (12288, 10), (61440, 50)]);
        let [daemon] = plan.control_daemons.as_slice() else { panic!("{plan:?}") };
        let served: Vec<_> =
            daemon.gpus.iter().map(|gpu| (gpu.uuid.as_str(), gpu.memory_limit_mib)).collect();
        assert_eq!(served, [("GPU-0", 61440), ("GPU-1", 61440), ("GPU-2", 61440)]);
        assert_eq!(daemon.thread_percentage, 50);
        assert_eq!((daemon.multiuser, daemon.multiuser_optional, daemon.prewarm), (true, false, true));
        assert!(
            plan.gpus[0].warnings[0].problem.found.contains("50 % by default"),
            "{:?}",
            plan.gpus[0].warnings
        );
        assert!(
            plan.gpus[1].warnings[0].problem.found.contains("limit of their slice: 10 %"),
            "{:?}",
            plan.gpus[1].warnings
        );
        assert!(
            plan.gpus[1].warnings[1].problem.found.contains("limit of their slice: 12288 MiB"),
            "{:?}",
            plan.gpus[1].warnings
        );
        assert_eq!(plan.gpus[2].warnings, []);
    }

    #[test]
    fn each_gpu_can_have_a_control_daemon_of_its_own() {
        let mut settings = with(vec![(node(131), 4), (node(128), 10)]);
        settings.topology = Topology::PerGpu;
        let mut inventory = h200s();
        facts(&mut inventory, 0).compute_capability = Some((6, 1));
        let plan = plan(&settings, &inventory).unwrap();
        let daemons: Vec<_> = plan
            .control_daemons
            .iter()
            .map(|daemon| {
                let pipe = daemon.pipe_directory.to_str().unwrap();
                (daemon.id.clone(), pipe, daemon.gpus.len(), daemon.thread_percentage, daemon.multiuser)
            })
            .collect();
        assert_eq!(
            daemons,
            [
                ("GPU-0".into(), "/tmp/nvidia-mps/pipe/GPU-0", 1, 10, false),
                ("GPU-3".into(), "/tmp/nvidia-mps/pipe/GPU-3", 1, 25, true),
            ]
        );
        assert_eq!(plan.control_daemons[0].log_directory, Path::new("/tmp/nvidia-mps/log/GPU-0"));
        assert_eq!(plan.gpus[0].pipe_directory, Path::new("/tmp/nvidia-mps/pipe/GPU-3"));
        // Each control daemon has one GPU with equal slices. The limits of the slices are therefore the defaults of the control
        // daemon, and the plan has no warnings.
        assert_eq!(plan.gpus[0].warnings, []);
    }

    /// A control daemon with a private directory makes its FIFO in that directory. With one control daemon per GPU, each makes
    /// its FIFO in its own subdirectory. In both cases `log` in the pipe directory itself is no FIFO, so a log directory may be
    /// there.
    #[test]
    fn a_control_daemon_that_would_write_no_log_is_an_error() {
        let silent = |version: &str, topology, log: &str| {
            let mut settings = with(vec![(node(128), 2), (node(129), 1)]);
            settings.topology = topology;
            settings.pipe_directory = "/run/mps".into();
            settings.log_directory = log.into();
            let origin = Origin { file: "/etc/yunion/host.conf".into(), line: Some(4) };
            settings.log_in_pipe = Some(origin);
            let inventory = Inventory { driver: Ok(version.to_owned()), ..h200s() };
            plan(&settings, &inventory).err()
        };
        for version in ["535.261.03", "575.57.08"] {
            for log in ["/run/mps/log", "/run/mps/log/of/mps"] {
                let Some(PlanError::Problems(problems)) = silent(version, Topology::Shared, log) else {
                    panic!("{log}")
                };
                let [problem] = problems.as_slice() else { panic!("{problems:?}") };
                let told = problem.to_string();
                assert!(
                    told.starts_with("/etc/yunion/host.conf:4: cuda_mps_log_directory: found \"/run/mps/log"),
                    "{told}"
                );
                assert!(told.contains("such as /var/log/yunion-mps"), "{told}");
            }
            assert_eq!(silent(version, Topology::Shared, "/run/mps/logs"), None);
            assert_eq!(silent(version, Topology::PerGpu, "/run/mps/log"), None);
        }
        assert_eq!(silent("580.159.04", Topology::Shared, "/run/mps/log"), None);
    }

    #[test]
    fn multiuser_follows_the_setting_and_the_weakest_gpu() {
        let mut settings = with(vec![(node(128), 4), (node(129), 4)]);
        let mut mixed = h200s();
        facts(&mut mixed, 1).compute_capability = Some((6, 1));
        let mut seen = |setting, prewarm, inventory: &Inventory| {
            settings.multiuser = setting;
            settings.prewarm = prewarm;
            let daemon = plan(&settings, inventory).unwrap().control_daemons.remove(0);
            (daemon.multiuser, daemon.multiuser_optional, daemon.prewarm)
        };
        assert_eq!(seen(MultiUser::Auto, true, &h200s()), (true, false, true), "slices have directories");
        let older = Inventory { driver: Ok("575.57.08".to_owned()), ..h200s() };
        assert_eq!(seen(MultiUser::Auto, true, &older), (true, true, true));
        assert_eq!(seen(MultiUser::Auto, false, &older), (true, true, false));
        assert_eq!(seen(MultiUser::Auto, true, &mixed), (false, false, false));
        assert_eq!(seen(MultiUser::On, true, &mixed), (true, false, true));
        assert_eq!(seen(MultiUser::Off, true, &h200s()), (false, false, false));
    }

    #[test]
    fn slices_have_directories_where_a_linked_socket_is_enough() {
        let settings = with(vec![(node(128), 2), (node(129), 1)]);
        let linked = |settings: &Settings, inventory: &Inventory| {
            let plan = plan(settings, inventory).unwrap();
            let daemon = &plan.control_daemons[0];
            assert_eq!(plan.gpus[0].slice_directories, daemon.slice_directories);
            assert_eq!(daemon.private_directory.is_some(), !daemon.multiuser_optional && daemon.multiuser);
            assert!(daemon.slice_directories.is_none() || daemon.private_directory.is_some());
            daemon.slice_directories.as_ref()?;
            assert_eq!(plan.gpus[0].slice_directory(1).unwrap().file_name().unwrap(), "1a_00.0-1");
            Some(daemon.slices().map(SliceId::directory_name).collect::<Vec<_>>())
        };
        let mut inventory = h200s();
        inventory.driver = Ok("580.159.04".to_owned());
        let all = ["1a_00.0-0", "1a_00.0-1", "1b_00.0-0"].map(str::to_owned).to_vec();
        assert_eq!(linked(&settings, &inventory), Some(all.clone()));
        let per_gpu = Settings { topology: Topology::PerGpu, ..settings.clone() };
        assert_eq!(linked(&per_gpu, &inventory), Some(all[..2].to_vec()));
        let single_user = Settings { multiuser: MultiUser::Off, ..settings.clone() };
        assert_eq!(linked(&single_user, &inventory), None);
        let too_long =
            Settings { pipe_directory: format!("/tmp/{}", "x".repeat(80)).into(), ..settings.clone() };
        assert_eq!(linked(&too_long, &inventory), None);
        inventory.driver = Ok("575.57.08".to_owned());
        assert_eq!(linked(&settings, &inventory), None);
        inventory.driver = Ok("580.159.04".to_owned());
        facts(&mut inventory, 1).compute_capability = Some((6, 1));
        assert_eq!(linked(&settings, &inventory), None);
    }

    #[test]
    fn a_private_directory_is_beside_the_pipe_directory() {
        let mut inventory = h200s();
        inventory.driver = Ok("580.159.04".to_owned());
        let private = |pipe: &str, topology| {
            let settings = Settings {
                pipe_directory: pipe.into(),
                topology,
                ..with(vec![(node(128), 2), (node(129), 1)])
            };
            let daemon = plan(&settings, &inventory).unwrap().control_daemons.remove(0);
            assert!(!daemon.control_directory().ends_with("/"));
            let private = daemon.private_directory.clone()?;
            assert_eq!(daemon.control_directory(), private);
            Some(private.to_str().unwrap().to_owned())
        };
        let shared = |pipe: &str| private(pipe, Topology::Shared);
        assert_eq!(shared("/tmp/nvidia-mps/pipe").unwrap(), "/tmp/nvidia-mps/pipe.private");
        let per_gpu = private("/tmp/nvidia-mps/pipe", Topology::PerGpu).unwrap();
        assert_eq!(per_gpu, "/tmp/nvidia-mps/pipe.private/GPU-0");
        let long = |bytes: usize| format!("/{}", "x".repeat(bytes - 1));
        assert_eq!(shared(&long(79)).unwrap(), format!("{}.private", long(79)));
        assert_eq!(shared(&long(80)), None);
    }

    #[test]
    fn control_daemons_run_near_their_gpus() {
        let cpus = |topology, cpu_affinity, near: [Option<&str>; 2]| -> Vec<Option<String>> {
            let mut settings = with(vec![(node(128), 2), (node(129), 2)]);
            (settings.topology, settings.cpu_affinity) = (topology, cpu_affinity);
            let mut inventory = h200s();
            for (gpu, near) in inventory.gpus.iter_mut().zip(near) {
                gpu.pci.local_cpus = near.and_then(Cpus::parse);
            }
            let daemons = plan(&settings, &inventory).unwrap().control_daemons;
            daemons.iter().map(|daemon| daemon.cpus.map(|cpus| cpus.to_string())).collect()
        };
        let some = |cpus: &str| Some(cpus.to_owned());
        let sockets = [Some("0-15,32-47"), Some("16-31,48-63")];
        let one = [Some("0-15"), Some("16-31")];
        assert_eq!(cpus(Topology::PerGpu, CpuAffinity::None, sockets), [None, None]);
        let each = [some("0-15,32-47"), some("16-31,48-63")];
        assert_eq!(cpus(Topology::PerGpu, CpuAffinity::Auto, sockets), each);
        assert_eq!(cpus(Topology::Shared, CpuAffinity::Auto, sockets), [None], "all of the 64 CPUs");
        assert_eq!(cpus(Topology::Shared, CpuAffinity::Auto, one), [some("0-31")]);
        assert_eq!(cpus(Topology::Shared, CpuAffinity::Auto, [Some("0-15"), None]), [None]);
        assert_eq!(cpus(Topology::PerGpu, CpuAffinity::Auto, [Some("0-15"), None]), [some("0-15"), None]);
        assert_eq!(cpus(Topology::PerGpu, CpuAffinity::Auto, [Some("0-63"), Some("0-127")]), [None, None]);
    }

    /// When the CPUs near a GPU change, for example because a CPU was switched off, the control daemon is not replaced.
    #[test]
    fn only_the_key_needs_another_control_daemon() {
        let mut daemon = plan(&with(vec![(node(128), 2)]), &h200s()).unwrap().control_daemons.remove(0);
        let mut misfit = |cpus: Option<&str>, near_cpus| {
            daemon.cpus = cpus.and_then(Cpus::parse);
            let gpus: Vec<String> = daemon.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
            let present = Present {
                pipe_directory: &daemon.pipe_directory,
                control_directory: daemon.control_directory(),
                log_directory: &daemon.log_directory,
                gpus: &gpus,
                multiuser: true,
                near_cpus,
            };
            daemon.misfit(&present, |_| true)
        };
        assert_eq!(misfit(None, false), None);
        assert_eq!(misfit(Some("0-15"), true), None);
        assert_eq!(misfit(Some("0-14"), true), None);
        assert_eq!(misfit(Some("0-15"), false).as_deref(), Some("the control daemon's CPUs change to 0-15"));
        assert_eq!(
            misfit(None, true).as_deref(),
            Some("the control daemon's CPUs change to all CPUs of the host")
        );
    }

    /// A control daemon of an earlier version of this service has its sockets in the pipe directory.
    #[test]
    fn a_control_daemon_in_the_pipe_directory_does_not_fit() {
        let mut inventory = h200s();
        inventory.driver = Ok("580.159.04".to_owned());
        let daemon = plan(&with(vec![(node(128), 2)]), &inventory).unwrap().control_daemons.remove(0);
        let misfit = |control_directory: &Path| {
            let gpus: Vec<String> = daemon.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
            let present = Present {
                pipe_directory: &daemon.pipe_directory,
                control_directory,
                log_directory: &daemon.log_directory,
                gpus: &gpus,
                multiuser: true,
                near_cpus: false,
            };
            daemon.misfit(&present, |_| true)
        };
        assert_eq!(misfit(daemon.control_directory()), None);
        let moves =
            format!("the control daemon's sockets move to {}.private", daemon.pipe_directory.display());
        assert_eq!(misfit(&daemon.pipe_directory), Some(moves));
    }

    #[test]
    fn a_gpu_with_new_slices_waits_for_their_directories() {
        let mut inventory = h200s();
        inventory.driver = Ok("580.159.04".to_owned());
        let plan_of = |slices: u32, inventory: &Inventory| {
            let mut settings = with(vec![(node(128), slices), (node(129), 1)]);
            settings.thread_policy = ThreadPolicy::Unlimited;
            plan(&settings, inventory).unwrap().control_daemons.remove(0)
        };
        let waiting = |before: &ControlDaemonPlan, after: &ControlDaemonPlan| {
            after.to_be_set_since(before).map(str::to_owned).collect::<Vec<_>>()
        };
        let (two, four) = (plan_of(2, &inventory), plan_of(4, &inventory));
        assert_eq!(waiting(&two, &four), ["GPU-0"]);
        assert_eq!(waiting(&two, &two), [""; 0]);
        inventory.driver = Ok("575.57.08".to_owned());
        let older = plan_of(2, &inventory);
        assert_eq!(waiting(&older, &two), ["GPU-0", "GPU-1"], "after an upgrade of the driver");
    }

    proptest! {
        #[test]
        fn the_order_of_entries_changes_nothing_but_the_order(
            entries in Just(vec![(0u32, 4u32), (1, 10), (2, 3), (3, 7)]).prop_shuffle(),
            kept in 1usize..=4,
            per_gpu: bool,
        ) {
            let mut shuffled: Vec<_> = entries.into_iter().take(kept).collect();
            let make = |entries: &[(u32, u32)]| {
                let mut settings = with(entries.iter().map(|(gpu, slices)| (node(128 + gpu), *slices)).collect());
                settings.topology = if per_gpu { Topology::PerGpu } else { Topology::Shared };
                plan(&settings, &h200s()).unwrap()
            };
            let one = make(&shuffled);
            let in_order: Vec<_> = one.gpus.iter().map(|gpu| gpu.gpu.pci.address.bus - 0x1a).collect();
            let written: Vec<_> = shuffled.iter().map(|(gpu, _)| u8::try_from(*gpu).unwrap()).collect();
            prop_assert_eq!(in_order, written);
            shuffled.sort_unstable();
            let sorted = make(&shuffled);
            prop_assert_eq!(&one.control_daemons, &sorted.control_daemons);
            for gpu in &one.gpus {
                prop_assert!(sorted.gpus.contains(gpu));
            }
        }
    }
}
