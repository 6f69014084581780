//! Starts of control daemons: which foreign control daemon the service ends before a start, which GPUs the new control daemon
//! gets, and multi-user mode.

use std::collections::BTreeSet;
use std::pin::pin;

use mps_core::serve::{Failure, GpuReach, StartPlace, Starter, Stranger, WantedUsers, start};
use mps_core::terms::GpuProcess;
use mps_core::{CoreTime, GpuUuid, Permit};

use super::{Setting, SimShell, Story};

/// A host on which the service starts a control daemon, and a record of the service's steps.
struct HostStart {
    shell: SimShell,
    own: Option<Stranger>,
    pipe: Option<Stranger>,
    has_pipe: bool,
    stays: bool,
    has_no_program: bool,
    /// The results of the next attempts to start the control daemon's process, in order.
    come_up: Vec<Result<(), Failure>>,
    spawned: Vec<(Vec<GpuUuid>, bool)>,
    forgotten: usize,
}

impl HostStart {
    fn with_gpus(gpus: &[&str]) -> Self {
        Self {
            shell: Story::with_gpus(gpus).shell(),
            own: None,
            pipe: None,
            has_pipe: false,
            stays: false,
            has_no_program: false,
            come_up: Vec::new(),
            spawned: Vec::new(),
            forgotten: 0,
        }
    }

    fn start(&mut self, gpus: &[&str], users: WantedUsers) -> (Result<bool, Failure>, GpuReach) {
        let wanted = Story::with_gpus(gpus).wanted;
        let mut reach = GpuReach::default();
        let shell = self.shell.clone();
        let started = shell.act(pin!(start(self, &mut reach, &wanted, users)), CoreTime::MAX).unwrap();
        (started, reach)
    }

    fn started(&mut self, gpus: &[&str]) -> Result<bool, Failure> {
        self.start(gpus, MULTIUSER).0
    }

    fn told(&self) -> Vec<String> {
        self.shell.host().reader.words.clone()
    }
}

const MULTIUSER: WantedUsers = WantedUsers { multiuser: true, is_optional: true, without: "no" };

impl Starter for HostStart {
    type Gpus = SimShell;

    fn gpus(&mut self) -> &mut SimShell {
        &mut self.shell
    }

    fn now(&self) -> CoreTime {
        CoreTime::ZERO
    }

    fn find_program(&mut self) -> Result<(), Failure> {
        let missing = || Failure::Waiting("the program is not there".to_owned());
        if self.has_no_program { Err(missing()) } else { Ok(()) }
    }

    async fn stranger(&mut self, place: StartPlace) -> Result<Option<Stranger>, Failure> {
        Ok(if place == StartPlace::Own { self.own.clone() } else { self.pipe.clone() })
    }

    async fn end_stranger(&mut self, place: StartPlace, pid: u32, may_end: Permit) -> Result<bool, Failure> {
        self.shell.host().note(format_args!("end {pid} in {place:?} ({:?})", may_end.cause()));
        Ok(!self.stays)
    }

    fn open_directories(&mut self) -> Result<bool, Failure> {
        Ok(self.has_pipe)
    }

    async fn spawn(&mut self, gpus: &[GpuUuid], multiuser: bool) -> Result<(), Failure> {
        self.spawned.push((gpus.to_vec(), multiuser));
        Ok(())
    }

    async fn comes_up(&mut self, _: &mut GpuReach) -> Result<(), Failure> {
        if self.come_up.is_empty() { Ok(()) } else { self.come_up.remove(0) }
    }

    fn has_ended(&mut self) {
        self.forgotten += 1;
    }
}

fn stranger(pid: Option<u32>, clients: Result<usize, String>) -> Option<Stranger> {
    let (directory, end_it) = ("/pipe".to_owned(), "`quit` ends it".to_owned());
    Some(Stranger { pid, directory, end_it, clients })
}

fn refuses() -> Result<(), Failure> {
    Err(Failure::Ended { text: "it does not know the option".to_owned(), refuses_multiuser: true })
}

#[test]
fn nobody_is_in_the_way() {
    let mut shell = HostStart::with_gpus(&["A", "B"]);
    assert_eq!(shell.started(&["A", "B"]), Ok(true));
    assert_eq!(shell.spawned, [(vec!["A".to_owned(), "B".to_owned()], true)]);
    assert_eq!(shell.shell.host().stage.steps, ["compute-modes", "listens"]);
    let modes =
        shell.shell.host().stage.calls.iter().filter(|(_, call)| call.starts_with("take the mode")).count();
    assert_eq!(modes, 2);
}

