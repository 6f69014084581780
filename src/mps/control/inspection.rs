//! The commands that read and set a control daemon's limits and list its servers, and the parsing of the answers. Several
//! commands go to the control daemon in one conversation.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::iter::Peekable;

use common::host::driver::is_unknown_command;
use mps_core::mps::{Inspection, Limits, ServerStatus};

use super::SERVERS;
use super::answers::parse_status;

const SHOWN_CHARACTERS: usize = 40;

/// The servers with limits to read: the PIDs in `at`, and None for servers that are started later. Each server comes with its
/// wanted memory limits, in MiB by the ordinals of the GPUs. A running server reports only limits that it enforces, so only
/// these limits are read from it.
fn asked(at: &[u32], limits: Option<&Limits>) -> Vec<(Option<u32>, BTreeMap<usize, u64>)> {
    let Some(limits) = limits else { return vec![(None, BTreeMap::new())] };
    let mut enforced = limits.memory_mib.clone();
    enforced.retain(|ordinal, _| limits.enforced.contains(ordinal));
    let servers = if enforced.is_empty() { &[] } else { at };
    let of_servers = servers.iter().map(|server| (Some(*server), enforced.clone()));
    [(None, limits.memory_mib.clone())].into_iter().chain(of_servers).collect()
}

pub(super) fn commands(at: &[u32], limits: Option<&Limits>) -> String {
    let mut commands: String = at.iter().map(|server| format!("get_server_status {server}\n")).collect();
    for (server, memory_mib) in asked(at, limits) {
        let (default, target) = target(server);
        let _ = writeln!(commands, "get_{default}active_thread_percentage{target}");
        ask_for_memory(&mut commands, server, &memory_mib);
    }
    commands + SERVERS
}

fn ask_for_memory(commands: &mut String, server: Option<u32>, memory_mib: &BTreeMap<usize, u64>) {
    let (default, target) = target(server);
    for ordinal in memory_mib.keys() {
        let _ = writeln!(commands, "get_{default}device_pinned_mem_limit{target} {ordinal}");
    }
}

/// The two parts of a command that say which servers it is about: one server, or, for None, all servers that are started later.
fn target(server: Option<u32>) -> (&'static str, String) {
    server.map_or(("default_", String::new()), |server| ("", format!(" {server}")))
}

/// Parses the answer to [`commands`]. None if the answer is incomplete or has another form.
pub(super) fn parse(answer: &str, at: &[u32], limits: Option<&Limits>) -> Option<Inspection> {
    let mut lines = lines(answer);
    let statuses: Option<_> = at.iter().map(|server| Some((*server, parse_status(lines.next()?)?))).collect();
    let mut differences = BTreeMap::new();
    for (server, memory_mib) in asked(at, limits) {
        let wanted = limits.map(|limits| limits.thread_percentage);
        let found = differing(&mut lines, server, wanted, &memory_mib)?;
        if !found.is_empty() {
            differences.insert(server, found.join(", "));
        }
    }
    Some(Inspection { servers: pids(lines)?, statuses: statuses?, differences })
}

/// The commands of [`super::Control::set_limits`]. The control daemon answers a new thread percentage with the percentage that
/// now applies. It does not answer a new memory limit, so a further command reads the memory limit.
pub(super) fn setting(server: Option<u32>, limits: &Limits) -> String {
    let (default, target) = target(server);
    let mut commands =
        format!("set_{default}active_thread_percentage{target} {}\n", limits.thread_percentage);
    for (ordinal, mib) in &limits.memory_mib {
        let _ = writeln!(commands, "set_{default}device_pinned_mem_limit{target} {ordinal} {mib}M");
    }
    ask_for_memory(&mut commands, server, &limits.memory_mib);
    commands + SERVERS
}

/// The lines with which a correct answer to [`setting`] begins.
pub(super) fn set(limits: &Limits) -> Vec<String> {
    let memory = limits.memory_mib.values().map(|mib| as_read_back(*mib));
    [format!("{}.0", limits.thread_percentage)].into_iter().chain(memory).collect()
}

/// The servers in the answer to [`setting`]. None if the limits in the answer differ from `limits`. If the server has ended, maybe
/// between two commands, the answers to the commands that follow are errors, and the servers come after the last error.
pub(super) fn parse_set(answer: &str, limits: &Limits) -> Option<Vec<u32>> {
    let said: Vec<&str> = lines(answer).collect();
    let limits = set(limits);
    let servers_at = match said.iter().rposition(|line| is_gone(line)) {
        Some(last) => last + 1,
        None if said.iter().take(limits.len()).eq(&limits) => limits.len(),
        None => return None,
    };
    pids(said.into_iter().skip(servers_at))
}

