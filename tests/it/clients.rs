//! Tests how `yunion-mpsctl clients`, `yunion-mpsctl metrics` and the service's state show the programs that use a GPU, with or
//! without MPS.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::client::{Client, own_user};
use crate::support::container::{ContainerGroup, NO_CONTAINER_GROUP};
use crate::support::exposition::samples_of;
use crate::support::host::{
    Host, binaries, control_daemon, control_pid, signal_pid, start_time, succeeded, text,
};
use crate::support::skip::skip;
use crate::support::wait::wait_for;

/// Starts a client with the environment of a container, and waits until NVML lists its memory.
fn listed_client(host: &Host, device: &str) -> Client {
    let client = Client::start(&mut host.program_of(device, &["hold", "600"]));
    wait_for("the client", || host.listed(client.id()).filter(|client| client["memory_mib"].is_u64()));
    client
}

/// Starts a CUDA program that finds no control daemon, and so uses the GPU without MPS.
fn bypassing(host: &Host) -> Client {
    let nowhere = host.path("nowhere");
    let mut command = host.program(&["hold", "600"]);
    let program = Client::start(command.env("CUDA_MPS_PIPE_DIRECTORY", nowhere));
    let entry = host.path(&format!("gpus/0/processes/{}", program.id()));
    wait_for("the program on the GPU", || entry.exists().then_some(()));
    program
}

fn row(table: &str, pid: u32) -> BTreeMap<&str, String> {
    find_row(table, pid).unwrap_or_else(|| panic!("no {pid} in\n{table}"))
}

fn find_row(table: &str, pid: u32) -> Option<BTreeMap<&str, String>> {
    let heads: Vec<&str> =
        table.lines().next()?.split("  ").map(str::trim).filter(|head| !head.is_empty()).collect();
    let mut rows = table.lines().map(|line| line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()));
    let row = rows.find(|cells| cells.clone().next() == Some(&pid.to_string()))?;
    Some(heads.into_iter().zip(row.map(str::to_owned)).collect())
}

/// Returns the values that `yunion-mpsctl metrics` prints, by name and labels. A parser of another project reads them.
fn metrics(host: &Host) -> BTreeMap<String, f64> {
    samples_of(&succeeded(&host.mpsctl(&["metrics"])))
}

fn of_gpu(samples: &BTreeMap<String, f64>, name: &str) -> f64 {
    samples[samples.keys().find(|key| key.starts_with(&format!("{name}{{gpu=00:06.0,"))).unwrap()]
}

fn of_slice(samples: &BTreeMap<String, f64>, name: &str, slice: &str) -> f64 {
    samples[samples.keys().find(|key| key.starts_with(&format!("{name}{{device={slice},"))).unwrap()]
}

