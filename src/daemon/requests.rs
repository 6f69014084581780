//! Requests from the bus. The main loop answers a request at once, or has a task carry it out.

use std::sync::Arc;

use mps_core::DaemonId;
use mps_core::register::{KnownClient, shortened};
use mps_core::tenants::{Stop, Target, TerminationError};
use mps_core::terms::DeviceName;
use tokio::task::JoinSet;

use super::fleet::Fleet;
use super::{Daemon, bindings, reload};
use crate::dbus::{Reply, Request};
use crate::register::Clients;
use crate::supervisor::nvml_worker::NvmlWorker;
use crate::tenants::clients;
use crate::tenants::describe::describe;
use crate::tenants::terminate::{self, Processes};
use common::bus::error::RequestError;
use common::bus::proxy::{ContainerStop, GroupOf};
use common::host::blocking::Blocking;
use common::host::control_groups;
use common::published::client::ClientView;
use common::published::container::{no_such_device, not_ready};
use common::published::events::Event;
use common::published::snapshot::Snapshot;

/// The most requests to end GPU work that ask the kernel about processes at the same time. An answer of the kernel takes
/// microseconds, so further requests wait only for a moment.
const TERMINATIONS: usize = 4;

/// A container's id has 64 hexadecimal digits. A caller may give only the first digits, but at least 12.
const SHORTEST_ID: usize = 12;
const ID: usize = 64;

/// The most callers that wait for the next list of clients. Further callers get the error `Busy`.
const LISTINGS: usize = 256;

#[derive(Debug)]
pub(super) struct Requests {
    listings: Vec<Reply<Vec<ClientView>>>,
    /// The task that lists the clients. A caller that comes while the task runs waits for the next list.
    pub(super) look: JoinSet<()>,
    clients: Clients,
    /// Asks the kernel which processes a request to end GPU work is about, on threads other than the main loop's.
    kernel: Blocking,
    nvml: NvmlWorker,
    /// The requests that tasks carry out while the main loop goes on. After a task, the main loop publishes a new Snapshot
    /// and then answers the request. So the caller finds the effects of the request in the published facts.
    pub(super) beside: JoinSet<Finished>,
}

#[derive(Debug)]
pub(super) struct Finished {
    pub(super) event: Option<Event>,
    pub(super) answer: Result<(), RequestError>,
    pub(super) reply: Reply<()>,
}

impl Requests {
    pub(super) fn new(nvml: &NvmlWorker, clients: Clients) -> Self {
        let kernel = Blocking::new(TERMINATIONS);
        let (look, beside) = (JoinSet::new(), JoinSet::new());
        Self { listings: Vec::new(), look, clients, kernel, nvml: nvml.clone(), beside }
    }

    fn list_clients(&mut self, fleet: &Fleet, reply: Reply<Vec<ClientView>>) {
        if self.listings.len() < LISTINGS {
            self.listings.push(reply);
            self.begin_list(fleet);
        } else {
            let _ = reply.send(Err(RequestError::Busy(
                "too many callers ask for the list of clients at the same time; ask again later".to_owned(),
            )));
        }
    }

    /// Lists the clients for all callers that wait. While a list is being made, new callers wait for the next list.
    pub(super) fn begin_list(&mut self, fleet: &Fleet) {
        if self.listings.is_empty() || !self.look.is_empty() {
            return;
        }
        let (callers, statuses) = (std::mem::take(&mut self.listings), fleet.statuses());
        let tools = fleet.tools().clone();
        self.look.spawn(async move {
            let listed = clients::list(&statuses, &tools).await;
            for reply in callers {
                let _ = reply.send(Ok(listed.clone()));
            }
        });
    }
}

impl Daemon {
    pub(super) async fn answer(&mut self, request: Request) {
        match request {
            Request::Reload(reply) => reload::and_tell(self, reply).await,
            Request::Clients(reply) => self.requests.list_clients(&self.fleet, reply),
            Request::LookAtClients(reply) => self.look_at_clients(reply),
            Request::Terminate(pid, user, reply) => self.terminate(Ok(process(pid, user)), reply),
            Request::ReleaseDevices(devices, reply) => {
                let wanted = slices(&self.snapshot.borrow(), devices);
                self.terminate(wanted, reply);
            }
            Request::ReleaseContainer(id, reply) => {
                self.terminate(container_id(&id).map(Target::Container), reply);
            }
            Request::ReleaseGroup(wanted, reply) => self.terminate(signalled(wanted), reply),
            Request::Drain(names, reply) => self.drain(&names, reply),
            Request::Undrain(names, reply) => self.undrain(&names, reply),
            Request::Bind(wanted, reply) => self.bind(&wanted, reply),
            Request::Unbind(group, reply) => self.unbind(&group, reply),
            Request::Apply(force, reply) => {
                if force {
                    let doomed = self.fleet.ended_by_force();
                    self.name_clients("apply --force", &doomed).await;
                }
                // Naming the clients takes time, and the caller may have given up meanwhile. A caller that has given up must
                // not cause the end of a control daemon.
                if reply.is_closed() {
                    return;
                }
                self.fleet.apply(force, reply);
            }
            Request::RestartServer(gpu, reply) => self.restart_server(&gpu, reply),
        }
    }

