//! The end of tenants' GPU work: of one client, of all clients that a caller names, and of clients that are too much for their
//! slice's budget.
//!
//! A signal that ends a client in the middle of a kernel takes the memory away under that kernel. This is a fault, and a fault
//! hits every client on that GPU. `terminate_client` ends the kernel first, so nothing here sends a signal that ends a process.
//!
//! | file | its job |
//! |---|---|
//! | `client_shell.rs` | everything that the end of one client's work asks of the outside |
//! | `end_client.rs` | the end of one client's work |
//! | `budget.rs` | the budget of a slice, and the client that ends next for it |
//! | `watch.rs` | the watch over the budgets of a GPU's slices: the reports, and the clients that may be ended at a moment |
//! | `spared.rs` | the clients that no budget ends |
//! | `overuse.rs` | how long overuse is shown |
//! | `enforce.rs` | the end of clients for a budget |
//! | `termination_shell.rs` | everything that a request asks beyond that |
//! | `target.rs` | which clients a request means |
//! | `stop.rs` | which clients end before the processes of a container get a signal |
//! | `terminate.rs` | a request: its looks, its pauses, and when it is answered |
//! | `termination_error.rs` | why clients may have work left, in words |

pub mod budget;
mod client_shell;
mod end_client;
mod enforce;
mod overuse;
mod spared;
mod stop;
mod target;
mod terminate;
mod termination_error;
mod termination_shell;
mod watch;

pub use client_shell::{
    ClientShell, Connections, DaemonClients, ListedClient, TerminateAnswer, UnknownClients, by_client,
    known_clients,
};
pub use end_client::{ClientEnd, end_client};
pub use enforce::{Enforced, Enforcer, MemberShell};
pub use stop::{Reception, Stop};
pub use target::Target;
pub use terminate::Termination;
pub use termination_error::{LeftClient, TerminationError, WhyLeft, first_named};
pub use termination_shell::{EnclosingContainer, KnownSlices, RequestNews, TerminationShell};
pub use watch::{
    AttemptNews, BudgetWatch, Look, OverBudget, OveruseNews, PERIOD, SliceBudgets, Victim, VictimState,
};
