//! Tests of `yunion-mpsctl drain` and `undrain`, by which slices, GPUs or the whole host stop taking new clients.

use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::path::PathBuf;
use std::process::{ChildStdout, Output, Stdio};

use rustix::process::Signal;
use serde_json::Value;

use crate::support::client::Client;
use crate::support::host::{Host, binaries, control_daemon, control_pid, signal_pid, text};
use crate::support::skip::root_or_skip;

fn serving(board: &str) -> Host {
    let mut host = Host::new(board);
    host.configure(&format!("cuda_mps_cdi_directory: {}", host.path("run/cdi").display()));
    host.start();
    host.wait_for_state("ready");
    host
}

fn in_spec(host: &Host) -> Vec<String> {
    let spec = fs::read_to_string(host.path("run/cdi/yunion.io-mps.json")).unwrap();
    let spec: Value = serde_json::from_str(&spec).unwrap();
    let devices = spec["devices"].as_array().unwrap().iter();
    let names = devices.map(|device| device["name"].as_str().unwrap().to_owned());
    names.filter(|name| !name.starts_with("bind-")).collect()
}

fn names(devices: &[Value], wanted: impl Fn(&Value) -> bool) -> Vec<String> {
    let wanted = devices.iter().filter(|device| wanted(device));
    wanted.map(|device| device["addr"].as_str().unwrap().to_owned()).collect()
}

fn drained(host: &Host) -> Vec<String> {
    names(&host.list(), |device| device["drained"] == true)
}

