//! Everything that a request to end GPU work asks of the outside, beyond the end of one client.

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
    /// No program in its container can change them, so it has no others. Otherwise its environment names them, which it can
    /// write as it likes.
    pub is_certain: bool,
}

/// A container around a process.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct EnclosingContainer {
    pub id: String,
    /// True if the host's own runtime has made it.
    pub is_the_hosts: bool,
}

/// A message about a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestNews {
    /// The work of a client has ended.
    Ended,
    /// The answer of the control daemon is missing: the work of a client may have ended or not.
    MayHaveEnded,
}

/// Knows processes, and whom they belong to. Each call comes back: it has a deadline of its own. Errors are words.
pub trait TerminationShell: ClientShell {
    /// A client as people know it: its PID, and whom it belongs to.
    type Owner: Clone + fmt::Display + Send + Sync;

    /// Another look at all processes begins.
    fn begin_look(&mut self);

    /// The users of a process: the real one, and each that it acts for.
    fn users(&mut self, pid: u32) -> impl Future<Output = Result<Vec<u32>, String>> + Send;

    /// The slices that a process is known to have. None: nothing says which.
    fn slices(&mut self, pid: u32) -> impl Future<Output = Result<Option<KnownSlices>, String>> + Send;

    /// The containers around a process, their ids in lower case.
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

    /// The words about a process, which is known to have these slices.
    fn owner(&mut self, pid: u32, slices: Option<Vec<SliceId>>) -> impl Future<Output = Self::Owner> + Send;

    /// The program that a process runs.
    fn program(&mut self, pid: u32) -> impl Future<Output = String> + Send;

    /// The UUIDs of the GPUs of these slices.
    fn gpus_of(&self, slices: &[SliceId]) -> Vec<GpuUuid>;

    /// The clients that NVML lists on these GPUs.
    fn clients_on(&mut self, gpus: &[GpuUuid]) -> impl Future<Output = ClientsOnGpus> + Send;

    /// Tells people once of a client that the request has named.
    fn tell_of_request(&mut self, news: RequestNews, server: u32, pid: u32, owner: &Self::Owner);
}
