//! Finds the tenant and the slices of each process that may be a client. The sources of a process's slices differ in how far
//! they can be trusted. `register::evidence` in `mps_core` has their order.
//!
//! * A binding: root has bound the control group of the process to slices. A program can't leave its control group unless it is
//!   root on the host. So a binding counts whatever the mounts and the environment say. No other process can claim a bound
//!   slice by its environment.
//! * Mounts: a container's runtime mounts the directories of the container's slices. No program in the container can mount the
//!   directory of another slice. So in a container the mounts count, whatever the environment says.
//! * The records of the host agent of Cloudpods: the devices of each container. No program in the container can change the records.
//!   The records count if root has not bound the control group and the container's mounts show no slice.
//! * The environment: a variable names the slice, or the directory in which the process searches for its control daemon. The
//!   environment counts if no other source names a slice: for a process on the host, or if an agent, such as the host agent of
//!   Cloudpods, has mounted the whole pipe directory into the container.
//!
//! An unprivileged user can make a user namespace, and in it mount any directory that the user sees. So a process's mounts
//! count only in the user namespace of the service, or in a container that the host's own runtime has made. But a tenant in
//! such a container can make another user namespace too. So in a user namespace other than the service's, a slice counts only
//! under two conditions. First, the first process of the container also sees the slice's directory. Second, neither process
//! sees a whole pipe directory, from which the tenant could have mounted the slice's directory.

pub mod containers;
mod guests;
mod users;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::iter;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use mps_core::bindings::{Binding, Bindings, BoundBy, ControlGroup};
use mps_core::register::{
    Evidence, GuestContainer, KnownBy, KnownClient, MayCommand, Membership, RecordedContainer, Tenant,
};
use mps_core::terms::{DIRECTORIES, DeviceName, GpuId, ProcessId, SliceId};
use rustix::io::Errno;

use crate::host::control_groups;
use crate::host::mounts::{self, Place};
use crate::host::{identity, proc};
use crate::plan::ControlDaemonPlan;
use containers::{containers_in, of_the_hosts, up_to_container};
pub use guests::records_without_effect;
use guests::{GuestRecord, GuestRecords};

pub const DEVICE_VARIABLE: &str = "YUNION_MPS_DEVICE";

pub const PIPE_DIRECTORY_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// The most slices that the environment of a process can claim. A container has at most one slice of each GPU, and a host has
/// fewer GPUs than this number.
const CLAIMS: usize = 64;

const ANCESTORS: usize = 32;

/// The facts about the slices of all control daemons that follow from the plan and the state file, without reading any process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Slices {
    pipe_directories: Arc<BTreeSet<PathBuf>>,
    /// The control daemons' own directories, which contain their privileged sockets.
    own_directories: BTreeSet<PathBuf>,
    gpus: BTreeMap<String, GpuId>,
    bindings: Arc<Bindings>,
    servers: Option<PathBuf>,
}

