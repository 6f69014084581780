//! Tests that all ways to get a slice give the same answer at the same moment, to every caller.

use std::collections::BTreeMap;
use std::process::Command;
use std::thread;

use rustix::process::Signal;
use serde_json::Value;

use crate::bindings::{bind, path, with_containers};
use crate::support::client::Client;
use crate::support::container::ContainerGroup;
use crate::support::host::{Host, binaries, signal_pid, succeeded, text};
use crate::support::wait::wait_for;

const SLICE: &str = "00:06.0-1";

/// The callers that ask for a slice. Only root may bind control groups.
const ASKERS: [Asker; 3] = [Asker::Root, Asker::Member, Asker::Container];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asker {
    Root,
    /// A user other than root, in the group that may read the service's state.
    Member,
    /// A program in a control group of its own, as in a container.
    Container,
}

/// A host with the control group of a running container, and with a second control group that the tests try to bind.
struct Scene {
    host: Host,
    /// The first process of the container.
    _program: Client,
    container: ContainerGroup,
    next: ContainerGroup,
}

/// The answers, by caller and door. A door is a method that gives out slices.
type Answers = BTreeMap<String, String>;

/// Calls a D-Bus method. Returns `yes`, or the name and the words of its error.
fn answer(mut gdbus: Command, method: &str, arguments: &[&str]) -> String {
    gdbus.args(["call", "--system", "--dest", "io.yunion.Mps1", "--object-path", "/io/yunion/Mps1/Manager"]);
    let asked =
        gdbus.args(["--method", &format!("io.yunion.Mps1.{method}")]).args(arguments).output().unwrap();
    if asked.status.success() {
        return "yes".to_owned();
    }
    let said = text(&asked);
    said.split("io.yunion.Mps1.Error.").nth(1).unwrap_or_else(|| panic!("{said}")).to_owned()
}

fn is_answer(answer: &str, expected: &str) -> bool {
    answer.split(':').next() == Some(expected)
}

impl Scene {
    fn new(lines: &str, test: &str) -> Option<Self> {
        // The fault must last until the clients that it has hit have ended. A long grace period keeps the service from
        // replacing the server earlier.
        let (host, [container, next]) =
            with_containers(test, &format!("cuda_mps_fault_grace: 3600\n{lines}"))?;
        let program = Client::start(Command::new("sleep").arg("600"));
        container.take(program.id(), "");
        Some(Self { host, _program: program, container, next })
    }

    fn gdbus(&self, asker: Asker) -> Command {
        match asker {
            Asker::Root => self.host.command("gdbus"),
            Asker::Member => self.host.command_as_member("gdbus"),
            Asker::Container => {
                let mut command = self.host.command("sh");
                let enter = "echo $$ >\"$0/cgroup.procs\" && exec gdbus \"$@\"";
                command.args(["-c", enter]).arg(&self.container.directory);
                command
            }
        }
    }

    /// Asks for the slice by each method that gives it out without binding it.
    fn taken(&self, asker: Asker, share: bool) -> Answers {
        let devices = format!("['{SLICE}']");
        let take = |free| {
            let options = format!("{{'share': <{share}>, 'free': <{free}>}}");
            answer(self.gdbus(asker), "Manager.TakeDevices", &[&devices, &options])
        };
        let mut answers = vec![("TakeDevices", take(false)), ("TakeDevices, a free one", take(true))];
        if !share {
            // `GetContainerConfig` has no option `share`.
            let config = answer(self.gdbus(asker), "Manager.GetContainerConfig", &[&devices]);
            answers.push(("GetContainerConfig", config));
        }
        answers.into_iter().map(|(door, answer)| (format!("{asker:?}: {door}"), answer)).collect()
    }

    fn bound(&self, share: bool) -> Answers {
        let (devices, path) = (format!("['{SLICE}']"), path(&self.next));
        let bind = |free| {
            let options = format!("{{'share': <{share}>, 'control_group': <'{path}'>, 'free': <{free}>}}");
            let answer = answer(self.gdbus(Asker::Root), "Control.Bind", &[&devices, "0", &options]);
            if answer == "yes" {
                succeeded(&self.host.mpsctl(&["unbind", "--control-group", &path]));
            }
            answer
        };
        [("Bind", bind(false)), ("Bind, a free one", bind(true))]
            .map(|(door, answer)| (door.to_owned(), answer))
            .into()
    }

    fn answers(&self, share: bool) -> Answers {
        let mut answers: Answers = thread::scope(|scope| {
            let asked = ASKERS.map(|asker| scope.spawn(move || self.taken(asker, share)));
            asked.into_iter().flat_map(|one| one.join().unwrap()).collect()
        });
        answers.extend(self.bound(share));
        answers
    }

    /// Waits until every method gives root the answer `expected`. The container may already have the slice, so its calls must
    /// get the answer `to_container`.
    #[track_caller]
    fn all_answer(&self, expected: &str, to_container: &str) {
        wait_for(expected, || {
            let devices = format!("['{SLICE}']");
            let asked = answer(self.gdbus(Asker::Root), "Manager.GetContainerConfig", &[&devices]);
            is_answer(&asked, expected).then_some(())
        });
        self.answer_at_once(false, expected, to_container);
    }

    #[track_caller]
    fn answer_at_once(&self, share: bool, expected: &str, to_container: &str) {
        for (door, answer) in self.answers(share) {
            let expected = if door.starts_with("Container") { to_container } else { expected };
            assert!(is_answer(&answer, expected), "{door}: {answer} instead of {expected}");
        }
    }

