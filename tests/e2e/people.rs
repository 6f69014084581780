//! Tests of a user's first week on a booted machine: a program with a private /tmp, short jobs after a fault, and device files
//! with mistakes.

use std::process::Output;

use crate::Check;
use crate::machine::{Machine, text};
use crate::service::{
    DEVICE_FILE, DEVICES, HOST, HOST_CONF, ON_HOST, SERVICE, devices, drop_in, new_host, serving, state,
};
use crate::wait::wait_for;

pub(crate) const CHECKS: &[Check] = &[
    ("a_unit_with_a_tmp_of_its_own_is_refused_with_a_remedy_that_works", private_tmp),
    ("the_newest_fault_is_shown_behind_many_short_jobs", short_jobs),
    ("each_slip_in_the_files_of_the_guide_is_answered_with_file_and_line", guide),
];

fn is_ready(machine: &Machine) {
    wait_for("the state ready", || (state(machine) == "ready").then_some(()));
}

fn in_unit(machine: &Machine, property: &str, command: &str) -> Output {
    let property = format!("--property={property}");
    let words = ["systemd-run", "--quiet", "--wait", "--pipe", &property, "sh", "-c"];
    machine.run(&[&words[..], &[&format!("{ON_HOST} {command}")]].concat())
}

/// In a unit with a private /tmp, CUDA does not find the directory of the slice. So `run` and `env` must fail there. Otherwise
/// the program would start on the whole GPU.
fn private_tmp(machine: &mut Machine) {
    let run = "yunion-mpsctl run 00:06.0-1 -- cuda-client props";
    let is_served = |output: &Output| {
        let said = text(&output.stdout) + &text(&output.stderr);
        // The slice has 35942 MiB, and the client's CUDA context takes a part of it.
        assert!(output.status.success() && said.contains(" free 35"), "{said}");
    };
    for topology in ["shared", "per_slice"] {
        new_host(machine);
        machine.sh(&format!(
            "sed -i '/^cuda_mps_pipe_directory:/d' {HOST_CONF}; echo 'cuda_mps_topology: {topology}' >>{HOST_CONF}
             systemctl start {SERVICE}"
        ));
        is_ready(machine);
        for command in [run, "eval \"$(yunion-mpsctl env 00:06.0-1)\" && cuda-client props"] {
            is_served(&in_unit(machine, "PrivateTmp=no", command));
            let refused = in_unit(machine, "PrivateTmp=yes", command);
            let said = text(&refused.stderr);
            assert!(!refused.status.success() && said.contains("it has a /tmp of its own"), "{said}");
            assert_eq!(text(&refused.stdout), "", "no program has begun");
        }
    }
    drop_in(machine, "ReadWritePaths=/run");
    machine.sh(&format!(
        "echo 'cuda_mps_pipe_directory: /run/yunion-mps/pipe' >>{HOST_CONF}; systemctl restart {SERVICE}"
    ));
    is_ready(machine);
    is_served(&in_unit(machine, "PrivateTmp=yes", run));
    machine.sh(&format!("systemctl stop {SERVICE}; rm -r /tmp/nvidia-mps /run/yunion-mps"));
}

fn short_jobs(machine: &mut Machine) {
    serving(machine);
    let fault =
        machine.run(&["sh", "-c", &format!("{ON_HOST} yunion-mpsctl run 00:06.0-0 -- cuda-client fault")]);
    assert!(!fault.status.success(), "{fault:?}");
    is_ready(machine);
    machine.sh(&format!(
        "{ON_HOST} for job in $(seq 34); do yunion-mpsctl run 00:06.0-1 -- cuda-client props >/dev/null; done"
    ));
    let names_fault = |line: &&str| line.contains("fatal GPU error");
    let terminal = "script -qec 'stty cols 80 rows 24; exec env NO_COLOR=1 yunion-mpsctl status' /dev/null";
    let screen = machine.sh(terminal).replace('\r', "");
    let lines: Vec<&str> = screen.lines().collect();
    assert!(lines.len() < 24 && lines.iter().all(|line| line.chars().count() <= 80), "{screen}");
    assert!(lines[0].starts_with("State:") && lines.iter().any(names_fault), "{screen}");
    let events = machine.printed(&["yunion-mpsctl", "events"]);
    assert!(events.lines().any(|line| names_fault(&line)), "{events}");
}

const RIGHT: &str =
    "devices:\n- path: \"/dev/dri/renderD128\"\n  type: \"NVIDIA_MPS\"\n  virtual_number: 4\n";

