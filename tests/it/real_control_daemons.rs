//! Tests with NVIDIA's control daemons of the drivers 535, 550 and 555. Without a GPU, these control daemons start, answer and
//! quit, but their servers can't start.

use std::fs::{self, File};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::support::host::{Host, assert_has, binaries, control_daemon, control_pid, nvidias, text};
use crate::support::processes::arguments;
use crate::support::wait::wait_for;

/// Returns a simulated host with one H200. It has NVIDIA's control daemon of the driver series `series` instead of the
/// simulated one.
fn host(series: &str) -> Host {
    let programs = nvidias(series);
    let mut host = Host::new("h200");
    // The simulated driver must have the version of NVIDIA's control daemon.
    host.plant("driver", series);
    host.prefer(&programs);
    host
}

fn events(status: &Value) -> Vec<&str> {
    status["events"].as_array().unwrap().iter().map(|event| event["text"].as_str().unwrap()).collect()
}

/// Checks that the control daemon has its limits, that it serves several users if `multiuser` says so, and that `quit` ends it.
fn serves(series: &str, multiuser: bool) {
    let mut host = host(series);
    host.configure("cuda_mps_prewarm: false");
    host.start();
    let status = host.wait_for_state("ready");
    assert_has(control_daemon(&status), &json!({"state": "ready", "multiuser": multiuser}));
    assert_eq!(status["gpus"][0]["confirmed_thread_percentage"], 25);
    assert_eq!(host.compute_mode(0), "Exclusive_Process");

    let pid = control_pid(&status);
    let arguments = arguments(pid);
    assert_eq!(Path::new(&arguments[0]), nvidias(series).join("nvidia-cuda-mps-control"), "{arguments:?}");
    let expected: &[&str] = if multiuser { &["-f", "-multiuser-server"] } else { &["-f"] };
    assert_eq!(arguments[1..], *expected);
    let refused = "the control daemon of this driver has no multi-user mode, so the control daemon serves \
                   one user at a time";
    assert_eq!(events(&status).contains(&refused), !multiuser, "{status:#}");

    let pipe = host.path("mps/pipe");
    assert_eq!(host.front_end(&pipe, "get_default_active_thread_percentage"), "25.0\n");
    assert_eq!(host.front_end(&pipe, "get_default_device_pinned_mem_limit 0"), "35G\n");

    assert_eq!(host.stop().code(), Some(0));
    let quit = format!("control daemon shared (PID {pid}) ended by quit");
    assert!(host.log().contains(&quit), "it did not follow quit");
    host.nothing_runs();
    assert_eq!(host.compute_mode(0), "Default");
}

#[test]
fn of_535_serves_without_multi_user() {
    serves("535", false);
}

#[test]
fn of_550_serves_without_multi_user() {
    serves("550", false);
}

#[test]
fn of_555_serves_all_users() {
    serves("555", true);
}

#[test]
fn start_in_the_longest_pipe_directory() {
    for series in ["535", "550", "555"] {
        let mut host = host(series);
        let directory = host.path("mps").display().to_string();
        let pipe = format!("{directory}/{}", "p".repeat(86 - directory.len()));
        host.configure(&format!("cuda_mps_prewarm: false\ncuda_mps_pipe_directory: {pipe}"));
        host.start();
        let status = host.wait_for_state("ready");
        assert_eq!(control_daemon(&status)["pipe_directory"].as_str().map(str::len), Some(87));
        assert_eq!(host.stop().code(), Some(0));
    }
}

