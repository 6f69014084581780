//! Tests of bindings. A host agent binds a control group before or just after its container starts. A hook of the container
//! runtime binds a control group while its container starts.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::support::client::Client;
use crate::support::container::{ContainerGroup, NO_CONTAINER_GROUP};
use crate::support::host::{Host, alive, binaries, succeeded, text};
use crate::support::skip::{root_or_skip, skip};
use crate::support::wait::wait_for;

/// Slices of the board `h200`: 35942 MiB and 12 clients each.
const FIRST: &str = "00:06.0-0";
const OWN: &str = "00:06.0-1";
const NEIGHBOURS: &str = "00:06.0-2";

/// Starts the service on a host, and makes two containers' control groups. Returns None if this machine does not let the test
/// make control groups.
pub(crate) fn with_containers(test: &str, lines: &str) -> Option<(Host, [ContainerGroup; 2])> {
    on_board("h200", test, lines)
}

fn on_board(board: &str, test: &str, lines: &str) -> Option<(Host, [ContainerGroup; 2])> {
    if !root_or_skip(test) {
        return None;
    }
    let (Some(one), Some(other)) = (ContainerGroup::new(), ContainerGroup::new()) else {
        skip(test, NO_CONTAINER_GROUP);
        return None;
    };
    let mut host = Host::new(board);
    host.configure(&format!("cuda_mps_cdi_directory: {}\n{lines}", host.path("run/cdi").display()));
    host.start();
    host.wait_for_state("ready");
    Some((host, [one, other]))
}

/// Returns the path of a control group below the root of its hierarchy, as /proc/PID/cgroup has it.
pub(crate) fn path(group: &ContainerGroup) -> String {
    let mounts = ["/sys/fs/cgroup/systemd", "/sys/fs/cgroup"];
    let below = mounts.iter().find_map(|mount| group.directory.strip_prefix(mount).ok()).unwrap();
    format!("/{}", below.display())
}

pub(crate) fn client(host: &Host, directory: &Path, work: &[&str], claim: &str) -> Client {
    let enter = "echo $$ > \"$0/cgroup.procs\" && exec cuda-client \"$@\"";
    let mut command = host.command("sh");
    command.args(["-c", enter]).arg(directory).args(work).stdout(Stdio::null());
    command.env("CUDA_MPS_PIPE_DIRECTORY", host.path("mps/pipe")).env("YUNION_MPS_DEVICE", claim);
    host.served(&mut command)
}

pub(crate) fn bind(host: &Host, slice: &str, group: &ContainerGroup, more: &[&str]) -> Output {
    host.mpsctl(&[&["bind", slice, "--control-group", &path(group)], more].concat())
}

fn pids(host: &Host) -> Vec<u32> {
    let clients = host.json(&["clients"]).unwrap();
    let pid = |client: &Value| u32::try_from(client["pid"].as_u64().unwrap()).unwrap();
    clients.as_array().unwrap().iter().map(pid).collect()
}

fn bound_to(host: &Host, slice: &str) -> Value {
    host.list().into_iter().find(|device| device["addr"] == slice).unwrap()["bound_to"].clone()
}

fn known(host: &Host, client: &Client) -> [String; 3] {
    let listed = host.listed(client.id()).unwrap();
    ["device", "known_by", "label"].map(|key| listed[key].as_str().unwrap_or_default().to_owned())
}

fn has(slice: &str, label: &str) -> [String; 3] {
    [slice, "bound", label].map(str::to_owned)
}

#[track_caller]
fn refused(output: &Output, words: &str) {
    let said = text(output);
    assert!(output.status.code() == Some(1) && said.contains(words), "{words}\n{said}");
}

