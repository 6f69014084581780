//! Tests of `yunion-mpsctl doctor`. For each fault of a host, doctor must report exactly the findings that follow from the
//! fault.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::process::{Child, Stdio};
use std::time::Instant;

use common::published::control_daemon::ControlDaemonState;
use rustix::process::Signal;
use serde_json::Value;
use zbus::{OwnedObjectPath, interface};

use crate::support::host::{Host, binaries, control_pid, start_time, text};
use crate::support::mount::Mount;
use crate::support::service::Service;
use crate::support::skip::root_or_skip;
use crate::support::snapshot::{first_gpu, p40_board};
use crate::support::wait::{DEADLINE, wait_for};

const RENDER: &str = "path: /dev/dri/renderD128";
const UUID: &str = "GPU-168acfc9-c926-5401-354d-2910ddcd391b";

/// A host with the installed package, and the processes and mounts by which a test causes a fault.
struct Scene {
    host: Host,
    children: Vec<Child>,
    mounts: Vec<Mount>,
}

/// The moment at which a test causes a fault.
#[derive(Clone, Copy)]
enum When {
    /// The service is never started.
    Idle,
    /// Before the service starts.
    Before,
    /// While the service serves all slices.
    Serving,
    /// The function that causes the fault starts the service.
    ByItself,
}

impl Scene {
    fn new(board: &str) -> Self {
        let scene = Self { host: Host::new(board), children: Vec::new(), mounts: Vec::new() };
        scene.host.install();
        scene
    }