#[test]
fn clients_are_shown_with_their_users_and_slices() {
    let mut host = Host::serving("h200");
    let table = succeeded(&host.mpsctl(&["clients"]));
    assert_eq!(table, "No clients: no process uses a GPU that is served.\n");

    let (one, two) = (listed_client(&host, "00:06.0-1"), listed_client(&host, "00:06.0-2"));
    let known = host.listed(one.id()).unwrap();
    let uid = rustix::process::getuid().as_raw();
    assert_eq!((&known["bypass"], &known["uid"]), (&json!(false), &json!(uid)));
    let id = Command::new("id").args(["-un", &uid.to_string()]).output().unwrap();
    assert_eq!(known["user"].as_str().unwrap(), String::from_utf8_lossy(&id.stdout).trim());
    assert_eq!(known["device"], "00:06.0-1");
    assert!(known["memory_mib"].as_u64().unwrap() > 0);

    let table = succeeded(&host.mpsctl(&["clients", "-o", "wide"]));
    let cells = row(&table, two.id());
    assert_eq!(cells["USER"], known["user"].as_str().unwrap());
    assert!(cells["COMMAND"].ends_with("cuda-client"), "{cells:?}");
    assert_eq!([&cells["MPS"], &cells["SLICE"], &cells["GPU"]], ["yes", "00:06.0-2", "00:06.0"]);
    assert_eq!(cells["MEMORY"], format!("{} MiB", known["memory_mib"]));
    assert_eq!([&cells["KNOWN BY"], &cells["MAY COMMAND"]], ["environment", "all"]);
    assert!(!table.contains("BYPASS"), "{table}");
    let table = succeeded(&host.mpsctl(&["clients"]));
    assert_eq!(row(&table, one.id())["SLICE"], "00:06.0-1");
    assert!(!row(&table, one.id()).contains_key("KNOWN BY"), "{table}");

    host.configure("enable_cuda_mps: false");
    drop((one, two));
    host.reload();
    host.wait_for_status("disabled, and nobody on the way out", |status| {
        status["service"]["state"] == "disabled" && status["control_daemons"].as_array().unwrap().is_empty()
    });
    let table = succeeded(&host.mpsctl(&["clients"]));
    assert_eq!(table, "No clients of this service: the service is disabled: enable_cuda_mps is false\n");
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn clients_are_shown_with_their_containers() {
    let mut host = Host::serving("h200");
    let Some(container) = ContainerGroup::new() else {
        skip("clients_are_shown_with_their_containers", NO_CONTAINER_GROUP);
        return;
    };
    let client = listed_client(&host, "00:06.0-1");
    container.take(client.id(), "init");
    assert_eq!(host.listed(client.id()).unwrap()["container_id"], container.id);
    let table = succeeded(&host.mpsctl(&["clients"]));
    assert_eq!(row(&table, client.id())["CONTAINER"], container.id[..12]);
    drop(client);
    assert_eq!(host.stop().code(), Some(0));
}

/// The name of a program contains line breaks and forged rows of the control daemon's `ps`. The service must not take the
/// processes in these rows for clients, must not wait for them when it ends GPU work, and must print no control characters.
#[test]
fn a_name_makes_nobody_a_client() {
    let mut host = Host::serving("h200");
    let real = listed_client(&host, "00:06.0-1");
    let stranger = Client::start(Command::new("sleep").arg("600"));
    let status = host.json(&["status"]).unwrap();
    let server = control_daemon(&status)["servers"][0].as_u64().unwrap();
    let uuid = host.list()[0]["device_path"].as_str().unwrap().to_owned();
    let row = |pid: u32, id: u32, gpu: &str| format!("\n{pid} {id} {server} {gpu} 4026531836 mine\x1b[2J");
    let rows = [row(stranger.id(), 77, &uuid[..22]), row(real.id(), 78, "GPU-00000000-0000-0000")].concat();
    let mut forger = host.command(host.path("bin/cuda-client"));
    std::os::unix::process::CommandExt::arg0(&mut forger, format!("work{rows}\nrest"));
    forger.env("CUDA_MPS_PIPE_DIRECTORY", host.path("mps/pipe")).env("YUNION_MPS_DEVICE", "00:06.0-2");
    forger.args(["hold", "600"]).stdout(Stdio::null());
    let forger = Client::start(&mut forger);
    wait_for("the forger", || host.listed(forger.id()));
    let table = host.front_end(&host.path("mps/pipe"), "ps");
    assert!(table.contains(&rows), "then this proves nothing: {table:?}");

    let all = host.clients();
    let mut pids: Vec<u64> = all.iter().map(|client| client["pid"].as_u64().unwrap()).collect();
    pids.sort_unstable();
    let mut expected = [u64::from(real.id()), u64::from(forger.id())];
    expected.sort_unstable();
    assert_eq!(pids, expected);
    assert!(
        all.iter().all(|client| client["command"].as_str().unwrap().ends_with("/cuda-client")),
        "{all:#?}"
    );
    assert!(all.iter().all(|client| client["gpu"] == uuid.as_str()), "{all:#?}");
    let table = succeeded(&host.mpsctl(&["clients"]));
    assert!(!table.contains('\x1b') && !table.contains("mine"), "{table:?}");

    let begun = Instant::now();
    let refusal = host.mpsctl(&["terminate", &stranger.id().to_string()]);
    assert!(text(&refusal).contains("is not an MPS client on this host"), "{}", text(&refusal));
    if let Some(container) = ContainerGroup::new() {
        container.take(stranger.id(), "init");
        succeeded(&host.mpsctl(&["terminate", "--container", &container.id]));
        drop(stranger);
    } else {
        skip("a_name_makes_nobody_a_client: the release of a container", NO_CONTAINER_GROUP);
    }
    succeeded(&host.mpsctl(&["terminate", "--device", "00:06.0-1"]));
    println!(
        "with rows forged: one refused, one container and one slice released after {:?}",
        begun.elapsed()
    );
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert!(!host.log().contains('\x1b') && !host.log().contains("mine"), "{}", host.log());
    drop((real, forger));
    assert_eq!(host.stop().code(), Some(0));
}

/// The supervisor of a control daemon no longer checks a GPU that has left the plan. So `clients` must not list the bypasses
/// that the last check has found on this GPU.
#[test]
fn a_bypass_is_not_listed_once_its_gpu_has_left_the_plan() {
    let mut host = Host::new("h200x8");
    let uuid = |index: usize| fs::read_to_string(host.path(&format!("gpus/{index}/uuid"))).unwrap();
    let entry = |index| format!("path: {}, type: NVIDIA_MPS, virtual_number: 2", uuid(index).trim());
    let (first, second) = (entry(0), entry(1));
    host.devices(&[&first, &second]);
    host.start();
    host.wait_for_state("ready");
    host.plant("gpus/0/compute_mode", "Default");
    let program = bypassing(&host);
    host.reload();
    host.wait_for_state("degraded");
    assert_eq!(host.listed(program.id()).unwrap()["bypass"], true);
    host.devices(&[&second]);
    host.reload();
    host.wait_for_state("ready");
    wait_for("the end of the entry", || host.listed(program.id()).is_none().then_some(()));
    drop(program);
    assert_eq!(host.stop().code(), Some(0));
}

/// Another program changes the compute mode, and then a program starts without MPS. The service's state names this program
/// until it ends. Clients lose nothing, not even by a reload meanwhile.
#[test]
fn a_bypass_is_told_and_nobody_loses_anything() {
    let mut host = Host::serving("h200");
    let before = host.wait_for_state("ready");
    let client = listed_client(&host, "00:06.0-1");
    host.plant("gpus/0/compute_mode", "Default");
    let program = bypassing(&host);
    let pid = program.id();
    host.reload();
    let who = format!("PID {pid} (cuda-client) of user {}", own_user());
    let sentence = format!("used without an MPS server of this service by {who}");
    let status = host.wait_for_state("degraded");
    assert_eq!(status["service"]["state_reason"], format!("GPU 00:06.0 is {sentence}"));
    assert_eq!(control_daemon(&status)["state"], "ready");
    assert_eq!(control_pid(&status), control_pid(&before));
    assert_eq!(host.compute_mode(0), "Exclusive_Process");
    for device in host.list() {
        assert_eq!((&device["healthy"], &device["reason"]), (&json!(true), &json!(sentence)));
    }
    let told = status["events"].as_array().unwrap();
    assert!(told.iter().any(|event| event["text"] == format!("GPU 00:06.0 is {sentence}")), "{told:?}");

    let known = host.listed(pid).unwrap();
    assert_eq!((&known["bypass"], &known["command"]), (&json!(true), &json!("cuda-client")));
    assert_eq!((&known["gpu"], &known["memory_mib"]), (&host.list()[0]["device_path"], &json!(526)));
    assert_eq!(host.listed(client.id()).unwrap()["bypass"], false);
    let table = succeeded(&host.mpsctl(&["clients"]));
    let cells = row(&table, pid);
    assert_eq!([&cells["MPS"], &cells["SLICE"]], ["BYPASS", "-"]);
    assert!(
        table.contains(
            "\nBYPASS: 1 of these processes uses a GPU without an MPS server of this service; no limit holds"
        ),
        "{table}"
    );
    let samples = metrics(&host);
    assert_eq!(of_gpu(&samples, "yunion_mps_gpu_bypass_processes"), 1.0);
    assert_eq!(of_gpu(&samples, "yunion_mps_gpu_clients"), 1.0);
    assert_eq!(samples["yunion_mps_service_state{state=degraded}"], 1.0);

    // The next service takes the control daemon over, and reports the program without MPS again.
    signal_pid(host.pid(), Signal::KILL);
    host.ended();
    host.start();
    let status = host.wait_for_state("degraded");
    assert_eq!(status["service"]["state_reason"], format!("GPU 00:06.0 is {sentence}"));
    assert_eq!(control_pid(&status), control_pid(&before));

    drop(program);
    host.reload();
    let status = host.wait_for_state("ready");
    let over = format!("the use of GPU 00:06.0 without an MPS server of this service has ended: {who}");
    let told = status["events"].as_array().unwrap();
    assert!(told.iter().any(|event| event["text"] == over), "{told:?}");
    assert!(host.list().iter().all(|device| device["reason"] == ""));
    assert!(host.listed(pid).is_none() && host.listed(client.id()).is_some());
    drop(client);
    assert_eq!(host.stop().code(), Some(0));
}

/// A program that only draws on the GPU is no bypass. Neither is a client that starts or ends while the service asks NVML.
#[test]
fn drawing_coming_and_going_is_no_bypass() {
    let mut host = Host::serving("h200");
    let display = Client::start(Command::new("sleep").arg("600"));
    let pid = display.id();
    host.plant(&format!("gpus/0/processes/{pid}"), &format!("graphics 40 {}\n", start_time(pid)));
    for _ in 0..8 {
        let program = Client::start(&mut host.program(&["hold", "0.05"]));
        host.reload();
        assert!(host.clients().iter().all(|client| client["bypass"] == false));
        drop(program);
    }
    let status = host.json(&["status"]).unwrap();
    assert_eq!(status["service"]["state"], "ready", "{status:#}");
    assert!(!host.log().contains("without an MPS server of this service"));
    host.plant(&format!("gpus/0/processes/{pid}"), &format!("compute 40 {}\n", start_time(pid)));
    assert_eq!(host.listed(pid).unwrap()["bypass"], true);
    host.reload();
    let status = host.wait_for_state("degraded");
    let reason = format!(
        "GPU 00:06.0 is used without an MPS server of this service by PID {pid} (sleep) of user {}",
        own_user()
    );
    assert_eq!(status["service"]["state_reason"], reason);
    assert_eq!(host.stop().code(), Some(0));
}

/// A bypass keeps the next server from opening the GPU. Until the bypass ends, the slices are not served, and the state names
/// the bypass.
#[test]
fn a_bypass_that_keeps_the_next_server_out_is_the_reason() {
    let mut host = Host::serving("h200");
    host.plant("gpus/0/compute_mode", "Default");
    let program = bypassing(&host);
    host.reload();
    let status = host.wait_for_state("degraded");
    signal_pid(control_pid(&status), Signal::KILL);
    let blamed = format!(
        "used without an MPS server of this service by PID {} (cuda-client) of user {}; end these programs: \
         no MPS server can start while they run",
        program.id(),
        own_user()
    );
    host.wait_for_failure(&format!("1 of 1 GPUs not served; 00:06.0: {blamed}"));
    for device in host.list() {
        assert_eq!((&device["healthy"], &device["reason"]), (&json!(false), &json!(blamed)));
    }
    wait_for("the table", || {
        // `yunion-mpsctl clients` may fail while the service tries to start the next control daemon.
        let output = host.mpsctl(&["clients"]);
        let table = text(&output);
        let row = find_row(&table, program.id()).filter(|_| output.status.success())?;
        (row["MPS"] == "BYPASS").then_some(())
    });
    drop(program);
    host.wait_for_state("ready");
    assert!(host.list().iter().all(|device| device["healthy"] == true && device["reason"] == ""));
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_bypass_before_the_first_server_is_the_reason() {
    let mut host = Host::serving("tesla-p40");
    let program = bypassing(&host);
    host.reload();
    let pid = program.id();
    host.wait_for_failure(&format!(
        "processes that do not use MPS have the GPU open: {pid} (cuda-client); end these processes"
    ));
    drop(program);
    host.reload();
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));
}

