//! `yunion-mpsctl metrics`: the published values for collectors of metrics. docs/metrics.md lists all metrics.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use crate::show::exposition::{ExpositionFormat, Family, Labels, exposition};
use crate::show::table::Shown;
use crate::{Error, Result};
use common::bus::answers::{Published, given};
use common::bus::proxy::{BusError, DaemonProxy, Listed};
use common::bus::rows::{Client, ControlDaemon, Device, Gpu, Service};
use common::text::printable;
use common::whole_file;

/// The most clients that have series of their own. A host with 16 GPUs and 60 clients on each GPU does not reach this number.
const MOST_CLIENTS: usize = 1024;

/// The most characters in a label of a client. A container's id has 64 characters.
const LABEL: usize = 64;

/// Prints the metrics. If the service does not run, the only metric is `yunion_mps_up 0`.
pub(crate) async fn metrics(
    daemon: &DaemonProxy,
    has_clients: bool,
    format: ExpositionFormat,
    file: Option<&Path>,
    out: &mut dyn Write,
) -> Result<()> {
    let published = match published(daemon).await {
        Err(BusError::NotRunning) => None,
        // If the service ends during the request, the bus answers for the service with one of these errors.
        Err(BusError::Refused(_) | BusError::Other { .. })
            if matches!(daemon.service().await, Err(BusError::NotRunning)) =>
        {
            None
        }
        published => Some(published?),
    };
    let mut to = Families::default();
    to.one("up", "Whether yunion-mps-daemon runs.", flag(published.is_some()));
    if let Some(published) = &published {
        about_service(published, &mut to);
        let devices = published.devices.as_deref().unwrap_or_default();
        about_control_daemons(&published.control_daemons, &mut to);
        about_gpus(&published.gpus, &mut to);
        about_devices(devices, &mut to);
        about_bypasses(published, &mut to);
        if has_clients {
            about_each_client(published, devices, &mut to);
        }
    }
    let text = exposition(&to.0, format);
    match file {
        None => out.write_all(text.as_bytes())?,
        Some(file) => replace(file, &text).map_err(|error| {
            Error::Failed(format!("can't write {}: {error}", printable(&file.to_string_lossy())))
        })?,
    }
    Ok(())
}

/// Replaces only a regular file. A device, for example, is not replaced.
fn replace(file: &Path, text: &str) -> io::Result<()> {
    if fs::symlink_metadata(file).is_ok_and(|there| !there.is_file()) {
        return Err(io::Error::other("the file exists, and is not a regular file"));
    }
    whole_file::write(file, text.as_bytes())
}

/// If the service refuses to list the clients, the other metrics are printed, and `yunion_mps_clients_known` is 0. Any other
/// error ends the command.
async fn published(daemon: &DaemonProxy) -> Result<Published, BusError> {
    let service = daemon.service().await?;
    daemon.look_at_clients().await;
    let published = Published::with(service, daemon).await?;
    match published.clients {
        Err(error) if !matches!(error, BusError::Refused(_) | BusError::Other { .. }) => Err(error),
        _ => Ok(published),
    }
}

fn about_service(published: &Published, to: &mut Families) {
    let Service { version, driver_version, state, enabled, generation, .. } = &*published.service;
    let version = [("version", printable(version)), ("driver_version", printable(driver_version))];
    to.info("build_info", "The version of the service and of the NVIDIA driver.", [version.to_vec()]);
    let states = states(state.and_others(), &state.shown(), &Vec::new());
    to.add("service_state", "1 for the present state of the service, 0 for its other states.", states);
    to.one("enabled", "1 if enable_cuda_mps is true, otherwise 0.", flag(*enabled));
    to.one(
        "generation",
        "A number that grows with every change of the published slices, and starts again at a restart of \
         the service.",
        *generation as f64,
    );
    let last = published.events.iter().map(|event| event.at).max();
    let last = last.map(|microseconds| (Vec::new(), microseconds as f64 / 1e6));
    to.add("last_event_timestamp_seconds", "Time of the last event.", last);
}

fn about_control_daemons(daemons: &[Listed<ControlDaemon>], to: &mut Families) {
    let states = daemons
        .iter()
        .flat_map(|daemon| states(daemon.state.and_others(), &daemon.state.shown(), &daemon.labels()));
    to.add(
        "control_daemon_state",
        "1 for the present state of the control daemon, 0 for its other states.",
        states,
    );
    to.each("control_daemon_servers", "The MPS servers that run.", daemons, |daemon| {
        number(daemon.servers.len())
    });
    to.each(
        "control_daemon_restarts_total",
        "Restarts of the control daemon since the service started.",
        daemons,
        |daemon| f64::from(daemon.restarts),
    );
    to.each(
        "server_restarts_total",
        "MPS servers that replaced an earlier server since the service started.",
        daemons,
        |daemon| f64::from(daemon.server_restarts),
    );
    to.each(
        "faults_total",
        "Fatal GPU errors of MPS servers since the service started.",
        daemons,
        |daemon| f64::from(daemon.faults),
    );
}

