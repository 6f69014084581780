//! `yunion-mpsctl reload` and `yunion-mpsctl apply`.

use std::io::Write;

use serde_json::json;

use crate::show::table::{Shown, prose};
use crate::{Result, print_json};
use common::bus::proxy::DaemonProxy;

pub(crate) async fn apply(daemon: &DaemonProxy, force: bool, json: bool, out: &mut dyn Write) -> Result<()> {
    daemon.apply(force).await?;
    if json {
        return print_json(out, &json!({"applied": true, "forced": force}));
    }
    writeln!(out, "No change of a control daemon waits for clients any more.")?;
    Ok(())
}

pub(crate) async fn reload(daemon: &DaemonProxy, json: bool, out: &mut dyn Write) -> Result<()> {
    let generation = daemon.reload().await?;
    let service = daemon.service().await?;
    let (state, reason) = (service.state.shown(), &service.state_reason);
    if json {
        let answer = json!({"generation": generation, "state": state, "state_reason": reason});
        return print_json(out, &answer);
    }
    writeln!(
        out,
        "The configuration was read again and is in force: generation {generation}, state {state}."
    )?;
    if !reason.is_empty() {
        writeln!(out, "{}", prose(reason))?;
    }
    Ok(())
}