    fn write(&self, path: &str, text: &str) {
        let file = self.host.file(path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }

    fn remove(&self, path: &str) {
        fs::remove_file(self.host.file(path)).unwrap();
    }

    fn chmod(&self, below: &str, mode: u32) {
        self.host.let_change(below);
        fs::set_permissions(self.host.path(below), PermissionsExt::from_mode(mode)).unwrap();
    }

    /// Starts a program with this pipe directory. The program runs until the end of the test.
    fn start(&mut self, program: &[&str], pipe: &str) -> u32 {
        let mut command = self.host.command(program[0]);
        command.args(&program[1..]).env("CUDA_MPS_PIPE_DIRECTORY", self.host.path(pipe));
        command.env("CUDA_MPS_LOG_DIRECTORY", self.host.path(pipe));
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let pid = child.id();
        self.children.push(child);
        pid
    }

    fn client(&mut self, program: &[&str]) {
        let pid = self.start(program, "mps/pipe").to_string();
        let pipe = self.host.path("mps/pipe");
        wait_for("the client", || self.host.front_end(&pipe, "ps").contains(&pid).then_some(()));
    }

    /// Makes a file. An open of this file hangs, as on a network file system when the server does not answer.
    fn hang(&self, path: &str) {
        let file = self.host.file(path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        assert!(self.host.command("mkfifo").arg(file).status().unwrap().success());
    }

    /// Starts a program that computes on the GPU without MPS.
    fn native(&mut self) {
        let pid = self.start(&["sleep", "600"], "mps/pipe");
        self.host.plant(&format!("gpus/0/processes/{pid}"), &format!("compute 519 {}", start_time(pid)));
    }

    /// Starts a control daemon that is not the service's.
    fn foreign(&mut self, pipe: &str) {
        let directory = self.host.path(pipe);
        fs::create_dir_all(&directory).unwrap();
        self.start(&["nvidia-cuda-mps-control", "-f"], pipe);
        let answer = |command: &str| self.host.front_end(&directory, command);
        wait_for("the foreign control daemon", || {
            (!answer("get_server_list").contains("Cannot")).then_some(())
        });
        answer("start_server -uid 0");
    }

    fn findings(&self) -> Vec<Value> {
        let root = self.host.path("sysroot").display().to_string();
        let output = self.host.mpsctl(&["doctor", "--json", "--sysroot", &root]);
        let report: Value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", text(&output)));
        let findings = report["findings"].as_array().unwrap().clone();
        let worst = findings.iter().map(|finding| match finding["severity"].as_str().unwrap() {
            "error" => 5,
            "warning" => 4,
            "info" => 0,
            other => panic!("{other}"),
        });
        assert_eq!(output.status.code(), Some(worst.max().unwrap_or(0)), "{findings:#?}");
        for finding in &findings {
            for key in ["name", "subject", "found", "remedy"] {
                assert!(!finding[key].as_str().unwrap().is_empty(), "{key} of {finding:#}");
            }
        }
        findings
    }

    /// Waits until doctor reports exactly the findings with these names.
    fn finds(&self, expected: &[&str]) {
        let mut expected = expected.to_vec();
        expected.sort_unstable();
        let deadline = Instant::now() + DEADLINE;
        loop {
            let findings = self.findings();
            let mut names: Vec<&str> =
                findings.iter().map(|finding| finding["name"].as_str().unwrap()).collect();
            names.sort_unstable();
            names.dedup();
            if names == expected {
                return;
            }
            assert!(Instant::now() < deadline, "expected {expected:?}, found {findings:#?}");
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for mut child in self.children.drain(..) {
            let _ = child.kill();
            let _ = child.wait();
        }
        self.mounts.clear();
    }
}

fn planted(board: &str, when: When, plant: fn(&mut Scene), expected: &[&str]) {
    let mut scene = Scene::new(board);
    match when {
        When::Idle | When::ByItself => plant(&mut scene),
        When::Before => {
            plant(&mut scene);
            scene.host.start();
        }
        When::Serving => {
            scene.host.start();
            scene.host.wait_for_state("ready");
            plant(&mut scene);
        }
    }
    scene.finds(expected);
}

/// Makes a test from each row: the test's name, the board, the moment of the fault, the code that causes the fault, and the
/// names of the expected findings.
macro_rules! faults {
    ($($name:ident: $board:literal, $when:ident, $plant:expr => [$($expected:literal),*];)*) => {
        $(
            #[test]
            fn $name() {
                planted($board, When::$when, $plant, &[$($expected),*]);
            }
        )*
    };
}

/// Doctor reports a GPU that is not served as an error, and names the setting with which the GPU can be served.
#[test]
fn a_compute_mode_that_cannot_be_set_is_an_error() {
    for (fault, text) in [("gpus/0/error/nvmlDeviceSetComputeMode", "3"), ("gpus/0/no-permission", "")] {
        let mut scene = Scene::new("h200");
        scene.host.plant(fault, text);
        scene.host.start();
        wait_for("an error with the way out", || {
            let is_it = |finding: &Value| {
                let found = finding["found"].as_str().unwrap();
                finding["severity"] == "error"
                    && found.contains("set cuda_mps_set_compute_mode: false (programs can then use the GPU")
            };
            scene.findings().iter().any(is_it).then_some(())
        });
    }
}

/// Like `faults`, for faults that only root can cause.
macro_rules! faults_for_root {
    ($($name:ident: $board:literal, $when:ident, $plant:expr => [$($expected:literal),*];)*) => {
        $(
            #[test]
            fn $name() {
                if root_or_skip(stringify!($name)) {
                    planted($board, When::$when, $plant, &[$($expected),*]);
                }
            }
        )*
    };
}

faults! {
    healthy_h200: "h200", Serving, |_| {} => [];
    healthy_h200x8: "h200x8", Serving, |_| {} => [];
    healthy_tesla_p40: "tesla-p40", Serving, |_| {} => ["limits-not-enforced"];

    driver_not_loaded: "h200", Before, |scene| scene.host.clear("driver") => ["driver-unusable"];
    driver_half_upgraded: "h200", Before, |scene| scene.host.plant("error/nvmlInit_v2", "18") => ["driver-unusable"];
    no_control_daemon_program: "h200", Before,
        |scene| fs::remove_file(scene.host.path("bin/nvidia-cuda-mps-control")).unwrap()
        => ["program-missing", "control-daemon-waiting"];
    no_server_program: "h200", Serving,
        |scene| fs::remove_file(scene.host.path("bin/nvidia-cuda-mps-server")).unwrap() => ["program-missing"];
    programs_of_another_cuda: "h200", Serving, other_cuda => ["version-skew"];
    newer_driver: "h200", Before, |scene| scene.host.plant("driver", "590.44.01\n") => ["driver-untried"];
    without_the_platform: "h200", Serving, without_the_platforms_keys => ["programs-need-slice"];
    slices_of_their_own_without_the_platform: "h200", Before, |scene| {
        without_the_platforms_keys(scene);
        scene.host.configure("cuda_mps_topology: per_slice");
        scene.host.devices(&[&format!("{RENDER}, type: NVIDIA_MPS, virtual_number: 4, memory: 20GiB, isolation: slice")]);
    } => ["programs-need-slice"];
    node_missing: "h200x8", Serving, |scene| scene.remove("/dev/nvidia3") => ["device-node-missing"];
    node_of_unified_memory_missing: "h200", Serving, |scene| scene.remove("/dev/nvidia-uvm") => ["device-node-missing"];
    render_node_missing: "h200", Serving, |scene| scene.remove("/dev/dri/renderD128") => ["device-node-missing"];
    node_for_root_alone: "h200", Serving, |scene| scene.chmod("sysroot/dev/nvidia0", 0o600)
        => ["device-node-permissions"];

    engines_with_plain_runtimes: "h200", Serving, |scene| {
        scene.write("/usr/bin/dockerd", "");
        scene.write("/usr/bin/podman", "");
        scene.write("/etc/containers/containers.conf", "runtime = \"runc\"\n");
    } => ["stop-harms-neighbours"];
    engines_with_our_runtime: "h200", Serving, |scene| {
        scene.write("/usr/sbin/dockerd", "");
        scene.write("/etc/docker/daemon.json", "{\"default-runtime\": \"yunion-mps-runc\"}");
        scene.write("/etc/containerd/config.toml", "BinaryName = \"/usr/bin/yunion-mps-nvidia-container-runtime\"");
    } => [];

    mig: "h200", Before, |scene| scene.host.plant("gpus/0/mig", "Enabled\n") => ["mig-enabled"];
    prohibited: "h200", Before, |scene| scene.host.plant("gpus/0/compute_mode", "Prohibited\n")
        => ["compute-mode-prohibited"];
    drift: "h200x8", Serving, |scene| scene.host.plant("gpus/5/compute_mode", "Default\n") => ["compute-mode-drift"];
    mode_left_behind: "h200", Idle, |scene| scene.host.plant("gpus/0/compute_mode", "Exclusive_Process\n")
        => ["service-not-running", "compute-mode-left"];
    mode_left_alone: "h200", Before, |scene| scene.host.configure("cuda_mps_set_compute_mode: false")
        => ["compute-mode-left-alone"];
    bypass: "h200", Serving, |scene| { scene.native(); scene.host.reload(); } => ["bypassing-program"];
    held: "h200", Before, Scene::native => ["gpu-held"];
    lost: "h200x8", Before, |scene| scene.host.plant("gpus/3/lost", "") => ["gpu-unreachable"];
    memory_unknown: "h200", Before, |scene| scene.host.plant("gpus/0/memory_total_mib", "N/A") => ["memory-unknown"];
    persistence_off: "h200x8", Serving, |scene| scene.host.plant("gpus/7/persistence_mode", "Disabled\n")
        => ["persistence-off"];
    too_many_slices: "h200", Before,
        |scene| scene.host.devices(&[&format!("{RENDER}, type: NVIDIA_MPS, virtual_number: 49")])
        => ["more-slices-than-clients"];
    overcommitted: "h200", Before,
        |scene| scene.host.devices(&[&format!("{RENDER}, type: NVIDIA_MPS, virtual_number: 4, memory: 40GiB, overcommit: true")])
        => ["agent-divides-memory", "memory-overcommitted"];
    oversubscribed: "h200", Before, |scene| scene.host.configure("cuda_mps_thread_percentage: balanced")
        => ["threads-oversubscribed"];
    given_out_twice: "h200", Before,
        |scene| scene.host.devices(&[
            &format!("{RENDER}, type: NVIDIA_MPS, virtual_number: 4"),
            &format!("{RENDER}, type: NVIDIA_GPU_SHARE, virtual_number: 2"),
        ]) => ["given-out-twice"];
    unlike_slices: "h200x8", Before,
        |scene| scene.host.devices(&[
            &format!("{RENDER}, type: NVIDIA_MPS, virtual_number: 4"),
            "path: /dev/dri/renderD129, type: NVIDIA_MPS, virtual_number: 8",
        ]) => ["default-limits-loose"];

    wrong_configuration: "h200", Serving, |scene| scene.host.configure("cuda_mps_replicas: none")
        => ["configuration-wrong"];
    wrong_render_node: "h200", Serving,
        |scene| scene.host.devices(&["path: /dev/dri/renderD200, type: NVIDIA_MPS, virtual_number: 4"])
        => ["configuration-wrong"];
    pipe_directory_too_long: "h200", Serving,
        |scene| scene.host.configure(&format!("cuda_mps_pipe_directory: /run/{}", "x".repeat(90)))
        => ["configuration-wrong"];
    misspelt_key: "h200", Serving, |scene| scene.host.configure("cuda_mps_replicsa: 3") => ["configuration-warning"];
    misspelt_key_beside_an_error: "h200", Serving,
        |scene| scene.host.configure("cuda_mps_replicsa: 3\ncuda_mps_replicas: none")
        => ["configuration-wrong", "configuration-warning"];
    switched_off: "h200", Before, |scene| scene.host.configure("enable_cuda_mps: false") => ["mps-disabled"];
    overridden: "h200", Serving, |scene| scene.write("/etc/yunion/host_local.conf", "log_level: info\n")
        => ["key-overridden"];
    not_loaded: "h200", Serving,
        |scene| scene.host.devices(&[&format!("{RENDER}, type: NVIDIA_MPS, virtual_number: 6")])
        => ["configuration-not-loaded"];
    other_pipe_directory: "h200", Serving,
        |scene| scene.host.configure(&format!("cuda_mps_pipe_directory: {}", scene.host.path("mps/p2").display()))
        => ["pipe-directory-differs"];
    refused_configuration: "h200", Serving, |scene| {
        scene.host.configure("cuda_mps_replicas: none");
        assert!(!scene.host.call("Control.Reload").status.success());
    } => ["configuration-wrong", "service-not-ready"];
    key_without_a_value: "h200", Serving, |scene| scene.host.configure("cuda_mps_replicas:\ncuda_mps_prewarm:")
        => ["agent-empty-value"];
    disabled_by_a_key_without_a_value: "h200", Before, |scene| scene.host.configure("enable_cuda_mps:")
        => ["mps-disabled", "agent-empty-value"];
    two_types_for_one_gpu: "h200", Serving,
        |scene| scene.host.devices(&[
            &format!("{RENDER}, type: NVIDIA_MPS, virtual_number: 4"),
            &format!("{RENDER}, type: NVIDIA_GPU"),
        ]) => ["given-out-twice"];
    type_that_ends_the_agent: "h200", Serving,
        |scene| scene.host.devices(&[
            &format!("{RENDER}, type: NVIDIA_MPS, virtual_number: 4"),
            "path: /dev/dri/renderD999, type: NVIDIA_MIG, virtual_number: 2",
        ]) => ["agent-unknown-type"];
    path_unknown_to_the_agent: "h200", Serving,
        |scene| scene.host.devices(&[&format!("path: {UUID}, type: NVIDIA_MPS, virtual_number: 4")])
        => ["agent-needs-render-node"];
    one_pipe_directory_each: "h200", Before, |scene| scene.host.configure("cuda_mps_topology: per_gpu")
        => ["agent-needs-shared"];

    closed_parent: "h200", Serving, |scene| scene.chmod("mps", 0o700) => ["directory-closed"];
    open_directory: "h200", Serving, |scene| scene.chmod("mps/pipe", 0o777) => ["directory-open"];
    linked_directory: "h200", Before, |scene| {
        fs::create_dir(scene.host.path("elsewhere")).unwrap();
        symlink(scene.host.path("elsewhere"), scene.host.path("mps/pipe")).unwrap();
    } => ["directory-refused", "control-daemon-waiting"];
    no_directory: "h200", Before, |scene| fs::write(scene.host.path("mps/log"), "").unwrap()
        => ["directory-refused", "control-daemon-waiting"];
    socket_removed: "h200", Serving, |scene| fs::remove_file(scene.host.path("mps/pipe.private/control")).unwrap()
        => ["pipe-socket-missing"];
    directory_removed: "h200", Serving, |scene| fs::remove_dir_all(scene.host.path("mps/pipe.private")).unwrap()
        => ["directory-missing"];
    all_drained: "h200", Serving, |scene| assert!(scene.host.mpsctl(&["drain", "--all"]).status.success())
        => ["slices-drained"];
    open_private_directory: "h200", Serving, |scene| scene.chmod("mps/pipe.private", 0o755)
        => ["private-directory-open"];
    log_too_large: "h200", Idle, |scene| {
        fs::create_dir(scene.host.path("mps/log")).unwrap();
        File::create(scene.host.path("mps/log/control.log")).unwrap().set_len(40 << 20).unwrap();
    } => ["service-not-running", "log-too-large"];
    damaged_state_file: "h200", Serving, |scene| scene.host.plant("run/state.json", "{") => ["state-file-damaged"];
    runtime_directory_removed: "h200", Serving, |scene| fs::remove_dir_all(scene.host.path("run")).unwrap()
        => ["runtime-directory-missing"];
    no_shared_memory: "h200", Serving, |scene| fs::remove_dir(scene.host.file("/dev/shm")).unwrap() => ["shm-unusable"];
    shared_memory_for_root: "h200", Serving, |scene| scene.chmod("sysroot/dev/shm", 0o755) => ["shm-unusable"];
    shared_memory_not_mounted: "h200", Serving, |scene| scene.write("/proc/mounts", "none / ext4 rw 0 0\n")
        => ["shm-unusable"];
    aged: "h200", Serving, |scene| scene.write("/usr/lib/tmpfiles.d/tmp.conf", TMP) => ["directory-ageing"];
    aged_no_more: "h200", Serving, |scene| {
        scene.write("/usr/lib/tmpfiles.d/tmp.conf", TMP);
        let mps = scene.host.path("mps").display().to_string();
        scene.write("/etc/tmpfiles.d/own.conf", &format!("X {mps}\nx {mps}/pipe\nx {mps}/pipe.private\nx {mps}/log\n"));
    } => [];
    ageing_overridden: "h200", Serving, |scene| {
        scene.write("/usr/lib/tmpfiles.d/tmp.conf", TMP);
        scene.write("/etc/tmpfiles.d/tmp.conf", "");
    } => [];
    captured_by_the_toolkit: "h200", Idle, |scene| {
        scene.write("/usr/bin/nvidia-ctk", "");
        scene.host.configure("cuda_mps_pipe_directory: /tmp/nvidia-mps\ncuda_mps_log_directory: /run/mps/log");
    } => ["service-not-running", "toolkit-captures-containers"];
    shown_by_the_toolkit: "h200", Idle, |scene| {
        scene.write("/etc/nvidia-container-runtime/config.toml", "");
        scene.host.configure("cuda_mps_pipe_directory: /tmp/nvidia-mps/pipe\ncuda_mps_log_directory: /run/mps/log");
    } => ["service-not-running", "toolkit-shows-directories"];
    toolkit_alone: "h200", Serving, |scene| scene.write("/usr/bin/nvidia-ctk", "") => [];
    selinux: "h200", Serving, |scene| scene.write("/sys/fs/selinux/enforce", "1") => ["selinux-enforcing"];

    not_running: "h200", Idle, |_| {} => ["service-not-running"];
    no_policy: "h200", Idle, |scene| scene.remove("/usr/share/dbus-1/system.d/io.yunion.Mps1.conf")
        => ["service-not-running", "bus-policy-missing"];
    stopped_service: "h200", Serving, |scene| scene.host.signal(Signal::STOP) => ["service-silent"];
    file_system_that_hangs: "h200", Serving, |scene| scene.hang("/etc/tmpfiles.d/a.conf") => ["check-hangs"];
    no_bus: "h200", Serving, |scene| scene.host.stop_bus() => ["bus-unreachable"];
    shadowed_unit: "h200", Serving, |scene| scene.write(
        "/etc/systemd/system/yunion-mps-daemon.service",
        "[Service]\nExecStart=/opt/yunion/bin/mps-daemon\n",
    ) => ["unit-shadowed"];
    program_of_the_platform: "h200", Serving, |scene| scene.write("/opt/yunion/bin/mps-daemon", "")
        => ["upstream-installed"];

    server_that_does_not_start: "h200", Before, |scene| scene.host.plant("mps/fault/server-start-fails", "")
        => ["control-daemon-backoff"];
    faulted: "h200", Serving, |scene| {
        scene.client(&["cuda-client", "hold", "600", "--stay"]);
        scene.start(&["cuda-client", "fault"], "mps/pipe");
        scene.host.wait_for_status("a fault", |status| status["control_daemons"][0]["state"] == "faulted");
    } => ["control-daemon-faulted", "clients-without-device"];
    waiting_for_clients: "h200", Serving, |scene| {
        scene.client(&["cuda-client", "hold", "600"]);
        scene.host.configure("cuda_mps_topology: per_gpu");
        scene.host.reload();
    } => ["control-daemon-waiting", "agent-needs-shared", "clients-without-device", "gpu-not-served"];
    client_without_device: "h200", Serving, |scene| scene.client(&["cuda-client", "hold", "600"])
        => ["clients-without-device"];
    records_that_others_can_write: "h200", Before, |scene| {
        let guest = scene.host.path("servers/u-1");
        fs::create_dir_all(&guest).unwrap();
        fs::write(guest.join("containers"), "{\"c-1\": {\"cri_id\": \"0123\"}}").unwrap();
        fs::write(guest.join("desc"), "{}").unwrap();
        for (below, mode) in [("", 0o755), ("u-1", 0o755), ("u-1/containers", 0o644), ("u-1/desc", 0o666)] {
            scene.chmod(&format!("servers/{below}"), mode);
        }
        scene.host.configure(&format!("servers_path: {}", scene.host.path("servers").display()));
    } => ["records-without-effect"];
    client_with_device: "h200", Serving,
        |scene| scene.client(&["env", "YUNION_MPS_DEVICE=00:06.0-1", "cuda-client", "hold", "600"]) => [];
    foreign_elsewhere: "h200", Idle, |scene| scene.foreign("mps/other")
        => ["service-not-running", "foreign-control-daemon"];
    foreign_in_our_place: "h200", Before, |scene| {
        scene.foreign("mps/pipe");
        scene.client(&["cuda-client", "hold", "600"]);
    } => ["foreign-control-daemon", "control-daemon-waiting", "clients-without-device"];
    cpus_that_nobody_has: "h200", Before, |scene| {
        scene.write("/sys/bus/pci/devices/0000:00:06.0/local_cpulist", "1023\n");
        scene.host.configure("cuda_mps_cpu_affinity: auto");
    } => ["cpus-elsewhere"];
    programs_hidden_from_the_service: "h200", ByItself, |scene| {
        let bin = format!("{}:", scene.host.path("bin").display());
        scene.host.change("PATH", |path| path.replacen(&bin, "", 1));
        scene.host.start();
        scene.host.change("PATH", |path| format!("{bin}{path}"));
    } => ["program-not-in-service-path", "control-daemon-waiting"];
}

faults_for_root! {
    other_owner: "h200", Before, |scene| {
        fs::create_dir(scene.host.path("mps/pipe")).unwrap();
        chown(scene.host.path("mps/pipe"), Some(65534), None).unwrap();
    } => ["directory-refused", "control-daemon-waiting"];
    full_file_system: "h200", Before, |scene| scene.mounts.push(Mount::at(scene.host.path("mps/log"), "size=512k"))
        => ["file-system-full"];
    read_only_file_system: "h200", Idle, |scene| scene.mounts.push(Mount::at(scene.host.path("mps/pipe"), "ro"))
        => ["service-not-running", "file-system-read-only"];
    too_few_open_files: "h200", Serving, |scene| {
        let pid = control_pid(&scene.host.wait_for_state("ready")).to_string();
        let set = scene.host.command("prlimit").args(["--nofile=64:64", "--pid", &pid]).output().unwrap();
        assert!(set.status.success(), "{}", text(&set));
    } => ["open-files-too-few"];
    client_that_waits_for_another_user: "h200", ByItself, |scene| {
        scene.host.configure("cuda_mps_multiuser: false");
        scene.host.start();
        scene.host.wait_for_state("ready");
        scene.client(&["cuda-client", "hold", "600"]);
        let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "cuda-client", "hold", "600"];
        scene.start(&nobody, "mps/pipe");
    } => ["client-waits-for-other-user", "clients-without-device"];
}

const TMP: &str = "q /tmp 1777 root root 10d\n";

/// From driver 580 on, `nvidia-cuda-mps-control -v` prints a CUDA version. This script prints another version than the
/// driver's.
fn other_cuda(scene: &mut Scene) {
    let program = scene.host.path("bin/nvidia-cuda-mps-control");
    let simulated = fs::read_link(&program).unwrap();
    fs::remove_file(&program).unwrap();
    let answer = "CUDA MPS Control for Linux/Unix/QNX. Binary version: 12080";
    let script =
        format!("#!/bin/sh\n[ \"$1\" != -v ] || exec echo '{answer}'\nexec {} \"$@\"\n", simulated.display());
    fs::write(&program, script).unwrap();
    scene.chmod("bin/nvidia-cuda-mps-control", 0o755);
}

/// Removes the keys of the platform Cloudpods from host.conf, as on a host without Cloudpods.
fn without_the_platforms_keys(scene: &mut Scene) {
    let file = "/etc/yunion/host.conf";
    let text = fs::read_to_string(scene.host.file(file)).unwrap();
    let is_ours = |line: &&str| {
        ["enable_cuda_mps:", "cuda_mps_", "container_device_config_file:"]
            .iter()
            .any(|key| line.starts_with(key))
    };
    let ours: Vec<&str> = text.lines().filter(is_ours).collect();
    assert!(ours.len() < text.lines().count(), "{text}");
    scene.write(file, &(ours.join("\n") + "\n"));
}

/// With a broken configuration, doctor can't make most checks. The list of these checks must not scroll the error off the
/// screen.
#[test]
fn a_broken_configuration_is_one_screen() {
    let scene = Scene::new("h200");
    scene.host.configure("cuda_mps_topology: sideways");
    let root = scene.host.path("sysroot").display().to_string();
    let mut command = scene.host.command(binaries().join("yunion-mpsctl"));
    let output = command.args(["doctor", "--sysroot", &root]).env("COLUMNS", "80").output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(5), "{said}");
    assert!(said.contains("sideways") && said.lines().count() < 24, "{said}");
}

#[test]
fn a_healthy_host_is_told_so() {
    let mut scene = Scene::new("h200");
    scene.host.start();
    scene.host.wait_for_state("ready");
    let root = scene.host.path("sysroot").display().to_string();
    let output = scene.host.mpsctl(&["doctor", "--sysroot", &root]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.starts_with("Nothing wrong: ") && said.contains(" checks made.\n"), "{said}");
    // The private bus of the test has no systemd. Doctor reports no finding for this. Only `-v` lists the checks that need
    // systemd.
    let hint = " could not be made; yunion-mpsctl doctor -v names these checks and the reasons.\n";
    assert!(said.ends_with(hint) && !said.contains("systemd gives yunion-mpsctl no information"), "{said}");
    let more = text(&scene.host.mpsctl(&["doctor", "-v", "--sysroot", &root]));
    assert!(
        more.contains("Not checked, since systemd gives yunion-mpsctl no information")
            && !more.contains(hint),
        "{more}"
    );

    scene.remove("/dev/nvidia-uvm");
    scene.host.plant("gpus/0/persistence_mode", "Disabled\n");
    let output = scene.host.mpsctl(&["doctor", "--sysroot", &root]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(5), "{said}");
    assert!(
        said.starts_with(
            "error: device-node-missing: /dev/nvidia-uvm\n  found:   the device node does not exist\n  \
             remedy:  nvidia-modprobe -u -c 0\n\nwarning: persistence-off: 00:06.0 ("
        ),
        "{said}"
    );
    assert!(said.contains("1 error, 1 warning, 0 notes; "), "{said}");
    assert_eq!(scene.host.stop().code(), Some(0));
}

/// Doctor warns of settings that the host agent of the platform Cloudpods can't handle, and never proposes one of these
/// settings as a remedy.
#[test]
fn no_remedy_sends_an_administrator_round_in_a_circle() {
    let scene = Scene::new("h200x8");
    let entries = [128, 129].map(|node| {
        format!("path: /dev/dri/renderD{node}, type: NVIDIA_MPS, virtual_number: {}", node - 124)
    });
    scene.host.devices(&entries.each_ref().map(String::as_str));
    let remedy = |name: &str| {
        let findings = scene.findings();
        let found = findings.into_iter().find(|finding| finding["name"] == name);
        found.map(|finding| (finding["severity"].clone(), finding["remedy"].as_str().unwrap().to_owned()))
    };
    let (severity, loose) = remedy("default-limits-loose").unwrap();
    assert_eq!(severity, "warning");
    assert!(!loose.contains("per_gpu") && loose.contains("yunion-mpsctl env NAME"), "{loose}");
    scene.host.configure("cuda_mps_topology: per_gpu");
    assert_eq!(remedy("default-limits-loose"), None);
    let (severity, shared) = remedy("agent-needs-shared").unwrap();
    assert_eq!((severity, shared.as_str()), ("warning".into(), "write cuda_mps_topology: shared"));
    scene.host.devices(&[&format!("path: {}, type: NVIDIA_MPS, virtual_number: 4", "0000:1b:00.0")]);
    let (severity, node) = remedy("agent-needs-render-node").unwrap();
    assert_eq!(
        (severity, node.as_str()),
        ("warning".into(), "name the GPU by its render node, /dev/dri/renderD128")
    );
}

/// With `isolation: slice`, a program without a slice finds no control daemon, can open the GPU in mode DEFAULT, and gets the
/// whole GPU. With `isolation: gpu` it gets an error.
#[test]
fn what_a_program_without_slice_gets_goes_by_the_isolation() {
    let mut scene = Scene::new("h200x8");
    without_the_platforms_keys(&mut scene);
    let entry = |node: u32, isolation: &str| {
        format!("path: /dev/dri/renderD{node}, type: NVIDIA_MPS, virtual_number: 4, isolation: {isolation}")
    };
    let told = |scene: &Scene, first: &str, second: &str| {
        scene.host.devices(&[&entry(128, first), &entry(129, second)]);
        let findings = scene.findings();
        let found = findings.iter().find(|finding| finding["name"] == "programs-need-slice").unwrap();
        (found["found"].as_str().unwrap().to_owned(), found["remedy"].as_str().unwrap().to_owned())
    };
    let (found, remedy) = told(&scene, "gpu", "gpu");
    assert!(found.ends_with("with a slice gets CUDA error 46, busy or unavailable"), "{found}");
    assert!(remedy.contains("or set cuda_mps_pipe_directory: /tmp/nvidia-mps"), "{remedy}");
    let (found, remedy) = told(&scene, "slice", "slice");
    assert!(found.ends_with("with a slice has the whole GPU, without MPS and without limits"), "{found}");
    assert!(!remedy.contains("cuda_mps_pipe_directory"), "CUDA finds no slice of its own: {remedy}");
    let (found, _) = told(&scene, "slice", "gpu");
    assert!(found.contains("on a GPU with isolation: slice, and gets CUDA error 46"), "{found}");
}

/// systemd sets `RUNTIME_DIRECTORY` for every unit that has a runtime directory. Doctor may run in another unit than the
/// service's, and must not take the directory of that unit for the service's.
#[test]
fn the_runtime_directory_of_another_unit_is_not_the_services() {
    let mut scene = Scene::new("h200");
    scene.host.start();
    scene.host.wait_for_state("ready");
    scene.host.signal(Signal::KILL);
    scene.host.ended();
    let elsewhere = scene.host.path("elsewhere").display().to_string();
    scene.host.set("RUNTIME_DIRECTORY", &elsewhere);
    scene.finds(&["service-not-running"]);
}

/// Root copies the remedies that doctor prints into a shell. A process can choose its own name and environment. So doctor
/// quotes them in a remedy, since root would otherwise execute a command of that process.
#[test]
fn a_remedy_does_not_let_others_type() {
    let mut scene = Scene::new("h200");
    scene.foreign("mps/a b; touch c");
    let foreign = wait_for("the finding", || {
        scene.findings().into_iter().find(|finding| finding["name"] == "foreign-control-daemon")
    });
    let pipe = scene.host.path("mps/a b; touch c").display().to_string();
    let remedy = foreign["remedy"].as_str().unwrap();
    assert!(remedy.contains(&format!("CUDA_MPS_PIPE_DIRECTORY='{pipe}' ")), "{remedy}");
}

/// If a user other than root runs doctor, it reports no finding about files that only root can read.
#[test]
fn what_is_for_root_is_not_judged() {
    if !root_or_skip("what_is_for_root_is_not_judged") {
        return;
    }
    let mut scene = Scene::new("h200");
    scene.host.start();
    scene.host.wait_for_state("ready");
    scene.foreign("mps/other");
    scene.chmod("run", 0o700);
    let root = scene.host.path("sysroot").display().to_string();
    let doctor = || {
        let mut command = scene.host.command("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        let output =
            command.arg(binaries().join("yunion-mpsctl")).args(["doctor", "-v", "--sysroot", &root]).output();
        text(&output.unwrap())
    };
    let said = doctor();
    assert!(!said.contains("state-file-damaged"), "{said}");
    assert!(said.contains("Not checked, since only root can read"), "{said}");
    // Only root can read in which directory a foreign control daemon listens. The remedy must not guess this directory: a wrong
    // guess could end the service's own control daemon.
    if said.contains("foreign-control-daemon") {
        assert!(said.contains("doctor as root") && !said.contains("echo quit"), "{said}");
    }
    scene.chmod("sysroot/etc/yunion/host.conf", 0o600);
    let said = doctor();
    assert!(!said.contains("configuration-wrong"), "{said}");
}

#[tokio::test]
async fn limits_that_are_not_in_force() {
    let mut snapshot = p40_board();
    first_gpu(&mut snapshot).confirmed_thread_percentage = Some(100);
    snapshot.control_daemons[0].state = ControlDaemonState::Ready;
    let mut service = Service::start(snapshot).await;
    service.requests.close();
    let mut scene = Scene::new("tesla-p40");
    scene.host.set("DBUS_SYSTEM_BUS_ADDRESS", &service.bus.address());
    let found = tokio::task::spawn_blocking(move || scene.findings()).await.unwrap();
    let unconfirmed = found.iter().find(|finding| finding["name"] == "limits-unconfirmed").unwrap();
    assert_eq!(unconfirmed["subject"], "00:06.0");
    assert_eq!(
        unconfirmed["found"],
        "the service has asked for a limit of 25 % for each client, but a limit of 100 % is in force"
    );
}

/// Plays systemd on the private bus, and answers questions about the service's unit.
struct Systemd;

#[interface(name = "org.freedesktop.systemd1.Manager")]
impl Systemd {
    fn load_unit(&self, name: &str) -> OwnedObjectPath {
        assert_eq!(name, "yunion-mps-daemon.service");
        OwnedObjectPath::try_from("/org/freedesktop/systemd1/unit/ours").unwrap()
    }
}

struct Unit(HashMap<&'static str, &'static str>);

impl Unit {
    fn word(&self, key: &str) -> String {
        (*self.0.get(key).unwrap_or(&"")).to_owned()
    }
}

#[interface(name = "org.freedesktop.systemd1.Unit")]
impl Unit {
    #[zbus(property)]
    fn load_state(&self) -> String {
        self.word("LoadState")
    }

    #[zbus(property)]
    fn active_state(&self) -> String {
        self.word("ActiveState")
    }

    #[zbus(property)]
    fn unit_file_state(&self) -> String {
        self.word("UnitFileState")
    }
}

struct UnitOfService;

#[interface(name = "org.freedesktop.systemd1.Service")]
impl UnitOfService {
    #[zbus(property)]
    fn result(&self) -> String {
        "exit-code".to_owned()
    }

    #[zbus(property)]
    fn exec_main_status(&self) -> i32 {
        78
    }

    #[zbus(property)]
    fn environment(&self) -> Vec<String> {
        vec!["PATH=/nowhere".to_owned()]
    }
}

#[tokio::test]
async fn the_unit_is_asked_about() {
    let scene = Scene::new("h200");
    let address = scene.host.bus_address();
    let unit = Unit(HashMap::from([
        ("LoadState", "loaded"),
        ("ActiveState", "failed"),
        ("UnitFileState", "disabled"),
    ]));
    let path = "/org/freedesktop/systemd1/unit/ours";
    let _systemd = zbus::connection::Builder::address(address.as_str())
        .serve_at("/org/freedesktop/systemd1", Systemd)
        .serve_at(path, unit)
        .serve_at(path, UnitOfService)
        .name("org.freedesktop.systemd1")
        .build()
        .await
        .unwrap();
    let names = tokio::task::spawn_blocking(move || {
        scene.finds(&[
            "service-not-running",
            "unit-failed",
            "unit-not-enabled",
            "program-not-in-service-path",
        ]);
        let failed = scene.findings().into_iter().find(|finding| finding["name"] == "unit-failed").unwrap();
        failed["found"].as_str().unwrap().to_owned()
    });
    assert_eq!(names.await.unwrap(), "the service ended because the configuration is wrong");
}