/// All processes in a bound control group and below it have the slice of the binding, whatever their environments claim. No
/// other process has the slice. The next service knows the same slices.
#[test]
fn the_processes_of_a_bound_control_group_have_its_slices() {
    let Some((mut host, [group, other])) =
        with_containers("the_processes_of_a_bound_control_group_have_its_slices", "")
    else {
        return;
    };
    assert_eq!(bound_to(&host, OWN), "");
    let said = succeeded(&bind(&host, OWN, &group, &["--label", "train-1"]));
    assert_eq!(said, format!("{OWN}\n"));
    assert_eq!(bound_to(&host, OWN), "train-1");
    let claims = [("", NEIGHBOURS), ("init/deeper", OWN)];
    let start = |(below, claim)| client(&host, &group.directory.join(below), &["hold", "600"], claim);
    let clients = claims.map(start);
    let stranger = client(&host, &other.directory, &["hold", "600"], OWN);
    for client in &clients {
        assert_eq!(known(&host, client), has(OWN, "train-1"));
    }
    // The slice is bound. So the claim of a process outside of the control group does not count.
    assert_eq!(known(&host, &stranger), [""; 3].map(str::to_owned));
    let table = succeeded(&host.mpsctl(&["list", "-o", "wide"]));
    assert!(table.contains("BOUND TO") && table.contains("  train-1  "), "{table}");

    host.signal(Signal::KILL);
    host.ended();
    host.start();
    host.wait_for_state("ready");
    assert_eq!((bound_to(&host, OWN), bound_to(&host, NEIGHBOURS)), (json!("train-1"), json!("")));
    for client in &clients {
        assert_eq!(known(&host, client), has(OWN, "train-1"));
    }

    // The client `stranger` has no known slice and may work on any slice of the GPU. So the service refuses a request for one
    // slice: it can't tell if `stranger` has this slice.
    refused(&host.mpsctl(&["terminate", "--device", NEIGHBOURS]), &format!("PID {}", stranger.id()));
    assert!(clients.iter().all(|client| alive(client.id())));
    succeeded(&host.mpsctl(&["unbind", "--control-group", &path(&group)]));
    assert_eq!(bound_to(&host, OWN), "");
    assert_eq!(known(&host, &clients[0]), [NEIGHBOURS, "environment", ""].map(str::to_owned));
    let advice = text(&host.mpsctl(&["doctor"]));
    assert!(advice.contains("clients-claim-slices: 3 clients"), "{advice}");
    // A binding causes no event and no line in the journal. With thousands of jobs a day, such lines would hide faults.
    let told = host.events().join("\n") + &host.log();
    assert!(!told.contains(" bound to ") && !told.contains(" not bound "), "{told}");
}

/// A job with a slice for each task binds its control group to several slices of one GPU. Each process then uses one of these
/// slices.
#[test]
fn a_process_chooses_between_the_slices_of_its_control_group() {
    let test = "a_process_chooses_between_the_slices_of_its_control_group";
    let Some((host, [group, _other])) = with_containers(test, "") else { return };
    succeeded(&bind(&host, OWN, &group, &[NEIGHBOURS, "--label", "job 7"]));
    let tasks =
        [OWN, NEIGHBOURS, FIRST].map(|claim| client(&host, &group.directory, &["hold", "600"], claim));
    let both = format!("{OWN},{NEIGHBOURS}");
    for (task, slices) in tasks.iter().zip([OWN, NEIGHBOURS, &both]) {
        assert_eq!(known(&host, task), has(slices, "job 7"));
    }
    let clients =
        |slice: &str| host.list().into_iter().find(|one| one["addr"] == slice).unwrap()["clients"].clone();
    wait_for("a look", || (clients(OWN) == 2 && clients(NEIGHBOURS) == 1).then_some(()));
    assert_eq!(clients(FIRST), 0);
    succeeded(&host.mpsctl(&["terminate", "--device", NEIGHBOURS]));
    assert!(alive(tasks[0].id()));
}

