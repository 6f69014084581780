//! Tests the shipped systemd files with systemd's own programs.

use crate::support::host::{flag_can_be_set, mpsctl};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::skip::root_or_skip;

fn shipped(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("systemd").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn run(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("{command:?}: {error}; scripts/deps.sh installs it"))
}

/// Returns the complaints of `systemd-analyze verify` about this unit, without complaints about other units of the machine.
fn verify(unit: &str) -> Vec<String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("yunion-mps-daemon.service");
    fs::write(&path, unit).unwrap();
    // `packaging.rs` checks that the unit's manual pages exist.
    let output = run(Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    text.lines().filter(|line| line.contains("yunion-mps-daemon")).map(str::to_owned).collect()
}

/// Returns the shipped unit with the paths of the built programs, which exist without an installation.
fn installed_unit() -> String {
    let unit = shipped("yunion-mps-daemon.service");
    let installed = |unit: String, line: &str, built: &str| {
        assert_eq!(unit.matches(line).count(), 1, "one {line}, with the installed path");
        unit.replace(line, built)
    };
    let start = concat!("ExecStart=\"", env!("CARGO_BIN_EXE_yunion-mps-daemon"), "\"\n");
    let reload = &format!("ExecReload=\"{}\" reload\n", mpsctl());
    let unit = installed(unit, "ExecStart=/usr/bin/yunion-mps-daemon\n", start);
    installed(unit, "ExecReload=/usr/bin/yunion-mpsctl reload\n", reload)
}

#[test]
fn systemd_has_no_complaint_about_the_unit() {
    assert_eq!(verify(&installed_unit()), Vec::<String>::new());
}

#[test]
fn systemd_would_complain_about_a_misspelt_unit() {
    let complaints = verify(&installed_unit().replace("WatchdogSec=60", "WatchdgSec=60"));
    assert!(complaints.iter().any(|line| line.contains("WatchdgSec")), "{complaints:?}");
}

/// Clients and the service's code depend on these lines of the unit.
#[test]
fn the_unit_keeps_its_promises() {
    let unit = shipped("yunion-mps-daemon.service");
    let lines: Vec<&str> = unit.lines().collect();
    for promise in [
        "Type=notify",
        // With `KillMode=process`, the end of the service does not end the control daemons and their clients.
        "KillMode=process",
        "ExecReload=/usr/bin/yunion-mpsctl reload",
        "Restart=on-failure",
        // A wrong configuration ends the service with status 78. A restart would fail too.
        "RestartPreventExitStatus=78",
        // The state file in this directory must outlive a restart of the service.
        "RuntimeDirectory=yunion-mps-daemon",
        "RuntimeDirectoryPreserve=yes",
        "WantedBy=multi-user.target",
    ] {
        assert!(lines.contains(&promise), "{promise} is missing");
    }
    let capabilities = lines.iter().find(|line| line.starts_with("CapabilityBoundingSet=")).unwrap();
    assert!(capabilities.ends_with(" CAP_LINUX_IMMUTABLE"), "nobody else changes the directories of links");
    // The service may write to these directories. The pipe directory is in the host's /tmp, since containers mount it from
    // there.
    assert!(lines.contains(&"ReadWritePaths=/tmp /var/log -/run/cdi"), "directories.rs names them");
    assert!(!lines.iter().any(|line| line.starts_with("PrivateTmp=")), "PrivateTmp hides the pipe directory");
}

/// A stop may take the longest `cuda_mps_quit_timeout`, and a minute for its other steps. The unit must allow this time.
#[test]
fn a_stop_may_take_as_long_as_the_configuration_allows() {
    let unit = shipped("yunion-mps-daemon.service");
    let time = unit.lines().find_map(|line| line.strip_prefix("TimeoutStopSec=")).unwrap();
    let minutes: u64 = time.strip_suffix("min").unwrap().parse().unwrap();
    let longest = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/config/host.conf")).unwrap();
    let longest = longest.lines().find(|line| line.contains("and SIGTERM for a control daemon.")).unwrap();
    let longest: u64 = longest.split("1 to ").nth(1).unwrap().trim_end_matches('.').parse().unwrap();
    assert!(minutes * 60 >= longest + 60, "TimeoutStopSec={time}, cuda_mps_quit_timeout up to {longest} s");
}

/// The unit's sandbox is as tight as docs/operations.md says, and no tighter than a sandbox that was tried on a real GPU.
#[test]
fn the_exposure_is_the_documented_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("yunion-mps-daemon.service");
    fs::write(&path, installed_unit()).unwrap();
    let output = run(Command::new("systemd-analyze").args(["security", "--offline=true"]).arg(&path));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let overall = text.lines().last().unwrap();
    let exposure = overall.split_ascii_whitespace().find(|word| word.parse::<f32>().is_ok());
    let exposure: f32 = exposure.unwrap_or_else(|| panic!("no figure in: {text}")).parse().unwrap();
    let page = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/operations.md")).unwrap();
    let said = page.split_once("exposure ").unwrap().1.split(')').next().unwrap();
    // Versions of systemd compute slightly different values.
    let said: f32 = said.parse().unwrap();
    assert!((said - exposure).abs() < 0.25, "docs/operations.md says {said}, systemd-analyze {exposure}");
    assert!(exposure < 4.0, "{exposure}");
}

