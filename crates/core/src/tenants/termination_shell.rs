//! The further questions and acts for a request to end GPU work.

use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use super::client_shell::ClientShell;
use super::stop::Reception;
use crate::GpuUuid;
use crate::serve::ClientsOnGpus;
use crate::terms::SliceId;

/// The slices that a process is known to have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownSlices {
    /// The names of the slices.
    pub slices: Vec<SliceId>,
    /// True if no program in the process's container can change the slices, so the process has no others. Otherwise the slices
    /// come from the environment, and the process can write it.
    pub is_certain: bool,
}

/// A container that contains a process.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct EnclosingContainer {
    pub id: String,
    /// True if the host's own container runtime has made the container.
    pub is_the_hosts: bool,
}

/// The kind of a message about a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestNews {
    /// The work of a client has ended.
    Ended,
    /// There is no answer of the control daemon, so the work of a client may or may not have ended.
    MayHaveEnded,
}

/// Knows processes and their owners. Each call returns: it has its own deadline. Errors are texts for people.
pub trait TerminationShell: ClientShell {
    /// Describes a client: its PID and its owner.
    type Owner: Clone + fmt::Display + Send + Sync;

    /// Another look at all processes begins.
    fn begin_look(&mut self);

    /// The users of a process: its real user, and each user for whom it acts.
    fn users(&mut self, pid: u32) -> impl Future<Output = Result<Vec<u32>, String>> + Send;

    /// The slices that a process is known to have. None: they are not known.
    fn slices(&mut self, pid: u32) -> impl Future<Output = Result<Option<KnownSlices>, String>> + Send;

    /// The containers that contain a process, with ids in lower case.
    fn containers(
        &mut self,
        pid: u32,
    ) -> impl Future<Output = Result<Vec<EnclosingContainer>, String>> + Send;

    /// The path of the control group of a process.
    fn control_group(&mut self, pid: u32) -> impl Future<Output = Result<String, String>> + Send;

    /// The effect of a signal, by its number, on a process. None: the process has ended.
    fn reception(
        &mut self,
        pid: u32,
        signal: u32,
    ) -> impl Future<Output = Result<Option<Reception>, String>> + Send;

    /// Describes a process, which is known to have these slices.
    fn owner(&mut self, pid: u32, slices: Option<Vec<SliceId>>) -> impl Future<Output = Self::Owner> + Send;

    /// The program that a process runs.
    fn program(&mut self, pid: u32) -> impl Future<Output = String> + Send;

    /// The UUIDs of the GPUs of these slices.
    fn gpus_of(&self, slices: &[SliceId]) -> Vec<GpuUuid>;

    /// The clients that NVML lists on these GPUs.
    fn clients_on(&mut self, gpus: &[GpuUuid]) -> impl Future<Output = ClientsOnGpus> + Send;

    /// Writes a message about a client that the request has named, once.
    fn tell_of_request(&mut self, news: RequestNews, server: u32, pid: u32, owner: &Self::Owner);
}
