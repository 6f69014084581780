//! Parses the answers of a control daemon.

use std::collections::BTreeSet;

use common::host::driver::is_unknown_command;
use mps_core::mps::{Client, ClientPids, ServerStatus};
use mps_core::tenants::ClientEnd;

/// Parses an answer with several lists of PIDs, each after a line with a percentage. The lists are the clients of each server
/// in `servers`, and at the end all servers. A server that has ended has no clients.
pub(super) fn parse_client_lists(
    answer: &str,
    servers: &BTreeSet<u32>,
) -> Option<(ClientPids, BTreeSet<u32>)> {
    let mut lists: Vec<BTreeSet<u32>> = Vec::new();
    for line in answer.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if line.contains('.') {
            lists.push(BTreeSet::new());
        } else if parse_status(line) != Some(ServerStatus::Gone) {
            lists.last_mut()?.insert(line.parse().ok()?);
        }
    }
    let there = lists.pop()?;
    let clients = || servers.iter().copied().zip(lists.iter().cloned()).collect();
    (lists.len() == servers.len()).then(|| (clients(), there))
}

pub(super) fn parse_status(answer: &str) -> Option<ServerStatus> {
    match answer.trim() {
        "INITIALIZING" => Some(ServerStatus::Initializing),
        "ACTIVE" => Some(ServerStatus::Active),
        "FAULT" => Some(ServerStatus::Fault),
        other if other.starts_with("Server") && other.ends_with("not found") => Some(ServerStatus::Gone),
        other if is_unknown_command(other) => Some(ServerStatus::Unsupported),
        _ => None,
    }
}

pub(super) fn parse_terminated(answer: &str) -> Option<ClientEnd> {
    let mut lines = answer.lines().map(str::trim).filter(|line| !line.is_empty());
    let reason = lines.next()?;
    match (reason, lines.next_back()) {
        ("0", None) => Some(ClientEnd::Done),
        (reason, Some("1")) if reason.starts_with("Invalid process") => Some(ClientEnd::NotThere),
        (reason, Some("1")) if reason.starts_with("Server") && reason.contains("not found") => {
            Some(ClientEnd::NotThere)
        }
        _ => None,
    }
}

pub(super) fn parse_clients(answer: &str) -> Option<Vec<Client>> {
    let mut lines = answer.lines().filter(|line| !line.trim().is_empty());
    match lines.next() {
        // An empty answer or `Server not found` means that there is no server, so there is no client.
        None => return Some(Vec::new()),
        Some(first) if first.trim() == "Server not found" => return Some(Vec::new()),
        Some(header)
            if header.split_whitespace().eq(["PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND"]) => {}
        Some(_) => return None,
    }
    // A program with a line break in its name puts extra lines into the table. Lines that are no rows are skipped.
    Some(lines.filter_map(parse_client).collect())
}

