//! `io.yunion.Mps1.Manager`, documented in `config/io.yunion.Mps1.Manager.xml`.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use mps_core::terms::DeviceName;
use serde::{Serialize, Serializer};
use tokio::sync::{Semaphore, SemaphorePermit, mpsc, watch};
use zbus::message::Header;
use zbus::object_server::SignalEmitter;
use zbus::{Connection, Signature, Type, interface};

use super::binding::{self, CallOptions};
use super::request::{Callers, Request, Result, ask, bounded_name};
use super::slices::SliceDesk;
use common::bus::error::RequestError;
use common::bus::rows::{Client, ControlDaemon, Device, Dict, Event, Gpu, Row, Service};
use common::published::container::{ContainerConfig, Mount, no_such_device, not_ready};
use common::published::slices_of_one_gpu;
use common::published::snapshot::Snapshot;
use common::text::clean;

/// The most requests of users to end GPU work at the same time. Each request asks the control daemons, and supervisors have to
/// wait for these questions.
const OF_USERS: usize = 8;

pub(super) struct Manager {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    requests: mpsc::Sender<Request>,
    callers: Callers,
    of_users: Semaphore,
    desk: SliceDesk,
    /// The GPUs about which [`Manager::warn_of_several`] has logged a warning.
    given_several: Mutex<BTreeSet<String>>,
}

impl Manager {
    pub(super) fn new(
        snapshot: watch::Receiver<Arc<Snapshot>>,
        requests: mpsc::Sender<Request>,
        callers: Callers,
        desk: SliceDesk,
    ) -> Self {
        let of_users = Semaphore::new(OF_USERS);
        Self { snapshot, requests, callers, of_users, desk, given_several: Mutex::default() }
    }

    /// Returns a permit for a user's request to end GPU work. Root needs no permit. A user who may not end GPU work gets an
    /// error at once, so that repeated calls do not reach the main loop.
    fn place_for(&self, user: Option<u32>) -> Result<Option<SemaphorePermit<'_>>> {
        let Some(user) = user else { return Ok(None) };
        if !self.snapshot.borrow().users_may_terminate {
            return Err(RequestError::AccessDenied(format!(
                "only root may end GPU work, not user {user}: the control daemon waits until the program's GPU \
                 work has ended, and a program that never ends it would block all users; with cuda_mps_may_terminate: owner in \
                 host.conf users may end their own GPU work nevertheless"
            )));
        }
        let taken = |_| {
            RequestError::Busy(format!(
                "the service already carries out {OF_USERS} requests of users to end GPU work, and no more at once; \
                 ask again later"
            ))
        };
        self.of_users.try_acquire().map(Some).map_err(taken)
    }

    /// Logs a warning if a caller gets several slices of one GPU. Each GPU gets only one warning, since a caller may ask any
    /// number of times.
    fn warn_of_several(&self, config: &ContainerConfig) {
        let mut told = self.given_several.lock().unwrap_or_else(PoisonError::into_inner);
        for (gpu, slices) in slices_of_one_gpu::given_several(config.devices()) {
            if told.insert(gpu.to_owned()) {
                let words = slices_of_one_gpu::describe(&slices);
                tracing::warn!(
                    "a container was given several slices of a GPU: {words}; the service logs this once for \
                     each GPU"
                );
            }
        }
    }

    fn snapshot(&self) -> Arc<Snapshot> {
        Arc::clone(&self.snapshot.borrow())
    }

    fn service(&self) -> Service {
        Service::from_view(&self.snapshot())
    }
}

/// An error while the GPUs are not known yet. If the service answered with an empty list instead, the Cloudpods platform
/// would delete this host's slices from the platform's list of devices.
fn known(snapshot: &Snapshot) -> Result<()> {
    if snapshot.gpus.is_some() { Ok(()) } else { Err(not_ready(snapshot)) }
}

/// The answer of `ListDevices`, written directly from a Snapshot, so that only one row at a time is in memory.
struct DeviceList(Arc<Snapshot>);

impl Serialize for DeviceList {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.slices().map(|(gpu, slice)| Device::from_view(gpu, slice)))
    }
}

impl Type for DeviceList {
    const SIGNATURE: &'static Signature = Vec::<Device>::SIGNATURE;
}

#[interface(name = "io.yunion.Mps1.Manager", introspection_docs = false)]
impl Manager {
    #[zbus(out_args("devices"))]
    fn list_devices(&self) -> Result<DeviceList> {
        let snapshot = self.snapshot();
        known(&snapshot)?;
        Ok(DeviceList(snapshot))
    }

    #[zbus(out_args("gpus"))]
    fn list_gpus(&self) -> Result<Vec<Gpu>> {
        let snapshot = self.snapshot();
        known(&snapshot)?;
        Ok(snapshot.gpus.iter().flatten().map(|gpu| Gpu::from_view(gpu)).collect())
    }

