//! The connection of yunion-mpsctl to the service. The methods return structs with a field for each key of a D-Bus dictionary.
//! So no other module needs D-Bus types.

use std::collections::HashMap;
use std::io;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use serde::de::{self, DeserializeOwned};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio::time::timeout;
use zbus::connection::Builder;
use zbus::fdo::{self, PropertiesProxy};
use zbus::{DBusError, OwnedVariant, Signature, Type, Variant};

use super::changes;
use super::error::RequestError;
use super::rows::{Client, ControlDaemon, Device, Event, Gpu, Service};
use crate::host::variant::json;
use crate::published::container::{ContainerConfig, Mount};

/// The time that yunion-mpsctl waits for the answer to a request. The service gives up on a request a little earlier, so that
/// yunion-mpsctl gets the service's error instead of a timeout.
const ANSWER_DEADLINE: Duration = Duration::from_secs(75);

/// The time that the bus may take to accept the connection, which normally takes milliseconds. The deadline of a method call
/// does not cover the connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);

const LOOK_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Debug, thiserror::Error)]
pub enum BusError {
    #[error("yunion-mps-daemon is not running; start it with: systemctl start yunion-mps-daemon")]
    NotRunning,
    #[error("{0}")]
    Refused(RequestError),
    /// The bus has answered instead of the service, or a newer service has answered with an error that this version does not
    /// know.
    #[error("{text}")]
    Other { name: String, text: String },
    #[error("yunion-mps-daemon does not answer; journalctl -u yunion-mps-daemon may say why")]
    Silent,
    /// The bus can't be reached, or the answer can't be parsed.
    #[error("the call over the system bus failed: {0}")]
    Bus(zbus::Error),
}

impl From<zbus::Error> for BusError {
    fn from(error: zbus::Error) -> Self {
        let refused = |name: &str, text: Option<&str>| {
            let text = text.filter(|text| !text.is_empty()).unwrap_or(name);
            let other = || Self::Other { name: name.to_owned(), text: text.to_owned() };
            RequestError::read(name, text.to_owned()).map_or_else(other, Self::Refused)
        };
        match &error {
            zbus::Error::MethodError(name, text, _) => refused(name.as_str(), text.as_deref()),
            zbus::Error::FDO(error) => match &**error {
                fdo::Error::ServiceUnknown(_) | fdo::Error::NameHasNoOwner(_) => Self::NotRunning,
                fdo::Error::AccessDenied(text) if is_from_bus(text) => {
                    Self::Refused(RequestError::AccessDenied(NOT_A_MEMBER.to_owned()))
                }
                error => refused(error.name().as_str(), error.description()),
            },
            // zbus returns this error only for a method call without an answer in time. A connection that takes too long can't
            // end here: `connect` has its own deadline and its own error.
            zbus::Error::InputOutput(failed) if failed.kind() == io::ErrorKind::TimedOut => Self::Silent,
            _ => Self::Bus(error),
        }
    }
}

impl From<fdo::Error> for BusError {
    fn from(error: fdo::Error) -> Self {
        Self::from(match error {
            fdo::Error::ZBus(error) => error,
            error => zbus::Error::FDO(Box::new(error)),
        })
    }
}

/// One row of an answer, such as one slice or one GPU. Serialized, the row has every key of the D-Bus dictionary, also the keys
/// that this version of yunion-mpsctl does not know.
#[derive(Debug, Clone)]
pub struct Listed<R> {
    row: R,
    all: Map<String, Value>,
}

impl<R> Deref for Listed<R> {
    type Target = R;

    fn deref(&self) -> &R {
        &self.row
    }
}

impl<R> Serialize for Listed<R> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.all.serialize(serializer)
    }
}

impl<R> Type for Listed<R> {
    const SIGNATURE: &'static Signature = HashMap::<String, OwnedVariant>::SIGNATURE;
}

impl<'de, R: DeserializeOwned> Deserialize<'de> for Listed<R> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let dict = HashMap::<String, OwnedVariant>::deserialize(deserializer)?;
        Self::read(dict.iter().map(|(key, value)| (key.clone(), json(value))).collect())
            .map_err(de::Error::custom)
    }
}

