//! `yunion-mpsctl metrics`: the published values as `OpenMetrics` text. docs/metrics.md has the list.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, Write};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use crate::ctl::Error;
use crate::ctl::published::Published;
use crate::ctl::show::table::printable;
use crate::dbus::proxy::{BusError, DaemonProxy, Listed};
use crate::dbus::rows::{Client, ControlDaemon, Device, Gpu, Service};

/// The states of the service and of a control daemon, in the order of their documentation.
const SERVICE_STATES: [&str; 6] = ["disabled", "starting", "ready", "degraded", "failed", "stopping"];
const CONTROL_DAEMON_STATES: [&str; 6] = ["starting", "ready", "faulted", "backoff", "waiting", "stopping"];

type Labels = Vec<(&'static str, String)>;

/// Prints the metrics. If the service does not run, the only metric is `yunion_mps_up 0`.
pub(in crate::ctl) async fn metrics(daemon: &DaemonProxy, out: &mut dyn Write) -> Result<(), Error> {
    let published = match published(daemon).await {
        Err(BusError::NotRunning) => None,
        published => Some(published?),
    };
    let mut registry = Registry::with_prefix("yunion_mps");
    registry.register_collector(Box::new(Metrics(published)));
    let mut text = String::new();
    encode(&mut text, &registry)
        .map_err(|fmt::Error| io::Error::other("the metrics can't be put into words"))?;
    out.write_all(text.as_bytes())?;
    Ok(())
}

/// A refusal to list the clients is a metric, `yunion_mps_clients_known 0`. Any other failure ends the command.
async fn published(daemon: &DaemonProxy) -> Result<Published, BusError> {
    let published = Published::with(daemon.service().await?, daemon).await?;
    match published.clients {
        Err(error) if !matches!(error, BusError::Refused { .. }) => Err(error),
        _ => Ok(published),
    }
}

/// None: the service does not run.
#[derive(Debug)]
struct Metrics(Option<Published>);

impl Collector for Metrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut to = Families(encoder);
        to.one("up", "Whether yunion-mps-daemon runs.", flag(self.0.is_some()))?;
        let Some(published) = &self.0 else { return Ok(()) };
        published.service(&mut to)?;
        published.control_daemons(&mut to)?;
        published.gpus(&mut to)?;
        published.devices(&mut to)?;
        published.clients(&mut to)
    }
}

impl Published {
    fn service(&self, to: &mut Families<'_>) -> fmt::Result {
        let Service { version, driver_version, state, enabled, generation, .. } = &*self.service;
        let version = [("version", printable(version)), ("driver_version", printable(driver_version))];
        to.info("build_info", "The service and the NVIDIA driver that it found.", [version.to_vec()])?;
        let states = states(&SERVICE_STATES, &printable(state), &Vec::new());
        to.gauge("service_state", "1 for the state that the service is in.", None, states)?;
        to.one("enabled", "Whether enable_cuda_mps is true.", flag(*enabled))?;
        to.one(
            "generation",
            "Number that grows with every change of the published devices, and starts again with the service.",
            *generation,
        )?;
        let last = self.events.iter().map(|event| event.at).max();
        let last = last.map(|microseconds| (Vec::new(), microseconds as f64 / 1e6));
        to.gauge("last_event_timestamp", "Time of the last event.", Some(Unit::Seconds), last)
    }

    fn control_daemons(&self, to: &mut Families<'_>) -> fmt::Result {
        let daemons = &self.control_daemons;
        let states = daemons
            .iter()
            .flat_map(|daemon| states(&CONTROL_DAEMON_STATES, &printable(&daemon.state), &daemon.labels()));
        to.gauge("control_daemon_state", "1 for the state that the control daemon is in.", None, states)?;
        to.each("control_daemon_servers", "The MPS servers that run.", None, daemons, |daemon| {
            Some(daemon.servers.len())
        })?;
        to.counter(
            "control_daemon_restarts",
            "Restarts of the control daemon since the service started.",
            daemons,
            |daemon| daemon.restarts,
        )?;
        to.counter(
            "server_restarts",
            "MPS servers that replaced an earlier one since the service started.",
            daemons,
            |daemon| daemon.server_restarts,
        )?;
        to.counter(
            "faults",
            "Fatal GPU errors of MPS servers since the service started.",
            daemons,
            |daemon| daemon.faults,
        )
    }