fn about_gpus(gpus: &[Listed<Gpu>], to: &mut Families) {
    let info = |gpu: &Listed<Gpu>| {
        let model = ("model", text(gpu.model.as_ref()));
        let pci = ("pci", printable(&gpu.pci_bdf));
        let control_daemon = ("control_daemon", printable(&gpu.control_daemon));
        [gpu.labels(), vec![model, pci, control_daemon]].concat()
    };
    to.info("gpu_info", "The GPUs that are configured.", gpus.iter().map(info));
    to.each(
        "gpu_healthy",
        "1 if a client that starts on the GPU now is served with its limits, otherwise 0.",
        gpus,
        |gpu| flag(gpu.healthy),
    );
    to.each("gpu_devices", "The slices that the GPU is cut into.", gpus, |gpu| f64::from(gpu.virtual_num));
    to.each("gpu_memory_bytes", "The memory of the GPU.", gpus, |gpu| gpu.mps_memory_total.map(bytes));
    to.each("gpu_clients", "The processes that use the GPU through MPS.", gpus, |gpu| {
        gpu.clients.map(f64::from)
    });
    to.each(
        "gpu_max_clients",
        "The largest number of clients that the GPU can hold; the next client gets CUDA error 46.",
        gpus,
        |gpu| gpu.max_clients.map(f64::from),
    );
    to.each(
        "gpu_memory_used_bytes",
        "The GPU memory that all clients of the GPU hold through MPS, also those without a known slice.",
        gpus,
        |gpu| gpu.memory_used.map(bytes),
    );
}

fn about_devices(devices: &[Listed<Device>], to: &mut Families) {
    to.info("device_info", "The slices.", devices.iter().map(|device| device.labels()));
    to.each(
        "device_healthy",
        "1 if a client that starts now gets the slice and is served with its limits, otherwise 0.",
        devices,
        |device| flag(device.healthy),
    );
    to.each("device_drained", "1 if the slice is drained for new clients, otherwise 0.", devices, |device| {
        flag(device.drained)
    });
    to.each(
        "device_memory_limit_bytes",
        "The GPU memory that each client of the slice may have.",
        devices,
        |device| device.mps_memory_limit.map(bytes),
    );
    to.each(
        "device_threads_limit_ratio",
        "The active thread percentage of each client of the slice, as a ratio.",
        devices,
        |device| f64::from(device.mps_thread_percentage) / 100.0,
    );
    to.each(
        "device_limits_enforced",
        "1 if the GPU enforces the memory limit and the thread limit, otherwise 0.",
        devices,
        |device| flag(device.limits_enforced),
    );
    to.each("device_clients", "The processes that have the slice.", devices, |device| {
        device.clients.map(f64::from)
    });
    to.each(
        "device_max_clients",
        "The largest number of clients that the slice may have.",
        devices,
        |device| device.max_clients.map(f64::from),
    );
    to.each(
        "device_memory_used_bytes",
        "The GPU memory that the clients of the slice hold.",
        devices,
        |device| device.memory_used.map(bytes),
    );
    to.each(
        "device_overuse",
        "1 if the slice has more clients than allowed, or its clients hold more memory together than the \
         budget of the slice allows, otherwise 0.",
        devices,
        |device| device.overuse.as_ref().map(|overuse| flag(!overuse.is_empty())),
    );
}

fn about_bypasses(published: &Published, to: &mut Families) {
    to.one(
        "clients_known",
        "1 if the service could list the clients, otherwise 0; without the list there are no metrics of \
         single clients and of processes without MPS.",
        flag(published.clients.is_ok()),
    );
    let Ok(clients) = &published.clients else { return };
    let on_gpu = |gpu: &Gpu, client: &Client| client.bypass && gpu.device_path.as_ref() == Some(&client.gpu);
    to.each(
        "gpu_bypass_processes",
        "The processes that use the GPU without an MPS server of this service.",
        &published.gpus,
        |gpu| number(clients.iter().filter(|client| on_gpu(gpu, client)).count()),
    );
}