    fn terminate(&mut self, wanted: Result<Target, RequestError>, reply: Reply<()>) {
        let wanted = match wanted {
            Ok(wanted) => wanted,
            Err(error) => return drop(reply.send(Err(error))),
        };
        let daemons = self.fleet.with_clients();
        let (kernel, nvml) = (self.requests.kernel.clone(), self.requests.nvml.clone());
        let processes = Processes::new(self.requests.clients.clone(), kernel, nvml);
        self.requests.beside.spawn(async move {
            let (had_work, ended) = terminate::terminate(daemons, wanted.clone(), processes).await;
            let event = describe(had_work).and_then(|clients| event(&wanted, clients));
            let answer = ended.map_err(|error| not_ended(&error));
            Finished { event, answer, reply }
        });
    }

    /// Answers a request that a task has carried out. The event and the new numbers of clients are published before the answer.
    pub(super) fn finished(&mut self, finished: Finished) {
        let Finished { event, answer, reply } = finished;
        if let Some(event) = event {
            // The task has already written the event to the journal.
            self.events.push(event);
        }
        self.settle();
        let _ = reply.send(answer);
    }

    fn restart_server(&self, gpu: &str, reply: Reply<()>) {
        let snapshot = Arc::clone(&self.snapshot.borrow());
        let id: DaemonId = match snapshot.find(gpu) {
            Some((gpu, DeviceName::Gpu(_))) => gpu.control_daemon(0).into(),
            Some((gpu, DeviceName::Slice(slice))) => gpu.control_daemon(slice.ordinal).into(),
            None => return drop(reply.send(Err(no_such_device(&snapshot, gpu)))),
        };
        self.fleet.restart_server(&id, gpu, reply);
    }
}

/// Root may name any process, and a user only the user's own processes.
fn process(pid: u32, user: Option<u32>) -> Target {
    match user {
        None => Target::Process(pid),
        Some(user) => Target::ProcessOf { pid, user },
    }
}

fn slices(snapshot: &Snapshot, names: Vec<String>) -> Result<Target, RequestError> {
    if snapshot.gpus.is_none() {
        return Err(not_ready(snapshot));
    }
    let slice = |name: String| match snapshot.find(&name) {
        Some((_, DeviceName::Slice(slice))) => Ok(slice),
        Some((_, DeviceName::Gpu(gpu))) => Err(RequestError::Failed(format!(
            "{gpu} is a whole GPU, and its clients may belong to several tenants; name slices of this GPU, \
             or containers: yunion-mpsctl terminate --container ID"
        ))),
        None => Err(no_such_device(snapshot, &name)),
    };
    names.into_iter().map(slice).collect::<Result<_, _>>().map(Target::Slices)
}

/// Accepts all 64 hexadecimal digits of a container's id, or at least the first 12. Returns the id in lower case.
fn container_id(text: &str) -> Result<String, RequestError> {
    if (SHORTEST_ID..=ID).contains(&text.len()) && text.bytes().all(|c| c.is_ascii_hexdigit()) {
        return Ok(text.to_ascii_lowercase());
    }
    Err(RequestError::Failed(format!(
        "{text:?} is no container id; give its 64 hexadecimal digits, or at least the first {SHORTEST_ID} \
         digits: `docker inspect --format '{{{{.Id}}}}' NAME`, `podman inspect --format '{{{{.Id}}}}' NAME` \
         or `crictl ps --name NAME` prints the id of the container NAME"
    )))
}

/// The event about a request that has ended the work of `clients`. None if a container is stopped, since containers stop all
/// the time.
fn event(wanted: &Target, clients: String) -> Option<Event> {
    let (whom, names) = match wanted {
        Target::Process(pid) | Target::ProcessOf { pid, .. } => {
            (format!("process {pid}"), vec![pid.to_string()])
        }
        Target::Slices(slices) => (shortened(slices), slices.iter().map(ToString::to_string).collect()),
        Target::Container(id) => (format!("container {id}"), vec![id.clone()]),
        Target::Signalled(_) => return None,
    };
    Some(Event::ended(&whom, names, clients))
}

fn signalled(wanted: ContainerStop) -> Result<Target, RequestError> {
    let ContainerStop { pid, container, signal, to_all } = wanted;
    let path = bindings::path_of(&GroupOf::Process(pid))?;
    let group = control_groups::of_container(&path, &container).to_owned();
    if let Some(what) = control_groups::shared_by(&group) {
        return Err(RequestError::SharedControlGroup(format!(
            "process {pid} is in control group {group} ({what}), which does not belong to a container; \
             yunion-mpsctl terminate ends the GPU work of such a process"
        )));
    }
    Ok(Target::Signalled(Stop { group, first: pid, signal, to_all }))
}

fn not_ended(error: &TerminationError<KnownClient>) -> RequestError {
    let text = error.to_string();
    match error {
        TerminationError::NoSuchClient(_) | TerminationError::NotTheirs { .. } => {
            RequestError::NoSuchClient(text)
        }
        _ => RequestError::Failed(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_hexadecimal_and_long_enough() {
        let full = "0123456789ABCDEF".repeat(4);
        assert_eq!(container_id(&full), Ok(full.to_lowercase()));
        assert!(container_id("0123456789ab").is_ok());
        for text in ["", "0123456789a", "0123456789xy", &format!("{full}0"), "0123456789a\u{e9}"] {
            let error = container_id(text).unwrap_err().to_string();
            assert!(error.contains("at least the first 12"), "{error}");
        }
    }
}