    fn gpus(&self, to: &mut Families<'_>) -> fmt::Result {
        let info = |gpu: &Listed<Gpu>| {
            let model = ("model", text(gpu.model.as_ref()));
            let pci = ("pci", printable(&gpu.pci_bdf));
            let control_daemon = ("control_daemon", printable(&gpu.control_daemon));
            [gpu.labels(), vec![model, pci, control_daemon]].concat()
        };
        to.info("gpu_info", "The GPUs that are configured.", self.gpus.iter().map(info))?;
        to.each(
            "gpu_healthy",
            "Whether a client of the GPU that starts now is served with its limits.",
            None,
            &self.gpus,
            |gpu| Some(flag(gpu.healthy)),
        )?;
        to.each("gpu_devices", "The virtual devices that the GPU is cut into.", None, &self.gpus, |gpu| {
            Some(gpu.virtual_num)
        })?;
        to.each("gpu_memory", "The memory of the GPU.", Some(Unit::Bytes), &self.gpus, |gpu| {
            gpu.mps_memory_total.map(bytes)
        })
    }

    fn devices(&self, to: &mut Families<'_>) -> fmt::Result {
        let devices = self.devices.as_deref().unwrap_or_default();
        to.info("device_info", "The virtual devices.", devices.iter().map(|device| device.labels()))?;
        to.each(
            "device_healthy",
            "Whether a client that starts now gets the virtual device and is served with its limits.",
            None,
            devices,
            |device| Some(flag(device.healthy)),
        )?;
        to.each(
            "device_drained",
            "Whether the virtual device is taken out of use for new clients.",
            None,
            devices,
            |device| Some(flag(device.drained)),
        )?;
        to.each(
            "device_memory_limit",
            "The GPU memory that each client of the virtual device may have.",
            Some(Unit::Bytes),
            devices,
            |device| device.mps_memory_limit.map(bytes),
        )?;
        to.each(
            "device_threads_limit",
            "The share of the GPU's threads that each client of the virtual device may have active.",
            Some(Unit::Other("ratio".to_owned())),
            devices,
            |device| Some(f64::from(device.mps_thread_percentage) / 100.0),
        )?;
        to.each(
            "device_limits_enforced",
            "Whether the GPU enforces the two limits.",
            None,
            devices,
            |device| Some(flag(device.limits_enforced)),
        )?;
        to.each(
            "device_max_clients",
            "The most clients that the virtual device may have.",
            None,
            devices,
            |device| device.max_clients,
        )?;
        to.each(
            "device_overuse",
            "Whether the clients of the virtual device have more memory together, or are more, than it may have.",
            None,
            devices,
            |device| device.overuse.as_ref().map(|overuse| flag(!overuse.is_empty())),
        )
    }

    fn clients(&self, to: &mut Families<'_>) -> fmt::Result {
        to.one(
            "clients_known",
            "Whether every control daemon listed its clients; if not, the metrics of clients are left out.",
            flag(self.clients.is_ok()),
        )?;
        let Ok(clients) = &self.clients else { return Ok(()) };
        let of_gpu = |gpu: &Gpu, bypass: bool| {
            let on_it = |client: &&Listed<Client>| gpu.device_path.as_ref() == Some(&client.gpu);
            Some(clients.iter().filter(on_it).filter(|client| client.bypass == bypass).count())
        };
        to.each("gpu_clients", "The processes that use the GPU through MPS.", None, &self.gpus, |gpu| {
            of_gpu(gpu, false)
        })?;
        to.each(
            "gpu_bypass_processes",
            "The processes that use the GPU without our MPS server.",
            None,
            &self.gpus,
            |gpu| of_gpu(gpu, true),
        )?;
        let devices = self.devices.as_deref().unwrap_or_default();
        let used = used(devices, clients);
        let of_device = |device: &Device| used.get(device.addr.as_str()).copied().unwrap_or_default();
        to.each(
            "device_clients",
            "The processes that say that they were given the virtual device.",
            None,
            devices,
            |device| Some(of_device(device).clients),
        )?;
        to.each(
            "device_memory_used",
            "The GPU memory that the clients of the virtual device hold.",
            Some(Unit::Bytes),
            devices,
            |device| Some(of_device(device).bytes),
        )
    }
}

