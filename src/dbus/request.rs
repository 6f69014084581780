//! Requests that only the daemon can carry out, their errors, and the bounds of the names in them.

use std::fmt;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use zbus::DBusError;
use zbus::message::{Header, Message};
use zbus::names::ErrorName;

use super::rows::clean;
use crate::publish::container::ContainerError;
use crate::tenants::clients::ClientView;

/// The time that a request may take. It is longer than a caller waits, so that it only ends a request that nobody waits
/// for.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);

/// The error that a caller gets instead of an answer: a name, which is `io.yunion.Mps1.Error.<variant>` unless the
/// variant says otherwise, and a text for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestError {
    /// No plan exists yet; ask again.
    NotReady(String),
    /// No such slice or GPU.
    NoSuchDevice(String),
    /// No such client of a slice.
    NoSuchClient(String),
    /// The configuration was refused, and the one before stays in force.
    InvalidConfig(String),
    /// Something else has to end first.
    Busy(String),
    /// The caller may not do this: `org.freedesktop.DBus.Error.AccessDenied`, as the bus itself says it.
    AccessDenied(String),
    /// Anything else.
    Failed(String),
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

// By hand, since one of the names has another prefix.
impl DBusError for RequestError {
    fn create_reply(&self, call: &Header<'_>) -> zbus::Result<Message> {
        Message::error(call, self.name()).build(&clean(self.text()))
    }

    fn name(&self) -> ErrorName<'_> {
        ErrorName::from_static_str_unchecked(self.name_and_text().0)
    }

    fn description(&self) -> Option<&str> {
        Some(self.text())
    }
}

impl RequestError {
    fn name_and_text(&self) -> (&'static str, &str) {
        match self {
            Self::NotReady(text) => ("io.yunion.Mps1.Error.NotReady", text),
            Self::NoSuchDevice(text) => ("io.yunion.Mps1.Error.NoSuchDevice", text),
            Self::NoSuchClient(text) => ("io.yunion.Mps1.Error.NoSuchClient", text),
            Self::InvalidConfig(text) => ("io.yunion.Mps1.Error.InvalidConfig", text),
            Self::Busy(text) => ("io.yunion.Mps1.Error.Busy", text),
            Self::AccessDenied(text) => ("org.freedesktop.DBus.Error.AccessDenied", text),
            Self::Failed(text) => ("io.yunion.Mps1.Error.Failed", text),
        }
    }

    fn text(&self) -> &str {
        self.name_and_text().1
    }
}

/// The answer to a call.
pub(super) type Result<T> = std::result::Result<T, RequestError>;

/// Takes the answer to a request.
pub type Reply<T> = oneshot::Sender<std::result::Result<T, RequestError>>;

/// Something that only the daemon can do or find out. A request without an answer for a minute fails.
#[derive(Debug)]
pub enum Request {
    /// Read the configuration again and apply it; the answer is the generation then in force.
    Reload(Reply<u64>),
    /// List the processes that use the GPUs at this moment, for this user, as the bus says.
    Clients(u32, Reply<Vec<ClientView>>),
    /// End the GPU work of a process; the answer comes when it is no client any more. With a user: only if the
    /// configuration lets users do this, and the process is this user's.
    Terminate(u32, Option<u32>, Reply<()>),
    /// End the GPU work of the clients of slices, as the caller names them; the answer comes when none is left.
    ReleaseDevices(Vec<String>, Reply<()>),
    /// End the GPU work of the clients in a container, by its id or the beginning of it; the answer comes when none is
    /// left.
    ReleaseContainer(String, Reply<()>),
    /// Carry out the changes of the configuration that wait for clients to leave; if true, without waiting.
    Apply(bool, Reply<()>),
    /// Take slices and GPUs, as the caller names them, out of use for new clients; without names everything.
    Drain(Vec<String>, Reply<()>),
    /// Let new clients have them again; without names everything.
    Undrain(Vec<String>, Reply<()>),
    /// Replace the server of a GPU, as the caller names it.
    RestartServer(String, Reply<()>),
}

impl From<ContainerError> for RequestError {
    fn from(error: ContainerError) -> Self {
        let text = error.to_string();
        match error {
            ContainerError::NotReady(_) => Self::NotReady(text),
            ContainerError::NoSuchDevice { .. } => Self::NoSuchDevice(text),
            ContainerError::NoneNamed
            | ContainerError::NoUuid { .. }
            | ContainerError::NotServable { .. }
            | ContainerError::Drained { .. }
            | ContainerError::SeveralControlDaemons { .. } => Self::Failed(text),
        }
    }
}

/// Hands a request to the daemon's loop and waits for the answer.
pub(super) async fn ask<T>(
    requests: &mpsc::Sender<Request>,
    request: impl FnOnce(Reply<T>) -> Request,
) -> Result<T> {
    let (reply, answer) = oneshot::channel();
    let exchange = async {
        requests.send(request(reply)).await.ok()?;
        answer.await.ok()
    };
    match tokio::time::timeout(ANSWER_DEADLINE, exchange).await {
        Ok(Some(answer)) => answer,
        Ok(None) => Err(RequestError::Failed("the daemon is stopping".to_owned())),
        Err(_) => {
            let seconds = ANSWER_DEADLINE.as_secs();
            Err(RequestError::Failed(format!("the daemon gave no answer within {seconds} s")))
        }
    }
}

/// The most bytes that the name of a device or the id of a container has.
pub(super) const NAME_MAX: usize = 64;

/// The most devices that a caller may name at once; a host has some hundred.
const NAMES_MAX: usize = 1024;

/// Refuses what can't be a name. The error does not repeat it.
pub(super) fn bounded_name(name: &str) -> Result<()> {
    if name.len() <= NAME_MAX {
        return Ok(());
    }
    let length = name.len();
    Err(RequestError::NoSuchDevice(format!("a name has at most {NAME_MAX} bytes, and this one has {length}")))
}

/// Refuses what can't be a list of names.
pub(super) fn bounded_names(names: &[String]) -> Result<()> {
    if names.len() > NAMES_MAX {
        let count = names.len();
        return Err(RequestError::Failed(format!("{count} devices are named, and {NAMES_MAX} are allowed")));
    }
    names.iter().try_for_each(|name| bounded_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_their_names_and_no_nul() {
        let call = Message::method_call("/io/yunion/Mps1/Manager", "Reload").build(&()).unwrap();
        let error = RequestError::InvalidConfig("line 3: \0".to_owned());
        assert_eq!(error.name().as_str(), "io.yunion.Mps1.Error.InvalidConfig");
        let reply = error.create_reply(&call.header()).unwrap();
        assert_eq!(reply.body().deserialize::<String>().unwrap(), "line 3: \u{fffd}");
        let denied = RequestError::AccessDenied("no".to_owned());
        assert_eq!(denied.name().as_str(), "org.freedesktop.DBus.Error.AccessDenied");
    }
}
