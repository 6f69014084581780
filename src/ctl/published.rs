//! What the daemon publishes at this moment, all of it together.

use crate::host::proc;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use serde_json::Value;
use tokio::time::timeout;

use crate::arguments::Arguments;
use crate::dbus::proxy::{ACCESS_DENIED, Client, ClientError, Object};
use crate::host::gpu::PciAddress;

/// How long the daemon may take to say how it is, which it always knows. One that is stopped or hangs is not waited for
/// as long as one that has something to do.
const SIGN_OF_LIFE: Duration = Duration::from_secs(10);

/// Whether there is a daemon to ask, and what it says.
#[derive(Debug)]
pub(in crate::ctl) enum Bus {
    /// The bus can't be reached.
    Unreachable(String),
    /// Nobody owns the daemon's name.
    NotRunning,
    /// Somebody owns it, and does not answer.
    Silent,
    /// The bus does not let us ask.
    Denied(String),
    /// The daemon answers with an error.
    Refuses(String),
    /// What it publishes.
    Answers(Box<Published>),
}

/// The answers of `Manager`.
#[derive(Debug)]
pub(in crate::ctl) struct Published {
    /// Its properties.
    pub(in crate::ctl) service: Object,
    pub(in crate::ctl) control_daemons: Vec<Object>,
    /// None before the daemon knows its GPUs.
    pub(in crate::ctl) devices: Option<Vec<Object>>,
    pub(in crate::ctl) gpus: Vec<Object>,
    /// The error is for people.
    pub(in crate::ctl) clients: Result<Vec<Object>, String>,
    /// The daemon's process.
    pub(in crate::ctl) pid: Option<u32>,
}

impl Bus {
    /// Asks for everything. That the daemon is not there is an answer too.
    pub(in crate::ctl) async fn ask() -> Self {
        let client = match Client::connect().await {
            Ok(client) => client,
            Err(error) => return Self::Unreachable(error.to_string()),
        };
        match published(&client).await {
            Ok(published) => Self::Answers(Box::new(published)),
            Err(ClientError::NotRunning) => Self::NotRunning,
            Err(ClientError::Silent) => Self::Silent,
            Err(ClientError::Refused { name, text }) if name == ACCESS_DENIED => Self::Denied(text),
            Err(error @ ClientError::Refused { .. }) => Self::Refuses(error.to_string()),
            Err(error @ ClientError::Bus(_)) => Self::Unreachable(error.to_string()),
        }
    }

    /// The main file to read where the command line names none: that of the service.
    pub(in crate::ctl) fn config(&self, sysroot: &Path) -> Option<PathBuf> {
        self.published()?.config(sysroot)
    }

    /// What the daemon publishes, if it does.
    pub(in crate::ctl) fn published(&self) -> Option<&Published> {
        match self {
            Self::Answers(published) => Some(published),
            Self::Unreachable(_) | Self::NotRunning | Self::Silent | Self::Denied(_) | Self::Refuses(_) => {
                None
            }
        }
    }
}

async fn published(client: &Client) -> Result<Published, ClientError> {
    let service = timeout(SIGN_OF_LIFE, client.service()).await.map_err(|_| ClientError::Silent)??;
    let control_daemons = client.control_daemons().await?;
    let (devices, gpus) = match client.devices().await {
        Err(ClientError::Refused { name, .. }) if name.ends_with(".NotReady") => (None, Vec::new()),
        devices => (Some(devices?), client.gpus().await?),
    };
    // The control daemons are asked for them, and may hang.
    let clients = match &devices {
        Some(_) => client.clients().await.map_err(|error| error.to_string()),
        None => Ok(Vec::new()),
    };
    let pid = client.service_pid().await.ok();
    Ok(Published { service, control_daemons, devices, gpus, clients, pid })
}

/// A text of a dictionary; empty where there is none.
pub(in crate::ctl) fn text<'a>(object: &'a Object, key: &str) -> &'a str {
    object.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// A number of a dictionary.
pub(in crate::ctl) fn number(object: &Object, key: &str) -> Option<u64> {
    object.get(key).and_then(Value::as_u64)
}

/// A number that is a PID.
pub(in crate::ctl) fn pid(object: &Object) -> Option<u32> {
    number(object, "pid").and_then(|pid| u32::try_from(pid).ok())
}

/// The texts of a list in a dictionary.
pub(in crate::ctl) fn texts(object: &Object, key: &str) -> Vec<String> {
    let items = object.get(key).and_then(Value::as_array);
    items.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// A name as it is published, however its address is written.
pub(in crate::ctl) fn published_name(name: &str, devices: &[Object]) -> String {
    let (address, ordinal) = name.split_at(name.find('-').unwrap_or(name.len()));
    let known = devices.iter().filter_map(|device| text(device, "pci_bdf").parse::<PciAddress>().ok());
    match address.parse::<PciAddress>() {
        Ok(short) if PciAddress::is_short(address) => short.in_any_domain(known).ok(),
        whole => whole.ok(),
    }
    .map_or_else(|| name.to_owned(), |address| format!("{}{ordinal}", address.short()))
}

impl Published {
    /// The main file that the service was told to read, where it was told and reads below the same directory.
    pub(in crate::ctl) fn config(&self, sysroot: &Path) -> Option<PathBuf> {
        let arguments = Arguments::try_parse_from(proc::arguments_as_given(self.pid?)).ok()?;
        // A relative path is that of the service's working directory, which only root may look up.
        arguments.config.filter(|file| file.is_absolute() && arguments.sysroot == sysroot)
    }

    /// The PIDs of the clients on these GPUs, each once.
    pub(in crate::ctl) fn clients_on(&self, gpus: &[String]) -> Result<usize, String> {
        let clients = self.clients.as_ref().map_err(Clone::clone)?;
        let mut pids: Vec<u64> = clients
            .iter()
            .filter(|client| gpus.iter().any(|gpu| gpu == text(client, "gpu")))
            .filter_map(|client| number(client, "pid"))
            .collect();
        pids.sort_unstable();
        pids.dedup();
        Ok(pids.len())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_device_is_found_however_its_address_is_written() {
        let devices: Vec<Object> = ["0000:3b:00.0", "0001:1a:00.0", "0001:5e:00.0", "0002:5e:00.0"]
            .map(|address| json!({"pci_bdf": address}).as_object().unwrap().clone())
            .to_vec();
        for (name, expected) in [
            ("3B:00.0-1", "3b:00.0-1"),
            ("0000:3b:00.0", "3b:00.0"),
            ("1a:00.0-1", "0001:1a:00.0-1"),
            ("5e:00.0", "5e:00.0"),
            ("GPU-84d6e0b7", "GPU-84d6e0b7"),
            ("", ""),
        ] {
            assert_eq!(published_name(name, &devices), expected);
        }
    }
}
