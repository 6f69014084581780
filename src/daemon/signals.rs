//! The signals that the service handles.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The three signals that stop the service, and SIGHUP, which reloads its configuration.
pub(super) fn listen() -> io::Result<([Signal; 3], Signal)> {
    let [terminate, interrupt, quit] = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::quit()];
    Ok(([signal(terminate)?, signal(interrupt)?, signal(quit)?], signal(SignalKind::hangup())?))
}

pub(super) async fn any([terminate, interrupt, quit]: &mut [Signal; 3]) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        _ = quit.recv() => {}
    }
}
