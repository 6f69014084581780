//! The GPUs of this host, and the share of a GPU that each slice gets.

use std::num::{NonZeroU32, NonZeroU64};
use std::path::Path;

use common::config::{DeviceEntry, DevicePath, MpsEntry, Settings, SliceKeys, Topology};
use common::host::gpu::Gpu;
use common::host::inventory::Inventory;
use common::plan::{self, GpuPlan, Plan, memory_for_slices};
use common::problem::Origin;

/// The memory in MiB that is enough for most programs. Setup proposes a number of slices with about this much memory for each
/// slice.
const PROPOSED_MIB: u64 = 8192;

/// The fewest and the most slices that setup proposes for a GPU.
const PROPOSED_SLICES: (u64, u64) = (2, 10);

pub(super) struct HostGpus {
    inventory: Inventory,
    /// The GPUs that can be served, grouped by model and memory.
    pub(super) groups: Vec<ModelGroup>,
    /// The GPUs that can't be served now, each with the reason.
    left_out: Vec<(Gpu, String)>,
}

pub(super) struct ModelGroup {
    pub(super) gpus: Vec<Gpu>,
    model: String,
    /// The memory that all slices of one GPU can have together. None if the service can't find out the memory.
    memory_mib: Option<u64>,
}

impl HostGpus {
    pub(super) fn new(inventory: Inventory) -> Self {
        // This plan only shows which GPUs can be served, and the number of slices does not matter. So each GPU has one slice.
        let plan = plan(&inventory, NonZeroU32::MIN, Topology::Shared);
        let planned = |gpu: &Gpu| planned(plan.as_ref()?, gpu);
        let mut groups: Vec<ModelGroup> = Vec::new();
        let mut left_out = Vec::new();
        for gpu in &inventory.gpus {
            let obstacle = match planned(gpu) {
                Some(planned) if planned.servable() => None,
                Some(planned) => Some(planned.unusable().unwrap_or_default()),
                None => {
                    gpu.pci.foreign_driver().map(|driver| format!("the kernel driver {driver} holds the GPU"))
                }
            };
            if let Some(obstacle) = obstacle {
                left_out.push((gpu.clone(), obstacle));
                continue;
            }
            let memory_mib = gpu.facts().and_then(|facts| memory_for_slices(facts, &inventory));
            let model = gpu.model();
            match groups.iter_mut().find(|group| group.model == model && group.memory_mib == memory_mib) {
                Some(group) => group.gpus.push(gpu.clone()),
                None => groups.push(ModelGroup { gpus: vec![gpu.clone()], model, memory_mib }),
            }
        }
        Self { inventory, groups, left_out }
    }

    /// True if the service would try to serve a GPU in `left_out` when the configuration has no entries for single GPUs.
    pub(super) fn would_serve_more(&self) -> bool {
        self.left_out.iter().any(|(gpu, _)| gpu.pci.foreign_driver().is_none())
    }

    /// True if every GPU in `groups` can have a control daemon for each slice.
    pub(super) fn can_isolate_slices(&self) -> bool {
        let plan = plan(&self.inventory, NonZeroU32::MIN, Topology::PerSlice);
        let can = |gpu: &Gpu| planned(plan.as_ref()?, gpu).map(GpuPlan::servable);
        self.groups.iter().flat_map(|group| &group.gpus).all(|gpu| can(gpu) == Some(true))
    }

    pub(super) fn describe(&self) -> Vec<String> {
        let mut lines = vec![match &self.inventory.driver {
            Ok(version) => format!("GPUs of this host, with driver {version}:"),
            Err(reason) => format!("GPUs of this host, without a driver ({reason}):"),
        }];
        for group in &self.groups {
            for gpu in &group.gpus {
                let of_host = if shares_memory(gpu) { " of the host's memory" } else { "" };
                let memory = group.memory_mib.map(|mib| format!(", {mib} MiB{of_host}")).unwrap_or_default();
                lines.push(format!("  {} {}{memory}", gpu.id(), group.model));
            }
        }
        for (gpu, reason) in &self.left_out {
            lines.push(format!("  {id} {model}: left out: {reason}", id = gpu.id(), model = gpu.model()));
        }
        if self.inventory.gpus.is_empty() {
            lines.push("  none of NVIDIA".to_owned());
        }
        lines
    }

    pub(super) fn describe_share(&self, group: &ModelGroup, slices: u32) -> String {
        let (share, model) = (self.share(group, slices), group.describe_model());
        format!("With {slices} slices of the {model}, each has {share}.")
    }

