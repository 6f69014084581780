//! Tests of the D-Bus interface with programs of other projects: busctl, gdbus and Python.

use crate::support::host::mpsctl;
use std::collections::HashMap;
use std::process::Stdio;
use std::time::{Duration, UNIX_EPOCH};

use common::bus::error::RequestError;
use common::published::client::ClientView;
use common::published::events::Events;
use common::published::snapshot::{GpuView, Snapshot, State};
use common::published::usage::SliceUse;
use mps_core::register::{GuestContainer, KnownBy, KnownClient, MayCommand, Membership, Tenant};
use mps_core::terms::ProcessId;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use yunion_mps::{BusConnection, Request};
use zbus::export::ordered_stream::OrderedStreamExt;
use zbus::wire::Endian;
use zbus::{Message, OwnedVariant};

use crate::support::bus::{PrivateBus, complained, ctl, output, printed};
use crate::support::schema::strict;
use crate::support::service::Service;
use crate::support::skip::root_or_skip;
use crate::support::snapshot::{P40, first_gpu, p40_board, serving, starting, tesla_p40};
use crate::support::wait::DEADLINE;

const NAME: &str = "io.yunion.Mps1";
const ROOT: &str = "/io/yunion/Mps1";
const MANAGER: &str = "/io/yunion/Mps1/Manager";
const SLICE: &str = "/io/yunion/Mps1/devices/_00_06_0_1";
const GPU: &str = "/io/yunion/Mps1/gpus/GPU_76aef7ff_372d_2432_b4b4_beca4d8d3400";

/// The keys that a slice and its GPU have in common, each with its D-Bus type and value.
fn golden_common() -> Value {
    json!({
        "base_addr": ["s", "00:06.0"],
        "pci_bdf": ["s", "0000:00:06.0"],
        "model": ["s", "Tesla P40"],
        "vendor_device_id": ["s", "10de:1b38"],
        "device_path": ["s", P40],
        "numa_node": ["i", -1],
        "pcie_info": ["a{sv}", {
            "lane_width": ["i", 16],
            "throughput": ["s", "15.76 GB/s"],
            "transfer_rate_per_lane": ["s", "8GT/s"],
            "version": ["s", "3.0"],
        }],
        "mps_memory_total": ["i", 23040],
        "mps_memory_limit": ["i", 5760],
        "mps_thread_percentage": ["i", 25],
        "memory_size": ["i", 5760],
        "detected_on_host": ["b", true],
        "hot_pluggable": ["b", false],
        "servable": ["b", true],
        "nvidia_index": ["u", 0],
        "nvidia_minor": ["u", 0],
        "nvidia_name": ["s", "Tesla P40"],
        "render_node": ["s", "/dev/dri/renderD128"],
        "compute_mode": ["s", "Exclusive_Process"],
        "healthy": ["b", true],
        "reason": ["s", ""],
        "pipe_directory": ["s", "/tmp/nvidia-mps/pipe"],
        "isolation": ["s", "gpu"],
        "limits_enforced": ["b", false],
    })
}

fn golden(own: &Value) -> Value {
    let mut golden = golden_common();
    golden.as_object_mut().unwrap().extend(own.as_object().unwrap().clone());
    golden
}

fn golden_slice(ordinal: u32) -> Value {
    let name = format!("00:06.0-{ordinal}");
    golden(&json!({
        "addr": ["s", name],
        "name": ["s", name],
        "dev_type": ["s", "NVIDIA_MPS"],
        "ordinal": ["u", ordinal],
        "index": ["i", -1],
        "bound_groups": ["as", []],
        "bound_to": ["s", ""],
        "device_minor": ["i", -1],
        "drained": ["b", false],
        "served": ["b", true],
    }))
}

fn golden_gpu() -> Value {
    golden(&json!({
        "addr": ["s", "00:06.0"],
        "name": ["s", "00:06.0"],
        "dev_type": ["s", "GPU"],
        "sharing_mode": ["s", "MPS"],
        "virtual_num": ["i", 4],
        "equal_slices": ["b", true],
        "control_daemon": ["s", "shared"],
        "confirmed_thread_percentage": ["i", 25],
        "max_clients": ["u", 16],
    }))
}

/// Removes the D-Bus types from expected values.
fn plain(golden: &Value) -> Value {
    match golden {
        Value::Array(pair) if pair.len() == 2 && pair[0].is_string() => plain(&pair[1]),
        Value::Array(items) => items.iter().map(plain).collect(),
        Value::Object(fields) => fields.iter().map(|(key, value)| (key.clone(), plain(value))).collect(),
        other => other.clone(),
    }
}

/// Renames the keys of a dictionary to D-Bus properties: `base_addr` becomes `BaseAddr`.
fn camel(golden: &Value) -> Value {
    let name = |key: &str| {
        let words = key.split('_').map(|word| word[..1].to_uppercase() + &word[1..]);
        words.collect::<String>()
    };
    golden.as_object().unwrap().iter().map(|(key, value)| (name(key), value.clone())).collect()
}

/// Converts busctl's `{"type": "s", "data": "x"}` to `["s", "x"]`.
fn typed(busctl: &Value) -> Value {
    match busctl {
        Value::Object(fields) if fields.len() == 2 && fields.contains_key("type") => {
            json!([fields["type"], typed(&fields["data"])])
        }
        Value::Object(fields) => fields.iter().map(|(key, value)| (key.clone(), typed(value))).collect(),
        Value::Array(items) => items.iter().map(typed).collect(),
        other => other.clone(),
    }
}

/// Calls a method of the Manager with busctl. Returns the D-Bus signature and the values of the answer.
async fn busctl(bus: &PrivateBus, method: &str, arguments: &[&str]) -> (String, Value) {
    busctl_at(bus, MANAGER, "io.yunion.Mps1.Manager", method, arguments).await
}

async fn busctl_at(
    bus: &PrivateBus,
    path: &str,
    interface: &str,
    method: &str,
    arguments: &[&str],
) -> (String, Value) {
    let mut command = bus.command("busctl");
    command.args(["--system", "--json=short", "call", NAME, path, interface, method]).args(arguments);
    let answer: Value = serde_json::from_str(&printed(&mut command).await).unwrap();
    (answer["type"].as_str().unwrap().to_owned(), typed(&answer["data"]))
}

