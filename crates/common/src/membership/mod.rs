//! Finds the owner and the slices of each process that may be a client. The module `register::evidence` of `mps_core` has the
//! order of trust between the sources of a process's slices.
//!
//! Root binds a control group to slices, and a program can't leave its control group unless it is root on the host. So a binding
//! counts no matter what is mounted or stands in the environment, and no other process can claim a bound slice by its
//! environment.
//!
//! A container's runtime mounts the directories of the container's slices, and no program in the container can mount the
//! directory of another slice. So in a container the mounts count, no matter what the environment says. The environment of a
//! process counts if no runtime has mounted a slice's directory: for a process on the host, or if an agent has mounted the pipe
//! directory itself. The environment names the slice in a variable, or by the directory in which the process looks for its
//! control daemon.
//!
//! Mounts prove nothing in a user namespace that an unprivileged user has made, since that user can mount any visible directory
//! in the namespace. So a process's mounts count only in the user namespace of the service, or in a container that the host's own
//! runtime has made. A tenant in a container of the host's runtime can make another user namespace. So in a user namespace other
//! than the service's, a slice counts only if the first process of the container also sees the slice's directory, and if neither
//! this first process nor the process itself sees a whole pipe directory, from which the tenant could have mounted the slice's
//! directory.

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

/// The environment variable that names the directory in which a process looks for its control daemon.
pub const PIPE_DIRECTORY_VARIABLE: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// The most slices that the environment of a process can claim. A container has at most one slice of each GPU.
const CLAIMS: usize = 64;

const ANCESTORS: usize = 32;

/// The slices of all control daemons, as the plan and the state file have them. The service needs no look at a process to know
/// these slices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Slices {
    /// The pipe directories, which contain the directories of slices.
    pipe_directories: Arc<BTreeSet<PathBuf>>,
    /// The control daemons' own directories, which contain their privileged sockets.
    own_directories: BTreeSet<PathBuf>,
    gpus: BTreeMap<String, GpuId>,
    bindings: Arc<Bindings>,
    /// The directory of the host agent's records.
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

    /// Adds GPUs, by UUID: a running control daemon keeps its GPUs, even if the plan changes.
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

    /// Adds the control daemons' own directories.
    #[must_use]
    pub fn commanded_in<'a>(mut self, directories: impl IntoIterator<Item = &'a Path>) -> Self {
        self.own_directories.extend(directories.into_iter().map(Path::to_owned));
        self
    }

    /// Sets the bindings of control groups to slices.
    #[must_use]
    pub fn bound_by(self, bindings: &Arc<Bindings>) -> Self {
        Self { bindings: Arc::clone(bindings), ..self }
    }

    /// Sets the directory in which the host agent keeps the records of its guests.
    #[must_use]
    pub fn recorded_in(self, servers: &Path) -> Self {
        Self { servers: Some(servers.to_owned()), ..self }
    }

    /// The UUIDs of the GPUs of these slices.
    pub fn gpus_of(&self, slices: &[SliceId]) -> Vec<&str> {
        let gpus = self.gpus.iter().filter(|(_, gpu)| slices.iter().any(|slice| slice.gpu == **gpu));
        gpus.map(|(uuid, _)| uuid.as_str()).collect()
    }

    /// The slices of a process, `all`, as far as they count on the GPU with this UUID. All slices of the process if it uses no
    /// GPU yet.
    pub fn on(&self, gpu: &str, all: Membership) -> Option<Membership> {
        match self.gpus.get(gpu) {
            Some(gpu) => all.on(*gpu),
            None => (gpu.is_empty() || !all.known_by.is_certain()).then_some(all),
        }
    }
}

