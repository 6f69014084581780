//! The errors of the service on D-Bus.

use zbus::DBusError;
use zbus::message::{Header, Message};
use zbus::names::ErrorName;

pub use crate::published::request_error::RequestError;
use crate::text::clean;

// zbus can derive `DBusError` for an enum only if all its D-Bus names have one prefix. The name of `AccessDenied` has another
// prefix.
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

    /// The error with the D-Bus name `name`. None if the service has no error with this name: the error comes from the bus, or
    /// from a newer service.
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