fn about_each_client(published: &Published, devices: &[Listed<Device>], to: &mut Families) {
    let Ok(clients) = &published.clients else { return };
    let (series, left_out) = series(clients, devices, &published.gpus);
    to.add("client_memory_used_bytes", "The GPU memory that the client holds.", series);
    to.one(
        "clients_left_out",
        "The number of clients that have no series of their own, since there are too many clients.",
        number(left_out),
    );
}

fn slice_of<'d>(client: &Client, devices: &'d [Listed<Device>]) -> Option<&'d Device> {
    let given: BTreeSet<&str> = given(client).collect();
    // Two slices of one GPU can't be combined, so a client with two slices of a GPU counts for the first of these slices.
    let device = devices.iter().find(|device| {
        given.contains(device.addr.as_str()) && device.device_path.as_ref() == Some(&client.gpu)
    });
    device.map(|device| &**device)
}

/// The series with the memory of each client, and the number of clients without a series. If there are too many clients, the
/// clients with the least memory have no series.
fn series(
    clients: &[Listed<Client>],
    devices: &[Listed<Device>],
    gpus: &[Listed<Gpu>],
) -> (Vec<(Labels, f64)>, usize) {
    // Collectors refuse a text that contains a series twice. So each process counts once for each of its GPUs.
    let known: BTreeMap<(&str, u32), (&Client, i32)> = clients
        .iter()
        .filter(|client| !client.bypass)
        .filter_map(|client| Some(((client.gpu.as_str(), client.pid), (&**client, client.memory_mib?))))
        .collect();
    let mut most: Vec<_> = known.into_iter().collect();
    most.sort_by_key(|(_, (_, memory))| Reverse(*memory));
    let left_out = most.len().saturating_sub(MOST_CLIENTS);
    most.truncate(MOST_CLIENTS);
    most.sort_by_key(|(place, _)| *place);
    let sample = |(client, memory): (&Client, i32)| {
        let gpu = gpus.iter().find(|gpu| gpu.device_path.as_ref() == Some(&client.gpu));
        let labels = vec![
            ("device", slice_of(client, devices).map(|device| printable(&device.addr)).unwrap_or_default()),
            ("gpu", gpu.map(|gpu| printable(&gpu.addr)).unwrap_or_default()),
            ("uuid", printable(&client.gpu)),
            ("pid", client.pid.to_string()),
            ("user", bounded(client.user.as_ref())),
            ("container_id", bounded(client.container_id.as_ref())),
            ("guest", bounded(client.guest.as_ref())),
            ("container", bounded(client.container.as_ref())),
            ("project", bounded(client.project.as_ref())),
            ("label", bounded(client.label.as_ref())),
        ];
        (labels, bytes(memory))
    };
    (most.into_iter().map(|(_, client)| sample(client)).collect(), left_out)
}

/// Other programs choose the texts about a client, so the length of a label is limited.
fn bounded(known: Option<&String>) -> String {
    text(known).chars().take(LABEL).collect()
}

trait Labelled {
    fn labels(&self) -> Labels;
}

impl Labelled for ControlDaemon {
    fn labels(&self) -> Labels {
        vec![("control_daemon", printable(&self.id))]
    }
}

/// The platform names a GPU by its address, and NVIDIA's exporters name a GPU by its UUID. So a GPU has both labels.
impl Labelled for Gpu {
    fn labels(&self) -> Labels {
        vec![("gpu", printable(&self.addr)), ("uuid", text(self.device_path.as_ref()))]
    }
}

impl Labelled for Device {
    fn labels(&self) -> Labels {
        vec![
            ("device", printable(&self.addr)),
            ("gpu", printable(&self.base_addr)),
            ("uuid", text(self.device_path.as_ref())),
        ]
    }
}

/// A sample for each state: 1 for the present state, 0 for the other states.
fn states<'w>(all: impl Iterator<Item = &'w str>, current: &str, labels: &Labels) -> Vec<(Labels, f64)> {
    let sample = |state: &str| {
        let mut labels = labels.clone();
        let state = printable(state);
        let sample = flag(state == current);
        labels.push(("state", state));
        (labels, sample)
    };
    all.map(sample).collect()
}

fn text(known: Option<&String>) -> String {
    known.map(|text| printable(text)).unwrap_or_default()
}

fn bytes(mib: i32) -> f64 {
    f64::from(mib) * 1_048_576.0
}

/// An f64 is exact up to 2^53, and no count is larger.
fn number(of: usize) -> f64 {
    of as f64
}

fn flag(is: bool) -> f64 {
    f64::from(u8::from(is))
}

#[derive(Debug, Default)]
struct Families(Vec<Family>);

