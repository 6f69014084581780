//! `yunion-mpsctl bind` and `unbind`: bind slices to a control group, and end the binding. A container runtime calls
//! `yunion-mpsctl bind --oci` as a hook before the program of a container starts.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Write};

use clap::Args;
use serde::Deserialize;

use crate::chosen::{passes, until_served};
use crate::complete;
use crate::screen::say;
use crate::{Error, Result, slurm};
use common::bus::error::RequestError;
use common::bus::proxy::{BusError, DaemonProxy, GroupOf, SliceWish};
use common::host::proc;
use common::published::snapshot::drained;
use common::text::printable;

/// The most bytes of a container's state that are read from standard input. A container runtime writes some hundred bytes and
/// the container's annotations.
const STATE: u64 = 1024 * 1024;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Names as `list` shows them: 00:06.0-1; a GPU's address or UUID stands for its lowest slice that is free
    #[arg(required_unless_present = "slurm", value_name = "SLICE", add = complete::devices())]
    devices: Vec<String>,
    #[command(flatten)]
    group: Group,
    #[command(flatten)]
    hook: Hook,
    /// Take the slices and the control group of the Slurm job that this process is in: for a Prolog that runs in the job
    #[arg(long, conflicts_with_all = ["Group", "label", "oci", "devices"])]
    slurm: bool,
    /// A name for people: a guest, a container, a job
    #[arg(long, default_value = "", hide_default_value = true)]
    label: String,
    /// Other control groups may have the slices too
    #[arg(long)]
    share: bool,
}

/// The options of a runtime's hook.
#[derive(Debug, Args)]
pub(crate) struct Hook {
    /// Take the process and the label from the state of a container on standard input: for createRuntime hooks (OCI)
    #[arg(long, conflicts_with_all = ["Group", "label"])]
    oci: bool,
    /// Refuse the container, since these slices are drained. The service's CDI spec uses this option
    #[arg(long, requires = "oci", hide = true)]
    drained: bool,
}

#[derive(Debug, Args)]
#[group(multiple = false)]
pub(crate) struct Group {
    /// The control group of this process
    #[arg(long, required_unless_present_any = ["control_group", "oci", "slurm"])]
    pid: Option<u32>,
    /// The control group of this path, as in /proc/PID/cgroup
    #[arg(long, value_name = "PATH")]
    control_group: Option<String>,
}

