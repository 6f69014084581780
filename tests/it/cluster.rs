//! Tests the parts of `make cluster` that need no program of Kubernetes. `make cluster` itself tests the service on a real
//! Kubernetes cluster.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::support::host::{binaries, succeeded, text};
use crate::support::node::messages;

/// The directory of the systemd units, below the directory with the files of the cluster's machine.
const UNITS: &str = "etc/systemd/system";

/// The programs that the directory in the variable `KUBERNETES` must contain.
const PROGRAMS: [&str; 13] = [
    "bridge",
    "containerd",
    "containerd-shim-runc-v2",
    "ctr",
    "etcd",
    "host-local",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "kubelet",
    "loopback",
    "runc",
];

fn cluster(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kubernetes/cluster").join(path)
}

fn python(script: &Path) -> Command {
    let mut python = Command::new("/usr/bin/python3");
    python.arg("-B").arg(script);
    python
}

fn program(folder: &Path, name: &str, mode: u32) {
    let path = folder.join(name);
    fs::write(&path, "#!/bin/sh\n").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Returns the messages of `run.py --check` about missing programs and packages. Messages about root and openssl do not count,
/// since they depend on the machine.
fn missing(programs: Option<&Path>, packages: &Path) -> Vec<String> {
    let mut check = python(&cluster("run.py"));
    check.arg("--check").env_remove("KUBERNETES").env("PACKAGES", packages);
    if let Some(programs) = programs {
        check.env("KUBERNETES", programs);
    }
    let said = text(&check.output().unwrap());
    let lines = said.lines().filter(|line| !line.contains("only root") && !line.contains("openssl"));
    lines.map(str::to_owned).collect()
}

#[test]
fn exactly_the_missing_programs_are_named_with_their_origins() {
    let directory = tempfile::tempdir().unwrap();
    let [programs, packages] = ["programs", "packages"].map(|name| directory.path().join(name));
    fs::create_dir(&programs).unwrap();
    fs::create_dir(&packages).unwrap();
    for package in ["yunion-mps-daemon_1.0.0_amd64.deb", "yunion-mps-device-plugin_1.0.0_amd64.deb"] {
        fs::write(packages.join(package), "").unwrap();
    }
    let lines = missing(None, &packages);
    let [line] = &lines[..] else { panic!("{lines:?}") };
    assert!(line.contains("make cluster KUBERNETES=DIRECTORY"), "{line}");
    for name in PROGRAMS {
        assert!(line.contains(name), "{name}: {line}");
        program(&programs, name, 0o755);
    }
    assert_eq!(missing(Some(&programs), &packages), Vec::<String>::new());

    fs::remove_file(programs.join("kube-scheduler")).unwrap();
    fs::remove_file(programs.join("kubectl")).unwrap();
    // A file without the permission to execute counts as a missing program.
    program(&programs, "runc", 0o644);
    fs::remove_file(packages.join("yunion-mps-device-plugin_1.0.0_amd64.deb")).unwrap();
    let (programs_shown, packages_shown) = (programs.display(), packages.display());
    let expected = [
        format!(
            "cluster: {programs_shown} has no program kube-scheduler, kubectl: they are in the server binaries of a release of Kubernetes"
        ),
        format!("cluster: {programs_shown} has no program runc: they are in a release of runc"),
        format!("cluster: {packages_shown} has not exactly one yunion-mps-device-plugin_*.deb: make deb"),
    ];
    assert_eq!(missing(Some(&programs), &packages), expected);
}

#[test]
fn make_cluster_without_the_programs_says_first_what_it_wants() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut make = Command::new("make");
    make.args(["--no-print-directory", "cluster"])
        .current_dir(root)
        .env_remove("KUBERNETES")
        .env_remove("MAKEFLAGS");
    let ended = make.output().unwrap();
    assert!(!ended.status.success(), "{}", text(&ended));
    let said = text(&ended);
    let lines: Vec<&str> = said.lines().take(2).collect();
    assert_eq!(lines[0], "tests/kubernetes/cluster/run.py --check");
    assert!(
        lines[1].starts_with("cluster: KUBERNETES names no folder: make cluster KUBERNETES=DIRECTORY"),
        "{said}"
    );
    assert!(!said.contains("scripts/deps.sh"), "{said}");
}

