//! Tests of obstacles on a host. The service names each obstacle with its remedy, and does no harm. If the obstacle goes away,
//! the service serves the GPUs.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;
use serde_json::json;

use crate::support::host::{Host, assert_has, binaries, control_daemon, control_pid, daemon, text};
use crate::support::skip::{root_or_skip, skip};
use crate::support::wait::wait_for;

/// Lists every file below `root` with its modification time and its length. Two equal lists mean that nothing has changed.
fn tree(root: &Path) -> BTreeMap<PathBuf, (i64, i64, u64)> {
    let mut found = BTreeMap::new();
    let mut left = vec![root.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let metadata = path.symlink_metadata().unwrap();
            if metadata.is_dir() {
                left.push(path.clone());
            }
            found.insert(path, (metadata.mtime(), metadata.mtime_nsec(), metadata.len()));
        }
    }
    found
}

/// Checks that `--check` and the service refuse the configuration with `message` and status 78, and change nothing on the host.
fn refused(mut host: Host, message: &str) {
    let before = tree(&host.path(""));
    let checked = host.check();
    assert_eq!(checked.status.code(), Some(78), "{}", text(&checked));
    assert!(text(&checked).contains(message), "{}", text(&checked));
    assert_eq!(tree(&host.path("")), before);

    host.start();
    assert_eq!(host.ended().code(), Some(78));
    assert!(host.log().contains(message), "{message}");
    assert!(!host.path("mps/pipe").exists() && !host.path("mps/log").exists());
    assert_eq!(host.compute_mode(0), "Default");
    host.nothing_runs();
}

fn refused_path(board: &str, path: &str, message: &str) {
    let host = Host::new(board);
    host.devices(&[&format!("path: {path}, type: NVIDIA_MPS, virtual_number: 4")]);
    refused(host, &format!("/etc/yunion/host_container_device.yml:2: devices[0].path: {message}"));
}

#[test]
fn a_card_node() {
    let remedy = r#""/dev/dri/card0" is a card node of 0000:00:06.0; write the GPU's render node, /dev/dri/renderD128"#;
    refused_path("tesla-p40", "/dev/dri/card0", remedy);
}

#[test]
fn a_by_path_link() {
    let link = "/dev/dri/by-path/pci-0000:00:06.0-render";
    let remedy =
        "is a link to a device node of 0000:00:06.0; write the GPU's render node, /dev/dri/renderD128";
    refused_path("tesla-p40", link, &format!("{link:?} {remedy}"));
}

/// The configured log directory is a path at which the control daemon makes a FIFO. If the service made the directory there
/// first, the control daemon could write no log.
#[test]
fn a_log_directory_in_the_place_of_the_fifo() {
    let host = Host::new("tesla-p40");
    let pipe = host.path("mps/both").display().to_string();
    host.configure(&format!("cuda_mps_pipe_directory: {pipe}\ncuda_mps_log_directory: {pipe}/log"));
    refused(
        host,
        &format!("cuda_mps_log_directory: found \"{pipe}/log\", where control daemon shared makes a FIFO"),
    );
}

/// The service reports a path that belongs to no GPU, and waits for a GPU with this path.
#[test]
fn a_node_that_does_not_exist() {
    let mut host = Host::new("tesla-p40");
    host.devices(&["path: /dev/dri/renderD200, type: NVIDIA_MPS, virtual_number: 4"]);
    let message = "/etc/yunion/host_container_device.yml:2: devices[0].path: /dev/dri/renderD200 does not exist; \
                   the NVIDIA GPUs of this host are /dev/dri/renderD128 (0000:00:06.0)";
    let checked = host.check();
    assert_eq!(checked.status.code(), Some(78), "{}", text(&checked));
    assert!(text(&checked).contains(&format!("error: {message}")), "{}", text(&checked));
    host.start();
    host.wait_for_failure(message);
    // After an empty list of slices, the platform Cloudpods would delete the host's devices. So the service answers with an
    // error.
    let refused = host.call("Manager.ListDevices");
    assert!(text(&refused).contains("io.yunion.Mps1.Error.NotReady"), "{}", text(&refused));
    // The path in the only entry of the device file belongs to no GPU, so the service serves no GPU. It must not serve the
    // host's GPU instead, which has no entry and which another user may need.
    assert_eq!(host.compute_mode(0), "Default");
    host.devices(&["path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 4"]);
    assert!(host.call("Control.Reload").status.success());
    host.wait_for_state("ready");
    stops(host);
}

