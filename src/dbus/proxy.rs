//! The client's side of `io.yunion.Mps1`, as yunion-mpsctl uses it: answers are JSON values under the keys that the
//! bus has, so that nothing outside `dbus` knows D-Bus types.

use crate::host::variant::json;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use zbus::connection::Builder;
use zbus::fdo::{self, PropertiesProxy};
use zbus::{DBusError, OwnedVariant};

/// A little more than what the daemon itself takes before it gives up on a request.
const ANSWER_DEADLINE: Duration = Duration::from_secs(75);

/// How long the bus may take to let us in. It answers in milliseconds, and a method's deadline does not count before.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody owns the bus name.
    #[error("yunion-mps-daemon is not running; start it with: systemctl start yunion-mps-daemon")]
    NotRunning,
    /// The daemon, or the bus on its behalf, has answered with an error.
    #[error("{text}")]
    Refused {
        /// The D-Bus error's name.
        name: String,
        /// What it says.
        text: String,
    },
    /// The bus has taken the question, and no answer came in time.
    #[error("yunion-mps-daemon does not answer; journalctl -u yunion-mps-daemon may say why")]
    Silent,
    /// The bus can't be reached, or the answer can't be read.
    #[error("the system bus: {0}")]
    Bus(zbus::Error),
}

impl From<zbus::Error> for ClientError {
    fn from(error: zbus::Error) -> Self {
        let refused = |name: &str, text: Option<&str>| Self::Refused {
            name: name.to_owned(),
            text: text.filter(|text| !text.is_empty()).unwrap_or(name).to_owned(),
        };
        match &error {
            zbus::Error::MethodError(name, text, _) => refused(name.as_str(), text.as_deref()),
            zbus::Error::FDO(error) => match &**error {
                fdo::Error::ServiceUnknown(_) | fdo::Error::NameHasNoOwner(_) => Self::NotRunning,
                error => refused(error.name().as_str(), error.description()),
            },
            // Of a method, whose deadline it is: joining the bus has one of its own.
            zbus::Error::InputOutput(failed) if failed.kind() == io::ErrorKind::TimedOut => Self::Silent,
            _ => Self::Bus(error),
        }
    }
}

impl From<fdo::Error> for ClientError {
    fn from(error: fdo::Error) -> Self {
        Self::from(match error {
            fdo::Error::ZBus(error) => error,
            error => zbus::Error::FDO(Box::new(error)),
        })
    }
}

/// One dictionary of the bus.
pub type Object = Map<String, Value>;

/// What `GetContainerConfig` answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerAnswer {
    /// Environment variables and their values, in order.
    pub environment: Vec<(String, String)>,
    /// Directories: on the host, in the container, read-only.
    pub mounts: Vec<(String, String, bool)>,
    /// The UUIDs of the GPUs.
    pub gpus: Vec<String>,
}

#[zbus::proxy(
    interface = "io.yunion.Mps1.Manager",
    default_service = "io.yunion.Mps1",
    default_path = "/io/yunion/Mps1/Manager"
)]
trait Manager {
    fn list_devices(&self) -> zbus::Result<Vec<HashMap<String, OwnedVariant>>>;
    fn list_gpus(&self) -> zbus::Result<Vec<HashMap<String, OwnedVariant>>>;
    fn list_control_daemons(&self) -> zbus::Result<Vec<HashMap<String, OwnedVariant>>>;
    fn list_events(&self) -> zbus::Result<Vec<HashMap<String, OwnedVariant>>>;
    fn list_clients(&self) -> zbus::Result<Vec<HashMap<String, OwnedVariant>>>;
    fn terminate_client(&self, pid: u32) -> zbus::Result<()>;
    fn get_container_config(
        &self,
        devices: &[String],
    ) -> zbus::Result<(Vec<(String, String)>, Vec<(String, String, bool)>, Vec<String>)>;
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
}

/// What a call of Control came to. The bus refuses everybody but root, in words about its own rules.
fn for_root<T>(answer: zbus::Result<T>) -> Result<T, ClientError> {
    answer.map_err(|error| match ClientError::from(error) {
        ClientError::Refused { name, .. } if name == ACCESS_DENIED => {
            ClientError::Refused { name, text: "only root may do this".to_owned() }
        }
        other => other,
    })
}

/// The name of the bus's own error for a call that its policy does not allow.
pub const ACCESS_DENIED: &str = "org.freedesktop.DBus.Error.AccessDenied";

/// A connection to the daemon.
#[derive(Debug, Clone)]
pub struct Client {
    manager: ManagerProxy<'static>,
    control: ControlProxy<'static>,
}