impl Slices {
    pub fn from_plans<'a>(plans: impl IntoIterator<Item = &'a ControlDaemonPlan>) -> Self {
        let mut slices = Self::default();
        for plan in plans {
            let parent = plan.slice_directories.as_deref().and_then(Path::parent);
            let directories = parent.into_iter().chain([plan.pipe_directory.as_path()]);
            Arc::make_mut(&mut slices.pipe_directories).extend(directories.map(Path::to_owned));
            slices.gpus.extend(plan.gpus.iter().filter_map(|gpu| Some((gpu.uuid.clone(), gpu.id?))));
        }
        slices
    }

    /// Adds GPUs, by UUID. A running control daemon may still have GPUs that the plan no longer gives to the control daemon.
    #[must_use]
    pub fn and_of<'a>(mut self, gpus: impl IntoIterator<Item = (&'a str, GpuId)>) -> Self {
        self.gpus.extend(gpus.into_iter().map(|(uuid, gpu)| (uuid.to_owned(), gpu)));
        self
    }

    /// Adds further pipe directories, in which running control daemons have slices.
    #[must_use]
    pub fn and_in<'a>(mut self, directories: impl IntoIterator<Item = &'a Path>) -> Self {
        Arc::make_mut(&mut self.pipe_directories).extend(directories.into_iter().map(Path::to_owned));
        self
    }

    #[must_use]
    pub fn commanded_in<'a>(mut self, directories: impl IntoIterator<Item = &'a Path>) -> Self {
        self.own_directories.extend(directories.into_iter().map(Path::to_owned));
        self
    }

    #[must_use]
    pub fn bound_by(self, bindings: &Arc<Bindings>) -> Self {
        Self { bindings: Arc::clone(bindings), ..self }
    }

    #[must_use]
    pub fn recorded_in(self, servers: &Path) -> Self {
        Self { servers: Some(servers.to_owned()), ..self }
    }

    pub fn gpus_of(&self, slices: &[SliceId]) -> Vec<&str> {
        let gpus = self.gpus.iter().filter(|(_, gpu)| slices.iter().any(|slice| slice.gpu == **gpu));
        gpus.map(|(uuid, _)| uuid.as_str()).collect()
    }

    /// The slices of a process that count on the GPU with this UUID. `all` has all slices of the process. An empty UUID means
    /// that the process uses no GPU yet. Then all its slices count. On a GPU that the service does not know, only slices from
    /// the environment count.
    pub fn on(&self, gpu: &str, all: Membership) -> Option<Membership> {
        match self.gpus.get(gpu) {
            Some(gpu) => all.on(*gpu),
            None => (gpu.is_empty() || !all.known_by.is_certain()).then_some(all),
        }
    }
}

/// The places of the slices' directories, and other facts that are the same for all processes. The service makes a
/// `SliceMounts` for each pass over the processes, on a separate thread, since reading the environment of a process can hang in
/// the driver.
#[derive(Debug)]
pub struct SliceMounts {
    /// The pipe directories, in a form that is the same in every mount namespace.
    pipes: Vec<Place>,
    /// False if a pipe directory exists, but its place could not be found.
    pipes_are_found: bool,
    pipe_directories: Arc<BTreeSet<PathBuf>>,
    own: Vec<Place>,
    /// The mount namespaces of the service and of the host's first process. A process in either of them runs on the host.
    host: Vec<PathBuf>,
    user: Option<PathBuf>,
    /// The first process of each container, by the container's id. The map is made when the first container needs it.
    first: OnceLock<BTreeMap<String, u32>>,
    bindings: Arc<Bindings>,
    records: Option<GuestRecords>,
    users: String,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Sight {
    slices: BTreeSet<SliceId>,
    /// True if a mount shows a part of a pipe directory, or contains a pipe directory.
    pipe: bool,
    /// True if a mount contains a whole pipe directory, or the directory in a pipe directory that has the directories of all
    /// slices.
    whole: bool,
    own: bool,
}

#[derive(Debug)]
pub struct ProcessSight {
    evidence: Evidence,
    /// The commands that a control daemon accepts from the process if the process is root. NVIDIA's control daemon decides by
    /// the user id from the kernel, and by the socket to which the client connects. The source is a test on an H200 with driver
    /// 580.159.04 (docs/security.md).
    as_root: MayCommand,
    /// All bindings. A process can't claim a slice that is bound to another control group.
    bindings: Arc<Bindings>,
    pipe_directories: Arc<BTreeSet<PathBuf>>,
}

impl SliceMounts {
    /// A pipe directory that does not exist is skipped, since it has no slices.
    pub fn find(slices: &Slices) -> Self {
        let namespaces = [proc::mount_namespace(proc::OWN), proc::mount_namespace(proc::FIRST)];
        let pipes = Place::find_all(&*slices.pipe_directories);
        Self {
            pipes_are_found: pipes.len()
                == slices.pipe_directories.iter().filter(|path| path.try_exists().unwrap_or(true)).count(),
            pipes,
            pipe_directories: Arc::clone(&slices.pipe_directories),
            own: Place::find_all(&slices.own_directories),
            host: namespaces.into_iter().flatten().collect(),
            user: proc::user_namespace(proc::OWN).ok(),
            first: OnceLock::new(),
            bindings: Arc::clone(&slices.bindings),
            records: slices.servers.clone().map(GuestRecords::in_directory),
            users: users::all(),
        }
    }

