//! The start of a control daemon. Another control daemon in its place ends if no work is lost, the GPUs get the service's compute
//! mode, and then the process is started.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::{String, ToString};

use super::Wanted;
use super::gpus::{GpuReach, GpuShell, clients_among};
use super::heal::clients_counted;
use super::shell::Failure;
use crate::{CoreTime, GpuUuid, Permit};

/// A directory in which another control daemon may listen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartPlace {
    /// The directory in which our control daemon makes its socket.
    Own,
    /// The pipe directory, if it is another one. An earlier version of this service, or another program, may have started a
    /// control daemon there.
    Pipe,
}

/// A control daemon in one of these directories that the service has not started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stranger {
    /// The PID, if it is known.
    pub pid: Option<u32>,
    /// The directory, for people.
    pub directory: String,
    /// The command that ends it, for people.
    pub end_it: String,
    /// The number of its clients, or why it is not known.
    pub clients: Result<usize, String>,
}

/// Carries out a start. Each call returns: it has its own deadline.
pub trait Starter: Send {
    /// Asks GPUs.
    type Gpus: GpuShell;

    /// The GPUs.
    fn gpus(&mut self) -> &mut Self::Gpus;

    /// The present moment.
    fn now(&self) -> CoreTime;

    /// Finds the program of control daemons.
    ///
    /// # Errors
    /// The program does not exist.
    fn find_program(&mut self) -> Result<(), Failure>;

    /// The control daemon that listens in this directory. None: no process listens there. An error: the front end can't be run.
    fn stranger(
        &mut self,
        place: StartPlace,
    ) -> impl Future<Output = Result<Option<Stranger>, Failure>> + Send;

    /// Asks a foreign control daemon to end as soon as it has no client. Returns true if it has ended.
    fn end_stranger(
        &mut self,
        place: StartPlace,
        pid: u32,
        may_end: Permit,
    ) -> impl Future<Output = Result<bool, Failure>> + Send;

    /// Opens the directories of the order. Returns true if our control daemon makes its socket in another directory than the
    /// pipe directory.
    ///
    /// # Errors
    /// A directory can't be used.
    fn open_directories(&mut self) -> Result<bool, Failure>;

    /// Starts the process with these GPUs, after recording it in the state file.
    fn spawn(
        &mut self,
        gpus: &[GpuUuid],
        multiuser: bool,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Waits until the process listens.
    fn comes_up(&mut self, reach: &mut GpuReach) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Records that the process has ended.
    fn has_ended(&mut self);

    /// A step of the start is done.
    fn passed(&self, step: &'static str, text: &str);

    /// Writes a message, once.
    fn tell(&mut self, text: String);
}

/// The part of an order that only a start depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WantedUsers {
    /// True if the control daemon serves several users at the same time.
    pub multiuser: bool,
    /// True if a control daemon for one user at a time is enough for a driver that refuses several users.
    pub is_optional: bool,
    /// The value of `cuda_mps_multiuser` that asks for one user at a time.
    pub without: &'static str,
}

/// Starts a control daemon for the order. Returns true if the control daemon serves several users.
///
/// # Errors
/// No control daemon listens.
pub async fn start(
    shell: &mut impl Starter,
    reach: &mut GpuReach,
    wanted: &Wanted,
    users: WantedUsers,
) -> Result<bool, Failure> {
    shell.find_program()?;
    make_way(shell, StartPlace::Own).await?;
    if shell.open_directories()? {
        make_way(shell, StartPlace::Pipe).await?;
    }
    let mut there = reach.look(shell.gpus(), wanted).await.unwrap_or_default();
    there.retain(|gpu, _| !reach.is_left_out(gpu));
    // As there is no control daemon, the processes that NVML lists as clients do not count as bypasses.
    let (clients, now) = (clients_among(&there), shell.now());
    reach.find_bypasses(shell.gpus(), wanted, &there, (&BTreeSet::new(), &clients), now);
    reach.take_modes(shell.gpus(), wanted).await;
    let gpus = reach.gpus(wanted);
    if gpus.is_empty() {
        return Err(Failure::Waiting(reach.why_none(wanted)));
    }
    shell.passed("compute-modes", "compute modes are set");
    let mut multiuser = users.multiuser;
    loop {
        shell.spawn(&gpus, multiuser).await?;
        match shell.comes_up(reach).await {
            Ok(()) => break,
            Err(Failure::Ended { refuses_multiuser: true, .. }) if multiuser => shell.has_ended(),
            Err(failure) => return Err(failure),
        }
        let refuses = "this driver's control daemon refuses multi-user mode";
        if !users.is_optional {
            return Err(Failure::Waiting(format!("{refuses}; set cuda_mps_multiuser to {}", users.without)));
        }
        shell.tell(format!("{refuses}; it serves one user at a time"));
        multiuser = false;
    }
    shell.passed("listens", "the control daemon listens");
    Ok(multiuser)
}

/// Makes sure that no other control daemon listens in this directory. One without clients is ended, no matter who started it. One
/// with clients stays.
async fn make_way(shell: &mut impl Starter, place: StartPlace) -> Result<(), Failure> {
    let Some(Stranger { pid, directory, end_it, clients }) = shell.stranger(place).await? else {
        return Ok(());
    };
    let named = pid.map_or("an unknown PID".to_string(), |pid| format!("PID {pid}"));
    let may_end = Permit::unused(clients.as_ref().ok().copied());
    if let Some((pid, may_end)) = pid.zip(may_end) {
        shell.tell(format!(
            "control daemon {named} in {directory} was not started by this service and has no client: replacing it"
        ));
        if shell.end_stranger(place, pid, may_end).await? {
            return Ok(());
        }
        return Err(Failure::Waiting(format!(
            "control daemon {named} in {directory} was asked to end and has not yet"
        )));
    }
    Err(match clients {
        Ok(clients) => Failure::InUse(format!(
            "a control daemon that this service has not started ({named}) serves {} in {directory}; it is replaced when they are done, or \
             {end_it}",
            clients_counted(clients)
        )),
        Err(error) => Failure::Waiting(format!(
            "a control daemon that this service has not started ({named}) holds {directory}: {error}; {end_it}"
        )),
    })
}