/// The places of the slices' directories, and the other facts that are equal for all processes. The service makes a `SliceMounts`
/// for one look at processes, on a thread on which it may ask the kernel: reading an environment can hang in the driver.
#[derive(Debug)]
pub struct SliceMounts {
    /// The pipe directories as places, which are independent of a mount.
    pipes: Vec<Place>,
    pipe_directories: Arc<BTreeSet<PathBuf>>,
    own: Vec<Place>,
    /// The mount namespaces of the service and of the first process: a process in one of them runs on the host.
    host: Vec<PathBuf>,
    /// The service's user namespace.
    user: Option<PathBuf>,
    /// The first process of each container, by the container's id. The service searches for the first processes of containers
    /// only when it needs one of them.
    first: OnceLock<BTreeMap<String, u32>>,
    bindings: Arc<Bindings>,
    records: Option<GuestRecords>,
    /// The text of the file with the names of the host's users.
    users: String,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Sight {
    /// The slices whose directory is the root of a mount.
    slices: BTreeSet<SliceId>,
    /// True if a mount shows a part of a pipe directory, or contains one.
    pipe: bool,
    /// True if a mount contains a pipe directory, or the directory in it that contains the directories of all slices.
    whole: bool,
    /// True if a mount contains a control daemon's own directory.
    own: bool,
}

/// The facts about a process that were found without reading its memory.
#[derive(Debug)]
pub struct ProcessSight {
    evidence: Evidence,
    /// The commands that a control daemon takes from the process if the process is root. NVIDIA's control daemon decides by the
    /// user that the kernel reports, and by the socket that the client uses: measured on an H200 with driver 580.159.04
    /// (docs/security.md).
    as_root: MayCommand,
    /// All bindings: a process can't claim a slice that is bound to another control group.
    bindings: Arc<Bindings>,
    pipe_directories: Arc<BTreeSet<PathBuf>>,
}

impl SliceMounts {
    /// Finds the places of the pipe directories. A pipe directory that does not exist has no slices.
    pub fn find(slices: &Slices) -> Self {
        let namespaces = [proc::mount_namespace(proc::OWN), proc::mount_namespace(proc::FIRST)];
        let places = |directories: &BTreeSet<PathBuf>| {
            directories.iter().filter_map(|path| Place::find(path).ok()).collect()
        };
        Self {
            pipes: places(&slices.pipe_directories),
            pipe_directories: Arc::clone(&slices.pipe_directories),
            own: places(&slices.own_directories),
            host: namespaces.into_iter().flatten().collect(),
            user: proc::user_namespace(proc::OWN).ok(),
            first: OnceLock::new(),
            bindings: Arc::clone(&slices.bindings),
            records: slices.servers.clone().map(GuestRecords::in_directory),
            users: users::all(),
        }
    }