    /// Finds the facts about a process without reading its memory, since reading its memory could hang. If the environment of
    /// the process counts, the slices are unknown until [`ProcessSight::slices`] reads the environment. Fails if the process
    /// has ended.
    pub fn look_at(&self, process: ProcessId) -> io::Result<(KnownClient, ProcessSight)> {
        let pid = process.pid;
        let seen = self.see(pid)?;
        let status = proc::status(pid)?;
        let uid = status.real_uid();
        let record = self.record_of(pid);
        let slices = seen.evidence.slices(&[], |_| false);
        let by_records = slices.as_ref().is_some_and(|its| its.known_by == KnownBy::Platform);
        let recorded = record.as_ref().filter(|_| by_records);
        let recorded = recorded.and_then(|record| self.recorded_container(pid, record));
        let client = KnownClient {
            user: uid.map(|uid| users::name_in(&self.users, uid)),
            tenant: uid.and_then(|uid| tenant(uid, pid).ok()),
            guest: record.map(|record| record.names),
            label: self.label_of(pid),
            container: containers_in(&proc::cgroups_text(pid)?).next().map(str::to_owned),
            recorded,
            slices,
            // The kernel reports the user id as the host sees it. So root in a user namespace is another user here.
            may_command: status
                .effective_uid()
                .map(|uid| if uid == 0 { seen.as_root } else { MayCommand::Nothing }),
            command: proc::name(pid).unwrap_or_default(),
            ..KnownClient::only(process)
        };
        // The process may have ended during these reads, and another process may have got its PID.
        if identity::read(pid)? == process { Ok((client, seen)) } else { Err(Errno::SRCH.into()) }
    }

    /// Finds the slices in the mounts of a process. A program that calls chroot sees fewer mounts than its container, so the
    /// mounts of its ancestors count too. A sandbox in a container still belongs to the container. So the slices of its
    /// ancestors in other mount namespaces count too, although the sandbox can't reach the directories of these slices. Fails
    /// if the process has ended.
    fn see(&self, pid: u32) -> io::Result<ProcessSight> {
        let (mut believed, mut all) = (false, Sight::default());
        let (mut own_namespace, mut last) = (None, None);
        for process in iter::once(pid).chain(ancestors(pid)) {
            let Some(place) = self.place_of(process, process == pid)? else { break };
            if last.as_ref() == Some(&place) {
                continue;
            }
            let sight = match mounts::roots(process) {
                Ok(roots) => self.sight(&roots),
                Err(error) if process == pid => return Err(error),
                Err(_) => break,
            };
            let reaches = *own_namespace.get_or_insert_with(|| place.0.clone()) == place.0;
            all.own |= sight.own && reaches;
            let pipe = sight.pipe;
            if let Some(slices) = self.believed(process, sight) {
                believed |= reaches;
                all.pipe |= pipe && reaches;
                if all.slices.is_empty() {
                    all.slices = slices;
                }
            }
            last = Some(place);
        }
        // A process in a container reaches only the socket `control`, which clients use. If a control daemon's own directory or
        // an ancestor of it is mounted in the container, the process also reaches the privileged socket.
        let as_root = if last.is_none() || all.own { MayCommand::All } else { MayCommand::Neighbours };
        // If all pipe directories are found, trusted mounts without a slice's directory and without a pipe directory prove that
        // the process has no mounted slice: the process can't reach a pipe directory, whatever its environment says.
        let known = !all.slices.is_empty() || (believed && !all.pipe && self.pipes_are_found);
        let bound = self.binding_of(pid).map(bound);
        let slices: Vec<SliceId> = all.slices.into_iter().collect();
        let asks_records = Evidence::asks_records(bound.as_ref(), &slices);
        let record = if asks_records { self.record_of(pid) } else { None };
        let recorded = record.map(|record| record.devices).unwrap_or_default();
        Ok(ProcessSight {
            evidence: Evidence { bound, mounted: known.then_some(slices), recorded },
            as_root,
            bindings: Arc::clone(&self.bindings),
            pipe_directories: Arc::clone(&self.pipe_directories),
        })
    }

