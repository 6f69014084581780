//! Tests of pods on a node with a real containerd. The simulated kubelet asks the device plugin for the settings of a container
//! and passes them to containerd. The program in the container is then a client of the slice that the kubelet has chosen.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::bindings::bind;
use crate::support::client::Client;
use crate::support::container::{ContainerGroup, NO_CONTAINER_GROUP, OF_TEST};
use crate::support::fetched::fetched;
use crate::support::host::{Host, alive, binaries, control_pid, process_state, signal_pid, succeeded, text};
use crate::support::node::{FakeKubelet, Plugin, QUARTER, SOURCES, messages, node};
use crate::support::skip::{root_or_skip, skip};
use crate::support::wait::wait_for;

/// A containerd in its own mount namespace, where the simulated host's bus is the system bus.
struct Containerd {
    folder: PathBuf,
    /// A process that keeps the mount namespace alive until the test ends.
    mounts: Client,
    process: Client,
    /// The control group of all pods, which is inside a control group of this test.
    parent: String,
}

impl Containerd {
    fn start(host: &Host) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let folder = host.path("containerd");
        fs::create_dir_all(host.path("run/cdi")).unwrap();
        fs::create_dir(&folder).unwrap();
        let gpu =
            |uuid: String| json!({"name": uuid, "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"]}});
        let of_gpus: Vec<Value> = uuids(host).into_iter().map(gpu).collect();
        let of_gpus = json!({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": of_gpus});
        fs::write(host.path("run/cdi/nvidia.json"), of_gpus.to_string()).unwrap();
        let place = folder.display();
        let config = format!(
            "version = 2\nroot = \"{place}/lib\"\nstate = \"{place}/run\"\n[grpc]\naddress = \"{place}/sock\"\n\
             [plugins.\"io.containerd.grpc.v1.cri\"]\nsandbox_image = \"docker.io/library/job:1\"\nenable_cdi = true\n\
             cdi_spec_dirs = [\"{}\"]\nrestrict_oom_score_adj = true\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd]\nsnapshotter = \"native\"\n",
            host.path("run/cdi").display()
        );
        let wrapper = folder.join("yunion-mps-runc");
        symlink(binaries().join("yunion-mpsctl"), &wrapper).unwrap();
        let runtime = stops_page().replace("/usr/bin/yunion-mps-runc", wrapper.to_str().unwrap());
        // containerd can use yunion-mps-runc in two ways: as its default runtime, and by the name in a RuntimeClass.
        let by_name = runtime.replace(".runtimes.runc", ".runtimes.yunion-mps");
        fs::write(folder.join("config.toml"), format!("{config}{runtime}{by_name}")).unwrap();
        let bus = host.bus_address();
        let script = "mount -t tmpfs tmpfs /run && mkdir /run/dbus && touch /run/dbus/system_bus_socket \
                      && mount --bind \"$1\" /run/dbus/system_bus_socket && touch \"$2/mounted\" && exec sleep 3600";
        let mut unshare = host.command("unshare");
        unshare.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
        unshare.arg(bus.strip_prefix("unix:path=").unwrap().split(',').next().unwrap()).arg(&folder);
        let mounts = Client::start(&mut unshare);
        wait_for("the mounts", || folder.join("mounted").exists().then_some(()));
        let process = Self::again(host, &folder, &mounts);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let parent = format!("/{OF_TEST}{}-{number}/kubepods", std::process::id());
        let containerd = Self { folder, mounts, process, parent };
        let image = containerd.folder.join("job.tar");
        let image_py = Path::new(SOURCES).join("image.py");
        let mut make = Command::new("/usr/bin/python3");
        succeeded(&make.arg(image_py).arg("docker.io/library/job:1").arg(&image).output().unwrap());
        let imported = || {
            let mut ctr = containerd.inside(host, &fetched("ctr"));
            ctr.arg("-a").arg(containerd.folder.join("sock")).args(["-n", "k8s.io", "images", "import"]);
            ctr.arg(&image).output().unwrap().status.success().then_some(())
        };
        wait_for("the image", imported);
        containerd
    }

    fn inside(&self, host: &Host, program: &Path) -> Command {
        inside(host, &self.mounts, program)
    }

    fn again(host: &Host, folder: &Path, mounts: &Client) -> Client {
        let log = fs::File::options().create(true).append(true).open(folder.join("log")).unwrap();
        let mut command = inside(host, mounts, &fetched("containerd"));
        command.arg("-c").arg(folder.join("config.toml")).stderr(log);
        Client::start(&mut command)
    }

    fn restart(&mut self, host: &Host) {
        signal_pid(self.process.id(), Signal::KILL);
        self.process.wait().unwrap();
        self.process = Self::again(host, &self.folder, &self.mounts);
    }

    /// Removes the control group of a pod after its containers have ended, as a kubelet does. containerd removes the control
    /// groups of containers.
    fn remove_group(&self, pod: &str) {
        for group in self.groups().iter().map(|group| group.join(pod)).filter(|group| group.is_dir()) {
            fs::remove_dir(&group).unwrap_or_else(|error| panic!("{}: {error}", group.display()));
        }
    }

    /// Returns the directory of the control group of all pods in each mounted hierarchy.
    fn groups(&self) -> Vec<PathBuf> {
        let mounts = fs::read_dir("/sys/fs/cgroup").unwrap().map(|entry| entry.unwrap().path());
        let mounts = mounts.chain([PathBuf::from("/sys/fs/cgroup")]);
        let groups = mounts.map(|mount| mount.join(self.parent.trim_start_matches('/')));
        groups.filter(|group| group.is_dir()).collect()
    }
}

