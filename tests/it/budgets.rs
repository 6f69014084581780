//! Tests of the budgets of slices. The service reports clients over the budget of their slice by name, and ends them if the
//! configuration says so. Other clients are not disturbed.

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::client::{Client, describe, own_user};
use crate::support::container::contained;
use crate::support::host::{Host, alive, signal_pid, start_time, succeeded, text};
use crate::support::listener::Listener;
use crate::support::skip::root_or_skip;
use crate::support::slice::directory_of;
use crate::support::wait::wait_for;

/// Slices of the board `h200`: 35942 MiB and 12 clients each.
const SLICE: &str = "00:06.0-1";
const NEIGHBOUR: &str = "00:06.0-2";

/// NVML's figure for the CUDA context of a simulated client with the thread percentage of these slices.
const CONTEXT_MIB: u32 = 148;

fn device_of(host: &Host, name: &str) -> Value {
    host.list().into_iter().find(|device| device["addr"] == name).unwrap()
}

fn wait_for_device(host: &Host, name: &str, what: &str, check: impl Fn(&Value) -> bool) -> Value {
    wait_for(what, || Some(device_of(host, name)).filter(|device| check(device)))
}

fn holding(host: &Host, slice: &str, mib: u32, more: &[&str]) -> Client {
    let allocated = (mib - CONTEXT_MIB).to_string();
    let mut command = host.program_of(slice, &["hold", "600", "--mib", &allocated]);
    host.served(command.args(more))
}

/// A container in which only the directory of one slice is mounted.
struct Container {
    slice: &'static str,
    first: Client,
}

impl Container {
    fn new(host: &Host, slice: &'static str) -> Self {
        let first = Client::start(&mut contained(host, &directory_of(host, slice), "exec sleep 600"));
        let name = format!("/proc/{}/comm", first.id());
        wait_for("the container", || (fs::read_to_string(&name).unwrap() == "sleep\n").then_some(()));
        Self { slice, first }
    }

