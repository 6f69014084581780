//! The start of a control daemon. First the service ends a foreign control daemon that listens in the same directories, if no
//! work is lost. Then the service sets the compute mode of the GPUs, and starts the process of the control daemon.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::{String, ToString};

use super::Wanted;
use super::gpus::{GpuReach, GpuShell, clients_among};
use super::heal::clients_counted;
use super::news::News;
use super::shell::Failure;
use crate::view::ControlDaemonState;
use crate::{CoreTime, GpuUuid, Permit};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartPlace {
    /// The directory in which the service's own control daemon makes its socket.
    Own,
    /// The pipe directory, if the control daemon makes its socket in another directory. An earlier version of the service, or
    /// another program, may have started a control daemon in the pipe directory.
    Pipe,
}

/// A foreign control daemon: the service has not started it, and it listens in a directory of the control daemon that should
/// start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stranger {
    pub pid: Option<u32>,
    pub directory: String,
    /// The command with which an administrator can end the foreign control daemon.
    pub end_it: String,
    /// The number of the foreign control daemon's clients, or the reason why the number is not known.
    pub clients: Result<usize, String>,
}

/// The questions and acts for the start of a control daemon. Each call has its own deadline, so no call waits forever.
pub trait Starter: Send {
    type Gpus: GpuShell;

    fn gpus(&mut self) -> &mut Self::Gpus;

    fn now(&self) -> CoreTime;

    /// Finds NVIDIA's program `nvidia-cuda-mps-control`.
    ///
    /// # Errors
    /// The program does not exist.
    fn find_program(&mut self) -> Result<(), Failure>;

    /// The foreign control daemon that listens in this directory. None if no process listens there. An error means that the
    /// front end can't be run.
    fn stranger(
        &mut self,
        place: StartPlace,
    ) -> impl Future<Output = Result<Option<Stranger>, Failure>> + Send;

    /// Asks a foreign control daemon to end as soon as it has no client. Returns true if the foreign control daemon has ended.
    fn end_stranger(
        &mut self,
        place: StartPlace,
        pid: u32,
        may_end: Permit,
    ) -> impl Future<Output = Result<bool, Failure>> + Send;

    /// Opens the directories that the order names for the control daemon. Returns true if the control daemon makes its socket
    /// in another directory than the pipe directory.
    ///
    /// # Errors
    /// A directory can't be used.
    fn open_directories(&mut self) -> Result<bool, Failure>;

    /// Starts the process of the control daemon with these GPUs, and records the process in the state file.
    fn spawn(
        &mut self,
        gpus: &[GpuUuid],
        multiuser: bool,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    fn comes_up(&mut self, reach: &mut GpuReach) -> impl Future<Output = Result<(), Failure>> + Send;

    fn has_ended(&mut self);
}

/// The part of an order about the users of a control daemon. Only the start of a control daemon needs this part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WantedUsers {
    /// True if the control daemon should serve several users at the same time. False if users take turns.
    pub multiuser: bool,
    /// True if the control daemon may serve one user at a time when the driver refuses several users.
    pub is_optional: bool,
    /// The value of the option `cuda_mps_multiuser` with which an administrator selects one user at a time, for messages.
    pub without: &'static str,
}

/// Starts a control daemon for the order. Returns true if the control daemon serves several users at the same time.
///
/// # Errors
/// The control daemon has not started, or does not listen.
pub async fn start(
    shell: &mut impl Starter,
    reach: &mut GpuReach,
    wanted: &Wanted,
    users: WantedUsers,
) -> Result<bool, Failure> {
    shell.gpus().show(|view| view.enter(ControlDaemonState::Starting, false, ""));
    shell.find_program()?;
    make_way(shell, StartPlace::Own).await?;
    if shell.open_directories()? {
        make_way(shell, StartPlace::Pipe).await?;
    }
    let mut there = reach.look(shell.gpus(), wanted).await.unwrap_or_default();
    there.retain(|gpu, _| !reach.is_left_out(gpu));
    // No control daemon of the service runs yet, but an earlier server may still be ending. Processes that NVML lists as MPS
    // clients may be its clients, so they do not count as programs without MPS.
    let (clients, now) = (clients_among(&there), shell.now());
    reach.find_bypasses(shell.gpus(), wanted, &there, (&BTreeSet::new(), &clients), now);
    reach.take_modes(shell.gpus(), wanted).await;
    let gpus = reach.gpus(wanted);
    if gpus.is_empty() {
        return Err(Failure::Waiting(reach.why_none(wanted)));
    }
    shell.gpus().passed("compute-modes", "compute modes are set");
    let mut multiuser = users.multiuser;
    loop {
        shell.spawn(&gpus, multiuser).await?;
        match shell.comes_up(reach).await {
            Ok(()) => break,
            Err(Failure::Ended { refuses_multiuser: true, .. }) if multiuser => shell.has_ended(),
            Err(failure) => return Err(failure),
        }
        let refuses = "the control daemon of this driver has no multi-user mode";
        if !users.is_optional {
            return Err(Failure::Waiting(format!(
                "{refuses}; set cuda_mps_multiuser to {without}",
                without = users.without
            )));
        }
        shell.gpus().tell(News::Event, format!("{refuses}, so the control daemon serves one user at a time"));
        multiuser = false;
    }
    shell.gpus().passed("listens", "the control daemon listens");
    Ok(multiuser)
}

/// Makes sure that no foreign control daemon listens in this directory. A foreign control daemon without clients is ended, no
/// matter which program has started it.
async fn make_way(shell: &mut impl Starter, place: StartPlace) -> Result<(), Failure> {
    let Some(Stranger { pid, directory, end_it, clients }) = shell.stranger(place).await? else {
        return Ok(());
    };
    let named = pid.map_or("an unknown PID".to_string(), |pid| format!("PID {pid}"));
    let may_end = Permit::unused(clients.as_ref().ok().copied());
    if let Some((pid, may_end)) = pid.zip(may_end) {
        shell.gpus().tell(News::Event, format!(
            "control daemon {named} in {directory} was not started by this service and has no client: the \
             service replaces it"
        ));
        if shell.end_stranger(place, pid, may_end).await? {
            return Ok(());
        }
        return Err(Failure::Waiting(format!(
            "control daemon {named} in {directory} was asked to end and has not ended yet"
        )));
    }
    Err(match clients {
        Ok(clients) => Failure::InUse(format!(
            "a control daemon that this service has not started ({named}) serves {clients} in {directory}; \
             the service replaces it when these clients have ended, or {end_it}",
            clients = clients_counted(clients)
        )),
        Err(error) => Failure::Waiting(format!(
            "a control daemon that this service has not started ({named}) listens in {directory}: {error}; \
             {end_it}"
        )),
    })
}