/// Causes a fault, kills a server, and kills a control daemon. Checks that the metrics count each failure, and returns the last
/// status.
fn failures_are_counted(host: &Host) -> Value {
    let mut fault = host.command(host.path("bin/cuda-client"));
    fault.env("CUDA_MPS_PIPE_DIRECTORY", host.path("mps/pipe")).arg("fault").stdout(Stdio::null());
    assert_eq!(fault.status().unwrap().code(), Some(4));
    let counted =
        |name: &str| metrics(host).get(&format!("yunion_mps_{name}_total{{control_daemon=shared}}")).copied();
    wait_for("the fault", || (counted("faults") == Some(1.0)).then_some(()));
    let status = host.wait_for_state("ready");
    let server = control_daemon(&status)["servers"][0].as_u64().unwrap();
    signal_pid(server.try_into().unwrap(), Signal::KILL);
    wait_for("another server", || (counted("server_restarts") == Some(1.0)).then_some(()));
    let status = host.wait_for_state("ready");
    assert_eq!(counted("control_daemon_restarts"), Some(0.0));
    signal_pid(control_pid(&status), Signal::KILL);
    wait_for("another control daemon", || (counted("control_daemon_restarts") >= Some(1.0)).then_some(()));
    let status = host.wait_for_state("ready");
    assert!(counted("server_restarts") >= Some(2.0));
    assert_eq!(counted("faults"), Some(1.0));
    status
}

