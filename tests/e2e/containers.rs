//! Runs the commands of docs/containers.md with the container engines of a booted machine, and checks that each container is a
//! client of exactly its slice. The GPUs are simulated, so a short CDI spec and a short runtime replace NVIDIA's. These tests
//! run every command of docs/containers.md that [`ELSEWHERE`] does not list.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::Check;
use crate::fetched::fetched;
use crate::machine::{Machine, Stage};
use crate::package;
use crate::readme::lines;
use crate::service::{HOST, HOST_CONF, ON_HOST, SERVICE, UUID, control_daemons, serving};
use crate::skip::skip;
use crate::wait::wait_for;

pub(crate) const CHECKS: &[Check] = &[
    ("every_command_of_the_page_is_run_or_says_why_not", page),
    ("podman_makes_a_client_of_exactly_this_slice", podman),
    ("podman_refuses_a_slice_that_nobody_may_have_now", podman_refuses),
    ("podman_binds_each_container_to_its_slice", podman_binds),
    ("a_container_comes_back_after_its_client_was_lost", podman_comes_back),
    ("podman_of_a_user_starts_containers_that_are_not_bound", rootless),
    ("podman_stops_containers_without_harm_to_a_neighbour", podman_stops),
    ("docker_makes_a_client_of_exactly_this_slice", docker),
    ("compose_makes_a_client_of_exactly_this_slice", compose),
    ("docker_with_cdi_binds_each_container_to_its_slice", docker_binds),
];

/// The checks that also run with control groups of version 1, since their results could differ there.
pub(crate) const CHECKS_LEGACY: &[Check] =
    &[("podman_binds_each_container_to_its_slice", podman_binds_legacy)];

const PODMAN: &str =
    "options=$(yunion-mpsctl env 00:06.0-1 --format podman) && podman run --rm $options IMAGE PROGRAM";
const PODMAN_CDI: &str =
    "podman run --rm --device nvidia.com/gpu=GPU-76aef7ff-... --device yunion.io/mps=00:06.0-1 IMAGE PROGRAM";
const PODMAN_NAMES: &str = "names=$(yunion-mpsctl env 00:06.0-1 --format cdi) && podman run --rm $(printf -- '--device=%s ' $names) IMAGE PROGRAM";
const PODMAN_STOP: &str = "yunion-mpsctl terminate --container 4f1c2d3e5a6b && podman stop 4f1c2d3e5a6b";
const DOCKER_CDI: &str =
    "options=$(yunion-mpsctl env 00:06.0-1 --format podman) && docker run --rm $options IMAGE PROGRAM";
const DOCKER: &str =
    "options=$(yunion-mpsctl env 00:06.0-1 --format docker) && docker run --rm $options IMAGE PROGRAM";
const DOCKER_FREE: &str =
    "options=$(yunion-mpsctl env --free --format docker) && docker run --rm $options IMAGE PROGRAM";
const DOCKER_BIND: &str =
    "yunion-mpsctl bind 00:06.0-1 --pid \"$(docker inspect --format '{{.State.Pid}}' 4f1c2d3e5a6b)\"";
const COMPOSE_FILE: &str = "yunion-mpsctl env 00:06.0-1 --format compose >mps-slice.yaml";
const COMPOSE_UP: &str = "docker compose up";

/// The commands of docs/containers.md that these tests run.
const RUN: [&str; 11] = [
    PODMAN,
    PODMAN_CDI,
    PODMAN_NAMES,
    PODMAN_STOP,
    DOCKER_FEATURES,
    DOCKER_CDI,
    DOCKER,
    DOCKER_BIND,
    DOCKER_FREE,
    COMPOSE_FILE,
    COMPOSE_UP,
];

/// The commands of docs/containers.md that these tests do not run, each with the reason.
const ELSEWHERE: [(&str, &str); 5] = [
    ("nvidia-ctk runtime configure --runtime=docker && systemctl restart docker", "needs NVIDIA's toolkit"),
    ("yunion-mpsctl env 00:06.0-1 --format cdi", "its output is in tests/golden"),
    (
        "names=$(yunion-mpsctl env 00:06.0-1 --format cdi) && ctr run --rm $(printf -- '--device=%s ' $names) IMAGE NAME PROGRAM",
        "needs containerd 2; tried by hand",
    ),
    (
        "{\"metadata\": {\"name\": \"job\"}, \"image\": {\"image\": \"IMAGE\"}, \"command\": [\"PROGRAM\"],",
        "needs containerd 1.7 or newer, and crictl",
    ),
    (
        "\"CDI_devices\": [{\"name\": \"nvidia.com/gpu=GPU-76aef7ff-...\"}, {\"name\": \"yunion.io/mps=00:06.0-1\"}]}",
        "needs containerd 1.7 or newer, and crictl",
    ),
];