/// GPU 3 of the board `h200x8`. The test has removed this GPU from the PCI bus, as if the GPU had failed.
struct Pulled {
    moved: Vec<(PathBuf, PathBuf)>,
}

impl Pulled {
    fn out_of(host: &Host) -> Self {
        let device = fs::canonicalize(host.file("/sys/class/drm/renderD131/device")).unwrap();
        let address = device.file_name().unwrap().to_str().unwrap().to_owned();
        let places = [
            host.file(&format!("/sys/bus/pci/devices/{address}")),
            host.file("/sys/class/drm/renderD131"),
            host.file("/sys/class/drm/card3"),
            host.file("/dev/dri/renderD131"),
            host.path("gpus/3"),
        ];
        let aside = host.path("pulled");
        fs::create_dir(&aside).unwrap();
        let moved = places.into_iter().enumerate().map(|(at, place)| (place, aside.join(at.to_string())));
        let moved: Vec<_> = moved.collect();
        for (from, to) in &moved {
            fs::rename(from, to).unwrap();
        }
        Self { moved }
    }

    fn put_back(self) {
        for (to, from) in self.moved.into_iter().rev() {
            fs::rename(from, to).unwrap();
        }
    }
}

/// Writes a device file with an entry for each GPU of an h200x8. `third` is the path in the entry of GPU 3.
fn eight_entries(host: &Host, third: &str, slices: u32) {
    let entries: Vec<String> = (0..8)
        .map(|gpu| match gpu {
            3 => format!("path: \"{third}\", type: NVIDIA_MPS, virtual_number: 4"),
            gpu => format!("path: /dev/dri/renderD{}, type: NVIDIA_MPS, virtual_number: {slices}", 128 + gpu),
        })
        .collect();
    host.devices(&entries.iter().map(String::as_str).collect::<Vec<_>>());
}

fn names_of_the_third(host: &Host) -> Vec<String> {
    let value =
        |name: &str| fs::read_to_string(host.path(&format!("gpus/3/{name}"))).unwrap().trim().to_owned();
    vec!["/dev/dri/renderD131".to_owned(), value("pci"), value("uuid"), "/dev/nvidia3".to_owned()]
}

/// One of eight GPUs is missing when the service starts. The service serves the other seven, and the state names the entry of
/// the missing GPU. Reloads still work. The GPU is served when it comes back.
#[test]
fn a_gpu_that_has_gone_before_the_start() {
    for which in 0..4 {
        let mut host = Host::new("h200x8");
        let name = names_of_the_third(&host)[which].clone();
        eight_entries(&host, &name, 4);
        let pulled = Pulled::out_of(&host);
        let place = "/etc/yunion/host_container_device.yml:5: devices[3].path: ";
        let checked = host.check();
        assert_eq!(checked.status.code(), Some(78), "{}", text(&checked));
        assert!(text(&checked).contains(&format!("error: {place}")), "{}", text(&checked));
        assert!(
            text(&checked).contains("control daemon shared"),
            "the plan is there too: {}",
            text(&checked)
        );
        host.start();
        let told = |status: &serde_json::Value| {
            let service = &status["service"];
            service["state"] == "degraded" && service["state_reason"].as_str().unwrap().contains(place)
        };
        let status = host.wait_for_status(&format!("{name} told"), told);
        assert_eq!(host.list().len(), 28);
        assert!(host.list().iter().all(|device| device["healthy"] == true));
        assert_eq!(host.compute_mode(7), "Exclusive_Process");

        eight_entries(&host, &name, 2);
        assert!(host.call("Control.Reload").status.success());
        let again = host.wait_for_status("two slices each", |status| told(status) && host.list().len() == 14);
        assert_eq!(control_pid(&again), control_pid(&status));
        eight_entries(&host, "/dev/dri/renderD200", 2);
        let refused = text(&host.call("Control.Reload"));
        assert!(refused.contains("InvalidConfig") && refused.contains("renderD200"), "{refused}");
        eight_entries(&host, &name, 2);
        assert!(host.call("Control.Reload").status.success());

        pulled.put_back();
        host.wait_for_state("ready");
        assert_eq!(host.list().len(), 18);
        stops(host);
    }
}