/// Returns the configuration for containerd from docs/stops.md. It makes containerd use a runtime that ends GPU work before it
/// signals a container.
fn stops_page() -> String {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/stops.md")).unwrap();
    let lines = page.lines().skip_while(|line| !line.starts_with("    [plugins."));
    let lines = lines.map_while(|line| line.strip_prefix("    "));
    lines.map(|line| format!("{line}\n")).collect()
}

/// Makes a command that runs `program` in the mount namespace of the process `mounts`, with containerd's programs in `PATH`.
fn inside(host: &Host, mounts: &Client, program: &Path) -> Command {
    let mut command = host.command("nsenter");
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}", program.parent().unwrap().display()));
    command.args(["--target", &mounts.id().to_string(), "--mount"]).arg(program);
    command
}

fn uuids(host: &Host) -> Vec<String> {
    let gpus = fs::read_dir(host.path("gpus")).unwrap().map(|gpu| gpu.unwrap().path().join("uuid"));
    gpus.filter_map(|uuid| Some(fs::read_to_string(uuid).ok()?.trim().to_owned())).collect()
}

impl Drop for Containerd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let place = self.folder.display().to_string();
        let processes = fs::read_dir("/proc").unwrap().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let is_shim = |pid: &u32| {
            let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&command).contains(&format!("{place}/sock"))
        };
        for shim in pids.filter(is_shim) {
            let _ = Command::new("kill").arg("-9").arg(shim.to_string()).status();
        }
        for group in self.groups().iter().filter_map(|group| group.parent()) {
            // containerd makes the control group of a container inside that of its pod. So the script kills processes in
            // control groups at any depth.
            let kill = "for try in $(seq 100); do
                            for procs in $(find \"$0\" -name cgroup.procs); do kill -9 $(cat $procs); done
                            find \"$0\" -depth -type d -exec rmdir {} \\;
                            [ -d \"$0\" ] || exit 0
                            sleep 0.05
                        done";
            let _ = Command::new("sh").args(["-c", kill]).arg(group).stderr(Stdio::null()).status();
        }
    }
}

/// A program that sends a kubelet's calls to containerd.
struct Runtime {
    process: Client,
    answers: BufReader<ChildStdout>,
}

#[derive(Debug, Clone)]
struct Pod {
    name: String,
    slices: Vec<String>,
    sandbox: String,
    container: String,
}

impl Runtime {
    fn beside(containerd: &Containerd) -> Self {
        let mut command = Command::new("/usr/bin/python3");
        command.arg(Path::new(SOURCES).join("runtime.py")).arg(messages());
        command.arg(containerd.folder.join("sock")).arg(&containerd.parent);
        let mut process = Client::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
        let answers = BufReader::new(process.stdout.take().unwrap());
        Self { process, answers }
    }

