//! `yunion-mpsctl metrics`: what the bus says, as `OpenMetrics` text. docs/metrics.md has the list.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::{self, Write};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, EncodeGaugeValue, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use crate::ctl::Error;
use crate::ctl::show::table::printable;
use crate::dbus::proxy::{BusError, DaemonProxy, Listed};
use crate::dbus::rows::{Client, ControlDaemon, Device, Event, Gpu, Service};

/// The states of the service and of a control daemon, in the order of their documentation.
const SERVICE_STATES: [&str; 6] = ["disabled", "starting", "ready", "degraded", "failed", "stopping"];
const CONTROL_DAEMON_STATES: [&str; 6] = ["starting", "ready", "faulted", "backoff", "waiting", "stopping"];

type Labels = Vec<(&'static str, String)>;

/// A number of a control daemon.
type Count = fn(&ControlDaemon) -> u32;

/// Prints the metrics. A service that does not run is one of the things that they say: `yunion_mps_up 0`.
pub(in crate::ctl) async fn metrics(daemon: &DaemonProxy, out: &mut dyn Write) -> Result<(), Error> {
    let facts = match facts(daemon).await {
        Err(Error::Bus(BusError::NotRunning)) => None,
        facts => Some(facts?),
    };
    let mut registry = Registry::with_prefix("yunion_mps");
    registry.register_collector(Box::new(Metrics(facts)));
    let mut text = String::new();
    encode(&mut text, &registry)
        .map_err(|fmt::Error| io::Error::other("the metrics can't be put into words"))?;
    out.write_all(text.as_bytes())?;
    Ok(())
}

/// Everything that the metrics are made from.
#[derive(Debug)]
struct Facts {
    service: Listed<Service>,
    control_daemons: Vec<Listed<ControlDaemon>>,
    events: Vec<Listed<Event>>,
    /// Empty before the GPUs are known.
    gpus: Vec<Listed<Gpu>>,
    devices: Vec<Listed<Device>>,
    /// None if a control daemon did not name its clients.
    clients: Option<Vec<Listed<Client>>>,
}

async fn facts(daemon: &DaemonProxy) -> Result<Facts, Error> {
    let service = daemon.service().await?;
    let control_daemons = daemon.control_daemons().await?;
    let events = daemon.events().await?;
    let gpus = known(daemon.gpus().await)?;
    let devices = known(daemon.devices().await)?;
    let clients = match known(daemon.clients().await) {
        Ok(clients) => Some(clients),
        Err(BusError::Refused { .. }) => None,
        Err(error) => return Err(error.into()),
    };
    Ok(Facts { service, control_daemons, events, gpus, devices, clients })
}

/// The rows of an answer; none before the GPUs are known.
fn known<R>(answer: Result<Vec<R>, BusError>) -> Result<Vec<R>, BusError> {
    match answer {
        Err(error) if error.is("NotReady") => Ok(Vec::new()),
        answer => answer,
    }
}

/// None: the service does not run.
#[derive(Debug)]
struct Metrics(Option<Facts>);

impl Collector for Metrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut writer = Families(encoder);
        writer.gauge(
            "up",
            "Whether yunion-mps-daemon runs.",
            None,
            [(Vec::new(), flag(self.0.is_some()))],
        )?;
        match &self.0 {
            Some(facts) => facts.write(&mut writer),
            None => Ok(()),
        }
    }
}

impl Facts {
    fn write(&self, to: &mut Families<'_>) -> fmt::Result {
        self.service(to)?;
        self.control_daemons(to)?;
        self.gpus(to)?;
        self.devices(to)?;
        self.clients(to)
    }

