//! The questions and acts that a request to end GPU work needs, in addition to those of `client_shell.rs`.

use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use super::client_shell::ClientShell;
use crate::GpuUuid;
use crate::register::Membership;
use crate::serve::ClientsOnGpus;
use crate::terms::SliceId;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reception {
    /// The process has a handler for the signal, or blocks the signal and waits for it.
    Handled,
    /// The process ignores the signal. The first process of a PID namespace ignores every signal for which it has no handler.
    Ignored,
    /// The signal ends the process.
    Fatal,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestNews {
    Ended,
    /// The control daemon has not answered, so the work of the client may or may not have ended.
    MayHaveEnded,
}

/// The questions about processes and their owners. Each call has its own deadline, so no call waits forever. Errors are texts
/// for messages.
pub trait TerminationShell: ClientShell {
    /// Describes a client in messages, with its PID and its owner.
    type Owner: Clone + fmt::Display + Send + Sync;

    /// The request begins another search through all processes, so the shell must examine the processes anew.
    fn begin_look(&mut self);

    /// The user ids of a process: the id of its real user, and each user id that gives rights to the process.
    fn users(&mut self, pid: u32) -> impl Future<Output = Result<Vec<u32>, String>> + Send;

    fn slices(&mut self, pid: u32) -> impl Future<Output = Result<Option<Membership>, String>> + Send;

    /// The containers that contain a process, by their ids in lower case. True stands for a container that the host's own
    /// container runtime has made. False stands for a container that a program in a container may have made.
    fn containers(&mut self, pid: u32)
    -> impl Future<Output = Result<BTreeMap<String, bool>, String>> + Send;

    fn control_group(&mut self, pid: u32) -> impl Future<Output = Result<String, String>> + Send;

    /// The effect of the signal with this number on a process. None if the process has ended.
    fn reception(
        &mut self,
        pid: u32,
        signal: u32,
    ) -> impl Future<Output = Result<Option<Reception>, String>> + Send;

    fn owner(&mut self, pid: u32) -> impl Future<Output = Self::Owner> + Send;

    fn program(&mut self, pid: u32) -> impl Future<Output = String> + Send;

    fn gpus_of(&self, slices: &[SliceId]) -> Vec<GpuUuid>;

    fn clients_on(&mut self, gpus: &[GpuUuid]) -> impl Future<Output = ClientsOnGpus> + Send;

    fn tell_of_request(&mut self, news: RequestNews, server: u32, pid: u32, owner: &Self::Owner);
}
