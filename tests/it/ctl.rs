//! Tests of yunion-mpsctl on a private D-Bus.

use crate::support::host::mpsctl;
use std::process::Stdio;

use common::published::snapshot::{Snapshot, State};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::time::timeout;

use crate::support::bus::{PrivateBus, ctl, ended, printed};
use crate::support::host::binaries;
use crate::support::service::Service;
use crate::support::snapshot::{P40, first_gpu, p40_board, serving, starting, tesla_p40, with_socket};
use crate::support::wait::DEADLINE;

#[tokio::test]
async fn the_platform_gets_its_table() {
    let service = Service::start(p40_board()).await;
    let expected = r#"+------------+-----------+-----------+------------------+-----------+------------------------------------------+----------------------------------------------------------------------------------------------+-------+--------------+---------+
| Dev_type   | Model     | Addr      | Vendor_device_id | numa_node | Device_path                              | PCIE_Info                                                                                    | Index | Device_minor | Health  |
+------------+-----------+-----------+------------------+-----------+------------------------------------------+----------------------------------------------------------------------------------------------+-------+--------------+---------+
| NVIDIA_MPS | Tesla P40 | 00:06.0-0 | 10de:1b38        | -1        | GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400 | {"lane_width":16,"throughput":"15.76 GB/s","transfer_rate_per_lane":"8GT/s","version":"3.0"} | -1    | -1           | healthy |
| NVIDIA_MPS | Tesla P40 | 00:06.0-1 | 10de:1b38        | -1        | GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400 | {"lane_width":16,"throughput":"15.76 GB/s","transfer_rate_per_lane":"8GT/s","version":"3.0"} | -1    | -1           | healthy |
| NVIDIA_MPS | Tesla P40 | 00:06.0-2 | 10de:1b38        | -1        | GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400 | {"lane_width":16,"throughput":"15.76 GB/s","transfer_rate_per_lane":"8GT/s","version":"3.0"} | -1    | -1           | healthy |
| NVIDIA_MPS | Tesla P40 | 00:06.0-3 | 10de:1b38        | -1        | GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400 | {"lane_width":16,"throughput":"15.76 GB/s","transfer_rate_per_lane":"8GT/s","version":"3.0"} | -1    | -1           | healthy |
+------------+-----------+-----------+------------------+-----------+------------------------------------------+----------------------------------------------------------------------------------------------+-------+--------------+---------+
"#;
    assert_eq!(printed(&mut ctl(&service.bus, &["list", "--platform"])).await, expected);
}

#[tokio::test]
async fn list_shows_gpus_and_what_is_wrong_with_them() {
    let mut lost = tesla_p40("00:06.0", P40);
    lost.plan.gpu.nvml = Err("GPU is lost".into());
    lost.healthy = false;
    lost.reason = "GPU is lost\u{1b}[2J".to_owned();
    let service = Service::start(serving(vec![lost])).await;
    let table = printed(&mut ctl(&service.bus, &["list", "--gpus", "--platform"])).await;
    let row = table.lines().nth(3).unwrap();
    let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
    assert_eq!(cells[..5], ["GPU", "MPS", "4", "Tesla P40", "00:06.0"]);
    assert_eq!(cells[7], "-");
    assert_eq!(cells[9], "not healthy: GPU is lost\u{fffd}[2J");
}

#[tokio::test]
async fn json_has_what_the_bus_has() {
    let service = Service::start(p40_board()).await;
    let parsed = |text: String| -> Value { serde_json::from_str(&text).unwrap() };
    let devices = parsed(printed(&mut ctl(&service.bus, &["list", "--json"])).await);
    let addresses: Vec<&Value> = devices.as_array().unwrap().iter().map(|device| &device["addr"]).collect();
    assert_eq!(addresses, ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"]);
    assert_eq!(devices[1]["mps_memory_limit"], 5760);
    assert_eq!(devices[1]["healthy"], true);
    assert_eq!(devices[1]["pcie_info"]["lane_width"], 16);
    let gpus = parsed(printed(&mut ctl(&service.bus, &["list", "--gpus", "--json"])).await);
    assert_eq!(gpus[0]["virtual_num"], 4);

    let status = parsed(printed(&mut ctl(&service.bus, &["status", "--json"])).await);
    assert_eq!(status["gpus"], gpus);
    assert_eq!(
        status["service"],
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "state": "ready",
            "state_reason": "",
            "generation": 1,
            "enabled": true,
            "pipe_directory": "/tmp/nvidia-mps/pipe",
            "log_directory": "/tmp/nvidia-mps/log",
            "driver_version": "580.159.04",
        })
    );
    assert_eq!(status["control_daemons"][0]["servers"], json!([4712]));
    assert_eq!(status["events"][0]["at"], 1_700_000_000_000_000_i64);
}