fn tree(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut left = vec![root.to_path_buf()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            found.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned());
            if path.is_dir() {
                left.push(path);
            }
        }
    }
    found.sort();
    found
}

/// At boot and at an installation, root becomes the owner of the pipe directory in /tmp, even if a user has made it.
/// Directories that still have the immutable flag after a power failure lose the flag, so that they can be removed.
#[test]
fn the_directory_in_tmp_is_made_root_s() {
    if !root_or_skip("the_directory_in_tmp_is_made_root_s") {
        return;
    }
    for before in ["nothing", "theirs", "immutable"] {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("tmp/nvidia-mps");
        fs::create_dir_all(directory.parent().unwrap()).unwrap();
        fs::set_permissions(directory.parent().unwrap(), PermissionsExt::from_mode(0o1777)).unwrap();
        if before == "theirs" {
            fs::create_dir(&directory).unwrap();
            fs::set_permissions(&directory, PermissionsExt::from_mode(0o777)).unwrap();
            chown(&directory, Some(65534), Some(65534)).unwrap();
        }
        let left = [
            "pipe/slices/00_06.0-1",
            "pipe/slices",
            "pipe/GPU-1",
            "pipe/00_06.0-1",
            "pipe",
            "slices",
            "00_06.0-1",
        ];
        if before == "immutable" && flag_can_be_set() {
            for directory in left.map(|below| directory.join(below)) {
                fs::create_dir_all(&directory).unwrap();
                assert!(run(Command::new("chattr").arg("+i").arg(&directory)).status.success());
            }
        }
        let snippets = root.path().join("usr/lib/tmpfiles.d");
        fs::create_dir_all(&snippets).unwrap();
        fs::write(snippets.join("yunion-mps-daemon.conf"), shipped("yunion-mps-daemon.tmpfiles.conf"))
            .unwrap();
        let mut root_option = std::ffi::OsString::from("--root=");
        root_option.push(root.path());
        let output = run(Command::new("systemd-tmpfiles").arg(root_option).arg("--create"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let made = fs::symlink_metadata(&directory).unwrap();
        assert!(made.is_dir(), "{before}");
        assert_eq!((made.uid(), made.gid(), made.mode() & 0o7777), (0, 0, 0o755), "{before}");
        let removed = fs::remove_dir_all(&directory);
        run(Command::new("chattr").args(["-R", "-f", "-i"]).arg(root.path()));
        removed.unwrap();
    }
}

/// systemd-tmpfiles cleans a /tmp in which all files are old. It removes all of them except the directories of MPS.
#[test]
fn ageing_spares_the_pipe_and_log_directories_alone() {
    let root = tempfile::tempdir().unwrap();
    let tmp = root.path().join("tmp");
    for directory in ["nvidia-mps/pipe/GPU-1", "nvidia-mps/log", "nvidia-mps/other", "old"] {
        fs::create_dir_all(tmp.join(directory)).unwrap();
    }
    for file in [
        "nvidia-mps/pipe/control_lock",
        "nvidia-mps/pipe/GPU-1/control_lock",
        "nvidia-mps/log/control.log",
        "nvidia-mps/other/file",
        "old/file",
        "file",
    ] {
        fs::write(tmp.join(file), "").unwrap();
    }
    let snippets = root.path().join("etc/tmpfiles.d");
    fs::create_dir_all(&snippets).unwrap();
    let shipped = shipped("yunion-mps-daemon.tmpfiles.conf");
    fs::write(snippets.join("yunion-mps-daemon.conf"), shipped).unwrap();
    // The age 0 makes systemd-tmpfiles remove files of any age.
    fs::write(snippets.join("tmp.conf"), "d /tmp 1777 - - 0\n").unwrap();

    let mut root_option = std::ffi::OsString::from("--root=");
    root_option.push(root.path());
    let output = run(Command::new("systemd-tmpfiles").arg(root_option).arg("--clean"));
    let complaints = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{complaints}");
    assert!(!complaints.contains("yunion-mps-daemon.conf"), "{complaints}");

    let kept = [
        "nvidia-mps",
        "nvidia-mps/log",
        "nvidia-mps/log/control.log",
        "nvidia-mps/other",
        "nvidia-mps/other/file",
        "nvidia-mps/pipe",
        "nvidia-mps/pipe/GPU-1",
        "nvidia-mps/pipe/GPU-1/control_lock",
        "nvidia-mps/pipe/control_lock",
    ];
    assert_eq!(tree(&tmp), kept);
}
