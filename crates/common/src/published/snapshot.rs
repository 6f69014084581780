//! The Snapshot: everything that this service publishes, as plain data. The D-Bus interface and the status line of the systemd
//! unit show only data of the Snapshot.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use mps_core::bindings::Bindings;
use mps_core::terms::{DeviceName, PciAddress, SliceId};

use crate::config::Isolation;
use crate::counted::counted;
use crate::host::compute_mode::ComputeMode;
use crate::plan::GpuPlan;
use crate::problem::Problem;
use crate::published::control_daemon::ControlDaemonView;
use crate::published::events::Events;
use crate::published::usage::InUse;
use crate::published::usage::SliceUse;

const NAMED: usize = 4;

/// The service's state, as a word on D-Bus. A program should treat an unknown word as `degraded`.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Default, strum::Display, strum::EnumString, strum::VariantNames,
)]
#[strum(serialize_all = "snake_case")]
pub enum State {
    /// `enable_cuda_mps` is false, so the service serves no GPU.
    Disabled,
    /// The service has not checked all GPUs yet.
    #[default]
    Starting,
    Ready,
    /// Only some GPUs are served. Or none is served, but the service can solve the problem without an administrator: for
    /// example, a server recovers from a fatal GPU error, or a control daemon that should end still has clients. Or all GPUs
    /// are served, but something needs an administrator's attention.
    Degraded,
    /// No GPU is served, and an administrator has to solve the problem.
    Failed,
    Stopping,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Snapshot {
    /// The number of times that the answers of `ListDevices` or `ListGpus` have changed.
    pub generation: u64,
    pub state: State,
    /// The reason for the state, in one line. Empty if the state is ready.
    pub reason: String,
    pub enabled: bool,
    /// True if users may end their own GPU work. False if only root may.
    pub users_may_terminate: bool,
    /// Empty if there is no driver.
    pub driver_version: String,
    pub pipe_directory: PathBuf,
    pub log_directory: PathBuf,
    /// The configured GPUs with their slices, in the order of the configuration. None before the first plan exists. For an
    /// unchanged GPU the next Snapshot has the same `Arc`, so a comparison of two Snapshots need not compare the GPU's data.
    pub gpus: Option<Vec<Arc<GpuView>>>,
    pub control_daemons: Vec<ControlDaemonView>,
    pub bindings: Arc<Bindings>,
    /// The oldest event comes first.
    pub events: Events,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuView {
    pub plan: GpuPlan,
    /// True if a client that starts now is served with the planned limits, in any slice that is not drained.
    pub healthy: bool,
    /// The reason why clients are not served on the GPU, or a warning. Empty if there is neither.
    pub reason: String,
    /// True if the GPU needs a reset. Then its slices take no new clients, and the present clients go on.
    pub needs_reset: bool,
    /// The compute mode at the service's last check. None if the mode is not known.
    pub compute_mode: Option<ComputeMode>,
    pub control_daemons: Vec<String>,
    pub confirmed_thread_percentage: Option<u8>,
    pub confirmed_memory_limit_mib: Option<u64>,
    pub drained: BTreeSet<u32>,
    pub bound: BTreeMap<u32, BoundSlice>,
    /// The slices with a memory limit that the kernel should enforce, by ordinal. The error is the reason why the kernel does
    /// not enforce the limit.
    pub kernel_limits: BTreeMap<u32, Result<(), String>>,
    /// The slices with their own control daemon that can take no more clients, by ordinal, with the reason in words.
    pub full: BTreeMap<u32, String>,
    /// The slices that are not served although their GPU can be served, by ordinal, with the reason. Either no control daemon
    /// serves the slice, or the slice's directory has no link to the socket. Drained slices are not in the map.
    pub unserved: BTreeMap<u32, String>,
    /// The use by all MPS clients on the GPU together, including clients without a known slice. None if the use is not known.
    pub in_use: Option<InUse>,
    /// The use of each slice by its clients, in the order of the ordinals. Empty if the use is not known.
    pub uses: Vec<SliceUse>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BoundSlice {
    /// The names of the first bindings to the slice, for a person, and the number of further bindings.
    pub by: String,
    /// The paths of the control groups of the first bindings.
    pub groups: Vec<String>,
}

impl Snapshot {
    /// All slices, each as its GPU and its ordinal on the GPU. The GPUs have the order of the configuration.
    pub fn slices(&self) -> impl Iterator<Item = (&Arc<GpuView>, u32)> {
        slices_of(self.gpus.as_deref().unwrap_or_default())
    }

    /// Finds the slice with a name such as `00:06.0-1`, or the GPU with a name such as `00:06.0` or with this UUID. Returns the
    /// GPU, and the published name of the GPU or the slice. The address may have its domain and capital letters, and may lack
    /// the domain if only one GPU has the short address. An ordinal has only one spelling, such as `1` and not `01`.
    pub fn find(&self, name: &str) -> Option<(&GpuView, DeviceName)> {
        let gpus = || self.gpus.iter().flatten();
        if let Some(gpu) = gpus().find(|gpu| !gpu.uuid().is_empty() && gpu.uuid().eq_ignore_ascii_case(name))
        {
            return Some((gpu, DeviceName::Gpu(gpu.plan.gpu.id())));
        }
        let (address, ordinal) = DeviceName::parts(name);
        let mut wanted: PciAddress = address.parse().ok()?;
        if PciAddress::is_short(address) {
            wanted = wanted.in_any_domain(gpus().map(|gpu| gpu.plan.gpu.pci.address)).ok()?;
        }
        let gpu = gpus().find(|gpu| gpu.plan.gpu.pci.address == wanted)?;
        let Some(text) = ordinal else { return Some((gpu, DeviceName::Gpu(gpu.plan.gpu.id()))) };
        let ordinal = SliceId::ordinal_in(text).filter(|ordinal| *ordinal < gpu.plan.slices())?;
        Some((gpu, DeviceName::Slice(gpu.plan.slice(ordinal))))
    }
}

pub fn slices_of(gpus: &[Arc<GpuView>]) -> impl Iterator<Item = (&Arc<GpuView>, u32)> {
    gpus.iter().flat_map(|gpu| (0..gpu.plan.slices()).map(move |ordinal| (gpu, ordinal)))
}

impl GpuView {
    /// Such as `00:06.0-1`.
    pub fn slice_name(&self, ordinal: u32) -> String {
        self.plan.slice(ordinal).to_string()
    }

    pub fn slice_healthy(&self, ordinal: u32) -> bool {
        self.slice_served(ordinal) && !self.drained.contains(&ordinal)
    }

    /// True if the clients of the slice are served with the slice's limits. The result can be true for a drained slice, which
    /// still serves its present clients.
    pub fn slice_served(&self, ordinal: u32) -> bool {
        self.healthy && !self.unserved.contains_key(&ordinal)
    }

    pub fn slice_reason(&self, ordinal: u32) -> String {
        let drained = self.drained.contains(&ordinal).then(|| drained(&self.slice_name(ordinal)).to_string());
        let over = self.overuse(ordinal).map(|overuse| format!("over its budget: {overuse}"));
        let unserved = self.unserved.get(&ordinal).cloned();
        let full = self.full.get(&ordinal).cloned();
        joined(full.into_iter().chain(drained).chain(unserved).chain(over), &self.reason)
    }

    /// The published reason of the GPU. The text adds the slices that are drained, full, not served, or over their budgets.
    pub fn gpu_reason(&self) -> String {
        let drained = self.drained.len();
        let drained = (drained > 0)
            .then(|| format!("{drained} of {slices} slices drained", slices = self.plan.slices()));
        let full =
            self.full.iter().map(|(ordinal, why)| format!("slice {}: {why}", self.slice_name(*ordinal)));
        let of_slices = drained.into_iter().chain(self.unserved()).chain(self.over_budget());
        joined(of_slices.chain(full), &self.reason)
    }

    /// Names the first slice that is not served although the GPU can be served, with the reason, and counts the further slices.
    /// None if all slices are served.
    pub fn unserved(&self) -> Option<String> {
        let (ordinal, why) = self.unserved.first_key_value()?;
        let more = match self.unserved.len().saturating_sub(1) {
            0 => String::new(),
            more => format!("; and {}", counted(more, "more slice")),
        };
        Some(format!("slice {slice} is not served: {why}{more}", slice = self.slice_name(*ordinal)))
    }

    /// Names the enforcer of a slice's memory limit: `kernel`, or `watch` for this service, which watches the memory of the
    /// clients. None if neither enforces the limit.
    pub fn memory_enforced_by(&self, ordinal: u32) -> Option<&'static str> {
        match self.kernel_limits.get(&ordinal) {
            Some(Ok(())) => Some("kernel"),
            _ => self.plan.clients_counted.then_some("watch"),
        }
    }

    pub fn control_daemon(&self, ordinal: u32) -> &str {
        let name = self.slice_name(ordinal);
        let serves = |id: &&String| self.plan.isolation == Isolation::Gpu || **id == name;
        self.control_daemons.iter().find(serves).map(String::as_str).unwrap_or_default()
    }

    pub fn slice_use(&self, ordinal: u32) -> Option<&SliceUse> {
        self.uses.get(usize::try_from(ordinal).ok()?)
    }

    fn overuse(&self, ordinal: u32) -> Option<&str> {
        self.slice_use(ordinal).map(|one| one.overuse.as_str()).filter(|overuse| !overuse.is_empty())
    }

    fn over_budget(&self) -> Option<String> {
        let mut over: Vec<String> = (0..self.plan.slices())
            .filter(|ordinal| self.overuse(*ordinal).is_some())
            .map(|ordinal| self.slice_name(ordinal))
            .collect();
        let more = over.len().saturating_sub(NAMED);
        over.truncate(NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        (!over.is_empty()).then(|| format!("slices over their budgets: {}{more}", over.join(", ")))
    }

    /// Empty if NVML does not report the UUID.
    pub fn uuid(&self) -> &str {
        self.plan.gpu.uuid().unwrap_or_default()
    }
}

pub fn drained(name: &str) -> Problem {
    Problem::new("drained for new clients", format!("yunion-mpsctl undrain {name} ends the drain"))
}

fn joined(first: impl Iterator<Item = String>, last: &str) -> String {
    let last = (!last.is_empty()).then(|| last.to_owned());
    first.chain(last).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::samples::{gpu, snapshot};

    #[test]
    fn names_are_found_however_they_are_written() {
        let first = gpu("0000:00:06.0", "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400");
        let snapshot = snapshot(Some(vec![first, gpu("0001:1a:00.0", "GPU-2")]));
        let name = |asked: &str| snapshot.find(asked).map(|(_, name)| name.to_string());
        for (asked, published) in [
            ("00:06.0", "00:06.0"),
            ("0000:00:06.0", "00:06.0"),
            ("00000000:00:06.0", "00:06.0"),
            ("00:06.0-3", "00:06.0-3"),
            ("0000:00:06.0-0", "00:06.0-0"),
            ("GPU-76AEF7FF-372d-2432-b4b4-beca4d8d3400", "00:06.0"),
            ("0001:1A:00.0-1", "0001:1a:00.0-1"),
            ("1a:00.0", "0001:1a:00.0"),
            ("1A:00.0-3", "0001:1a:00.0-3"),
        ] {
            assert_eq!(name(asked).as_deref(), Some(published), "{asked}");
        }
        for nothing in [
            "",
            "-",
            "00:06.0-",
            "00:06.0-4",
            "00:06.0-01",
            "00:06.0-+1",
            "00:06.0-1-1",
            "0000:1a:00.0",
            "GPU-3",
        ] {
            assert_eq!(name(nothing), None, "{nothing}");
        }
    }

    #[test]
    fn a_name_without_a_domain_is_nobody_s_where_two_have_it() {
        let gpus = |addresses: &[&str]| {
            let uuids = addresses.iter().map(|address| gpu(address, &format!("GPU-{address}")));
            snapshot(Some(uuids.collect()))
        };
        let name = |snapshot: &Snapshot| snapshot.find("1a:00.0-1").map(|(_, name)| name.to_string());
        assert_eq!(name(&gpus(&["0001:1a:00.0", "0002:1a:00.0"])), None);
        assert_eq!(name(&gpus(&["0001:1a:00.0", "0000:1a:00.0"])).as_deref(), Some("1a:00.0-1"));
    }

    #[test]
    fn a_gpu_without_a_uuid_is_not_found_by_an_empty_name() {
        let mut lost = gpu("00:06.0", "GPU-1");
        lost.plan.gpu.nvml = Err("GPU is lost".into());
        let snapshot = snapshot(Some(vec![lost]));
        assert_eq!(snapshot.find(""), None);
        assert_eq!(snapshot.find("00:06.0").map(|(_, name)| name.to_string()).as_deref(), Some("00:06.0"));
    }

    #[test]
    fn a_slice_over_its_budget_is_healthy_and_says_so() {
        let mut view = gpu("00:06.0", "GPU-1");
        view.uses = vec![SliceUse::default(); 4];
        assert_eq!((view.slice_reason(1), view.gpu_reason()), (String::new(), String::new()));
        "the slice has more than 2 clients".clone_into(&mut view.uses[1].overuse);
        assert!(view.slice_healthy(1) && view.healthy);
        assert_eq!(view.slice_reason(0), "");
        assert_eq!(view.slice_reason(1), "over its budget: the slice has more than 2 clients");
        assert_eq!(view.gpu_reason(), "slices over their budgets: 00:06.0-1");
        view.drained.insert(1);
        assert!(view.slice_reason(1).starts_with("drained for new clients;"), "{}", view.slice_reason(1));
        assert!(view.slice_reason(1).ends_with("; over its budget: the slice has more than 2 clients"));
        view.plan.sizes.resize(6, view.plan.size(0));
        view.uses = vec![view.uses[1].clone(); 6];
        assert!(view.gpu_reason().ends_with("00:06.0-2, 00:06.0-3 and 2 more"), "{}", view.gpu_reason());
    }

    #[test]
    fn a_drained_slice_is_not_healthy_and_its_neighbours_are() {
        let mut view = gpu("00:06.0", "GPU-1");
        view.drained.insert(1);
        assert!(view.slice_healthy(0) && !view.slice_healthy(1) && view.healthy);
        assert_eq!(view.slice_reason(0), "");
        let drained = "drained for new clients; yunion-mpsctl undrain 00:06.0-1 ends the drain";
        assert_eq!(view.slice_reason(1), drained);
        assert_eq!(view.gpu_reason(), "1 of 4 slices drained");
        view.healthy = false;
        view.reason = "GPU is lost".to_owned();
        assert!(!view.slice_healthy(0));
        assert_eq!(
            (view.slice_reason(0), view.slice_reason(1)),
            ("GPU is lost".to_owned(), format!("{drained}; GPU is lost"))
        );
    }
}
