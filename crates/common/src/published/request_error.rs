//! The errors with which the service answers a request.

/// The text of each error is for a person. The error's name on D-Bus is `io.yunion.Mps1.Error.<variant>`, unless the comment of
/// the variant gives another name.
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
    Drained(String),
    NotServed(String),
    /// The slice is bound to the control group of another owner, or the caller can choose only among slices that are full.
    Taken(String),
    /// The control group in the request belongs to several programs or users. So the service can't bind this control group, and
    /// can't end its clients together.
    SharedControlGroup(String),
    /// The caller has no right to make the request. The name on D-Bus is `org.freedesktop.DBus.Error.AccessDenied`, the name
    /// with which the bus itself refuses a call.
    AccessDenied(String),
    Failed(String),
}
