//! Finds several slices of one GPU for one container or command. MPS can't combine slices, so the program has the limits of one
//! slice.

use std::collections::BTreeMap;

use mps_core::terms::DeviceName;

/// Each GPU of which `devices` names several slices, with these slices. `devices` has the form of `YUNION_MPS_DEVICE`:
/// published names, separated by commas, each once. The name of a GPU stands for one slice of the GPU.
pub fn given_several(devices: &str) -> BTreeMap<&str, Vec<&str>> {
    let mut by_gpu: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for name in devices.split(',') {
        let (gpu, _) = DeviceName::parts(name);
        by_gpu.entry(gpu).or_default().push(name);
    }
    by_gpu.retain(|_, slices| slices.len() > 1);
    by_gpu
}

pub fn describe(slices: &[&str]) -> String {
    format!(
        "{slices} are slices of one GPU, and MPS can't join slices: a program with all of them has the \
         memory and the threads of one slice",
        slices = slices.join(" and ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_slices_of_one_gpu_are_found() {
        for devices in ["00:06.0-1", "00:06.0", "00:06.0-1,00:07.0-1", "00:06.0-1,0001:00:06.0-1", ""] {
            assert_eq!(given_several(devices), BTreeMap::new(), "{devices}");
        }
        let found = given_several("00:06.0-1,00:07.0-0,00:06.0-2,0001:1a:00.0,0001:1a:00.0-3");
        assert_eq!(
            found,
            BTreeMap::from([
                ("0001:1a:00.0", vec!["0001:1a:00.0", "0001:1a:00.0-3"]),
                ("00:06.0", vec!["00:06.0-1", "00:06.0-2"]),
            ])
        );
        assert!(describe(&found["00:06.0"]).starts_with("00:06.0-1 and 00:06.0-2 are slices of one GPU"));
    }
}
