//! The processes of a simulated host that belong to its control daemons.

use std::fs;

use super::host::{Host, emulated, stat_fields};

/// The PIDs of a host's control daemons that run in the foreground.
pub(crate) fn control_daemons(host: &Host) -> Vec<u32> {
    let mut found = with_arguments(host, |arguments| {
        arguments.first().is_some_and(|name| name.ends_with("/nvidia-cuda-mps-control"))
            && arguments.iter().any(|argument| argument == "-f")
    });
    // The child process that a control daemon forks has the arguments of the control daemon until it executes the server, so
    // it is left out.
    let all = found.clone();
    found.retain(|pid| {
        let parent = stat_fields(*pid).and_then(|fields| fields[1].parse().ok());
        parent.is_some_and(|parent| !all.contains(&parent))
    });
    found
}

/// The PIDs of the service's child processes that wait to become control daemons.
pub(crate) fn launchers(host: &Host) -> Vec<u32> {
    with_arguments(host, |arguments| arguments.get(1).is_some_and(|argument| argument == "launch-control"))
}

/// The arguments of a process, the name of its program first.
pub(crate) fn arguments(pid: u32) -> Vec<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let line = line.strip_suffix(b"\0").unwrap_or(&line);
    let words = line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
    // For a program that an emulator runs, the kernel puts the emulator and the path of the program in front of the
    // arguments.
    words.skip(if emulated() { 2 } else { 0 }).collect()
}

fn with_arguments(host: &Host, wanted: impl Fn(&[String]) -> bool) -> Vec<u32> {
    host.processes().into_iter().filter(|pid| wanted(&arguments(*pid))).collect()
}

/// The PIDs of all processes that were started with this variable, `NAME=VALUE`, in their environment.
pub(crate) fn processes_with(variable: &str) -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|one| one == variable.as_bytes())
    })
    .collect()
}