/// One of eight GPUs fails while it is served. Its slices stay listed as unhealthy, even after a reload, and jobs on the other
/// GPUs go on. After a restart, the service serves the other seven.
#[test]
fn a_gpu_that_goes_while_it_is_served() {
    let mut host = Host::new("h200x8");
    let name = names_of_the_third(&host)[2].clone();
    eight_entries(&host, &name, 4);
    host.start();
    host.wait_for_state("ready");
    let pulled = Pulled::out_of(&host);
    assert!(host.call("Control.Reload").status.success());
    let seven = |host: &Host| {
        let devices = host.list();
        devices.iter().filter(|device| device["healthy"] == true).count() == 28 && devices.len() >= 28
    };
    let status = host.wait_for_status("seven of eight", |status| {
        status["service"]["state"] == "degraded" && seven(&host) && host.list().len() == 32
    });
    let reason = status["gpus"][3]["reason"].as_str().unwrap();
    assert!(reason.contains("host_container_device.yml:5: devices[3].path: "), "{reason}");
    for _ in 0..2 {
        host.signal(Signal::TERM);
        host.ended();
        host.start();
        host.wait_for_status("seven of eight", |status| {
            status["service"]["state"] == "degraded" && seven(&host)
        });
    }
    pulled.put_back();
    assert!(host.call("Control.Reload").status.success());
    host.wait_for_status("all of them", |status| {
        status["service"]["state"] == "ready" && host.list().len() == 32
    });
    stops(host);
}

#[test]
fn a_card_of_another_maker() {
    let remedy = "/dev/dri/renderD130 (0000:af:00.0) is made by PCI vendor 1002 (AMD), not by NVIDIA; \
                  the NVIDIA GPUs of this host are /dev/dri/renderD128 (0000:3b:00.0)";
    refused_path("mixed", "/dev/dri/renderD130", remedy);
}

#[test]
fn the_same_gpu_twice() {
    let host = Host::new("tesla-p40");
    host.devices(&[
        "path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 4",
        "path: \"00:06.0\", type: NVIDIA_MPS, virtual_number: 2",
    ]);
    let message = "/etc/yunion/host_container_device.yml:3: devices[1].path: 00:06.0 (0000:00:06.0) \
                   already has an entry; keep only one of the two entries: \
                   /etc/yunion/host_container_device.yml:2 names this GPU as /dev/dri/renderD128";
    refused(host, message);
}

#[test]
fn no_slices() {
    let host = Host::new("tesla-p40");
    host.devices(&["path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 0"]);
    let place = "/etc/yunion/host_container_device.yml:2: devices[0].virtual_number: ";
    refused(host, place);
}

#[test]
fn a_pipe_directory_too_long_for_a_socket() {
    let host = Host::new("tesla-p40");
    let old = fs::read_to_string(host.file("/etc/yunion/host.conf")).unwrap();
    let line = old.lines().count();
    host.configure(&format!("cuda_mps_pipe_directory: /tmp/{}", "p".repeat(83)));
    let message = format!(
        "/etc/yunion/host.conf:{line}: cuda_mps_pipe_directory: the control daemon's socket in this \
         directory would have a path of 107 bytes, at most 106 are possible; choose a directory with a path \
         of at most 87 bytes"
    );
    refused(host, &message);
}

