//! The errors with which the service answers a request.

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
