//! The questions and acts that a request to end GPU work needs, besides those of `client_shell.rs`.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use super::client_shell::ClientShell;
use crate::GpuUuid;
use crate::register::Membership;
use crate::serve::ClientsOnGpus;
use crate::terms::SliceId;

/// The effect of a signal on a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reception {
    /// The process has a handler for the signal, or blocks the signal and waits for it.
    Handled,
    /// The process ignores the signal. The first process of a PID namespace ignores every signal for which it has no handler.
    Ignored,
    /// The signal ends the process.
    Fatal,
}

/// The kind of a message about a request to end GPU work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestNews {
    /// The work of a client has ended.
    Ended,
    /// The control daemon has not answered, so the work of a client may or may not have ended.
    MayHaveEnded,
}

/// The questions about processes and their owners. Each call has its own deadline, so no call waits forever. Errors are
/// texts for people.
pub trait TerminationShell: ClientShell {
    /// The type that describes a client: its PID and its owner.
    type Owner: Clone + fmt::Display + Send + Sync;

    /// Reports to the shell that the request begins another look at all processes.
    fn begin_look(&mut self);

    /// The users of a process: its real user, and each user with the rights of which the process acts.
    fn users(&mut self, pid: u32) -> impl Future<Output = Result<Vec<u32>, String>> + Send;

    /// The slices that a process is known to have. None if the slices of the process are not known.
    fn slices(&mut self, pid: u32) -> impl Future<Output = Result<Option<Membership>, String>> + Send;

    /// The containers that contain a process, by their ids in lower case. The value is true if the host's own container runtime
    /// has made the container, and false if a program in a container may have made it.
    fn containers(&mut self, pid: u32)
    -> impl Future<Output = Result<BTreeMap<String, bool>, String>> + Send;

    /// The path of the control group of a process.
    fn control_group(&mut self, pid: u32) -> impl Future<Output = Result<String, String>> + Send;

    /// The effect of a signal, given by its number, on a process. None if the process has ended.
    fn reception(
        &mut self,
        pid: u32,
        signal: u32,
    ) -> impl Future<Output = Result<Option<Reception>, String>> + Send;

    /// Describes a process.
    fn owner(&mut self, pid: u32) -> impl Future<Output = Self::Owner> + Send;

    /// The program that a process runs.
    fn program(&mut self, pid: u32) -> impl Future<Output = String> + Send;

    /// The UUIDs of the GPUs of these slices.
    fn gpus_of(&self, slices: &[SliceId]) -> Vec<GpuUuid>;

    /// The clients that NVML lists on these GPUs.
    fn clients_on(&mut self, gpus: &[GpuUuid]) -> impl Future<Output = ClientsOnGpus> + Send;

    /// Writes a message about a client that the request means.
    fn tell_of_request(&mut self, news: RequestNews, server: u32, pid: u32, owner: &Self::Owner);
}