#[test]
fn a_wrong_name_of_a_trial_is_answered_with_all_of_them() {
    let refused = python(&cluster("run.py")).arg("drain").output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    let said = text(&refused);
    let all =
        "no trial drain; there are basic, drains, force, kills, restarts, security, shapes, updates, reboot";
    assert!(said.contains(all), "{said}");
}

fn dry_run() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    succeeded(&python(&cluster("run.py")).arg("--dry-run").arg(folder.path()).output().unwrap());
    folder
}

fn complaints(units: &Path, names: &[String]) -> Vec<String> {
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--man=no"]).args(names.iter().map(|name| units.join(name)));
    let said = text(&verify.output().unwrap());
    // systemd-analyze also complains about units of the host that runs the test. These complaints do not count.
    let own = |line: &&str| names.iter().any(|name| line.contains(name.as_str()));
    said.lines().filter(own).map(str::to_owned).collect()
}

#[test]
fn systemd_has_no_complaint_about_the_units_of_the_machine() {
    let (files, programs) = (dry_run(), tempfile::tempdir().unwrap());
    for name in PROGRAMS {
        program(programs.path(), name, 0o755);
    }
    let scripts = files.path().join("usr/local/sbin");
    let (units, mut names) = (files.path().join(UNITS), Vec::new());
    for entry in fs::read_dir(&units).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            let unit = fs::read_to_string(&path).unwrap();
            let unit = unit.replace("=/opt/kubernetes/", &format!("={}/", programs.path().display()));
            fs::write(&path, unit.replace("=/usr/local/sbin/", &format!("={}/", scripts.display()))).unwrap();
            names.push(path.file_name().unwrap().to_str().unwrap().to_owned());
        }
    }
    names.sort();
    let expected = [
        "containerd.service",
        "etcd.service",
        "kube-apiserver.service",
        "kube-controller-manager.service",
        "kube-scheduler.service",
        "kubelet.service",
        "node-prepare.service",
        "nvidia-cdi-refresh.service",
    ];
    assert_eq!(names, expected);
    assert_eq!(complaints(&units, &names), Vec::<String>::new());
    let kubelet = fs::read_to_string(units.join("kubelet.service")).unwrap();
    fs::write(units.join("kubelet.service"), kubelet.replace("Restart=", "Restrat=")).unwrap();
    let found = complaints(&units, &names);
    assert!(found.iter().any(|line| line.contains("Restrat")), "{found:?}");
}

/// A Python program that reads each configuration file with a parser of its language. It prints the values in which these files
/// must agree.
const READ: &str = r#"
import json, pathlib, sys, tomllib, yaml
etc = pathlib.Path(sys.argv[1], "etc")
kubelet = yaml.safe_load((etc / "kubernetes/kubelet.yaml").read_text())
containerd = tomllib.loads((etc / "containerd/config.toml").read_text())
network = json.loads((etc / "cni/net.d/10-bridge.conflist").read_text())
tokens = dict(line.split(",")[:2] for line in (etc / "kubernetes/tokens.csv").read_text().splitlines())
users = {}
for path in etc.glob("kubernetes/*.conf"):
    conf = yaml.safe_load(path.read_text()) if path.name != "resolv.conf" else None
    if conf:
        users[path.stem] = tokens[conf["users"][0]["user"]["token"]]