/// The state of a container, which a container runtime writes to the standard input of its hooks as JSON.
#[derive(Debug, Deserialize)]
struct ContainerState {
    id: String,
    pid: u32,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// The annotations in which containerd and CRI-O store the Kubernetes names of a container: the namespace, the pod and the
/// container.
const KUBERNETES: [[&str; 3]; 2] = [
    [
        "io.kubernetes.cri.sandbox-namespace",
        "io.kubernetes.cri.sandbox-name",
        "io.kubernetes.cri.container-name",
    ],
    ["io.kubernetes.pod.namespace", "io.kubernetes.pod.name", "io.kubernetes.container.name"],
];

impl ContainerState {
    /// The name `namespace/pod/container` of a container of Kubernetes. None for any other container.
    fn in_pod(&self) -> Option<String> {
        let name = |keys: &[&str; 3]| {
            let names: Vec<&str> =
                keys.iter().map_while(|key| self.annotations.get(*key)).map(String::as_str).collect();
            (names.len() == keys.len()).then(|| names.join("/"))
        };
        KUBERNETES.iter().find_map(name)
    }
}

pub(crate) async fn bind(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    if arguments.hook.drained {
        ignore_input();
        let names = arguments.devices.join(" ");
        return Err(Error::Failed(format!("{names} is {}", drained(&names))));
    }
    let Some(ToBind { devices, group, label, waits_for_owner }) = wanted(arguments)? else { return Ok(()) };
    let wish = SliceWish { names: devices, free: false, share: arguments.share };
    let bind = async || DaemonProxy::connect().await?.bind(&wish, &group, &label).await;
    // An error would make the start of a container or of a Slurm job fail. So `--oci` and `--slurm` wait for a service that is
    // just restarting.
    let waits = arguments.hook.oci || arguments.slurm;
    let will_be_free =
        |error: &BusError| waits_for_owner && matches!(error, BusError::Refused(RequestError::Taken(_)));
    let worth_waiting = |error: &BusError| waits && (passes(error) || is_away(error) || will_be_free(error));
    let bound = until_served(bind, worth_waiting).await?;
    if waits {
        return Ok(());
    }
    for slice in bound {
        writeln!(out, "{}", printable(&slice))?;
    }
    Ok(())
}

struct ToBind {
    devices: Vec<String>,
    group: GroupOf,
    label: String,
    /// True for a container of Kubernetes, which waits until the former owner of the slice ends. The kubelet gives a device to
    /// one pod at a time. So the former owner is a container of a pod that was deleted by force, and will end soon.
    waits_for_owner: bool,
}

/// None if there is nothing to bind: the Slurm job has no slice, or the container is in a user namespace.
fn wanted(arguments: &Arguments) -> Result<Option<ToBind>> {
    if arguments.slurm {
        let Some((control_group, label)) = slurm::job()? else { return Ok(None) };
        let (devices, group) = (slurm::given()?, GroupOf::Path(control_group));
        return Ok(Some(ToBind { devices, group, label, waits_for_owner: false }));
    }
    let devices = arguments.devices.clone();
    if !arguments.hook.oci {
        let Group { pid, control_group } = &arguments.group;
        let group = named(*pid, control_group.as_deref());
        let label = arguments.label.clone();
        return Ok(Some(ToBind { devices, group, label, waits_for_owner: false }));
    }
    if is_in_user_namespace() {
        ignore_input();
        say("note: only root may bind slices, so the service knows the slice of this container only by the \
             environment of the container");
        return Ok(None);
    }
    let state = container_state(io::stdin()).map_err(Error::Failed)?;
    let (group, in_pod) = (GroupOf::Process(state.pid), state.in_pod());
    Ok(Some(ToBind { devices, group, waits_for_owner: in_pod.is_some(), label: in_pod.unwrap_or(state.id) }))
}

pub(crate) async fn unbind(
    daemon: &DaemonProxy,
    pid: Option<u32>,
    control_group: Option<&str>,
    out: &mut dyn Write,
) -> Result<()> {
    daemon.unbind(&named(pid, control_group)).await?;
    writeln!(out, "The control group is no longer bound to a slice.")?;
    Ok(())
}

/// The parser of the command line ensures that exactly one of the two options is set.
fn named(pid: Option<u32>, control_group: Option<&str>) -> GroupOf {
    control_group
        .map_or_else(|| GroupOf::Process(pid.unwrap_or_default()), |path| GroupOf::Path(path.to_owned()))
}

/// True if the service is most likely restarting, so that the request is repeated. A service that ended before its answer may
/// already have bound the control group. The repeated request then does no harm.
fn is_away(error: &BusError) -> bool {
    match error {
        BusError::NotRunning => true,
        BusError::Other { name, .. } => name.ends_with(".NoReply"),
        _ => false,
    }
}

/// Reads and ignores the container's state on standard input. If this process ended before it has read the state, the container
/// runtime could not write the state, and might treat the failed write as an error.
fn ignore_input() {
    let _ = io::copy(&mut io::stdin().take(STATE), &mut io::sink());
}

fn container_state(input: impl Read) -> Result<ContainerState, String> {
    let mut text = Vec::new();
    let read = input.take(STATE).read_to_end(&mut text);
    read.map_err(|error| format!("the state of the container can't be read: {error}"))?;
    let state: ContainerState = serde_json::from_slice(&text)
        .map_err(|error| format!("standard input is not the state of a container: {error}"))?;
    if state.pid == 0 {
        return Err("the container has no process yet; use --oci only in a createRuntime hook".to_owned());
    }
    Ok(state)
}

/// True if this process is in a user namespace, as under a container runtime without root. The bus does not accept the user of
/// a process in a user namespace.
fn is_in_user_namespace() -> bool {
    fs::read_to_string(proc::OWN_UID_MAP).is_ok_and(|map| !is_whole(&map))
}

/// True if `map` is the user id map of the host itself, which maps every user id to itself.
fn is_whole(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_a_container_is_read() {
        let state =
            r#"{"ociVersion": "1.0.2", "id": "c1", "status": "creating", "pid": 4711, "bundle": "/b"}"#;
        let state = container_state(state.as_bytes()).unwrap();
        assert_eq!((state.pid, state.id.as_str(), state.in_pod()), (4711, "c1", None));
        for bad in ["", "{}", r#"{"id": "c1", "pid": 0}"#, r#"{"id": "c1", "pid": -1}"#, "[1]"] {
            container_state(bad.as_bytes()).unwrap_err();
        }
    }

    #[test]
    fn a_container_of_kubernetes_is_named_by_its_pod() {
        let in_pod = |annotations: &str| {
            let state = format!(r#"{{"id": "c1", "pid": 7, "annotations": {annotations}}}"#);
            container_state(state.as_bytes()).unwrap().in_pod()
        };
        let containerd = r#"{"io.kubernetes.cri.sandbox-namespace": "ml", "io.kubernetes.cri.sandbox-name": "train-0",
                             "io.kubernetes.cri.container-name": "main", "other": "x"}"#;
        let crio = r#"{"io.kubernetes.pod.namespace": "ml", "io.kubernetes.pod.name": "train-0",
                       "io.kubernetes.container.name": "main"}"#;
        for annotations in [containerd, crio] {
            assert_eq!(in_pod(annotations).as_deref(), Some("ml/train-0/main"));
        }
        for annotations in [r#"{"io.kubernetes.pod.name": "train-0"}"#, "{}"] {
            assert_eq!(in_pod(annotations), None);
        }
    }

    #[test]
    fn only_the_host_has_all_user_ids() {
        assert!(is_whole("         0          0 4294967295\n"));
        for map in ["0 1000 1\n1 100000 65536\n", "0 100000 65536\n", ""] {
            assert!(!is_whole(map), "{map}");
        }
    }
}
