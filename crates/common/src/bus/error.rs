//! The errors of the service on D-Bus.

use mps_core::access::Obstacle;
use zbus::DBusError;
use zbus::message::{Header, Message};
use zbus::names::ErrorName;

use crate::published::container::ContainerError;
use crate::text::clean;

/// The error that a caller gets instead of an answer: a name, which is `io.yunion.Mps1.Error.<variant>` unless the
/// variant says otherwise, and a text for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub enum RequestError {
    /// The service has no plan yet. The caller should ask again later.
    NotReady(String),
    NoSuchDevice(String),
    NoSuchClient(String),
    /// The new configuration is wrong. The previous configuration stays in force.
    InvalidConfig(String),
    /// The service still works on another change or request. The caller should ask again later.
    Busy(String),
    /// An administrator has drained the slice, so it takes no new clients.
    Drained(String),
    NotServed(String),
    /// The slice is bound to the control group of another owner.
    Taken(String),
    /// The control group of the process that the caller has named belongs to several programs or users. So the control group
    /// can't be bound, and its clients can't be ended together.
    SharedControlGroup(String),
    /// The caller has no right to make the request. The error has the D-Bus name `org.freedesktop.DBus.Error.AccessDenied`, the
    /// same name with which the bus refuses a call.
    AccessDenied(String),
    Failed(String),
}

// zbus can't derive `DBusError` for `RequestError`: the D-Bus name of one variant has another prefix than the names of the other
// variants.
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
            Self::Drained(text) => ("io.yunion.Mps1.Error.Drained", text),
            Self::NotServed(text) => ("io.yunion.Mps1.Error.NotServed", text),
            Self::Taken(text) => ("io.yunion.Mps1.Error.Taken", text),
            Self::SharedControlGroup(text) => ("io.yunion.Mps1.Error.SharedControlGroup", text),
            Self::AccessDenied(text) => ("org.freedesktop.DBus.Error.AccessDenied", text),
            Self::Failed(text) => ("io.yunion.Mps1.Error.Failed", text),
        }
    }

    fn text(&self) -> &str {
        self.name_and_text().1
    }

    /// The error whose name on the bus is `name`. None if `name` is the name of an error of the bus itself, or of a newer
    /// service.
    pub(super) fn read(name: &str, text: String) -> Option<Self> {
        const ALL: [fn(String) -> RequestError; 11] = [
            RequestError::NotReady,
            RequestError::NoSuchDevice,
            RequestError::NoSuchClient,
            RequestError::InvalidConfig,
            RequestError::Busy,
            RequestError::Drained,
            RequestError::NotServed,
            RequestError::Taken,
            RequestError::SharedControlGroup,
            RequestError::AccessDenied,
            RequestError::Failed,
        ];
        let found = ALL.into_iter().find(|of| of(String::new()).name_and_text().0 == name)?;
        Some(found(text))
    }
}

impl From<ContainerError> for RequestError {
    fn from(error: ContainerError) -> Self {
        let text = error.to_string();
        match error {
            ContainerError::NotReady(_) => Self::NotReady(text),
            ContainerError::NoSuchDevice { .. } | ContainerError::NoneCalled { .. } => {
                Self::NoSuchDevice(text)
            }
            ContainerError::Refused { obstacle, .. }
            | ContainerError::NoneFree { easiest: Some(obstacle), .. } => match obstacle {
                Obstacle::Unserved(_) => Self::NotServed(text),
                Obstacle::Taken(_) => Self::Taken(text),
                Obstacle::Drained => Self::Drained(text),
                Obstacle::Unusable(_) => Self::Failed(text),
            },
            ContainerError::NoneFree { easiest: None, .. } => Self::Taken(text),
            ContainerError::NoneNamed
            | ContainerError::NoUuid { .. }
            | ContainerError::SeveralControlDaemons { .. } => Self::Failed(text),
        }
    }
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
        for error in [error, denied] {
            assert_eq!(RequestError::read(error.name().as_str(), error.to_string()), Some(error));
        }
        assert_eq!(RequestError::read("io.yunion.Mps1.Error.Tired", String::new()), None);
    }
}
