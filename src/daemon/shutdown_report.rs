//! Names the clients of control daemons before the service ends both.

use std::time::Duration;

use tokio::time::timeout;

use super::Daemon;
use crate::message::{Message, Subject};
use crate::register::Clients;
use crate::supervisor::nvml_worker::NvmlWorker;
use crate::tenants::clients::{self, ServingDaemon};
use crate::tenants::describe::describe as describe_clients;
use common::published::client::ClientView;
use common::published::events::Event;

/// The time for the list of clients. It takes milliseconds. A control daemon that hangs must not hold up its own end.
const PATIENCE: Duration = Duration::from_secs(3);

/// A control daemon that ends with its clients: its id, and the way to list them or the reason why there is none.
pub(super) type Doomed = (String, Result<ServingDaemon, String>);

impl Daemon {
    /// Names the clients of these control daemons in the journal, in an event and in the status line, if there are any.
    /// `cause` is whatever ends them, in words.
    pub(super) async fn name_clients(&mut self, cause: &str, doomed: Vec<Doomed>) {
        // A stopped control daemon would not name its clients.
        for continued in self.fleet.continue_stopped() {
            tracing::warn!("{continued}");
            self.events.push(Event::now(continued));
        }
        let (clients, unknown) = list(doomed, self.fleet.clients(), self.fleet.nvml()).await;
        let Some(shutdown_report) = describe(cause, &clients, &unknown) else { return };
        Message::ClientsEnd.log(Subject::default(), &shutdown_report);
        self.events.push(Message::ClientsEnd.event(shutdown_report.clone()));
        self.shutdown_report = shutdown_report;
        self.tell_service_manager(false);
    }
}

/// The clients of all these control daemons, and the control daemons with clients that could not be listed, with the
/// reasons. Each is asked by itself: a control daemon that hangs must not hide the clients of the others.
async fn list(
    doomed: Vec<Doomed>,
    known: &Clients,
    nvml: &NvmlWorker,
) -> (Vec<ClientView>, Vec<(String, String)>) {
    let ask = |(id, serving): Doomed| {
        let (known, nvml) = (known.clone(), nvml.clone());
        let listed = async move {
            let listed = clients::list_served(serving?, &known, nvml);
            timeout(PATIENCE, listed)
                .await
                .unwrap_or_else(|_| Err(format!("no answer within {} s", PATIENCE.as_secs())))
        };
        (id, tokio::spawn(listed))
    };
    let asked: Vec<_> = doomed.into_iter().map(ask).collect();
    let (mut clients, mut unknown) = (Vec::new(), Vec::new());
    for (id, listed) in asked {
        match listed.await.unwrap_or_else(|error| Err(error.to_string())) {
            Ok(listed) => clients.extend(listed),
            Err(reason) => unknown.push((id, reason)),
        }
    }
    (clients, unknown)
}

/// None if no work is lost.
fn describe(cause: &str, clients: &[ClientView], unknown: &[(String, String)]) -> Option<String> {
    let named = describe_clients(clients.iter().map(|view| view.client.clone()));
    let unknown = unknown.first().map(|(id, reason)| {
        let others = match unknown.len() {
            1 => String::new(),
            all => format!(" and {} more", all.saturating_sub(1)),
        };
        format!("the clients of control daemon {id}{others} could not be listed: {reason}")
    });
    match (named, unknown) {
        (None, None) => None,
        (Some(named), None) => Some(format!("{cause} ends the work of {named}")),
        (None, Some(unknown)) => Some(format!("{cause} ends control daemons with their clients; {unknown}")),
        (Some(named), Some(unknown)) => Some(format!("{cause} ends the work of {named}; {unknown}")),
    }
}

#[cfg(test)]
mod tests {
    use mps_core::register::KnownClient;
    use mps_core::terms::ProcessId;

    use super::*;

    fn client(pid: u32) -> ClientView {
        let process = ProcessId { pid, start_time: 1 };
        ClientView {
            client: KnownClient { user: Some("root".to_owned()), ..KnownClient::only(process) },
            bypass: false,
            waiting: false,
            command: "python3".to_owned(),
            gpu_uuid: "GPU-1".to_owned(),
            memory_mib: None,
            since: None,
        }
    }

    #[test]
    fn whoever_is_not_known_is_not_forgotten() {
        let silent = |ids: &[&str]| -> Vec<(String, String)> {
            ids.iter().map(|id| ((*id).to_owned(), "no answer".to_owned())).collect()
        };
        assert_eq!(describe("the stop", &[], &[]), None);
        for (clients, unknown, expected) in [
            (vec![client(7)], silent(&[]), "the stop ends the work of 1 client: PID 7 of user root"),
            (
                vec![],
                silent(&["GPU-1"]),
                "the stop ends control daemons with their clients; the clients of control daemon GPU-1 could not be \
                 listed: no answer",
            ),
            (
                vec![client(7)],
                silent(&["GPU-1", "GPU-2", "GPU-3"]),
                "the stop ends the work of 1 client: PID 7 of user root; the clients of control daemon GPU-1 and 2 \
                 more could not be listed: no answer",
            ),
        ] {
            assert_eq!(describe("the stop", &clients, &unknown).as_deref(), Some(expected));
        }
    }
}
