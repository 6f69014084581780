//! Names the clients of control daemons before the service ends the control daemons with their clients.

use mps_core::register::KnownClient;
use mps_core::terms::DaemonId;

use super::Daemon;
use crate::message::{Message, Subject};
use crate::tenants::describe::describe as describe_clients;

impl Daemon {
    /// Names the clients of the control daemons in `doomed` in the journal, in an event and in the status line, if
    /// there are any. `cause` says in words why the control daemons end.
    pub(super) async fn name_clients(&mut self, cause: &str, doomed: &[DaemonId]) {
        let Some(shutdown_report) = describe(cause, self.fleet.users_of(doomed).await) else { return };
        Message::ClientsEnd.log(Subject::default(), &shutdown_report);
        self.events.push(Message::ClientsEnd.event(shutdown_report.clone()));
        self.shutdown_report = shutdown_report;
        self.tell_service_manager(false);
    }
}

/// The report that names the clients which lose their work. None if no client loses work.
fn describe(cause: &str, clients: Vec<KnownClient>) -> Option<String> {
    Some(format!("{cause} ends the work of {clients}", clients = describe_clients(clients)?))
}
