//! A Kubernetes node: the real service on a simulated host, the device plugin, and a simulated kubelet. The kubelet is the
//! Python program `tests/kubernetes/kubelet.py`. It shares no code with the plugin: it uses the C library of gRPC, and messages
//! that protoc compiles from Kubernetes' own description.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use serde_json::{Value, json};

use super::client::Client;
use super::host::{Host, binaries};
use super::wait::{DEADLINE, wait_for};

pub(crate) const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/kubernetes");

/// The resource for a quarter of a GPU of the board `h200`.
pub(crate) const QUARTER: &str = "yunion.io/mps-35gib";

/// The directory of Python code for the kubelet's messages and Kubernetes' objects. protoc has made it from Kubernetes' own
/// descriptions.
const MESSAGES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/.cache/kubernetes-api");

pub(crate) fn messages() -> &'static Path {
    let messages = Path::new(MESSAGES);
    let is_there = messages.join("kubernetes").is_dir();
    assert!(is_there, "{MESSAGES} is missing; make it with scripts/fetch-kubernetes-api.sh");
    messages
}

/// A simulated kubelet, and the events that it has reported.
pub(crate) struct FakeKubelet {
    pub(crate) process: Client,
    lines: Receiver<Value>,
    /// `heard` has all events of the kubelet. `events` has those that no test function has removed yet.
    pub(crate) events: Vec<Value>,
    pub(crate) heard: Vec<Value>,
}

impl FakeKubelet {
    pub(crate) fn start(host: &Host) -> Self {
        Self::start_with(host, &[])
    }

    pub(crate) fn start_with(host: &Host, words: &[&str]) -> Self {
        let mut command = Command::new("/usr/bin/python3");
        command
            .arg(Path::new(SOURCES).join("kubelet.py"))
            .arg(messages())
            .arg(host.path("kubelet"))
            .args(words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Client::start(&mut command);
        let output = BufReader::new(process.stdout.take().unwrap());
        let (tell, lines): (mpsc::Sender<Value>, _) = channel();
        thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if tell.send(serde_json::from_str(&line).unwrap()).is_err() {
                    break;
                }
            }
        });
        let mut kubelet = Self { process, lines, events: Vec::new(), heard: Vec::new() };
        kubelet.wait("the kubelet", |event| event["event"] == "started");
        kubelet
    }

    /// Returns the last event that satisfies `says`, and waits for it if there is none yet.
    #[track_caller]
    pub(crate) fn wait(&mut self, what: &str, says: impl Fn(&Value) -> bool) -> Value {
        if let Some(found) = self.events.iter().rev().find(|event| says(event)) {
            return found.clone();
        }
        loop {
            let Ok(line) = self.lines.recv_timeout(DEADLINE) else {
                panic!("waited in vain for {what}: {:#?}", self.events);
            };
            self.events.push(line.clone());
            self.heard.push(line.clone());
            if says(&line) {
                return line;
            }
        }
    }

    /// Waits until the plugin's last list has `number` devices of the resource, of which exactly those in `unhealthy` are
    /// unhealthy.
    #[track_caller]
    pub(crate) fn wait_for_devices(
        &mut self,
        resource: &str,
        number: usize,
        unhealthy: &[&str],
    ) -> Vec<Value> {
        loop {
            let lists = |event: &Value| event["event"] == "devices" && event["resource"] == resource;
            let list = self.wait(resource, lists)["devices"].as_array().unwrap().clone();
            if list.len() == number && self::unhealthy(&list) == unhealthy {
                return list;
            }
            // The list differs from the expected list, so the loop waits for a newer list.
            self.events.retain(|event| !lists(event));
        }
    }

    /// Waits until the plugin registers the resource again. A registration that an earlier call has returned does not count.
    #[track_caller]
    pub(crate) fn wait_for_registration(&mut self, resource: &str) -> Value {
        let registered = |event: &Value| event["event"] == "registered" && event["resource"] == resource;
        let found = self.wait(resource, registered);
        self.events.retain(|event| !registered(event));
        found
    }

    #[track_caller]
    pub(crate) fn call(&mut self, call: &Value) -> Value {
        let is_answer = |event: &Value| event.get("answer").is_some() || event.get("error").is_some();
        writeln!(self.process.stdin.as_mut().unwrap(), "{call}").unwrap();
        let answer = self.wait("an answer", is_answer);
        self.events.retain(|event| !is_answer(event));
        answer
    }

    fn allocate(&mut self, resource: &str, names: &[&str]) -> Value {
        self.call(&json!({"call": "allocate", "resource": resource, "containers": [names]}))
    }

    /// Makes the kubelet ask for the settings of a container, and returns these settings. The plugin must not refuse.
    #[track_caller]
    pub(crate) fn allocated(&mut self, resource: &str, names: &[&str]) -> Value {
        let answer = self.allocate(resource, names);
        assert!(answer.get("error").is_none(), "{answer}");
        answer["answer"][0].clone()
    }

    /// Makes the kubelet ask for the settings of a container. The plugin must refuse. Returns the code and the text of its
    /// error.
    #[track_caller]
    pub(crate) fn refused(&mut self, resource: &str, names: &[&str]) -> (String, String) {
        let answer = self.allocate(resource, names);
        let error = answer.get("error").unwrap_or_else(|| panic!("{answer}"));
        (error["code"].as_str().unwrap().to_owned(), error["text"].as_str().unwrap().to_owned())
    }

    /// Makes the kubelet admit a pod with these containers. Returns the answer for each container, or the code and the text of
    /// the refusal.
    pub(crate) fn admit(&mut self, pod: &str, containers: &Value) -> Result<Value, (String, String)> {
        let answer = self.call(&json!({"call": "admit", "pod": pod, "containers": containers}));
        let text = |key: &str| answer["error"][key].as_str().map(str::to_owned);
        match (text("code"), text("text")) {
            (Some(code), Some(text)) => Err((code, text)),
            _ => Ok(answer["answer"].clone()),
        }
    }

    /// Makes the kubelet admit a pod with one container that asks for `number` slices. Returns the chosen slices and the
    /// settings of the container.
    #[track_caller]
    pub(crate) fn admitted(&mut self, pod: &str, number: u32) -> (Vec<String>, Value) {
        let admitted =
            self.admit(pod, &json!([main_with(number)])).unwrap_or_else(|why| panic!("{pod}: {why:?}"));
        let main = &admitted["main"];
        (names(&main["devices"]), main["settings"].clone())
    }

    /// Makes the kubelet admit all pods again, as after its start. `running` has those containers that run. Returns the reasons
    /// for which pods are rejected.
    pub(crate) fn admit_again(&mut self, running: &Value) -> Value {
        self.call(&json!({"call": "admit again", "running": running}))["answer"].clone()
    }

    /// Makes a pod inactive for the kubelet, as after the end of its containers or a deletion by force.
    pub(crate) fn ended(&mut self, pod: &str) {
        self.call(&json!({"call": "ended", "pod": pod}));
    }

    /// Returns the containers to which the kubelet has given each device of [`QUARTER`], as pod/container.
    pub(crate) fn given(&mut self) -> BTreeMap<String, Vec<String>> {
        let given = self.call(&json!({"call": "given"}))["answer"][QUARTER].clone();
        let given = given.as_object().cloned().unwrap_or_default();
        given.iter().map(|(device, owners)| (device.clone(), names(owners))).collect()
    }
}