#[tokio::test]
async fn an_empty_list_says_why() {
    let disabled = Snapshot {
        state: State::Disabled,
        reason: "enable_cuda_mps is false".to_owned(),
        ..serving(Vec::new())
    };
    let service = Service::start(disabled).await;
    let text = printed(&mut ctl(&service.bus, &["list"])).await;
    assert_eq!(text, "No slices: the service is disabled: enable_cuda_mps is false\n");
    let text = printed(&mut ctl(&service.bus, &["list", "--gpus"])).await;
    assert_eq!(text, "No GPUs: the service is disabled: enable_cuda_mps is false\n");
    assert_eq!(printed(&mut ctl(&service.bus, &["list", "--json"])).await, "[]\n");
}

#[tokio::test]
async fn status_is_one_screen() {
    let service = Service::start(p40_board()).await;
    let screen = printed(&mut ctl(&service.bus, &["status"])).await;
    for line in [
        "State:           ready",
        "Pipe directory:  /tmp/nvidia-mps/pipe",
        "GPU      MODEL      SLICES               CLIENTS  HEALTH",
        "00:06.0  Tesla P40  4 of 5760 MiB, 25 %   - / 16  not enforced",
        "Last events:",
    ] {
        assert!(screen.lines().any(|here| here == line), "no {line:?} in:\n{screen}");
    }
    assert!(screen.contains(", driver 580.159.04, generation "), "{screen}");
    let daemon = screen.lines().find(|line| line.starts_with("shared")).unwrap();
    let daemon: Vec<&str> = daemon.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
    assert_eq!((&daemon[..2], &daemon[3..]), (&["shared", "ready"][..], &["1", "4711", "4712"][..]));
    assert!(
        screen.contains("Last events:\n  2023-11-1") && screen.contains("  control daemon shared is ready\n"),
        "{screen}"
    );
}

#[tokio::test]
async fn status_works_before_the_first_plan() {
    let service = Service::start(starting()).await;
    let screen = printed(&mut ctl(&service.bus, &["status"])).await;
    assert!(screen.starts_with("State:           starting: looking for GPUs\n"), "{screen}");
    let (status, out, err) = ended(&mut ctl(&service.bus, &["list"])).await;
    assert_eq!((status, out.as_str()), (Some(1), ""));
    assert_eq!(err, "yunion-mpsctl: the service is starting: looking for GPUs\n");
}

#[tokio::test]
async fn env_speaks_shell_docker_and_json() {
    let mut odd = p40_board();
    let base = tempfile::tempdir().unwrap();
    let pipe = base.path().join("it's here");
    std::fs::create_dir(&pipe).unwrap();
    std::fs::write(pipe.join("control"), "").unwrap();
    first_gpu(&mut odd).plan.pipe_directory.clone_from(&pipe);
    let pipe = pipe.to_str().unwrap();
    let service = Service::start(odd).await;
    let shell = printed(&mut ctl(&service.bus, &["env", "00:06.0-1"])).await;
    // A shell that executes the output of `env` must get the exact values, special characters included.
    let script = format!("{shell}printf '%s\\n' \"$CUDA_MPS_PIPE_DIRECTORY\" \"$CUDA_VISIBLE_DEVICES\"");
    let values = printed(Command::new("sh").args(["-c", &script])).await;
    assert_eq!(values, format!("{pipe}\n{P40}\n"));
    assert_eq!(shell.lines().filter(|line| line.starts_with("export ")).count(), 11);

    let docker = printed(&mut ctl(&service.bus, &["env", "00:06.0-1", "--format", "docker"])).await;
    assert_eq!(
        docker.lines().collect::<Vec<_>>(),
        [
            "--runtime=nvidia",
            &format!("--env=CUDA_MPS_PIPE_DIRECTORY={pipe}"),
            &format!("--env=NVIDIA_VISIBLE_DEVICES={P40}"),
            "--env=NVIDIA_DRIVER_CAPABILITIES=all",
            "--env=CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
            "--env=CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=5760M",
            "--env=NVIDIA_GPU_MEMORY_LIMIT=5760",
            "--env=NVIDIA_GPU_MEMORY_REQUEST=",
            "--env=YUNION_MPS_MEMORY_FRACTION=0.241",
            "--env=YUNION_MPS_MEMORY_MIB=5553",
            "--env=YUNION_MPS_DEVICE=00:06.0-1",
            "--volume=/dev/shm:/dev/shm",
            &format!("--volume={pipe}:{pipe}"),
        ]
    );

    let json = printed(&mut ctl(&service.bus, &["env", "00:06.0-1", "--format", "json"])).await;
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["environment"]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"], "25");
    assert_eq!(json["environment"]["CUDA_VISIBLE_DEVICES"], Value::Null);
    assert_eq!(json["mounts"][0], json!({"host": "/dev/shm", "container": "/dev/shm", "read_only": false}));
    assert_eq!(json["gpus"], json!([P40]));
}