    /// A sentence about the share of the GPU that a CUDA program has if the program uses a slice without any setting. None if
    /// the program has the whole GPU.
    pub(super) fn describe_program(&self, group: &ModelGroup, slices: u32) -> Option<String> {
        let plan = plan(&self.inventory, NonZeroU32::new(slices)?, Topology::Shared)?;
        if slices == 1 || !planned(&plan, group.gpus.first()?)?.limits_enforced {
            return None;
        }
        let (share, model) = (self.share(group, slices), group.describe_model());
        Some(format!(
            "On the {model} every CUDA program then has {share}, even if no other program runs. With 1 \
             slice, a program has the whole GPU."
        ))
    }

    /// The memory in MiB that the device file must state for each slice. None if the service divides the memory of the GPU
    /// itself.
    pub(super) fn written_memory(&self, gpu: &Gpu, slices: u32) -> Option<NonZeroU64> {
        written_memory(&self.inventory, gpu, slices)
    }

    fn share(&self, group: &ModelGroup, slices: u32) -> String {
        let share = || {
            let plan = plan(&self.inventory, NonZeroU32::new(slices)?, Topology::Shared)?;
            let planned = planned(&plan, group.gpus.first()?)?;
            let size = planned.size(0);
            (size.memory_mib > 0).then_some((size.memory_mib, size.thread_percentage))
        };
        match share() {
            Some((memory, threads)) => format!("{memory} MiB of memory and {threads} % of the threads"),
            None => format!("1/{slices} of the memory and 1/{slices} of the threads"),
        }
    }
}

impl ModelGroup {
    /// The number of slices that setup proposes for each GPU. If the memory of the GPUs is unknown, the result is the default
    /// of `cuda_mps_replicas`.
    pub(super) fn proposed(&self) -> u32 {
        let (least, most) = PROPOSED_SLICES;
        let default = Settings::default().replicas.get();
        self.memory_mib.map_or(default, |mib| {
            let fitting = mib.saturating_add(PROPOSED_MIB / 2) / PROPOSED_MIB;
            u32::try_from(fitting.clamp(least, most)).unwrap_or(default)
        })
    }

    pub(super) fn describe(&self) -> String {
        let model = self.describe_model();
        match self.gpus.len() {
            1 => format!("the {model}"),
            gpus => format!("each of the {gpus} {model}"),
        }
    }

    fn describe_model(&self) -> &str {
        if self.model.is_empty() { "GPU" } else { &self.model }
    }
}

/// True if the GPU uses the memory of the host. NVML answers for this kind of GPU, but reports no memory.
fn shares_memory(gpu: &Gpu) -> bool {
    gpu.facts().is_some_and(|facts| facts.memory_total_mib.is_none())
}

fn written_memory(inventory: &Inventory, gpu: &Gpu, slices: u32) -> Option<NonZeroU64> {
    let facts = gpu.facts().filter(|_| shares_memory(gpu))?;
    NonZeroU64::new(memory_for_slices(facts, inventory)?.checked_div(slices.into())?)
}

/// The plan that the service would make for this host if each GPU had this number of slices.
fn plan(inventory: &Inventory, slices: NonZeroU32, topology: Topology) -> Option<Plan> {
    let entry = |gpu: &Gpu| {
        let each =
            SliceKeys { memory_mib: written_memory(inventory, gpu, slices.get()), ..SliceKeys::default() };
        DeviceEntry {
            name: String::new(),
            origin: Origin::whole(Path::new("")),
            device_type: "NVIDIA_MPS".to_owned(),
            path: Some(DevicePath::Pci(gpu.pci.address)),
            mps: Some(MpsEntry { each, ..MpsEntry::with_slices(slices) }),
        }
    };
    let needs_entries = inventory.gpus.iter().any(shares_memory);
    let devices = inventory.gpus.iter().filter(|gpu| gpu.pci.foreign_driver().is_none()).map(entry);
    let devices = if needs_entries { devices.collect() } else { Vec::new() };
    let settings = Settings { enabled: true, replicas: slices, topology, devices, ..Settings::default() };
    plan::plan(&settings, inventory, &[]).ok()
}

fn planned<'p>(plan: &'p Plan, gpu: &Gpu) -> Option<&'p GpuPlan> {
    plan.gpus.iter().find(|planned| planned.gpu.pci.address == gpu.pci.address)
}
