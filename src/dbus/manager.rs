//! `io.yunion.Mps1.Manager`, documented in `config/io.yunion.Mps1.Manager.xml`.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::mpsc;
use zbus::interface;
use zbus::message::Header;
use zbus::object_server::SignalEmitter;

use super::answers::{Present, Question};
use super::callers::is_privileged;
use super::gate::Gate;
use super::request::{Request, RequestError, Result, ask, bounded_name, bounded_names};
use super::rows::{Client, ControlDaemon, Device, Dict, Event, Gpu, Row, Service, clean};
use crate::publish::container::{ContainerConfig, ContainerError, container_config};
use crate::publish::one_slice;
use crate::publish::snapshot::{Named, Snapshot};

/// The entry point of everything that may be read.
pub(super) struct Manager {
    present: Present,
    requests: mpsc::Sender<Request>,
    gate: Arc<Gate>,
    /// The GPUs of which somebody was given several slices at once.
    given_several: Mutex<BTreeSet<String>>,
}

impl Manager {
    pub(super) fn new(present: Present, requests: mpsc::Sender<Request>, gate: Arc<Gate>) -> Self {
        Self { present, requests, gate, given_several: Mutex::default() }
    }

    /// Warns of slices of one GPU that are given together, once for each GPU: every user may ask as often as he likes.
    fn warn_of_several(&self, config: &ContainerConfig) {
        let mut told = self.given_several.lock().unwrap_or_else(PoisonError::into_inner);
        for (gpu, slices) in one_slice::given_several(config.devices()) {
            if told.insert(gpu.to_owned()) {
                let words = one_slice::in_words(&slices);
                tracing::warn!("GetContainerConfig: {words}; this is said once for each GPU");
            }
        }
    }

    fn snapshot(&self) -> Arc<Snapshot> {
        self.present.snapshot()
    }

    /// Has a large answer sent. The gate puts it in the place of the empty list that is returned here.
    fn list(&self, question: Question, call: &Header<'_>) -> Result<Vec<Dict>> {
        let snapshot = self.snapshot();
        known(&snapshot)?;
        self.gate.answer_with(call, self.present.answer(question, &snapshot, call)?)?;
        Ok(Vec::new())
    }

    fn service(&self) -> Service {
        Service::of(&self.snapshot())
    }
}

/// The GPUs are not known yet. An empty list would be a lie that makes the platform delete devices.
fn not_ready(snapshot: &Snapshot) -> RequestError {
    ContainerError::not_ready(snapshot).into()
}

fn known(snapshot: &Snapshot) -> Result<()> {
    if snapshot.gpus.is_some() { Ok(()) } else { Err(not_ready(snapshot)) }
}

#[interface(name = "io.yunion.Mps1.Manager", introspection_docs = false)]
impl Manager {
    #[zbus(out_args("devices"))]
    #[expect(clippy::needless_pass_by_value, reason = "zbus gives it away")]
    fn list_devices(&self, #[zbus(header)] call: Header<'_>) -> Result<Vec<Dict>> {
        self.list(Question::Devices, &call)
    }

    #[zbus(out_args("gpus"))]
    #[expect(clippy::needless_pass_by_value, reason = "zbus gives it away")]
    fn list_gpus(&self, #[zbus(header)] call: Header<'_>) -> Result<Vec<Dict>> {
        self.list(Question::Gpus, &call)
    }

    #[zbus(out_args("device"))]
    fn get_device(&self, name: &str) -> Result<Dict> {
        bounded_name(name)?;
        let snapshot = self.snapshot();
        known(&snapshot)?;
        match snapshot.find(name) {
            Some(Named::Gpu(gpu)) => Ok(Gpu::of(gpu).dict()),
            Some(Named::Slice(gpu, ordinal)) => Ok(Device::of(gpu, ordinal).dict()),
            None => Err(ContainerError::no_such_device(&snapshot, name).into()),
        }
    }

    #[zbus(out_args("environment", "mounts", "gpus"))]
    #[expect(
        clippy::type_complexity,
        reason = "under another name zbus would not see that it is three answers"
    )]
    fn get_container_config(
        &self,
        devices: Vec<String>,
    ) -> Result<(Vec<(String, String)>, Vec<(String, String, bool)>, Vec<String>)> {
        bounded_names(&devices)?;
        let config = container_config(&self.snapshot(), devices)?;
        self.warn_of_several(&config);
        let environment =
            config.environment.into_iter().map(|(name, value)| (name.to_owned(), clean(&value)));
        let mounts = config.mounts.into_iter().map(|mount| {
            let text = |path: std::path::PathBuf| clean(&path.to_string_lossy());
            (text(mount.host), text(mount.container), mount.read_only)
        });
        Ok((environment.collect(), mounts.collect(), config.gpus))
    }

    #[zbus(out_args("clients"))]
    async fn list_clients(&self, #[zbus(header)] call: Header<'_>) -> Result<Vec<Dict>> {
        known(&self.snapshot())?;
        let uid = self.gate.request(&call)?;
        let clients = ask(&self.requests, |reply| Request::Clients(uid, reply)).await?;
        Ok(clients.iter().map(|client| Client::of(client).dict()).collect())
    }

    async fn terminate_client(&self, pid: u32, #[zbus(header)] call: Header<'_>) -> Result<()> {
        let uid = self.gate.request(&call)?;
        // The control daemon waits for the client, and everybody for the control daemon: a program that does not let go
        // keeps it from all GPUs. Measured on an H200, with signal handlers that sleep and with four processes that stop
        // the client all the time: for as long as that goes on, whatever continues it. So the configuration decides
        // whether users may do this.
        let user = (!is_privileged(uid)).then_some(uid);
        ask(&self.requests, |reply| Request::Terminate(pid, user, reply)).await
    }

    #[zbus(out_args("control_daemons"))]
    fn list_control_daemons(&self) -> Vec<Dict> {
        let snapshot = self.snapshot();
        let row = |daemon| ControlDaemon::of(daemon, &snapshot).dict();
        snapshot.control_daemons.iter().map(row).collect()
    }

    #[zbus(out_args("events"))]
    fn list_events(&self) -> Vec<Dict> {
        self.snapshot().events.iter().map(|event| Event::of(event).dict()).collect()
    }

    #[zbus(property(emits_changed_signal = "const"))]
    fn version(&self) -> String {
        self.service().version
    }

    #[zbus(property)]
    fn state(&self) -> String {
        self.service().state
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