#[test]
#[expect(clippy::too_many_lines, reason = "one line for each metric")]
fn metrics_are_what_the_bus_says() {
    let mut host = Host::new("h200");
    let down = succeeded(&host.mpsctl(&["metrics"]));
    assert!(down.contains("\nyunion_mps_up 0\n"), "{down}");
    assert_eq!(samples_of(&down), BTreeMap::from([("yunion_mps_up{}".to_owned(), 0.0)]));
    host.start();
    host.wait_for_state("ready");
    let clients = [
        listed_client(&host, "00:06.0-1"),
        listed_client(&host, "00:06.0-1"),
        listed_client(&host, "00:06.0"),
    ];
    // The service asks NVML for the clients at most once a second. `metrics` gets slices and GPUs in two answers, between which
    // the numbers may change. So the test repeats the command until both answers have the same numbers.
    let exposition = wait_for("a look", || {
        let exposition = succeeded(&host.mpsctl(&["metrics"]));
        let samples = samples_of(&exposition);
        let counted = |name: &str, count: f64| {
            samples.iter().any(|(key, value)| key.starts_with(name) && *value == count)
        };
        (counted("yunion_mps_gpu_clients{", 3.0)
            && counted("yunion_mps_device_clients{device=00:06.0-1,", 2.0))
        .then_some(exposition)
    });
    assert!(exposition.ends_with("\n# EOF\n"), "{exposition}");
    let samples = samples_of(&exposition);
    for (sample, value) in [
        ("yunion_mps_up{}", 1.0),
        ("yunion_mps_enabled{}", 1.0),
        ("yunion_mps_clients_known{}", 1.0),
        ("yunion_mps_service_state{state=ready}", 1.0),
        ("yunion_mps_service_state{state=failed}", 0.0),
        ("yunion_mps_control_daemon_state{control_daemon=shared,state=ready}", 1.0),
        ("yunion_mps_control_daemon_servers{control_daemon=shared}", 1.0),
        ("yunion_mps_control_daemon_restarts_total{control_daemon=shared}", 0.0),
        ("yunion_mps_server_restarts_total{control_daemon=shared}", 0.0),
        ("yunion_mps_faults_total{control_daemon=shared}", 0.0),
    ] {
        assert_eq!(samples.get(sample), Some(&value), "{sample} in\n{exposition}");
    }
    let status = host.json(&["status"]).unwrap();
    let last = status["events"].as_array().unwrap().iter().map(|event| event["at"].as_f64().unwrap());
    let last = last.fold(0.0, f64::max) / 1e6;
    assert!((samples["yunion_mps_last_event_timestamp_seconds{}"] - last).abs() < 0.001);
    let device = &host.list()[1];
    let mib = 1_048_576.0;
    let limit = device["mps_memory_limit"].as_f64().unwrap() * mib;
    assert_eq!(of_slice(&samples, "yunion_mps_device_memory_limit_bytes", "00:06.0-1"), limit);
    assert_eq!(of_slice(&samples, "yunion_mps_device_threads_limit_ratio", "00:06.0-1"), 0.25);
    assert_eq!(of_slice(&samples, "yunion_mps_device_limits_enforced", "00:06.0-1"), 1.0);
    let names = samples.keys().filter(|key| key.starts_with("yunion_mps_device_healthy{"));
    assert_eq!(names.filter(|key| samples[*key] == 1.0).count(), 4);
    assert_eq!(of_gpu(&samples, "yunion_mps_gpu_clients"), 3.0);
    assert_eq!(of_gpu(&samples, "yunion_mps_gpu_bypass_processes"), 0.0);
    assert_eq!(of_slice(&samples, "yunion_mps_device_clients", "00:06.0-1"), 2.0);
    assert_eq!(of_slice(&samples, "yunion_mps_device_clients", "00:06.0-0"), 0.0);
    let held = host.listed(clients[0].id()).unwrap()["memory_mib"].as_f64().unwrap() * mib;
    assert_eq!(of_slice(&samples, "yunion_mps_device_memory_used_bytes", "00:06.0-1"), 2.0 * held);
    assert_eq!(of_slice(&samples, "yunion_mps_device_memory_used_bytes", "00:06.0-2"), 0.0);
    assert!(!exposition.contains("yunion_mps_client_"), "only if somebody asks for it: {exposition}");
    let each = samples_of(&succeeded(&host.mpsctl(&["metrics", "--clients"])));
    assert_eq!(each["yunion_mps_clients_left_out{}"], 0.0);
    for (client, device) in clients.iter().zip(["00:06.0-1", "00:06.0-1", ""]) {
        let known = host.listed(client.id()).unwrap();
        // Prometheus drops labels with an empty value. The parser of the test does not.
        let series = format!(
            "yunion_mps_client_memory_used_bytes{{container=,container_id=,device={device},gpu=00:06.0,guest=,label=,pid={},\
             project=,user={},uuid={}}}",
            client.id(),
            known["user"].as_str().unwrap(),
            known["gpu"].as_str().unwrap(),
        );
        assert_eq!(
            each.get(&series),
            Some(&(known["memory_mib"].as_f64().unwrap() * mib)),
            "{series} in {each:#?}"
        );
    }
    let more: Vec<&String> = each.keys().filter(|key| !samples.contains_key(*key)).collect();
    assert_eq!(more.len(), clients.len() + 1, "{more:?}");
    drop(clients);

    let status = failures_are_counted(&host);
    // While the control daemon does not answer, the service counts the clients that it already knows. It asks NVML for all
    // other programs.
    signal_pid(control_pid(&status), Signal::STOP);
    let samples = metrics(&host);
    signal_pid(control_pid(&status), Signal::CONT);
    assert_eq!(samples["yunion_mps_clients_known{}"], 1.0);
    assert_eq!(of_gpu(&samples, "yunion_mps_gpu_bypass_processes"), 0.0);
    assert_eq!(of_gpu(&samples, "yunion_mps_gpu_clients"), 0.0);
    host.wait_for_state("ready");
    assert_eq!(host.stop().code(), Some(0));
    assert_eq!(metrics(&host)["yunion_mps_up{}"], 0.0);
}

