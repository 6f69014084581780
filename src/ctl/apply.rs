//! `yunion-mpsctl reload` and `yunion-mpsctl apply`.

use std::io::Write;

use clap::Args;

use super::Error;
use crate::dbus::proxy::Client;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Don't wait for clients: end their GPU work (CUDA error 810)
    #[arg(long)]
    force: bool,
}

pub(super) async fn apply(client: &Client, arguments: &Arguments, out: &mut dyn Write) -> Result<(), Error> {
    client.apply(arguments.force).await?;
    writeln!(out, "Nothing waits to be applied any more.")?;
    Ok(())
}

pub(super) async fn reload(client: &Client, out: &mut dyn Write) -> Result<(), Error> {
    let generation = client.reload().await?;
    writeln!(out, "The configuration was read again; generation {generation} is published.")?;
    Ok(())
}