fn done(host: &Host, arguments: &[&str]) -> String {
    let output = host.mpsctl(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", text(&output));
    text(&output)
}

fn refused(output: &Output, reason: &str) {
    assert!(output.status.code() == Some(1) && text(output).contains(reason), "{}", text(output));
}

fn assert_only_drained(host: &Host, name: &str) {
    let listed = host.list();
    assert_eq!(names(&listed, |device| device["drained"] == true), [name]);
    assert_eq!(names(&listed, |device| device["healthy"] == false), [name]);
    let device = listed.iter().find(|device| device["addr"] == name).unwrap();
    let reason = format!("drained for new clients; yunion-mpsctl undrain {name} ends the drain");
    assert!(device["reason"].as_str().unwrap().starts_with(&reason), "{device:#}");
    // A drained slice stays in the CDI spec. The hook in the CDI spec refuses containers with this slice.
    assert_eq!(in_spec(host), names(&listed, |_| true));
    let status = host.json(&["status"]).unwrap();
    assert_eq!(
        (&status["service"]["state"], &status["service"]["state_reason"]),
        (&"ready".into(), &"".into())
    );
    assert_eq!(status["gpus"][0]["healthy"], true);
    let said = format!("1 of {} slices drained", listed.len());
    assert!(status["gpus"][0]["reason"].as_str().unwrap().starts_with(&said), "{status:#}");
    refused(&host.mpsctl(&["env", name]), &format!("{name} is {reason}"));
    refused(&host.mpsctl(&["run", name, "--", "true"]), &format!("{name} is {reason}"));
    let answer = host
        .command("gdbus")
        .args(["call", "--system", "--dest", "io.yunion.Mps1", "--object-path"])
        .args(["/io/yunion/Mps1/Manager", "--method", "io.yunion.Mps1.Manager.GetContainerConfig"])
        .arg(format!("['00:06.0-0','{name}']"))
        .output()
        .unwrap();
    refused(&answer, &format!("io.yunion.Mps1.Error.Drained: {name} is drained"));
    for other in ["00:06.0-0", "00:06.0"] {
        done(host, &["env", other]);
    }
}

#[test]
fn a_drained_slice_is_given_to_nobody_until_it_is_taken_back() {
    let mut host = serving("tesla-p40");
    let said = done(&host, &["drain", "0000:00:06.0-1"]);
    // With the driver of the board `tesla-p40`, the control daemon's socket is in the pipe directory. A container that runs may
    // already have this directory, so the drain can't keep the container's programs out.
    let left = format!(
        "0000:00:06.0-1 is drained: no new program is given it. But a program that has the directory {} \
         already can start new clients, since the control daemon still listens there.\nNo client is left.\n",
        host.path("mps/pipe").display()
    );
    assert_eq!(said, left);
    assert_only_drained(&host, "00:06.0-1");
    assert_eq!(host.events().last().unwrap(), "00:06.0-1 is drained");
    let metrics = done(&host, &["metrics"]);
    for (slice, value) in [("00:06.0-0", 0), ("00:06.0-1", 1)] {
        let sample = metrics
            .lines()
            .find(|line| line.starts_with(&format!("yunion_mps_device_drained{{device=\"{slice}\"")));
        assert!(sample.unwrap().ends_with(&format!(" {value}")), "{metrics}");
    }

    let doctor = host
        .command(binaries().join("yunion-mpsctl"))
        .arg("doctor")
        .arg("--sysroot")
        .arg(host.path("sysroot"))
        .output();
    let doctor = text(&doctor.unwrap());
    assert!(doctor.contains("info: slices-drained: 1 slice\n"), "{doctor}");

    let before = host.events();
    done(&host, &["drain", "00:06.0-1"]);
    assert_eq!(host.events(), before);

    for how in ["kill", "stop", "reload"] {
        match how {
            "kill" => {
                host.signal(Signal::KILL);
                host.ended();
                host.start();
            }
            "stop" => {
                assert_eq!(host.stop().code(), Some(0));
                host.start();
            }
            _ => {
                done(&host, &["reload"]);
            }
        }
        host.wait_for_state("ready");
        assert_only_drained(&host, "00:06.0-1");
    }

    for command in ["drain", "undrain"] {
        refused(
            &host.mpsctl(&[command, "00:06.0-1", "00:06.0-0", "00:09.0"]),
            "there is no slice or GPU \"00:09.0\"",
        );
        refused(&host.mpsctl(&[command, ""]), "there is no slice or GPU \"\"");
        assert_only_drained(&host, "00:06.0-1");
    }

    assert_eq!(done(&host, &["undrain", "00:06.0-1"]), "00:06.0-1 takes clients again.\n");
    assert_eq!(host.events().last().unwrap(), "00:06.0-1 takes clients again");
    assert!(drained(&host).is_empty());
    assert_eq!(in_spec(&host).len(), 4);
    done(&host, &["env", "00:06.0-1"]);
}

#[test]
fn a_gpu_is_drained_with_all_its_slices_and_a_host_with_all_its_gpus() {
    let host = serving("h200x8");
    let all = names(&host.list(), |_| true);
    let gpus = host.json(&["list", "--gpus"]).unwrap();
    let (first, second) = (gpus[0]["addr"].as_str().unwrap(), gpus[1]["addr"].as_str().unwrap());
    let of = |gpu: &str| names(&host.list(), |device| device["base_addr"] == gpu);
    let uuid = gpus[1]["device_path"].as_str().unwrap();
    done(&host, &["drain", uuid]);
    assert_eq!(drained(&host), of(second));
    for name in [second, uuid] {
        refused(&host.mpsctl(&["env", name]), &format!("{second} is drained for new clients"));
    }
    done(&host, &["env", first]);
    assert_eq!(host.events().last().unwrap(), &format!("{second} is drained"));

    assert_eq!(
        done(&host, &["drain", "--all"]),
        "Every slice is drained: no new client gets it.\nNo client is left.\n"
    );
    assert_eq!(drained(&host), all);
    assert_eq!(in_spec(&host), all);
    assert_eq!(host.json(&["status"]).unwrap()["service"]["state"], "ready");

    done(&host, &["undrain", &format!("{first}-1")]);
    assert_eq!(drained(&host).len(), all.len() - 1);
    // Commands that choose a slice themselves, such as `probe` without a name, pass over drained slices.
    let probed = text(&host.mpsctl(&["probe", "--json"]));
    assert!(probed.contains(&format!("\"{first}-1\"")) && probed.contains("drained"), "{probed}");
    assert!(!probed.contains("name the slice to probe it"), "{probed}");
    done(&host, &["undrain", first, second]);
    assert_eq!(
        drained(&host),
        names(&host.list(), |device| device["base_addr"] != first && device["base_addr"] != second)
    );
    assert_eq!(done(&host, &["undrain", "--all"]), "Every slice takes clients again.\n");
    assert!(drained(&host).is_empty());
}

/// The service remembers that a slice is drained, even while a reload has removed the slice from the configuration.
#[test]
fn a_drained_name_without_a_slice_is_kept() {
    let host = serving("tesla-p40");
    let cut = |number: u32| {
        host.devices(&[&format!("path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: {number}")]);
        done(&host, &["reload"]);
        assert_eq!(host.list().len(), number as usize);
    };
    done(&host, &["drain", "00:06.0-3"]);
    cut(2);
    assert!(drained(&host).is_empty());
    cut(4);
    assert_eq!(drained(&host), ["00:06.0-3"]);
    cut(2);
    done(&host, &["undrain", "00:06.0-3"]);
    refused(&host.mpsctl(&["undrain", "00:06.0-3"]), "there is no slice or GPU");
    cut(4);
    assert!(drained(&host).is_empty());
}

#[test]
fn only_root_may_drain() {
    if !root_or_skip("only_root_may_drain") {
        return;
    }
    let host = serving("tesla-p40");
    let answer = host
        .command("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups", "gdbus", "call", "--system", "--dest"])
        .args(["io.yunion.Mps1", "--object-path", "/io/yunion/Mps1/Manager", "--method"])
        .args(["io.yunion.Mps1.Control.Drain", "['00:06.0-1']"])
        .output()
        .unwrap();
    refused(&answer, "org.freedesktop.DBus.Error.AccessDenied");
    assert!(drained(&host).is_empty());
}