fn documentation() -> String {
    fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md")).unwrap()
}

#[test]
fn every_metric_is_documented_with_its_labels() {
    let mut host = Host::serving("h200");
    let client = listed_client(&host, "00:06.0-1");
    let mut found = BTreeMap::new();
    for sample in samples_of(&succeeded(&host.mpsctl(&["metrics", "--clients"]))).into_keys() {
        let (name, labels) = sample.trim_end_matches('}').split_once('{').unwrap();
        let labels: Vec<&str> =
            labels.split(',').filter_map(|label| Some(label.split_once('=')?.0)).collect();
        let mut labels: Vec<String> = labels.into_iter().map(str::to_owned).collect();
        labels.sort();
        found.insert(name.to_owned(), labels);
    }
    let text = documentation();
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `yunion_mps_"));
    let documented: BTreeMap<String, Vec<String>> = rows
        .map(|row| {
            let mut cells = row.split('|').map(str::trim);
            let name = format!("yunion_mps_{}", cells.next().unwrap().trim_end_matches('`'));
            let labels = cells.nth(1).unwrap().split(',').map(str::trim).filter(|label| !label.is_empty());
            let mut labels: Vec<String> = labels.map(str::to_owned).collect();
            labels.sort();
            (name, labels)
        })
        .collect();
    assert_eq!(found, documented);
    drop(client);
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn clients_of_a_control_daemon_that_is_on_its_way_out_are_listed() {
    let host = Host::serving("h200");
    let client = listed_client(&host, "00:06.0-1");
    let before = control_pid(&host.json(&["status"]).unwrap());
    // A control daemon for each GPU needs another pipe directory. So the service waits for the last client before it replaces
    // the control daemon.
    host.configure("cuda_mps_topology: per_gpu");
    host.reload();
    wait_for("its way out", || {
        let status = host.json(&["status"])?;
        let daemons = status["control_daemons"].as_array()?.clone();
        daemons.iter().any(|daemon| daemon["pid"] == before && daemon["state"] == "waiting").then_some(())
    });
    assert!(host.listed(client.id()).is_some(), "{:?}", host.clients());
}

