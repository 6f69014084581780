//! Examples of a Snapshot.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tempfile::TempDir;

use common::host::gpu::PcieLink;
use common::published::control_daemon::{ControlDaemonState, ControlDaemonView};
use common::published::events::{Event, Events};
use common::published::samples;
use common::published::snapshot::{GpuView, Snapshot, State};
use mps_core::terms::DaemonId;

pub(crate) const P40: &str = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400";

pub(crate) fn tesla_p40(address: &str, uuid: &str) -> GpuView {
    let mut gpu = samples::gpu(address, uuid);
    gpu.confirmed_thread_percentage = Some(25);
    let pci = &mut gpu.plan.gpu.pci;
    pci.render_node = Some(PathBuf::from("/dev/dri/renderD128"));
    pci.card_node = Some(PathBuf::from("/dev/dri/card0"));
    pci.link = Some(PcieLink { rate: "8GT/s".to_owned(), width: 16 });
    pci.pci_ids_name = Some("Tesla P40".to_owned());
    gpu
}

pub(crate) fn serving(gpus: Vec<GpuView>) -> Snapshot {
    let since = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    Snapshot {
        driver_version: "580.159.04".to_owned(),
        control_daemons: vec![ControlDaemonView {
            control_directory: "/tmp/nvidia-mps/pipe".into(),
            id: DaemonId::Shared,
            state: ControlDaemonState::Ready,
            reason: String::new(),
            pid: Some(4711),
            servers: vec![4712],
            pipe_directory: PathBuf::from("/tmp/nvidia-mps/pipe"),
            log_directory: PathBuf::from("/tmp/nvidia-mps/log"),
            multiuser: Some(false),
            cpus: Some("all".to_owned()),
            wanted_cpus: None,
            starts: 1,
            restarts: 0,
            server_restarts: 0,
            faults: 0,
            since,
        }],
        events: Events::from_iter([Event {
            at: since,
            ..Event::now("control daemon shared is ready".to_owned())
        }]),
        ..samples::snapshot(Some(gpus))
    }
}

pub(crate) fn first_gpu(snapshot: &mut Snapshot) -> &mut GpuView {
    Arc::make_mut(&mut snapshot.gpus.as_mut().unwrap()[0])
}

/// The Snapshot of the host in the platform's documentation: one Tesla P40 at 0000:00:06.0 with four slices.
pub(crate) fn p40_board() -> Snapshot {
    serving(vec![tesla_p40("0000:00:06.0", P40)])
}

/// Gives all GPUs a temporary pipe directory, with a plain file in place of the socket. The directory is removed when the
/// second value is dropped.
pub(crate) fn with_socket(mut snapshot: Snapshot) -> (Snapshot, TempDir) {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("control"), "").unwrap();
    for gpu in snapshot.gpus.iter_mut().flatten() {
        Arc::make_mut(gpu).plan.pipe_directory = directory.path().to_owned();
    }
    (snapshot, directory)
}

/// The Snapshot of a service that has just started and does not know its GPUs yet.
pub(crate) fn starting() -> Snapshot {
    Snapshot {
        generation: 0,
        state: State::Starting,
        reason: "looking for GPUs".to_owned(),
        gpus: None,
        control_daemons: Vec::new(),
        events: Events::default(),
        ..p40_board()
    }
}