#[tokio::test]
async fn env_speaks_podman_compose_and_cdi() {
    let mut odd = p40_board();
    first_gpu(&mut odd).plan.pipe_directory = "/srv/$HOME \"here\"".into();
    let service = Service::start(odd).await;
    let env = async |words: &[&str]| ended(&mut ctl(&service.bus, &[&["env"][..], words].concat())).await;
    let (_, podman, _) = env(&["00:06.0-1", "--format", "podman"]).await;
    assert_eq!(
        podman.lines().collect::<Vec<_>>(),
        [
            &format!("--device=nvidia.com/gpu={P40}"),
            "--env=CUDA_MPS_PIPE_DIRECTORY=/srv/$HOME \"here\"",
            "--env=CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
            "--env=CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=5760M",
            "--env=NVIDIA_GPU_MEMORY_LIMIT=5760",
            "--env=NVIDIA_GPU_MEMORY_REQUEST=",
            "--env=YUNION_MPS_MEMORY_FRACTION=0.241",
            "--env=YUNION_MPS_MEMORY_MIB=5553",
            "--env=YUNION_MPS_DEVICE=00:06.0-1",
            "--volume=/dev/shm:/dev/shm",
            "--volume=/srv/$HOME \"here\":/srv/$HOME \"here\"",
        ]
    );

    // A YAML parser must read the exact values. In these values, Compose later replaces `$$` by `$`. Without quotes, YAML would
    // read a GPU's address as a number.
    let (_, compose, _) = env(&["00:06.0", "--format", "compose"]).await;
    let read = "import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin), sys.stdout)";
    let script = format!("cat <<'END' | /usr/bin/python3 -c '{read}'\n{compose}END\n");
    let compose: Value =
        serde_json::from_str(&printed(Command::new("sh").args(["-c", &script])).await).unwrap();
    let directory = "/srv/$$HOME \"here\"";
    assert_eq!(
        compose,
        json!({"services": {"mps-slice": {
            "runtime": "nvidia",
            "environment": {
                "CUDA_MPS_PIPE_DIRECTORY": directory,
                "NVIDIA_VISIBLE_DEVICES": P40,
                "NVIDIA_DRIVER_CAPABILITIES": "all",
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=5760M",
                "NVIDIA_GPU_MEMORY_LIMIT": "5760",
                "NVIDIA_GPU_MEMORY_REQUEST": "",
                "YUNION_MPS_MEMORY_FRACTION": "0.241",
                "YUNION_MPS_MEMORY_MIB": "5553",
                "YUNION_MPS_DEVICE": "00:06.0",
            },
            "volumes": [
                {"type": "bind", "source": "/dev/shm", "target": "/dev/shm", "read_only": false},
                {"type": "bind", "source": directory, "target": directory, "read_only": false},
            ],
        }}})
    );

    let (_, cdi, _) = env(&["00:06.0-1", "--format", "cdi"]).await;
    assert_eq!(cdi, format!("nvidia.com/gpu={P40}\nyunion.io/mps=00:06.0-1\n"));
    for (names, complaint) in [
        (
            &["00:06.0-1", "00:06.0-2"][..],
            "yunion-mpsctl: a container can take only one of these CDI devices, since the limits of ",
        ),
        (&["00:06.0"], "yunion-mpsctl: 00:06.0 is a GPU, but a CDI device of this service is one slice: "),
    ] {
        let (status, out, err) = env(&[names, &["--format", "cdi"]].concat()).await;
        assert_eq!((status, out.as_str()), (Some(1), "yunion.io/mps=yunion-mpsctl-env-failed\n"), "{err}");
        assert!(err.starts_with(complaint) && err.lines().count() == 1, "{err}");
    }
}

