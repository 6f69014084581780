//! The settings with which a container becomes a client of slices. The settings follow from the Snapshot and the chosen slices
//! alone.

use std::path::{Path, PathBuf};

use crate::host::cpus::Cpus;
use crate::host::driver::{READ_ONLY_PIPE_DIRECTORY, series};
use crate::membership::{DEVICE_VARIABLE, PIPE_DIRECTORY_VARIABLE};
use crate::plan::context_mib;
use crate::published::request_error::RequestError;
use crate::published::snapshot::{GpuView, Snapshot, drained};
use crate::text::clean;
use mps_core::access::Obstacle;
use mps_core::terms::{SliceId, SliceSize};
use serde::{Deserialize, Serialize};

/// The path of a slice's directory in a container. In a container with several slices, the directories of the other slices are
/// next to `/run/yunion-mps`, and their names end with the slices' names.
const SLICE_DIRECTORY: &str = "/run/yunion-mps";

/// NVIDIA's container runtime reads these variables, which choose the GPUs of the container and the parts of the driver in it.
const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
const DRIVER_CAPABILITIES: &str = "NVIDIA_DRIVER_CAPABILITIES";

/// The variable with the CPUs near the GPUs of a container. The service does not read this variable. The program that starts
/// the container can read it.
const CPUS_VARIABLE: &str = "YUNION_MPS_CPUS";

/// The memory that one process of a container can use, as a fraction of the GPU's memory and in MiB. The service does not read
/// these variables. Inference servers need them, since an inference server sees the memory of the whole GPU and not of its
/// slice.
const FRACTION_VARIABLE: &str = "YUNION_MPS_MEMORY_FRACTION";
const MIB_VARIABLE: &str = "YUNION_MPS_MEMORY_MIB";

/// The hard and the reserved memory limit of a container, in MiB. A hook of NVIDIA's container toolkit reads these variables
/// and makes the kernel enforce the limits. A container image may set these variables too. So the service's settings override
/// the hard limit with the memory of the slice, and the reserved memory with an empty value.
const TOOLKIT_LIMIT: &str = "NVIDIA_GPU_MEMORY_LIMIT";
const TOOLKIT_REQUEST: &str = "NVIDIA_GPU_MEMORY_REQUEST";

/// The part of a GPU's memory that no process can allocate, in MiB, since the driver, a server and one context use it. The
/// measured value is 1208 MiB on an H200 with driver 580.
const NEVER_FREE_MIB: u64 = 1280;

#[derive(Debug, Clone, PartialEq)]
pub struct ChosenSlice<'s> {
    pub gpu: &'s GpuView,
    pub ordinal: u32,
    pub name: String,
}