    #[zbus(out_args("device"))]
    fn get_device(&self, name: &str) -> Result<Dict> {
        bounded_name(name)?;
        let snapshot = self.snapshot();
        known(&snapshot)?;
        match snapshot.find(name) {
            Some((gpu, DeviceName::Gpu(_))) => Ok(Gpu::from_view(gpu).dict()),
            Some((gpu, DeviceName::Slice(slice))) => Ok(Device::from_view(gpu, slice.ordinal).dict()),
            None => Err(no_such_device(&snapshot, name)),
        }
    }

    #[zbus(out_args("environment", "mounts", "gpus"))]
    async fn get_container_config(
        &self,
        devices: Vec<String>,
        #[zbus(connection)] bus: &Connection,
        #[zbus(header)] call: Header<'_>,
    ) -> Result<(Vec<(String, String)>, Vec<Mount>, Vec<String>)> {
        let wish = binding::wish(devices, CallOptions::new())?;
        let (_, config) = self.desk.settings(&wish, bus, &call).await?;
        self.warn_of_several(&config);
        Ok((config.environment, config.mounts, config.gpus))
    }

    #[zbus(out_args("taken", "environment", "mounts", "gpus"))]
    async fn take_devices(
        &self,
        devices: Vec<String>,
        options: CallOptions,
        #[zbus(connection)] bus: &Connection,
        #[zbus(header)] call: Header<'_>,
    ) -> Result<(Vec<String>, Vec<(String, String)>, Vec<Mount>, Vec<String>)> {
        let wish = binding::wish(devices, options)?;
        let (taken, config) = self.desk.settings(&wish, bus, &call).await?;
        self.warn_of_several(&config);
        Ok((taken, config.environment, config.mounts, config.gpus))
    }

    #[zbus(out_args("clients"))]
    async fn list_clients(&self) -> Result<Vec<Client>> {
        known(&self.snapshot())?;
        let clients = ask(&self.requests, Request::Clients).await?;
        Ok(clients.iter().map(Client::from_view).collect())
    }

    async fn look_at_clients(&self) -> Result<()> {
        known(&self.snapshot())?;
        ask(&self.requests, Request::LookAtClients).await
    }

    async fn terminate_client(
        &self,
        pid: u32,
        #[zbus(connection)] bus: &Connection,
        #[zbus(header)] call: Header<'_>,
    ) -> Result<()> {
        // A control daemon that ends the work of a client waits until the client disconnects, and all other callers wait for
        // the control daemon. So a client that does not disconnect blocks the control daemon for all its GPUs. Measured on an
        // H200, with clients that sleep in signal handlers, and with four processes that stop the client again and again: the
        // control daemon was blocked for as long as these processes went on, although the service continued the client. So the
        // configuration decides if users other than root may call `TerminateClient`.
        let user = self.callers.user_behind(bus, &call).await?;
        let _place = self.place_for(user)?;
        ask(&self.requests, |reply| Request::Terminate(pid, user, reply)).await
    }

    #[zbus(out_args("control_daemons"))]
    fn list_control_daemons(&self) -> Vec<ControlDaemon> {
        let snapshot = self.snapshot();
        snapshot.control_daemons.iter().map(|daemon| ControlDaemon::from_view(daemon, &snapshot)).collect()
    }

    #[zbus(out_args("events"))]
    fn list_events(&self) -> Vec<Event> {
        self.snapshot().events.iter().map(Event::from_view).collect()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn version(&self) -> String {
        self.service().version
    }

    #[zbus(property)]
    fn state(&self) -> String {
        self.service().state.to_string()
    }

    #[zbus(property)]
    fn state_reason(&self) -> String {
        clean(&self.service().state_reason)
    }

    #[zbus(property)]
    fn generation(&self) -> u64 {
        self.service().generation
    }

    #[zbus(property)]
    fn enabled(&self) -> bool {
        self.service().enabled
    }

    #[zbus(property)]
    fn pipe_directory(&self) -> String {
        clean(&self.service().pipe_directory)
    }

    #[zbus(property)]
    fn log_directory(&self) -> String {
        clean(&self.service().log_directory)
    }

    #[zbus(property)]
    fn driver_version(&self) -> String {
        clean(&self.service().driver_version)
    }

    #[zbus(signal)]
    pub(super) async fn devices_changed(emitter: &SignalEmitter<'_>, generation: u64) -> zbus::Result<()>;

    #[zbus(signal)]
    pub(super) async fn over_use(
        emitter: &SignalEmitter<'_>,
        device: &str,
        reasons: &[&str],
        pids: &[u32],
    ) -> zbus::Result<()>;

    #[zbus(signal)]
    pub(super) async fn client_fault(
        emitter: &SignalEmitter<'_>,
        gpu_uuid: &str,
        pids: &[u32],
        reason: &str,
    ) -> zbus::Result<()>;
}
