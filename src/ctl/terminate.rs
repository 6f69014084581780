//! `yunion-mpsctl terminate`.

use std::io::Write;

use clap::Args;

use super::Error;
use super::table::printable;
use crate::dbus::proxy::Client;

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(super) struct Arguments {
    /// One process, by its PID on this host; its user may do this as well as root
    #[arg(value_name = "PID")]
    pid: Option<u32>,
    /// Every process that was given this virtual device; may be repeated
    #[arg(long, value_name = "NAME")]
    device: Vec<String>,
    /// Every process in this container: its 64 hexadecimal digits, or at least the first 12
    #[arg(long, value_name = "ID")]
    container: Option<String>,
}

pub(super) async fn terminate(
    client: &Client,
    arguments: &Arguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    if let Some(pid) = arguments.pid {
        client.terminate_client(pid).await?;
        writeln!(out, "Process {pid} uses no GPU any more.")?;
    } else if let Some(id) = &arguments.container {
        client.release_container(id).await?;
        writeln!(out, "No process in container {} uses a GPU any more.", printable(id))?;
    } else {
        client.release_devices(&arguments.device).await?;
        writeln!(out, "No process uses {} any more.", printable(&arguments.device.join(", ")))?;
    }
    Ok(())
}