    /// Starts a client in the container. The client uses `mib` of memory, and its environment claims the slice `claims`.
    fn claiming(&self, host: &Host, claims: &str, mib: u32, more: &[&str]) -> Client {
        let mut command = host.command("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.first.id()));
        command.args(["cuda-client", "hold", "600", "--mib", &(mib - CONTEXT_MIB).to_string()]).args(more);
        for (name, value) in host.container_of(self.slice)["environment"].as_object().unwrap() {
            command.env(name, value.as_str().unwrap());
        }
        host.served(command.env("YUNION_MPS_DEVICE", claims).stdout(Stdio::null()))
    }

    fn holding(&self, host: &Host, mib: u32, more: &[&str]) -> Client {
        self.claiming(host, self.slice, mib, more)
    }
}

fn events_with(host: &Host, words: &str) -> Vec<String> {
    let status = host.json(&["status"]).unwrap();
    let events = status["events"].as_array().unwrap().iter();
    let texts = events.map(|event| event["text"].as_str().unwrap().to_owned());
    texts.filter(|text| text.contains(words)).collect()
}

fn wait_for_event(host: &Host, words: &str) -> String {
    wait_for(words, || events_with(host, words).pop())
}

fn looks(host: &Host) -> usize {
    host.log().matches("are counted").count()
}

fn wait_until_ended(client: &mut Client) {
    let status = wait_for("the end of the client", || client.try_wait().unwrap());
    assert_eq!(status.code(), Some(4), "CUDA error 810");
}

fn serving(lines: &str) -> Host {
    let mut host = Host::new("h200");
    host.configure(&format!("log_level: debug\n{lines}"));
    host.start();
    host.wait_for_state("ready");
    host
}

#[test]
fn clients_that_nvml_does_not_list_are_not_counted_as_none() {
    let host = Host::serving("h200");
    wait_for_device(&host, SLICE, "nobody", |device| device["clients"] == 0);
    host.plant("gpus/0/error/nvmlDeviceGetComputeRunningProcesses", "999");
    let client = Client::start(&mut host.program_of(SLICE, &["hold", "600"]));
    // `yunion-mpsctl list` makes the service ask NVML for the clients.
    let looked = |check: fn(&Value) -> bool| {
        wait_for_device(&host, SLICE, "what follows from a look", |device| {
            succeeded(&host.mpsctl(&["list"]));
            check(device)
        })
    };
    let unknown = looked(|device| device.get("clients").is_none_or(Value::is_null));
    assert_eq!((&unknown["healthy"], unknown["memory_used"].as_u64()), (&json!(true), None), "{unknown}");
    host.clear("gpus/0/error/nvmlDeviceGetComputeRunningProcesses");
    looked(|device| device["clients"] == 1);
    client.end();
}

#[test]
fn overuse_of_memory_is_told_with_the_names_of_the_clients() {
    let mut host = serving("");
    let listener = Listener::start(&host);
    let neighbour = holding(&host, NEIGHBOUR, 30_000, &[]);
    let one = holding(&host, SLICE, 20_000, &[]);
    let held = wait_for_device(&host, SLICE, "the first client", |device| device["memory_used"] == 20_000);
    assert_eq!(
        (&held["clients"], &held["max_clients"], &held["overuse"]),
        (&json!(1), &json!(12), &json!(""))
    );
    let before = host.json(&["status"]).unwrap()["service"]["generation"].clone();
    let two = holding(&host, SLICE, 15_945, &[]);
    wait_for_device(&host, SLICE, "a full slice", |device| device["memory_used"] == 35_945);
    assert_eq!(device_of(&host, SLICE)["overuse"], "", "the difference is within the error of NVML");
    assert_eq!(host.json(&["status"]).unwrap()["service"]["generation"], before, "clients change no device");
    // This client uses only its context. A client that also allocates memory would exceed the budget in two steps, and cause
    // two reports.
    let three = holding(&host, SLICE, CONTEXT_MIB, &[]);
    let over = wait_for_device(&host, SLICE, "overuse", |device| device["overuse"] != "");
    assert_eq!(over["overuse"], "the clients of the slice hold more than its 35942 MiB together");
    assert_eq!(
        (&over["clients"], &over["memory_used"], &over["healthy"]),
        (&json!(3), &json!(36_093), &json!(true))
    );
    assert_eq!(
        over["reason"],
        "over its budget: the clients of the slice hold more than its 35942 MiB together"
    );
    let user = own_user();
    let who = describe(&[(one.id(), &user, ""), (two.id(), &user, ""), (three.id(), &user, "")]);
    let expected = format!(
        "{SLICE} is over its budget: the clients of the slice hold more than its 35942 MiB together; 36093 \
         MiB in use by {who}"
    );
    assert_eq!(wait_for_event(&host, "over its budget"), expected);
    let mut pids = [one.id(), two.id(), three.id()];
    pids.sort_unstable();
    let pids = pids.map(|pid| pid.to_string()).join(", ");
    let plain = |text: String| text.replace("uint32 ", "");
    wait_for("the signal", || {
        plain(listener.heard()).contains(&format!("OverUse ('{SLICE}', ['memory'], [{pids}])")).then_some(())
    });
    assert_eq!(device_of(&host, NEIGHBOUR)["overuse"], "");
    assert_eq!(device_of(&host, NEIGHBOUR)["reason"], "");
    let status = host.wait_for_state("ready");
    assert_eq!(status["gpus"][0]["reason"], format!("slices over their budgets: {SLICE}"));
    let shown = text(&host.mpsctl(&["status"]));
    assert!(shown.contains(&format!("slices over their budgets: {SLICE}")), "{shown}");
    let shown = text(&host.mpsctl(&["doctor"]));
    assert!(shown.contains("slice-over-budget") || shown.contains("(3 clients, 36093 MiB)"), "{shown}");
    let shown = text(&host.mpsctl(&["metrics"]));
    let of_slice =
        |name: &str| shown.lines().find(|line| line.starts_with(name) && line.contains(SLICE)).unwrap();
    assert!(of_slice("yunion_mps_device_overuse{").ends_with(" 1"), "{shown}");
    assert!(of_slice("yunion_mps_device_max_clients{").ends_with(" 12"), "{shown}");
    assert!(of_slice("yunion_mps_device_clients{").ends_with(" 3"), "{shown}");
    three.end();
    wait_for_event(&host, &format!("{SLICE} is within its budget again"));
    wait_for_device(&host, SLICE, "no overuse", |device| device["overuse"] == "" && device["clients"] == 2);
    assert_eq!(events_with(&host, "over its budget").len(), 1, "told once");
    assert_eq!(listener.heard().matches("OverUse").count(), 1, "{}", listener.heard());
    drop((neighbour, one, two));
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_slice_with_too_many_clients_is_told() {
    let mut host = Host::new("h200");
    host.devices(&["path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 4, max_clients: 2"]);
    host.start();
    host.wait_for_state("ready");
    let listener = Listener::start(&host);
    let clients = [SLICE, SLICE, NEIGHBOUR, NEIGHBOUR].map(|slice| holding(&host, slice, 600, &[]));
    let device = wait_for_device(&host, SLICE, "the clients", |device| device["clients"] == 2);
    assert_eq!((&device["max_clients"], &device["overuse"]), (&json!(2), &json!("")));
    let third = holding(&host, SLICE, 600, &[]);
    let device = wait_for_device(&host, SLICE, "overuse", |device| device["overuse"] != "");
    assert_eq!(
        (&device["clients"], &device["overuse"]),
        (&json!(3), &json!("the slice has more than 2 clients"))
    );
    listener.wait_for(&format!("OverUse ('{SLICE}', ['clients'], "));
    assert_eq!(events_with(&host, "over its budget").len(), 1);
    // By default the service only reports overuse, and ends no client.
    assert!(!host.log().contains("has ended the GPU work of"), "{}", host.log());
    for client in clients.iter().chain([&third]) {
        assert!(alive(client.id()));
    }
    drop((clients, third));
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn the_newest_client_of_the_slice_is_ended_and_nobody_else() {
    if !root_or_skip("the_newest_client_of_the_slice_is_ended_and_nobody_else") {
        return;
    }
    let mut host = serving("cuda_mps_overuse: terminate");
    let container = Container::new(&host, SLICE);
    let bystander = holding(&host, NEIGHBOUR, 30_000, &[]);
    let old = container.holding(&host, 20_000, &[]);
    let full = container.holding(&host, 15_000, &[]);
    wait_for_device(&host, SLICE, "two clients", |device| device["clients"] == 2);
    // The newest client of the GPU belongs to another slice, which is within its budget. So the service must not end this
    // client.
    let (mut new, newest) = (container.holding(&host, 10_000, &[]), holding(&host, NEIGHBOUR, 600, &[]));
    wait_until_ended(&mut new);
    let user = own_user();
    let who = describe(&[(new.id(), &user, "")]);
    let expected = format!("the service has ended the GPU work of {who}, since {SLICE} was over its budget");
    assert_eq!(wait_for_event(&host, "has ended the GPU work"), expected);
    wait_for_event(&host, &format!("{SLICE} is within its budget again"));
    assert_eq!(events_with(&host, "has ended the GPU work of").len(), 1);
    for client in [&bystander, &old, &full, &newest] {
        assert!(alive(client.id()));
    }
    let told = events_with(&host, "over its budget:");
    assert!(told.len() == 1 && told[0].starts_with(SLICE), "{told:?}");
    drop((bystander, old, full, newest));
    assert_eq!(host.stop().code(), Some(0));
}

/// A client may run on after its GPU work was ended. The service ends GPU work of this client again only after the client
/// begins new GPU work.
#[test]
fn nobody_is_ended_again_without_new_work() {
    if !root_or_skip("nobody_is_ended_again_without_new_work") {
        return;
    }
    let mut host = serving("cuda_mps_overuse: terminate");
    let container = Container::new(&host, SLICE);
    let old = container.holding(&host, 20_000, &[]);
    let idle = container.holding(&host, 20_000, &["--stay"]);
    wait_for_event(&host, "has ended the GPU work");
    let ended = || host.log().matches("the service has ended the GPU work of").count();
    let before = looks(&host);
    wait_for("more looks", || (looks(&host) > before + 6).then_some(()));
    assert_eq!(ended(), 1, "{}", host.log());
    idle.end();
    wait_for_event(&host, &format!("{SLICE} is within its budget again"));
    let stubborn = container.holding(&host, 20_000, &["--again"]);
    wait_for("repeated ends", || (ended() >= 3).then_some(()));
    assert!(alive(old.id()) && alive(stubborn.id()));
    drop((old, stubborn));
    assert_eq!(host.stop().code(), Some(0));
}

/// Waits until the service has checked the budgets five more times, and fails if the service has ended a client. A service that
/// wrongly ends clients would do so within five checks.
fn nobody_was_ended(host: &Host, clients: &[&Client]) {
    let before = looks(host);
    wait_for("more looks", || (looks(host) > before + 4).then_some(()));
    assert!(!host.log().contains("the service has ended the GPU work of"), "{}", host.log());
    assert!(clients.iter().all(|client| alive(client.id())));
}

/// A program on the host claims a tenant's slice in its environment. The client counts for the slice. Since only its
/// environment names the slice, the service ends no client of the slice.
#[test]
fn a_claim_in_the_environment_ends_nobody() {
    if !root_or_skip("a_claim_in_the_environment_ends_nobody") {
        return;
    }
    let mut host = serving("cuda_mps_overuse: terminate");
    let forged = holding(&host, SLICE, 20_000, &[]);
    let container = Container::new(&host, SLICE);
    // This client's environment claims the neighbour's slice. The directory that is mounted in its container outweighs the
    // environment.
    let tenant = container.claiming(&host, NEIGHBOUR, 20_000, &[]);
    // NVML lists a client before the client has allocated its memory. So the test waits for the memory too.
    wait_for_device(&host, SLICE, "both clients with their memory", |device| {
        device["clients"] == 2 && device["memory_used"] == 40_000
    });
    assert_eq!(device_of(&host, NEIGHBOUR)["clients"], 0, "the claim counts for nothing");
    let told = wait_for_event(&host, "over its budget");
    let reason = format!(
        "only the environment of process {} names this slice, so the process may belong to another \
                 tenant",
        forged.id()
    );
    assert!(told.ends_with(&format!("; the service ends no work: {reason}")), "{told}");
    nobody_was_ended(&host, &[&forged, &tenant]);
    drop((forged, tenant, container));
    assert_eq!(host.stop().code(), Some(0));
}

/// Containers of two tenants have the directory of the same slice. The service ends no client of this slice, since it can't
/// tell which tenant the slice belongs to.
#[test]
fn a_slice_in_two_containers_ends_nobody() {
    if !root_or_skip("a_slice_in_two_containers_ends_nobody") {
        return;
    }
    let mut host = serving("cuda_mps_overuse: terminate");
    let containers = [(); 2].map(|()| Container::new(&host, SLICE));
    let clients = containers.each_ref().map(|container| container.holding(&host, 20_000, &[]));
    let told = wait_for_event(&host, "over its budget");
    assert!(told.contains("; the service ends no work: processes "), "{told}");
    assert!(told.ends_with(" belong to different users or containers"), "{told}");
    nobody_was_ended(&host, &[&clients[0], &clients[1]]);
    drop((clients, containers));
    assert_eq!(host.stop().code(), Some(0));
}

const ENTRY: &str = "path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 4";

/// A smaller budget after a reload ends no client that is already there. The smaller budget counts only for clients that come
/// later.
#[test]
fn a_reload_ends_nobody() {
    if !root_or_skip("a_reload_ends_nobody") {
        return;
    }
    let mut host = serving("cuda_mps_overuse: terminate");
    let container = Container::new(&host, SLICE);
    let (one, two) = (container.holding(&host, 600, &[]), container.holding(&host, 600, &[]));
    wait_for_device(&host, SLICE, "both clients", |device| device["clients"] == 2);
    host.devices(&[&format!("{ENTRY}, max_clients: 1")]);
    let reloaded = host.call("Control.Reload");
    assert!(reloaded.status.success(), "{}", text(&reloaded));
    wait_for_device(&host, SLICE, "overuse", |device| {
        device["overuse"] == "the slice has more than 1 client"
    });
    let mut new = container.holding(&host, 600, &[]);
    wait_until_ended(&mut new);
    wait_for_device(&host, SLICE, "two clients", |device| device["clients"] == 2);
    assert!(alive(one.id()) && alive(two.id()));
    assert_eq!(events_with(&host, "has ended the GPU work of").len(), 1);
    host.devices(&[&format!("{ENTRY}, max_clients: 2")]);
    assert!(host.call("Control.Reload").status.success());
    wait_for_device(&host, SLICE, "the larger budget", |device| device["overuse"] == "");
    drop((one, two));
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_restart_of_the_service_ends_nobody() {
    if !root_or_skip("a_restart_of_the_service_ends_nobody") {
        return;
    }
    let mut host = serving("cuda_mps_overuse: report");
    let container = Container::new(&host, SLICE);
    let (one, two) = (container.holding(&host, 20_000, &[]), container.holding(&host, 20_000, &[]));
    wait_for_event(&host, "over its budget");
    host.configure("cuda_mps_overuse: terminate");
    host.signal(Signal::KILL);
    host.ended();
    host.start();
    host.wait_for_state("ready");
    wait_for_event(&host, "over its budget");
    let mut new = container.holding(&host, 600, &[]);
    wait_until_ended(&mut new);
    assert!(alive(one.id()) && alive(two.id()));
    drop((one, two));
    assert_eq!(host.stop().code(), Some(0));
}

/// A debugger stops a client, so the client can't end its GPU work. The service ends the next newest client instead. It tries
/// again to end the stopped client, after longer and longer pauses.
#[test]
fn a_client_that_a_debugger_holds_is_told_and_left_alone() {
    if !root_or_skip("a_client_that_a_debugger_holds_is_told_and_left_alone") {
        return;
    }
    let mut host = serving("cuda_mps_overuse: terminate");
    let container = Container::new(&host, SLICE);
    let old = container.holding(&host, 20_000, &[]);
    let mut second = container.holding(&host, 600, &[]);
    wait_for_device(&host, SLICE, "two clients", |device| device["clients"] == 2);
    let held = container.holding(&host, 600, &[]);
    let debugger = host.debugger(held.id());
    let (pid, since) = (held.id(), start_time(held.id()));
    host.plant(&format!("gpus/0/processes/{pid}"), &format!("client 15900 {since}\n"));
    let told = wait_for_event(&host, "can't be ended");
    assert!(
        told.starts_with(&format!("{SLICE} is over its budget, and the work of PID {} ", held.id())),
        "{told}"
    );
    wait_until_ended(&mut second);
    assert!(alive(old.id()) && alive(held.id()));
    debugger.end();
    signal_pid(held.id(), Signal::CONT);
    drop((old, held));
    assert_eq!(host.stop().code(), Some(0));
}

/// The service checks a GPU at most every 250 ms, however often users start clients.
#[test]
fn clients_that_come_together_share_a_look() {
    let mut host = serving("");
    wait_for("the first look", || (looks(&host) == 1).then_some(()));
    let (begun, before) = (Instant::now(), looks(&host));
    let mut clients = 0;
    while looks(&host) < before + 4 {
        assert!(host.program_of(SLICE, &["props"]).status().unwrap().success());
        clients += 1;
    }
    let now = looks(&host);
    let most = before + 1 + usize::try_from(begun.elapsed().as_millis() / 250).unwrap();
    println!("{} looks for {clients} clients in {:?}", now - before, begun.elapsed());
    assert!(now <= most, "{now} > {most}");
    assert_eq!(host.stop().code(), Some(0));
}

/// With at most one client for each slice, the service checks the budgets only after a client has come, and with its health
/// checks.
#[test]
fn one_client_of_each_slice_wakes_nobody() {
    let mut host = serving("");
    wait_for("the first look", || (looks(&host) == 1).then_some(()));
    // After a critical error of the GPU, the service makes a health check at once.
    host.plant("gpus/0/xids", "31\n");
    wait_for("a check", || {
        host.log().contains("the control daemon is checked now, since a GPU reported Xid 31").then_some(())
    });
    host.wait_for_state("ready");
    assert_eq!(looks(&host), 1, "nobody is there");
    let clients = [SLICE, NEIGHBOUR].map(|slice| holding(&host, slice, 600, &[]));
    for slice in [SLICE, NEIGHBOUR] {
        wait_for_device(&host, slice, "its client", |device| device["clients"] == 1);
    }
    // The service checks the budgets a second time a moment after a client has come. The test waits for 5 s without a check.
    let mut before = looks(&host);
    let calm = wait_for("a calm time", || {
        let begun = Instant::now();
        let now = wait_for("a look", || Some(looks(&host)).filter(|now| *now > before));
        before = now;
        (begun.elapsed() > Duration::from_secs(5)).then(|| begun.elapsed())
    });
    println!("{calm:?} without a look");
    drop(clients);
    assert_eq!(host.stop().code(), Some(0));
}
