//! Parses the lines of a control daemon's log.

use mps_core::mps::Meaning;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    pub writer: Option<Writer>,
    /// The line without its prefix, which has the time and the writer.
    pub text: String,
    pub meaning: Meaning,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Writer {
    Control(u32),
    Server(u32),
}

impl Line {
    /// Parsing never fails: an unknown line is ordinary text.
    pub(crate) fn parse(line: &str) -> Self {
        let (writer, text) = split_prefix(line).unwrap_or((None, line));
        let meaning = meaning(writer, text);
        Self { writer, text: text.to_owned(), meaning }
    }

    /// True if the line may explain why a control daemon or a server has ended. Of a control daemon's own lines, only a line
    /// about a failure may explain the end.
    pub(crate) fn may_explain_an_end(&self) -> bool {
        match (&self.meaning, self.writer) {
            (Meaning::Trouble, _) => true,
            (Meaning::Noise, _) | (_, Some(Writer::Control(_))) => false,
            _ => !self.text.trim().is_empty(),
        }
    }
}

/// Splits a line such as `[2026-11-21 02:13:53.814 Control 879] text` into the process that wrote it and the text. None if the
/// line has no such prefix, like the further lines of a control daemon's answer to a command.
fn split_prefix(line: &str) -> Option<(Option<Writer>, &str)> {
    let (prefix, text) = line.strip_prefix('[')?.split_once(']')?;
    let mut words = prefix.split_ascii_whitespace();
    let (_date, _time) = (words.next()?, words.next()?);
    let pid = words.next_back()?.parse().ok()?;
    let kind: Vec<&str> = words.collect();
    let writer = match kind.as_slice() {
        ["Control"] => Some(Writer::Control(pid)),
        // The process of a server writes `Other` in the prefix until it has started as a server. It writes `Legacy Server` if
        // it never starts as a server.
        ["Server" | "Other"] | ["Legacy", "Server"] => Some(Writer::Server(pid)),
        _ => None,
    };
    Some((writer, text.strip_prefix(' ').unwrap_or(text)))
}

fn meaning(writer: Option<Writer>, text: &str) -> Meaning {
    let understood = match writer {
        Some(Writer::Server(server)) => said_by_server(server, text),
        Some(Writer::Control(_)) => said_by_control(text),
        None => None,
    };
    // The new process of a server writes `Starting new server`, sometimes under the name of the control daemon. So this line
    // counts from any writer.
    let understood = understood.or_else(|| server_starting(text));
    understood.or_else(|| trouble(writer, text)).unwrap_or(Meaning::Ordinary)
}

const OF_FAILURE: [&str; 9] =
    ["fatal", "fail", "error", "invalid", "cannot", "can't", "unable", "exception", "denied"];

/// Recognizes a line that reports a failure. The control daemon also logs each command, and for `ps` the table of clients.
/// Tenants choose texts in these lines, so the lines do not count as failures.
fn trouble(writer: Option<Writer>, text: &str) -> Option<Meaning> {
    let repeated = text.starts_with("Cmd:") || text.starts_with(|first: char| first.is_ascii_digit());
    if repeated && !matches!(writer, Some(Writer::Server(_))) {
        return None;
    }
    let text = text.to_ascii_lowercase();
    let mut words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '\'');
    words.any(|word| OF_FAILURE.iter().any(|begin| word.starts_with(begin))).then_some(Meaning::Trouble)
}

fn server_starting(text: &str) -> Option<Meaning> {
    let (server, uid) = text.strip_prefix("Starting new server ")?.split_once(" for user ")?;
    Some(Meaning::ServerStarting { server: server.parse().ok()?, uid: uid.trim().parse().ok()? })
}