runtimes = containerd["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]["runtimes"]
print(kubelet["kind"], containerd["version"], [one["type"] for one in network["plugins"]])
print({name: one["options"]["BinaryName"] for name, one in sorted(runtimes.items())})
print(sorted(users.items()))
"#;

#[test]
fn the_configuration_of_the_machine_is_read_by_parsers_of_other_makes() {
    let files = dry_run();
    let read = Command::new("/usr/bin/python3").args(["-c", READ]).arg(files.path()).output().unwrap();
    assert_eq!(
        succeeded(&read),
        "KubeletConfiguration 3 ['bridge']\n\
         {'runc': '/opt/kubernetes/runc', 'yunion-mps': '/usr/bin/yunion-mps-runc'}\n\
         [('admin', 'admin'), ('controller-manager', 'system:kube-controller-manager'), \
         ('kubelet', 'system:node:gpu1'), ('scheduler', 'system:kube-scheduler')]\n"
    );
    // One trial of the cluster, a rolling update, uses the RuntimeClass in this file.
    let class = fs::read_to_string(files.path().join("opt/cluster/manifests/runtime-class.yaml")).unwrap();
    assert!(class.contains("\nhandler: yunion-mps\n"), "{class}");
    assert_eq!(fs::read_link(files.path().join("opt/cni/bin")).unwrap(), Path::new("/opt/kubernetes"));
}

/// Runs the trials of `make cluster` on a cluster in memory. The trials must succeed on a correct cluster and find each defect
/// of a wrong one.
#[test]
fn the_trials_hold_on_a_cluster_as_it_has_to_be_and_find_its_defects() {
    succeeded(&python(&cluster("test_journey.py")).output().unwrap());
}

#[test]
fn the_trials_create_objects_of_kubernetes() {
    let test = cluster("test_journey.py");
    let folder = tempfile::tempdir().unwrap();
    let objects = folder.path().join("objects.yaml");
    fs::write(&objects, succeeded(&python(&test).arg("objects").output().unwrap())).unwrap();
    let manifests = cluster("../manifests.py");
    let kinds = succeeded(&python(&manifests).arg(messages()).arg(&objects).output().unwrap());
    let kinds: Vec<&str> = kinds.lines().collect();
    let expected = "Pod Pod Pod Pod Pod Deployment Job Namespace ResourceQuota Deployment";
    assert_eq!(kinds.join(" "), expected);
}

/// The scripts that run only on the cluster's machine are checked for syntax errors.
#[test]
fn the_scripts_of_the_machine_are_well_formed() {
    let shell = cluster("root/usr/local/sbin/node-prepare");
    succeeded(&Command::new("sh").arg("-n").arg(shell).output().unwrap());
    let compile = "import sys; [compile(open(one).read(), one, 'exec') for one in sys.argv[1:]]";
    let found = Command::new("find").arg(cluster("")).args(["-name", "*.py"]).output().unwrap();
    let mut python = Command::new("/usr/bin/python3");
    python.args(["-c", compile]).args(succeeded(&found).lines());
    python.arg(cluster("root/usr/local/sbin/nvidia-cdi-refresh"));
    succeeded(&python.output().unwrap());
}

fn tar(words: &[&str]) -> Output {
    Command::new("tar").args(words).output().unwrap()
}

#[test]
fn the_image_of_the_pods_has_a_client_with_its_libraries() {
    let folder = tempfile::tempdir().unwrap();
    let image = folder.path().join("image.tar");
    let mut make = python(&cluster("../image.py"));
    make.arg("docker.io/library/cuda:1").arg(&image).arg(binaries().join("cuda-client"));
    succeeded(&make.output().unwrap());
    let unpacked = folder.path().to_str().unwrap();
    succeeded(&tar(&["-C", unpacked, "-xf", image.to_str().unwrap()]));
    let layer = succeeded(&tar(&["-tf", folder.path().join("layer.tar").to_str().unwrap()]));
    for name in ["bin/sh", "bin/true", "bin/cuda-client"] {
        assert!(layer.lines().any(|line| line == name), "{name}: {layer}");
    }
    assert!(layer.contains("/libc.so.6\n") && layer.contains("/ld-linux"), "{layer}");
}