    fn call(&mut self, call: &Value) -> Value {
        writeln!(self.process.stdin.as_mut().unwrap(), "{call}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{call}: {error}"))
    }

    /// Starts a pod with a container that runs a program of the simulated host. The error is containerd's message.
    fn start(&mut self, host: &Host, wanted: &Admitted, work: &[&str]) -> Result<Pod, String> {
        let Admitted { name, slices, settings } = wanted;
        let same = |place: &str| json!({"host": place, "container": place, "read_only": false});
        let (own, programs) = (host.path("").display().to_string(), binaries().display().to_string());
        let mut mounts = [&own, &programs, "/lib", "/lib64", "/usr/lib"].map(same).to_vec();
        mounts.extend(settings["mounts"].as_array().unwrap().iter().cloned());
        let mut environment = settings["environment"].as_object().unwrap().clone();
        environment.insert("YUNION_MPS_SIM".to_owned(), json!(host.path("")));
        environment.insert("LD_LIBRARY_PATH".to_owned(), json!(host.path("lib")));
        let client = host.path("bin/cuda-client").canonicalize().unwrap().display().to_string();
        let command = [&[client.as_str()], work].concat();
        // Pods with a 1 at the end of their names have a RuntimeClass, and other pods use the default runtime.
        let handler = if name.ends_with('1') { "yunion-mps" } else { "" };
        let said = self.call(&json!({
            "call": "start", "pod": name, "handler": handler, "cdi": settings["cdi"], "mounts": mounts,
            "environment": environment, "command": command,
        }));
        let text = |key: &str| said["answer"][key].as_str().map(str::to_owned);
        match (text("sandbox"), text("container")) {
            (Some(sandbox), Some(container)) => {
                Ok(Pod { name: name.clone(), slices: slices.clone(), sandbox, container })
            }
            _ => Err(said["error"].as_str().unwrap_or_default().to_owned()),
        }
    }

    fn runs(&mut self, pod: &Pod) -> bool {
        self.call(&json!({"call": "runs", "container": pod.container}))["answer"] == true
    }

    /// Stops the container of a pod as a kubelet does: by SIGTERM, and after `seconds` seconds by SIGKILL.
    fn stop(&mut self, pod: &Pod, seconds: u32) {
        let said = self.call(&json!({"call": "stop", "container": pod.container, "seconds": seconds}));
        assert!(said.get("error").is_none(), "{said}");
    }

    fn end(&mut self, pod: &Pod) -> Result<(), Value> {
        let said = self.call(&json!({"call": "end", "sandbox": pod.sandbox}));
        if said.get("error").is_none() { Ok(()) } else { Err(said) }
    }
}

/// An admitted pod that is not started yet, with the settings of its container.
struct Admitted {
    name: String,
    slices: Vec<String>,
    settings: Value,
}

struct Node {
    runtime: Runtime,
    containerd: Containerd,
    plugin: Plugin,
    kubelet: FakeKubelet,
    host: Host,
}

/// Makes a node on the board `h200`. Returns None if this machine does not let the test make containers.
fn with_pods(test: &str) -> Option<Node> {
    with_pods_on("h200", 4, test)
}

/// Like [`with_pods`], for another board. The node has `slices` slices.
fn with_pods_on(board: &str, slices: usize, test: &str) -> Option<Node> {
    if !root_or_skip(test) {
        return None;
    }
    if ContainerGroup::new().is_none() {
        skip(test, NO_CONTAINER_GROUP);
        return None;
    }
    let (host, mut kubelet, plugin) = node(board, &[]);
    kubelet.wait_for_devices(QUARTER, slices, &[]);
    let containerd = Containerd::start(&host);
    let runtime = Runtime::beside(&containerd);
    Some(Node { runtime, containerd, plugin, kubelet, host })
}

impl Node {
    fn admit(&mut self, name: &str, number: u32) -> Admitted {
        let (slices, settings) = self.kubelet.admitted(name, number);
        Admitted { name: name.to_owned(), slices, settings }
    }

    fn pod(&mut self, name: &str) -> Pod {
        self.pod_with(name, 1, &["hold", "600"])
    }

    fn pod_with(&mut self, name: &str, number: u32, work: &[&str]) -> Pod {
        let admitted = self.admit(name, number);
        let started = self.runtime.start(&self.host, &admitted, work);
        let pod = started.unwrap_or_else(|error| panic!("{name}: {error}\n{}", self.log()));
        wait_for("the client of the pod", || self.client(name).map(|_| ()));
        pod
    }