/// `env` and `run` warn a user who asks for two slices of the same GPU. Since MPS can't join slices, the user gets the settings
/// of one slice and the names of both.
#[tokio::test]
async fn slices_of_one_gpu_are_said_to_be_one_slice() {
    const WARNING: &str = "yunion-mpsctl: warning: 00:06.0-1 and 00:06.0-2 are slices of one GPU, and MPS \
                           can't join slices: a program with all of them has the memory and the threads of \
                           one slice\n";
    let (board, _directory) = with_socket(p40_board());
    let service = Service::start(board).await;
    let (_, one, err) = ended(&mut ctl(&service.bus, &["env", "00:06.0-1", "0000:00:06.0-1"])).await;
    assert_eq!(err, "", "the same slice twice is one slice");
    let two = ["env", "00:06.0-1", "00:06.0-2", "00:06.0-1"];
    let (status, out, err) = ended(&mut ctl(&service.bus, &two)).await;
    assert_eq!((status, err.as_str()), (Some(0), WARNING));
    assert_eq!(out.replace("00:06.0-1,00:06.0-2", "00:06.0-1"), one);
    let run = ["run", "00:06.0-1", "00:06.0-2", "--", "printenv", "YUNION_MPS_DEVICE"];
    let (status, out, err) = ended(&mut ctl(&service.bus, &run)).await;
    assert_eq!((status, out.as_str(), err.as_str()), (Some(0), "00:06.0-1,00:06.0-2\n", WARNING));
}