/// Makes a command that calls a method of the Manager with gdbus. Unlike busctl, gdbus prints the name of a D-Bus error.
fn gdbus(bus: &PrivateBus, method: &str, arguments: &[&str]) -> Command {
    let mut command = bus.command("gdbus");
    command.args(["call", "--system", "--dest", NAME, "--object-path", MANAGER, "--method"]);
    command.arg(format!("io.yunion.Mps1.{method}")).args(arguments);
    command
}

/// Runs a Python program. Its variables are `bus`, `manager`, and the function `plain`, which converts D-Bus values to JSON
/// values.
async fn python(bus: &PrivateBus, program: &str) -> Value {
    let prelude = r#"
import json, sys
try:
    import dbus
except ImportError:
    sys.exit("python has no dbus module: install the Debian package python3-dbus")
def plain(value):
    if isinstance(value, dbus.Boolean):
        return bool(value)
    if isinstance(value, dbus.Dictionary):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (dbus.Array, dbus.Struct)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, str) else int(value)
bus = dbus.SystemBus()
manager = dbus.Interface(bus.get_object("io.yunion.Mps1", "/io/yunion/Mps1/Manager"), "io.yunion.Mps1.Manager")
"#;
    let mut command = bus.command("/usr/bin/python3");
    command.args(["-c", &format!("{prelude}\n{program}")]);
    serde_json::from_str(&printed(&mut command).await).unwrap()
}

/// A running `busctl monitor`. It prints each signal of the service, which the test reads as `[path, interface, member, body]`.
struct Monitor {
    busctl: Child,
    output: ChildStdout,
    unread: Vec<u8>,
}

impl Monitor {
    async fn start(bus: &PrivateBus) -> Self {
        let mut command = bus.command("busctl");
        command.args([
            "--system",
            "--json=short",
            "monitor",
            "--match",
            "type='signal',path_namespace='/io/yunion'",
        ]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut busctl =
            command.spawn().unwrap_or_else(|e| panic!("busctl: {e}; install the Debian package systemd"));
        let output = busctl.stdout.take().unwrap();
        let mut complaints = BufReader::new(busctl.stderr.take().unwrap()).lines();
        let line = timeout(DEADLINE, complaints.next_line()).await.expect("busctl says nothing");
        assert_eq!(line.unwrap().as_deref(), Some("Monitoring bus message stream."));
        Self { busctl, output, unread: Vec::new() }
    }

    /// Waits for the next signal. busctl prints JSON texts without separators.
    async fn signal(&mut self) -> Value {
        loop {
            let mut texts = serde_json::Deserializer::from_slice(&self.unread).into_iter::<Value>();
            if let Some(Ok(signal)) = texts.next() {
                let read = texts.byte_offset();
                self.unread.drain(..read);
                let body = typed(&signal["payload"]["data"]);
                return json!([signal["path"], signal["interface"], signal["member"], body]);
            }
            let reading = timeout(DEADLINE, self.output.read_buf(&mut self.unread));
            let read = reading.await.expect("the bus says nothing").unwrap();
            assert_ne!(read, 0, "busctl has ended: {:?}", self.busctl.try_wait());
        }
    }

    async fn until(&mut self, member: &str) -> Vec<Value> {
        let mut signals = Vec::new();
        loop {
            signals.push(self.signal().await);
            if signals.last().is_some_and(|signal| signal[2] == member) {
                return signals;
            }
        }
    }
}

fn changed(snapshot: &Snapshot, change: impl FnOnce(&mut GpuView)) -> Snapshot {
    let mut new = snapshot.clone();
    new.generation += 1;
    change(first_gpu(&mut new));
    new
}

#[tokio::test]
async fn busctl_gets_the_golden_devices_with_their_types() {
    let service = Service::start(p40_board()).await;
    let (signature, devices) = busctl(&service.bus, "ListDevices", &[]).await;
    assert_eq!(signature, "aa{sv}");
    assert_eq!(devices, json!([(0..4).map(golden_slice).collect::<Vec<_>>()]));
    let (signature, gpus) = busctl(&service.bus, "ListGpus", &[]).await;
    assert_eq!(signature, "aa{sv}");
    assert_eq!(gpus, json!([[golden_gpu()]]));
}

/// A D-Bus client that chooses the serial number and the byte order of each call.
struct Caller {
    connection: zbus::Connection,
    heard: zbus::MessageStream,
}

impl Caller {
    async fn on(bus: &PrivateBus) -> Self {
        let address: zbus::Address = bus.address().as_str().try_into().unwrap();
        let connection = zbus::connection::Builder::address(address).build().await.unwrap();
        let heard = zbus::MessageStream::from(&connection);
        Self { connection, heard }
    }

    async fn send(&self, number: u32, endian: Endian, method: &str) {
        let call =
            Message::method_call(MANAGER, method).interface("io.yunion.Mps1.Manager").destination(NAME);
        let call = call.endian(endian).serial(number.try_into().unwrap());
        self.connection.send(&call.build(&()).unwrap()).await.unwrap();
    }