impl Families {
    fn add(
        &mut self,
        name: &'static str,
        help: &'static str,
        samples: impl IntoIterator<Item = (Labels, f64)>,
    ) {
        self.0.push(Family { name, help, samples: samples.into_iter().collect() });
    }

    /// Adds a metric that has one sample without labels.
    fn one(&mut self, name: &'static str, help: &'static str, value: f64) {
        self.add(name, help, [(Vec::new(), value)]);
    }

    /// Adds a metric with a sample for each row. A row without a value has no sample.
    fn each<R: Labelled, V: Into<Option<f64>>>(
        &mut self,
        name: &'static str,
        help: &'static str,
        rows: &[Listed<R>],
        value: impl Fn(&R) -> V,
    ) {
        self.add(name, help, rows.iter().filter_map(|row| Some((row.labels(), value(row).into()?))));
    }

    /// Adds facts as the labels of a sample with the value 1. The metric does not have the type `info`, since `node_exporter`
    /// does not know this type and rejects a file with an unknown type.
    fn info(&mut self, name: &'static str, help: &'static str, samples: impl IntoIterator<Item = Labels>) {
        self.add(name, help, samples.into_iter().map(|labels| (labels, 1.0)));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use serde_json::{Value, json};

    use super::*;

    fn rows<R: serde::de::DeserializeOwned>(rows: impl IntoIterator<Item = Value>) -> Vec<Listed<R>> {
        rows.into_iter().map(|row| Listed::read(row.as_object().unwrap().clone()).unwrap()).collect()
    }

    #[test]
    fn a_client_has_the_labels_that_are_known() {
        let devices = rows([json!({"addr": "00:06.0-1", "device_path": "GPU-1"})]);
        let gpus = rows([json!({"addr": "00:06.0", "device_path": "GPU-1"})]);
        let id = "0123456789abcdef".repeat(4);
        let long = format!("\u{1b}[2J{}", "ä".repeat(100_000));
        let clients = rows([
            json!({"pid": 9, "gpu": "GPU-2", "memory_mib": 1}),
            json!({
                "pid": 8, "gpu": "GPU-1", "memory_mib": 2, "device": "00:06.0-1", "user": long, "container_id": id,
                "guest": "train-1", "container": "main", "project": "vision", "label": "job 7",
            }),
            json!({"pid": 7, "gpu": "GPU-1", "memory_mib": null}),
            json!({"pid": 6, "gpu": "GPU-1", "memory_mib": 4, "bypass": true}),
            // The service lists this client twice for its GPU, but its series must appear only once.
            json!({"pid": 9, "gpu": "GPU-2", "memory_mib": 1}),
        ]);
        let (series, left_out) = series(&clients, &devices, &gpus);
        let user = format!("\u{fffd}[2J{}", "ä".repeat(60));
        let labels = |values: [&str; 10]| -> Labels {
            let names = [
                "device",
                "gpu",
                "uuid",
                "pid",
                "user",
                "container_id",
                "guest",
                "container",
                "project",
                "label",
            ];
            names.into_iter().zip(values.map(str::to_owned)).collect()
        };
        assert_eq!(left_out, 0);
        assert_eq!(
            series,
            [
                (
                    labels([
                        "00:06.0-1",
                        "00:06.0",
                        "GPU-1",
                        "8",
                        &user,
                        &id,
                        "train-1",
                        "main",
                        "vision",
                        "job 7"
                    ]),
                    2_097_152.0
                ),
                (labels(["", "", "GPU-2", "9", "", "", "", "", "", ""]), 1_048_576.0),
            ]
        );
    }

    #[test]
    fn the_clients_with_the_most_memory_have_series() {
        let clients =
            |number: usize| rows((1..=number).map(|n| json!({"pid": n, "gpu": "GPU-1", "memory_mib": n})));
        let (all, left_out) = series(&clients(MOST_CLIENTS), &[], &[]);
        assert_eq!((all.len(), left_out), (MOST_CLIENTS, 0));
        let (most, left_out) = series(&clients(MOST_CLIENTS + 3), &[], &[]);
        assert_eq!((most.len(), left_out), (MOST_CLIENTS, 3));
        let least = most.iter().map(|(_, bytes)| *bytes).fold(f64::INFINITY, f64::min);
        assert!((least - 4.0 * 1_048_576.0).abs() < 1.0, "{least}");
    }

    #[test]
    fn only_a_regular_file_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("link");
        symlink("/dev/null", &link).unwrap();
        for path in [directory.path(), &link] {
            assert_eq!(
                replace(path, "").unwrap_err().to_string(),
                "the file exists, and is not a regular file"
            );
        }
        let missing = directory.path().join("none/a.prom");
        assert_eq!(replace(&missing, "").unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