    fn control_daemon(&self) -> Value {
        let status = self.host.json(&["status"]).unwrap();
        let all = status["control_daemons"].as_array().unwrap();
        all.iter().find(|daemon| daemon["id"] == SLICE).unwrap_or(&all[0]).clone()
    }

    fn kill_control_daemon(&self) {
        let pid = self.control_daemon()["pid"].as_u64().unwrap();
        signal_pid(u32::try_from(pid).unwrap(), Signal::KILL);
    }

    fn wait_until_it_is(&self, state: &str) {
        wait_for(state, || (self.control_daemon()["state"] == state).then_some(()));
    }

    fn drained(&self) {
        succeeded(&self.host.mpsctl(&["drain", SLICE]));
        self.all_answer("Drained", "Drained");
        self.answer_at_once(true, "Drained", "Drained");
        succeeded(&self.host.mpsctl(&["undrain", SLICE]));
    }

    fn bound_to_the_container(&self) {
        succeeded(&bind(&self.host, SLICE, &self.container, &["--label", "train-1"]));
        self.all_answer("Taken", "yes");
        self.answer_at_once(true, "yes", "yes");
        let said = text(&self.host.mpsctl(&["env", SLICE]));
        assert!(said.contains("is taken by train-1; "), "{said}");
        succeeded(&self.host.mpsctl(&["unbind", "--control-group", &path(&self.container)]));
    }

    /// While no control daemon can start, `yunion-mpsctl run` and the hook of a container wait for the slice.
    fn without_a_control_daemon(&self) {
        self.host.plant("mps/fault/start-exits", "");
        self.kill_control_daemon();
        self.all_answer("NotServed", "NotServed");
        let mut run = self.host.command(binaries().join("yunion-mpsctl"));
        let waiting = run.args(["run", SLICE, "--", "true"]).spawn().unwrap();
        self.host.clear("mps/fault/start-exits");
        let waited = waiting.wait_with_output().unwrap();
        assert!(waited.status.success(), "{waited:?}");
    }

    fn without_a_server(&self) {
        self.host.plant("mps/fault/server-start-fails", "");
        self.kill_control_daemon();
        self.all_answer("NotServed", "NotServed");
        self.host.clear("mps/fault/server-start-fails");
    }

    /// The server has met a fatal GPU error, and a client that the error has hit has not ended yet.
    fn faulted(&self) {
        let stays = Client::start(&mut self.host.program_of(SLICE, &["hold", "600", "--stay"]));
        self.host.wait_until_listed(stays.id());
        let culprit = self.host.program_of(SLICE, &["fault"]).output().unwrap();
        assert_eq!(culprit.status.code(), Some(4), "{}", text(&culprit));
        self.wait_until_it_is("faulted");
        self.all_answer("NotServed", "NotServed");
        self.wait_until_it_is("faulted");
        stays.end();
    }

    fn needs_a_reset(&self) {
        self.host.meets_xid(0, 48);
        self.all_answer("Failed", "Failed");
        let said = text(&self.host.mpsctl(&["env", SLICE]));
        assert!(said.contains("can't be served") && said.contains("Xid 48"), "{said}");
        self.host.reload();
    }

    fn gpu_is_lost(&self) {
        self.host.plant("gpus/0/lost", "");
        self.host.reload();
        self.all_answer("Failed", "Failed");
        self.host.clear("gpus/0/lost");
    }
}

fn doors_agree(lines: &str, test: &str) {
    let Some(mut scene) = Scene::new(lines, test) else { return };
    scene.all_answer("yes", "yes");
    for happens in [
        Scene::drained,
        Scene::bound_to_the_container,
        Scene::without_a_control_daemon,
        Scene::without_a_server,
        Scene::faulted,
        Scene::needs_a_reset,
        Scene::gpu_is_lost,
    ] {
        happens(&scene);
        scene.all_answer("yes", "yes");
    }
    assert_eq!(scene.host.stop().code(), Some(0));
}

#[test]
fn all_doors_agree_with_one_control_daemon() {
    doors_agree("", "all_doors_agree_with_one_control_daemon");
}

#[test]
fn all_doors_agree_with_a_control_daemon_for_each_gpu() {
    doors_agree("cuda_mps_topology: per_gpu", "all_doors_agree_with_a_control_daemon_for_each_gpu");
}

#[test]
fn all_doors_agree_with_a_control_daemon_for_each_slice() {
    doors_agree("cuda_mps_topology: per_slice", "all_doors_agree_with_a_control_daemon_for_each_slice");
}

/// `env --free` takes the slice with the fewest clients. The service counts the clients without asking the control daemons. So
/// a control daemon of another GPU that does not answer must not prevent the choice.
#[test]
fn a_choice_does_not_fail_for_a_control_daemon_that_does_not_answer() {
    let mut host = Host::new("mixed");
    host.configure("cuda_mps_topology: per_gpu");
    host.start();
    // One GPU of this board is in MIG mode. So the service is degraded.
    let status = host.wait_for_state("degraded");
    let silent = &status["control_daemons"][0];
    signal_pid(u32::try_from(silent["pid"].as_u64().unwrap()).unwrap(), Signal::STOP);
    let chosen = host.mpsctl(&["env", "--free", "h200"]);
    assert!(succeeded(&chosen).contains("export YUNION_MPS_DEVICE=0001:1a:00.0-0\n"), "{chosen:?}");
}
