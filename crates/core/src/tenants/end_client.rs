//! Ends one client's GPU work.

use super::client_shell::{ClientEnd, ClientShell};
use crate::Permit;
use crate::mps::ServerStatus;

/// Ends the GPU work of one client at one of its servers. A client that is stopped or frozen is continued first, and again each
/// time that it stops before the control daemon answers. The service never kills the client, since its death could cause a
/// fault for the server's other clients. If the server handles a fatal GPU error, the service does nothing. The control daemon
/// would wait for the client and answer no other request (measured: 32 s, until the client ended).
pub async fn end_client<S: ClientShell>(
    shell: &mut S,
    control: &S::Control,
    server: u32,
    held: &S::Held,
    may_end: Permit,
) -> ClientEnd {
    match shell.server_status(control, server).await {
        Ok(ServerStatus::Fault) => return ClientEnd::Faulted,
        Ok(_) => {}
        Err(why) => return ClientEnd::NotAsked(why),
    }
    let going_on = match shell.go_on(held).await {
        Ok(going_on) => going_on,
        Err(why) if shell.is_alive(held) => return ClientEnd::StaysStopped(why),
        Err(_) => return ClientEnd::NotThere,
    };
    // `held` was opened before this check. If its process has ended, the PID may belong to another process, which must not be
    // ended.
    if !shell.is_alive(held) {
        return ClientEnd::NotThere;
    }
    shell.terminate_client(control, server, going_on, may_end).await
}