fn lines(answer: &str) -> Peekable<impl Iterator<Item = &str>> {
    answer.lines().map(str::trim).filter(|line| !line.is_empty()).peekable()
}

fn is_gone(line: &str) -> bool {
    parse_status(line) == Some(ServerStatus::Gone)
}

fn pids<'a>(lines: impl Iterator<Item = &'a str>) -> Option<Vec<u32>> {
    lines.map(|line| line.parse().ok()).collect()
}

/// Reads the lines about one server, or about servers that are started later. Returns the limits that differ from the wanted
/// limits, in words.
fn differing<'a>(
    lines: &mut Peekable<impl Iterator<Item = &'a str>>,
    server: Option<u32>,
    wanted: Option<u8>,
    memory_mib: &BTreeMap<usize, u64>,
) -> Option<Vec<String>> {
    let mut found = Vec::new();
    let said = lines.next()?;
    if said.starts_with("Server") || is_unknown_command(said) {
        // The answer to the first command about a server is an error. The commands about the server's memory limits have the
        // same error as their answer, so these lines are skipped.
        lines.by_ref().take(memory_mib.len()).for_each(drop);
        return Some(found);
    }
    // The control daemon writes a percentage with a decimal point, and a PID without one.
    let percentage: f64 = said.parse().ok().filter(|_| said.contains('.'))?;
    if let Some(wanted) = wanted.filter(|wanted| (percentage - f64::from(*wanted)).abs() >= 0.05) {
        found.push(format!("active thread percentage {said} instead of {wanted}"));
    }
    // If a memory limit is not set, the control daemon writes no line for it. The next line is then a number, either a
    // percentage or a PID.
    let is_limit = |line: &&str| line.parse::<f64>().is_err() && (server.is_some() || !is_gone(line));
    let said: Vec<&str> = memory_mib.keys().map_while(|_| lines.next_if(is_limit)).collect();
    // The server has ended after the first answer.
    if said.iter().any(|line| is_gone(line)) {
        return Some(Vec::new());
    }
    if said.len() < memory_mib.len() {
        found.push("no device pinned memory limit on at least one device".to_owned());
        return Some(found);
    }
    let differing = memory_mib.iter().zip(said).filter(|((_, mib), said)| *said != as_read_back(**mib));
    found.extend(differing.map(|((ordinal, mib), said)| {
        let said: String = said.chars().take(SHOWN_CHARACTERS).collect();
        format!("device pinned memory limit {said} instead of {mib} MiB on device {ordinal}")
    }));
    Some(found)
}