/// The clients of each slice and their memory, by the slice that each client was given on its GPU.
fn used<'d>(devices: &'d [Listed<Device>], clients: &[Listed<Client>]) -> BTreeMap<&'d str, Used> {
    let mut used: BTreeMap<&str, Used> = BTreeMap::new();
    for client in clients.iter().filter(|client| !client.bypass) {
        let given: BTreeSet<&str> =
            client.device.iter().flat_map(|all| all.split(',')).map(str::trim).collect();
        // Two slices of one GPU can't be joined: a client that names both has one.
        let device = devices.iter().find(|device| {
            given.contains(device.addr.as_str()) && device.device_path.as_ref() == Some(&client.gpu)
        });
        if let Some(device) = device {
            let used = used.entry(&device.addr).or_default();
            used.clients += 1;
            used.bytes += client.memory_mib.map(bytes).unwrap_or_default();
        }
    }
    used
}

#[derive(Debug, Clone, Copy, Default)]
struct Used {
    clients: usize,
    bytes: i64,
}

/// A row that the labels of its metrics name.
trait Labelled {
    fn labels(&self) -> Labels;
}

impl Labelled for ControlDaemon {
    fn labels(&self) -> Labels {
        vec![("control_daemon", printable(&self.id))]
    }
}

/// The platform uses the address, NVIDIA's exporters use the UUID.
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

/// A sample for each state, 1 for the present state. A state that is not in the list has its sample at the end.
fn states(known: &[&str], current: &str, labels: &Labels) -> Vec<(Labels, u64)> {
    let unknown = (!known.contains(&current)).then_some(current);
    let all = known.iter().copied().chain(unknown);
    let sample = |state: &str| {
        let mut labels = labels.clone();
        labels.push(("state", state.to_owned()));
        (labels, flag(state == current))
    };
    all.map(sample).collect()
}

fn text(known: Option<&String>) -> String {
    known.map(|text| printable(text)).unwrap_or_default()
}

fn bytes(mib: i32) -> i64 {
    i64::from(mib) << 20
}

fn flag(is: bool) -> u64 {
    u64::from(is)
}

/// Writes metric families. A family without a sample is left out.
struct Families<'a>(DescriptorEncoder<'a>);

impl Families<'_> {
    fn gauge<V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        samples: impl IntoIterator<Item = (Labels, V)>,
    ) -> fmt::Result {
        self.family((name, help, unit, MetricType::Gauge), samples, |metric, labels, value| {
            if labels.is_empty() {
                metric.encode_gauge(&value)
            } else {
                metric.encode_family(&labels)?.encode_gauge(&value)
            }
        })
    }

    /// A value without labels.
    fn one<V: EncodeGaugeValue>(&mut self, name: &str, help: &str, value: V) -> fmt::Result {
        self.gauge(name, help, None, [(Vec::new(), value)])
    }

    /// A value of each row; rows without the value are left out.
    fn each<R: Labelled, V: EncodeGaugeValue>(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<Unit>,
        rows: &[Listed<R>],
        value: impl Fn(&R) -> Option<V>,
    ) -> fmt::Result {
        self.gauge(name, help, unit, rows.iter().filter_map(|row| Some((row.labels(), value(row)?))))
    }

    fn counter<R: Labelled>(
        &mut self,
        name: &str,
        help: &str,
        rows: &[Listed<R>],
        count: fn(&R) -> u32,
    ) -> fmt::Result {
        let samples = rows.iter().map(|row| (row.labels(), count(row)));
        self.family((name, help, None, MetricType::Counter), samples, |metric, labels, value| {
            metric.encode_family(&labels)?.encode_counter::<Labels, u32, u64>(&value, None)
        })
    }

    /// Facts as labels of a 1. The type is not info: the parser of `node_exporter` is older than that type, and rejects the
    /// whole file if it does not know a type.
    fn info(&mut self, name: &str, help: &str, samples: impl IntoIterator<Item = Labels>) -> fmt::Result {
        self.gauge(name, help, None, samples.into_iter().map(|labels| (labels, 1u64)))
    }

    fn family<V>(
        &mut self,
        (name, help, unit, kind): (&str, &str, Option<Unit>, MetricType),
        samples: impl IntoIterator<Item = (Labels, V)>,
        encode: impl Fn(&mut MetricEncoder<'_>, Labels, V) -> fmt::Result,
    ) -> fmt::Result {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return Ok(());
        }
        let mut metric = self.0.encode_descriptor(name, help, unit.as_ref(), kind)?;
        samples.try_for_each(|(labels, value)| encode(&mut metric, labels, value))
    }
}