/// Returns the exit status and the output of `--check`. A `--check` that hangs is killed.
fn check_in_time(host: &Host) -> (Option<i32>, String) {
    let mut command = host.command("timeout");
    command.args(["--signal=KILL", "30"]).arg(daemon());
    let checked = command.args(["--check", "--sysroot"]).arg(host.path("sysroot")).output().unwrap();
    (checked.status.code(), text(&checked))
}

/// Some files of /proc appear to be regular files, but a read of them blocks. An example is the kernel's log.
#[test]
fn a_file_of_proc_as_configuration() {
    for (file, key) in [("host.conf", "enable_cuda_mps"), ("host_container_device.yml", "devices")] {
        for target in ["/proc/kmsg", "/proc/self/mounts"] {
            let host = Host::new("tesla-p40");
            let file = host.file(&format!("/etc/yunion/{file}"));
            assert!(fs::read_to_string(&file).unwrap().contains(key));
            fs::remove_file(&file).unwrap();
            symlink(target, &file).unwrap();
            let (status, said) = check_in_time(&host);
            assert_eq!(status, Some(78), "{target}: {said}");
            // A user other than root can't open the kernel's log, and gets another message.
            let hidden = fs::File::open(target).is_err() && said.contains("can't be read: ");
            let named =
                said.contains("is a file of /proc, not a regular file; put a regular file at this path");
            assert!(hidden || named, "{target}: {said}");
        }
    }
}

/// A device file with far too many entries causes one message, not one for each entry.
#[test]
fn a_device_file_of_fifteen_thousand_entries() {
    let host = Host::new("tesla-p40");
    let entries: Vec<String> = (128..15_128)
        .map(|number| format!("path: /dev/dri/renderD{number}, type: NVIDIA_MPS, virtual_number: 1"))
        .collect();
    let entries: Vec<String> = entries.iter().map(|entry| entry.replace(", ", "\n  ")).collect();
    let file = host.file("/etc/yunion/host_container_device.yml");
    fs::write(file, format!("devices:\n- {}\n", entries.join("\n- "))).unwrap();
    refused(host, "host_container_device.yml:1: devices: found 15000 entries, at most 1024 are allowed");
}

#[test]
fn a_state_file_that_is_no_file() {
    let fifo = |path: &Path| assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    let full = |path: &Path| {
        fs::create_dir(path).unwrap();
        fs::write(path.join("something"), "").unwrap();
    };
    type Make = fn(&Path);
    let kinds = [full as Make, fifo];
    for make in kinds {
        let mut host = Host::new("h200");
        fs::create_dir(host.path("run")).unwrap();
        make(&host.path("run/state.json"));
        host.start();
        let status = host.wait_for_state("ready");
        let state_file = host.path("run/state.json");
        assert!(fs::read_to_string(&state_file).unwrap().contains(&control_pid(&status).to_string()));
        // The service also replaces a directory or a FIFO that takes the place of its state file while it runs.
        fs::remove_file(&state_file).unwrap();
        make(&host.path("run/state.json"));
        assert!(host.call("Control.Reload").status.success());
        wait_for("a state file", || {
            let there = state_file.is_file() && fs::read_to_string(&state_file).unwrap().contains("Default");
            there.then_some(())
        });
        stops(host);
    }
}

#[test]
fn a_check_of_what_is_right_changes_nothing() {
    let host = Host::new("mixed");
    let before = tree(&host.path(""));
    let checked = host.check();
    assert_eq!(checked.status.code(), Some(0), "{}", text(&checked));
    let said = text(&checked);
    assert!(
        said.contains("0001:1a:00.0-0 to 0001:1a:00.0-3, each 35942 MiB and 25 % of the threads"),
        "{said}"
    );
    assert!(said.contains("not served: MIG is on"), "{said}");
    assert_eq!(tree(&host.path("")), before);
    host.nothing_runs();
}

