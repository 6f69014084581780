//! `yunion-mpsctl reload` and `yunion-mpsctl apply`.

use std::io::Write;

use clap::Args;
use serde_json::json;

use crate::ctl::show::table::printable;
use crate::ctl::{Error, print_json};
use crate::dbus::proxy::DaemonProxy;

#[derive(Debug, Args)]
pub(in crate::ctl) struct ReloadArguments {
    /// The generation and the state that are published now, as a JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(in crate::ctl) struct Arguments {
    /// Don't wait for clients: they lose their GPU (CUDA error 806)
    #[arg(long)]
    force: bool,
    /// What was done, as a JSON object
    #[arg(long)]
    json: bool,
}

pub(in crate::ctl) async fn apply(
    daemon: &DaemonProxy,
    arguments: &Arguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    daemon.apply(arguments.force).await?;
    if arguments.json {
        return print_json(out, &json!({"applied": true, "forced": arguments.force}));
    }
    writeln!(out, "Nothing waits to be applied any more.")?;
    Ok(())
}

pub(in crate::ctl) async fn reload(
    daemon: &DaemonProxy,
    arguments: &ReloadArguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let generation = daemon.reload().await?;
    let service = daemon.service().await?;
    let (state, reason) = (&service.state, &service.state_reason);
    if arguments.json {
        let answer = json!({"generation": generation, "state": state, "state_reason": reason});
        return print_json(out, &answer);
    }
    writeln!(
        out,
        "The configuration was read again and is in force: generation {generation}, state {state}."
    )?;
    if !reason.is_empty() {
        writeln!(out, "{}", printable(reason))?;
    }
    Ok(())
}