#[test]
fn without_the_program_nothing_is_touched() {
    let mut shell = HostStart::with_gpus(&["A"]);
    shell.has_no_program = true;
    assert_eq!(shell.started(&["A"]), Err(Failure::Waiting("the program is not there".to_owned())));
    assert!(shell.shell.host().stage.calls.is_empty());
}

#[test]
fn a_stranger_without_clients_makes_way_in_either_place() {
    for is_own in [true, false] {
        let mut shell = HostStart::with_gpus(&["A"]);
        shell.has_pipe = true;
        *(if is_own { &mut shell.own } else { &mut shell.pipe }) = stranger(Some(7), Ok(0));
        assert_eq!(shell.started(&["A"]), Ok(true));
        let told = "control daemon PID 7 in /pipe was not started by this service and has no client: the \
                    service replaces it";
        assert_eq!(shell.told(), [told]);
        let ended = if is_own { "end 7 in Own (Unused)" } else { "end 7 in Pipe (Unused)" };
        assert_eq!(shell.shell.host().stage.calls[0].1, ended);
    }
}

#[test]
fn the_pipe_directory_is_asked_only_where_it_is_another_one() {
    let mut shell = HostStart::with_gpus(&["A"]);
    shell.pipe = stranger(Some(7), Ok(1));
    assert_eq!(shell.started(&["A"]), Ok(true));
}

#[test]
fn a_stranger_with_clients_is_left_to_them() {
    for (pid, clients, words) in [
        (
            Some(7),
            Ok(1),
            "a control daemon that this service has not started (PID 7) serves 1 client in /pipe; the \
             service replaces it when these clients have ended, or `quit` ends it",
        ),
        (
            Some(7),
            Err("it hangs".to_owned()),
            "a control daemon that this service has not started (PID 7) listens in /pipe: it hangs; `quit` \
             ends it",
        ),
        (
            None,
            Ok(0),
            "a control daemon that this service has not started (an unknown PID) serves 0 clients in /pipe; \
             the service replaces it when these clients have ended, or `quit` ends it",
        ),
    ] {
        let mut shell = HostStart::with_gpus(&["A"]);
        let failure = if clients.is_ok() { Failure::InUse } else { Failure::Waiting };
        shell.own = stranger(pid, clients);
        assert_eq!(shell.started(&["A"]), Err(failure(words.to_owned())));
        assert!(shell.shell.host().stage.calls.is_empty() && shell.spawned.is_empty());
    }
}

#[test]
fn a_stranger_that_does_not_go_is_waited_for() {
    let mut shell = HostStart::with_gpus(&["A"]);
    (shell.own, shell.stays) = (stranger(Some(7), Ok(0)), true);
    let words = "control daemon PID 7 in /pipe was asked to end and has not ended yet";
    assert_eq!(shell.started(&["A"]), Err(Failure::Waiting(words.to_owned())));
    assert!(shell.spawned.is_empty());
}

#[test]
fn a_gpu_that_cannot_be_reached_or_set_is_left_out() {
    let mut shell = HostStart::with_gpus(&["A", "B", "C"]);
    shell.shell.host().stage.lost.insert("B".to_owned(), "it is lost".to_owned());
    shell.shell.host().stage.refuses.insert("C".to_owned(), "NVML says no".to_owned());
    let (started, reach) = shell.start(&["A", "B", "C"], MULTIUSER);
    assert_eq!(started, Ok(true));
    assert_eq!(shell.spawned, [(vec!["A".to_owned()], true)]);
    assert!(reach.is_left_out("B") && reach.is_left_out("C") && !reach.is_left_out("A"));
    let told = [
        "unreachable: GPU 0b:00.0: it is lost",
        "warning: GPU 0c:00.0: the GPU is not served until its compute mode is set: NVML says no; to \
         serve the GPU in its present compute mode, set cuda_mps_set_compute_mode: false (programs can then \
         use the GPU without MPS and without limits)",
    ];
    assert_eq!(shell.told(), told);
}