/// Checks that the service starts no control daemon in a pipe directory in which another user can write. When the directory is
/// removed, the service serves the GPUs.
fn refused_pipe_directory(make: impl FnOnce(&Path), reason: &str) {
    let mut host = Host::new("tesla-p40");
    let pipe = host.path("mps/pipe");
    make(&pipe);
    host.start();
    let status = host.wait_for_failure(&format!("{}: {reason}", pipe.display()));
    assert_has(control_daemon(&status), &json!({"starts": 0}));
    assert_eq!(host.compute_mode(0), "Default");

    if pipe.symlink_metadata().unwrap().is_dir() {
        fs::remove_dir(&pipe).unwrap();
    } else {
        fs::remove_file(&pipe).unwrap();
    }
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
}

#[test]
fn a_pipe_directory_that_is_a_link() {
    let elsewhere = tempfile::tempdir().unwrap();
    refused_pipe_directory(|pipe| symlink(elsewhere.path(), pipe).unwrap(), "is a symbolic link");
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
}

#[test]
fn a_pipe_directory_that_is_a_file() {
    refused_pipe_directory(|pipe| fs::write(pipe, "").unwrap(), "is not a directory");
}

#[test]
fn a_pipe_directory_of_another_user() {
    if root_or_skip("a_pipe_directory_of_another_user") {
        let make = |pipe: &Path| {
            fs::create_dir(pipe).unwrap();
            chown(pipe, Some(65534), None).unwrap();
        };
        refused_pipe_directory(make, "belongs to user 65534");
    }
}

/// Returns a host on which the script `text` with the file mode `mode` is the only `nvidia-cuda-mps-control`.
fn host_with_program(board: &str, text: &str, mode: u32) -> Host {
    let mut host = Host::new(board);
    let directory = host.path("other-bin");
    fs::create_dir(&directory).unwrap();
    let program = directory.join("nvidia-cuda-mps-control");
    fs::write(&program, text).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
    host.clear("bin/nvidia-cuda-mps-control");
    host.set("PATH", &format!("{}:{}", directory.display(), host.path("bin").display()));
    host
}

fn install_program(host: &Host) {
    let link = host.path("bin/nvidia-cuda-mps-control");
    symlink(binaries().join("nvidia-cuda-mps-control"), link).unwrap();
}

fn stops(mut host: Host) {
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
    assert_eq!(host.compute_mode(0), "Default");
}

#[test]
fn a_program_that_is_missing() {
    let mut host = Host::new("tesla-p40");
    host.clear("bin/nvidia-cuda-mps-control");
    host.set("PATH", host.path("bin").to_str().unwrap());
    host.start();
    let status = host.wait_for_failure("nvidia-cuda-mps-control is in no directory of PATH");
    assert!(status["service"]["state_reason"].as_str().unwrap().contains("install the driver's MPS package"));
    assert_eq!(host.compute_mode(0), "Default");
    install_program(&host);
    host.wait_for_state("ready");
    stops(host);
}

#[test]
fn a_program_that_is_not_executable() {
    let mut host = host_with_program("tesla-p40", "#!/bin/sh\n", 0o644);
    host.start();
    host.wait_for_failure(
        "other-bin/nvidia-cuda-mps-control is not executable; make the file executable (chmod 755)",
    );
    assert_eq!(host.compute_mode(0), "Default");
    install_program(&host);
    host.wait_for_state("ready");
    stops(host);
}

#[test]
fn a_program_that_prints_garbage() {
    let mut host =
        host_with_program("tesla-p40", "#!/bin/sh\nprintf '\\377\\000 garbage \\033[2J\\n'\n", 0o755);
    host.start();
    let status = host.wait_for_failure("its log ends:");
    let reason = status["service"]["state_reason"].as_str().unwrap();
    assert!(reason.contains("garbage") && !reason.contains("another control daemon"), "{reason}");
    stops(host);
}

#[test]
fn a_program_that_hangs() {
    let mut host = host_with_program("tesla-p40", "#!/bin/sh\nexec /bin/sleep 600\n", 0o755);
    host.start();
    let status = host.wait_for_failure("does not listen 10 s after its start");
    let reason = status["service"]["state_reason"].as_str().unwrap();
    assert!(!reason.contains("another control daemon"), "{reason}");
    stops(host);
}

