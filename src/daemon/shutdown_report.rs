//! Names the clients that lose their work, before the service ends their control daemons.

use mps_core::register::KnownClient;
use mps_core::terms::DaemonId;

use super::Daemon;
use crate::message::{Message, Subject};
use crate::tenants::describe::describe as describe_clients;

impl Daemon {
    pub(super) async fn name_clients(&mut self, cause: &str, doomed: &[DaemonId]) {
        let Some(shutdown_report) = describe(cause, self.fleet.users_of(doomed).await) else { return };
        Message::ClientsEnd.log(Subject::default(), &shutdown_report);
        self.events.push(Message::ClientsEnd.event(shutdown_report.clone()));
        self.shutdown_report = shutdown_report;
        self.tell_service_manager(false);
    }
}

fn describe(cause: &str, clients: Vec<KnownClient>) -> Option<String> {
    Some(format!("{cause} ends the work of {clients}", clients = describe_clients(clients)?))
}
