//! Decides which slices a program may have now. All parts of the service that hand out slices use this file.

use mps_core::access::{self, Asker, Obstacle, Standing};
use mps_core::bindings::{Bindings, BoundBy};
use mps_core::terms::DeviceName;

use crate::host::control_groups;
use crate::host::proc;
use crate::published::container::{ChosenSlice, no_such_device, none_named, not_ready, refusal};
use crate::published::request_error::RequestError;
use crate::published::snapshot::{GpuView, Snapshot};

pub fn may_have(gpu: &GpuView, ordinal: u32, bindings: &Bindings, asker: Asker<'_>) -> Result<(), Obstacle> {
    let now = proc::uptime().unwrap_or_default().as_secs();
    let taker = asker.kept_out_by(&gpu.plan.slice(ordinal), bindings, now, control_groups::use_of);
    access::may_have(Standing {
        unusable: unusable(gpu),
        drained: gpu.drained.contains(&ordinal),
        taken_by: taker.map(|one| one.name().to_owned()),
        unserved: (!gpu.slice_healthy(ordinal)).then(|| gpu.slice_reason(ordinal)),
    })
}

/// The reason why an administrator has to act before programs can use the GPU. None if no action is needed.
fn unusable(gpu: &GpuView) -> Option<String> {
    if gpu.needs_reset {
        return Some(gpu.reason.clone());
    }
    if let Err(reason) = &gpu.plan.gpu.nvml {
        return Some(reason.to_string());
    }
    (!gpu.plan.servable()).then(|| gpu.plan.unusable().unwrap_or_default())
}

/// Finds the slices with these names for a program. The name of a GPU stands for a slice of the GPU that the program already
/// has, or else for the first slice that it may have. The error names the first unknown name, or the first name for which the
/// program may have no slice.
pub fn choose<'s>(
    snapshot: &'s Snapshot,
    names: &[String],
    bindings: &Bindings,
    asker: Asker<'_>,
) -> Result<Vec<ChosenSlice<'s>>, RequestError> {
    if snapshot.gpus.is_none() {
        return Err(not_ready(snapshot));
    }
    if names.is_empty() {
        return Err(none_named());
    }
    let chosen = |asked: &String| {
        let (gpu, name) = snapshot.find(asked).ok_or_else(|| no_such_device(snapshot, asked))?;
        let ordinal = match name {
            DeviceName::Slice(slice) => may_have(gpu, slice.ordinal, bindings, asker).map(|()| slice.ordinal),
            DeviceName::Gpu(_) => of_gpu(gpu, bindings, asker),
        };
        let name = name.to_string();
        let ordinal = ordinal.map_err(|obstacle| refusal(&name, &obstacle))?;
        Ok(ChosenSlice { gpu, ordinal, name })
    };
    names.iter().map(chosen).collect()
}

/// Finds a slice of this GPU for the program. If the program may have no slice of the GPU, the error is the obstacle that is
/// easiest to overcome.
fn of_gpu(gpu: &GpuView, bindings: &Bindings, asker: Asker<'_>) -> Result<u32, Obstacle> {
    // The caller names the GPU and no slice. The weak authority `BoundBy::Platform` ensures that the service takes no slice
    // away from another control group.
    let asker = Asker { by: BoundBy::Platform, ..asker };
    let own = bindings.iter().find(|one| Some(one.group.path.as_str()) == asker.control_group);
    let has = |ordinal: &u32| own.is_some_and(|own| own.slices.contains(&gpu.plan.slice(*ordinal)));
    let mut refused: Option<Obstacle> = None;
    let all = 0..gpu.plan.slices();
    for ordinal in all.clone().filter(has).chain(all.filter(|ordinal| !has(ordinal))) {
        match may_have(gpu, ordinal, bindings, asker) {
            Ok(()) => return Ok(ordinal),
            Err(obstacle) => refused = refused.into_iter().chain([obstacle]).min(),
        }
    }
    Err(refused.unwrap_or_else(|| Obstacle::Unusable("the GPU has no slices".to_owned())))
}