/// A front end's answer, in the words of NVIDIA's program, when no control daemon runs.
const NOBODY: &str = "echo 'Cannot find MPS control daemon process' >&2; exit 1";

#[test]
fn a_control_daemon_that_hangs() {
    let script = format!("#!/bin/sh\n[ \"$1\" = -f ] && exec /bin/sleep 600\n{NOBODY}\n");
    let mut host = host_with_program("tesla-p40", &script, 0o755);
    host.start();
    let status = host.wait_for_failure("does not listen 10 s after its start");
    assert_eq!(status["gpus"][0]["healthy"], false);
    stops(host);
}

#[test]
fn a_stop_while_a_control_daemon_hangs() {
    let script = format!("#!/bin/sh\n[ \"$1\" = -f ] && exec /bin/sleep 600\n{NOBODY}\n");
    let mut host = host_with_program("tesla-p40", &script, 0o755);
    host.start();
    host.wait_for_status("a start", |status| {
        status["control_daemons"].as_array().unwrap().iter().any(|one| one["pid"].is_u64())
    });
    stops(host);
}

#[test]
fn a_control_daemon_that_dies_at_once() {
    let script = format!("#!/bin/sh\n[ \"$1\" = -f ] && {{ echo 'no luck today'; exit 3; }}\n{NOBODY}\n");
    let mut host = host_with_program("tesla-p40", &script, 0o755);
    host.start();
    let reason = "the control daemon ended (exit status: 3); its log ends: no luck today";
    host.wait_for_failure(reason);
    // The service starts the control daemon again and again. The status also shows the reason of the failure between two
    // starts.
    let status =
        host.wait_for_status("a third start", |status| control_daemon(status)["starts"].as_u64() >= Some(3));
    assert_eq!(control_daemon(&status)["reason"], reason);
    assert_eq!(host.list().len(), 4);
    stops(host);
}

#[test]
fn a_log_with_garbage_in_it() {
    let mut host = Host::new("h200");
    host.plant("mps/fault/start-garbage", "");
    host.start();
    host.wait_for_state("ready");
    stops(host);
}

/// True if this machine has an NVML besides the simulated NVML. The service would find this NVML even after the test has
/// removed the simulated NVML.
fn has_nvml() -> bool {
    let known = Command::new("/sbin/ldconfig").arg("-p").output();
    known.is_ok_and(|known| text(&known).contains("libnvidia-ml.so.1"))
}

#[test]
fn an_nvml_that_is_not_there_and_comes() {
    if has_nvml() {
        skip("an_nvml_that_is_not_there_and_comes", "this machine has an NVML of its own");
        return;
    }
    let mut host = Host::new("tesla-p40");
    let library = host.path("lib/libnvidia-ml.so.1");
    let target = fs::read_link(&library).unwrap();
    fs::remove_file(&library).unwrap();
    host.start();
    host.wait_for_failure("no NVIDIA driver: libnvidia-ml.so.1");
    // NVIDIA's GPU operator loads the kernel module, but puts the driver's libraries only below /run/nvidia/driver. So the
    // message names the operator.
    host.plant(
        "sysroot/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.86.10  Wed\n",
    );
    host.plant("sysroot/run/nvidia/driver/usr/bin/nvidia-smi", "");
    host.wait_for_failure(
        "NVIDIA's kernel module 535.86.10 is loaded, but its libraries are not on the host: NVIDIA's GPU \
         operator",
    );
    let root = host.path("sysroot").display().to_string();
    let doctor = text(&host.mpsctl(&["doctor", "--sysroot", &root]));
    assert!(doctor.contains("driver-unusable") && doctor.contains("driver.enabled=false"), "{doctor}");
    // The service knows no GPU yet. After an empty list of slices, the platform Cloudpods would delete the host's devices. So
    // the service answers with an error.
    let refused = host.call("Manager.ListDevices");
    assert!(text(&refused).contains("io.yunion.Mps1.Error.NotReady"), "{}", text(&refused));
    symlink(target, library).unwrap();
    host.wait_for_state("ready");
    stops(host);
}

