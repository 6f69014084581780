//! `yunion-mpsctl reload` and `yunion-mpsctl apply`.

use std::io::Write;

use clap::Args;
use serde_json::json;

use super::{Error, print_json};
use crate::dbus::proxy::Client;

#[derive(Debug, Args)]
pub(super) struct ReloadArguments {
    /// The generation that is published now, as a JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Don't wait for clients: they lose their GPU (CUDA error 806)
    #[arg(long)]
    force: bool,
    /// What was done, as a JSON object
    #[arg(long)]
    json: bool,
}

pub(super) async fn apply(client: &Client, arguments: &Arguments, out: &mut dyn Write) -> Result<(), Error> {
    client.apply(arguments.force).await?;
    if arguments.json {
        return print_json(out, &json!({"applied": true, "forced": arguments.force}));
    }
    writeln!(out, "Nothing waits to be applied any more.")?;
    Ok(())
}

pub(super) async fn reload(
    client: &Client,
    arguments: &ReloadArguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let generation = client.reload().await?;
    if arguments.json {
        return print_json(out, &json!({"generation": generation}));
    }
    writeln!(out, "The configuration was read again; generation {generation} is published.")?;
    Ok(())
}