/// A yunion-mpsctl command that waits for the end of clients.
struct Waiting {
    command: Client,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Waiting {
    fn start(host: &Host, arguments: &[&str]) -> Self {
        let mut command = host.command(binaries().join("yunion-mpsctl"));
        let mut command = Client::start(command.args(arguments).stdout(Stdio::piped()));
        let lines = BufReader::new(command.stdout.take().unwrap()).lines();
        Self { command, lines }
    }

    fn line(&mut self) -> String {
        self.lines.next().unwrap().unwrap()
    }

    fn ended(mut self) -> (Option<i32>, Vec<String>) {
        let lines = self.lines.map(Result::unwrap).collect();
        (self.command.wait().unwrap().code(), lines)
    }
}

#[test]
fn the_waiting_ends_with_the_last_client_of_a_slice() {
    let host = Host::serving("h200");
    let (neighbour, tenant) = (host.client_of("00:06.0-0"), host.client_of("00:06.0-1"));
    // The service does not know which slice this client has.
    let nameless = Client::start(&mut host.program(&["hold", "600"]));
    host.wait_until_listed(nameless.id());
    let said = done(&host, &["drain", "00:06.0-1"]);
    let line = said.lines().nth(1).unwrap();
    assert!(line.starts_with("Still there: process ") && said.lines().count() == 2, "{said}");
    assert!(line.contains(", 00:06.0-1)") && line.contains(", slice not known)"), "{said}");
    let unknown = format!(
        "The slice of process {} is not known and may be a drained slice, so the drained slices may not be \
         free yet.",
        nameless.id()
    );
    assert!(line.ends_with(&unknown), "{said}");
    assert!(!line.contains(&neighbour.id().to_string()), "{said}");

    let mut waiting = Waiting::start(&host, &["drain", "00:06.0-1", "--wait"]);
    assert_eq!(waiting.line(), "00:06.0-1 is drained: no new client gets it.");
    let mut first = [waiting.line(), waiting.line()];
    first.sort();
    for (client, slice) in [(&tenant, "00:06.0-1"), (&nameless, "slice not known")] {
        let begin = format!("Waiting for process {} (", client.id());
        let found = first.iter().any(|line| line.starts_with(&begin) && line.contains(slice));
        assert!(found, "{first:?}");
    }
    let ended = |client: Client| {
        let line = format!("Process {} is no longer a client.", client.id());
        client.end();
        line
    };
    let (nameless, tenant) = (ended(nameless), ended(tenant));
    let (status, lines) = waiting.ended();
    assert_eq!(status, Some(0));
    assert_eq!(lines.last().unwrap(), "No client is left.");
    assert!(lines.contains(&nameless) && lines.contains(&tenant), "{lines:?}");
    assert_eq!(host.json(&["clients"]).unwrap()[0]["pid"], neighbour.id());
    assert_eq!(drained(&host), ["00:06.0-1"]);
}

/// `drain --wait` waits on during an upgrade of the service. A service that has just started does not know its clients yet, so
/// the command must not end then.
#[test]
fn the_waiting_goes_on_over_a_restart_of_the_service() {
    let mut host = Host::serving("h200");
    let client = host.client_of("00:06.0-1");
    let mut waiting = Waiting::start(&host, &["drain", "--all", "--wait"]);
    assert_eq!(waiting.line(), "Every slice is drained: no new client gets it.");
    assert!(waiting.line().starts_with(&format!("Waiting for process {} ", client.id())));
    for restart in 0..5 {
        host.signal(Signal::KILL);
        host.ended();
        if restart == 0 {
            assert!(waiting.line().starts_with("The service does not know the remaining clients now: "));
        }
        host.start();
        host.wait_for_state("ready");
        host.wait_until_listed(client.id());
    }
    assert_eq!(waiting.command.try_wait().unwrap(), None);
    client.end();
    let (status, lines) = waiting.ended();
    assert_eq!((status, lines.last().unwrap().as_str()), (Some(0), "No client is left."));
    assert_eq!(drained(&host).len(), host.list().len());
}

#[test]
fn ctrl_c_ends_the_waiting_and_not_the_drain() {
    let host = Host::serving("h200");
    let client = host.client_of("00:06.0-1");
    for (signal, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut waiting = Waiting::start(&host, &["drain", "00:06.0", "--wait"]);
        waiting.line();
        assert!(waiting.line().starts_with(&format!("Waiting for process {} ", client.id())));
        signal_pid(waiting.command.id(), signal);
        let said = "The command no longer waits, but the slices stay drained: yunion-mpsctl undrain 00:06.0 \
                    ends the drain.";
        assert_eq!(waiting.ended(), (Some(status), vec![said.to_owned()]));
        assert_eq!(drained(&host).len(), 4);
    }
}

/// If no process reads the output of `drain --wait`, the command ends early. It must then fail, since a success would mean that
/// all clients have ended.
#[test]
fn a_reader_that_leaves_does_not_make_the_waiting_a_success() {
    let host = Host::serving("h200");
    let _client = host.client_of("00:06.0-1");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = host.command(binaries().join("yunion-mpsctl"));
    let ended = command.args(["drain", "--all", "--wait"]).stdout(writer).output().unwrap();
    refused(&ended, "drain no longer waits for clients; the slices stay drained");
    assert_eq!(drained(&host).len(), 4);
}

#[test]
fn a_terminal_shows_who_is_left() {
    let host = Host::serving("h200");
    let client = host.client_of("00:06.0-1");
    let program = binaries().join("yunion-mpsctl");
    let script = format!("stty cols 120 rows 50 && exec '{}' drain 00:06.0 --wait", program.display());
    let mut command = host.command("script");
    command
        .args(["-qefc", &script, "/dev/null"])
        .env("TERM", "xterm")
        .env("NO_COLOR", "1")
        .env("SHELL", "/bin/sh");
    let mut terminal = Client::start(command.stdout(Stdio::piped()));
    let mut lines = BufReader::new(terminal.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert_eq!(lines.next().unwrap().trim_end(), "00:06.0 is drained: no new client gets it.");
    assert_eq!(lines.next().unwrap().trim_end(), "Waiting for 1 client:");
    let row = lines.find(|line| line.trim_start().starts_with(&format!("{} ", client.id()))).unwrap();
    assert!(row.contains("  00:06.0-1  "), "{row}");
    client.end();
    let last = lines.last().unwrap();
    // `drain --wait` has printed a sentence and the two lines of a table. It moves the cursor up three lines and clears them.
    assert!(
        last.starts_with("\u{1b}[3A\u{1b}[J") && last.trim_end().ends_with("No client is left."),
        "{last:?}"
    );
    assert_eq!(terminal.wait().unwrap().code(), Some(0));
}

fn directories(host: &Host) -> Vec<PathBuf> {
    let slices = host.path("mps/pipe/slices");
    names(&host.list(), |_| true).iter().map(|slice| slices.join(slice.replace(':', "_"))).collect()
}

fn lead(directories: &[PathBuf]) -> Vec<bool> {
    directories.iter().map(|directory| directory.join("control").exists()).collect()
}

/// Returns the exit status of a CUDA program with `environment`, a slice's environment from the beginning of the test.
fn status_of(host: &Host, environment: &[(String, String)]) -> Option<i32> {
    let mut program = host.command("cuda-client");
    program.arg("props").envs(environment.iter().cloned()).output().unwrap().status.code()
}

#[test]
fn drain_and_undrain_hold_while_the_control_daemon_is_silent() {
    let mut host = Host::serving("h200");
    let directories = directories(&host);
    host.plant("mps/fault/front-end-hangs", "");
    assert!(host.call("Control.Reload").status.success());
    host.wait_for_status("the silence", |status| control_daemon(status)["state"] == "waiting");
    done(&host, &["drain", "00:06.0-1"]);
    assert_eq!(lead(&directories), [true, false, true, true]);
    done(&host, &["undrain", "00:06.0-1"]);
    assert_eq!(lead(&directories), [true; 4]);
    host.clear("mps/fault/front-end-hangs");
    host.wait_for_state("ready");
    assert_eq!(lead(&directories), [true; 4]);
    assert_eq!(host.stop().code(), Some(0));
}

/// A control daemon that ends after its last client takes no new clients, since it might otherwise never end. If the service
/// needs the control daemon after all, clients can come again.
#[test]
fn a_control_daemon_that_retires_takes_no_new_client() {
    let mut host = Host::serving("h200");
    let (directories, pipe) = (directories(&host), host.path("mps/pipe/control"));
    let environments = ["00:06.0-0", "00:06.0-1"].map(|slice| host.environment_of(slice));
    let client = host.client_of("00:06.0-0");
    let before = control_pid(&host.wait_for_state("ready"));
    for _ in 0..2 {
        host.configure("cuda_mps_topology: per_gpu");
        done(&host, &["reload"]);
        assert_eq!((lead(&directories), pipe.exists()), (vec![false; 4], false));
        assert!(environments.iter().all(|environment| status_of(&host, environment) != Some(0)));
        done(&host, &["drain", "00:06.0-1"]);
        assert_eq!(lead(&directories), [false; 4]);
        done(&host, &["undrain", "00:06.0-1"]);
        assert_eq!(lead(&directories), [false; 4]);
        assert!(names(&host.list(), |device| device["healthy"] == true).is_empty());

        // The next service does not make the links of the slices either, since the control daemon still waits for its clients.
        host.signal(Signal::KILL);
        host.ended();
        host.start();
        host.wait_for_failure("its clients have ended");
        assert_eq!((lead(&directories), pipe.exists()), (vec![false; 4], false));

        host.configure("cuda_mps_topology: shared");
        done(&host, &["reload"]);
        assert_eq!(control_pid(&host.wait_for_state("ready")), before);
        assert_eq!((lead(&directories), pipe.exists()), (vec![true; 4], true));
        assert_eq!(status_of(&host, &environments[1]), Some(0));
    }
    host.configure("cuda_mps_topology: per_gpu");
    done(&host, &["reload"]);
    done(&host, &["drain", "00:06.0-1"]);
    client.end();
    host.wait_for_state("ready");
    assert_eq!(lead(&directories), [true, false, true, true]);
    assert_eq!(status_of(&host, &environments[0]), Some(0));
    assert_eq!(host.stop().code(), Some(0));
}

/// Without a driver the service has no plan, so no supervisor runs for the control daemon of an earlier service. A drain still
/// removes the links to that control daemon.
#[test]
fn a_drain_holds_for_a_control_daemon_that_nobody_looks_after() {
    let mut host = Host::serving("h200");
    let directories = directories(&host);
    let client = host.client_of("00:06.0-0");
    host.signal(Signal::KILL);
    host.ended();
    host.clear("driver");
    host.start();
    host.wait_for_state("failed");
    assert_eq!(lead(&directories), [true; 4]);
    done(&host, &["drain", "--all"]);
    assert_eq!(lead(&directories), [false; 4]);
    assert!(!host.path("mps/pipe/control").exists());
    client.end();
    assert_eq!(host.stop().code(), Some(0));
}
