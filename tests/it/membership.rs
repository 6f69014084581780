//! Tests that the service learns a client's slice from the mounts that a container runtime has made. The client's environment
//! does not count in a container.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::support::client::{Client, describe, own_user};
use crate::support::container::{ContainerGroup, MOUNT_SLICE, NO_CONTAINER_GROUP};
use crate::support::host::{Host, start_time, text};
use crate::support::skip::{root_or_skip, skip};
use crate::support::wait::wait_for;

/// The slice of the container, the slice that its environment claims, and the slice of another client.
const OWN: &str = "00:06.0-1";
const CLAIMED: &str = "00:06.0-3";
const NEIGHBOURS: &str = "00:06.0-2";

const WORK: &str = "exec cuda-client long 600";

struct Scene {
    host: Host,
    neighbour: Client,
}

/// The first process of a container, and the PID of the CUDA client in the container.
struct Tenant {
    program: Child,
    pid: u32,
}

impl Drop for Tenant {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

impl Scene {
    fn new() -> Self {
        Self::of(Host::serving("h200"))
    }

    fn of(host: Host) -> Self {
        let neighbour = Client::start(&mut host.program_of(NEIGHBOURS, &["hold", "600"]));
        wait_for("the neighbour", || host.listed(neighbour.id()));
        Self { host, neighbour }
    }

    fn directory(&self, slice: &str) -> PathBuf {
        self.host.path("mps/pipe/slices").join(slice.replace(':', "_"))
    }

    /// Runs a script in a container that has the directory `mounted`. The script's environment claims the slice `claim`.
    fn start(&self, mut unshare: Command, mounted: PathBuf, script: &str, claim: Option<&str>) -> Tenant {
        let before: BTreeSet<u32> = pids(&self.host);
        let container = self.host.container_of(OWN);
        for (name, value) in container["environment"].as_object().unwrap() {
            unshare.env(name, value.as_str().unwrap());
        }
        match claim {
            Some(claim) => unshare.env("YUNION_MPS_DEVICE", claim),
            None => unshare.env_remove("YUNION_MPS_DEVICE"),
        };
        unshare
            .args(["sh", "-c", &format!("{MOUNT_SLICE}mkdir /run/jail\n{script}")])
            .arg(mounted)
            .arg(self.host.path(""));
        let mut program = unshare.stdout(Stdio::null()).spawn().unwrap();
        let pid = wait_for("the client", || {
            assert!(program.try_wait().unwrap().is_none(), "it has ended");
            pids(&self.host).difference(&before).next().copied()
        });
        Tenant { program, pid }
    }

    fn contained(&self, script: &str, claim: Option<&str>) -> Tenant {
        let mut unshare = self.host.command("unshare");
        unshare.arg("--mount");
        self.start(unshare, self.directory(OWN), script, claim)
    }

    fn is_known(&self, pid: u32, slice: Option<&str>, known_by: Option<&str>) {
        let listed = self.host.listed(pid).unwrap();
        assert_eq!((listed["device"].as_str(), listed["known_by"].as_str()), (slice, known_by), "{listed:#}");
    }

    fn terminate(&self, whom: &[&str]) -> String {
        let output = self.host.mpsctl(&[&["terminate"], whom].concat());
        assert!(output.status.success(), "{}", text(&output));
        String::from_utf8(output.stdout).unwrap()
    }