#[test]
fn an_nvml_that_is_no_library() {
    let mut host = Host::new("tesla-p40");
    host.clear("lib/libnvidia-ml.so.1");
    host.plant("lib/libnvidia-ml.so.1", "no library");
    host.start();
    host.wait_for_failure("libnvidia-ml.so.1");
    stops(host);
}

fn drop_function(host: &Host, function: &str) {
    let simulator = binaries().join("yunion-mps-sim");
    let dropped =
        Command::new(simulator).arg("drop-function").arg(host.path("")).arg(function).output().unwrap();
    assert!(dropped.status.success(), "{}", text(&dropped));
}

/// A driver of another version may lack a function of NVML. `--check` must succeed nevertheless, since the configuration files
/// have no mistake.
#[test]
fn an_nvml_that_lacks_any_one_function() {
    for function in [
        "nvmlInit_v2",
        "nvmlShutdown",
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetCount_v2",
        "nvmlDeviceGetHandleByIndex_v2",
        "nvmlDeviceGetHandleByPciBusId_v2",
        "nvmlDeviceGetIndex",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetComputeMode",
        "nvmlDeviceGetCudaComputeCapability",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "nvmlErrorString",
    ] {
        let host = Host::new("h200");
        drop_function(&host, function);
        let checked = host.check();
        assert_eq!(checked.status.code(), Some(0), "without {function}: {}", text(&checked));
    }
}

/// The service can't serve a GPU without these functions. The state then names the GPU, and the service can still be stopped.
#[test]
fn an_nvml_that_cannot_set_the_compute_mode() {
    for function in ["nvmlDeviceSetComputeMode", "nvmlDeviceGetHandleByUUID"] {
        let mut host = Host::new("h200");
        drop_function(&host, function);
        host.start();
        host.wait_for_failure("00:06.0");
        stops(host);
    }
}

/// The NVML of an old driver has no functions for MIG mode or for events. The service serves GPUs without these functions.
#[test]
fn an_nvml_of_an_old_driver_serves() {
    for function in
        ["nvmlDeviceGetMigMode", "nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"]
    {
        let mut host = Host::new("tesla-p40");
        drop_function(&host, function);
        host.start();
        host.wait_for_state("ready");
        stops(host);
    }
}

#[test]
fn a_driver_that_is_loaded_later() {
    let mut host = Host::new("tesla-p40");
    host.clear("driver");
    host.start();
    let status = host.wait_for_state("failed");
    let reason = status["service"]["state_reason"].as_str().unwrap();
    assert!(reason.to_lowercase().contains("driver"), "{reason}");
    assert_eq!(status["service"]["driver_version"], "");
    host.plant("driver", "535.261.03\n");
    let status = host.wait_for_state("ready");
    assert_eq!(status["service"]["driver_version"], "535.261.03");
    stops(host);
}

/// Checks that the slices of GPU 3 show `reason`, and that the service serves the other seven GPUs.
fn one_out_of_eight(faults: &[(&str, &str)], reason: &str) {
    let mut host = Host::new("h200x8");
    for (fault, text) in faults {
        host.plant(fault, text);
    }
    host.start();
    let status = host.wait_for_state("degraded");
    let gpus = status["gpus"].as_array().unwrap();
    let healthy: Vec<bool> = gpus.iter().map(|gpu| gpu["healthy"].as_bool().unwrap()).collect();
    assert_eq!(healthy, [true, true, true, false, true, true, true, true], "{status:#}");
    let said = gpus[3]["reason"].as_str().unwrap();
    assert!(said.contains(reason), "{said}");
    assert_eq!(host.list().len(), 32);
    for (fault, _) in faults {
        host.clear(fault);
    }
    assert_eq!(host.compute_mode(3), "Default");
    stops(host);
}

#[test]
fn a_gpu_that_is_lost() {
    one_out_of_eight(&[("gpus/3/lost", "")], "lost");
}