/// Parses a row of the answer to `ps` up to the GPU. The rest of the row is not parsed, since a tenant can choose its text.
fn parse_client(line: &str) -> Option<Client> {
    let mut fields = line.split_whitespace();
    let pid = fields.next()?.parse().ok()?;
    let id = Some(fields.next()?.parse().ok()?);
    let server = fields.next()?.parse().ok()?;
    let gpu_prefix = fields.next()?.to_owned();
    Some(Client { pid, id, server, gpu_prefix })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::error::unexpected;
    use super::*;

    // The answers in these tests were recorded from the control daemons of drivers 535, 550, 555 and 580.

    #[test]
    fn server_statuses() {
        assert_eq!(parse_status("ACTIVE"), Some(ServerStatus::Active));
        assert_eq!(parse_status("INITIALIZING"), Some(ServerStatus::Initializing));
        assert_eq!(parse_status("FAULT"), Some(ServerStatus::Fault));
        assert_eq!(parse_status("Server 1 not found"), Some(ServerStatus::Gone));
        assert_eq!(parse_status("Unknown command \"get_server_status\""), Some(ServerStatus::Unsupported));
        assert_eq!(parse_status("garbage"), None);
    }

    #[test]
    fn client_tables() {
        assert_eq!(parse_clients("Server not found"), Some(vec![]));
        assert_eq!(parse_clients(""), Some(vec![]));
        let table = "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        \n\
                     1153      33        939            GPU-168acfc9-c926-5401    4026531836     /tmp/work      ";
        let client =
            Client { pid: 1153, id: Some(33), server: 939, gpu_prefix: "GPU-168acfc9-c926-5401".to_owned() };
        assert_eq!(parse_clients(table), Some(vec![client]));
        let blank = "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        \n\
            3523      1         3526           GPU-76aef7ff-372d-2432                   cuda-client    ";
        let pids = |table: &str| parse_clients(table).map(|all| all.iter().map(|one| one.pid).collect());
        assert_eq!(pids(blank), Some(vec![3523]));
        let broken = format!("{blank}\nb/c\n3524 2 3526 GPU-76aef7ff-372d-2432 4026531836 other");
        assert_eq!(pids(&broken), Some(vec![3523, 3524]));
        assert_eq!(pids("PID ID SERVER DEVICE NAMESPACE COMMAND\nx 1 2 G 3 c"), Some(vec![]));
        assert_eq!(pids("garbage"), None);
    }

    #[test]
    fn client_lists() {
        let parsed = |answer, servers: &[u32]| parse_client_lists(answer, &servers.iter().copied().collect());
        assert_eq!(parsed("100.0", &[]), Some((ClientPids::new(), BTreeSet::new())));
        assert_eq!(parsed("100.0\n939", &[]), Some((ClientPids::new(), BTreeSet::from([939]))));
        let clients = ClientPids::from([(939, BTreeSet::from([1153, 1154])), (944, BTreeSet::new())]);
        let servers = BTreeSet::from([939, 944]);
        let answer = "100.0\n1153\n1154\n1153\n100.0\n100.0\n939\n944";
        assert_eq!(parsed(answer, &[939, 944]), Some((clients, servers)));
        let gone = ClientPids::from([(1, BTreeSet::new())]);
        assert_eq!(parsed("100.0\nServer 1 not found\n100.0", &[1]), Some((gone, BTreeSet::new())));
        for other in ["", "939", "100.0\n1153", "100.0\ngarbage\n100.0\n939", "1153\n100.0\n939"] {
            assert_eq!(parsed(other, &[939]), None, "{other:?}");
        }
    }

    #[test]
    fn a_client_without_a_gpu_is_on_none() {
        let on = |gpu_prefix: &str| {
            Client { pid: 1, id: None, server: 2, gpu_prefix: gpu_prefix.to_owned() }
                .is_on("GPU-76aef7ff-372d")
        };
        assert!(on("GPU-76aef7ff") && !on("GPU-86") && !on(""));
    }

    #[test]
    fn terminated_clients() {
        assert_eq!(parse_terminated("0"), Some(ClientEnd::Done));
        assert_eq!(parse_terminated("Invalid process 99999!\n1"), Some(ClientEnd::NotThere));
        assert_eq!(parse_terminated("Server 1 not found!\n1"), Some(ClientEnd::NotThere));
        for other in ["", "1", "00", "0\n1", "Unknown command \"terminate_client\"", "Invalid process 1!\n0"]
        {
            assert_eq!(parse_terminated(other), None, "{other:?}");
        }
    }

    proptest! {
        #[test]
        fn no_answer_makes_the_parsers_panic(answer in "\\PC{0,300}(\n\\PC{0,80}){0,5}") {
            let _ = (parse_status(&answer), parse_clients(&answer));
            let _ = (parse_terminated(&answer), parse_client_lists(&answer, &BTreeSet::from([939])));
            let _ = unexpected("ps", &answer, "").to_string();
        }
    }
}