    fn label_of(&self, pid: u32) -> Option<String> {
        self.binding_of(pid).map(|its| its.label.clone()).filter(|label| !label.is_empty())
    }

    fn binding_of(&self, pid: u32) -> Option<&Binding> {
        // Most hosts have no bindings. Then the kernel is not asked for the process's control group.
        self.bindings.iter().next()?;
        self.bindings.nearest(&control_groups::path_of(pid).ok()?, is_there)
    }

    /// The container of a process, for which the host agent has `record`. A device is missing in the result if the process is
    /// already bound to a slice of the device's GPU. None if no device remains, or if root has bound the process.
    fn recorded_container(&self, pid: u32, record: &GuestRecord) -> Option<RecordedContainer> {
        let binding = self.binding_of(pid);
        if binding.is_some_and(|its| its.by == BoundBy::Root) {
            return None;
        }
        let has_slice = |device: &&DeviceName| {
            binding.iter().any(|its| its.slices.iter().any(|slice| slice.gpu == device.gpu()))
        };
        let devices: Vec<_> = record.devices.iter().filter(|device| !has_slice(device)).copied().collect();
        let cgroups = proc::cgroups_text(pid).ok()?;
        let group = up_to_container(&control_groups::path_of(pid).ok()?, of_the_hosts(&cgroups)?)?;
        let GuestContainer { guest, container, .. } = &record.names;
        let label = format!("{guest}/{container}");
        (!devices.is_empty()).then_some(RecordedContainer { group, label, devices })
    }

    fn record_of(&self, pid: u32) -> Option<GuestRecord> {
        let records = self.records.as_ref()?;
        records.record_of(of_the_hosts(&proc::cgroups_text(pid).ok()?)?)
    }

