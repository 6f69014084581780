//! Passes a line of a control daemon's log on to the journal.

use tracing::Level;

use mps_core::mps::Meaning;

use super::meaning::{Line, Writer};

impl Line {
    /// Writes the line to the journal, with fields by which `journalctl` can filter.
    pub(crate) fn trace(&self, control_daemon: &str) {
        let text = self.text.as_str();
        let (server, client, ordinal) = self.subjects();
        let (server, client, ordinal) =
            (server.map(u64::from), client.map(u64::from), ordinal.and_then(|n| u64::try_from(n).ok()));
        macro_rules! pass_on {
            ($level:ident) => {
                tracing::$level!(
                    mps_control = control_daemon,
                    mps_server_pid = server,
                    mps_client_pid = client,
                    mps_device = ordinal,
                    "mps: {text}"
                )
            };
        }
        match self.level() {
            Level::WARN => pass_on!(warn),
            Level::INFO => pass_on!(info),
            _ => pass_on!(debug),
        }
    }

    pub(crate) fn level(&self) -> Level {
        match &self.meaning {
            Meaning::Ordinary | Meaning::Noise | Meaning::ClientAdmitted(_) | Meaning::ClientLeft(_) => {
                Level::DEBUG
            }
            Meaning::ServerExited { status: 0, .. } => Level::INFO,
            Meaning::Trouble | Meaning::ServerExited { .. } | Meaning::ClientRefused { .. } => Level::WARN,
            // Lines about faults have only the level INFO. The supervisor itself reports each fault once for each GPU, with the
            // content of all lines about it.
            _ => Level::INFO,
        }
    }

    /// The PID of the server, the PID of the client, and the ordinal of the GPU that the line is about.
    fn subjects(&self) -> (Option<u32>, Option<u32>, Option<usize>) {
        let server = match (&self.meaning, self.writer) {
            (
                Meaning::ServerStarting { server, .. }
                | Meaning::ServerReady(server)
                | Meaning::ServerExited { server, .. },
                _,
            ) => Some(*server),
            (_, Some(Writer::Server(writer))) => Some(writer),
            _ => None,
        };
        let client = match &self.meaning {
            Meaning::Fault { client, .. }
            | Meaning::TornDown { client, .. }
            | Meaning::ClientLeft(client)
            | Meaning::ClientPending { client, .. }
            | Meaning::ClientAdmitted(client) => Some(*client),
            _ => None,
        };
        let ordinal = match &self.meaning {
            Meaning::MemoryLimit { ordinal, .. } | Meaning::TornDown { ordinal, .. } => Some(*ordinal),
            _ => None,
        };
        (server, client, ordinal)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_writer_may_have_two_words() {
        let line =
            Line::parse("[2024-04-29 11:22:10.440 Legacy Server    95] Failed to start : invalid argument");
        assert_eq!((line.writer, line.level()), (Some(Writer::Server(95)), Level::WARN));
        assert_eq!(line.text, "Failed to start : invalid argument");
        assert_eq!(line.subjects().0, Some(95));
    }

    proptest! {
        #[test]
        fn no_line_makes_the_parser_panic(line in "\\PC{0,200}") {
            let _ = Line::parse(&line);
            let _ = Line::parse(&format!("[d t Server 1] {line}")).subjects();
        }
    }
}