    fn service(&self, to: &mut Families<'_>) -> fmt::Result {
        let Service { version, driver_version, state, enabled, generation, .. } = &*self.service;
        let version = [("version", printable(version)), ("driver_version", printable(driver_version))];
        to.info("build_info", "The service and the NVIDIA driver that it found.", [version.to_vec()])?;
        to.gauge(
            "service_state",
            "1 for the state that the service is in.",
            None,
            states(&SERVICE_STATES, &printable(state), &Vec::new()),
        )?;
        to.gauge("enabled", "Whether enable_cuda_mps is true.", None, [(Vec::new(), flag(*enabled))])?;
        to.gauge(
            "generation",
            "Grows with every change of the published devices; starts again with the service.",
            None,
            [(Vec::new(), *generation)],
        )?;
        let last = self.events.iter().map(|event| event.at).max();
        to.gauge(
            "last_event_timestamp",
            "When something happened last that an administrator would want to know.",
            Some(Unit::Seconds),
            last.map(|microseconds| (Vec::new(), microseconds as f64 / 1e6)),
        )
    }

    fn control_daemons(&self, to: &mut Families<'_>) -> fmt::Result {
        let labels = |daemon: &ControlDaemon| vec![("control_daemon", printable(&daemon.id))];
        let daemons = &self.control_daemons;
        to.gauge(
            "control_daemon_state",
            "1 for the state that the control daemon is in.",
            None,
            daemons.iter().flat_map(|daemon| {
                states(&CONTROL_DAEMON_STATES, &printable(&daemon.state), &labels(daemon))
            }),
        )?;
        to.gauge(
            "control_daemon_servers",
            "The MPS servers that run.",
            None,
            daemons.iter().map(|daemon| (labels(daemon), daemon.servers.len())),
        )?;
        let counts: [(&str, &str, Count); 3] = [
            ("control_daemon_restarts", "How often the control daemon was started anew.", |daemon| {
                daemon.restarts
            }),
            ("server_restarts", "How often another MPS server took the place of the one before.", |daemon| {
                daemon.server_restarts
            }),
            ("faults", "Fatal GPU errors of MPS servers.", |daemon| daemon.faults),
        ];
        for (name, help, count) in counts {
            let values = daemons.iter().map(|daemon| (labels(daemon), count(daemon).into()));
            to.counter(name, help, values)?;
        }
        Ok(())
    }

    fn gpus(&self, to: &mut Families<'_>) -> fmt::Result {
        let gpus = &self.gpus;
        to.info(
            "gpu_info",
            "The GPUs that are configured.",
            gpus.iter().map(|gpu| {
                let mut labels = gpu_labels(gpu);
                labels.push(("model", text(gpu.model.as_ref())));
                labels.push(("pci", printable(&gpu.pci_bdf)));
                labels.push(("control_daemon", printable(&gpu.control_daemon)));
                labels
            }),
        )?;
        to.gauge(
            "gpu_healthy",
            "Whether a client of the GPU that starts now is served with its limits.",
            None,
            gpus.iter().map(|gpu| (gpu_labels(gpu), flag(gpu.healthy))),
        )?;
        to.gauge(
            "gpu_devices",
            "The virtual devices that the GPU is cut into.",
            None,
            gpus.iter().map(|gpu| (gpu_labels(gpu), i64::from(gpu.virtual_num))),
        )?;
        to.gauge(
            "gpu_memory",
            "The memory of the GPU.",
            Some(Unit::Bytes),
            gpus.iter().filter_map(|gpu| Some((gpu_labels(gpu), bytes(gpu.mps_memory_total?)))),
        )
    }

    fn devices(&self, to: &mut Families<'_>) -> fmt::Result {
        let devices = &self.devices;
        to.info("device_info", "The virtual devices.", devices.iter().map(|device| device_labels(device)))?;
        to.gauge(
            "device_healthy",
            "Whether a client of the virtual device that starts now is served with its limits.",
            None,
            devices.iter().map(|device| (device_labels(device), flag(device.healthy))),
        )?;
        to.gauge(
            "device_memory_limit",
            "The GPU memory that each client of the virtual device may have.",
            Some(Unit::Bytes),
            devices
                .iter()
                .filter_map(|device| Some((device_labels(device), bytes(device.mps_memory_limit?)))),
        )?;
        to.gauge(
            "device_threads_limit",
            "The share of the GPU's threads that each client of the virtual device may have active.",
            Some(Unit::Other("ratio".to_owned())),
            devices
                .iter()
                .map(|device| (device_labels(device), f64::from(device.mps_thread_percentage) / 100.0)),
        )?;
        to.gauge(
            "device_limits_enforced",
            "Whether the GPU enforces the two limits.",
            None,
            devices.iter().map(|device| (device_labels(device), flag(device.limits_enforced))),
        )
    }