/// Root in a bound container mounts directories, makes namespaces and control groups, and claims any slice. The container's
/// slice and its neighbour's slice stay the same. A request to end the work on a slice still finds this container by its own
/// slice only.
#[test]
fn a_tenant_in_a_bound_control_group_changes_nobodys_slice() {
    let test = "a_tenant_in_a_bound_control_group_changes_nobodys_slice";
    let Some((host, [group, other])) = with_containers(test, "") else { return };
    succeeded(&bind(&host, OWN, &group, &["--label", "tenant"]));
    succeeded(&bind(&host, NEIGHBOURS, &other, &["--label", "neighbour"]));
    let directory = host.path("mps/pipe/slices").join(NEIGHBOURS.replace(':', "_"));
    // In namespaces of its own, the tenant's program is another user and has other mounts. The service must still find the
    // slice to which the program's control group is bound.
    let namespaces =
        [&["--mount"][..], &["--user", "--map-root-user", "--mount", "--cgroup", "--pid", "--fork"]];
    for (options, below) in namespaces.into_iter().zip(["", "init/deeper"]) {
        let neighbour = client(&host, &other.directory, &["hold", "600"], "");
        let enter = "echo $$ >\"$0/cgroup.procs\" && exec unshare \"$@\"";
        let lie = "mount --bind \"$0\" /mnt && exec cuda-client hold 600";
        let mut command = host.command("sh");
        command.args(["-c", enter]).arg(group.directory.join(below)).args(options);
        command.args(["sh", "-c", lie]).arg(&directory).stdout(Stdio::null());
        command.env("CUDA_MPS_PIPE_DIRECTORY", &directory).env("YUNION_MPS_DEVICE", NEIGHBOURS);
        let before: Vec<u32> = pids(&host);
        let liar = Client::start(&mut command);
        let pid = wait_for("the liar", || pids(&host).into_iter().find(|pid| !before.contains(pid)));
        let listed = host.listed(pid).unwrap();
        assert_eq!((&listed["device"], &listed["known_by"]), (&json!(OWN), &json!("bound")), "{options:?}");
        assert_eq!(known(&host, &neighbour), has(NEIGHBOURS, "neighbour"));
        let ended = host.mpsctl(&["terminate", "--device", NEIGHBOURS]);
        assert!(ended.status.success() && pids(&host).contains(&pid), "{}", text(&ended));
        succeeded(&host.mpsctl(&["terminate", "--device", OWN]));
        assert!(!pids(&host).contains(&pid));
        drop(liar);
    }
}

#[test]
fn what_is_drained_taken_or_shared_is_refused() {
    let Some((host, [group, other])) = with_containers("what_is_drained_taken_or_shared_is_refused", "")
    else {
        return;
    };
    succeeded(&bind(&host, OWN, &group, &["--label", "train-1"]));
    refused(&bind(&host, OWN, &other, &[]), &format!("{OWN} is taken by train-1"));
    succeeded(&bind(&host, OWN, &other, &["--share"]));
    assert_eq!(bound_to(&host, OWN), format!("train-1, {}", path(&other)));
    succeeded(&host.mpsctl(&["unbind", "--control-group", &path(&other)]));
    succeeded(&host.mpsctl(&["drain", NEIGHBOURS]));
    refused(&bind(&host, NEIGHBOURS, &other, &[]), &format!("{NEIGHBOURS} is drained for new clients"));
    refused(&bind(&host, "00:06.0-9", &other, &[]), "there is no slice or GPU \"00:06.0-9\"");
    for (shared, why) in [("/", "the root of all control groups"), ("/system.slice", "groups units")] {
        refused(&host.mpsctl(&["bind", FIRST, "--control-group", shared]), why);
    }
    refused(
        &host.mpsctl(&["bind", FIRST, "--control-group", "/no-such-group"]),
        "no control group has this path",
    );
    refused(&host.mpsctl(&["bind", FIRST, "--pid", "4194305"]), "there is no such process");
    refused(&host.mpsctl(&["unbind", "--control-group", &path(&other)]), "is not bound");
    let call = |arguments: &[&str]| {
        let object = [
            "--system",
            "call",
            "io.yunion.Mps1",
            "/io/yunion/Mps1/Manager",
            "io.yunion.Mps1.Control",
            "Bind",
        ];
        let output = host.command("busctl").args(object).arg("asua{sv}").args(arguments).output().unwrap();
        text(&output)
    };
    let its_path = path(&other);
    let said = call(&["1", FIRST, "0", "2", "control_group", "s", &its_path, "colour", "s", "red"]);
    assert!(said.contains("there is no option \"colour\""), "{said}");
    assert_eq!(bound_to(&host, FIRST), "");
    let said = call(&["1", FIRST, "0", "2", "control_group", "s", &its_path, "label", "s", "job 17"]);
    assert_eq!(said.trim(), format!("as 1 \"{FIRST}\""));
    assert_eq!(bound_to(&host, FIRST), "job 17");
}