#[tokio::test]
async fn exit_statuses_say_what_happened() {
    let empty = PrivateBus::start();
    for arguments in [
        &["list"][..],
        &["status"],
        &["clients"],
        &["run", "00:06.0-1", "--", "true"],
        &["terminate", "1"],
        &["terminate", "--device", "00:06.0-1"],
        &["reload"],
        &["apply"],
        &["drain", "--all"],
        &["undrain", "00:06.0"],
        &["probe"],
    ] {
        let (status, out, err) = ended(&mut ctl(&empty, arguments)).await;
        assert_eq!((status, out.as_str()), (Some(3), ""), "{arguments:?}: {err}");
        assert!(err.contains("systemctl start yunion-mps-daemon"), "{err}");
    }
    // `check` and `doctor` work without a service.
    let root = tempfile::tempdir().unwrap();
    let root = root.path().to_str().unwrap();
    let (status, out, err) = ended(&mut ctl(&empty, &["check", "--sysroot", root])).await;
    assert_eq!((status, err.as_str()), (Some(0), ""), "{out}");
    let (status, out, err) = ended(&mut ctl(&empty, &["doctor", "--sysroot", root])).await;
    assert_eq!((status, err.as_str()), (Some(5), ""), "{out}");
    let mut gone = PrivateBus::start();
    gone.stop();
    for arguments in [&["list"], &["metrics"]] {
        let (status, out, err) = ended(&mut ctl(&gone, arguments)).await;
        assert_eq!((status, out.as_str()), (Some(1), ""));
        assert!(err.starts_with("yunion-mpsctl: the call over the system bus failed: "), "{err}");
    }

    let service = Service::start(p40_board()).await;
    for arguments in [
        &[][..],
        &["bogus"],
        &["run", "00:06.0-1"],
        &["list", "--bogus"],
        &["drain"],
        &["drain", "00:06.0", "--all"],
        &["undrain"],
    ] {
        let (status, out, err) = ended(&mut ctl(&service.bus, arguments)).await;
        assert_eq!((status, out.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(err.contains("Usage: yunion-mpsctl"), "{err}");
    }
    let (status, _, err) = ended(&mut ctl(&service.bus, &["run", "00:07.0-1", "--", "true"])).await;
    assert_eq!(status, Some(1));
    assert_eq!(
        err,
        "yunion-mpsctl: there is no slice or GPU \"00:07.0-1\"; did you mean 00:06.0-1 or 00:06.0-0 or 00:06.0-2? `yunion-mpsctl \
         list` shows all names\n"
    );
}

/// If `env` fails, a script that executes its output must fail too. Otherwise a script without error checks would start its
/// program without a slice.
#[tokio::test]
async fn the_reader_of_an_env_that_fails_refuses_its_answer() {
    let empty = PrivateBus::start();
    let service = Service::start(p40_board()).await;
    for (format, line) in [
        (&[][..], "false\n"),
        (&["--format", "docker"], "--yunion-mpsctl-env-failed\n"),
        (&["--format", "podman"], "--yunion-mpsctl-env-failed\n"),
        (&["--format=cdi"], "yunion.io/mps=yunion-mpsctl-env-failed\n"),
        (&["--format", "compose"], ""),
        (&["--format", "json"], ""),
    ] {
        let known = [&["env", "00:06.0-1"], format].concat();
        let unknown = [&["env", "00:07.0-1"], format].concat();
        let wrong = [&["env"], format].concat();
        for (bus, arguments, expected, reason) in [
            (&empty, &known, 3, "systemctl start yunion-mps-daemon"),
            (&service.bus, &unknown, 1, "there is no slice or GPU \"00:07.0-1\""),
            (&service.bus, &wrong, 2, "Usage: yunion-mpsctl"),
        ] {
            let (status, out, err) = ended(&mut ctl(bus, arguments)).await;
            assert_eq!((status, out.as_str()), (Some(expected), line), "{arguments:?}: {err}");
            assert!(err.contains(reason), "{err}");
        }
    }
}

#[tokio::test]
async fn every_subcommand_has_examples() {
    let bus = PrivateBus::start();
    for subcommand in [
        "list",
        "status",
        "clients",
        "check",
        "doctor",
        "metrics",
        "env",
        "run",
        "terminate",
        "reload",
        "apply",
        "drain",
        "undrain",
        "probe",
    ] {
        let help = printed(&mut ctl(&bus, &[subcommand, "--help"])).await;
        assert!(help.contains("Examples:\n  "), "{help}");
        assert!(help.contains(&format!("yunion-mpsctl {subcommand}")), "{help}");
    }
}

#[tokio::test]
async fn a_reader_that_leaves_is_no_error() {
    let (board, _directory) = with_socket(p40_board());
    let service = Service::start(board).await;
    for arguments in [
        &["list"][..],
        &["list", "--json"],
        &["status"],
        &["env", "00:06.0-1"],
        &["--help"],
        &["list", "--help"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = ctl(&service.bus, arguments);
        let run = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        let output = timeout(DEADLINE, run.wait_with_output()).await.unwrap().unwrap();
        assert_eq!((output.status.code(), &*output.stderr), (Some(0), &b""[..]), "{arguments:?}");
    }
}

/// If no process reads the output of a failing command, the command's exit status still shows the failure.
#[tokio::test]
async fn a_reader_that_leaves_does_not_change_the_answer() {
    let bus = PrivateBus::start();
    let root = tempfile::tempdir().unwrap();
    let below = root.path().to_str().unwrap();
    let wrong = root.path().join("host.conf");
    std::fs::write(&wrong, "enable_cuda_mps: perhaps\n").unwrap();
    let wrong = wrong.to_str().unwrap();
    let daemon = binaries().join("yunion-mps-daemon");
    let mut service = Command::new(&daemon);
    service.args(["--check", "--config", wrong]);
    for (mut command, expected) in [
        (ctl(&bus, &["doctor", "--sysroot", below]), 5),
        (ctl(&bus, &["doctor", "--sysroot", below, "--json"]), 5),
        (ctl(&bus, &["check", "--config", wrong]), 78),
        (ctl(&bus, &["is-ready"]), 3),
        (ctl(&bus, &["setup", "--yes", "--sysroot", below]), 1),
        (service, 78),
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let run = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        let output = timeout(DEADLINE, run.wait_with_output()).await.unwrap().unwrap();
        assert_eq!(output.status.code(), Some(expected), "{command:?}");
    }
}

#[tokio::test]
async fn run_gives_the_environment_and_returns_the_exit_status() {
    let (board, directory) = with_socket(p40_board());
    let service = Service::start(board).await;
    let script = "env | grep -E '^(CUDA|NVIDIA|YUNION)_' | LC_ALL=C sort; cat; exit 7";
    let mut run = ctl(&service.bus, &["run", "00:06.0-1", "--", "sh", "-c", script]);
    let (status, out, err) = ended(run.env("CUDA_VISIBLE_DEVICES", "0,1")).await;
    assert_eq!((status, err.as_str()), (Some(7), ""));
    let expected = format!(
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25\n\
         CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=5760M\n\
         CUDA_MPS_PIPE_DIRECTORY={}\n\
         CUDA_VISIBLE_DEVICES={P40}\n\
         NVIDIA_DRIVER_CAPABILITIES=all\n\
         NVIDIA_GPU_MEMORY_LIMIT=5760\n\
         NVIDIA_GPU_MEMORY_REQUEST=\n\
         NVIDIA_VISIBLE_DEVICES={P40}\n\
         YUNION_MPS_DEVICE=00:06.0-1\n\
         YUNION_MPS_MEMORY_FRACTION=0.241\n\
         YUNION_MPS_MEMORY_MIB=5553\n",
        directory.path().display()
    );
    assert_eq!(out, expected);

    for (command, expected) in [
        (&["sh", "-c", "kill -KILL $$"][..], 128 + 9),
        (&["/nowhere/at-all"], 127),
        (&["/dev/null"], 126),
        (&["true"], 0),
    ] {
        let mut run = ctl(&service.bus, &["run", "00:06.0-1", "--"]);
        assert_eq!(ended(run.args(command)).await.0, Some(expected), "{command:?}");
    }
    // Options after `--` belong to the command that `run` starts.
    let (status, out, _) = ended(&mut ctl(&service.bus, &["run", "00:06.0", "--", "echo", "--json"])).await;
    assert_eq!((status, out.as_str()), (Some(0), "--json\n"));
}

#[tokio::test]
async fn run_passes_signals_on() {
    let (board, _directory) = with_socket(p40_board());
    let mut service = Service::start(board).await;
    // `run` asks the service to end the GPU work of its command. The service of this test answers no request.
    service.requests.close();
    for (signal, name) in [(Signal::TERM, "TERM"), (Signal::INT, "INT"), (Signal::HUP, "HUP")] {
        let script =
            format!("trap 'echo got {name}; exit 7' {name}; echo ready; while :; do sleep 0.01; done");
        let mut run = ctl(&service.bus, &["run", "00:06.0-1", "--", "sh", "-c", &script]);
        let mut run = run.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
        let mut line = async || timeout(DEADLINE, lines.next_line()).await.unwrap().unwrap();
        assert_eq!(line().await.as_deref(), Some("ready"));
        let pid = Pid::from_raw(i32::try_from(run.id().unwrap()).unwrap()).unwrap();
        kill_process(pid, signal).unwrap();
        assert_eq!(line().await, Some(format!("got {name}")));
        let status = timeout(DEADLINE, run.wait()).await.unwrap().unwrap();
        assert_eq!(status.code(), Some(7), "{name}");
    }
}

/// A program can give signals such as SIGUSR1 a meaning of its own. `run` passes such a signal to its command only, and not to
/// the children of the command.
#[tokio::test]
async fn run_passes_signals_on_that_mean_something() {
    let (board, _directory) = with_socket(p40_board());
    let mut service = Service::start(board).await;
    service.requests.close();
    let end = |pid| kill_process(pid, Signal::USR2).unwrap();
    let script = "trap 'got=it; echo got it' USR1; sleep 60 & echo ready; until [ $got ]; do sleep 0.01; done; \
                  kill -0 $! && echo lives; kill $!; while :; do sleep 0.01; done";
    let mut run = ctl(&service.bus, &["run", "00:06.0-1", "--", "sh", "-c", script]);
    let mut run = run.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
    let mut line = async || timeout(DEADLINE, lines.next_line()).await.unwrap().unwrap();
    assert_eq!(line().await.as_deref(), Some("ready"));
    let pid = Pid::from_raw(i32::try_from(run.id().unwrap()).unwrap()).unwrap();
    kill_process(pid, Signal::USR1).unwrap();
    assert_eq!(line().await.as_deref(), Some("got it"));
    assert_eq!(line().await.as_deref(), Some("lives"));
    // The command does not handle SIGUSR2, so this signal ends it. `run` returns 128 plus the number of the signal.
    end(pid);
    let status = timeout(DEADLINE, run.wait()).await.unwrap().unwrap();
    assert_eq!(status.code(), Some(128 + Signal::USR2.as_raw()));
    assert_eq!(line().await, None);
}

/// The bus accepts connections but never answers. The commands end with a message.
#[tokio::test]
async fn a_bus_that_hangs_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("bus");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let mut command = Command::new(mpsctl());
    command.arg("list").env("DBUS_SYSTEM_BUS_ADDRESS", format!("unix:path={}", socket.display()));
    let (status, _, err) = ended(&mut command).await;
    assert_eq!(status, Some(1), "{err}");
    assert!(err.contains("the system bus did not accept the connection within 10 s"), "{err}");
}
