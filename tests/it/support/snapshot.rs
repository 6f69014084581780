//! Snapshots as the daemon would publish them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use common::host::gpu::{ComputeMode, Gpu, NvmlFacts, PciDevice, PcieLink};
use common::plan::GpuPlan;
use common::published::control_daemon::{ControlDaemonState, ControlDaemonView, Event};
use common::published::snapshot::{GpuView, Snapshot, State};

pub(crate) const P40: &str = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400";

/// A Tesla P40 at `address`, cut into four.
pub(crate) fn tesla_p40(address: &str, uuid: &str) -> GpuView {
    let nvml = NvmlFacts {
        uuid: uuid.to_owned(),
        name: "Tesla P40".to_owned(),
        index: 0,
        minor: Some(0),
        memory_total_mib: Some(23040),
        compute_capability: Some((6, 1)),
        compute_mode: Some(ComputeMode::ExclusiveProcess),
        mig_enabled: false,
        foreign_processes: Vec::new(),
    };
    let pci = PciDevice {
        driver: None,
        address: address.parse().unwrap(),
        vendor: 0x10de,
        device: 0x1b38,
        render_node: Some(PathBuf::from("/dev/dri/renderD128")),
        card_node: Some(PathBuf::from("/dev/dri/card0")),
        numa_node: -1,
        local_cpus: None,
        link: Some(PcieLink { rate: "8GT/s".to_owned(), width: 16 }),
        pci_ids_name: Some("Tesla P40".to_owned()),
    };
    GpuView {
        plan: GpuPlan {
            gpu: Gpu { pci, nvml: Ok(nvml) },
            slices: 4,
            memory_limit_mib: 5760,
            thread_percentage: 25,
            max_clients: None,
            limits_enforced: false,
            obstacles: Vec::new(),
            warnings: Vec::new(),
            pipe_directory: PathBuf::from("/tmp/nvidia-mps/pipe"),
            slice_directories: None,
            cpus: None,
        },
        healthy: true,
        reason: String::new(),
        compute_mode: Some(ComputeMode::ExclusiveProcess),
        control_daemon: "shared".to_owned(),
        confirmed_thread_percentage: Some(25),
        confirmed_memory_limit_mib: None,
        drained: BTreeSet::new(),
        unlinked: BTreeMap::new(),
        in_use: None,
        uses: Vec::new(),
    }
}

/// A host that serves these GPUs.
pub(crate) fn serving(gpus: Vec<GpuView>) -> Snapshot {
    let since = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    Snapshot {
        generation: 1,
        state: State::Ready,
        reason: String::new(),
        enabled: true,
        driver_version: "580.159.04".to_owned(),
        pipe_directory: PathBuf::from("/tmp/nvidia-mps/pipe"),
        log_directory: PathBuf::from("/tmp/nvidia-mps/log"),
        gpus: Some(gpus.into_iter().map(Arc::new).collect()),
        control_daemons: vec![ControlDaemonView {
            control_directory: "/tmp/nvidia-mps/pipe".into(),
            id: "shared".to_owned(),
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
        events: VecDeque::from([Event {
            at: since,
            ..Event::now("control daemon shared is ready".to_owned())
        }]),
    }
}

/// The first GPU of a snapshot, to be changed.
pub(crate) fn first_gpu(snapshot: &mut Snapshot) -> &mut GpuView {
    Arc::make_mut(&mut snapshot.gpus.as_mut().unwrap()[0])
}

/// The board of the platform's own documentation: one Tesla P40 at 0000:00:06.0, four slices.
pub(crate) fn p40_board() -> Snapshot {
    serving(vec![tesla_p40("0000:00:06.0", P40)])
}

/// Before the first plan.
pub(crate) fn starting() -> Snapshot {
    Snapshot {
        generation: 0,
        state: State::Starting,
        reason: "looking for GPUs".to_owned(),
        gpus: None,
        control_daemons: Vec::new(),
        events: VecDeque::new(),
        ..p40_board()
    }
}
