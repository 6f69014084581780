//! A client of a GPU.

use std::time::SystemTime;

use crate::membership::whose::Whose;
use crate::membership::{GuestContainer, MayCommand, Membership};

/// A process that uses a GPU, as it is at the moment of asking.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientView {
    /// On the host.
    pub pid: u32,
    /// Whether it uses the GPU without an MPS server of this service.
    pub bypass: bool,
    /// Whether it waits for a server, and uses no GPU yet.
    pub waiting: bool,
    /// The real user id.
    pub uid: Option<u32>,
    /// The name of that user, or the id of a user without a name.
    pub user: Option<String>,
    pub command: String,
    /// The UUID of the GPU; empty if it uses none yet.
    pub gpu_uuid: String,
    pub slices: Option<Membership>,
    pub may_command: Option<MayCommand>,
    pub container_id: Option<String>,
    /// That container, as the host agent's records name it.
    pub guest: Option<GuestContainer>,
    /// The label of the binding of its control group.
    pub label: Option<String>,
    pub memory_mib: Option<u64>,
    /// When it started.
    pub since: Option<SystemTime>,
}

impl From<&ClientView> for Whose {
    fn from(client: &ClientView) -> Self {
        Self {
            pid: client.pid,
            user: client.user.clone(),
            guest: client.guest.clone(),
            label: client.label.clone(),
            slices: client.slices.as_ref().map(|known| known.slices.clone()),
            container: client.container_id.clone(),
        }
    }
}