/// The line of docs/stops.md that configures Docker's runtimes in these tests.
const DOCKER_RUNTIMES: &str =
    r#"{"runtimes": {"yunion-mps": {"path": "/usr/bin/yunion-mps-runc"}}, "default-runtime": "yunion-mps"}"#;
const DOCKER_FEATURES: &str = "{\"features\": {\"cdi\": true}}";

const IMAGE: &str = "cuda-image";
/// The directory in the machine for a Docker that supports CDI. The Docker of the machine's distribution may be too old for
/// CDI.
const DOCKER_WITH_CDI: &str = "/opt/docker";
const SPEC: &str = "/var/run/cdi/yunion.io-mps.json";
/// A script that runs in a container and prints all that docs/containers.md promises.
const SHOW: &str =
    "env | sort; grep yunion /proc/self/mountinfo; touch $CUDA_MPS_PIPE_DIRECTORY/new; cuda-client props";

pub(crate) fn stage() -> Stage {
    let stage = package::stage();
    for program in ["dockerd", "docker", "containerd", "containerd-shim-runc-v2"] {
        stage.put(&fetched(program), &format!("{DOCKER_WITH_CDI}/{program}"));
    }
    stage
}

/// Installs the package, and makes every hierarchy of control groups writable for runc. Otherwise programs in a test machine
/// may write only in systemd's hierarchy.
pub(crate) fn installed_legacy(machine: &Machine) {
    package::installed(machine);
    machine.sh("for hierarchy in $(awk '$3 == \"cgroup\" { print $2 }' /proc/mounts); do
            mount -o remount,bind,rw $hierarchy
        done");
}

fn page_text() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/containers.md")).unwrap()
}

fn compose_file(page: &str) -> String {
    let from = page.lines().skip_while(|line| *line != "    services:");
    let lines = from.take_while(|line| !line.is_empty());
    lines.map(|line| format!("{}\n", line.strip_prefix("    ").unwrap())).collect()
}

fn page(_: &mut Machine) {
    let page = page_text();
    let compose = compose_file(&page);
    let compose: Vec<&str> = compose.lines().map(str::trim).collect();
    let known = |line: &&str| {
        RUN.contains(line)
            || compose.contains(line)
            || ELSEWHERE.iter().any(|(elsewhere, _)| elsewhere == line)
    };
    let lines = lines(&page);
    let unknown: Vec<&&str> = lines.iter().filter(|line| !known(line)).collect();
    assert!(unknown.is_empty(), "docs/containers.md has lines that nobody runs: {unknown:#?}");
    for line in RUN.iter().chain(ELSEWHERE.iter().map(|(line, _)| line)) {
        assert!(lines.contains(line), "docs/containers.md has no line {line:?}");
    }
}

/// Replaces the placeholders in a command of docs/containers.md: the shortened UUID by the UUID of the simulated GPU, IMAGE by
/// the image of these tests, and PROGRAM by `program`. The machine has Compose only as the program `docker-compose`.
fn typed(command: &str, program: &str) -> String {
    let command = command.replace("GPU-76aef7ff-...", UUID).replace("docker compose", "docker-compose");
    command.replace("IMAGE", IMAGE).replace("PROGRAM", program)
}