/// After a GPU leaves the configuration, its control daemon serves the last job on the GPU to its end. The job's binding also
/// lasts until then.
#[test]
fn a_bound_job_keeps_its_slice_when_its_gpu_leaves_the_configuration() {
    let test = "a_bound_job_keeps_its_slice_when_its_gpu_leaves_the_configuration";
    let Some((mut host, [group, _other])) = on_board("h200x8", test, "") else { return };
    let entries = ["renderD128", "renderD129"]
        .map(|node| format!("path: /dev/dri/{node}, type: NVIDIA_MPS, virtual_number: 4"));
    host.devices(&entries.each_ref().map(String::as_str));
    host.reload();
    let [slice, gpu] = ["addr", "device_path"].map(|key| host.list()[5][key].as_str().unwrap().to_owned());
    succeeded(&bind(&host, &slice, &group, &["--label", "job 7"]));
    let mut command = host.program_of(&slice, &["hold", "600"]);
    let job = host.served(command.env("CUDA_VISIBLE_DEVICES", gpu));
    group.take(job.id(), "");
    assert_eq!(known(&host, &job), has(&slice, "job 7"));
    host.devices(&[&entries[0]]);
    host.reload();
    assert_eq!(host.list().len(), 4);
    assert_eq!(known(&host, &job), has(&slice, "job 7"));
    // After this restart the new service's plan lacks the GPU.
    host.signal(Signal::KILL);
    host.ended();
    host.start();
    host.wait_for_status("the control daemon of before", |status| {
        !status["control_daemons"][0]["pid"].is_null()
    });
    assert_eq!(known(&host, &job), has(&slice, "job 7"));
}

/// `bind` with the name of a GPU takes the lowest free slice of the GPU. The kernel's removal of the control group ends the
/// binding, without any request.
#[test]
fn a_binding_ends_with_its_control_group() {
    let Some((host, [one, other])) = with_containers("a_binding_ends_with_its_control_group", "") else {
        return;
    };
    succeeded(&host.mpsctl(&["drain", FIRST]));
    let bound = |group: &ContainerGroup| succeeded(&bind(&host, "00:06.0", group, &[])).trim_end().to_owned();
    assert_eq!(bound(&one), OWN);
    assert_eq!(bound(&other), NEIGHBOURS);
    assert_eq!(bound(&one), OWN, "it has one already");
    let own = client(&host, &one.directory, &["hold", "600"], "");
    own.end();
    drop(one);
    wait_for("the end of the binding", || (bound_to(&host, OWN) == "").then_some(()));
    assert_eq!(bound_to(&host, NEIGHBOURS), path(&other));
    assert_eq!(bound(&other), NEIGHBOURS);
}

/// A container runtime may remove the control group of an ended container late. The next container must get the slice even
/// before this removal. A new control group keeps its slice, even if no process has run in the control group yet.
#[test]
fn an_empty_control_group_that_had_its_program_gives_its_slice_away() {
    let test = "an_empty_control_group_that_had_its_program_gives_its_slice_away";
    let Some((host, [old, new])) = with_containers(test, "") else { return };
    let waits = Waits::in_group(&host, &old);
    succeeded(&bind(&host, OWN, &old, &["--label", "old"]));
    refused(&bind(&host, OWN, &new, &[]), "is taken by old");
    drop(waits);
    succeeded(&bind(&host, OWN, &new, &["--label", "new"]));
    assert_eq!(bound_to(&host, OWN), "new");
    refused(&bind(&host, OWN, &old, &[]), "is taken by new");
}

#[test]
fn a_budget_holds_for_a_bound_control_group() {
    let Some((host, [group, other])) =
        with_containers("a_budget_holds_for_a_bound_control_group", "cuda_mps_overuse: terminate")
    else {
        return;
    };
    // A host agent may bind a control group after a client has started in it.
    let old = client(&host, &group.directory, &["hold", "600", "--mib", "20000"], NEIGHBOURS);
    succeeded(&host.mpsctl(&["bind", OWN, "--pid", &old.id().to_string(), "--label", "train-1"]));
    let claims = client(&host, &other.directory, &["hold", "600", "--mib", "20000"], OWN);
    let mut new = client(&host, &group.directory, &["hold", "600", "--mib", "20000"], NEIGHBOURS);
    let status = wait_for("the end of the newest", || new.try_wait().unwrap());
    assert_eq!(status.code(), Some(4), "CUDA error 810");
    assert!(alive(old.id()) && alive(claims.id()));
}

/// The first process of a container. The process waits for the hooks of the container runtime.
struct Waits(Client);

impl Waits {
    fn in_group(host: &Host, group: &ContainerGroup) -> Self {
        let waits = Client::start(host.command("sleep").arg("600"));
        group.take(waits.id(), "");
        Self(waits)
    }

