//! Finds processes of a simulated host by their arguments or their environment.

use std::fs;

use super::host::{Host, emulated, stat_fields};

/// Returns the PIDs of the control daemons that run in the foreground, as the service starts them.
pub(crate) fn control_daemons(host: &Host) -> Vec<u32> {
    let mut found = with_arguments(host, |arguments| {
        arguments.first().is_some_and(|name| name.ends_with("/nvidia-cuda-mps-control"))
            && arguments.iter().any(|argument| argument == "-f")
    });
    // A control daemon forks a child, which has the same arguments until it executes the server. Such a child is no control
    // daemon.
    let all = found.clone();
    found.retain(|pid| {
        let parent = stat_fields(*pid).and_then(|fields| fields[1].parse().ok());
        parent.is_some_and(|parent| !all.contains(&parent))
    });
    found
}

/// Returns the PIDs of the service's children that have not become control daemons yet.
pub(crate) fn launchers(host: &Host) -> Vec<u32> {
    with_arguments(host, |arguments| arguments.get(1).is_some_and(|argument| argument == "launch-control"))
}

pub(crate) fn arguments(pid: u32) -> Vec<String> {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let line = line.strip_suffix(b"\0").unwrap_or(&line);
    let words = line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
    // The kernel puts the emulator and the path of the program before the arguments of an emulated program.
    words.skip(if emulated() { 2 } else { 0 }).collect()
}

fn with_arguments(host: &Host, wanted: impl Fn(&[String]) -> bool) -> Vec<u32> {
    host.processes().into_iter().filter(|pid| wanted(&arguments(*pid))).collect()
}

pub(crate) fn processes_with(variable: &str) -> Vec<u32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter(|pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.split(|byte| *byte == 0).any(|one| one == variable.as_bytes())
    })
    .collect()
}