impl Client {
    /// Joins the system bus (`DBUS_SYSTEM_BUS_ADDRESS`, where that is set). Whether the daemon is there shows with the
    /// first question.
    ///
    /// # Errors
    /// [`ClientError::Bus`]: the bus can't be reached.
    pub async fn connect() -> Result<Self, ClientError> {
        let joined = Builder::system().method_timeout(ANSWER_DEADLINE).build();
        let connection = tokio::time::timeout(CONNECT_DEADLINE, joined).await.map_err(|_| {
            let seconds = CONNECT_DEADLINE.as_secs();
            let silent = io::Error::other(format!("it did not let us in within {seconds} s"));
            ClientError::Bus(zbus::Error::InputOutput(Arc::new(silent)))
        })??;
        let manager = ManagerProxy::builder(&connection);
        let manager = manager.cache_properties(zbus::proxy::CacheProperties::No).build().await?;
        let control = ControlProxy::builder(&connection);
        let control = control.cache_properties(zbus::proxy::CacheProperties::No).build().await?;
        Ok(Self { manager, control })
    }

    /// The slices, in the order of the configuration.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn devices(&self) -> Result<Vec<Object>, ClientError> {
        Ok(objects(&self.manager.list_devices().await?))
    }

    /// The GPUs, in the order of the configuration.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn gpus(&self) -> Result<Vec<Object>, ClientError> {
        Ok(objects(&self.manager.list_gpus().await?))
    }

    /// The control daemons.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn control_daemons(&self) -> Result<Vec<Object>, ClientError> {
        Ok(objects(&self.manager.list_control_daemons().await?))
    }

    /// The last things that happened, oldest first.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn events(&self) -> Result<Vec<Object>, ClientError> {
        Ok(objects(&self.manager.list_events().await?))
    }

    /// Who uses the GPUs at this moment.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn clients(&self) -> Result<Vec<Object>, ClientError> {
        Ok(objects(&self.manager.list_clients().await?))
    }

    /// Ends the GPU work of a process, and returns when it is no client any more.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn terminate_client(&self, pid: u32) -> Result<(), ClientError> {
        Ok(self.manager.terminate_client(pid).await?)
    }

    /// Ends the GPU work of the clients of these slices, and returns when none is left. For root.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn release_devices(&self, devices: &[String]) -> Result<(), ClientError> {
        for_root(self.control.release_devices(devices).await)
    }

    /// Ends the GPU work of the clients in a container, and returns when none is left. For root.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn release_container(&self, id: &str) -> Result<(), ClientError> {
        for_root(self.control.release_container(id).await)
    }

    /// Has the configuration read again; the generation then in force. For root.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn reload(&self) -> Result<u64, ClientError> {
        for_root(self.control.reload().await)
    }

    /// Has the changes carried out that wait for clients to leave. For root.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn apply(&self, force: bool) -> Result<(), ClientError> {
        for_root(self.control.apply(force).await)
    }

    /// The Manager's properties, under names like the keys of the other answers: `state_reason`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn service(&self) -> Result<Object, ClientError> {
        let proxy = self.manager.inner();
        let properties = PropertiesProxy::builder(proxy.connection())
            .destination(proxy.destination())
            .path(proxy.path())
            .build()
            .await?;
        let values = properties.get_all(proxy.interface().to_owned()).await?;
        Ok(values.iter().map(|(name, value)| (key(name), json(value))).collect())
    }

    /// The PID of the service, as the bus has it from the kernel.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn service_pid(&self) -> Result<u32, ClientError> {
        let proxy = self.manager.inner();
        let bus = fdo::DBusProxy::new(proxy.connection()).await?;
        Ok(bus.get_connection_unix_process_id(proxy.destination().to_owned()).await?)
    }

    /// What a container needs to use these devices.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn container_config(&self, devices: &[String]) -> Result<ContainerAnswer, ClientError> {
        let (environment, mounts, gpus) = self.manager.get_container_config(devices).await?;
        Ok(ContainerAnswer { environment, mounts, gpus })
    }
}

fn objects(dicts: &[HashMap<String, OwnedVariant>]) -> Vec<Object> {
    let object = |dict: &HashMap<String, OwnedVariant>| {
        dict.iter().map(|(key, value)| (key.clone(), json(value))).collect()
    };
    dicts.iter().map(object).collect()
}

/// A property's name as a key: `StateReason` is `state_reason`.
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
    fn property_names_become_keys() {
        assert_eq!(key("StateReason"), "state_reason");
        assert_eq!(key("Version"), "version");
    }
}
