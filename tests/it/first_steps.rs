//! Tests of a user's first steps: `setup` writes a configuration, and `run --free` starts a program on a free slice.

use crate::support::host::{binaries, mpsctl};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Output, Stdio};

use rustix::process::geteuid;
use serde_json::Value;

use crate::support::client::Client;
use crate::support::golden;
use crate::support::host::{Host, text};
use crate::support::wait::wait_for;

/// Starts a program with `yunion-mpsctl run --free` and the names of GPUs or models in `of`. Waits until the program is a
/// client, and returns it with its slice.
fn on_free_slice(host: &Host, of: &[&str]) -> (Client, String) {
    let before = clients(host);
    let mut run = host.command("yunion-mpsctl");
    run.args(["run", "--free"]).args(of).args(["--", "cuda-client", "hold", "600"]);
    let run = Client::start(run.stdout(Stdio::null()).stderr(Stdio::null()));
    let slice = wait_for("another client", || {
        clients(host).into_iter().find(|(pid, _)| !before.contains_key(pid)).map(|(_, slice)| slice)
    });
    (run, slice)
}

fn clients(host: &Host) -> BTreeMap<u64, String> {
    let listed = host.busctl("ListClients");
    let facts =
        |client: &Value| (client["pid"].as_u64().unwrap(), client["device"].as_str().unwrap().to_owned());
    listed.as_array().unwrap().iter().map(facts).collect()
}

#[test]
fn run_free_takes_the_slice_with_the_fewest_clients() {
    let mut host = Host::new("mixed");
    let directory = binaries();
    host.prefer(&directory);
    host.start();
    // The second A100 is in MIG mode and can't be served. So the service is degraded.
    host.wait_for_state("degraded");
    let mut running = Vec::new();
    for (of, expected) in [
        (&[][..], "3b:00.0-0"),
        (&[], "0001:1a:00.0-0"),
        (&["a100"], "3b:00.0-1"),
        (&["0001:1a:00.0-0", "0001:1a:00.0-3"], "0001:1a:00.0-3"),
        (&["GPU-84d6e0b7-c15f-4a29-bd38-2f7193ca5e60"], "0001:1a:00.0-1"),
    ] {
        let (run, slice) = on_free_slice(&host, of);
        assert_eq!(slice, expected, "{of:?}");
        running.push(run);
    }

    let told = host.mpsctl(&["run", "--free", "h200", "--", "true"]);
    assert_eq!(text(&told), "yunion-mpsctl: takes 0001:1a:00.0-2 (H200 SXM 141GB)\n");
    let environment = host.mpsctl(&["env", "--free", "H200"]);
    let lines = String::from_utf8(environment.stdout).unwrap();
    assert!(lines.contains("export YUNION_MPS_DEVICE=0001:1a:00.0-2\n"), "{lines}");

    let drained = host.mpsctl(&["drain", "3b:00.0", "0001:1a:00.0"]);
    assert!(drained.status.success(), "{}", text(&drained));
    let none = host.mpsctl(&["run", "--free", "--", "true"]);
    assert_eq!(none.status.code(), Some(1));
    let said = text(&none);
    for part in [
        "yunion-mpsctl: no slice is free: 3b:00.0: drained; 5e:00.0: can't be served: ",
        "; 0001:1a:00.0: drained\n",
    ] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
}

