//! The end of tenants' GPU work: of one client, and of all clients that somebody names.
//!
//! A signal that ends a client in the middle of a kernel takes the memory away under that kernel. This is a fault, and a fault
//! hits every client on that GPU. `terminate_client` ends the kernel first, so nothing here sends a signal that ends anybody.
//!
//! | file | its job |
//! |---|---|
//! | `shell.rs` | everything that is asked of the outside |
//! | `end.rs` | the end of one client's work |

mod end;
mod shell;

pub use end::{ClientEnd, end_client};
pub use shell::{ClientShell, Connections, DaemonClients, ListedClient, TerminateAnswer, by_client};