    fn clients(&self, to: &mut Families<'_>) -> fmt::Result {
        to.gauge(
            "clients_known",
            "Whether every control daemon said who its clients are; where not, nothing is said of them.",
            None,
            [(Vec::new(), flag(self.clients.is_some()))],
        )?;
        let Some(clients) = &self.clients else { return Ok(()) };
        let of_gpu = |gpu: &Gpu, bypass: bool| {
            let on_it = |client: &&Listed<Client>| gpu.device_path.as_ref() == Some(&client.gpu);
            clients.iter().filter(on_it).filter(|client| client.bypass == bypass).count()
        };
        to.gauge(
            "gpu_clients",
            "The processes that use the GPU through MPS.",
            None,
            self.gpus.iter().map(|gpu| (gpu_labels(gpu), of_gpu(gpu, false))),
        )?;
        to.gauge(
            "gpu_bypass_processes",
            "The processes that use the GPU without our MPS server.",
            None,
            self.gpus.iter().map(|gpu| (gpu_labels(gpu), of_gpu(gpu, true))),
        )?;
        let used = self.used(clients);
        let of_device = |device: &Device| used.get(device.addr.as_str()).copied().unwrap_or_default();
        to.gauge(
            "device_clients",
            "The processes that say that they were given the virtual device.",
            None,
            self.devices.iter().map(|device| (device_labels(device), of_device(device).clients)),
        )?;
        to.gauge(
            "device_memory_used",
            "The GPU memory that these processes hold.",
            Some(Unit::Bytes),
            self.devices.iter().map(|device| (device_labels(device), of_device(device).bytes)),
        )
    }

    /// The clients of each slice and their memory, by the slice that each client was given on its GPU.
    fn used(&self, clients: &[Listed<Client>]) -> BTreeMap<&str, Used> {
        let mut used: BTreeMap<&str, Used> = BTreeMap::new();
        for client in clients.iter().filter(|client| !client.bypass) {
            let given: BTreeSet<&str> =
                client.device.iter().flat_map(|all| all.split(',')).map(str::trim).collect();
            // Two slices of one GPU can't be joined: a client that names both has one.
            let device = self.devices.iter().find(|device| {
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
}

#[derive(Debug, Clone, Copy, Default)]
struct Used {
    clients: usize,
    bytes: i64,
}

/// The address goes with the UUID: the platform has the one, NVIDIA's exporters have the other.
fn gpu_labels(gpu: &Gpu) -> Labels {
    vec![("gpu", printable(&gpu.addr)), ("uuid", text(gpu.device_path.as_ref()))]
}

fn device_labels(device: &Device) -> Labels {
    vec![
        ("device", printable(&device.addr)),
        ("gpu", printable(&device.base_addr)),
        ("uuid", text(device.device_path.as_ref())),
    ]
}

/// A sample for each state, 1 for the present one. A state that is not in the list has its sample at the end.
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

/// Writes metric families. One without a sample is left out.
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

    fn counter(
        &mut self,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, u64)>,
    ) -> fmt::Result {
        self.family((name, help, None, MetricType::Counter), samples, |metric, labels, value| {
            metric.encode_family(&labels)?.encode_counter::<Labels, u64, u64>(&value, None)
        })
    }

    /// Facts of things, as labels of a 1. Not of the type info: the parser of `node_exporter` is older than that type, and
    /// takes nothing at all from a file with a type that it does not know.
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