fn said_by_control(text: &str) -> Option<Meaning> {
    // The control daemon writes these two lines after a process has connected without sending anything. The service connects in
    // this way to find out which process listens.
    if ["User did not send valid credentials", "Unable to accept connection"].contains(&text.trim_end()) {
        return Some(Meaning::Noise);
    }
    if let Some(rest) = text.strip_prefix("NEW SERVER ") {
        let (server, state) = rest.split_once(':')?;
        return (state.trim() == "Ready").then_some(Meaning::ServerReady(server.parse().ok()?));
    }
    if let Some(rest) = text.strip_prefix("NEW CLIENT ") {
        let (client, rest) = rest.split_once(" from user ")?;
        let (uid, rest) = rest.split_once(':')?;
        let client = client.parse().ok()?;
        return match rest.trim() {
            "Server already exists" => Some(Meaning::ClientAdmitted(client)),
            rest if rest.contains("push client to pending list") => {
                Some(Meaning::ClientPending { client, uid: uid.parse().ok()? })
            }
            _ => None,
        };
    }
    let (server, status) = text.strip_prefix("Server ")?.split_once(" exited with status ")?;
    Some(Meaning::ServerExited { server: server.parse().ok()?, status: status.trim().parse().ok()? })
}

fn said_by_server(server: u32, text: &str) -> Option<Meaning> {
    // The misspellings are NVIDIA's. The lines about an error-trigging process and about a sticky error come during a fault,
    // which other lines report.
    let noise = [
        "Server failed to recevie command with status 806",
        "Server was unable to shutdown due to",
        "All clients belonging to error trigging process",
        "The following client process have a sticky error set",
    ];
    if noise.iter().any(|noise| text.starts_with(noise)) || text.contains(" on the error-trigging process ") {
        return Some(Meaning::Noise);
    }
    if let Some(value) = text.strip_prefix("Active Threads Percentage set to ") {
        return Some(Meaning::ThreadPercentage { server, tenths: tenths(value.trim())? });
    }
    if let Some(rest) = text.strip_prefix("Device pinned memory limit for device ") {
        let (ordinal, rest) = rest.split_once(" set to 0x")?;
        let bytes = u64::from_str_radix(rest.strip_suffix(" bytes")?, 16).ok()?;
        return Some(Meaning::MemoryLimit { server, ordinal: ordinal.parse().ok()?, bytes });
    }
    if text.starts_with("Server is handling a fatal GPU error") {
        return Some(Meaning::FaultHandling { server });
    }
    if let Some((_, rest)) = text.split_once("Maximum number of clients (") {
        let (capacity, _) = rest.split_once(')')?;
        return Some(Meaning::ClientRefused { server, capacity: capacity.parse().ok()? });
    }
    if let Some(rest) = text.strip_prefix("Client process ") {
        let client = rest.strip_suffix(" disconnected")?;
        return Some(Meaning::ClientLeft(client.parse().ok()?));
    }
    let (client, rest) = text.strip_prefix("Client {PID: ")?.split_once(',')?;
    let client = client.parse().ok()?;
    if rest.contains("encountered a fatal GPU error") {
        return Some(Meaning::Fault { server, client });
    }
    let (_, rest) = rest.split_once("} on device ")?;
    let (ordinal, rest) = rest.split_once(' ')?;
    (rest == "to be torn down").then_some(Meaning::TornDown {
        server,
        client,
        ordinal: ordinal.parse().ok()?,
    })
}