/// Starts the service with a CDI spec on a simulated host, and gives the container engine the image of these tests. Returns
/// false if the container engine is missing.
fn prepared(machine: &Machine, engine: &str) -> bool {
    if !machine.run(&["sh", "-c", &format!("command -v {engine}")]).status.success() {
        skip(engine, "the distribution in E2E_ROOT does not have it");
        return false;
    }
    serving(machine);
    machine.sh(&format!(
        "grep -q cuda_mps_cdi_directory {HOST_CONF} || echo 'cuda_mps_cdi_directory: /var/run/cdi' >>{HOST_CONF}
        systemctl reload {SERVICE}"
    ));
    wait_for("the spec", || machine.run(&["test", "-e", SPEC]).status.success().then_some(()));
    // The image has a shell, the CUDA program, and the libraries that the CUDA program needs.
    machine.sh("[ ! -e /srv/image ] || exit 0
        mkdir -p /srv/image/bin /srv/image/tmp
        cp \"$(command -v busybox)\" /srv/image/bin/busybox
        for name in sh cat env grep sort touch; do ln -s busybox /srv/image/bin/$name; done
        for library in $(ldd /usr/lib/simulated/cuda-client | grep -o '/[^ ]*'); do
            mkdir -p \"/srv/image$(dirname \"$library\")\"
            cp -L \"$library\" \"/srv/image$library\"
        done");
    true
}

/// Prepares Podman with a short CDI spec instead of NVIDIA's. Returns false if Podman is missing.
fn with_podman(machine: &Machine) -> bool {
    if !prepared(machine, "podman") {
        return false;
    }
    // The test machine is a container itself. Therefore containers in the machine have no overlay file system, no network, and
    // no controller for the number of processes. Podman uses runc, since crun raises a limit that can't be raised in the
    // machine.
    machine.write(
        "/etc/containers/storage.conf",
        "[storage]\ndriver = \"vfs\"\nrunroot = \"/run/containers/storage\"\n\
         graphroot = \"/var/lib/containers/storage\"\n",
    );
    machine.write(
        "/etc/containers/containers.conf",
        "[containers]\nnetns = \"none\"\npids_limit = 0\n[engine]\nruntime = \"runc\"\n",
    );
    let mount = |path: &str, place: &str, mode: &str| {
        format!("{{hostPath: {path}, containerPath: {place}, options: [{mode}, nosuid, nodev, bind]}}")
    };
    machine.write(
        "/etc/cdi/nvidia.yaml",
        &format!(
            "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ncontainerEdits:\n  env: [NVIDIA_VISIBLE_DEVICES=void]\n\
             devices:\n- name: {UUID}\n  containerEdits:\n    env: [YUNION_MPS_SIM={HOST}]\n    mounts:\n    \
             - {}\n    - {}\n    - {}\n",
            mount("/usr/lib/simulated/cuda-client", "/usr/bin/cuda-client", "ro"),
            mount(&format!("{HOST}/gpus"), &format!("{HOST}/gpus"), "rw"),
            mount(&format!("{HOST}/driver"), &format!("{HOST}/driver"), "ro"),
        ),
    );
    machine.sh(&format!(
        "podman rm --all --force --time 0 >/dev/null
        podman image exists {IMAGE} || tar -C /srv/image -c . | podman import --quiet - {IMAGE}"
    ));
    true
}

/// Prepares Docker with the service's runtime. The service's runtime calls a script that adds the GPU to a container as
/// NVIDIA's runtime does. Returns false if Docker is missing.
fn with_docker(machine: &Machine) -> bool {
    if !prepared(machine, "dockerd") {
        return false;
    }
    machine.write("/usr/local/bin/nvidia-container-runtime", &RUNTIME.replace("HOST", HOST));
    machine.write(
        "/etc/docker/daemon.json",
        "{\"storage-driver\": \"vfs\", \"bridge\": \"none\", \"iptables\": false,
          \"runtimes\": {\"nvidia\": {\"path\": \"/usr/bin/yunion-mps-nvidia-container-runtime\"}}}",
    );
    machine.sh(&format!(
        "chmod 755 /usr/local/bin/nvidia-container-runtime; systemctl start docker
        docker image inspect {IMAGE} >/dev/null 2>&1 || tar -C /srv/image -c . | docker import - {IMAGE}"
    ));
    true
}

/// A container runtime that runs runc without keyrings, since the test machine forbids keyrings.
const RUNTIME: &str = r#"#!/usr/bin/python3
import json, os, sys
words = sys.argv[1:]
if "create" in words:
    path = os.path.join(words[words.index("--bundle") + 1], "config.json")
    with open(path) as file:
        spec = json.load(file)
    environment = spec["process"]["env"]
    if any(one.startswith("NVIDIA_VISIBLE_DEVICES=GPU-") for one in environment):
        environment.append("YUNION_MPS_SIM=HOST")
        for source, place in [("/usr/lib/simulated/cuda-client", "/usr/bin/cuda-client"),
                              ("HOST/gpus", "HOST/gpus"), ("HOST/driver", "HOST/driver")]:
            spec["mounts"].append({"type": "bind", "source": source, "destination": place, "options": ["bind"]})
    with open(path, "w") as file:
        json.dump(spec, file)
    words.insert(words.index("create") + 1, "--no-new-keyring")
os.execv("/usr/sbin/runc", ["runc", *words])
"#;

/// Fails unless `printed`, the output of [`SHOW`], comes from a container with slice 1. The directory of this slice must be
/// mounted at `place`.
#[track_caller]
fn is_a_client_of_slice_1(printed: &str, place: &str) {
    for line in [
        format!("CUDA_MPS_PIPE_DIRECTORY={place}"),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25".to_owned(),
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=35942M".to_owned(),
        "YUNION_MPS_DEVICE=00:06.0-1".to_owned(),
    ] {
        assert!(printed.lines().any(|printed| printed == line), "no {line} in:\n{printed}");
    }
    // Of the service's directories, the container sees only the directory of its slice, and can't write to this directory.
    let mounts: Vec<&str> = printed.lines().filter(|line| line.contains(" - ")).collect();
    let [mount] = mounts[..] else { panic!("{mounts:?} in:\n{printed}") };
    let words: Vec<&str> = mount.split(' ').collect();
    assert!(words[3].ends_with("/pipe/slices/00_06.0-1") && words[4] == place, "{mount}");
    assert!(words[5].split(',').any(|option| option == "ro"), "{mount}");
    assert!(printed.contains("new: Read-only file system"), "{printed}");
    // The client has a quarter of the GPU's SMs, and a quarter of the GPU's memory, less the client's CUDA context.
    assert!(printed.contains(" sms 32 ") && printed.contains(" free 35797 "), "{printed}");
}

fn clients(machine: &Machine, number: usize) -> Vec<Value> {
    wait_for("the clients", || {
        let printed = machine.printed(&["yunion-mpsctl", "clients", "--json"]);
        let clients: Vec<Value> = serde_json::from_str(&printed).unwrap();
        (clients.len() == number).then_some(clients)
    })
}

fn shown(machine: &Machine, command: &str) -> String {
    machine.sh(&format!("{} 2>&1", typed(command, &format!("sh -c '{SHOW}'"))))
}

fn podman(machine: &mut Machine) {
    if !with_podman(machine) {
        return;
    }
    is_a_client_of_slice_1(&shown(machine, PODMAN), "/run/yunion-mps");
    for command in [PODMAN_CDI, PODMAN_NAMES] {
        let printed = shown(machine, command);
        is_a_client_of_slice_1(&printed, "/run/yunion-mps-00_06.0-1");
        // The CDI spec adds the GPU. With the value `void`, NVIDIA's hook does not add the GPU a second time.
        assert!(printed.contains("NVIDIA_VISIBLE_DEVICES=void\n"), "{printed}");
    }
    // The service takes the slice of a container from the container's control group and not from its environment. A container
    // can command the control daemon only if the container's user is root on the host.
    for (user, may_command) in [
        ("--user=0:0", "neighbours"),
        ("--user=65534:65534", "nothing"),
        ("--uidmap=0:100000:65536", "nothing"),
    ] {
        let options = format!("--rm --detach {user} --env YUNION_MPS_DEVICE=00:06.0-3");
        let command = typed(PODMAN_CDI, "cuda-client hold 600").replace("--rm", &options);
        let id = machine.sh(&command).trim().to_owned();
        let client = &clients(machine, 1)[0];
        assert_eq!(client["container_id"], id.as_str());
        assert_eq!(
            (&client["device"], &client["known_by"], &client["may_command"]),
            (&"00:06.0-1".into(), &"bound".into(), &may_command.into())
        );
        machine.sh(&format!("podman rm --force --time 0 {id}"));
        clients(machine, 0);
    }
}

fn podman_refuses(machine: &mut Machine) {
    if !with_podman(machine) {
        return;
    }
    let run = typed(PODMAN_CDI, "cuda-client props");
    let refused = |name: &str, words: &str| {
        let complaint = machine.complained(&["sh", "-c", &run.replace("00:06.0-1", name)]);
        assert!(complaint.contains(words) && complaint.contains(name), "{complaint}");
    };
    refused("00:06.0-4", "unresolvable CDI devices");

    machine.sh("yunion-mpsctl drain 00:06.0-1");
    refused("00:06.0-1", "00:06.0-1 is drained for new clients");
    let complaint = machine.complained(&["yunion-mpsctl", "env", "00:06.0-1", "--format", "podman"]);
    assert!(complaint.contains("00:06.0-1 is drained for new clients"), "{complaint}");
    machine.sh(&run.replace("00:06.0-1", "00:06.0-2"));
    machine.sh("yunion-mpsctl undrain 00:06.0-1");
    machine.sh(&run);

    // With the fault `start-exits`, no simulated control daemon can start. The hook waits for the control daemon of the slice,
    // gives up, and prints the reason.
    let fault = format!("{HOST}/mps/fault/start-exits");
    machine.sh(&format!("touch {fault}; kill -KILL {}", control_daemons(machine)[0]));
    refused("00:06.0-1", "00:06.0-1 is not served: ");
    machine.sh(&format!("rm {fault}; yunion-mpsctl is-ready --wait 120"));
    machine.sh(&run);
}

fn bound(machine: &Machine) -> Vec<(String, String)> {
    let printed = machine.printed(&["yunion-mpsctl", "list", "--json"]);
    let devices: Vec<Value> = serde_json::from_str(&printed).unwrap();
    let word = |device: &Value, key: &str| device[key].as_str().unwrap().to_owned();
    let names = devices.iter().map(|device| (word(device, "addr"), word(device, "bound_to")));
    names.filter(|(_, to)| !to.is_empty()).collect()
}

/// Checks that the hook of the CDI spec binds a container to its slice before the container's program runs. The binding must
/// end with the container. `run` is a command that starts a container with slice 1.
fn binds(machine: &Machine, engine: &str, run: &str) {
    let nothing_is_bound = || wait_for("no binding", || bound(machine).is_empty().then_some(()));
    nothing_is_bound();
    let start = || machine.sh(&run.replace("--rm", "--rm --detach")).trim().to_owned();
    let id = start();
    let its = [("00:06.0-1".to_owned(), id.clone())];
    assert_eq!(bound(machine), its);
    let complaint = machine.complained(&["sh", "-c", run]);
    assert!(complaint.contains(&format!("00:06.0-1 is taken by {id}")), "{complaint}");
    clients(machine, 1);
    machine.sh(&format!("systemctl restart {SERVICE} && yunion-mpsctl is-ready --wait 60"));
    assert_eq!(bound(machine), its);
    let client = &clients(machine, 1)[0];
    assert_eq!((&client["known_by"], &client["label"]), (&"bound".into(), &id.as_str().into()));
    assert!(machine.complained(&["sh", "-c", run]).contains("00:06.0-1 is taken by"));
    machine.sh("yunion-mpsctl drain 00:06.0-2");
    let complaint = machine.complained(&["sh", "-c", &run.replace("00:06.0-1", "00:06.0-2")]);
    assert!(complaint.contains("00:06.0-2 is drained for new clients"), "{complaint}");
    machine.sh("yunion-mpsctl undrain 00:06.0-2");
    // The slice is free again after its container's first process is killed, and after the engine kills a container.
    let pid = machine.printed(&[engine, "inspect", "--format", "{{.State.Pid}}", &id]);
    machine.sh(&format!("kill -KILL {}", pid.trim()));
    nothing_is_bound();
    let next = start();
    machine.sh(&format!("{engine} kill {next}"));
    nothing_is_bound();

    // A hundred containers start and end, four at a time, while the service is killed.
    let lane = run.replace("cuda-client hold 600", "sh -c 'exit 7'").replace("00:06.0-1", "00:06.0-$lane");
    let printed = machine.sh(&format!(
        "for lane in 0 1 2 3; do
             for number in $(seq 25); do {lane} 2>&1 || echo status $?; done &
         done
         sleep 5; systemctl kill --signal=KILL --kill-whom=main {SERVICE} || systemctl kill --signal=KILL --kill-who=main {SERVICE}
         wait"
    ));
    let ended = printed.lines().filter(|line| *line == "status 7").count();
    assert_eq!(ended, 100, "{printed}");
    nothing_is_bound();
    machine.sh("yunion-mpsctl is-ready --wait 60");
}

/// The number of times that the test ends the client of a container, which the engine must then restart.
const LOSSES: u32 = 4;

/// Repeats [`one_comes_back`] `ROUNDS` times, or once without this variable. Docker waits longer before each further restart of
/// a container, and the service before each further restart of a control daemon. Each round has a new container and a restarted
/// service, so these waits start again from the shortest wait.
fn comes_back(machine: &Machine, engine: &str, run: &str) {
    let rounds = std::env::var("ROUNDS").map_or(1, |number| number.parse().unwrap());
    for round in 0..rounds {
        machine.sh(&format!("systemctl restart {SERVICE} && yunion-mpsctl is-ready --wait 60"));
        one_comes_back(machine, engine, run);
        println!("{engine}: the container of round {round} has come back after each of {LOSSES} losses");
    }
}

/// Checks that the engine restarts a container after its client has ended. The client ends because the control daemon was
/// killed, or because a client of another slice caused a fatal GPU error. The engine tries the restart at once and only once,
/// so the hook of the restarted container must wait until the slice is served again. `run` is a command that starts a container
/// with slice 1.
fn one_comes_back(machine: &Machine, engine: &str, run: &str) {
    // With this delay, a simulated server takes as long to start as a server on a real GPU.
    machine.sh(&format!("echo 1500 >{HOST}/mps/start-ms"));
    let id = machine.sh(&run.replace("--rm", "--restart=always --detach")).trim().to_owned();
    let mut before = clients(machine, 1)[0]["pid"].clone();
    for loss in 0..LOSSES {
        if loss % 2 == 0 {
            machine.sh(&format!("kill -KILL {}", control_daemons(machine)[0]));
        } else {
            machine.sh(&format!("{ON_HOST} yunion-mpsctl run 00:06.0-0 -- cuda-client fault || :"));
        }
        before = wait_for(&format!("the next program of the container after loss {loss}"), || {
            let listed = machine.run(&["yunion-mpsctl", "clients", "--json"]);
            let listed: Vec<Value> = serde_json::from_slice(&listed.stdout).ok()?;
            let own = listed.iter().find(|client| client["container_id"] == id.as_str())?;
            (own["pid"] != before).then(|| own["pid"].clone())
        });
    }
    machine.sh(&format!("{engine} rm --force {id}; rm {HOST}/mps/start-ms"));
    clients(machine, 0);
    machine.sh("yunion-mpsctl is-ready --wait 60");
}

fn podman_comes_back(machine: &mut Machine) {
    if with_podman(machine) {
        comes_back(machine, "podman", &typed(PODMAN_CDI, "cuda-client hold 600"));
    }
}

fn podman_binds(machine: &mut Machine) {
    if with_podman(machine) {
        binds(machine, "podman", &typed(PODMAN_CDI, "cuda-client hold 600"));
    }
}

fn podman_binds_legacy(machine: &mut Machine) {
    podman_binds(machine);
    // The machine shares the hierarchies of version 1 with the host. The test removes the control groups that Podman has made,
    // since they would stay on the host.
    machine.sh("rmdir /sys/fs/cgroup/*/machine.slice 2>/dev/null || :");
}

/// Checks that the hook of the CDI spec binds containers of Docker, which starts containers through containerd and its shim.
fn docker_binds(machine: &mut Machine) {
    if !with_podman(machine) {
        return;
    }
    let (socket, file) = ("/run/docker-cdi.sock", "/etc/docker/cdi.json");
    machine.write(
        "/usr/local/bin/docker-cdi",
        &format!("#!/bin/sh\nexec {DOCKER_WITH_CDI}/docker --host unix://{socket} \"$@\"\n"),
    );
    // The machine is a container that forbids keyrings. So `runc` is a short script here, which runs the machine's runc without
    // a keyring.
    machine.write(&format!("{DOCKER_WITH_CDI}/runc"), &RUNTIME.replace("HOST", HOST));
    let runtimes = stops_page(DOCKER_RUNTIMES).trim().strip_prefix('{').unwrap().to_owned();
    machine.write(file, &format!("{}, {runtimes}", DOCKER_FEATURES.strip_suffix('}').unwrap()));
    // The Docker of the machine's distribution is stopped first. Otherwise the new Docker would use the old containerd, which
    // finds the machine's own runc first.
    machine.sh(&format!(
        "systemctl stop docker.socket docker containerd 2>/dev/null || :
        chmod 755 /usr/local/bin/docker-cdi {DOCKER_WITH_CDI}/*
        systemd-run --quiet --unit=docker-cdi --property=Delegate=yes --setenv=PATH={DOCKER_WITH_CDI}:$PATH \
            {DOCKER_WITH_CDI}/dockerd --config-file {file} --host unix://{socket} --data-root /var/lib/docker-cdi \
            --exec-root /run/docker-cdi --pidfile /run/docker-cdi.pid --storage-driver vfs --bridge none --iptables=false \
            --cdi-spec-dir /etc/cdi --cdi-spec-dir /var/run/cdi"
    ));
    wait_for("Docker", || machine.run(&["docker-cdi", "info"]).status.success().then_some(()));
    machine.sh(&format!("tar -C /srv/image -c . | docker-cdi import - {IMAGE}"));
    let run =
        typed(DOCKER_CDI, "cuda-client hold 600").replace("docker run", "docker-cdi run --network none");
    is_a_client_of_slice_1(
        &machine.sh(&format!("{} 2>&1", run.replace("cuda-client hold 600", &format!("sh -c '{SHOW}'")))),
        "/run/yunion-mps",
    );
    let run =
        typed(PODMAN_CDI, "cuda-client hold 600").replace("podman run", "docker-cdi run --network none");
    binds(machine, "docker-cdi", &run);
    comes_back(machine, "docker-cdi", &run);
    stopped(machine, "docker-cdi", &run);
    machine.sh("systemctl stop docker-cdi");
}

/// A container of a user who is not root gets no binding. The container starts, and the service learns the container's slice
/// from the container's environment.
fn rootless(machine: &mut Machine) {
    if !with_podman(machine) {
        return;
    }
    machine.sh(&format!(
        "id alice >/dev/null 2>&1 || useradd --create-home alice
        chmod 1777 /var/tmp; tar -C /srv/image -c . >/srv/image.tar; cd /
        su alice -c 'podman image exists {IMAGE} || podman import --quiet - {IMAGE}' </srv/image.tar"
    ));
    let run = typed(PODMAN_CDI, "cuda-client hold 600").replace("--rm", "--rm --detach");
    let id = machine.sh(&format!("cd /; su alice -c '{run}'")).trim().to_owned();
    let client = &clients(machine, 1)[0];
    assert_eq!((&client["device"], &client["known_by"]), (&"00:06.0-1".into(), &"environment".into()));
    assert_eq!(bound(machine), []);
    machine.sh(&format!("cd /; su alice -c 'podman kill {id}'"));
    clients(machine, 0);
    machine.sh("yunion-mpsctl drain 00:06.0-1");
    let complaint = machine.complained(&["sh", "-c", &format!("cd /; su alice -c '{run}'")]);
    assert!(complaint.contains("00:06.0-1 is drained for new clients"), "{complaint}");
    machine.sh("yunion-mpsctl undrain 00:06.0-1");
}

/// Returns the lines of docs/stops.md from the line `first` to the next line without an indentation.
fn stops_page(first: &str) -> String {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/stops.md")).unwrap();
    let lines = page.lines().skip_while(|line| line.trim() != first);
    let lines = lines.map_while(|line| line.strip_prefix("    "));
    lines.map(|line| format!("{line}\n")).collect()
}

/// The number of rounds of stops. Three containers are stopped in each round.
const STOPS: usize = 17;

/// A command for a container. Its first process passes SIGTERM on to the CUDA program, as the small inits of containers do.
const PASSES_TERM_ON: &str = "sh -c 'trap \"kill -TERM \\$!\" TERM; cuda-client long 600 & wait; wait'";

/// Checks that the client of a bystander's container survives about fifty stops of other containers in the middle of kernels.
/// The stops are by SIGTERM, by SIGKILL and by removal. After a stop with plain runc, the bystander's client must fail, which
/// shows that the stops were dangerous. `run` is a command that starts a container with slice 1.
fn stopped(machine: &Machine, engine: &str, run: &str) {
    let run = run.replace("--rm", "--detach");
    // `podman rm --force` stops a container and waits ten seconds for its end. With `--time 0`, Podman does not wait.
    let remove = format!("{engine} rm --force{}", if engine == "podman" { " --time 0" } else { "" });
    let start = |slice: &str, program: &str| {
        let run = run.replace("00:06.0-1", slice).replace("cuda-client hold 600", program);
        machine.sh(&run).trim().to_owned()
    };
    let neighbour = start("00:06.0-0", "cuda-client long 600");
    let state = || machine.printed(&[engine, "inspect", "--format", "{{.State.Status}}", &neighbour]);
    clients(machine, 1);
    for round in 0..STOPS {
        let [by_term, by_kill, by_removal] = [
            start("00:06.0-1", PASSES_TERM_ON),
            start("00:06.0-2", "cuda-client long 600"),
            start("00:06.0-3", "cuda-client long 600"),
        ];
        clients(machine, 4);
        machine.sh(&format!(
            "{engine} stop --time 20 {by_term} && {engine} kill {by_kill} && {remove} {by_term} {by_kill} {by_removal}"
        ));
        clients(machine, 1);
        assert_eq!(state().trim(), "running", "round {round}");
    }
    // A program that handles SIGTERM can use its GPU until it ends.
    let careful = start("00:06.0-1", "cuda-client train /tmp/checkpoint");
    clients(machine, 2);
    machine.sh(&format!("{engine} stop --time 20 {careful}"));
    let ended = machine.printed(&[engine, "inspect", "--format", "{{.State.ExitCode}}", &careful]);
    assert_eq!(ended.trim(), "0");
    machine.sh(&format!(
        "{engine} cp {careful}:/tmp/checkpoint /var/tmp/checkpoint; grep steps /var/tmp/checkpoint"
    ));
    machine.sh(&format!("{remove} {careful}"));
    assert_eq!(state().trim(), "running");

    // If the service hangs, a container can still be stopped within 25 s. The journal then says that other clients may have
    // lost their work.
    let calm = start("00:06.0-1", "cuda-client hold 600");
    clients(machine, 2);
    machine.sh(&format!(
        "systemctl kill --signal=STOP --kill-whom=main {SERVICE} 2>/dev/null || systemctl kill --signal=STOP --kill-who=main {SERVICE}
        timeout 25 {engine} kill {calm}; ended=$?
        systemctl kill --signal=CONT --kill-whom=main {SERVICE} 2>/dev/null || systemctl kill --signal=CONT --kill-who=main {SERVICE}
        {remove} {calm}; exit $ended"
    ));
    let said = machine.sh("journalctl -t yunion-mps-runc --output=cat");
    assert!(said.contains(&format!("container {calm} gets signal 9")), "{said}");
    clients(machine, 1);

    let plain =
        run.replace("run ", "run --runtime runc ").replace("cuda-client hold 600", "cuda-client long 600");
    let last = machine.sh(&plain).trim().to_owned();
    clients(machine, 2);
    machine.sh(&format!("{remove} {last}"));
    let ended = machine.printed(&[engine, "wait", &neighbour]);
    assert_eq!(ended.trim(), "3", "an error of its kernel");
    machine.sh(&format!("{remove} {neighbour}; yunion-mpsctl is-ready --wait 60"));
}

/// Checks Podman's stops with the runtime of docs/stops.md. Then stops a container with the command of docs/containers.md,
/// which needs no such runtime.
fn podman_stops(machine: &mut Machine) {
    if !with_podman(machine) {
        return;
    }
    let before = machine.sh("cat /etc/containers/containers.conf");
    let engine = stops_page("[engine]");
    let with_ours = before.replace("[engine]\nruntime = \"runc\"\n", &engine);
    assert!(with_ours != before && with_ours.contains("yunion-mps-runc"), "{with_ours}");
    machine.write("/etc/containers/containers.conf", &with_ours);
    stopped(machine, "podman", &typed(PODMAN_CDI, "cuda-client hold 600"));
    machine.write("/etc/containers/containers.conf", &before);

    let start = |slice: &str| {
        let run = typed(PODMAN_CDI, "cuda-client long 600").replace("--rm", "--detach");
        machine.sh(&run.replace("00:06.0-1", slice)).trim().to_owned()
    };
    let (stopped, neighbour) = (start("00:06.0-1"), start("00:06.0-2"));
    clients(machine, 2);
    machine.sh(&PODMAN_STOP.replace("4f1c2d3e5a6b", &stopped[..12]));
    machine.sh(&format!("podman rm {stopped}"));
    assert_eq!(clients(machine, 1)[0]["container_id"], neighbour.as_str());
    machine.sh(&format!("podman rm --force --time 0 {neighbour}"));
    clients(machine, 0);
}

fn docker(machine: &mut Machine) {
    if !with_docker(machine) {
        return;
    }
    is_a_client_of_slice_1(&shown(machine, DOCKER), "/run/yunion-mps");
    let printed = shown(machine, DOCKER_FREE);
    assert!(printed.contains("YUNION_MPS_DEVICE=00:06.0-0\n") && printed.contains(" sms 32 "), "{printed}");
    let run = typed(DOCKER, "cuda-client hold 600").replace("--rm", "--rm --detach");
    let id = machine.sh(&run).trim().to_owned();
    let client = &clients(machine, 1)[0];
    assert_eq!(client["container_id"], id.as_str());
    assert_eq!((&client["device"], &client["known_by"]), (&"00:06.0-1".into(), &"mount".into()));
    assert_eq!(machine.sh(&DOCKER_BIND.replace("4f1c2d3e5a6b", &id)), "00:06.0-1\n");
    assert_eq!(clients(machine, 1)[0]["known_by"], "bound");
    machine.sh(&format!("docker rm --force {id}"));
    clients(machine, 0);
    wait_for("no binding", || bound(machine).is_empty().then_some(()));
}

fn compose(machine: &mut Machine) {
    if !with_docker(machine) {
        return;
    }
    let file = compose_file(&page_text());
    assert!(file.contains("image: IMAGE") && file.contains("command: PROGRAM"), "{file}");
    machine.write("/root/compose/show.sh", SHOW);
    // The test machine has no network for the container.
    let lines = "sh /show.sh\n    network_mode: none\n    volumes: ['./show.sh:/show.sh:ro']";
    let file = file.replace("IMAGE", IMAGE).replace("PROGRAM", lines);
    machine.write("/root/compose/compose.yaml", &file);
    let up = format!("cd /root/compose; {COMPOSE_FILE}; {} --no-color", typed(COMPOSE_UP, ""));
    let printed = machine.sh(&format!("{up} 2>&1"));
    let printed: String = printed
        .lines()
        .map(|line| format!("{}\n", line.split_once("| ").map_or(line, |(_, printed)| printed.trim_start())))
        .collect();
    is_a_client_of_slice_1(&printed, "/run/yunion-mps");
    machine.sh("cd /root/compose; docker-compose down 2>&1");
}
