//! The settings of a container that gets slices, or a refusal that names the device and the remedy. All functions are pure.

use std::collections::BTreeSet;

use common::published::cdi::{KIND, binding_device};
use common::published::container::{ContainerConfig, Mount, gives_gpus};
use tonic::Status;

use crate::api::{ContainerDeviceNode, ContainerMount, ContainerSettings};
use crate::offers::{Offered, refusal};
use crate::preference::gpu;
use crate::slice::NodeSlice;

/// Finds the slices that the kubelet has chosen for a container, by their names. `offered` has the slices that the kubelet
/// knows, and `now` has the slices that the service reports at this moment.
pub(crate) fn slices_for(
    resource: &str,
    names: &[String],
    offered: &[Offered],
    now: &[NodeSlice],
) -> Result<Vec<NodeSlice>, Status> {
    if names.is_empty() {
        return Err(Status::invalid_argument(format!(
            "the kubelet asked for no device for a container; write {resource}: 1 in resources.limits of the \
             container"
        )));
    }
    one_of_each_gpu(names)?;
    names.iter().map(|name| slice_for(resource, name, offered, now)).collect()
}

fn slice_for(
    resource: &str,
    name: &str,
    offered: &[Offered],
    now: &[NodeSlice],
) -> Result<NodeSlice, Status> {
    let unknown = || {
        Status::not_found(format!(
            "{name} is no device of {resource}; yunion-mpsctl list shows the slices of this node"
        ))
    };
    if !offered.iter().any(|told| told.name == name) {
        return Err(unknown());
    }
    let slice = now.iter().find(|slice| slice.name == name).ok_or_else(unknown)?;
    match refusal(slice) {
        Some(why) => Err(Status::failed_precondition(format!("{name}: {why}"))),
        None => Ok(slice.clone()),
    }
}

fn one_of_each_gpu(names: &[String]) -> Result<(), Status> {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    for name in names {
        if !seen.insert(gpu(name)) {
            let first = names.iter().find(|first| gpu(first) == gpu(name)).unwrap_or(name);
            return Err(Status::invalid_argument(format!(
                "{first} and {name} are slices of one GPU, and a container can't join slices; ask for one slice of a \
                 larger size"
            )));
        }
    }
    Ok(())
}

/// The settings for a container with one slice: NVIDIA's CDI device for the GPU, and the service's CDI device for the slice.
/// The service's CDI device contains a hook that binds the container to the slice.
pub(crate) fn by_cdi(slice: &NodeSlice) -> Result<ContainerSettings, Status> {
    let cdi_devices = vec![cdi_of_gpu(slice)?, own_cdi(&slice.name)];
    Ok(ContainerSettings { cdi_devices, ..ContainerSettings::default() })
}

/// The settings for a container with slices of several GPUs. The service's CDI devices of several slices would overwrite each
/// other's limits. So the environment and the mounts are made for all slices together, and each slice adds a CDI device with
/// only the hook.
pub(crate) fn by_cdi_of_gpus(
    slices: &[NodeSlice],
    config: ContainerConfig,
) -> Result<ContainerSettings, Status> {
    let mut cdi_devices = slices.iter().map(cdi_of_gpu).collect::<Result<Vec<_>, _>>()?;
    cdi_devices.extend(slices.iter().map(|slice| own_cdi(&binding_device(&slice.name))));
    let mut settings = settings(config);
    // NVIDIA's runtime would add the GPUs in `NVIDIA_VISIBLE_DEVICES` a second time, so the variables that give GPUs are
    // removed.
    settings.environment.retain(|name, _| !gives_gpus(name));
    Ok(ContainerSettings { cdi_devices, ..settings })
}

/// The settings for a container engine without CDI that uses NVIDIA's runtime: the environment, the mounts and the device
/// nodes.
pub(crate) fn without_cdi(slices: &[NodeSlice], config: ContainerConfig) -> ContainerSettings {
    let mut device_nodes = vec![node("/dev/nvidiactl".to_owned()), node("/dev/nvidia-uvm".to_owned())];
    let minors: BTreeSet<u32> = slices.iter().filter_map(|slice| slice.minor).collect();
    device_nodes.extend(minors.iter().map(|minor| node(format!("/dev/nvidia{minor}"))));
    ContainerSettings { device_nodes, ..settings(config) }
}

fn cdi_of_gpu(slice: &NodeSlice) -> Result<String, Status> {
    let unknown = || {
        let name = &slice.name;
        Status::failed_precondition(format!(
            "{name}: the driver does not report the UUID of the GPU; see nvidia-smi -L"
        ))
    };
    let uuid = slice.uuid.as_ref().ok_or_else(unknown)?;
    Ok(format!("nvidia.com/gpu={uuid}"))
}

fn own_cdi(device: &str) -> String {
    format!("{KIND}={device}")
}

fn settings(config: ContainerConfig) -> ContainerSettings {
    let mounts = config.mounts.into_iter();
    let mounts = mounts.map(|Mount { host, container, read_only }| ContainerMount {
        in_container: container,
        on_host: host,
        read_only,
    });
    ContainerSettings {
        environment: config.environment.into_iter().collect(),
        mounts: mounts.collect(),
        ..ContainerSettings::default()
    }
}