    /// Deletes a pod as a kubelet does. The container gets SIGTERM, and after `seconds` seconds SIGKILL. After its end the
    /// kubelet may give the slice to another pod.
    fn delete(&mut self, pod: &Pod, seconds: u32) {
        self.runtime.stop(pod, seconds);
        self.runtime.end(pod).unwrap();
        self.kubelet.ended(&pod.name);
        self.containerd.remove_group(&pod.name);
    }

    /// Ends the only pod. Asks containerd again and again, since a containerd that has just started does not know its
    /// containers yet.
    fn ends(&mut self, pod: &Pod) {
        wait_for("a slice without an owner", || {
            self.runtime.end(pod).is_ok().then_some(())?;
            self.containerd.remove_group(&pod.name);
            self.owners().is_empty().then_some(())
        });
        self.kubelet.ended(&pod.name);
    }

    fn log(&self) -> String {
        fs::read_to_string(self.containerd.folder.join("log")).unwrap_or_default()
    }

    fn client(&self, pod: &str) -> Option<Value> {
        let clients = self.host.json(&["clients"])?;
        let label = format!("ml/{pod}/main");
        clients.as_array()?.iter().find(|client| client["label"] == label.as_str()).cloned()
    }

    /// Returns the container of each bound slice, from the service's list of slices.
    fn owners(&self) -> BTreeMap<String, Vec<String>> {
        let text = |device: &Value, key: &str| device[key].as_str().unwrap_or_default().to_owned();
        let owner = |device: Value| (text(&device, "addr"), vec![text(&device, "bound_to")]);
        self.host.list().into_iter().map(owner).filter(|(_, owners)| !owners[0].is_empty()).collect()
    }

    /// Returns the containers to which the kubelet has given each slice, in the form of [`Self::owners`]. If the kubelet had
    /// given a slice to two containers, the results of both functions would differ, since [`Self::owners`] has only one
    /// container for each slice.
    fn given(&mut self) -> BTreeMap<String, Vec<String>> {
        let given = self.kubelet.given();
        let labels = |owners: Vec<String>| owners.iter().map(|owner| format!("ml/{owner}")).collect();
        given.into_iter().map(|(slice, owners)| (slice, labels(owners))).collect()
    }

    /// Returns the number of control groups with processes in a pod: two if its sandbox and its container run.
    fn groups_at_work(&self, pod: &str) -> usize {
        let has_process = |group: &PathBuf| {
            fs::read_to_string(group.join("cgroup.procs")).is_ok_and(|pids| !pids.trim().is_empty())
        };
        let of_pod = self.containerd.groups().into_iter().map(|group| group.join(pod));
        of_pod.map(|group| groups_in(&group).iter().filter(|one| has_process(one)).count()).max().unwrap_or(0)
    }
}

fn groups_in(group: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(group).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.is_dir()).collect()
}

fn has(slice: &str, owner: &str) -> (String, Vec<String>) {
    (slice.to_owned(), vec![owner.to_owned()])
}

#[track_caller]
fn refused(output: &Output, words: &str) {
    assert!(!output.status.success() && text(output).contains(words), "{words}\n{}", text(output));
}

#[test]
fn a_pod_is_a_client_of_the_slice_that_the_kubelet_gave_it() {
    let test = "a_pod_is_a_client_of_the_slice_that_the_kubelet_gave_it";
    let Some(mut node) = with_pods(test) else { return };
    let pod = node.pod("train-0");
    let own = &pod.slices[0];
    let client = node.client("train-0").unwrap();
    assert_eq!((&client["device"], &client["known_by"]), (&json!(own), &json!("bound")), "{client}");
    assert_eq!(node.owners(), BTreeMap::from([has(own, "ml/train-0/main")]));
    let memory = node.host.container_of(own)["environment"]["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"].clone();
    let pid = client["pid"].as_u64().unwrap();
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
    let environment = String::from_utf8_lossy(&environment).into_owned();
    let limit = format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT={}\0", memory.as_str().unwrap());
    assert!(environment.contains(&limit), "{environment}");

    let settings = node.kubelet.allocated(QUARTER, &[own]);
    let twice = Admitted { name: "train-1".to_owned(), slices: vec![own.clone()], settings };
    let refused = node.runtime.start(&node.host, &twice, &["hold", "600"]).unwrap_err();
    assert!(refused.contains("is taken by ml/train-0/main"), "{refused}");
    let other = node.admit("train-2", 1);
    succeeded(&node.host.mpsctl(&["drain", &other.slices[0]]));
    let refused = node.runtime.start(&node.host, &other, &["hold", "600"]).unwrap_err();
    assert!(refused.contains(&format!("{} is drained", other.slices[0])), "{refused}");

    node.ends(&pod);
}