/// The host agent mounts the whole pipe directory into a container and names no slice. Clients of the pipe directory count for
/// the GPU only. A client of a slice's directory counts for the slice, even if no variable names the slice.
#[test]
fn clients_without_a_slice_count_for_their_gpu() {
    let host = Host::serving("h200");
    let nameless = [host.client(), host.client()];
    let mut command = host.program(&["hold", "600", "--mib", "1000"]);
    let directory = host.path("mps/pipe/slices/00_06.0-1");
    let connected =
        host.served(command.env("CUDA_MPS_PIPE_DIRECTORY", &directory).env_remove("YUNION_MPS_DEVICE"));
    let all = wait_for("the clients on the GPU", || {
        let gpus = host.json(&["list", "--gpus"]).unwrap();
        Some(gpus[0].clone()).filter(|gpu| gpu["memory_used"] == 3 * 148 + 1000)
    });
    assert_eq!(all["clients"], 3);
    let slices = host.list();
    let clients: Vec<&Value> = slices.iter().map(|slice| &slice["clients"]).collect();
    assert_eq!(clients, [0, 1, 0, 0]);
    let known = host.listed(connected.id()).unwrap();
    assert_eq!((&known["device"], &known["known_by"]), (&json!("00:06.0-1"), &json!("environment")));

    let list = succeeded(&host.mpsctl(&["list"]));
    assert!(list.lines().any(|line| line == "no slice  2 clients  296 MiB"), "{list}");
    let rows = succeeded(&host.mpsctl(&["list", "--no-headings"]));
    assert!(!rows.contains("no slice"), "programs read the rows\n{rows}");
    let status = succeeded(&host.mpsctl(&["status"]));
    assert!(status.lines().any(|line| line.contains("1444 MiB   3 / 48  served")), "{status}");
    let samples = metrics(&host);
    assert_eq!(of_gpu(&samples, "yunion_mps_gpu_clients"), 3.0);
    assert_eq!(of_gpu(&samples, "yunion_mps_gpu_memory_used_bytes"), 1444.0 * 1_048_576.0);
    nameless.into_iter().chain([connected]).for_each(Client::end);
}

