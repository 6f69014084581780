//! The service's answers on D-Bus, for yunion-mpsctl and the other callers.

use std::collections::BTreeSet;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use mps_core::terms::{DeviceName, PciAddress};
use tokio::time::timeout;

use crate::arguments::Arguments;
use crate::bus::error::RequestError;
use crate::bus::proxy::{BusError, DaemonProxy, Listed};
use crate::bus::rows::{Client, ControlDaemon, Device, Event, Gpu, Service};
use crate::host::proc;

/// The longest time that a caller waits for the service's state. The service answers a question about its state at once,
/// although other requests can take long. So after this short time without an answer, the caller knows that the service hangs.
pub const SIGN_OF_LIFE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Published {
    pub service: Listed<Service>,
    pub control_daemons: Vec<Listed<ControlDaemon>>,
    /// None until the service knows its GPUs.
    pub devices: Option<Vec<Listed<Device>>>,
    pub gpus: Vec<Listed<Gpu>>,
    /// The error says why the service did not list its clients. To list its clients, the service asks the control daemons, and
    /// a control daemon may hang.
    pub clients: Result<Vec<Listed<Client>>, BusError>,
    pub events: Vec<Listed<Event>>,
    pub pid: Option<u32>,
}

pub fn known<R>(answer: Result<Vec<R>, BusError>) -> Result<Option<Vec<R>>, BusError> {
    match answer {
        Err(BusError::Refused(RequestError::NotReady(_))) => Ok(None),
        answer => answer.map(Some),
    }
}

/// The name under which the service publishes a slice or a GPU. The PCI address in `name` may have any spelling, such as with
/// or without the domain.
pub fn published_name(name: &str, devices: &[Listed<Device>]) -> String {
    let (address, _) = DeviceName::parts(name);
    let ordinal = name.strip_prefix(address).unwrap_or_default();
    let known = devices.iter().filter_map(|device| device.pci_bdf.parse::<PciAddress>().ok());
    match address.parse::<PciAddress>() {
        Ok(short) if PciAddress::is_short(address) => short.in_any_domain(known).ok(),
        whole => whole.ok(),
    }
    .map_or_else(|| name.to_owned(), |address| format!("{}{ordinal}", address.short()))
}

pub fn is_called(device: &Device, name: &str) -> bool {
    let uuid = device.device_path.as_ref();
    device.addr == name
        || device.base_addr == name
        || uuid.is_some_and(|uuid| uuid.eq_ignore_ascii_case(name))
}

pub fn given(client: &Client) -> impl Iterator<Item = &str> {
    client.device.iter().flat_map(|names| names.split(',')).map(str::trim)
}

impl Published {
    pub async fn ask() -> Result<Self, BusError> {
        let daemon = DaemonProxy::connect().await?;
        let service = timeout(SIGN_OF_LIFE, daemon.service()).await.unwrap_or(Err(BusError::Silent))?;
        Self::with(service, &daemon).await
    }

    pub async fn with(service: Listed<Service>, daemon: &DaemonProxy) -> Result<Self, BusError> {
        let control_daemons = daemon.control_daemons().await?;
        let events = daemon.events().await?;
        let devices = known(daemon.devices().await)?;
        let gpus = known(daemon.gpus().await)?.unwrap_or_default();
        let clients = known(daemon.clients().await).map(Option::unwrap_or_default);
        let pid = daemon.service_pid().await.ok();
        Ok(Self { service, control_daemons, devices, gpus, clients, events, pid })
    }

    /// The main configuration file on the command line of the service. None if that command line names no file, or if the
    /// service reads its files below another directory than `sysroot`.
    pub fn config(&self, sysroot: &Path) -> Option<PathBuf> {
        let arguments = Arguments::try_parse_from(proc::arguments(self.pid?)).ok()?;
        // A relative path starts in the service's working directory. Only root may read the link /proc/PID/cwd to this
        // directory. So a relative path is not returned.
        arguments.config.filter(|file| file.is_absolute() && arguments.sysroot == sysroot)
    }

    /// The number of clients on the GPUs with these UUIDs. A process that uses several GPUs counts once. None if the service
    /// did not list its clients.
    pub fn clients_on(&self, gpus: &[String]) -> Option<usize> {
        let clients = self.clients.as_ref().ok()?;
        let pids = clients.iter().filter(|client| gpus.contains(&client.gpu)).map(|client| client.pid);
        Some(pids.collect::<BTreeSet<u32>>().len())
    }

    pub fn served_by<'p>(&'p self, id: &'p str) -> impl Iterator<Item = &'p Gpu> {
        self.gpus
            .iter()
            .map(Deref::deref)
            .filter(move |gpu| gpu.control_daemon.split(',').any(|one| one == id))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_device_is_found_however_its_address_is_written() {
        let device = |address| json!({"pci_bdf": address}).as_object().unwrap().clone();
        let devices = ["0000:3b:00.0", "0001:1a:00.0", "0001:5e:00.0", "0002:5e:00.0"]
            .map(|address| Listed::read(device(address)).unwrap());
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