impl<R: DeserializeOwned> Listed<R> {
    pub fn read(all: Map<String, Value>) -> zbus::Result<Self> {
        let row = serde_json::from_value(Value::Object(all.clone()));
        let row = row.map_err(|error| zbus::Error::Failure(format!("unreadable answer: {error}")))?;
        Ok(Self { row, all })
    }
}

impl Type for ContainerConfig {
    const SIGNATURE: &'static Signature = <(Vec<(String, String)>, Vec<Mount>, Vec<String>)>::SIGNATURE;
}

impl Type for Mount {
    const SIGNATURE: &'static Signature = <(String, String, bool)>::SIGNATURE;
}

#[zbus::proxy(
    interface = "io.yunion.Mps1.Manager",
    default_service = "io.yunion.Mps1",
    default_path = "/io/yunion/Mps1/Manager"
)]
pub trait Manager {
    /// In the order of the configuration.
    #[zbus(name = "ListDevices")]
    fn devices(&self) -> Result<Vec<Listed<Device>>, BusError>;

    /// In the order of the configuration.
    #[zbus(name = "ListGpus")]
    fn gpus(&self) -> Result<Vec<Listed<Gpu>>, BusError>;

    #[zbus(name = "ListControlDaemons")]
    fn control_daemons(&self) -> Result<Vec<Listed<ControlDaemon>>, BusError>;

    /// The oldest of the recent events comes first.
    #[zbus(name = "ListEvents")]
    fn events(&self) -> Result<Vec<Listed<Event>>, BusError>;

    #[zbus(name = "ListClients")]
    fn clients(&self) -> Result<Vec<Listed<Client>>, BusError>;

    #[zbus(name = "LookAtClients")]
    fn have_clients_counted(&self) -> zbus::Result<()>;

    fn terminate_client(&self, pid: u32) -> Result<(), BusError>;

    #[zbus(name = "GetContainerConfig")]
    fn container_config(&self, devices: &[String]) -> Result<ContainerConfig, BusError>;

    fn take_devices(&self, devices: &[String], options: &OptionValues<'_>) -> Result<TakenAnswer, BusError>;
}

/// The answer of `TakeDevices`: the names of the slices, then the fields of [`ContainerConfig`].
type TakenAnswer = (Vec<String>, Vec<(String, String)>, Vec<Mount>, Vec<String>);

type OptionValues<'o> = HashMap<&'static str, Variant<'o>>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceWish {
    /// The names of slices and GPUs as `yunion-mpsctl list` shows them. The name of a GPU stands for one slice of the GPU.
    pub names: Vec<String>,
    /// True if the caller wants one slice: the slice with the fewest clients among those in `names`, or among all slices if
    /// `names` is empty. False if the caller wants every slice in `names`.
    pub free: bool,
    /// True if other programs may use the slices too. False if the caller wants the slices alone.
    pub share: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GroupOf {
    Process(u32),
    Path(String),
}

impl GroupOf {
    fn pid_and_options(&self) -> (u32, OptionValues<'_>) {
        match self {
            Self::Process(pid) => (*pid, OptionValues::new()),
            Self::Path(path) => (0, OptionValues::from([("control_group", path.as_str().into())])),
        }
    }
}

/// A signal that a container runtime is about to send to a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerStop {
    /// The first process of the container (PID 1 inside the container).
    pub pid: u32,
    /// The id that the container runtime uses for the container. Empty if the caller does not know the id.
    pub container: String,
    pub signal: u32,
    /// True if the container runtime sends the signal to every process of the container. False if only to the first process.
    pub to_all: bool,
}