#[test]
fn a_gpu_that_hangs() {
    one_out_of_eight(&[("gpus/3/hangs", "")], "NVML did not answer within 10 s");
}

/// Without nvidia-persistenced, the driver wakes the GPUs in sequence, which takes longer than the service waits for NVML. The
/// service does not close NVML meanwhile, and uses the late answer.
#[test]
fn gpus_that_sleep_are_served_when_all_are_awake() {
    let mut host = Host::new("h200x8");
    host.plant("wake-ms", "2100");
    host.start();
    host.wait_until_it_fails("NVML has not answered for 15 s");
    let status = host.wait_for_state("ready");
    assert_has(control_daemon(&status), &json!({"starts": 1}));
    assert_eq!(host.list().len(), 32);
    stops(host);
}

#[test]
fn a_gpu_that_nvml_cannot_name() {
    one_out_of_eight(&[("gpus/3/error/nvmlDeviceGetUUID", "999")], "the UUID of the GPU can't be read");
}

#[test]
fn a_gpu_that_refuses_its_compute_mode() {
    one_out_of_eight(
        &[("gpus/3/no-permission", "")],
        "the GPU is not served until its compute mode is set: ",
    );
}

#[test]
fn a_gpu_without_a_handle() {
    let faults = [
        ("gpus/3/error/nvmlDeviceGetHandleByIndex", "999"),
        ("gpus/3/error/nvmlDeviceGetHandleByPciBusId", "6"),
    ];
    one_out_of_eight(&faults, "the NVIDIA driver does not know this GPU");
}

/// NVML does not give the GPU by its index. The service finds the GPU by its PCI address and serves it.
#[test]
fn a_gpu_without_a_handle_by_its_index() {
    let mut host = Host::new("h200x8");
    host.plant("gpus/3/error/nvmlDeviceGetHandleByIndex", "999");
    host.start();
    host.wait_for_state("ready");
    assert_eq!(host.list().len(), 32);
    stops(host);
}

#[test]
fn a_compute_mode_that_cannot_be_set() {
    let mut host = Host::new("tesla-p40");
    host.plant("gpus/0/error/nvmlDeviceSetComputeMode", "4");
    host.start();
    let status = host.wait_for_failure("the compute mode can't be set to Exclusive_Process");
    assert_has(control_daemon(&status), &json!({"starts": 0}));
    host.clear("gpus/0/error/nvmlDeviceSetComputeMode");
    host.wait_for_state("ready");
    stops(host);
}

#[test]
fn a_bus_that_comes_later() {
    let mut host = Host::new("tesla-p40");
    host.stop_bus();
    host.start();
    let pipe = host.path("mps/pipe");
    wait_for("limits without a bus", || {
        let served = pipe.join("control").exists()
            && host.front_end(&pipe, "get_default_active_thread_percentage") == "25.0\n";
        served.then_some(())
    });
    assert_eq!(host.compute_mode(0), "Exclusive_Process");
    host.restart_bus();
    let status = host.wait_for_state("ready");
    assert_eq!(control_daemon(&status)["starts"], 1);
    stops(host);
}

/// A restart of the bus disturbs no client. The service requests its name again and publishes its devices again.
#[test]
fn a_bus_that_goes_away_and_comes_back() {
    let mut host = Host::serving("h200");
    let before = host.wait_for_state("ready");
    for round in 1..=2 {
        host.stop_bus();
        wait_for("the daemon's notice of it", || {
            (host.log().matches("lost the D-Bus connection").count() >= round).then_some(())
        });
        assert_eq!(host.mpsctl(&["list"]).status.code(), Some(1));
        // The service runs on without a bus, and SIGHUP still reloads the configuration.
        host.signal(Signal::HUP);
        assert_eq!(host.front_end(&host.path("mps/pipe"), "get_default_active_thread_percentage"), "25.0\n");
        host.restart_bus();
        let after = host.wait_for_state("ready");
        assert_eq!(control_pid(&after), control_pid(&before));
        assert_eq!(host.list().len(), 4);
    }
    stops(host);
}