#[test]
fn a_pod_with_slices_of_two_gpus_has_both_of_them() {
    let test = "a_pod_with_slices_of_two_gpus_has_both_of_them";
    let Some(mut node) = with_pods_on("h200x8", 32, test) else { return };
    let pod = node.pod_with("train-0", 2, &["hold", "600"]);
    let [one, other] = &pod.slices[..] else { panic!("{pod:?}") };
    let owner = "ml/train-0/main";
    assert_eq!(node.owners(), BTreeMap::from([has(one, owner), has(other, owner)]));
    assert_eq!(node.client("train-0").unwrap()["known_by"], "bound");
    let stranger = ContainerGroup::new().unwrap();
    for slice in &pod.slices {
        refused(&bind(&node.host, slice, &stranger, &[]), &format!("{slice} is taken by {owner}"));
    }
    node.kubelet.wait_for_devices(QUARTER, 32, &[]);
    node.ends(&pod);
}

/// When a pod is deleted by force, the kubelet frees the pod's slice at once, although the pod's container still runs. The next
/// pod must wait for the end of that container.
#[test]
fn on_a_full_gpu_a_pod_waits_for_the_container_of_a_pod_that_was_deleted_by_force() {
    let test = "on_a_full_gpu_a_pod_waits_for_the_container_of_a_pod_that_was_deleted_by_force";
    let Some(mut node) = with_pods(test) else { return };
    let [former, ..] = ["train-0", "train-1", "train-2", "train-3"].map(|name| node.pod(name));
    node.kubelet.ended("train-0");
    let next = node.admit("train-4", 1);
    assert_eq!(next.slices, former.slices);
    let mut beside = Runtime::beside(&node.containerd);
    let started = thread::scope(|scope| {
        let starting = scope.spawn(|| beside.start(&node.host, &next, &["hold", "600"]));
        // The new container is created before the hook of its slice runs. So its control group already has a process while the
        // hook waits.
        wait_for("the container", || (node.groups_at_work("train-4") == 2).then_some(()));
        assert_eq!(node.owners()[&former.slices[0]], ["ml/train-0/main"]);
        node.runtime.stop(&former, 0);
        node.runtime.end(&former).unwrap();
        node.containerd.remove_group(&former.name);
        starting.join().unwrap()
    });
    started.unwrap_or_else(|error| panic!("{error}\n{}", node.log()));
    wait_for("the client of the pod", || node.client("train-4").map(|_| ()));
    assert_eq!(node.client("train-4").unwrap()["device"], next.slices[0]);
    assert_eq!(node.owners(), node.given());
}

/// The number of updates of the simulated Deployment, which the variable `ROUNDS` can change.
fn updates() -> u32 {
    std::env::var("ROUNDS").map_or(10, |number| number.parse().unwrap())
}

/// A Deployment with three replicas on a full GPU gets new images, one after the other. Each update stops pods in the middle of
/// CUDA kernels. Another pod on the GPU computes all the time.
#[test]
fn rolling_updates_beside_a_neighbour_lose_nobody_and_give_no_slice_twice() {
    let test = "rolling_updates_beside_a_neighbour_lose_nobody_and_give_no_slice_twice";
    let Some(mut node) = with_pods(test) else { return };
    let work = ["long", "3600"];
    let neighbour = node.pod_with("neighbour", 1, &work);
    let pid = node.pid_in("neighbour");
    let mut replicas = [0, 1, 2].map(|number| node.pod_with(&format!("job-0-{number}"), 1, &work));
    for update in 1..=updates() {
        for (number, replica) in (0..).zip(&mut replicas) {
            // The container's first process ignores SIGTERM. So containerd sends SIGKILL after the grace period.
            node.delete(replica, 1);
            *replica = node.pod_with(&format!("job-{update}-{number}"), 1, &work);
            assert_eq!(node.client(&replica.name).unwrap()["device"], replica.slices[0]);
            assert_eq!(node.owners(), node.given(), "{}", replica.name);
            assert!(node.runtime.runs(&neighbour) && node.pid_in("neighbour") == pid, "{}", replica.name);
        }
        assert!(replicas.iter().all(|replica| node.runtime.runs(replica)), "{update}: {replicas:?}");
    }
    replicas.iter().chain([&neighbour]).for_each(|pod| node.delete(pod, 0));
    wait_for("slices without owners", || node.owners().is_empty().then_some(()));
    node.kubelet.wait_for_devices(QUARTER, 4, &[]);
}