/// A container has a client only after its program has started CUDA. So `env --free` counts one client more for a slice that it
/// has just given out.
#[test]
fn each_choice_of_a_moment_is_another_slice() {
    let mut host = Host::new("tesla-p40");
    host.prefer(&binaries());
    host.start();
    host.wait_for_state("ready");
    let choose = || {
        let answer = host.mpsctl(&["env", "--free", "--format", "json"]);
        let answer: Value = serde_json::from_slice(&answer.stdout).unwrap();
        answer["environment"]["YUNION_MPS_DEVICE"].as_str().unwrap().to_owned()
    };
    let chosen: Vec<String> = std::iter::repeat_with(choose).take(5).collect();
    // After each slice was given out once, `env --free` gives out the first slice again, and refuses no caller.
    assert_eq!(chosen, ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3", "00:06.0-0"]);
    let together: Vec<_> = (0..3)
        .map(|_| {
            let mut command = host.command("yunion-mpsctl");
            command.args(["env", "--free"]).stdout(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    let outputs = together.into_iter().map(|child| child.wait_with_output().unwrap().stdout);
    assert_eq!(outputs.collect::<BTreeSet<_>>().len(), 3, "commands of one moment");
}

#[test]
fn a_service_without_configuration_names_setup() {
    let mut host = fresh("tesla-p40");
    host.install();
    host.start();
    host.wait_for_state("disabled");
    let root = host.path("sysroot").display().to_string();
    for command in [&["list"][..], &["status"], &["doctor", "--sysroot", &root]] {
        let said = text(&host.mpsctl(command)).replace(['\n', ' '], "");
        assert!(said.contains("yunion-mpsctlsetup"), "{command:?}: {said}");
        // An administrator may have mistyped the name of a configuration file. So the message names the files that the service
        // has tried to read.
        assert!(
            said.contains("filesthatdonotexist:/opt/yunion/bin/etc/host.conf,/etc/yunion/host.conf"),
            "{command:?}: {said}"
        );
    }
    // If an administrator has disabled MPS, no command advises to run `setup`.
    fs::create_dir_all(host.file("/etc/yunion")).unwrap();
    fs::write(host.file("/etc/yunion/host.conf"), "enable_cuda_mps: false\n").unwrap();
    assert!(host.call("Control.Reload").status.success());
    for command in [&["list"][..], &["status"], &["doctor", "--sysroot", &root]] {
        let said = text(&host.mpsctl(command));
        assert!(said.contains("enable_cuda_mps is false") && !said.contains("setup"), "{command:?}: {said}");
    }
}

/// NVIDIA's container toolkit mounts CUDA's default pipe directory into every container, and doctor warns of this. So with the
/// toolkit, `setup` chooses another pipe directory.
#[test]
fn setup_beside_a_container_toolkit_is_a_configuration_that_doctor_accepts() {
    let host = fresh("h200");
    let tool = host.file("/usr/bin/nvidia-ctk");
    fs::create_dir_all(tool.parent().unwrap()).unwrap();
    fs::write(&tool, "").unwrap();
    let done = setup(&host, &["--yes"]);
    let said = text(&done);
    assert!(done.status.success() && said.contains("/usr/bin/nvidia-ctk is installed and mounts"), "{said}");
    assert_eq!(settings(&files(&host)["host.conf"]), "enable_cuda_mps: true\ncuda_mps_replicas: 10\n");
    let root = host.path("sysroot").display().to_string();
    let doctor = text(&host.mpsctl(&["doctor", "--sysroot", &root]));
    assert!(!doctor.contains("toolkit-captures-containers"), "{doctor}");
    assert!(doctor.contains("toolkit-shows-directories"), "doctor has seen the toolkit: {doctor}");
}

#[test]
fn run_without_dashes_says_where_they_stand() {
    let host = Host::new("tesla-p40");
    let run = host.mpsctl(&["run", "00:06.0-1", "python3", "train.py", "--epochs", "3"]);
    assert_eq!(run.status.code(), Some(2));
    assert_eq!(
        text(&run),
        "error: write the command behind `--`; did you mean: yunion-mpsctl run 00:06.0-1 -- python3 \
         train.py --epochs 3\n"
    );
}

/// Returns a host with the installed package and without a configuration.
fn fresh(board: &str) -> Host {
    let host = Host::new(board);
    fs::remove_dir_all(host.file("/etc/yunion")).unwrap();
    host
}

fn setup(host: &Host, arguments: &[&str]) -> Output {
    let root = host.path("sysroot").display().to_string();
    host.mpsctl(&[&["setup", "--sysroot", &root], arguments].concat())
}

/// Runs `yunion-mpsctl setup` on a terminal, types `answers`, and returns its output.
fn answered(host: &Host, answers: &str) -> String {
    let program = mpsctl();
    let script =
        format!("stty -echo && exec '{program}' setup --sysroot '{}'", host.path("sysroot").display());
    let mut terminal = host.command("script");
    terminal.args(["-qec", &script, "/dev/null"]).env("SHELL", "/bin/sh").env("TERM", "dumb");
    let mut terminal =
        terminal.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    terminal.stdin.take().unwrap().write_all(answers.as_bytes()).unwrap();
    text(&terminal.wait_with_output().unwrap()).replace('\r', "")
}

/// Returns the files in /etc/yunion by name. Fails unless each file has the mode 644.
fn files(host: &Host) -> BTreeMap<String, String> {
    let Ok(entries) = fs::read_dir(host.file("/etc/yunion")) else { return BTreeMap::new() };
    let file = |entry: fs::DirEntry| {
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o7777, 0o644);
        (entry.file_name().into_string().unwrap(), fs::read_to_string(entry.path()).unwrap())
    };
    entries.map(|entry| file(entry.unwrap())).collect()
}

fn settings(text: &str) -> String {
    text.lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| format!("{line}\n"))
        .collect()
}

fn checked(host: &Host) -> String {
    let check = host.check();
    assert!(check.status.success(), "{}", text(&check));
    text(&check)
}

#[test]
fn setup_of_a_host_without_the_platform_is_one_file() {
    let host = fresh("tesla-p40");
    let done = setup(&host, &["--yes"]);
    let said = text(&done);
    assert!(done.status.success(), "{said}");
    // The manual page shows the output of this run.
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/man/examples/setup.txt");
    let shown = format!("Output with --yes, on a host with one Tesla P40 and without configuration:\n{said}");
    if golden::is_update() {
        fs::write(&example, &shown).unwrap();
    }
    assert_eq!(
        fs::read_to_string(&example).unwrap(),
        shown,
        "UPDATE_GOLDEN=1 cargo test --test it first_steps::"
    );
    let written = files(&host);
    assert_eq!(written.keys().collect::<Vec<_>>(), ["host.conf"]);
    assert_eq!(
        settings(&written["host.conf"]),
        "enable_cuda_mps: true\ncuda_mps_replicas: 3\ncuda_mps_pipe_directory: /tmp/nvidia-mps\n"
    );
    // `setup` prints what `--check` prints for the new configuration, except for the comparison with a running service.
    let check = checked(&host);
    let (check, _) = check.split_once("\nWhat a reload would change is unknown: ").unwrap();
    assert!(check.contains("3 slices, 00:06.0-0 to 00:06.0-2") && said.contains(check), "{check}\n{said}");

    let again = setup(&host, &["--yes", "--slices", "5"]);
    assert!(again.status.success(), "{}", text(&again));
    let said = text(&again);
    assert!(said.starts_with("MPS is enabled already, so nothing was written.\n\nconfiguration: "), "{said}");
    assert!(said.contains("run --free"), "the host still has no platform: {said}");
    assert_eq!(files(&host), written);
}

/// `setup` prints the share of a GPU that each program gets. Users may not expect a share, since a program without MPS has the
/// whole GPU. GPUs before Volta enforce no share.
#[test]
fn setup_says_how_much_of_a_gpu_every_program_has() {
    let said = |board: &str, arguments: &[&str]| text(&setup(&fresh(board), arguments));
    let share = "every CUDA program then has ";
    let told = said("h200", &["--yes", "--slices", "3"]);
    let expected = format!(
        "\nOn the H200 SXM 141GB {share}47923 MiB of memory and 33 % of the threads, even if no other \
         program runs. With 1 slice, a program has the whole GPU.\n"
    );
    assert!(told.contains(&expected), "{told}");
    for (board, arguments) in [
        ("tesla-p40", &["--yes"][..]),
        ("h200", &["--yes", "--slices", "1"]),
        ("h200", &["--yes", "--isolate-slices"]),
    ] {
        let told = said(board, arguments);
        assert!(told.contains("Written: ") && !told.contains(share), "{told}");
    }
}

#[test]
fn setup_of_a_host_of_the_platform_names_each_gpu() {
    let host = fresh("mixed");
    fs::create_dir_all(host.file("/opt/yunion")).unwrap();
    let done = setup(&host, &["--yes", "--slices", "4"]);
    let said = text(&done);
    assert!(
        done.status.success() && said.contains("kubectl rollout restart ds -n onecloud default-host"),
        "{said}"
    );
    assert!(said.contains("  5e:00.0 A100 PCIe 80GB: left out: MIG is on; "), "{said}");
    let written = files(&host);
    assert_eq!(written.keys().collect::<Vec<_>>(), ["host.conf", "host_container_device.yml"]);
    assert_eq!(
        settings(&written["host.conf"]),
        "enable_cuda_mps: true\ncontainer_device_config_file: /etc/yunion/host_container_device.yml\n"
    );
    assert_eq!(
        settings(&written["host_container_device.yml"]),
        "devices:\n\
         - path: /dev/dri/renderD128\n  type: NVIDIA_MPS\n  virtual_number: 4\n\
         - path: /dev/dri/renderD131\n  type: NVIDIA_MPS\n  virtual_number: 4\n"
    );
    let check = checked(&host);
    // The host agent of the platform Cloudpods reads the same files as the service. `--check` warns of settings that the host
    // agent can't handle, and `setup` must write no such setting.
    assert!(!check.contains("agent") && !check.contains("not served"), "{check}");
}

/// NVML does not report the memory of a GPU that uses the host's memory, so the service can't choose the memory of slices.
/// Therefore `setup` writes this memory into the configuration.
#[test]
fn setup_writes_the_memory_of_slices_that_share_the_hosts() {
    let host = fresh("gb10");
    let done = setup(&host, &["--yes", "--slices", "4"]);
    let said = text(&done);
    assert!(done.status.success(), "{said}");
    assert!(said.contains("  000f:01:00.0 GB10, 109034 MiB of the host's memory\n"), "{said}");
    let written = files(&host);
    assert_eq!(
        settings(&written["host_container_device.yml"]),
        "devices:\n- path: /dev/dri/renderD128\n  type: NVIDIA_MPS\n  virtual_number: 4\n  memory: 27258\n"
    );
    let check = checked(&host);
    assert!(check.contains("4 slices, ") && check.contains("27258 MiB"), "{check}");
    // Without the size of the host's memory, `setup` can't compute the memory of a slice.
    let host = fresh("gb10");
    fs::remove_file(host.file("/proc/meminfo")).unwrap();
    let refused = setup(&host, &["--yes"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        text(&refused).contains("left out: NVML does not report the memory of the GPU"),
        "{}",
        text(&refused)
    );
}

#[test]
fn setup_changes_no_file_that_is_there_and_says_what_belongs_in_it() {
    // The installation of the platform Cloudpods leaves this configuration: MPS is disabled, and there is a device file.
    let host = Host::new("h200");
    host.configure("enable_cuda_mps: false");
    host.devices(&["path: /dev/dri/renderD128, type: NVIDIA_GPU_SHARE, virtual_number: 2"]);
    let before = files(&host);
    for arguments in [&["--yes"][..], &["--yes", "--dry-run"]] {
        let told = setup(&host, arguments);
        assert_eq!(told.status.code(), Some(4), "{}", text(&told));
        let said = text(&told);
        for part in [
            "Nothing was written: this host has configuration files already, and setup changes no existing \
             file.\n",
            "\nGive each of these GPUs the entry below, and no other entry, in \
             /etc/yunion/host_container_device.yml:\n\n    devices:\n",
            "\n    - path: /dev/dri/renderD128\n      type: NVIDIA_MPS\n      virtual_number: 10\n",
            "\nSet these keys in /etc/yunion/host.conf:\n\n    enable_cuda_mps: true\n\nThen:\n",
        ] {
            assert!(said.contains(part), "no {part:?} in {said}");
        }
        assert_eq!(files(&host), before);
    }
    // With the changes that `setup` has asked for, the host has the slices that `setup` has described.
    host.configure("enable_cuda_mps: true");
    host.devices(&["path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 10"]);
    assert!(checked(&host).contains("10 slices, "));

    host.configure("enable_cuda_mps: perhaps");
    let wrong = setup(&host, &["--yes"]);
    assert_eq!(wrong.status.code(), Some(1));
    assert!(text(&wrong).contains("error: /etc/yunion/host.conf:") && text(&wrong).contains("has mistakes"));
    // `setup` also reads a device file that host.conf does not name yet.
    let host = fresh("mixed");
    fs::create_dir_all(host.file("/etc/yunion")).unwrap();
    fs::write(host.file("/etc/yunion/host_container_device.yml"), "devices: []\n").unwrap();
    let told = setup(&host, &["--yes"]);
    assert_eq!(told.status.code(), Some(4));
    assert!(
        text(&told).contains("\nWrite /etc/yunion/host.conf:\n\n    enable_cuda_mps: true\n"),
        "{}",
        text(&told)
    );
    assert_eq!(files(&host)["host_container_device.yml"], "devices: []\n");
}

#[test]
fn setup_asks_on_a_terminal() {
    let host = fresh("mixed");
    let said = answered(&host, "6\n0\nn\nn\nn\ny\n");
    for part in [
        "\nWith 10 slices of the A100 PCIe 80GB, each has 8192 MiB of memory and 10 % of the threads.\nHow \
         many slices shall the A100 PCIe 80GB have? With 0 slices a GPU is not served. [10] ",
        "How many slices shall the H200 SXM 141GB have? With 0 slices a GPU is not served. [10] ",
        "belong to a Cloudpods platform? Nothing on this host points to such a platform. [y/N] ",
        "do 1.6 times the work of 8 processes without MPS",
        "\nShould a fault stay in its slice? [y/N] ",
        "Write /etc/yunion/host_container_device.yml and /etc/yunion/host.conf? [Y/n] ",
    ] {
        assert!(said.contains(part), "no {part:?} in {said}");
    }
    let written = files(&host);
    assert_eq!(
        settings(&written["host_container_device.yml"]),
        "devices:\n- path: /dev/dri/renderD128\n  type: NVIDIA_MPS\n  virtual_number: 6\n"
    );
    assert!(!written["host.conf"].contains("cuda_mps_pipe_directory"), "{}", written["host.conf"]);
    assert!(checked(&host).contains("6 slices, 3b:00.0-0 to 3b:00.0-5"));

    let host = fresh("h200");
    for answers in ["0\n", "\n\n\n\nn\n"] {
        let said = answered(&host, answers);
        assert!(said.contains("othing was written") && files(&host).is_empty(), "{said}");
    }
}

/// With a control daemon for each slice, a program without a slice finds no control daemon. So `setup` does not ask whether all
/// programs should find one.
#[test]
fn setup_gives_each_slice_a_control_daemon_where_a_fault_shall_stay_in_its_slice() {
    let host = fresh("h200");
    let said = answered(&host, "4\nn\ny\ny\n");
    assert!(said.contains("Written: ") && !said.contains("by itself?"), "{said}");
    let per_slice = "enable_cuda_mps: true\ncuda_mps_replicas: 4\ncuda_mps_topology: per_slice\n";
    assert_eq!(settings(&files(&host)["host.conf"]), per_slice);
    assert!(
        checked(&host).contains("control daemon 00:06.0-3: slice 00:06.0-3; active thread percentage 100;")
    );
    let host = fresh("h200");
    let done = setup(&host, &["--yes", "--slices", "4", "--isolate-slices"]);
    assert!(done.status.success(), "{}", text(&done));
    assert_eq!(settings(&files(&host)["host.conf"]), per_slice);
    // The control daemon of an older driver can't isolate slices. So `setup` does not ask whether a fault should stay in its
    // slice.
    let said = answered(&fresh("tesla-p40"), "4\nn\nn\ny\n");
    assert!(said.contains("Written: ") && !said.contains("Should a fault"), "{said}");
}

#[test]
fn setup_without_a_terminal_a_driver_or_the_rights_says_so() {
    let host = fresh("tesla-p40");
    let asked = setup(&host, &[]);
    assert_eq!(asked.status.code(), Some(1));
    assert_eq!(
        text(&asked),
        "yunion-mpsctl: setup asks questions, but standard input is no terminal; with --yes setup takes the \
         default answers\n"
    );
    let dry = setup(&host, &["--dry-run", "--yes"]);
    assert!(
        dry.status.success() && text(&dry).contains("\n/etc/yunion/host.conf:\n\n    # "),
        "{}",
        text(&dry)
    );
    assert!(files(&host).is_empty());
    // The unprivileged user may not be able to enter the directory of yunion-mpsctl. So the shell opens the program as root,
    // and the user executes it by its descriptor.
    let script = "exec 3<\"$0\"; exec $1 /proc/self/fd/3 setup";
    let as_nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups";
    let as_who = if geteuid().is_root() { as_nobody } else { "" };
    let program = mpsctl();
    let refused = host.command("sh").args(["-c", script, program, as_who]).output().unwrap();
    assert_eq!(refused.status.code(), Some(1));
    assert_eq!(
        text(&refused),
        "yunion-mpsctl: only root can write the configuration: run setup with sudo; --dry-run shows the \
         files to every user\n"
    );

    // A host without an installed driver.
    let mut host = fresh("tesla-p40");
    let empty = host.path("empty");
    fs::create_dir(&empty).unwrap();
    fs::write(empty.join("libnvidia-ml.so.1"), "").unwrap();
    host.set("LD_LIBRARY_PATH", empty.to_str().unwrap());
    let done = setup(&host, &["--yes"]);
    let said = text(&done);
    assert!(done.status.success() && said.contains("GPUs of this host, without a driver ("), "{said}");
    assert!(said.contains("each has 1/10 of the memory and 1/10 of the threads"), "{said}");
    assert!(settings(&files(&host)["host.conf"]).contains("cuda_mps_replicas: 10\n"));
}