/// Parses a percentage as tenths of a percent, so that `25.0` gives 250.
fn tenths(value: &str) -> Option<u32> {
    let (whole, part) = value.split_once('.').unwrap_or((value, "0"));
    let first = part.chars().next().and_then(|digit| digit.to_digit(10))?;
    whole.parse::<u32>().ok()?.checked_mul(10)?.checked_add(first)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn meaning_of(line: &str) -> Meaning {
        Line::parse(line).meaning
    }

    // These lines were recorded from control daemons and servers of drivers 535 to 580.
    #[test]
    #[expect(clippy::too_many_lines, reason = "a table")]
    fn recorded_lines() {
        let server = 939;
        for (line, expected) in [
            (
                "[2026-11-21 02:13:53.859 Control   939] Starting new server 939 for user 0",
                Meaning::ServerStarting { server, uid: 0 },
            ),
            ("[2026-11-21 02:13:54.006 Control   879] NEW SERVER 939: Ready", Meaning::ServerReady(939)),
            (
                "[2026-11-21 07:29:56.814 Control  2384] Server 2415 exited with status 1",
                Meaning::ServerExited { server: 2415, status: 1 },
            ),
            (
                "[2026-11-21 02:18:31.017 Server   939] Active Threads Percentage set to 25.0",
                Meaning::ThreadPercentage { server, tenths: 250 },
            ),
            (
                "[2026-11-21 03:04:52.619 Server   939] Device pinned memory limit for device 0 set to 0x8c6600000 bytes",
                Meaning::MemoryLimit { server, ordinal: 0, bytes: 35942 << 20 },
            ),
            (
                "[2026-11-21 02:18:24.236 Server   939] Client {PID: 807, Context: 1} encountered a fatal GPU error.",
                Meaning::Fault { server, client: 807 },
            ),
            (
                "[2026-11-21 02:18:24.236 Server   939] Server is handling a fatal GPU error.",
                Meaning::FaultHandling { server },
            ),
            (
                "[2026-11-21 02:18:24.236 Server   939] Client {PID: 822, Context ID: 1} on device 0 to be torn down",
                Meaning::TornDown { server, client: 822, ordinal: 0 },
            ),
            (
                "[2026-11-21 02:13:53.859 Control   879] NEW CLIENT 937 from user 1000: Server is not ready, push client to pending list",
                Meaning::ClientPending { client: 937, uid: 1000 },
            ),
            (
                "[2026-11-21 03:04:08.511 Server   939] Failed to accept new client. Maximum number of clients (48) reached.",
                Meaning::ClientRefused { server, capacity: 48 },
            ),
            (
                "[2026-11-21 02:24:24.137 Server   939] Client process 611 disconnected",
                Meaning::ClientLeft(611),
            ),
            ("[2026-11-21 02:13:53.859 Control   879] User did not send valid credentials", Meaning::Noise),
            ("[2026-11-22 09:30:08.912 Control   496] Unable to accept connection", Meaning::Noise),
            (
                "[2026-11-22 09:30:56.266 Server   513] All clients belonging to error trigging process 797 will be torn down",
                Meaning::Noise,
            ),
            (
                "[2026-11-22 09:30:56.266 Server   513] Client {PID: 797, Context ID: 1} on the error-trigging process 797 to be torn down",
                Meaning::Noise,
            ),
            (
                "[2026-11-22 09:30:56.266 Server   513] The following client process have a sticky error set:",
                Meaning::Noise,
            ),
            (
                "[2026-11-21 02:24:21.335 Server   939] Server failed to recevie command with status 806, assuming client {PID: 592, Context ID: 0} exit",
                Meaning::Noise,
            ),
            (
                "[2026-11-21 02:13:54.019 Control   879] NEW CLIENT 937 from user 0: Server already exists",
                Meaning::ClientAdmitted(937),
            ),
            ("Device Ordinal  PCI IDs        UUID", Meaning::Ordinary),
            (
                "[2024-04-29 11:22:10.440 Legacy Server    95] Failed to start : invalid argument",
                Meaning::Trouble,
            ),
            (
                "[2024-04-29 11:22:10.441 Control    73] Server encountered a fatal exception. Shutting down",
                Meaning::Trouble,
            ),
            (
                "[2026-11-21 02:24:21.335 Server   939] Server was unable to shutdown due to 2 active clients",
                Meaning::Noise,
            ),
            // A tenant chooses the name of a program, and any user may send any command. So a word such as `fail` in these
            // texts does not make the line a failure.
            ("[2026-11-21 02:14:03.189 Control   879] Cmd:fail", Meaning::Ordinary),
            (
                "[2026-11-21 02:14:03.190 Control   879] 1153  33  939  GPU-168acfc9  4026531836  ./fatal",
                Meaning::Ordinary,
            ),
            (
                "nvidia-cuda-mps-server: error while loading shared libraries: libcuda.so.1: cannot open shared object file",
                Meaning::Trouble,
            ),
        ] {
            assert_eq!(meaning_of(line), expected, "{line}");
        }
    }

    proptest! {
        #[test]
        fn no_percentage_makes_the_parser_panic(text in "[0-9.]{0,30}") {
            let _ = tenths(&text);
        }

        #[test]
        fn memory_limits_round_trip(ordinal in 0usize..64, mib in 0u64..(1 << 40)) {
            let line = format!(
                "[d t Server 5] Device pinned memory limit for device {ordinal} set to {:#x} bytes", mib << 20
            );
            prop_assert_eq!(meaning_of(&line), Meaning::MemoryLimit { server: 5, ordinal, bytes: mib << 20 });
        }
    }
}