/// The parts of a node that the test kills. No kill may harm the pod.
const PARTS: [&str; 3] = ["plugin", "service", "containerd"];

fn orders<'p>(parts: &[&'p str]) -> Vec<Vec<&'p str>> {
    if parts.is_empty() {
        return vec![Vec::new()];
    }
    let begin_with = |first: &&'p str| {
        let others: Vec<&'p str> = parts.iter().copied().filter(|part| part != first).collect();
        let first = *first;
        orders(&others).into_iter().map(move |rest| [vec![first], rest].concat())
    };
    parts.iter().flat_map(begin_with).collect()
}

impl Node {
    /// Kills a part of the node, and restarts it if no other program does so.
    fn kill(&mut self, part: &str) {
        match part {
            "plugin" => {
                signal_pid(self.plugin.process.id(), Signal::KILL);
                self.plugin.process.wait().unwrap();
                self.plugin = Plugin::start(&self.host, &[]);
            }
            "service" => {
                self.host.signal(Signal::KILL);
                self.host.ended();
                self.host.start();
            }
            "containerd" => self.containerd.restart(&self.host),
            "control daemon" => {
                signal_pid(control_pid(&self.host.wait_for_state("ready")), Signal::KILL);
            }
            other => unreachable!("{other}"),
        }
    }

    fn pid_in(&self, pod: &str) -> u32 {
        u32::try_from(self.client(pod).unwrap()["pid"].as_u64().unwrap()).unwrap()
    }
}

#[test]
fn no_kill_loses_a_pod_or_gives_its_slice_away() {
    let Some(mut node) = with_pods("no_kill_loses_a_pod_or_gives_its_slice_away") else { return };
    let pod = node.pod("train-0");
    let pid = node.pid_in("train-0");
    let stranger = ContainerGroup::new().unwrap();
    for order in orders(&PARTS) {
        let order = order.join(", ");
        order.split(", ").for_each(|part| node.kill(part));
        node.host.wait_for_state("ready");
        node.kubelet.wait_for_devices(QUARTER, 4, &[]);
        assert!(alive(pid) && process_state(pid) != Some('Z'), "{order}");
        // A containerd that has just started does not know its containers yet.
        wait_for(&format!("the pod after {order}"), || node.runtime.runs(&pod).then_some(()));
        assert_eq!(node.owners(), node.given(), "{order}");
        refused(&bind(&node.host, &pod.slices[0], &stranger, &[]), "is taken by ml/train-0/main");
        let other = node.admit("train-1", 1);
        assert_ne!(other.slices, pod.slices, "{order}");
        node.kubelet.ended("train-1");
    }
    node.ends(&pod);
}

/// The clients of a killed control daemon end. The service serves the slices again, and the kubelet can give each slice to
/// another pod after the end of its former pod.
#[test]
fn the_slices_of_a_killed_control_daemon_are_served_again() {
    let Some(mut node) = with_pods("the_slices_of_a_killed_control_daemon_are_served_again") else { return };
    for (number, order) in orders(&[&PARTS[..], &["control daemon"]].concat()).into_iter().enumerate() {
        let name = format!("train-{number}");
        let pod = node.pod(&name);
        let pid = node.pid_in(&name);
        for part in order {
            let was_at_work = alive(pid);
            node.kill(part);
            if part == "control daemon" {
                assert!(was_at_work);
                wait_for("the end of the program", || (!alive(pid)).then_some(()));
            } else if part == "containerd" && was_at_work {
                // A containerd that has just started looks for its running containers. If the pod's program ended meanwhile,
                // containerd would miss this end and lose the pod. So the test waits.
                wait_for("a containerd that knows the pod", || node.runtime.runs(&pod).then_some(()));
            }
        }
        node.host.wait_for_state("ready");
        node.kubelet.wait_for_devices(QUARTER, 4, &[]);
        node.ends(&pod);
    }
}