impl ChosenSlice<'_> {
    pub fn slice(&self) -> SliceId {
        self.gpu.plan.slice(self.ordinal)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ContainerConfig {
    pub environment: Vec<(String, String)>,
    pub mounts: Vec<Mount>,
    /// The UUIDs of the GPUs, each once, in the order of the caller's names.
    pub gpus: Vec<String>,
}

impl ContainerConfig {
    pub fn devices(&self) -> &str {
        devices_in(&self.environment)
    }

    /// Gives each slice's directory a path in the container that no other slice uses. So a container can combine the settings
    /// of several slices.
    #[must_use]
    pub fn at_own_places(mut self) -> Self {
        for mount in self.mounts.iter_mut().filter(|mount| mount.container == SLICE_DIRECTORY) {
            mount.container = own_place(&mount.host);
            for (_, value) in self.environment.iter_mut().filter(|(_, value)| value == SLICE_DIRECTORY) {
                value.clone_from(&mount.container);
            }
        }
        self
    }
}

fn own_place(directory: &str) -> String {
    let name = Path::new(directory).file_name().unwrap_or_default().to_string_lossy();
    format!("{SLICE_DIRECTORY}-{name}")
}

/// True for the variables that choose the GPUs of a container. A container with NVIDIA's own CDI devices must not have these
/// variables, since it would get each GPU twice.
pub fn gives_gpus(name: &str) -> bool {
    [VISIBLE_DEVICES, DRIVER_CAPABILITIES].contains(&name)
}

/// The published names of a container's slices and GPUs, separated by commas, from the container's environment. Empty if the
/// environment names none.
pub fn devices_in(environment: &[(String, String)]) -> &str {
    let devices = environment.iter().find(|(name, _)| name == DEVICE_VARIABLE);
    devices.map_or("", |(_, devices)| devices.as_str())
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount {
    pub host: String,
    pub container: String,
    pub read_only: bool,
}

const SLIPS: usize = 2;

const OFFERED: usize = 3;

pub fn not_ready(snapshot: &Snapshot) -> RequestError {
    RequestError::NotReady(match snapshot.reason.as_str() {
        "" => "the service does not know the GPUs of this host yet; ask again in a moment".to_owned(),
        reason => format!("the service does not know the GPUs of this host: {reason}"),
    })
}

pub fn none_named() -> RequestError {
    RequestError::Failed("no slice was named; `yunion-mpsctl list` shows the names".to_owned())
}

pub fn no_such_device(snapshot: &Snapshot, asked: &str) -> RequestError {
    let gpus = snapshot.gpus.iter().flatten().map(|gpu| gpu.plan.gpu.id().to_string());
    let names = gpus.chain(snapshot.slices().map(|(gpu, ordinal)| gpu.slice_name(ordinal)));
    let mut near: Vec<(usize, String)> = names
        .filter(|name| name.len().abs_diff(asked.len()) <= SLIPS)
        .map(|name| (strsim::osa_distance(&name, asked), name))
        .filter(|(slips, _)| *slips <= SLIPS)
        .collect();
    near.sort_by_key(|(slips, _)| *slips);
    let near: Vec<String> = near.into_iter().map(|(_, name)| name).take(OFFERED).collect();
    let offer = if near.is_empty() {
        "`yunion-mpsctl list` shows the names".to_owned()
    } else {
        format!("did you mean {}? `yunion-mpsctl list` shows all names", near.join(" or "))
    };
    RequestError::NoSuchDevice(format!("there is no slice or GPU {asked:?}; {offer}"))
}

pub fn refusal(device: &str, obstacle: &Obstacle) -> RequestError {
    let text = match obstacle {
        Obstacle::Unserved(reason) => format!("{device} is not served: {reason}"),
        Obstacle::Taken(by) => {
            format!("{device} is taken by {by}; yunion-mpsctl list -o wide shows who has which slice")
        }
        Obstacle::Drained => format!("{device} is {}", drained(device)),
        Obstacle::Unusable(reason) => format!("{device} can't be served: {reason}"),
    };
    refused_by(obstacle, text)
}

pub(super) fn refused_by(obstacle: &Obstacle, text: String) -> RequestError {
    match obstacle {
        Obstacle::Unserved(_) => RequestError::NotServed(text),
        Obstacle::Taken(_) => RequestError::Taken(text),
        Obstacle::Drained => RequestError::Drained(text),
        Obstacle::Unusable(_) => RequestError::Failed(text),
    }
}

/// The settings for a container that uses these slices. A container with two slices of one GPU has the limits of one slice. The
/// control daemon's defaults are the limits of one slice, and a client can only lower the defaults.
pub fn container_config(
    snapshot: &Snapshot,
    slices: &[ChosenSlice<'_>],
) -> Result<ContainerConfig, RequestError> {
    let mut devices: Vec<String> = Vec::new();
    let mut gpus: Vec<(&GpuView, SliceSize)> = Vec::new();
    let mut directories: Vec<PathBuf> = Vec::new();
    let mut connect: Option<PathBuf> = None;
    for ChosenSlice { gpu, ordinal, name } in slices {
        let (gpu, ordinal, name) = (*gpu, *ordinal, name.clone());
        if let Err(reason) = &gpu.plan.gpu.nvml {
            let found = format!("the UUID of the GPU of {name} is not known: {reason}");
            return Err(RequestError::Failed(found));
        }
        let pipe_directory = gpu.plan.slice_pipe_directory(ordinal);
        if let (Some(first), Some(device)) = (&connect, devices.first())
            && *first != pipe_directory
        {
            return Err(RequestError::Failed(format!(
                "{device} and {name} have different pipe directories, but a container can have only one pipe \
                 directory; ask for slices or GPUs of one control daemon, or write cuda_mps_topology: shared \
                 in host.conf"
            )));
        }
        connect.get_or_insert(pipe_directory);
        let directory = gpu.plan.slice_directory(ordinal);
        directories.extend(directory.filter(|directory| !directories.contains(directory)));
        if !gpus.iter().any(|(known, _)| known.uuid() == gpu.uuid()) {
            gpus.push((gpu, gpu.plan.size(ordinal)));
        }
        if !devices.contains(&name) {
            devices.push(name);
        }
    }
    let percentage = gpus.iter().map(|(_, size)| size.thread_percentage).min().ok_or_else(none_named)?;
    let connect = connect.as_ref().filter(|_| directories.is_empty());
    let connect = connect.map_or(Path::new(SLICE_DIRECTORY), PathBuf::as_path);
    let smallest_mib = gpus.iter().map(|(_, size)| size.memory_mib).min().ok_or_else(none_named)?;
    let uuids: Vec<String> = gpus.iter().map(|(gpu, _)| gpu.uuid().to_owned()).collect();
    let mut environment = vec![
        (PIPE_DIRECTORY_VARIABLE, connect.display().to_string()),
        (VISIBLE_DEVICES, uuids.join(",")),
        (DRIVER_CAPABILITIES, "all".to_owned()),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percentage.to_string()),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", memory_limits(&gpus)),
        (TOOLKIT_LIMIT, smallest_mib.to_string()),
        (TOOLKIT_REQUEST, String::new()),
    ];
    environment.extend(usable_memory(&gpus));
    environment.push((DEVICE_VARIABLE, devices.join(",")));
    let cpus = Cpus::union(gpus.iter().map(|(gpu, _)| gpu.plan.cpus));
    environment.extend(cpus.map(|cpus| (CPUS_VARIABLE, cpus.to_string())));
    let mounts = if directories.is_empty() {
        pipe_directory_mounts(snapshot, &gpus, connect)
    } else {
        slice_mounts(directories)
    };
    let variable = |(name, value): (&str, String)| (name.to_owned(), clean(&value));
    Ok(ContainerConfig { environment: environment.into_iter().map(variable).collect(), mounts, gpus: uuids })
}

/// The mounts of the slices' directories. The container's programs connect to the control daemon in the first directory. The
/// other mounts show the service which slices the container has.
fn slice_mounts(directories: Vec<PathBuf>) -> Vec<Mount> {
    let mounts = directories.into_iter().enumerate().map(|(number, host)| {
        let host = text(&host);
        let container = if number == 0 { SLICE_DIRECTORY.to_owned() } else { own_place(&host) };
        Mount { host, container, read_only: true }
    });
    mounts.collect()
}

fn text(path: &Path) -> String {
    clean(&path.to_string_lossy())
}

fn pipe_directory_mounts(
    snapshot: &Snapshot,
    gpus: &[(&GpuView, SliceSize)],
    pipe_directory: &Path,
) -> Vec<Mount> {
    let mount =
        |directory: &Path, read_only| Mount { host: text(directory), container: text(directory), read_only };
    // With write access to the pipe directory, root in a container can remove or replace the control daemon's sockets for all
    // users. The default pipe directory is below `/tmp`, so a container that runs `rm -rf /tmp/*` at its start removes the
    // sockets. So the mount is read-only if the driver allows a read-only mount.
    let driver = series(&snapshot.driver_version);
    let capability = |gpu: &GpuView| gpu.plan.gpu.facts()?.compute_capability;
    let read_only = gpus.iter().all(|(gpu, _)| READ_ONLY_PIPE_DIRECTORY.holds(driver, capability(gpu)));
    vec![mount(Path::new("/dev/shm"), false), mount(pipe_directory, read_only)]
}

/// The value of `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT`. For one GPU, the value names device 0, as in `0=5760M`, since a client with
/// one GPU has no other device. For several GPUs, the value has UUIDs, since CUDA chooses the order of the GPUs in the
/// container.
fn memory_limits(gpus: &[(&GpuView, SliceSize)]) -> String {
    let limits: Vec<String> = gpus
        .iter()
        .map(|(gpu, size)| {
            let device = if gpus.len() == 1 { "0" } else { gpu.uuid() };
            format!("{device}={}M", size.memory_mib)
        })
        .collect();
    limits.join(",")
}

/// The variables with the memory that one process can use on each of these GPUs, in MiB and as a fraction of the GPU's memory.
/// The fraction is omitted if NVML does not report the memory of a GPU. The result is empty if the CUDA context of a process
/// uses all memory of a slice.
fn usable_memory(gpus: &[(&GpuView, SliceSize)]) -> Vec<(&'static str, String)> {
    let usable = |(gpu, size): &(&GpuView, SliceSize)| {
        let beside_context = size.memory_mib.checked_sub(*context_mib(size.thread_percentage).end());
        let of_slice = beside_context.filter(|mib| *mib > 0)?;
        let Some(total) = gpu.plan.gpu.facts()?.memory_total_mib else { return Some((of_slice, None)) };
        let usable = of_slice.min(total.checked_sub(NEVER_FREE_MIB)?);
        Some((usable, Some(usable.checked_mul(1000)?.checked_div(total)?)))
    };
    let Some(usable) = gpus.iter().map(usable).collect::<Option<Vec<_>>>() else { return Vec::new() };
    let mib = usable.iter().map(|(mib, _)| *mib).min().unwrap_or_default();
    let thousandths: Option<Vec<u64>> = usable.iter().map(|(_, thousandths)| *thousandths).collect();
    let fraction = match thousandths.map(|all| all.into_iter().min().unwrap_or_default()) {
        Some(0) => return Vec::new(),
        fraction => fraction.map(|thousandths| (FRACTION_VARIABLE, format!("0.{thousandths:03}"))),
    };
    fraction.into_iter().chain([(MIB_VARIABLE, mib.to_string())]).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use mps_core::access::Asker;

    use super::*;
    use crate::problem::NamedProblem;
    use crate::published::access::choose;
    use crate::published::samples::{gpu, snapshot};
    use mps_core::bindings::{Bindings, BoundBy};

    fn container_config(snapshot: &Snapshot, names: &[&str]) -> Result<ContainerConfig, RequestError> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let asker = Asker { control_group: None, by: BoundBy::Platform, shares: false };
        super::container_config(snapshot, &choose(snapshot, &names, &Bindings::default(), asker)?)
    }

    fn two_gpus() -> Snapshot {
        let mut second = gpu("00:07.0", "GPU-2");
        for size in &mut second.plan.sizes {
            (size.memory_mib, size.thread_percentage) = (35942, 10);
        }
        snapshot(Some(vec![gpu("00:06.0", "GPU-1"), second]))
    }

    fn environment(config: &ContainerConfig) -> Vec<(&str, &str)> {
        config.environment.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
    }

    #[test]
    fn one_slice() {
        let config = container_config(&two_gpus(), &["00:06.0-1"]).unwrap();
        assert_eq!(
            environment(&config),
            [
                ("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps/pipe"),
                ("NVIDIA_VISIBLE_DEVICES", "GPU-1"),
                ("NVIDIA_DRIVER_CAPABILITIES", "all"),
                ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25"),
                ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=5760M"),
                ("NVIDIA_GPU_MEMORY_LIMIT", "5760"),
                ("NVIDIA_GPU_MEMORY_REQUEST", ""),
                ("YUNION_MPS_MEMORY_FRACTION", "0.241"),
                ("YUNION_MPS_MEMORY_MIB", "5553"),
                ("YUNION_MPS_DEVICE", "00:06.0-1"),
            ]
        );
        let mount = |directory: &str, read_only| Mount {
            host: directory.into(),
            container: directory.into(),
            read_only,
        };
        for (driver, read_only) in
            [("580.159.04", true), ("590.44", true), ("575.57.08", false), ("", false), ("unknown", false)]
        {
            for volta in [true, false] {
                let mut snapshot = two_gpus();
                driver.clone_into(&mut snapshot.driver_version);
                let gpu = Arc::make_mut(&mut snapshot.gpus.as_mut().unwrap()[0]);
                let nvml = gpu.plan.gpu.nvml.as_mut().unwrap();
                nvml.compute_capability = Some(if volta { (7, 0) } else { (6, 1) });
                let config = container_config(&snapshot, &["00:06.0-1"]).unwrap();
                let pipe = mount("/tmp/nvidia-mps/pipe", volta && read_only);
                assert_eq!(config.mounts, [mount("/dev/shm", false), pipe]);
            }
        }
        assert_eq!(config.gpus, ["GPU-1"]);
    }

    #[test]
    fn several_gpus_get_the_smallest_percentage_and_limits_by_uuid() {
        let config = container_config(&two_gpus(), &["00:07.0-0", "00:06.0-3"]).unwrap();
        assert_eq!(
            environment(&config)[1..],
            [
                ("NVIDIA_VISIBLE_DEVICES", "GPU-2,GPU-1"),
                ("NVIDIA_DRIVER_CAPABILITIES", "all"),
                ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10"),
                ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "GPU-2=35942M,GPU-1=5760M"),
                ("NVIDIA_GPU_MEMORY_LIMIT", "5760"),
                ("NVIDIA_GPU_MEMORY_REQUEST", ""),
                ("YUNION_MPS_MEMORY_FRACTION", "0.241"),
                ("YUNION_MPS_MEMORY_MIB", "5553"),
                ("YUNION_MPS_DEVICE", "00:07.0-0,00:06.0-3"),
            ]
        );
        assert_eq!(config.gpus, ["GPU-2", "GPU-1"]);
    }

    #[test]
    fn the_usable_memory_is_a_part_of_the_slice_and_of_the_gpu() {
        let usable = |total: Option<u64>, limit: u64| {
            let mut snapshot = two_gpus();
            let plan = &mut Arc::make_mut(&mut snapshot.gpus.as_mut().unwrap()[0]).plan;
            plan.gpu.nvml.as_mut().unwrap().memory_total_mib = total;
            let size = SliceSize { memory_mib: limit, ..plan.size(0) };
            usable_memory(&[(&snapshot.gpus.as_ref().unwrap()[0], size)])
        };
        let both = |fraction: &str, mib: &str| {
            vec![(FRACTION_VARIABLE, fraction.to_owned()), (MIB_VARIABLE, mib.to_owned())]
        };
        assert_eq!(usable(Some(143_771), 35_942), both("0.248", "35735"));
        assert_eq!(usable(Some(143_771), 143_771), both("0.991", "142491"));
        assert_eq!(usable(Some(143_771), 351), both("0.001", "144"));
        for nothing in [0, 207, 350] {
            assert_eq!(usable(Some(143_771), nothing), [], "{nothing}");
        }
        assert_eq!(usable(None, 35_942), [(MIB_VARIABLE, "35735".to_owned())]);
        assert_eq!(usable(None, 207), []);
        assert_eq!((usable(Some(1000), 1000), usable(Some(0), 0)), (Vec::new(), Vec::new()));
        assert_eq!(usable(Some(u64::MAX), u64::MAX), []);
    }

    #[test]
    fn two_slices_of_one_gpu_are_one_slice() {
        let two = container_config(&two_gpus(), &["00:06.0-1", "00:06.0-2", "00:06.0-1"]).unwrap();
        let mut one = container_config(&two_gpus(), &["00:06.0-1"]).unwrap();
        one.environment.pop();
        one.environment.push(("YUNION_MPS_DEVICE".to_owned(), "00:06.0-1,00:06.0-2".to_owned()));
        assert_eq!(two, one);
    }

    #[test]
    fn the_cpus_near_the_gpus_are_named() {
        let cpus = |near: [Option<&str>; 2], asked: &[&str]| {
            let mut snapshot = two_gpus();
            for (gpu, near) in snapshot.gpus.as_mut().unwrap().iter_mut().zip(near) {
                Arc::make_mut(gpu).plan.cpus = near.and_then(Cpus::parse);
            }
            let config = container_config(&snapshot, asked).unwrap();
            config.environment.into_iter().find(|(name, _)| name == "YUNION_MPS_CPUS").map(|(_, cpus)| cpus)
        };
        let both = &["00:07.0-0", "00:06.0-3"];
        let (near, other) = (Some("0-15,32-47"), Some("16-31"));
        assert_eq!(cpus([near, other], &["00:06.0-1"]).as_deref(), near);
        assert_eq!(cpus([near, other], both).as_deref(), Some("0-47"));
        assert_eq!(cpus([near, None], both), None);
        assert_eq!(cpus([near, None], &["00:07.0"]), None);
    }

    #[test]
    fn a_slice_with_a_directory_needs_nothing_else() {
        let mut snapshot = two_gpus();
        for gpu in snapshot.gpus.iter_mut().flatten().map(Arc::make_mut) {
            gpu.plan.slice_directories = Some("/tmp/nvidia-mps/pipe/slices".into());
        }
        let mount = |(directory, place): (&str, &str)| Mount {
            host: format!("/tmp/nvidia-mps/pipe/slices/{directory}"),
            container: place.into(),
            read_only: true,
        };
        for (asked, mounts) in [
            (&["00:06.0-1"][..], &[("00_06.0-1", "/run/yunion-mps")][..]),
            (&["00:06.0", "00:06.0-0"], &[("00_06.0-0", "/run/yunion-mps")]),
            (
                &["00:07.0-3", "00:06.0-1", "00:06.0-2", "00:07.0-3"],
                &[
                    ("00_07.0-3", "/run/yunion-mps"),
                    ("00_06.0-1", "/run/yunion-mps-00_06.0-1"),
                    ("00_06.0-2", "/run/yunion-mps-00_06.0-2"),
                ],
            ),
        ] {
            let config = container_config(&snapshot, asked).unwrap();
            assert_eq!(environment(&config)[0], ("CUDA_MPS_PIPE_DIRECTORY", "/run/yunion-mps"));
            assert_eq!(config.mounts, mounts.iter().copied().map(mount).collect::<Vec<_>>());
        }
        let config = container_config(&snapshot, &["00:06.0-1"]).unwrap().at_own_places();
        assert_eq!(config.mounts, [mount(("00_06.0-1", "/run/yunion-mps-00_06.0-1"))]);
        assert_eq!(environment(&config)[0], ("CUDA_MPS_PIPE_DIRECTORY", "/run/yunion-mps-00_06.0-1"));
        let whole = container_config(&two_gpus(), &["00:06.0-1"]).unwrap();
        assert_eq!(whole.clone().at_own_places(), whole);
    }

    #[test]
    fn a_gpu_stands_for_one_slice_of_it() {
        let by_uuid = container_config(&two_gpus(), &["GPU-1"]).unwrap();
        assert_eq!(by_uuid, container_config(&two_gpus(), &["0000:00:06.0"]).unwrap());
        assert_eq!(by_uuid.environment.last().unwrap().1, "00:06.0");
        assert_eq!(by_uuid.environment[4].1, "0=5760M");
    }

    #[test]
    fn a_gpu_that_needs_a_reset_is_given_to_nobody() {
        let mut view = gpu("00:07.0", "GPU-2");
        (view.needs_reset, view.reason) = (true, "Xid 48".to_owned());
        let obstacle = Obstacle::Unusable("Xid 48".to_owned());
        let refused = refusal("00:07.0-1", &obstacle);
        assert_eq!(container_config(&snapshot(Some(vec![view])), &["00:07.0-1"]), Err(refused));
    }

    #[test]
    fn a_gpu_that_can_not_be_served_is_given_to_nobody() {
        let with = |change: &dyn Fn(&mut crate::host::nvml::facts::NvmlFacts)| {
            let mut view = gpu("00:07.0", "GPU-2");
            change(view.plan.gpu.nvml.as_mut().unwrap());
            view.plan.obstacles = vec![NamedProblem::new("mig-enabled", "the reason", "")];
            view.healthy = false;
            view.reason = "the reason".to_owned();
            container_config(
                &snapshot(Some(vec![gpu("00:06.0", "GPU-1"), view])),
                &["00:06.0-0", "00:07.0-1"],
            )
        };
        let refused_by = |obstacle| Err(refusal("00:07.0-1", &obstacle));
        let refused = refused_by(Obstacle::Unusable("the reason".to_owned()));
        assert_eq!(with(&|facts| facts.state.mig_enabled = true), refused);
        assert_eq!(
            with(&|facts| facts.state.compute_mode = Some(crate::host::compute_mode::ComputeMode::Prohibited)),
            refused
        );
        // The service waits until the program without MPS has ended, so the caller may try again later.
        assert_eq!(
            with(&|facts| facts.state.foreign_processes = vec![(7, "job".to_owned())]),
            refused_by(Obstacle::Unserved("the reason".to_owned()))
        );
    }

    #[test]
    fn a_drained_slice_is_given_to_nobody_and_its_gpu_while_another_is_left() {
        let mut snapshot = two_gpus();
        let mut drain = |ordinals: std::ops::Range<u32>| {
            Arc::make_mut(&mut snapshot.gpus.as_mut().unwrap()[0]).drained.extend(ordinals);
            snapshot.clone()
        };
        let refusal = |snapshot: &Snapshot, names: &[&str]| {
            container_config(snapshot, names).err().map(|error| error.to_string())
        };
        let drained =
            |name| format!("{name} is drained for new clients; yunion-mpsctl undrain {name} ends the drain");
        let some = drain(1..3);
        assert_eq!(refusal(&some, &["00:06.0-0", "00:06.0-1"]), Some(drained("00:06.0-1")));
        assert_eq!(refusal(&some, &["00:06.0-0", "00:07.0-1", "GPU-1"]), None);
        let all = drain(0..4);
        assert_eq!(refusal(&all, &["GPU-1"]), Some(drained("00:06.0")));
        assert_eq!(refusal(&all, &["GPU-2"]), None);
    }

    #[test]
    fn no_answer_says_why() {
        assert_eq!(container_config(&two_gpus(), &[]), Err(none_named()));
        assert_eq!(
            container_config(&snapshot(None), &["00:06.0-1"]),
            Err(RequestError::NotReady(
                "the service does not know the GPUs of this host yet; ask again in a moment".to_owned()
            ))
        );
        assert_eq!(
            container_config(&two_gpus(), &["00:06.0-1", "00:06.0-4"]),
            Err(no_such_device(&two_gpus(), "00:06.0-4"))
        );
        let said = |asked: &str| no_such_device(&two_gpus(), asked).to_string();
        assert_eq!(
            said("00:06.0-4"),
            "there is no slice or GPU \"00:06.0-4\"; did you mean 00:06.0-0 or 00:06.0-1 or 00:06.0-2? `yunion-mpsctl list` \
             shows all names"
        );
        assert_eq!(said("gpu0"), "there is no slice or GPU \"gpu0\"; `yunion-mpsctl list` shows the names");
        let mut lost = gpu("00:06.0", "GPU-1");
        lost.plan.gpu.nvml = Err("GPU is lost".into());
        assert_eq!(
            container_config(&snapshot(Some(vec![lost])), &["00:06.0-1"]),
            Err(refusal("00:06.0-1", &Obstacle::Unusable("GPU is lost".to_owned())))
        );
    }

    #[test]
    fn gpus_of_different_control_daemons_do_not_go_together() {
        let mut snapshot = two_gpus();
        for gpu in snapshot.gpus.iter_mut().flatten().map(Arc::make_mut) {
            gpu.plan.pipe_directory.push(gpu.plan.gpu.nvml.as_ref().unwrap().uuid.clone());
        }
        let error = container_config(&snapshot, &["00:06.0-1", "00:07.0-2"]).unwrap_err();
        assert!(error.to_string().starts_with("00:06.0-1 and 00:07.0-2 have different pipe directories"));
        let alone = container_config(&snapshot, &["00:07.0-2"]).unwrap();
        assert_eq!(alone.environment[0].1, "/tmp/nvidia-mps/pipe/GPU-2");
    }
}