/// Before Volta, NVML lists no clients. The service asks the control daemon for the clients, and does not know their memory.
#[test]
fn clients_before_volta_are_counted_by_the_control_daemon() {
    let host = Host::serving("tesla-p40");
    // Before Volta, the service counts clients only at its health check. A reload makes a health check at once.
    host.reload();
    let gpu = || host.json(&["list", "--gpus"]).unwrap()[0].clone();
    let clients = |number: u32| move |gpu: &Value| gpu["clients"] == number;
    wait_for("no clients", || Some(gpu()).filter(clients(0)));
    let both = [host.client(), host.served(&mut host.program_of("00:06.0-1", &["hold", "600"]))];
    let counted = wait_for("two clients", || Some(gpu()).filter(clients(2)));
    assert!(counted.get("memory_used").is_none(), "{counted}");
    assert_eq!(counted["max_clients"], 16);
    let list = succeeded(&host.mpsctl(&["list"]));
    let said = "2 clients; yunion-mpsctl clients shows their slices";
    assert!(list.lines().any(|line| line == said) && !list.contains("no slice"), "{list}");
    assert!(host.list().iter().all(|slice| slice["clients"].is_null()), "{:?}", host.list());
    let samples = metrics(&host);
    assert_eq!(of_gpu(&samples, "yunion_mps_gpu_clients"), 2.0);
    assert_eq!(of_gpu(&samples, "yunion_mps_gpu_max_clients"), 16.0);
    let of_clients = ["device_clients", "device_memory_used", "gpu_memory_used"];
    let unknown = |key: &String| of_clients.iter().any(|name| key.starts_with(&format!("yunion_mps_{name}")));
    assert!(!samples.keys().any(unknown), "{samples:#?}");
    both.into_iter().for_each(Client::end);
    let none = wait_for("no clients again", || Some(gpu()).filter(clients(0)));
    assert_eq!(none["memory_used"], 0);
}

/// The service asks NVML for the clients of an idle GPU only when a caller wants them, and then at most once a second.
#[test]
fn who_asks_for_the_slices_gets_the_clients_as_they_are() {
    let mut host = Host::new("h200");
    host.configure("log_level: debug\n");
    host.start();
    host.wait_for_state("ready");
    let looks = || host.log().matches("are counted").count();
    for command in [&["list"][..], &["list", "--gpus"], &["status"]] {
        let before = looks();
        wait_for("a look", || {
            succeeded(&host.mpsctl(command));
            (looks() > before).then_some(())
        });
    }
    let (before, began) = (looks(), Instant::now());
    for _ in 0..20 {
        succeeded(&host.mpsctl(&["list"]));
    }
    let most = usize::try_from(began.elapsed().as_secs()).unwrap() + 2;
    assert!(looks() - before <= most, "{} looks in {:?}", looks() - before, began.elapsed());
}

fn foreign_control_daemon(host: &Host) -> Client {
    let pipe = host.path("mps/pipe");
    fs::create_dir_all(&pipe).unwrap();
    let mut command = host.command("nvidia-cuda-mps-control");
    let foreign =
        Client::start(command.arg("-f").env("CUDA_MPS_PIPE_DIRECTORY", &pipe).stdout(Stdio::null()));
    wait_for("the foreign control daemon", || {
        (!host.front_end(&pipe, "get_server_list").contains("Cannot")).then_some(())
    });
    foreign
}