/// The control daemon reports a memory limit below 1 GiB in MiB, and a larger limit in whole GiB.
fn as_read_back(mib: u64) -> String {
    if mib < 1024 { format!("{mib}M") } else { format!("{}G", mib / 1024) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    // The answers in these tests have the form of answers of drivers 535, 550, 555 and 580.

    fn limits() -> Limits {
        Limits { thread_percentage: 25, memory_mib: [(0, 35942), (1, 512)].into(), enforced: [0].into() }
    }

    #[test]
    fn one_conversation_asks_for_all() {
        let commands = commands(&[939], Some(&limits()));
        let expected = "get_server_status 939\nget_default_active_thread_percentage\n\
            get_default_device_pinned_mem_limit 0\nget_default_device_pinned_mem_limit 1\n\
            get_active_thread_percentage 939\nget_device_pinned_mem_limit 939 0\nget_server_list";
        assert_eq!(commands, expected);
        let setting = setting(Some(939), &limits());
        assert!(
            setting
                .starts_with("set_active_thread_percentage 939 25\nset_device_pinned_mem_limit 939 0 35942M")
        );
    }

    #[test]
    fn servers_with_their_statuses() {
        let look = |answer, at: &[u32]| parse(answer, at, None).map(|look| (look.servers, look.statuses));
        assert_eq!(look("100.0", &[]), Some((vec![], BTreeMap::new())));
        assert_eq!(look("100.0\n939\n944", &[]), Some((vec![939, 944], BTreeMap::new())));
        let statuses = [(939, ServerStatus::Active), (944, ServerStatus::Fault)].into();
        assert_eq!(look("ACTIVE\nFAULT\n100.0\n939\n944", &[939, 944]), Some((vec![939, 944], statuses)));
        let gone = [(7, ServerStatus::Gone)].into();
        assert_eq!(look("Server 7 not found\n100.0\n939", &[7]), Some((vec![939], gone)));
        let unknown = [(939, ServerStatus::Unsupported)].into();
        assert_eq!(
            look("Unknown command \"get_server_status\"\n100.0\n939", &[939]),
            Some((vec![939], unknown))
        );
        for other in ["", "939", "ACTIVE", "ACTIVE\ngarbage", "ACTIVE\n100.0\ngarbage"] {
            assert_eq!(look(other, &[939]), None, "{other:?}");
        }
    }

    #[test]
    fn limits_that_differ_are_described() {
        let look = |answer: &str| parse(answer, &[939], Some(&limits())).unwrap();
        let found = |answer: &str| {
            let look = look(answer);
            [None, Some(939)].map(|server| look.differences.get(&server).cloned().unwrap_or_default())
        };
        assert_eq!(found("ACTIVE\n25.0\n35G\n512M\n25.0\n35G\n939"), ["", ""]);
        assert_eq!(
            found("ACTIVE\n25.0\n1G\n512M\n7.0\n35G\n939"),
            [
                "device pinned memory limit 1G instead of 35942 MiB on device 0",
                "active thread percentage 7.0 instead of 25"
            ]
        );
        let none = "no device pinned memory limit on at least one device";
        assert_eq!(found("ACTIVE\n25.0\n35G\n25.0\n939"), [none, none]);
        // If a server has ended meanwhile, or if the driver does not know the command that reads a server's thread percentage,
        // no difference is reported.
        let gone = "Server 939 not found";
        assert_eq!(found(&format!("{gone}\n25.0\n35G\n512M\n{gone}\n{gone}")), ["", ""]);
        assert_eq!(look(&format!("ACTIVE\n25.0\n35G\n512M\n{gone}\n{gone}\n944")).servers, [944]);
        assert_eq!(found(&format!("ACTIVE\n25.0\n35G\n512M\n25.0\n{gone}\n944")), ["", ""]);
        let unknown = "Unknown command \"get_active_thread_percentage\"";
        assert_eq!(found(&format!("ACTIVE\n25.0\n35G\n512M\n{unknown}\n{unknown}\n939")), ["", ""]);
        let long = "x".repeat(9999);
        assert!(found(&format!("ACTIVE\n25.0\n{long}\n512M\n25.0\n35G\n939"))[0].len() < 200);
    }

    #[test]
    fn limits_that_are_set_are_read_back() {
        let set = |answer: &str| parse_set(answer, &limits());
        assert_eq!(set("25.0\n35G\n512M"), Some(vec![]));
        assert_eq!(set("25.0\n35G\n512M\n939"), Some(vec![939]));
        let gone = "Server 939 not found\n".repeat(3);
        assert_eq!(set(&gone), Some(vec![]));
        assert_eq!(set(&format!("{gone}944")), Some(vec![944]));
        assert_eq!(set(&format!("25.0\n{gone}944")), Some(vec![944]));
        for other in [
            "",
            "30.0\n35G\n512M",
            "25.0\n34G\n512M",
            "25.0\n35G",
            "25.0\n35G\n939",
            "Server 939 not found\n25.0",
        ] {
            assert_eq!(set(other), None, "{other:?}");
        }
    }

    #[test]
    fn limits_read_back_floored_to_gib() {
        for (mib, expected) in [(512, "512M"), (1023, "1023M"), (1024, "1G"), (5760, "5G"), (35942, "35G")] {
            assert_eq!(as_read_back(mib), expected);
        }
    }

    proptest! {
        #[test]
        fn no_answer_makes_the_parsers_panic(answer in "\\PC{0,300}(\n\\PC{0,80}){0,9}") {
            let _ = (parse(&answer, &[939], Some(&limits())), parse_set(&answer, &limits()));
        }

        #[test]
        fn no_like_answer_makes_the_parsers_panic(answer in "((ACTIVE|Server 1 not found|25\\.0|35G|939)\n){0,12}") {
            let _ = (parse(&answer, &[939, 944], Some(&limits())), parse_set(&answer, &limits()));
        }
    }
}