#[test]
fn without_any_gpu_nothing_is_started() {
    let mut shell = HostStart::with_gpus(&["A"]);
    shell.shell.host().stage.lost.insert("A".to_owned(), "it is lost".to_owned());
    let words = "no GPU of this control daemon can be served: GPU 0a:00.0: it is lost";
    assert_eq!(shell.started(&["A"]), Err(Failure::Waiting(words.to_owned())));
    assert!(shell.spawned.is_empty());
}

#[test]
fn a_driver_that_refuses_multi_user_mode_gets_none_if_that_is_allowed() {
    let mut shell = HostStart::with_gpus(&["A"]);
    shell.come_up = vec![refuses()];
    assert_eq!(shell.started(&["A"]), Ok(false));
    assert_eq!(shell.spawned.iter().map(|(_, multiuser)| *multiuser).collect::<Vec<_>>(), [true, false]);
    assert_eq!(shell.forgotten, 1);
    let words = "the control daemon of this driver has no multi-user mode, so the control daemon serves one \
                 user at a time";
    assert_eq!(shell.told(), [words]);
}

#[test]
fn a_driver_that_refuses_multi_user_mode_is_told_of_where_it_is_needed() {
    let mut shell = HostStart::with_gpus(&["A"]);
    shell.come_up = vec![refuses()];
    let (started, _) = shell.start(&["A"], WantedUsers { is_optional: false, ..MULTIUSER });
    let words = "the control daemon of this driver has no multi-user mode; set cuda_mps_multiuser to no";
    assert_eq!(started, Err(Failure::Waiting(words.to_owned())));
    assert_eq!((shell.spawned.len(), shell.forgotten), (1, 1));
}

#[test]
fn one_that_ends_for_another_reason_is_not_started_again() {
    for multiuser in [true, false] {
        let mut shell = HostStart::with_gpus(&["A"]);
        let text = "it does not know the option".to_owned();
        // If the control daemon was started without the multi-user option, it can't have refused the option. So another program
        // has forged the message about the refusal.
        let ended = Failure::Ended { text, refuses_multiuser: !multiuser };
        shell.come_up = vec![Err(ended.clone())];
        let (started, _) = shell.start(&["A"], WantedUsers { multiuser, ..MULTIUSER });
        assert_eq!((started, shell.spawned.len(), shell.forgotten), (Err(ended), 1, 0));
    }
}

#[test]
fn programs_on_the_gpus_are_seen_before_it_starts() {
    let mut shell = HostStart::with_gpus(&["A", "B"]);
    for (uuid, pid, via_mps) in [("A", 7, false), ("A", 8, true)] {
        shell.shell.host().process(uuid, GpuProcess { pid, memory_mib: None, via_mps });
    }
    let (started, reach) = shell.start(&["A", "B"], MULTIUSER);
    assert_eq!(started, Ok(true));
    // The service must see a process on the GPU twice before it reports a bypass.
    assert!(shell.shell.host().stage.bypasses.values().all(BTreeSet::is_empty));
    let noted = format!("{reach:?}");
    assert!(noted.contains("ProcessId { pid: 7,") && !noted.contains("ProcessId { pid: 8,"), "{noted}");
}

#[test]
fn a_mode_that_can_be_set_at_last_is_set_unless_the_control_daemon_retires() {
    let mut start = HostStart::with_gpus(&["A", "B"]);
    start.shell.host().stage.refuses.insert("B".to_owned(), "NVML says no".to_owned());
    let (_, reach) = start.start(&["A", "B"], MULTIUSER);
    assert!(reach.is_left_out("B"));
    for (retiring, times) in [(false, 1), (true, 0)] {
        let mut story = Story::with_gpus(&["A", "B"]);
        story.memory.lock().unwrap().reach = reach.clone();
        story.wanted.retiring = retiring;
        {
            let mut host = story.host();
            host.defaults = Setting { percentage: 50, mib: [1024, 0, 0] };
            host.server_comes(9);
            host.client(1, 9, "A");
            host.stage.nvml.insert("A".to_owned(), Ok([1].into()));
            host.process("A", GpuProcess { pid: 1, memory_mib: None, via_mps: true });
        }
        story.served(31_000);
        assert!(story.calls("read GPUs") > 0, "it was checked");
        assert_eq!(story.calls("take the mode of B"), times, "retiring: {retiring}");
    }
}