/// A foreign control daemon with two jobs runs where the service wants to start its own. The service waits for these jobs, and
/// counts no failure.
#[test]
fn a_planned_wait_is_no_failure() {
    let mut host = Host::new("tesla-p40");
    let foreign = foreign_control_daemon(&host);
    let jobs = [host.client(), host.client()];
    host.start();
    let status = host.wait_for_status("a service that waits", |status| {
        control_daemon(status)["state"] == "waiting" && status["service"]["state"] != "starting"
    });
    assert_eq!(status["service"]["state"], "degraded", "{status:#}");
    // The control daemon's state is not "waiting" while the service tries to start it. So the test repeats the commands.
    let said = |arguments: &[&str], words: &str| {
        wait_for(words, || Some(text(&host.mpsctl(arguments))).filter(|said| said.contains(words)))
    };
    let table = said(&["clients"], " serves 2 clients");
    assert!(table.starts_with("No clients of this service: "), "{table}");
    // Doctor's finding shows the reason of the wait, which says how to end the foreign control daemon. Before Volta, no command
    // of the service can list the clients of this control daemon, so the reason names no such command.
    let root = host.path("sysroot").display().to_string();
    let advice = said(&["doctor", "--sysroot", &root], "control-daemon-waiting");
    assert!(!advice.contains("lists them"), "{advice}");
    jobs.into_iter().for_each(Client::end);
    host.wait_for_state("ready");
    assert!(!host.log().contains("failed"), "{}", host.log());
    drop(foreign);
}

#[test]
fn a_change_of_the_isolation_that_waits_is_no_failure() {
    let host = Host::serving("h200");
    let job = listed_client(&host, "00:06.0-1");
    host.configure("cuda_mps_topology: per_slice");
    host.reload();
    let status = host.wait_for_status("a service that waits", |status| {
        let daemons = status["control_daemons"].as_array().unwrap();
        daemons.iter().any(|daemon| daemon["state"] == "waiting") && status["service"]["state"] != "starting"
    });
    assert_eq!(status["service"]["state"], "degraded", "{status:#}");
    job.end();
    host.wait_for_state("ready");
    assert!(!host.log().contains("failed"), "{}", host.log());
}

#[test]
fn the_clients_of_a_foreign_control_daemon_are_listed() {
    let mut host = Host::new("h200");
    let foreign = foreign_control_daemon(&host);
    let client = host.client();
    host.start();
    host.wait_for_status("a service that waits", |status| control_daemon(status)["state"] == "waiting");
    let theirs = wait_for("the client", || host.listed(client.id()));
    assert_eq!((&theirs["bypass"], &theirs["memory_mib"]), (&json!(false), &json!(517)));
    // The control daemon's state is not "waiting" while the service tries to start it. So the test repeats the command.
    wait_for("the status", || {
        succeeded(&host.mpsctl(&["status"])).contains(", and has 1 client").then_some(())
    });
    client.end();
    host.wait_for_state("ready");
    drop(foreign);
}

#[test]
fn a_long_command_leaves_room_for_user_and_age() {
    let host = Host::serving("h200");
    let directory = host.path(&"a".repeat(100));
    fs::create_dir_all(&directory).unwrap();
    let program = directory.join("cuda-client");
    // `cp` writes the program. If the test process itself wrote it, a child that another thread forks meanwhile would have the
    // file open for writing. The kernel would then refuse to execute the file.
    let copied = Command::new("cp").arg(host.path("bin/cuda-client")).arg(&program).status().unwrap();
    assert!(copied.success());
    let mut command = host.command(&program);
    command.args(["hold", "600"]).env("CUDA_MPS_PIPE_DIRECTORY", host.path("mps/pipe")).stdout(Stdio::null());
    let client = host.served(&mut command);
    let narrow = host.command(binaries().join("yunion-mpsctl")).arg("clients").env("COLUMNS", "80").output();
    let table = succeeded(&narrow.unwrap());
    let cells = row(&table, client.id());
    assert!(cells.contains_key("USER") && cells.contains_key("AGE"), "{table}");
    assert!(cells["COMMAND"].starts_with('…') && cells["COMMAND"].ends_with("cuda-client"), "{table}");
    let wide = succeeded(&host.mpsctl(&["clients"]));
    assert!(wide.contains(&"a".repeat(100)), "a pipe gets all\n{wide}");
    client.end();
}
