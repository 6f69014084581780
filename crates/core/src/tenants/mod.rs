//! Ends the GPU work of tenants: the work of one client, of all clients that a caller names, or of clients that exceed the
//! budget of their slice.
//!
//! A signal that kills a client in the middle of a CUDA kernel frees the memory that the CUDA kernel uses. The CUDA kernel then
//! causes a fatal GPU error, which hits every client on the GPU. The command `terminate_client` ends the CUDA kernel first.
//! Therefore this module never ends a process by a signal.
//!
//! | file | its job |
//! |---|---|
//! | `client_shell.rs` | all questions and acts that are needed to end one client's work |
//! | `end_client.rs` | the end of one client's work |
//! | `budget.rs` | the budget of a slice, and which client loses its work next |
//! | `watch.rs` | the watch over the budgets of a GPU's slices: the messages, and the clients that may be ended at the moment |
//! | `overuse.rs` | how long overuse is shown, and how often a tenant starts ended clients again |
//! | `enforce.rs` | ends clients for a budget |
//! | `termination_shell.rs` | all further questions and acts for a request |
//! | `target.rs` | which clients a request means |
//! | `stop.rs` | which clients lose their work before a container gets a signal |
//! | `terminate.rs` | a request: its searches, its pauses, and its answer |
//! | `termination_error.rs` | why clients may still have work, in words |

pub mod budget;
mod client_shell;
mod end_client;
mod enforce;
mod overuse;
mod stop;
mod target;
mod terminate;
mod termination_error;
mod termination_shell;
mod watch;

pub use client_shell::{
    ClientEnd, ClientShell, Connections, DaemonClients, ListAnswer, ListedClient, by_client, known_clients,
};
pub use end_client::end_client;
pub use enforce::Enforcer;
pub use stop::Stop;
pub use target::Target;
pub use terminate::Termination;
pub use termination_error::{LeftClient, TerminationError, WhyLeft, first_named};
pub use termination_shell::{Reception, RequestNews, TerminationShell};
pub use watch::{
    AttemptNews, BudgetWatch, Look, OverBudget, OveruseNews, PERIOD, SliceBudgets, Victim, VictimState,
};
