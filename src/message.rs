//! The messages on which an administrator acts. Each kind has its own `MESSAGE_ID` in the journal. `journalctl -x` finds an
//! explanation by this id (`packaging/journal`), and alerts find the message.

use std::fmt::Display;

use tracing::Level;

use common::published::events::Event;

/// A kind of message. Its `MESSAGE_ID` must never change, since the catalogs of other versions and the alerts of administrators
/// use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Message {
    /// Every configured GPU is served.
    ServiceReady,
    /// Some GPU is not served, or something needs an administrator.
    ServiceDegraded,
    /// No GPU is served.
    ServiceFailed,
    ConfigurationRefused,
    /// A configured GPU is missing, or can't be served in its present state.
    GpuNotServed,
    /// The driver does not list a GPU that is served.
    GpuUnreachable,
    CriticalError,
    ServerFault,
    /// The clients that a fatal GPU error has hit.
    ClientsHit,
    ServerFailed,
    /// A control daemon has died, or could not be started. The service tries again.
    ControlDaemonFailed,
    /// A control daemon can't be started or replaced until something else changes, such as the end of its clients.
    ControlDaemonWaits,
    Bypass,
    OverBudget,
    /// Clients have lost their work because their slice was over its budget.
    CutBack,
    /// Clients lose their work: the service stops, MPS is disabled, a change is forced, or a control daemon has ended.
    ClientsEnd,
    ComputeModeStays,
}

/// The things that a message is about. Each known value becomes a field of the message in the journal.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Subject<'a> {
    pub(crate) control: Option<&'a str>,
    pub(crate) server: Option<u32>,
    /// The number of the GPU among the GPUs of its control daemon, from 0.
    pub(crate) ordinal: Option<usize>,
    pub(crate) gpu: Option<&'a str>,
    pub(crate) slice: Option<&'a str>,
    pub(crate) xid: Option<u64>,
}

impl<'a> Subject<'a> {
    pub(crate) fn gpu(uuid: &'a str) -> Self {
        Self { gpu: Some(uuid), ..Self::default() }
    }
}

impl Message {
    fn id(self) -> &'static str {
        match self {
            Self::ServiceReady => "c026232c7047440a84b6f9e477130c55",
            Self::ServiceDegraded => "291e469758344a35a1f4b5133cc5ae6a",
            Self::ServiceFailed => "6477099a3b0343d3928dd53f406938e9",
            Self::ConfigurationRefused => "ec90e16fdebb4b67b510bf1af0b35ff9",
            Self::GpuNotServed => "263caf218236496da5f7b7c29ee2e886",
            Self::GpuUnreachable => "12551244d7114580b5f8c54cbac4e3ab",
            Self::CriticalError => "2d2069897d8e4e79888ebc79ae1510f0",
            Self::ServerFault => "939d79c2708e4522b48521f8aad3f48e",
            Self::ClientsHit => "57e7805926274fe582da0a03f05896fd",
            Self::ServerFailed => "c836faf54aa145f8aa175bc46d3d86c9",
            Self::ControlDaemonFailed => "f7779102edd04208a50ce6a74cd46996",
            Self::ControlDaemonWaits => "79903a212a1346cba317a5795d7ca43d",
            Self::Bypass => "9bb7249d4ded43d7aa3b5a3bbeace3db",
            Self::OverBudget => "f595f3f7073844de93b404ee7d7b8aef",
            Self::CutBack => "61c1fb17ab414c1aa60537b6700c840c",
            Self::ClientsEnd => "80c66a3d2d324bf28b2ba614a589963e",
            Self::ComputeModeStays => "51e6ee23f095479ea67759b068632422",
        }
    }

    fn level(self) -> Level {
        match self {
            Self::ServiceReady => Level::INFO,
            Self::ServiceFailed | Self::ConfigurationRefused | Self::CriticalError | Self::ClientsHit => {
                Level::ERROR
            }
            Self::ServiceDegraded
            | Self::GpuNotServed
            | Self::GpuUnreachable
            | Self::ServerFault
            | Self::ServerFailed
            | Self::ControlDaemonFailed
            | Self::ControlDaemonWaits
            | Self::Bypass
            | Self::OverBudget
            | Self::CutBack
            | Self::ClientsEnd
            | Self::ComputeModeStays => Level::WARN,
        }
    }

    pub(crate) fn event(self, text: String) -> Event {
        let fault = matches!(
            self,
            Self::CriticalError
                | Self::ServerFault
                | Self::ClientsHit
                | Self::ServerFailed
                | Self::ClientsEnd
        );
        Event { fault, ..Event::now(text) }
    }

    /// Logs a line about one of the clients that a message names. So `journalctl` finds the client by its PID.
    pub(crate) fn log_client(about: Subject<'_>, client: u32, text: impl Display) {
        tracing::info!(
            mps_control = about.control,
            mps_server_pid = about.server.map(u64::from),
            mps_client_pid = client,
            gpu_uuid = about.gpu,
            "{text}"
        );
    }

    pub(crate) fn log(self, about: Subject<'_>, text: impl Display) {
        // `tracing::event!` needs a constant level, so the macro repeats the call for each level.
        macro_rules! event {
            ($level:ident) => {
                tracing::event!(
                    Level::$level,
                    message_id = self.id(),
                    mps_control = about.control,
                    mps_server_pid = about.server.map(u64::from),
                    mps_device = about.ordinal.and_then(|ordinal| u64::try_from(ordinal).ok()),
                    gpu_uuid = about.gpu,
                    mps_slice = about.slice,
                    xid = about.xid,
                    "{text}"
                )
            };
        }
        match self.level() {
            Level::ERROR => event!(ERROR),
            Level::WARN => event!(WARN),
            _ => event!(INFO),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Message; 17] = [
        Message::ServiceReady,
        Message::ServiceDegraded,
        Message::ServiceFailed,
        Message::ConfigurationRefused,
        Message::GpuNotServed,
        Message::GpuUnreachable,
        Message::CriticalError,
        Message::ServerFault,
        Message::ClientsHit,
        Message::ServerFailed,
        Message::ControlDaemonFailed,
        Message::ControlDaemonWaits,
        Message::Bypass,
        Message::OverBudget,
        Message::CutBack,
        Message::ClientsEnd,
        Message::ComputeModeStays,
    ];

    /// The table in `docs/journal.md` has each kind of message, with the priority that `tracing_journald` gives its level.
    #[test]
    fn the_page_has_each_kind_with_its_priority() {
        let page = include_str!("../docs/journal.md");
        let rows = ALL.map(|message| {
            let priority = match message.level() {
                Level::ERROR => 3,
                Level::WARN => 4,
                _ => 5,
            };
            format!("| `{}` | {priority} |", message.id())
        });
        let (_, table) = page.split_once("\n| `MESSAGE_ID` | priority | message |\n").unwrap();
        let table = table.lines().skip(1).take_while(|line| line.starts_with('|'));
        let beginnings: Vec<&str> = table.map(|line| &line[..line.rfind(" | ").unwrap() + 2]).collect();
        assert_eq!(beginnings, rows);
    }
}