pub(crate) fn main_with(number: u32) -> Value {
    json!({"name": "main", "init": false, "resource": QUARTER, "number": number})
}

/// Describes an init container that asks for a slice. It ends before the other containers of its pod start.
pub(crate) fn init_container() -> Value {
    json!({"name": "download", "init": true, "resource": QUARTER, "number": 1})
}

fn names(list: &Value) -> Vec<String> {
    list.as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect()
}

pub(crate) struct Plugin {
    pub(crate) process: Client,
    log: PathBuf,
}

impl Plugin {
    pub(crate) fn start(host: &Host, more: &[&str]) -> Self {
        Self::started_by(host, Self::command(host, more), "plugin.log")
    }

    pub(crate) fn command(host: &Host, more: &[&str]) -> Command {
        let mut command = host.command(binaries().join("yunion-mps-device-plugin"));
        command.arg("--kubelet-directory").arg(host.path("kubelet")).args(more);
        command
    }

    pub(crate) fn started_by(host: &Host, mut command: Command, log: &str) -> Self {
        let log = host.path(log);
        let file = File::options().create(true).append(true).open(&log).unwrap();
        Self { process: Client::start(command.stderr(file)), log }
    }

    pub(crate) fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    #[track_caller]
    pub(crate) fn wait_until_it_says(&self, text: &str) {
        wait_for(text, || self.said().contains(text).then_some(()));
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        if thread::panicking() {
            let _ = writeln!(std::io::stderr(), "--- the plugin's log\n{}", self.said());
        }
    }
}

/// Starts a service that writes a CDI spec, and waits until it is ready.
pub(crate) fn serving(board: &str) -> Host {
    let mut host = Host::new(board);
    host.configure(&format!("cuda_mps_cdi_directory: {}", host.path("run/cdi").display()));
    host.start();
    host.wait_for_state("ready");
    host
}

/// Starts the service, a kubelet and the device plugin. `more` are further arguments of the plugin.
pub(crate) fn node(board: &str, more: &[&str]) -> (Host, FakeKubelet, Plugin) {
    let host = serving(board);
    let kubelet = FakeKubelet::start(&host);
    let plugin = Plugin::start(&host, more);
    (host, kubelet, plugin)
}

pub(crate) fn unhealthy(devices: &[Value]) -> Vec<&str> {
    let sick = devices.iter().filter(|device| device["health"] != "Healthy");
    sick.map(|device| device["id"].as_str().unwrap()).collect()
}

pub(crate) fn ids(devices: &[Value]) -> Vec<&str> {
    devices.iter().map(|device| device["id"].as_str().unwrap()).collect()
}