    async fn answer(&mut self, number: u32) -> Message {
        let wanted = async {
            loop {
                let message = self.heard.next().await.unwrap().unwrap();
                if message.header().reply_serial().is_some_and(|serial| serial.get() == number) {
                    return message;
                }
            }
        };
        timeout(DEADLINE, wanted).await.unwrap()
    }
}

/// The service caches large answers. Little-endian and big-endian callers must get different cached answers.
#[tokio::test]
async fn a_list_has_the_order_of_bytes_of_its_caller() {
    let service = Service::start(p40_board()).await;
    let mut caller = Caller::on(&service.bus).await;
    let (little, big) = (Endian::Little, Endian::Big);
    let asked = [
        (little, "ListDevices", 4),
        (big, "ListDevices", 4),
        (little, "ListGpus", 1),
        (big, "ListGpus", 1),
        (little, "ListDevices", 4),
    ];
    for (number, (endian, method, rows)) in (1000..).zip(asked) {
        caller.send(number, endian, method).await;
        let answer = caller.answer(number).await;
        assert_eq!(Endian::from(answer.header().primary().endian_sig()), endian);
        let list: Vec<HashMap<String, OwnedVariant>> = answer.body().deserialize().unwrap();
        assert_eq!(list.len(), rows);
        assert!(list.iter().all(|row| row["numa_node"] == OwnedVariant::from(-1)), "{list:?}");
    }
}

#[tokio::test]
async fn python_gets_the_golden_devices() {
    let service = Service::start(p40_board()).await;
    let answer =
        python(&service.bus, "print(json.dumps([plain(manager.ListDevices()), plain(manager.ListGpus())]))")
            .await;
    let slices: Vec<Value> = (0..4).map(|ordinal| plain(&golden_slice(ordinal))).collect();
    assert_eq!(answer, json!([slices, [plain(&golden_gpu())]]));
}

#[tokio::test]
async fn gdbus_gets_the_golden_device() {
    let service = Service::start(p40_board()).await;
    let printed = printed(&mut gdbus(&service.bus, "Manager.GetDevice", &["00:06.0-1"])).await;
    for part in [
        "'addr': <'00:06.0-1'>",
        "'dev_type': <'NVIDIA_MPS'>",
        "'index': <-1>",
        "'ordinal': <uint32 1>",
        "'pcie_info': <{'lane_width': <16>, 'throughput': <'15.76 GB/s'>, \
         'transfer_rate_per_lane': <'8GT/s'>, 'version': <'3.0'>}>",
        "'healthy': <true>",
    ] {
        assert!(printed.contains(part), "no {part} in {printed}");
    }
}

#[tokio::test]
async fn what_is_not_known_is_left_out() {
    let mut bare = tesla_p40("0001:1a:00.0", P40);
    bare.plan.gpu.nvml = Err("GPU is lost".into());
    bare.plan.gpu.pci.pci_ids_name = None;
    bare.plan.gpu.pci.link = None;
    bare.plan.gpu.pci.render_node = None;
    bare.plan.sizes.truncate(1);
    bare.plan.sizes[0].memory_mib = 0;
    bare.healthy = false;
    bare.reason = "GPU is lost\0".to_owned();
    bare.compute_mode = None;
    bare.control_daemons = Vec::new();
    let service = Service::start(serving(vec![bare])).await;
    let (_, devices) = busctl(&service.bus, "ListDevices", &[]).await;
    let expected = json!({
        "addr": ["s", "0001:1a:00.0-0"],
        "name": ["s", "0001:1a:00.0-0"],
        "base_addr": ["s", "0001:1a:00.0"],
        "pci_bdf": ["s", "0001:1a:00.0"],
        "dev_type": ["s", "NVIDIA_MPS"],
        "ordinal": ["u", 0],
        "index": ["i", -1],
        "bound_groups": ["as", []],
        "bound_to": ["s", ""],
        "device_minor": ["i", -1],
        "vendor_device_id": ["s", "10de:1b38"],
        "numa_node": ["i", -1],
        "mps_thread_percentage": ["i", 25],
        "detected_on_host": ["b", true],
        "hot_pluggable": ["b", false],
        "servable": ["b", true],
        "drained": ["b", false],
        "served": ["b", false],
        "healthy": ["b", false],
        // The bus closes a connection that sends a string with a NUL. So the service replaces NUL by U+FFFD.
        "reason": ["s", "GPU is lost\u{fffd}"],
        "pipe_directory": ["s", "/tmp/nvidia-mps/pipe"],
        "isolation": ["s", "gpu"],
        "limits_enforced": ["b", false],
    });
    assert_eq!(devices, json!([[expected]]));

    for (schema, arguments) in
        [("list", vec!["list", "--json"]), ("list-gpus", vec!["list", "--gpus", "--json"])]
    {
        let listed = printed(&mut ctl(&service.bus, &arguments)).await;
        strict(schema, &[serde_json::from_str(&listed).unwrap()]);
    }

    let path = "/io/yunion/Mps1/gpus/_0001_1a_00_0";
    let properties = ["org.freedesktop.DBus.Properties", "GetAll", "s", "io.yunion.Mps1.Gpu"];
    let (_, known) = busctl_at(&service.bus, path, properties[0], properties[1], &properties[2..]).await;
    assert!(known[0].get("DevicePath").is_none() && known[0].get("MpsMemoryLimit").is_none());
    let mut get = service.bus.command("gdbus");
    get.args(["call", "--system", "--dest", NAME, "--object-path", path]);
    get.args(["--method", "org.freedesktop.DBus.Properties.Get", "io.yunion.Mps1.Gpu", "DevicePath"]);
    assert!(complained(&mut get).await.contains("io.yunion.Mps1.Error.Failed"));
}

#[tokio::test]
async fn get_device_takes_every_name() {
    let service = Service::start(p40_board()).await;
    for name in ["00:06.0-1", "0000:00:06.0-1"] {
        let answer = busctl(&service.bus, "GetDevice", &["s", name]).await;
        assert_eq!(answer, ("a{sv}".to_owned(), json!([golden_slice(1)])), "{name}");
    }
    for name in ["00:06.0", "0000:00:06.0", P40] {
        let answer = busctl(&service.bus, "GetDevice", &["s", name]).await;
        assert_eq!(answer, ("a{sv}".to_owned(), json!([golden_gpu()])), "{name}");
    }
}

#[tokio::test]
async fn container_config_has_its_signature_and_order() {
    let service = Service::start(p40_board()).await;
    let mut command = service.bus.command("busctl");
    command.args(["--system", "call", NAME, MANAGER, "io.yunion.Mps1.Manager", "GetContainerConfig"]);
    let answer = printed(command.args(["as", "1", "00:06.0-1"])).await;
    let expected = format!(
        "a(ss)a(ssb)as 10 \"CUDA_MPS_PIPE_DIRECTORY\" \"/tmp/nvidia-mps/pipe\" \
         \"NVIDIA_VISIBLE_DEVICES\" \"{P40}\" \"NVIDIA_DRIVER_CAPABILITIES\" \"all\" \
         \"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE\" \"25\" \
         \"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT\" \"0=5760M\" \"NVIDIA_GPU_MEMORY_LIMIT\" \"5760\" \
         \"NVIDIA_GPU_MEMORY_REQUEST\" \"\" \"YUNION_MPS_MEMORY_FRACTION\" \"0.241\" \
         \"YUNION_MPS_MEMORY_MIB\" \"5553\" \"YUNION_MPS_DEVICE\" \"00:06.0-1\" \
         2 \"/dev/shm\" \"/dev/shm\" false \"/tmp/nvidia-mps/pipe\" \"/tmp/nvidia-mps/pipe\" false \
         1 \"{P40}\"\n"
    );
    assert_eq!(answer, expected);
}

#[tokio::test]
async fn control_daemons_and_events_are_listed() {
    let service = Service::start(p40_board()).await;
    let (_, daemons) = busctl(&service.bus, "ListControlDaemons", &[]).await;
    let expected = json!({
        "id": ["s", "shared"],
        "state": ["s", "ready"],
        "reason": ["s", ""],
        "pid": ["u", 4711],
        "servers": ["au", [4712]],
        "pipe_directory": ["s", "/tmp/nvidia-mps/pipe"],
        "control_directory": ["s", "/tmp/nvidia-mps/pipe"],
        "log_directory": ["s", "/tmp/nvidia-mps/log"],
        "multiuser": ["b", false],
        "cpus": ["s", "all"],
        "starts": ["u", 1],
        "restarts": ["u", 0],
        "server_restarts": ["u", 0],
        "faults": ["u", 0],
        "since": ["x", 1_700_000_000],
        "gpus": ["as", [P40]],
    });
    assert_eq!(daemons, json!([[expected]]));
    let (_, events) = busctl(&service.bus, "ListEvents", &[]).await;
    let at = 1_700_000_000_000_000_i64;
    let text = "control daemon shared is ready";
    assert_eq!(events, json!([[{"at": ["x", at], "fault": ["b", false], "text": ["s", text]}]]));
}

#[tokio::test]
async fn before_the_first_plan_nothing_is_claimed() {
    let mut service = Service::start(starting()).await;
    for (method, argument) in [
        ("ListDevices", None),
        ("ListGpus", None),
        ("ListClients", None),
        ("GetDevice", Some("00:06.0")),
        ("GetContainerConfig", Some("['00:06.0-1']")),
    ] {
        let arguments: Vec<&str> = argument.into_iter().collect();
        let complaint = complained(&mut gdbus(&service.bus, &format!("Manager.{method}"), &arguments)).await;
        assert!(complaint.contains("GDBus.Error:io.yunion.Mps1.Error.NotReady: "), "{method}: {complaint}");
    }
    assert_eq!(busctl(&service.bus, "ListControlDaemons", &[]).await.1, json!([[]]));

    // This Snapshot says that the service serves no GPU. So `ListDevices` returns an empty list instead of an error.
    service.publish(Snapshot { gpus: Some(Vec::new()), generation: 1, ..starting() }).await;
    assert_eq!(busctl(&service.bus, "ListDevices", &[]).await.1, json!([[]]));
}

#[tokio::test]
async fn errors_have_their_names_and_say_what_was_asked() {
    let service = Service::start(p40_board()).await;
    let answer = python(
        &service.bus,
        r#"
def error(call, *arguments):
    try:
        call(*arguments)
        return None
    except dbus.DBusException as e:
        return [e.get_dbus_name(), e.get_dbus_message()]
print(json.dumps([
    error(manager.GetDevice, "00:06.0-4"),
    error(manager.GetContainerConfig, ["00:06.0-1", "00:07.0-0"]),
    error(manager.GetContainerConfig, dbus.Array([], signature="s")),
    error(manager.Nonsense),
]))
"#,
    )
    .await;
    assert_eq!(
        answer,
        json!([
            [
                "io.yunion.Mps1.Error.NoSuchDevice",
                "there is no slice or GPU \"00:06.0-4\"; did you mean 00:06.0-0 or 00:06.0-1 or 00:06.0-2? `yunion-mpsctl list` \
                 shows all names"
            ],
            [
                "io.yunion.Mps1.Error.NoSuchDevice",
                "there is no slice or GPU \"00:07.0-0\"; did you mean 00:06.0-0 or 00:06.0-1 or 00:06.0-2? `yunion-mpsctl list` \
                 shows all names"
            ],
            ["io.yunion.Mps1.Error.Failed", "no slice was named; `yunion-mpsctl list` shows the names"],
            ["org.freedesktop.DBus.Error.UnknownMethod", "Unknown method 'Nonsense'"],
        ])
    );
}

fn worker() -> ClientView {
    let client = KnownClient {
        user: Some("worker".to_owned()),
        tenant: Some(Tenant { uid: 1000, container: "main".to_owned() }),
        slices: Some(Membership { slices: vec!["00:06.0-1".parse().unwrap()], known_by: KnownBy::Mount }),
        may_command: Some(MayCommand::Neighbours),
        guest: Some(GuestContainer {
            guest: "train-1".to_owned(),
            container: "main".to_owned(),
            project: String::new(),
        }),
        ..KnownClient::only(ProcessId { pid: 1153, start_time: 1 })
    };
    ClientView {
        client,
        bypass: false,
        waiting: false,
        command: "python3".to_owned(),
        gpu_uuid: P40.to_owned(),
        memory_mib: Some(580),
        since: Some(UNIX_EPOCH + Duration::from_secs(1_700_000_000)),
    }
}

#[tokio::test]
async fn requests_reach_the_daemon_and_its_answers_come_back() {
    let mut service = Service::start(p40_board()).await;
    let bus = &service.bus;
    let requests = &mut service.requests;

    let clients = vec![worker()];
    let daemon = async {
        match requests.recv().await {
            Some(Request::Clients(reply)) => reply.send(Ok(clients)).unwrap(),
            other => panic!("{other:?}"),
        }
    };
    let (answer, ()) = tokio::join!(busctl(bus, "ListClients", &[]), daemon);
    let expected = json!({
        "pid": ["u", 1153],
        "bypass": ["b", false],
        "waiting": ["b", false],
        "uid": ["u", 1000],
        "user": ["s", "worker"],
        "command": ["s", "python3"],
        "gpu": ["s", P40],
        "device": ["s", "00:06.0-1"],
        "known_by": ["s", "mount"],
        "guest": ["s", "train-1"],
        "container": ["s", "main"],
        "may_command": ["s", "neighbours"],
        "memory_mib": ["i", 580],
        "since": ["x", 1_700_000_000],
    });
    assert_eq!(answer, ("aa{sv}".to_owned(), json!([[expected]])));

    for (answer, expected) in [
        (Ok(7), Ok("(uint64 7,)")),
        (
            Err(RequestError::InvalidConfig("host.conf:3: \0".to_owned())),
            Err("io.yunion.Mps1.Error.InvalidConfig: host.conf:3: \u{fffd}"),
        ),
        (Err(RequestError::Busy("a reload".to_owned())), Err("io.yunion.Mps1.Error.Busy: a reload")),
    ] {
        let daemon = async {
            match requests.recv().await {
                Some(Request::Reload(reply)) => reply.send(answer).unwrap(),
                other => panic!("{other:?}"),
            }
        };
        let mut reload = gdbus(bus, "Control.Reload", &[]);
        match expected {
            Ok(text) => assert_eq!(tokio::join!(printed(&mut reload), daemon).0.trim_end(), text),
            Err(text) => {
                let complaint = tokio::join!(complained(&mut reload), daemon).0;
                assert!(complaint.contains(text), "{complaint}");
            }
        }
    }

    // The test drops the first request without an answer, and then the receiver of all requests. Both callers get the error for
    // a service that is stopping.
    let drops = async { drop(requests.recv().await) };
    let mut reload = gdbus(bus, "Control.Reload", &[]);
    let complaint = tokio::join!(complained(&mut reload), drops).0;
    assert!(complaint.contains("io.yunion.Mps1.Error.Failed: the service is stopping"), "{complaint}");
    requests.close();
    let complaint = complained(&mut gdbus(bus, "Manager.ListClients", &[])).await;
    assert!(complaint.contains("io.yunion.Mps1.Error.Failed: the service is stopping"), "{complaint}");
}

#[tokio::test]
async fn properties_are_the_dictionary() {
    let service = Service::start(p40_board()).await;
    for (path, interface, golden) in
        [(SLICE, "io.yunion.Mps1.Device", golden_slice(1)), (GPU, "io.yunion.Mps1.Gpu", golden_gpu())]
    {
        let (_, all) =
            busctl_at(&service.bus, path, "org.freedesktop.DBus.Properties", "GetAll", &["s", interface])
                .await;
        assert_eq!(all[0], camel(&golden), "{path}");
    }
    let (_, all) = busctl_at(
        &service.bus,
        MANAGER,
        "org.freedesktop.DBus.Properties",
        "GetAll",
        &["s", "io.yunion.Mps1.Manager"],
    )
    .await;
    assert_eq!(
        all[0],
        json!({
            "Version": ["s", env!("CARGO_PKG_VERSION")],
            "State": ["s", "ready"],
            "StateReason": ["s", ""],
            "Generation": ["t", 1],
            "Enabled": ["b", true],
            "PipeDirectory": ["s", "/tmp/nvidia-mps/pipe"],
            "LogDirectory": ["s", "/tmp/nvidia-mps/log"],
            "DriverVersion": ["s", "580.159.04"],
        })
    );
}

#[tokio::test]
async fn managed_objects_follow_the_snapshot_and_are_announced() {
    let mut service = Service::start(p40_board()).await;
    let names =
        |objects: &Value| -> Vec<String> { objects[0].as_object().unwrap().keys().cloned().collect() };
    let managed = "org.freedesktop.DBus.ObjectManager";
    let (signature, objects) = busctl_at(&service.bus, ROOT, managed, "GetManagedObjects", &[]).await;
    assert_eq!(signature, "a{oa{sa{sv}}}");
    let slice = |ordinal| format!("/io/yunion/Mps1/devices/_00_06_0_{ordinal}");
    let mut expected = vec![MANAGER.to_owned()];
    expected.extend((0..4).map(slice));
    expected.push(GPU.to_owned());
    assert_eq!(names(&objects), expected);
    let manager: Vec<&String> = objects[0][MANAGER].as_object().unwrap().keys().collect();
    assert_eq!(manager, ["io.yunion.Mps1.Control", "io.yunion.Mps1.Manager"]);
    assert_eq!(objects[0][slice(1)], json!({"io.yunion.Mps1.Device": camel(&golden_slice(1))}));
    assert_eq!(objects[0][GPU], json!({"io.yunion.Mps1.Gpu": camel(&golden_gpu())}));
    assert_eq!(objects[0][MANAGER]["io.yunion.Mps1.Manager"]["State"], json!(["s", "ready"]));

    let mut monitor = Monitor::start(&service.bus).await;
    let interfaces = |signals: Vec<Value>| -> Vec<Value> {
        signals.into_iter().filter(|signal| signal[1] == managed).collect()
    };
    service.publish(changed(&p40_board(), |gpu| gpu.plan.sizes.truncate(3))).await;
    let signals = interfaces(monitor.until("DevicesChanged").await);
    let removed = json!([ROOT, managed, "InterfacesRemoved", [slice(3), ["io.yunion.Mps1.Device"]]]);
    assert_eq!(signals, [removed]);

    service.publish(Snapshot { generation: 3, ..p40_board() }).await;
    let signals = interfaces(monitor.until("DevicesChanged").await);
    let properties = json!({"io.yunion.Mps1.Device": camel(&golden_slice(3))});
    assert_eq!(signals, [json!([ROOT, managed, "InterfacesAdded", [slice(3), properties]])]);
}

#[tokio::test]
async fn changes_are_told_once_and_nothing_else_is() {
    let mut service = Service::start(p40_board()).await;
    let mut monitor = Monitor::start(&service.bus).await;
    let mut sick = changed(&p40_board(), |gpu| {
        gpu.healthy = false;
        gpu.reason = "control daemon died".to_owned();
        gpu.confirmed_thread_percentage = None;
    });
    sick.state = State::Degraded;
    sick.reason = "00:06.0: control daemon died".to_owned();
    service.publish(sick.clone()).await;
    let told = |path: &str, kind: &str, values: Value, lost: Value| {
        let body = json!([format!("{NAME}.{kind}"), values, lost]);
        json!([path, "org.freedesktop.DBus.Properties", "PropertiesChanged", body])
    };
    let health = json!({"Healthy": ["b", false], "Reason": ["s", "control daemon died"]});
    let of_slice = json!({
        "Healthy": ["b", false], "Reason": ["s", "control daemon died"], "Served": ["b", false],
    });
    let mut expected = vec![told(GPU, "Gpu", health, json!(["ConfirmedThreadPercentage"]))];
    expected.extend((0..4).map(|ordinal| {
        let path = format!("/io/yunion/Mps1/devices/_00_06_0_{ordinal}");
        told(&path, "Device", of_slice.clone(), json!([]))
    }));
    let state = json!({
        "Generation": ["t", 2],
        "State": ["s", "degraded"],
        "StateReason": ["s", "00:06.0: control daemon died"],
    });
    expected.push(told(MANAGER, "Manager", state, json!([])));
    expected.push(json!([MANAGER, "io.yunion.Mps1.Manager", "DevicesChanged", [2]]));
    assert_eq!(monitor.until("DevicesChanged").await, expected);

    // A Snapshot without a change, or with a change that no property shows, causes no signal.
    let mut quiet = sick.clone();
    quiet.events = Events::default();
    service.publish(sick).await;
    service.publish(quiet).await;
    service.served.client_fault(P40, &[807, 822], "fatal GPU error").await;
    let body = json!([P40, [807, 822], "fatal GPU error"]);
    let fault = json!([MANAGER, "io.yunion.Mps1.Manager", "ClientFault", body]);
    assert_eq!(monitor.until("ClientFault").await, [fault]);

    let properties = ["org.freedesktop.DBus.Properties", "GetAll", "s", "io.yunion.Mps1.Device"];
    let (_, all) = busctl_at(&service.bus, SLICE, properties[0], properties[1], &properties[2..]).await;
    assert_eq!(all[0]["Healthy"], json!(["b", false]));
}

/// A signal reports a slice over its budget. No signal reports the clients and the used memory of a slice, since these change
/// too often. Each call returns their present values.
#[tokio::test]
async fn overuse_is_told_and_use_is_not() {
    let used = |clients, overuse: &str| {
        let mut snapshot = p40_board();
        let of_slice = SliceUse { clients, memory_mib: Some(600), overuse: overuse.to_owned() };
        let nothing = SliceUse { memory_mib: Some(0), ..SliceUse::default() };
        first_gpu(&mut snapshot).uses = vec![of_slice, nothing.clone(), nothing.clone(), nothing];
        snapshot
    };
    let mut service = Service::start(used(1, "")).await;
    let mut monitor = Monitor::start(&service.bus).await;
    service.publish(used(2, "")).await;
    service.publish(used(3, "the slice has more than 2 clients")).await;
    service.served.over_use("00:06.0-0", &["clients"], &[7, 8, 9]).await;
    let path = "/io/yunion/Mps1/devices/_00_06_0_0";
    let properties = "org.freedesktop.DBus.Properties";
    let reason = "over its budget: the slice has more than 2 clients";
    let of_slice = json!({"Overuse": ["s", "the slice has more than 2 clients"], "Reason": ["s", reason]});
    let of_gpu = json!({"Reason": ["s", "slices over their budgets: 00:06.0-0"]});
    let expected = [
        json!([GPU, properties, "PropertiesChanged", [format!("{NAME}.Gpu"), of_gpu, []]]),
        json!([path, properties, "PropertiesChanged", [format!("{NAME}.Device"), of_slice, []]]),
        json!([MANAGER, "io.yunion.Mps1.Manager", "OverUse", ["00:06.0-0", ["clients"], [7, 8, 9]]]),
    ];
    assert_eq!(monitor.until("OverUse").await, expected);
    let (_, all) = busctl_at(&service.bus, path, properties, "GetAll", &["s", "io.yunion.Mps1.Device"]).await;
    assert_eq!((&all[0]["Clients"], &all[0]["MemoryUsed"]), (&json!(["u", 3]), &json!(["i", 600])));
}

#[tokio::test]
async fn introspection_equals_the_documented_interfaces() {
    let service = Service::start(p40_board()).await;
    let files = concat!(env!("CARGO_MANIFEST_DIR"), "/config");
    let mut live = Vec::new();
    for path in [MANAGER, GPU, SLICE] {
        let mut command = service.bus.command("gdbus");
        command.args(["introspect", "--system", "--xml", "--dest", NAME, "--object-path", path]);
        live.push(printed(&mut command).await);
    }
    for name in ["Manager", "Control", "Gpu", "Device"] {
        let interface = format!("{NAME}.{name}");
        let documented = std::fs::read_to_string(format!("{files}/{interface}.xml")).unwrap();
        let documented = members(&interface, &documented).await;
        assert!(documented.len() > 1, "{interface} documents nothing");
        let here = live.iter().filter(|xml| xml.contains(&format!("<interface name=\"{interface}\"")));
        let here: Vec<&String> = here.collect();
        assert_eq!(here.len(), 1, "{interface}");
        assert_eq!(members(&interface, here[0]).await, documented, "{interface}");
    }
}

/// Returns a line for each member of a D-Bus interface, with its arguments, access and annotations.
async fn members(interface: &str, xml: &str) -> Vec<String> {
    let program = r#"
import sys, xml.etree.ElementTree as tree
interface = tree.fromstring(sys.argv[2]).find("interface[@name='%s']" % sys.argv[1])
print("interface", sys.argv[1])
for member in interface:
    arguments = ["%s %s %s" % (a.get("name"), a.get("type"), a.get("direction")) for a in member.findall("arg")]
    notes = ["%s=%s" % (n.get("name"), n.get("value")) for n in member.findall("annotation")]
    if member.tag == "property" and not notes:
        notes = ["org.freedesktop.DBus.Property.EmitsChangedSignal=true"]
    print(member.tag, member.get("name"), member.get("type"), member.get("access"), arguments, sorted(notes))
"#;
    let mut command = Command::new("/usr/bin/python3");
    let printed = printed(command.args(["-c", program, interface, xml])).await;
    let mut lines: Vec<String> = printed.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

#[tokio::test]
async fn every_documented_member_has_its_prose() {
    let program = r#"
import sys, xml.etree.ElementTree as tree
builder = tree.TreeBuilder(insert_comments=True)
interface = tree.parse(sys.argv[1], tree.XMLParser(target=builder)).getroot().find("interface")
before = None
for member in interface:
    if member.tag is not tree.Comment and (before is None or before.tag is not tree.Comment):
        print(member.get("name"))
    before = member
"#;
    for name in ["Manager", "Control", "Gpu", "Device"] {
        let file = format!("{}/config/{NAME}.{name}.xml", env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new("/usr/bin/python3");
        assert_eq!(printed(command.args(["-c", program, &file])).await, "", "without prose in {name}");
    }
}

#[tokio::test]
async fn every_key_of_a_dictionary_is_documented() {
    let service = Service::start(p40_board()).await;
    let file = format!("{}/config/io.yunion.Mps1.Manager.xml", env!("CARGO_MANIFEST_DIR"));
    let documented = std::fs::read_to_string(file).unwrap();
    for method in ["ListDevices", "ListGpus", "ListControlDaemons", "ListEvents"] {
        let (_, list) = busctl(&service.bus, method, &[]).await;
        for (key, value) in list[0][0].as_object().unwrap() {
            let line = format!(" {key} {}: ", value[0].as_str().unwrap());
            assert!(documented.contains(&line), "{method}: {key}");
        }
    }
}

#[tokio::test]
async fn members_may_read_and_only_root_may_control() {
    const DENIED: &str = "org.freedesktop.DBus.Error.AccessDenied";
    if !root_or_skip("members_may_read_and_only_root_may_control") {
        return;
    }
    let mut service = Service::start(p40_board()).await;
    let call = |mut gdbus: Command, path: &str, member: &str, arguments: &[&str]| {
        gdbus.args(["call", "--system", "--dest", NAME, "--object-path", path, "--method", member]);
        gdbus.args(arguments);
        gdbus
    };
    let as_member = || service.bus.command_as_member("gdbus");
    let as_stranger = || service.bus.command_as_stranger("gdbus");
    for (path, member, arguments) in [
        (MANAGER, "io.yunion.Mps1.Manager.ListDevices", vec![]),
        (MANAGER, "io.yunion.Mps1.Manager.GetContainerConfig", vec!["['00:06.0-1']"]),
        (ROOT, "org.freedesktop.DBus.ObjectManager.GetManagedObjects", vec![]),
        (MANAGER, "org.freedesktop.DBus.Introspectable.Introspect", vec![]),
        (MANAGER, "org.freedesktop.DBus.Peer.Ping", vec![]),
        (SLICE, "org.freedesktop.DBus.Properties.GetAll", vec!["io.yunion.Mps1.Device"]),
        (GPU, "org.freedesktop.DBus.Properties.Get", vec!["io.yunion.Mps1.Gpu", "Healthy"]),
    ] {
        printed(&mut call(as_member(), path, member, &arguments)).await;
        let complaint = complained(&mut call(as_stranger(), path, member, &arguments)).await;
        assert!(complaint.contains(DENIED), "{complaint}");
    }
    for gdbus in [as_member(), as_stranger()] {
        let complaint = complained(&mut call(gdbus, MANAGER, "io.yunion.Mps1.Control.Reload", &[])).await;
        assert!(complaint.contains(DENIED), "{complaint}");
    }
    assert!(service.requests.try_recv().is_err(), "the call has reached the daemon");

    // A user without the permission to read learns from every command which group has it.
    for command in ["list", "status", "events"] {
        let mut ctl = service.bus.command_as_stranger(mpsctl());
        let complaint = complained(ctl.arg(command)).await;
        assert!(complaint.contains("join the group with `sudo usermod -aG yunion-mps $USER`"), "{complaint}");
    }

    // The bus also refuses a call to root's methods that names no interface.
    let mut bare = service.bus.command_as_member("/usr/bin/python3");
    let program = "import dbus\n\
        message = dbus.lowlevel.MethodCallMessage('io.yunion.Mps1', '/io/yunion/Mps1/Manager', None, 'Reload')\n\
        dbus.SystemBus().send_message_with_reply_and_block(message, 10)";
    let complaint = complained(bare.args(["-c", program])).await;
    assert!(complaint.contains("org.freedesktop.DBus.Error.AccessDenied"), "{complaint}");
    assert!(service.requests.try_recv().is_err(), "the call has reached the daemon");

    // Only root may own the service's name. The test asks another bus for the name, where the name is free.
    let empty = PrivateBus::start();
    let mut own = empty.command_as_member("gdbus");
    own.args([
        "call",
        "--system",
        "--dest",
        "org.freedesktop.DBus",
        "--object-path",
        "/org/freedesktop/DBus",
    ]);
    own.args(["--method", "org.freedesktop.DBus.RequestName", NAME, "4"]);
    let complaint = complained(&mut own).await;
    assert!(complaint.contains("org.freedesktop.DBus.Error.AccessDenied"), "{complaint}");
}

/// With the policy file docs/yunion-mps-readers.conf, every local user may read the service's state, and only root may change
/// it.
#[tokio::test]
async fn a_site_may_let_everybody_read() {
    if !root_or_skip("a_site_may_let_everybody_read") {
        return;
    }
    let readers =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/yunion-mps-readers.conf"));
    let readers = readers.unwrap();
    let readers = readers.split_once("<busconfig>").unwrap().1;
    let bus = PrivateBus::with_policy(|shipped| shipped.replace("</busconfig>", readers));
    let service = Service::start_on(bus, p40_board()).await;
    let mut list = service.bus.command_as_stranger(mpsctl());
    assert!(printed(list.arg("list")).await.contains("00:06.0-1"));
    let mut reload = service.bus.command_as_stranger("gdbus");
    reload.args(["call", "--system", "--dest", NAME, "--object-path", MANAGER, "--method"]);
    let complaint = complained(reload.arg("io.yunion.Mps1.Control.Reload")).await;
    assert!(complaint.contains("Rejected send message"), "{complaint}");
}

/// The service itself refuses control calls of users other than root, since an administrator's bus policy may allow them.
#[tokio::test]
async fn control_is_roots_whatever_the_policy_says() {
    if !root_or_skip("control_is_roots_whatever_the_policy_says") {
        return;
    }
    let bus = PrivateBus::with_policy(|shipped| {
        assert!(shipped.contains("<deny send_destination=\"io.yunion.Mps1\"/>"), "{shipped}");
        shipped.replace("<deny send", "<allow send").replace("<deny receive", "<allow receive")
    });
    let mut service = Service::start_on(bus, p40_board()).await;
    for (method, arguments) in [
        ("Reload", &[][..]),
        ("Apply", &["true"]),
        ("RestartServer", &["00:06.0"]),
        ("ReleaseDevices", &["['00:06.0-1']"]),
        ("ReleaseContainer", &["0123456789ab"]),
        ("ReleaseGroup", &["1", "@a{sv} {}"]),
        ("Drain", &["['00:06.0-1']"]),
        ("Undrain", &["@as []"]),
    ] {
        let mut gdbus = service.bus.command_as_stranger("gdbus");
        gdbus.args(["call", "--system", "--dest", NAME, "--object-path", MANAGER, "--method"]);
        let complaint =
            complained(gdbus.arg(format!("io.yunion.Mps1.Control.{method}")).args(arguments)).await;
        assert!(
            complaint
                .contains("AccessDenied: only root may call io.yunion.Mps1.Control on D-Bus, not user 1"),
            "{complaint}"
        );
    }
    assert!(service.requests.try_recv().is_err(), "a call has reached the daemon");
}

/// By default, the service refuses requests of members of the group yunion-mps to end GPU work. If the configuration allows
/// them, at most eight are handled at a time, and further ones are refused. Requests of root do not count.
#[tokio::test]
async fn terminations_of_members_hold_up_nobody() {
    if !root_or_skip("terminations_of_members_hold_up_nobody") {
        return;
    }
    let mut service = Service::start(p40_board()).await;
    let terminate = |service: &Service, member: bool| {
        let bus = &service.bus;
        let mut gdbus = if member { bus.command_as_member("gdbus") } else { bus.command("gdbus") };
        gdbus.args(["call", "--system", "--dest", NAME, "--object-path", MANAGER, "--method"]);
        gdbus.args(["io.yunion.Mps1.Manager.TerminateClient", "7"]);
        gdbus.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        gdbus
    };
    let complaint = complained(&mut terminate(&service, true)).await;
    assert!(complaint.contains("AccessDenied: only root may end GPU work, not user 65534"), "{complaint}");
    assert!(service.requests.try_recv().is_err(), "a call has reached the daemon");
    service.publish(Snapshot { users_may_terminate: true, ..p40_board() }).await;
    let mut waiting = Vec::new();
    for _ in 0..8 {
        let member = terminate(&service, true).spawn().unwrap();
        let asked = timeout(DEADLINE, service.requests.recv()).await.unwrap().unwrap();
        assert!(matches!(asked, Request::Terminate(7, Some(65534), _)), "{asked:?}");
        waiting.push((member, asked));
    }
    let complaint = complained(&mut terminate(&service, true)).await;
    assert!(complaint.contains("Busy: the service already carries out 8 requests of users"), "{complaint}");
    let _root = terminate(&service, false).spawn().unwrap();
    let asked = timeout(DEADLINE, service.requests.recv()).await.unwrap().unwrap();
    assert!(matches!(asked, Request::Terminate(7, None, _)), "{asked:?}");
    let (_member, Request::Terminate(.., reply)) = waiting.pop().unwrap() else { unreachable!() };
    reply.send(Ok(())).unwrap();
    let _next = terminate(&service, true).spawn().unwrap();
    let asked = timeout(DEADLINE, service.requests.recv()).await.unwrap().unwrap();
    assert!(matches!(asked, Request::Terminate(7, Some(65534), _)), "{asked:?}");
}

#[tokio::test]
async fn names_that_are_none_are_refused_without_being_repeated() {
    let service = Service::start(p40_board()).await;
    let answer = python(
        &service.bus,
        r#"
def refused(method, argument, interface):
    try:
        method(argument, dbus_interface="io.yunion.Mps1." + interface)
    except dbus.DBusException as error:
        return [error.get_dbus_name(), str(error)]
print(json.dumps([
    refused(manager.GetDevice, "" * 65, "Manager"),
    refused(manager.GetContainerConfig, ["00:06.0-1"] * 1025, "Manager"),
    refused(manager.ReleaseContainer, "x" * 60000, "Control"),
]))
"#,
    )
    .await;
    let expected = [
        ("io.yunion.Mps1.Error.NoSuchDevice", "a name has at most 64 bytes, and this name has 65"),
        ("io.yunion.Mps1.Error.Failed", "the request names 1025 slices, but at most 1024 are allowed"),
        ("io.yunion.Mps1.Error.Failed", "a container id has at most 64 digits, and this id has 60000"),
    ];
    for (refusal, (name, text)) in answer.as_array().unwrap().iter().zip(expected) {
        assert_eq!(refusal[0], name, "{refusal}");
        assert!(refusal[1].as_str().unwrap().ends_with(text), "{refusal}");
    }
}

#[tokio::test]
async fn a_name_that_is_taken_is_an_error_and_stays_with_its_owner() {
    let service = Service::start(p40_board()).await;
    let (_keep, seen) = watch::channel(std::sync::Arc::new(starting()));
    let (ask, _requests) = mpsc::channel(1);
    let second =
        BusConnection::connect_to(service.bus.address().as_str().try_into().unwrap(), seen, ask).await;
    assert_eq!(second.err(), Some(zbus::Error::NameTaken));
    assert_eq!(busctl(&service.bus, "ListGpus", &[]).await.1, json!([[golden_gpu()]]));
}

#[tokio::test]
async fn a_bus_that_goes_away_is_noticed() {
    let mut service = Service::start(p40_board()).await;
    assert!(timeout(Duration::from_millis(1), service.served.closed()).await.is_err());
    service.bus.stop();
    timeout(DEADLINE, service.served.closed()).await.expect("nobody noticed");
    // After the end of the bus, a publication and a signal reach no program. They must not fail.
    service.publish(changed(&p40_board(), |gpu| gpu.healthy = false)).await;
    service.served.client_fault(P40, &[], "").await;
    let mut late = service.bus.command("busctl");
    let output = output(late.args(["--system", "call", NAME, MANAGER, "io.yunion.Mps1.Manager", "ListGpus"]));
    assert!(!output.await.status.success());
}
