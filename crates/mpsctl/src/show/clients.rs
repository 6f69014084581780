//! `yunion-mpsctl clients`.

use std::io::Write;

use crate::show::columns::{CLIENTS, table_of};
use crate::show::health::describe_state;
use crate::show::list::gpu_name;
use crate::show::table::{prose, width};
use crate::{Result, print_json};
use common::bus::proxy::{DaemonProxy, Listed};
use common::bus::rows::{Client, Service};
use common::published::snapshot::State;

pub(crate) async fn clients(daemon: &DaemonProxy, wide: bool, json: bool, out: &mut dyn Write) -> Result<()> {
    let listed = daemon.clients().await?;
    if json {
        return print_json(out, &listed);
    }
    if listed.is_empty() {
        writeln!(out, "{}", prose(&why_none(&*daemon.service().await?)))?;
        return Ok(());
    }
    let gpus = daemon.gpus().await?;
    let named = |one: &Listed<Client>| Client { gpu: gpu_name(&one.gpu, &gpus), ..Client::clone(one) };
    let named: Vec<Client> = listed.iter().map(named).collect();
    writeln!(out, "{}", table_of(CLIENTS, &named, wide).shorten(width()))?;
    let bypassing = listed.iter().filter(|one| one.bypass).count();
    if bypassing > 0 {
        let (use_a_gpu, programs) =
            if bypassing == 1 { ("uses", "this process") } else { ("use", "these processes") };
        let said = format!(
            "BYPASS: {bypassing} of these processes {use_a_gpu} a GPU without an MPS server of this \
             service; no limit holds for {programs}."
        );
        writeln!(out, "\n{}", prose(&said))?;
    }
    let waiting = listed.iter().filter(|one| one.waiting).count();
    if waiting > 0 {
        let wait = if waiting == 1 { "waits" } else { "wait" };
        let said = format!(
            "WAITS: {waiting} of these processes {wait} for a server; the events in yunion-mpsctl status \
             name the reason."
        );
        writeln!(out, "\n{}", prose(&said))?;
    }
    Ok(())
}

/// Explains an empty list of clients by the state of the service, if the state can be the reason.
fn why_none(service: &Service) -> String {
    match service.state.known() {
        Some(State::Ready) => "No clients: no process uses a GPU that is served.".to_owned(),
        // The control daemon of another program may serve a GPU of a degraded service, and the service does not know the
        // clients of that control daemon. So the text contains the reason of the state.
        Some(State::Degraded) => format!(
            "No clients of this service: no process uses a GPU that it serves. Note that {state}",
            state = describe_state(service)
        ),
        _ => format!("No clients of this service: {state}", state = describe_state(service)),
    }
}