    fn end(mut self) {
        assert!(self.neighbour.try_wait().unwrap().is_none());
        assert!(pids(&self.host).contains(&self.neighbour.id()));
        drop(self.neighbour);
        assert_eq!(self.host.stop().code(), Some(0));
    }
}

fn pids(host: &Host) -> BTreeSet<u32> {
    host.clients().iter().map(|client| client["pid"].as_u64().unwrap().try_into().unwrap()).collect()
}

/// A container claims another slice in its environment, or none. The list of clients, `terminate` and all messages still show
/// the slice of its mount.
#[test]
fn a_forged_environment_changes_nothing_in_a_container() {
    if !root_or_skip("a_forged_environment_changes_nothing_in_a_container") {
        return;
    }
    let scene = Scene::new();
    let user = own_user();
    let slice = format!(", slice {OWN}");
    for claim in [Some(CLAIMED), Some(NEIGHBOURS), Some("00:06.0"), None] {
        let mut tenant = scene.contained(WORK, claim);
        scene.is_known(tenant.pid, Some(OWN), Some("mount"));
        assert_eq!(
            scene.terminate(&["--device", CLAIMED]),
            format!("No process uses {CLAIMED} any more.\n"),
            "{claim:?}"
        );
        scene.is_known(tenant.pid, Some(OWN), Some("mount"));
        let pid = tenant.pid.to_string();
        let whom = if claim == Some(NEIGHBOURS) { vec![pid.as_str()] } else { vec!["--device", OWN] };
        let said = scene.terminate(&whom);
        let words = describe(&[(tenant.pid, &user, &slice)]);
        assert!(said.ends_with(&format!("Ended the GPU work of {words}.\n")), "{said}");
        wait_for("its end", || tenant.program.try_wait().unwrap());
    }
    scene.is_known(scene.neighbour.id(), Some(NEIGHBOURS), Some("environment"));
    scene.end();
}

/// The unit gives the service its own mount namespace. The service must not take programs in the host's mount namespace for
/// programs in a container.
#[test]
fn the_services_own_namespace_is_not_the_hosts() {
    if !root_or_skip("the_services_own_namespace_is_not_the_hosts") {
        return;
    }
    let mut host = Host::new("h200");
    host.start_in_its_own_namespace();
    host.wait_for_state("ready");
    let namespace = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/mnt")).unwrap();
    assert_ne!(namespace(host.pid()), namespace(std::process::id()));
    let scene = Scene::of(host);
    scene.is_known(scene.neighbour.id(), Some(NEIGHBOURS), Some("environment"));
    assert_eq!(scene.host.listed(scene.neighbour.id()).unwrap()["may_command"], "all");
    let tenant = scene.contained("exec cuda-client hold 600", Some(CLAIMED));
    scene.is_known(tenant.pid, Some(OWN), Some("mount"));
    drop(tenant);
    let sleeper = on_a_gpu(&scene.host, in_jail(&scene.directory(OWN)));
    scene.is_known(sleeper.id(), Some(OWN), Some("mount"));
    assert_eq!(scene.host.listed(sleeper.id()).unwrap()["may_command"], "neighbours");
    drop(sleeper);
    scene.end();
}

/// In a user namespace, any user can mount any directory that the user sees. So a mount that was made there does not prove that
/// the process has the slice.
#[test]
fn mounts_of_a_users_own_namespace_prove_nothing() {
    let name = "mounts_of_a_users_own_namespace_prove_nothing";
    if !root_or_skip(name) {
        return;
    }
    let scene = Scene::new();
    let mut unshare = scene.host.command_as_member("unshare");
    unshare.args(["--user", "--map-root-user", "--mount"]);
    let tenant =
        scene.start(unshare, scene.directory(NEIGHBOURS), "exec cuda-client hold 600", Some(CLAIMED));
    scene.is_known(tenant.pid, Some(CLAIMED), Some("environment"));
    match ContainerGroup::new() {
        Some(container) => {
            container.take(tenant.pid, "init");
            // The process also sees the whole pipe directory, and could have mounted any slice's directory itself. So the claim
            // counts instead of the mount.
            scene.is_known(tenant.pid, Some(CLAIMED), Some("environment"));
            drop(tenant);
        }
        None => skip(name, NO_CONTAINER_GROUP),
    }
    scene.end();
}

/// In a container with the whole pipe directory, a tenant makes a user namespace, mounts another tenant's slice in it, and
/// unmounts all else. The container's first process does not have this mount. So the mount does not prove that the container
/// has the slice.
#[test]
fn a_mount_that_the_first_process_does_not_have_proves_nothing() {
    let name = "a_mount_that_the_first_process_does_not_have_proves_nothing";
    if !root_or_skip(name) {
        return;
    }
    let Some(container) = ContainerGroup::new() else { return skip(name, NO_CONTAINER_GROUP) };
    let scene = Scene::new();
    let mut first = Command::new("sleep");
    let mut first = Client::start(first.arg("600"));
    container.take(first.id(), "init");
    // The service takes the oldest process of a container for its first process. Start times have a resolution of a clock tick,
    // so the next process must start in a later tick.
    let clock = start_time(first.id());
    wait_for("another tick", || {
        let mut probe = Client::start(Command::new("sleep").arg("600"));
        let later = start_time(probe.id()) > clock;
        let _ = probe.kill();
        later.then_some(())
    });
    let in_a_namespace_of_its_own = || {
        let mut unshare = Command::new("unshare");
        unshare.args(["--user", "--map-root-user", "--mount", "sh", "-c"]);
        unshare.arg(jail(scene.directory(NEIGHBOURS).to_str().unwrap())).env("YUNION_MPS_DEVICE", CLAIMED);
        unshare
    };
    let tenant = on_a_gpu(&scene.host, in_a_namespace_of_its_own());
    container.take(tenant.id(), "init");
    let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", tenant.id())).unwrap();
    assert!(mounts.contains("slices/") && !mounts.contains(" / / "), "then this proves nothing: {mounts}");
    scene.is_known(tenant.id(), Some(CLAIMED), Some("environment"));
    // Without the first process, the tenant's process is the oldest of the container. So the service believes that the
    // container runtime has made the mount of this process.
    let _ = first.kill();
    let _ = first.wait();
    scene.is_known(tenant.id(), Some(NEIGHBOURS), Some("mount"));
    drop(tenant);
    scene.end();
}

/// A reload changes the pipe directory. A running container still has its mount of the former pipe directory, where its control
/// daemon still listens.
#[test]
fn a_container_keeps_its_slice_when_the_pipe_directory_changes() {
    if !root_or_skip("a_container_keeps_its_slice_when_the_pipe_directory_changes") {
        return;
    }
    let scene = Scene::new();
    let mut tenant = scene.contained(WORK, None);
    scene.is_known(tenant.pid, Some(OWN), Some("mount"));
    scene.host.configure(&format!("cuda_mps_pipe_directory: {}", scene.host.path("mps/other").display()));
    let reloaded = scene.host.call("Control.Reload");
    assert!(reloaded.status.success(), "{}", text(&reloaded));
    scene.is_known(tenant.pid, Some(OWN), Some("mount"));
    let in_use =
        || scene.host.list().into_iter().find(|device| device["addr"] == OWN).unwrap()["clients"].clone();
    wait_for("the count", || (in_use() == 1).then_some(()));
    let said = scene.terminate(&["--device", OWN]);
    let words = describe(&[(tenant.pid, &own_user(), &format!(", slice {OWN}"))]);
    assert!(said.ends_with(&format!("Ended the GPU work of {words}.\n")), "{said}");
    wait_for("its end", || tenant.program.try_wait().unwrap());
    assert!(scene.host.listed(scene.neighbour.id()).is_some());
    drop(tenant);
    scene.end();
}

/// A program that has called chroot may see no mount of a slice. Its parent, a shell in the same container, still does.
#[test]
fn a_program_that_calls_chroot_is_known_by_its_parent() {
    if !root_or_skip("a_program_that_calls_chroot_is_known_by_its_parent") {
        return;
    }
    let scene = Scene::new();
    let script = format!(
        "mount --bind / /run/jail\n\
         mkdir -p \"/run/jail$1\"\n\
         mount --rbind \"$1\" \"/run/jail$1\"\n\
         mount --rbind /proc /run/jail/proc\n\
         export CUDA_MPS_PIPE_DIRECTORY={}\n\
         chroot /run/jail cuda-client long 600 &\n\
         wait",
        scene.directory(OWN).display()
    );
    let tenant = scene.contained(&script, Some(CLAIMED));
    assert_ne!(tenant.pid, tenant.program.id(), "the shell is to be the parent");
    let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", tenant.pid)).unwrap();
    assert!(!mounts.contains("yunion-mps"), "then this proves nothing: {mounts}");
    scene.is_known(tenant.pid, Some(OWN), Some("mount"));
    scene.terminate(&["--device", OWN]);
    wait_for("its end", || (!pids(&scene.host).contains(&tenant.pid)).then_some(()));
    drop(tenant);
    scene.end();
}

/// A mount of the whole pipe directory does not tell the slice of a container. So the claim in its environment counts.
#[test]
fn with_the_whole_pipe_directory_the_environment_counts() {
    if !root_or_skip("with_the_whole_pipe_directory_the_environment_counts") {
        return;
    }
    let scene = Scene::new();
    let mut unshare = scene.host.command("unshare");
    unshare.arg("--mount");
    let tenant = scene.start(unshare, scene.host.path("mps/pipe"), WORK, Some(CLAIMED));
    scene.is_known(tenant.pid, Some(CLAIMED), Some("environment"));
    scene.terminate(&["--device", CLAIMED]);
    wait_for("its end", || (!pids(&scene.host).contains(&tenant.pid)).then_some(()));
    drop(tenant);
    scene.end();
}

/// A script that calls chroot into a directory with only the host's programs and the directory `directory`.
fn jail(directory: &str) -> String {
    format!(
        "set -e\n\
         mount --make-rprivate /\n\
         mount --bind {directory} /mnt\n\
         mount -t tmpfs tmpfs /run\n\
         mkdir -p /run/jail/usr /run/jail/directory\n\
         mount --bind /usr /run/jail/usr\n\
         mount --bind /mnt /run/jail/directory\n\
         for name in bin lib lib64; do ln -s usr/$name /run/jail/$name; done\n\
         exec chroot /run/jail sleep 600"
    )
}

/// Starts a program and adds it to the simulated driver's list of processes, as if it had used the GPU before its chroot.
fn on_a_gpu(host: &Host, mut program: Command) -> Client {
    let program = Client::start(&mut program);
    let pid = program.id();
    wait_for("the other root", || {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap();
        (name == "sleep\n").then_some(())
    });
    let entry = format!("compute 580 {}", start_time(pid));
    fs::write(host.path(&format!("gpus/0/processes/{pid}")), entry).unwrap();
    wait_for("the process in the list", || host.listed(pid));
    program
}

fn in_jail(directory: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", &jail(directory.to_str().unwrap())]);
    command
}

/// The commands that a control daemon accepts from a process depend on the user of the process and on the directories that it
/// sees. `may_command` and doctor show the result.
#[test]
fn who_can_command_is_said() {
    if !root_or_skip("who_can_command_is_said") {
        return;
    }
    let scene = Scene::new();
    let host = &scene.host;
    let mut as_nobody = Command::new("setpriv");
    as_nobody.args(["--reuid=65534", "--regid=65534", "--clear-groups", "sleep", "600"]);
    let mut nobody_with_all = Command::new("unshare");
    nobody_with_all.args(["--mount", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sleep"]);
    nobody_with_all.arg("600");
    let mut root_with_all = Command::new("unshare");
    root_with_all.args(["--mount", "sleep", "600"]);
    for (program, expected, finding) in [
        (in_jail(&scene.directory(OWN)), "neighbours", "clients-command-neighbours"),
        (in_jail(&host.path("mps/pipe/slices")), "neighbours", "clients-command-neighbours"),
        (in_jail(&host.path("mps/pipe")), "neighbours", "clients-command-neighbours"),
        (in_jail(&host.path("mps/pipe.private")), "all", "clients-command-all"),
        (in_jail(&host.path("mps")), "all", "clients-command-all"),
        (root_with_all, "all", "clients-command-all"),
        (as_nobody, "nothing", ""),
        (nobody_with_all, "nothing", ""),
    ] {
        let said = format!("{program:?}");
        let program = on_a_gpu(host, program);
        assert_eq!(host.listed(program.id()).unwrap()["may_command"], expected, "{said}");
        let output = host.mpsctl(&["doctor", "--json"]);
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        let commands = found["findings"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|one| one["name"].as_str().unwrap().starts_with("clients-command"));
        let names: Vec<&str> = commands.clone().map(|one| one["name"].as_str().unwrap()).collect();
        assert_eq!(names.concat(), finding, "{said}");
        let who = format!("{} (", program.id());
        assert!(commands.clone().all(|one| one["found"].as_str().unwrap().contains(&who)), "{found:#}");
    }
    // On the host, root can command every control daemon.
    assert_eq!(host.listed(scene.neighbour.id()).unwrap()["may_command"], "all");
    scene.end();
}

/// A process that sees no directory of the service has come to the GPU in an unknown way. So its claim does not count.
#[test]
fn a_claim_from_elsewhere_counts_for_nothing() {
    if !root_or_skip("a_claim_from_elsewhere_counts_for_nothing") {
        return;
    }
    let scene = Scene::new();
    let mut program = in_jail("/usr".as_ref());
    program.env("YUNION_MPS_DEVICE", NEIGHBOURS);
    let program = on_a_gpu(&scene.host, program);
    scene.is_known(program.id(), None, None);
    drop(program);
    scene.end();
}