/// Device files with mistakes. Each row has a file, the line number that the service names, and the service's message.
const SLIPS: [(&str, u32, &str); 6] = [
    // The guide of the platform Cloudpods prints the device file in this form, without indentation.
    (
        "devices:\n- path: \"/dev/dri/renderD128\"\ntype: \"NVIDIA_MPS\"\nvirtual_number: 4\n",
        3,
        "type: the key stands outside of the list `devices`; indent this key as far as the key `path` of \
         the entry",
    ),
    (
        "devices:\n- path: \"/dev/dri/renderD128\"\n type: \"NVIDIA_MPS\"\n  virtual_number: 4\n",
        3,
        "not valid YAML",
    ),
    (
        "devices:\n- path: \"/dev/dri/renderD128\"\n\ttype: \"NVIDIA_MPS\"\n\tvirtual_number: 4\n",
        3,
        "a tab in the indentation",
    ),
    (
        "devices:\n- path: \"/dev/dri/renderD128\"\n  type: \"NVIDIA_MPS\"\n  virtual_nubmer: 4\n",
        4,
        "devices[0].virtual_nubmer: the service knows no such key and ignores it",
    ),
    (
        "devices:\n- path: \"/dev/dri/renderD128\"\n  type: \"NVIDIA_MPS\"\n",
        2,
        "devices[0].virtual_number: missing; write the number of slices of the GPU, 1 to 999",
    ),
    (
        "devices:\n- path: \"/dev/dri/renderD128\"\n  type: \"NVIDIA_MPS\"\n  virtual_number: four\n",
        4,
        "devices[0].virtual_number: ",
    ),
];

fn said(machine: &Machine, arguments: &str) -> String {
    let output = machine.run(&["sh", "-c", &format!("{ON_HOST} yunion-mpsctl {arguments} 2>&1")]);
    text(&output.stdout).split_whitespace().collect::<Vec<_>>().join(" ")
}

fn corrected(machine: &Machine) {
    machine.write(DEVICE_FILE, RIGHT);
    machine.sh(&format!("systemctl reset-failed {SERVICE}; systemctl restart {SERVICE}"));
    is_ready(machine);
    assert_eq!(devices(machine), DEVICES);
}

fn guide(machine: &mut Machine) {
    new_host(machine);
    // The platform's guide misspells the directory of the platform's configuration as `yunin`. The service does not read a
    // `host.conf` in that directory.
    machine.sh(&format!(
        "cd {HOST}/sysroot/etc; mkdir yunin; mv yunion/host.conf yunin; echo 'hostname: host1' >yunion/host.conf
         systemctl reset-failed {SERVICE} 2>/dev/null || :; systemctl start {SERVICE}"
    ));
    let nothing = "no file sets enable_cuda_mps; files that were read: /etc/yunion/host.conf; files that do \
                   not exist: ";
    for command in ["list", "status", &format!("check --sysroot {HOST}/sysroot")] {
        let said = said(machine, command);
        assert!(said.contains(nothing), "{command}: {said}");
    }
    machine.sh(&format!("cd {HOST}/sysroot/etc; mv yunin/host.conf yunion; rmdir yunin"));
    corrected(machine);

    for (file, line, words) in SLIPS {
        machine.write(DEVICE_FILE, file);
        let cursor = machine.cursor();
        machine.complained(&["systemctl", "restart", SERVICE]);
        let answer = format!("/etc/yunion/host_container_device.yml:{line}: {words}");
        let messages = machine.messages(&cursor);
        assert!(messages.iter().any(|message| message.contains(&answer)), "{answer}: {messages:#?}");
        let said = said(machine, &format!("check --sysroot {HOST}/sysroot"));
        assert!(said.contains(&answer), "{answer}: {said}");
        corrected(machine);
    }

    // If an administrator has added the host to the platform as an AI node, the platform has written entries with the type
    // `NVIDIA_GPU_SHARE`.
    machine.write(DEVICE_FILE, &RIGHT.replace("NVIDIA_MPS", "NVIDIA_GPU_SHARE"));
    machine.sh(&format!("systemctl restart {SERVICE}"));
    let answer = "00:06.0 has the type NVIDIA_GPU_SHARE in /etc/yunion/host_container_device.yml:2; write type: NVIDIA_MPS";
    wait_for(answer, || said(machine, "status").contains(answer).then_some(()));
    corrected(machine);
}