/// A device node for a container. The container engine reports each device node in the settings to systemd. When systemd
/// reloads its units, it removes a container's access to all device nodes that were not reported.
fn node(path: String) -> ContainerDeviceNode {
    ContainerDeviceNode { in_container: path.clone(), on_host: path, permissions: "rw".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::slice::samples::slice;

    const RESOURCE: &str = "yunion.io/mps-20gib";

    fn offered(slices: &[NodeSlice]) -> Vec<Offered> {
        slices
            .iter()
            .map(|slice| Offered { name: slice.name.clone(), numa_node: None, unusable: None })
            .collect()
    }

    fn asked(names: &[&str], offered: &[Offered], now: &[NodeSlice]) -> Result<Vec<NodeSlice>, Status> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        slices_for(RESOURCE, &names, offered, now)
    }

    #[test]
    fn a_container_gets_the_slices_that_it_asks_for() {
        let slices = [slice("06-0", 20480, 25), slice("07-0", 20480, 25)];
        assert_eq!(asked(&["07-0", "06-0"], &offered(&slices), &slices).unwrap()[0].name, "07-0");
    }

    #[test]
    fn a_refusal_names_the_device_and_what_to_do() {
        let slices = [slice("06-0", 20480, 25), slice("06-1", 20480, 25)];
        let complaint =
            |names: &[&str]| asked(names, &offered(&slices), &slices).unwrap_err().message().to_owned();
        assert!(
            complaint(&["06-9"]).contains("06-9 is no device of yunion.io/mps-20gib; yunion-mpsctl list")
        );
        assert!(complaint(&["06-0", "06-1"]).contains("06-0 and 06-1 are slices of one GPU"));
        assert!(complaint(&[]).contains("write yunion.io/mps-20gib: 1 in"));
        // The kubelet still knows the slice, but the service no longer has the slice.
        let gone = asked(&["06-1"], &offered(&slices), &slices[..1]).unwrap_err();
        assert_eq!(gone.code(), tonic::Code::NotFound, "{gone}");
    }

    #[test]
    fn the_word_of_this_moment_counts_for_health() {
        let told = offered(&[slice("06-0", 20480, 25)]);
        let sick = NodeSlice { healthy: false, reason: "drained".to_owned(), ..slice("06-0", 20480, 25) };
        assert_eq!(asked(&["06-0"], &told, &[sick]).unwrap_err().message(), "06-0: drained");
    }

    #[test]
    fn a_slice_of_a_stranger_is_refused_for_as_long_as_he_has_it() {
        let taken = NodeSlice { bound_to: "4f1c".to_owned(), ..slice("06-0", 20480, 25) };
        let told = offered(std::slice::from_ref(&taken));
        let refused = asked(&["06-0"], &told, &[taken]).unwrap_err();
        assert!(refused.message().contains("06-0: taken by 4f1c outside Kubernetes"), "{refused}");
        asked(&["06-0"], &told, &[slice("06-0", 20480, 25)]).unwrap();
    }

    fn config() -> ContainerConfig {
        let variable = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        ContainerConfig {
            environment: vec![
                variable("CUDA_MPS_PIPE_DIRECTORY", "/run/x"),
                variable("NVIDIA_VISIBLE_DEVICES", "y"),
            ],
            mounts: vec![Mount {
                host: "/on/host".to_owned(),
                container: "/run/x".to_owned(),
                read_only: true,
            }],
            gpus: vec!["GPU-06".to_owned()],
        }
    }

    #[test]
    fn by_cdi_a_container_gets_the_gpu_and_the_slice_by_name() {
        let settings = by_cdi(&slice("06-0", 20480, 25)).unwrap();
        assert_eq!(settings.cdi_devices, ["nvidia.com/gpu=GPU-06", "yunion.io/mps=06-0"]);
        assert!(settings.environment.is_empty() && settings.mounts.is_empty());
        let unknown = NodeSlice { uuid: None, ..slice("06-0", 20480, 25) };
        assert!(
            by_cdi(&unknown).unwrap_err().message().starts_with("06-0: the driver does not report the UUID")
        );
    }

    #[test]
    fn slices_of_several_gpus_have_one_environment_and_the_gpus_by_name() {
        let settings = by_cdi_of_gpus(&[slice("06-0", 1, 1), slice("07-0", 1, 1)], config()).unwrap();
        assert_eq!(
            settings.cdi_devices,
            [
                "nvidia.com/gpu=GPU-06",
                "nvidia.com/gpu=GPU-07",
                "yunion.io/mps=bind-06-0",
                "yunion.io/mps=bind-07-0",
            ]
        );
        assert_eq!(settings.environment.keys().collect::<Vec<_>>(), ["CUDA_MPS_PIPE_DIRECTORY"]);
        assert_eq!(settings.mounts.len(), 1);
    }

    #[test]
    fn without_cdi_a_container_gets_variables_mounts_and_device_nodes() {
        let settings = without_cdi(&[slice("06-0", 1, 1)], config());
        assert!(settings.cdi_devices.is_empty() && settings.environment.len() == 2);
        assert_eq!(
            settings.mounts,
            [ContainerMount {
                in_container: "/run/x".to_owned(),
                on_host: "/on/host".to_owned(),
                read_only: true
            }]
        );
        let nodes: Vec<&str> = settings.device_nodes.iter().map(|node| node.on_host.as_str()).collect();
        assert_eq!(nodes, ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"]);
    }
}