    /// The mount namespace of a process and its root directory. Processes with the same pair have the same list of mounts. None
    /// if the process runs on the host. If the process can't be read, the result is an error if the process is `wanted`, and
    /// None for an ancestor, which may have ended.
    fn place_of(&self, process: u32, wanted: bool) -> io::Result<Option<(PathBuf, PathBuf)>> {
        let place = proc::mount_namespace(process).and_then(|its| Ok((its, proc::root(process)?)));
        match place {
            Ok((namespace, _)) if self.host.contains(&namespace) => Ok(None),
            Ok(place) => Ok(Some(place)),
            Err(error) if wanted => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// The slices that the mounts of a process prove: root or a runtime of the host has mounted the directories of these
    /// slices. None if the mounts prove nothing.
    fn believed(&self, process: u32, sight: Sight) -> Option<BTreeSet<SliceId>> {
        let its = proc::user_namespace(process).ok();
        if its.is_some() && its == self.user {
            return Some(sight.slices);
        }
        let cgroups = proc::cgroups_text(process).ok()?;
        let container = of_the_hosts(&cgroups)?;
        if sight.slices.is_empty() {
            return Some(sight.slices);
        }
        let first = self.first.get_or_init(first_processes).get(container)?;
        let firsts = self.sight(&mounts::roots(first).ok()?);
        let is_proven = |slice: &SliceId| !sight.whole && !firsts.whole && firsts.slices.contains(slice);
        let proven: BTreeSet<SliceId> =
            sight.slices.iter().filter(|slice| is_proven(slice)).copied().collect();
        (!proven.is_empty()).then_some(proven)
    }

    fn sight(&self, roots: &[Place]) -> Sight {
        let mut sight = Sight::default();
        for pipe in &self.pipes {
            for root in roots {
                let inside = root.below(pipe);
                sight.slices.extend(inside.and_then(slice_with_directory));
                let whole = pipe.below(root).is_some() || inside == Some(Path::new(DIRECTORIES));
                sight.whole |= whole;
                sight.pipe |= inside.is_some() || whole;
            }
        }
        sight.own = self.own.iter().any(|own| roots.iter().any(|root| own.below(root).is_some()));
        sight
    }
}

impl ProcessSight {
    pub fn asks_environment(&self) -> bool {
        self.evidence.asks_environment()
    }

    /// The slices of the process. If the environment of the process counts, reads it from the memory of the process, which may
    /// hang.
    pub fn slices(&self, pid: u32) -> io::Result<Option<Membership>> {
        let claim = if self.asks_environment() {
            claimed(&proc::environment(pid)?, &self.pipe_directories)
        } else {
            Vec::new()
        };
        let is_anothers = |slice: &SliceId| self.bindings.with(slice).any(|one| is_there(&one.group));
        Ok(self.evidence.slices(&claim, is_anothers))
    }
}

fn tenant(uid: u32, pid: u32) -> io::Result<Tenant> {
    let container = match of_the_hosts(&proc::cgroups_text(pid)?) {
        Some(id) => id.to_owned(),
        None => proc::mount_namespace(pid)?.display().to_string(),
    };
    Ok(Tenant { uid, container })
}

/// True if this control group still exists. If a control group was removed and another was made with the same path, the answer
/// is false.
fn is_there(group: &ControlGroup) -> bool {
    control_groups::find(&group.path).is_ok_and(|found| found == *group)
}

fn bound(binding: &Binding) -> Membership {
    let known_by = match binding.by {
        BoundBy::Root => KnownBy::Bound,
        BoundBy::Platform => KnownBy::Platform,
    };
    Membership { slices: binding.slices.iter().copied().map(DeviceName::Slice).collect(), known_by }
}

/// The ancestors of a process, beginning with its parent. The iterator ends early if the PID of the next ancestor may belong to
/// another process by now.
fn ancestors(pid: u32) -> impl Iterator<Item = u32> {
    let parent = |child: &proc::Stat| {
        let parent = proc::stat(child.parent).ok()?;
        (parent.start_time <= child.start_time).then_some(parent)
    };
    let mut child = proc::stat(pid).ok();
    iter::from_fn(move || {
        let pid = child?.parent;
        child = parent(&child?);
        child.map(|_| pid)
    })
    .take(ANCESTORS)
}

/// The oldest process of each container that the host's own runtime has made, by the container's id.
fn first_processes() -> BTreeMap<String, u32> {
    let mut oldest: BTreeMap<String, (u64, u32)> = BTreeMap::new();
    for pid in proc::pids() {
        let Ok(cgroups) = proc::cgroups_text(pid) else { continue };
        let Some(id) = of_the_hosts(&cgroups) else { continue };
        let Ok(stat) = proc::stat(pid) else { continue };
        let its = (stat.start_time, pid);
        let known = oldest.entry(id.to_owned()).or_insert(its);
        *known = its.min(*known);
    }
    oldest.into_iter().map(|(id, (_, pid))| (id, pid)).collect()
}

fn claimed(environment: &[u8], pipe_directories: &BTreeSet<PathBuf>) -> Vec<DeviceName> {
    let named = named(environment);
    if named.is_empty() {
        connected(environment, pipe_directories).map(DeviceName::Slice).into_iter().collect()
    } else {
        named
    }
}

fn named(environment: &[u8]) -> Vec<DeviceName> {
    let value =
        proc::variable(environment, DEVICE_VARIABLE).and_then(|value| std::str::from_utf8(value).ok());
    let mut slices = Vec::new();
    for name in value.unwrap_or_default().split(',').take(CLAIMS) {
        // The service publishes these names, and every user can read them. So only names of slices and GPUs are returned, and
        // no other text from the environment.
        slices.extend(name.trim().parse().ok().filter(|name| !slices.contains(name)));
    }
    slices
}

/// `path` is relative to the pipe directory, such as `slices/00_06.0-1`.
fn slice_with_directory(path: &Path) -> Option<SliceId> {
    SliceId::with_directory_name(path.strip_prefix(DIRECTORIES).ok()?.to_str()?)
}

/// The slice that the environment names through `CUDA_MPS_PIPE_DIRECTORY`. None if the variable names no slice's directory.
fn connected(environment: &[u8], pipe_directories: &BTreeSet<PathBuf>) -> Option<SliceId> {
    let directory = Path::new(OsStr::from_bytes(proc::variable(environment, PIPE_DIRECTORY_VARIABLE)?));
    let inside = |pipe: &PathBuf| directory.strip_prefix(pipe).ok();
    pipe_directories.iter().filter_map(inside).find_map(slice_with_directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(names: &[&str]) -> Vec<DeviceName> {
        names.iter().map(|name| name.parse().unwrap()).collect()
    }

    fn pipes() -> BTreeSet<PathBuf> {
        BTreeSet::from(["/run/mps".into(), "/tmp/mps".into()])
    }

    #[test]
    fn slices_stand_in_the_environment() {
        let long = vec!["00:06.0-1"; 100_000].join(",");
        let many: Vec<String> = (0..300).map(|ordinal| format!("00:06.0-{ordinal}")).collect();
        for (environment, expected) in [
            ("A=1\0YUNION_MPS_DEVICE=00:06.0-1,00:07.0-0\0", &["00:06.0-1", "00:07.0-0"][..]),
            ("YUNION_MPS_DEVICE=0000:00:06.0-1, 00:06.0 ,00:06.0-1", &["00:06.0-1", "00:06.0"]),
            ("YUNION_MPS_DEVICE=mine,00:06.0-1,\u{1b}[2J", &["00:06.0-1"]),
            (&format!("YUNION_MPS_DEVICE={long}"), &["00:06.0-1"]),
        ] {
            assert_eq!(claimed(environment.as_bytes(), &pipes()), devices(expected), "{environment:.60}");
        }
        let many = claimed(format!("YUNION_MPS_DEVICE={}", many.join(",")).as_bytes(), &pipes());
        assert_eq!(many.len(), CLAIMS);
        for none in
            [&b""[..], b"XYUNION_MPS_DEVICE=00:06.0-1", b"YUNION_MPS_DEVICE=", b"YUNION_MPS_DEVICE=\xff"]
        {
            assert_eq!(claimed(none, &pipes()), []);
        }
    }

    #[test]
    fn a_slice_is_known_by_the_directory_in_the_environment() {
        for (environment, expected) in [
            ("CUDA_MPS_PIPE_DIRECTORY=/run/mps/slices/00_06.0-1", Some("00:06.0-1")),
            ("A=1\0CUDA_MPS_PIPE_DIRECTORY=/run/mps//slices/00_06.0-1/\0B=2", Some("00:06.0-1")),
            (
                "CUDA_MPS_PIPE_DIRECTORY=/run/mps/slices/00_06.0-1\0YUNION_MPS_DEVICE=00:06.0-2",
                Some("00:06.0-2"),
            ),
            ("CUDA_MPS_PIPE_DIRECTORY=/run/mps/slices/00_06.0-1\0YUNION_MPS_DEVICE=mine", Some("00:06.0-1")),
            ("CUDA_MPS_PIPE_DIRECTORY=/run/mps", None),
            ("CUDA_MPS_PIPE_DIRECTORY=/run/mps/slices", None),
            ("CUDA_MPS_PIPE_DIRECTORY=/run/mps/slices/00_06.0-1/more", None),
            ("CUDA_MPS_PIPE_DIRECTORY=/run/other/slices/00_06.0-1", None),
            ("CUDA_MPS_PIPE_DIRECTORY=", None),
        ] {
            let expected: Vec<&str> = expected.into_iter().collect();
            assert_eq!(claimed(environment.as_bytes(), &pipes()), devices(&expected), "{environment}");
        }
    }

    #[test]
    fn a_slice_counts_on_its_gpu() {
        let membership = |slices: &[&str], known_by| Membership { slices: devices(slices), known_by };
        let six = "00:06.0".parse().unwrap();
        let slices = Slices { gpus: BTreeMap::from([("GPU-6".to_owned(), six)]), ..Slices::default() };
        let mounted = membership(&["00:06.0-1", "00:07.0-1"], KnownBy::Mount);
        let one = Some(membership(&["00:06.0-1"], KnownBy::Mount));
        for (gpu, expected) in [("GPU-6", one), ("", Some(mounted.clone())), ("GPU-8", None)] {
            assert_eq!(slices.on(gpu, mounted.clone()), expected, "{gpu}");
        }
        let claimed = membership(&["00:06.0-1"], KnownBy::Environment);
        assert_eq!(slices.on("GPU-8", claimed.clone()), Some(claimed));
    }

    fn find_in<const N: usize>(directories: [&Path; N]) -> SliceMounts {
        let pipe_directories = Arc::new(directories.map(Path::to_owned).into());
        let slices = Slices { pipe_directories, ..Slices::default() };
        SliceMounts::find(&slices.commanded_in(directories))
    }

    /// The mounts of a container in which `directory`, a path in the pipe directory, is mounted at another path.
    fn seen(directory: &Path) -> Sight {
        let pipe = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(pipe.path().join("slices/00_06.0-1")).unwrap();
        std::fs::create_dir_all(pipe.path().join("slices/other")).unwrap();
        let roots = Place::find_all(&[PathBuf::from("/proc"), pipe.path().join(directory)]);
        assert_eq!(roots.len(), 2, "{}", directory.display());
        find_in([pipe.path(), Path::new("/no such directory")]).sight(&roots)
    }

    #[test]
    fn only_a_mount_of_the_directory_itself_is_a_slice() {
        if !mounts::root_is_a_mount() {
            return;
        }
        let slices = BTreeSet::from([SliceId::with_directory_name("00_06.0-1").unwrap()]);
        let one = Sight { slices, pipe: true, ..Sight::default() };
        assert_eq!(seen(Path::new("slices/00_06.0-1")), one);
        for (around, whole, own) in
            [("", true, true), ("..", true, true), ("slices", true, false), ("slices/other", false, false)]
        {
            let expected = Sight { pipe: true, whole, own, ..Sight::default() };
            assert_eq!(seen(Path::new(around)), expected, "{around}");
        }
        assert_eq!(seen(Path::new("/proc")), Sight::default());
    }

    #[test]
    fn a_process_of_the_host_is_known_by_its_environment() {
        let mounts = find_in([&std::env::temp_dir()]);
        let own = std::process::id();
        let process = identity::read(own).unwrap();
        let (client, seen) = mounts.look_at(process).unwrap();
        assert_eq!((&seen.evidence.mounted, seen.as_root), (&None, MayCommand::All));
        assert_eq!((seen.slices(own).unwrap(), seen.asks_environment()), (None, true));
        assert_eq!(client.command, proc::name(own).unwrap());
        assert!(client.to_string().starts_with(&format!("PID {own} of user ")), "{client}");
        assert!(mounts.look_at(ProcessId { start_time: process.start_time + 1, ..process }).is_err());
        assert!(mounts.look_at(ProcessId { pid: u32::MAX, ..process }).is_err());
        assert_eq!(ancestors(own).next(), Some(std::os::unix::process::parent_id()));
        assert!(ancestors(own).count() <= ANCESTORS && ancestors(u32::MAX).next().is_none());
    }
}