#[zbus::proxy(
    interface = "io.yunion.Mps1.Control",
    default_service = "io.yunion.Mps1",
    default_path = "/io/yunion/Mps1/Manager"
)]
trait Control {
    fn reload(&self) -> zbus::Result<u64>;
    fn apply(&self, force: bool) -> zbus::Result<()>;
    fn release_devices(&self, devices: &[String]) -> zbus::Result<()>;
    fn release_container(&self, id: &str) -> zbus::Result<()>;
    fn release_group(&self, pid: u32, options: &OptionValues<'_>) -> zbus::Result<()>;
    fn bind(&self, devices: &[String], pid: u32, options: &OptionValues<'_>) -> zbus::Result<Vec<String>>;
    fn unbind(&self, pid: u32, options: &OptionValues<'_>) -> zbus::Result<()>;
    fn drain(&self, names: &[String]) -> zbus::Result<()>;
    fn undrain(&self, names: &[String]) -> zbus::Result<()>;
}

/// Replaces the text of an "access denied" error with "only root may do this". The bus's own text speaks of policy rules, which
/// says nothing to a user.
fn for_root<T>(answer: zbus::Result<T>) -> Result<T, BusError> {
    answer.map_err(|error| match BusError::from(error) {
        BusError::Refused(RequestError::AccessDenied(_)) => {
            BusError::Refused(RequestError::AccessDenied("only root may do this".to_owned()))
        }
        other => other,
    })
}

const NOT_A_MEMBER: &str = "only root and the group yunion-mps may ask the service; join the group with `sudo usermod \
                            -aG yunion-mps $USER` and log in again";

/// True if the bus (dbus-daemon or dbus-broker) and not the service has refused a call. For root the answer is false: the bus
/// refuses root only if the service's policy is not installed, and the advice in `NOT_A_MEMBER` would not help.
fn is_from_bus(refusal: &str) -> bool {
    let of_a_bus = ["Rejected send message", "Sender is not authorized to send message"];
    !rustix::process::geteuid().is_root() && of_a_bus.iter().any(|text| refusal.starts_with(text))
}

#[derive(Debug, Clone)]
pub struct DaemonProxy {
    manager: ManagerProxy<'static>,
    control: ControlProxy<'static>,
}

impl Deref for DaemonProxy {
    type Target = ManagerProxy<'static>;

    fn deref(&self) -> &Self::Target {
        &self.manager
    }
}

impl DaemonProxy {
    /// Connects to the system bus (`DBUS_SYSTEM_BUS_ADDRESS`, if set). Connecting succeeds even if the service does not run.
    /// Then the first method call fails.
    pub async fn connect() -> Result<Self, BusError> {
        let joined = Builder::system().method_timeout(ANSWER_DEADLINE).build();
        let connection = timeout(CONNECT_DEADLINE, joined).await.unwrap_or_else(|_| {
            let seconds = CONNECT_DEADLINE.as_secs();
            let silent =
                io::Error::other(format!("the system bus did not accept the connection within {seconds} s"));
            Err(zbus::Error::InputOutput(Arc::new(silent)))
        });
        let connection = connection.map_err(BusError::Bus)?;
        let manager = ManagerProxy::new(&connection).await?;
        let control = ControlProxy::new(&connection).await?;
        Ok(Self { manager, control })
    }

    /// Makes a receiver that wakes after each change of the service's published values. The receiver gets an error once the bus
    /// has closed the connection.
    pub async fn changes(&self) -> Result<watch::Receiver<()>, BusError> {
        Ok(changes::on(self.manager.inner().connection()).await?)
    }

    /// Asks the service to count the clients, so that the next answers of `devices` and `gpus` have fresh numbers of clients.
    /// Errors are ignored, since older numbers are worth showing too. An older service lacks this method, a busy service
    /// refuses the request, and a service that waits for a hung GPU takes too long.
    pub async fn look_at_clients(&self) {
        let _ = timeout(LOOK_TIMEOUT, self.manager.have_clients_counted()).await;
    }

    /// Ends the GPU work of the clients of these slices, and returns once these slices have no client. Only for root.
    pub async fn release_devices(&self, devices: &[String]) -> Result<(), BusError> {
        for_root(self.control.release_devices(devices).await)
    }

    /// Ends the GPU work of the clients in a container, and returns once the container has no client. Only for root.
    pub async fn release_container(&self, id: &str) -> Result<(), BusError> {
        for_root(self.control.release_container(id).await)
    }

    /// Ends the GPU work of all clients that the container runtime's signal may kill, and returns once that work has ended.
    /// Only for root.
    pub async fn release_group(&self, stop: &ContainerStop) -> Result<(), BusError> {
        let ContainerStop { pid, container, signal, to_all } = stop;
        let options = OptionValues::from([
            ("container", container.as_str().into()),
            ("signal", (*signal).into()),
            ("all", (*to_all).into()),
        ]);
        for_root(self.control.release_group(*pid, &options).await)
    }

    pub async fn take(&self, wish: &SliceWish) -> Result<(Vec<String>, ContainerConfig), BusError> {
        let options = OptionValues::from([("free", wish.free.into()), ("share", wish.share.into())]);
        let (taken, environment, mounts, gpus) = self.manager.take_devices(&wish.names, &options).await?;
        Ok((taken, ContainerConfig { environment, mounts, gpus }))
    }

    pub async fn bind(
        &self,
        wish: &SliceWish,
        group: &GroupOf,
        label: &str,
    ) -> Result<Vec<String>, BusError> {
        let (pid, mut options) = group.pid_and_options();
        options.extend([("label", label.into()), ("free", wish.free.into()), ("share", wish.share.into())]);
        for_root(self.control.bind(&wish.names, pid, &options).await)
    }

    pub async fn unbind(&self, group: &GroupOf) -> Result<(), BusError> {
        let (pid, options) = group.pid_and_options();
        for_root(self.control.unbind(pid, &options).await)
    }

    /// Drains slices and GPUs, so that they take no new clients. An empty list drains every GPU. Only for root.
    pub async fn drain(&self, names: &[String]) -> Result<(), BusError> {
        for_root(self.control.drain(names).await)
    }

    /// Makes drained slices and GPUs take clients again. An empty list stands for every slice and GPU. Only for root.
    pub async fn undrain(&self, names: &[String]) -> Result<(), BusError> {
        for_root(self.control.undrain(names).await)
    }

    /// Asks the service to read its configuration again. Returns the `generation` of the published values after the reload.
    /// Only for root.
    pub async fn reload(&self) -> Result<u64, BusError> {
        for_root(self.control.reload().await)
    }

    /// Asks the service to make the changes that wait until clients have ended. With `force`, the service ends these clients.
    /// Only for root.
    pub async fn apply(&self, force: bool) -> Result<(), BusError> {
        for_root(self.control.apply(force).await)
    }

    /// The properties of the interface `io.yunion.Mps1.Manager`, under names such as `state_reason` for the property
    /// `StateReason`.
    pub async fn service(&self) -> Result<Listed<Service>, BusError> {
        let proxy = self.manager.inner();
        let properties = PropertiesProxy::new(proxy.connection(), proxy.destination(), proxy.path()).await?;
        let values = properties.get_all(proxy.interface().to_owned()).await?;
        Ok(Listed::read(values.iter().map(|(name, value)| (key(name), json(value))).collect())?)
    }

    /// The PID of the service as the bus reports it. The bus has the PID from the kernel, so no process can forge it.
    pub async fn service_pid(&self) -> Result<u32, BusError> {
        let proxy = self.manager.inner();
        let bus = fdo::DBusProxy::new(proxy.connection()).await?;
        Ok(bus.get_connection_unix_process_id(proxy.destination().to_owned()).await?)
    }
}

/// Turns a D-Bus property's name, such as `StateReason`, into the key of a dictionary, such as `state_reason`.
fn key(property: &str) -> String {
    let mut key = String::with_capacity(property.len() + 2);
    for letter in property.chars() {
        if letter.is_ascii_uppercase() && !key.is_empty() {
            key.push('_');
        }
        key.push(letter.to_ascii_lowercase());
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_is_not_known_is_kept_and_one_that_is_missing_has_no_value() {
        let all = serde_json::json!({"addr": "00:06.0-1", "colour": "green"});
        let device: Listed<Device> = Listed::read(all.as_object().unwrap().clone()).unwrap();
        assert_eq!((device.addr.as_str(), &device.model), ("00:06.0-1", &None));
        assert_eq!(serde_json::to_value(&device).unwrap(), all);
        let wrong = serde_json::json!({"addr": 7}).as_object().unwrap().clone();
        let error = Listed::<Device>::read(wrong).unwrap_err().to_string();
        assert!(error.contains("unreadable answer: invalid type: integer `7`"), "{error}");
    }

    #[test]
    fn property_names_become_keys() {
        assert_eq!(key("StateReason"), "state_reason");
        assert_eq!(key("Version"), "version");
    }
}
