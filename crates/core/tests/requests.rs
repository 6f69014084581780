//! Requests to end GPU work: which clients a request means if several containers match, or if the slices of a client are not
//! known. `histories.rs` tests combinations with failures.

// clippy.toml allows calls such as `unwrap` only in functions with `#[test]`. Other functions of this file make such calls too.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use core_world::story::{SERVER, SimOwner, SliceKnownBy, Story, slice_of};
use mps_core::tenants::{Target, TerminationError};
use mps_core::terms::SliceId;

/// A client of the story's only control daemon, on the first GPU.
#[derive(Clone, Default)]
struct Process {
    slice: Option<(SliceId, SliceKnownBy)>,
    users: Vec<u32>,
    /// The ids of the containers in which the client runs. The bool is true if the host's own container runtime has made the
    /// container.
    containers: Vec<(&'static str, bool)>,
}

type Answer = (Vec<String>, Result<(), TerminationError<SimOwner>>);

fn ask(story: &Story, target: Target) -> Answer {
    let (had_work, answer) = story.ends(target);
    (had_work.iter().map(ToString::to_string).collect(), answer)
}

fn host_of(gpus: &[&str], processes: &[(u32, Process)]) -> Story {
    let story = Story::with_gpus(gpus);
    let mut host = story.host();
    host.server_comes(SERVER);
    for (pid, process) in processes {
        host.client(*pid, SERVER, "0a:00.0");
        let tenant = host.tenant(*pid);
        tenant.slice_known_by = SliceKnownBy::Nothing;
        if let Some((slice, known_by)) = process.slice {
            (tenant.slice, tenant.slice_known_by) = (slice, known_by);
        }
        tenant.users.clone_from(&process.users);
        let container = |(id, is_the_hosts): &(&str, bool)| ((*id).to_owned(), *is_the_hosts);
        tenant.containers = process.containers.iter().map(container).collect();
    }
    drop(host);
    story
}

fn host(processes: &[(u32, Process)]) -> Story {
    host_of(&["0a:00.0"], processes)
}

fn contained(containers: &[(&'static str, bool)]) -> Process {
    Process { containers: containers.to_vec(), ..Process::default() }
}

fn container(id: &str) -> Target {
    Target::Container(id.to_owned())
}

#[test]
fn the_beginning_of_an_id_means_one_container() {
    let processes =
        [(1, contained(&[("abc1", true)])), (2, contained(&[("abc2", true)])), (3, contained(&[]))];
    let there = host(&processes);
    let found = vec!["abc1".to_owned(), "abc2".to_owned()];
    let several = TerminationError::SeveralContainers { id: "abc".to_owned(), found };
    assert_eq!(ask(&there, container("abc")), (Vec::new(), Err(several)));
    assert_eq!(there.calls("end the work"), 0);
    assert_eq!(ask(&there, container("abc2")), (vec!["PID 2".to_owned()], Ok(())));
    assert_eq!(ask(&there, container("b")), (Vec::new(), Ok(())), "nobody is in such a container");
    let there = host(&processes);
    assert_eq!(
        (ask(&there, container("b")).1, there.host().now),
        (Ok(()), Duration::ZERO),
        "one look is enough"
    );
}

#[test]
fn a_container_of_the_hosts_comes_before_one_that_a_user_has_named() {
    let both = [(1, contained(&[("abc1", true)])), (2, contained(&[("abc2", false), ("own", true)]))];
    assert_eq!(ask(&host(&both), container("abc")), (vec!["PID 1".to_owned()], Ok(())));
    let only_named = host(&both[1..]);
    assert_eq!(ask(&only_named, container("abc")), (vec!["PID 2".to_owned()], Ok(())));
}

#[test]
fn a_client_without_a_known_slice_is_told_after_the_work_of_the_others() {
    let known_by = |by, slice| Process { slice: Some((slice, by)), ..Process::default() };
    let (claims, mounted) = (SliceKnownBy::Environment, SliceKnownBy::Mount);
    let processes = [
        (1, known_by(mounted, slice_of("0a:00.0", 1))),
        (2, known_by(mounted, slice_of("0a:00.0", 2))),
        (3, Process::default()),
        (4, known_by(claims, slice_of("0b:00.0", 1))),
        (5, known_by(mounted, slice_of("0b:00.0", 1))),
    ];
    let there = host(&processes);
    let (had_work, answer) = ask(&there, Target::Slices(vec![slice_of("0a:00.0", 1)]));
    assert_eq!(had_work, ["PID 1"]);
    let unplaced =
        TerminationError::Unplaced(vec!["PID 3 (program)".to_owned(), "PID 4 (program)".to_owned()]);
    assert_eq!(answer, Err(unplaced));
    let text = answer.unwrap_err().to_string();
    assert!(
        text.contains(
            "their GPU work goes on: PID 3 (program); PID 4 (program); neither a mounted directory"
        ),
        "{text}"
    );
    assert!(
        there.host().now >= Duration::from_secs(1),
        "one that is just ending has no environment any more"
    );
    // No client has this slice of the other GPU.
    assert_eq!(ask(&host(&processes), Target::Slices(vec![slice_of("0b:00.0", 2)])), (Vec::new(), Ok(())));
}

#[test]
fn who_is_no_client_is_said() {
    let there = host(&[(1, contained(&[]))]);
    assert_eq!(ask(&there, Target::Process(2)), (Vec::new(), Err(TerminationError::NoSuchClient(2))));
    let theirs = Target::ProcessOf { pid: 1, user: 7 };
    let not_theirs = TerminationError::NotTheirs { pid: 1, user: 7 };
    assert_eq!(ask(&there, theirs), (Vec::new(), Err(not_theirs)), "its users are not known");
    assert_eq!(ask(&there, Target::Process(1)), (vec!["PID 1".to_owned()], Ok(())));
}

#[test]
fn users_may_end_their_own_work() {
    let theirs = Process { users: vec![7], ..Process::default() };
    let target = Target::ProcessOf { pid: 1, user: 7 };
    assert_eq!(ask(&host(&[(1, theirs)]), target), (vec!["PID 1".to_owned()], Ok(())));
}

/// The server handles a fatal GPU error until this number of milliseconds after the beginning of the story.
fn faults(there: &Story, until: u64) {
    there.host().server_faults(SERVER);
    there.host().at(until, |host| host.server_recovers(SERVER));
}

#[test]
fn a_client_that_is_not_listed_during_a_fault_is_looked_for_again() {
    let there = host(&[(1, Process::default())]);
    faults(&there, 10);
    assert_eq!(ask(&there, Target::Process(1)), (vec!["PID 1".to_owned()], Ok(())));
    assert_eq!(there.calls("clients on GPUs"), 0, "on one GPU, the error hits all clients");
    assert_eq!(there.calls("end the work of 1"), 1);
}

#[test]
fn a_fault_that_comes_behind_the_list_has_ended_the_work_on_the_only_gpu() {
    let faulted = |gpus: &[&str]| {
        let there = host_of(gpus, &[(1, Process::default())]);
        there.host().during("server status", |host| host.server_faults(SERVER));
        there.host().at(20_000, |host| host.server_recovers(SERVER));
        there
    };
    let there = faulted(&["0a:00.0"]);
    assert_eq!(ask(&there, Target::Process(1)), (vec!["PID 1".to_owned()], Ok(())));
    assert_eq!(there.calls("end the work"), 0);
    assert!(there.host().now < Duration::from_secs(1));
    let there = faulted(&["0a:00.0", "0b:00.0"]);
    assert_eq!(ask(&there, Target::Process(1)), (vec!["PID 1".to_owned()], Ok(())));
    assert_eq!(there.calls("end the work of 1"), 1, "once the fault is over");
}

#[test]
fn nvml_knows_who_is_on_several_gpus_of_a_server_that_handles_a_fault() {
    let of_two = || host_of(&["0a:00.0", "0b:00.0"], &[(1, Process::default())]);
    let there = of_two();
    assert_eq!(ask(&there, Target::Process(1)), (vec!["PID 1".to_owned()], Ok(())));
    assert_eq!(there.calls("clients on GPUs"), 0, "without a fault, the list is complete");
    assert_eq!(there.calls("end the work of 1"), 1);
    let there = of_two();
    faults(&there, 20_000);
    // NVML does not list the client on its GPU until a moment later.
    there.host().stage.nvml.insert("0a:00.0".to_owned(), Ok([].into()));
    there.host().at(10, |host| host.stage.nvml.clear());
    assert_eq!(ask(&there, Target::Process(1)), (vec!["PID 1".to_owned()], Ok(())));
    assert!(there.calls("clients on GPUs") > 1);
    assert_eq!(there.times("end the work of 1").len(), 1);
    assert!(there.times("end the work of 1")[0] >= 20_000, "once the fault is over");
}