    fn start(&self, hook: &mut Command, id: &str) -> Child {
        let (namespace, pod) = id.split_once('/').unwrap_or_default();
        let annotations = json!({
            "io.kubernetes.cri.sandbox-namespace": namespace, "io.kubernetes.cri.sandbox-name": pod,
            "io.kubernetes.cri.container-name": "main",
        });
        let annotations = if pod.is_empty() { json!({}) } else { annotations };
        let state = json!({
            "ociVersion": "1.0.2", "id": id, "status": "creating", "pid": self.0.id(), "bundle": "/b",
            "annotations": annotations,
        });
        hook.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut hook = hook.spawn().unwrap();
        hook.stdin.take().unwrap().write_all(state.to_string().as_bytes()).unwrap();
        hook
    }
}

/// The hook binds the container's control group. The binding's label is the id that the container runtime gives the hook. When
/// the service refuses, the container runtime's error shows the service's reason.
#[test]
fn a_runtime_binds_by_its_hook() {
    let Some((host, [group, other])) = with_containers("a_runtime_binds_by_its_hook", "") else { return };
    let spec = host.path("run/cdi/yunion.io-mps.json");
    let spec: Value = serde_json::from_str(&fs::read_to_string(spec).unwrap()).unwrap();
    let device = spec["devices"].as_array().unwrap().iter().find(|device| device["name"] == OWN).unwrap();
    let hook = device["containerEdits"]["hooks"][0].clone();
    assert_eq!(hook["hookName"], "createRuntime", "{device:#}");
    let arguments: Vec<&str> =
        hook["args"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    let run = |group: &ContainerGroup, id: &str| {
        let mut hook = host.command(hook["path"].as_str().unwrap());
        let waits = Waits::in_group(&host, group);
        let said = waits.start(hook.args(&arguments[1..]), id).wait_with_output().unwrap();
        (waits, said)
    };
    // A container runtime without root can't bind. The hook lets the container start, and the service learns the container's
    // slice from the container's environment.
    let mut of_a_user = host.command("unshare");
    of_a_user.args(["--user", "--map-root-user"]).arg(hook["path"].as_str().unwrap()).args(&arguments[1..]);
    let said = of_a_user.stdin(Stdio::null()).output().unwrap();
    assert!(said.status.success() && text(&said).contains("only root may bind slices"), "{}", text(&said));
    assert_eq!(bound_to(&host, OWN), "");
    let (_container, said) = run(&group, "c-1");
    succeeded(&said);
    assert_eq!(bound_to(&host, OWN), "c-1");
    refused(&run(&other, "c-2").1, &format!("{OWN} is taken by c-1"));
    succeeded(&host.mpsctl(&["unbind", "--control-group", &path(&group)]));
    // These names of a namespace and of a pod have the greatest length that Kubernetes allows.
    let pod = format!("{}/{}", "n".repeat(63), "p".repeat(253));
    succeeded(&run(&group, &pod).1);
    assert_eq!(bound_to(&host, OWN), format!("{pod}/main"));
    succeeded(&host.mpsctl(&["unbind", "--control-group", &path(&group)]));
    succeeded(&host.mpsctl(&["drain", OWN]));
    refused(&run(&other, "c-2").1, &format!("{OWN} is drained"));
}

/// If the service is killed before it answers, the hook asks the restarted service, and the container starts later.
#[test]
fn a_hook_asks_again_when_the_service_ends_before_its_answer() {
    let test = "a_hook_asks_again_when_the_service_ends_before_its_answer";
    let Some((mut host, [group, _other])) = with_containers(test, "") else { return };
    let seen = host.path("seen");
    let mut busctl = host.command("busctl");
    busctl.args(["--system", "monitor", "--match", "type='method_call',member='Bind'"]);
    busctl.stdout(File::create(&seen).unwrap()).stderr(File::create(host.path("said")).unwrap());
    let _busctl = Client::start(&mut busctl);
    wait_for("a monitor", || {
        fs::read_to_string(host.path("said")).unwrap().contains("Monitoring").then_some(())
    });
    host.signal(Signal::STOP);
    let waits = Waits::in_group(&host, &group);
    let hook =
        waits.start(host.command(binaries().join("yunion-mpsctl")).args(["bind", "--oci", OWN]), "c-1");
    wait_for("a question", || fs::read_to_string(&seen).unwrap().contains("Bind").then_some(()));
    host.signal(Signal::KILL);
    host.ended();
    host.start();
    succeeded(&hook.wait_with_output().unwrap());
    assert_eq!(bound_to(&host, OWN), "c-1");
}