    /// Looks at a process without reading the memory of the process, since such a read could hang. If the environment of the
    /// process counts, the slices are not known yet.
    ///
    /// # Errors
    /// The process has ended, or can't be read.
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
            // The id is as the host sees the user: the root user of a user namespace is another user.
            may_command: status
                .effective_uid()
                .map(|uid| if uid == 0 { seen.as_root } else { MayCommand::Nothing }),
            command: proc::name(pid).unwrap_or_default(),
            ..KnownClient::only(process)
        };
        // During the look the process may have ended and another process may have got its PID.
        if identity::read(pid)? == process { Ok((client, seen)) } else { Err(Errno::SRCH.into()) }
    }

    /// Finds the slices in the mounts of a process. A program that calls chroot sees fewer mounts than its container has, so the
    /// mounts of its ancestors count too. The mounts of ancestors in other namespaces count up to the host, for a sandbox in a
    /// container: the sandbox has the slices of the container. A sandbox in a container reaches no directory that only the
    /// ancestors of the sandbox see.
    ///
    /// # Errors
    /// The process has ended, or can't be read.
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
        // A process in a container reaches only the socket `control`, unless a control daemon's own directory, or an ancestor of
        // that directory, is mounted in the container.
        let as_root = if last.is_none() || all.own { MayCommand::All } else { MayCommand::Neighbours };
        // Mounts with neither a slice nor a pipe directory prove that the process has no slice by its mounts: it has reached
        // the GPU in another way.
        let known = !all.slices.is_empty() || (believed && !all.pipe);
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

    /// The label of the binding of a process. None if the process has no binding, or the binding has no label.
    fn label_of(&self, pid: u32) -> Option<String> {
        self.binding_of(pid).map(|its| its.label.clone()).filter(|label| !label.is_empty())
    }

    fn binding_of(&self, pid: u32) -> Option<&Binding> {
        // Without bindings, which is most common, the kernel is not asked for the process's control group.
        self.bindings.iter().next()?;
        self.bindings.nearest(&control_groups::path_of(pid).ok()?, is_there)
    }

    /// The recorded container of a process, if the container is not bound to all of its slices yet. The result has only devices
    /// on those GPUs that have no slice to which the process is bound.
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

    /// The mount namespace of a process and its root directory: processes for which both are the same have the same list of
    /// mounts. None if the process runs on the host, and if an ancestor has just ended.
    fn place_of(&self, process: u32, wanted: bool) -> io::Result<Option<(PathBuf, PathBuf)>> {
        let place = proc::mount_namespace(process).and_then(|its| Ok((its, proc::root(process)?)));
        match place {
            Ok((namespace, _)) if self.host.contains(&namespace) => Ok(None),
            Ok(place) => Ok(Some(place)),
            Err(error) if wanted => Err(error),
            Err(_) => Ok(None),
        }
    }

    /// The slices of a process, as its mounts prove them: root of the host, or a runtime of the host, has mounted the
    /// directories of these slices. None if the mounts of the process prove nothing.
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
    /// Returns true if the environment of the process counts for its slices.
    pub fn asks_environment(&self) -> bool {
        self.evidence.asks_environment()
    }

    /// The slices of the process. The call reads the memory of the process if the environment of the process counts.
    ///
    /// # Errors
    /// The process has ended, or can't be read.
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

/// The tenant for whom a process of this user works.
fn tenant(uid: u32, pid: u32) -> io::Result<Tenant> {
    let container = match of_the_hosts(&proc::cgroups_text(pid)?) {
        Some(id) => id.to_owned(),
        None => proc::mount_namespace(pid)?.display().to_string(),
    };
    Ok(Tenant { uid, container })
}

/// Returns true if this control group still exists. A control group that was removed and made again with the same path is
/// another control group.
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

/// The parent of a process, the parent's parent and further ancestors. The list stops before an ancestor whose PID may belong to
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

/// The oldest process of each container that the host's own runtime has made.
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

/// The slices that the environment of a process names: by their names in a variable, or one slice by its directory.
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
        // The names that this function returns are published, and every user can read them. So only names of slices are returned,
        // each once, and never another text from the environment.
        slices.extend(name.trim().parse().ok().filter(|name| !slices.contains(name)));
    }
    slices
}

/// The slice with this directory, which is a path below the pipe directory, such as `slices/00_06.0-1`.
fn slice_with_directory(path: &Path) -> Option<SliceId> {
    SliceId::with_directory_name(path.strip_prefix(DIRECTORIES).ok()?.to_str()?)
}

/// The slice of a process with this environment: in the slice's directory the process looks for its control daemon.
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

    /// The mounts of a container in which this directory of the host is mounted at another path.
    fn seen(directory: &Path) -> Sight {
        let pipe = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(pipe.path().join("slices/00_06.0-1")).unwrap();
        std::fs::create_dir_all(pipe.path().join("slices/other")).unwrap();
        let roots = [Place::find(Path::new("/proc")), Place::find(&pipe.path().join(directory))];
        let roots: Vec<Place> = roots.into_iter().flatten().collect();
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
        // A process with the same PID and another start time is another client.
        assert!(mounts.look_at(ProcessId { start_time: process.start_time + 1, ..process }).is_err());
        assert!(mounts.look_at(ProcessId { pid: u32::MAX, ..process }).is_err());
        assert_eq!(ancestors(own).next(), Some(std::os::unix::process::parent_id()));
        assert!(ancestors(own).count() <= ANCESTORS && ancestors(u32::MAX).next().is_none());
    }
}