/// A control daemon makes a FIFO `log` in its pipe directory, and without this FIFO writes no log. Therefore the service
/// refuses a log directory with this path. The simulated control daemon behaves in the same way.
#[test]
fn without_their_fifo_they_write_no_log() {
    for programs in [binaries(), nvidias("535"), nvidias("550"), nvidias("555")] {
        let host = Host::new("h200");
        let program = programs.join("nvidia-cuda-mps-control");
        let lines = |in_the_way: bool| {
            let (pipe, log) = (host.path(&format!("mps/{in_the_way}")), host.path("mps/out"));
            fs::create_dir_all(if in_the_way { pipe.join("log") } else { pipe.clone() }).unwrap();
            let its = |program: &Path| {
                let mut command = host.command(program);
                command.env("CUDA_MPS_PIPE_DIRECTORY", &pipe);
                command
            };
            let out = File::create(&log).unwrap();
            let mut daemon = its(&program).arg("-f").stdin(Stdio::null()).stdout(out).spawn().unwrap();
            let ask = |question: &str| {
                let asked = host.path("mps/asked");
                fs::write(&asked, question).unwrap();
                text(&its(&program).stdin(File::open(&asked).unwrap()).output().unwrap())
            };
            let listens = || (ask("get_default_active_thread_percentage\n") == "100.0\n").then_some(());
            wait_for("a control daemon", listens);
            ask("quit\n");
            assert_eq!(daemon.wait().unwrap().code(), Some(0));
            fs::read_to_string(log).unwrap().lines().count()
        };
        assert_eq!(lines(true), 0, "{}", programs.display());
        assert!(lines(false) > 0, "{}", programs.display());
    }
}

/// A log directory from an earlier configuration is at the path of the FIFO. The service moves this directory away, so that the
/// control daemon can make its FIFO.
#[test]
fn a_former_log_directory_makes_none_silent() {
    for series in ["535", "550", "555"] {
        let mut host = host(series);
        let pipe = host.path("mps/both");
        fs::create_dir_all(pipe.join("log")).unwrap();
        fs::write(pipe.join("log/control.log"), "former\n").unwrap();
        host.configure(&format!("cuda_mps_prewarm: false\ncuda_mps_pipe_directory: {}", pipe.display()));
        host.start();
        let status = host.wait_for_state("ready");
        let log = fs::read_to_string(host.path("mps/log/control.log")).unwrap();
        assert!(log.contains("Starting control daemon"), "{series}: {log}");
        assert!(fs::metadata(pipe.join("log")).unwrap().file_type().is_fifo());
        assert_eq!(fs::read_to_string(pipe.join("log.refused-1/control.log")).unwrap(), "former\n");
        let moved = format!("{} was a directory in the place", pipe.join("log").display());
        assert!(events(&status).iter().any(|event| event.starts_with(&moved)), "{status:#}");
        assert_eq!(host.stop().code(), Some(0));
    }
}

/// Driver 535 has no multi-user mode. If the configuration asks for this mode, the service names the key to change and starts
/// no control daemon.
#[test]
fn of_535_that_must_be_multi_user_waits() {
    let mut host = host("535");
    host.configure("cuda_mps_prewarm: false\ncuda_mps_multiuser: true");
    host.start();
    let status = host.wait_for_failure("cuda_mps_multiuser");
    assert_eq!(status["gpus"][0]["healthy"], false);
    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
    assert_eq!(host.compute_mode(0), "Default");
}

/// The server can't start without a GPU. The status shows how the server has ended, and the service tries again after a pause.
/// A stop does not wait for the end of the pause.
#[test]
fn of_555_without_a_gpu_has_no_server() {
    let mut host = host("555");
    host.start();
    let status = host.wait_for_status("a third failure", |status| {
        // Until the service has examined the host once, the status has no control daemon.
        let control_daemon = &status["control_daemons"][0];
        control_daemon["state"] == "backoff" && control_daemon["starts"].as_u64() >= Some(3)
    });
    let reason = control_daemon(&status)["reason"].as_str().unwrap();
    assert!(reason.contains("exited with status 1 before it was ready"), "{reason}");
    assert_has(control_daemon(&status), &json!({"servers": []}));
    assert_eq!(status["gpus"][0]["healthy"], false);
    assert_eq!(status["service"]["state"], "failed");

    assert_eq!(host.stop().code(), Some(0));
    host.nothing_runs();
    assert_eq!(host.compute_mode(0), "Default");
}
