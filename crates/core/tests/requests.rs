//! Requests to end GPU work: which clients are meant, where several containers or nobody's slices are in question. Everything
//! that goes wrong meanwhile is in the histories.

// All of this is tests; clippy's own exception for tests sees only the functions that are marked as such.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use mps_core::mps::ServerStatus;
use mps_core::serve::ClientsOnGpus;
use mps_core::tenants::{
    ClientShell, DaemonClients, EnclosingContainer, KnownSlices, ListedClient, RequestNews, SliceName,
    Target, TerminateAnswer, Termination, TerminationError, TerminationShell, UnknownClients,
};
use mps_core::{CoreTime, Permit};

/// The letter of a GPU, and an ordinal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slice(char, u32);

impl SliceName for Slice {
    fn shares_gpu(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

/// A client of the only control daemon, on GPU A.
#[derive(Debug, Clone, Default)]
struct Process {
    slices: Option<Vec<Slice>>,
    is_certain: bool,
    users: Vec<u32>,
    /// Each with its container's id, and whether the host's own runtime has made it.
    containers: Vec<(&'static str, bool)>,
}

/// A host on which everything is done at once, and nothing goes wrong but what a story names.
#[derive(Debug, Default)]
struct Host {
    processes: BTreeMap<u32, Process>,
    now: Duration,
    /// The server is of GPU B as well.
    has_two_gpus: bool,
    /// The server handles a fatal GPU error, and meanwhile its control daemon lists nobody.
    faulted_until: Duration,
    /// The error comes after each list, so all are listed.
    faults_behind_the_list: bool,
    /// NVML lists the clients from then on.
    nvml_from: Duration,
    nvml_asked: usize,
    ended: BTreeSet<u32>,
}

impl Host {
    fn is_faulted(&self) -> bool {
        self.now < self.faulted_until
    }
}

impl ClientShell for Host {
    type Control = ();
    type Held = u32;
    type GoingOn = u32;

    fn now(&self) -> CoreTime {
        self.now
    }

    async fn pause(&mut self, duration: Duration) {
        self.now += duration;
    }

    async fn list(&mut self) -> Vec<((), Result<DaemonClients, UnknownClients>)> {
        let client = |pid: &u32| {
            let gpus = BTreeSet::from(["A".to_owned()]);
            (
                (7, *pid),
                ListedClient { started: None, connections: BTreeSet::from([Some(u64::from(*pid))]), gpus },
            )
        };
        let is_noticed = self.is_faulted() && !self.faults_behind_the_list;
        let listed = self.processes.keys().filter(|_| !is_noticed);
        let gpus = ["A", "B"].into_iter().take(if self.has_two_gpus { 2 } else { 1 });
        let daemon = DaemonClients {
            gpus: Some(gpus.map(str::to_owned).collect()),
            clients: listed.map(client).collect(),
            faulted: is_noticed.then_some(7).into_iter().collect(),
            ..Default::default()
        };
        vec![((), Ok(daemon))]
    }

    fn hold(&mut self, pid: u32) -> Result<Option<u32>, String> {
        Ok(self.processes.contains_key(&pid).then_some(pid))
    }

    fn is_alive(&self, held: &u32) -> bool {
        self.processes.contains_key(held)
    }

    async fn server_status(&mut self, (): &(), _: u32) -> Result<ServerStatus, String> {
        Ok(if self.is_faulted() { ServerStatus::Fault } else { ServerStatus::Active })
    }

    async fn go_on(&mut self, held: &u32) -> Result<u32, String> {
        Ok(*held)
    }

    async fn terminate_client(
        &mut self,
        (): &(),
        _: u32,
        client: u32,
        _: Permit,
    ) -> Result<TerminateAnswer, String> {
        assert!(self.ended.insert(client), "{client} is ended twice");
        Ok(TerminateAnswer::Done)
    }
}

impl TerminationShell for Host {
    type Slice = Slice;
    type Owner = String;

    fn begin_look(&mut self) {}

    async fn users(&mut self, pid: u32) -> Result<Vec<u32>, String> {
        Ok(self.processes.get(&pid).cloned().unwrap_or_default().users)
    }

    async fn slices(&mut self, pid: u32) -> Result<Option<KnownSlices<Slice>>, String> {
        let Process { slices, is_certain, .. } = self.processes.get(&pid).cloned().unwrap_or_default();
        Ok(slices.map(|slices| KnownSlices { slices, is_certain }))
    }

    async fn containers(&mut self, pid: u32) -> Result<Vec<EnclosingContainer>, String> {
        let around = self.processes.get(&pid).cloned().unwrap_or_default().containers.into_iter();
        Ok(around.map(|(id, is_the_hosts)| EnclosingContainer { id: id.to_owned(), is_the_hosts }).collect())
    }

    async fn owner(&mut self, pid: u32, slices: Option<Vec<Slice>>) -> String {
        format!("PID {pid}{}", slices.map(|slices| format!(" {slices:?}")).unwrap_or_default())
    }

    async fn program(&mut self, _: u32) -> String {
        "work".to_owned()
    }

    fn gpus_of(&self, slices: &[Slice]) -> Vec<String> {
        slices.iter().map(|slice| slice.0.to_string()).collect()
    }

    async fn clients_on(&mut self, gpus: &[String]) -> ClientsOnGpus {
        self.nvml_asked += 1;
        let lists = self.now >= self.nvml_from;
        let on = |gpu: &String| self.processes.keys().filter(|_| lists && gpu == "A").copied().collect();
        gpus.iter().map(|gpu| (gpu.clone(), Ok(on(gpu)))).collect()
    }

    fn tell_of_request(&mut self, news: RequestNews, _: u32, _: u32, _: &String) {
        assert_eq!(news, RequestNews::Ended);
    }
}

type Answer = (Vec<String>, Result<(), TerminationError<String>>);

fn ask(host: &mut Host, target: Target<Slice>) -> Answer {
    let mut termination = Termination::new(target);
    let mut run = Box::pin(termination.run(host));
    let Poll::Ready(answer) = pin!(&mut run).poll(&mut Context::from_waker(Waker::noop())) else {
        unreachable!("everything is done at once");
    };
    drop(run);
    (termination.had_work(), answer)
}

fn host(processes: &[(u32, Process)]) -> Host {
    Host { processes: processes.iter().cloned().collect(), ..Host::default() }
}

fn contained(containers: &[(&'static str, bool)]) -> Process {
    Process { containers: containers.to_vec(), ..Process::default() }
}

fn container(id: &str) -> Target<Slice> {
    Target::Container(id.to_owned())
}

#[test]
fn the_beginning_of_an_id_means_one_container() {
    let processes =
        [(1, contained(&[("abc1", true)])), (2, contained(&[("abc2", true)])), (3, contained(&[]))];
    let mut there = host(&processes);
    let found = vec!["abc1".to_owned(), "abc2".to_owned()];
    let several = TerminationError::SeveralContainers { id: "abc".to_owned(), found };
    assert_eq!(ask(&mut there, container("abc")), (Vec::new(), Err(several)));
    assert!(there.ended.is_empty());
    assert_eq!(ask(&mut there, container("abc2")), (vec!["PID 2".to_owned()], Ok(())));
    assert_eq!(ask(&mut there, container("b")), (Vec::new(), Ok(())), "nobody is in such a container");
    let mut there = host(&processes);
    assert_eq!(
        (ask(&mut there, container("b")).1, there.now),
        (Ok(()), Duration::ZERO),
        "one look is enough"
    );
}

#[test]
fn a_container_of_the_hosts_comes_before_one_that_a_user_has_named() {
    let both = [(1, contained(&[("abc1", true)])), (2, contained(&[("abc2", false), ("own", true)]))];
    assert_eq!(ask(&mut host(&both), container("abc")), (vec!["PID 1".to_owned()], Ok(())));
    let mut only_named = host(&both[1..]);
    assert_eq!(ask(&mut only_named, container("abc")), (vec!["PID 2".to_owned()], Ok(())));
}

#[test]
fn a_client_without_a_known_slice_is_told_after_the_work_of_the_others() {
    let claims = |slice| Process { slices: Some(vec![slice]), ..Process::default() };
    let mounted = |slice| Process { is_certain: true, ..claims(slice) };
    let processes = [
        (1, mounted(Slice('A', 1))),
        (2, mounted(Slice('A', 2))),
        (3, Process::default()),
        (4, claims(Slice('B', 1))),
        (5, mounted(Slice('B', 1))),
    ];
    let mut there = host(&processes);
    let (had_work, answer) = ask(&mut there, Target::Slices(vec![Slice('A', 1)]));
    assert_eq!(had_work, ["PID 1 [Slice('A', 1)]"]);
    let unplaced = TerminationError::Unplaced(vec!["PID 3 (work)".to_owned(), "PID 4 (work)".to_owned()]);
    assert_eq!(answer, Err(unplaced));
    let text = answer.unwrap_err().to_string();
    assert!(text.contains("not known of PID 3 (work); PID 4 (work): neither"), "{text}");
    assert!(there.now >= Duration::from_secs(1), "one that is just ending has no environment any more");
    // It may be a client on another GPU.
    assert_eq!(ask(&mut host(&processes), Target::Slices(vec![Slice('B', 2)])), (Vec::new(), Ok(())));
}

#[test]
fn who_is_no_client_is_said() {
    let mut there = host(&[(1, contained(&[]))]);
    assert_eq!(ask(&mut there, Target::Process(2)), (Vec::new(), Err(TerminationError::NoSuchClient(2))));
    let theirs = Target::ProcessOf { pid: 1, user: 7 };
    let not_theirs = TerminationError::NotTheirs { pid: 1, user: 7 };
    assert_eq!(ask(&mut there, theirs), (Vec::new(), Err(not_theirs)), "its users are not known");
    assert_eq!(ask(&mut there, Target::Process(1)), (vec!["PID 1".to_owned()], Ok(())));
}

#[test]
fn users_may_end_their_own_work() {
    let theirs = Process { users: vec![7], ..Process::default() };
    let target = Target::ProcessOf { pid: 1, user: 7 };
    assert_eq!(ask(&mut host(&[(1, theirs)]), target), (vec!["PID 1".to_owned()], Ok(())));
}

#[test]
fn a_client_that_is_not_listed_during_a_fault_is_looked_for_again() {
    let mut there = host(&[(1, Process::default())]);
    there.faulted_until = Duration::from_millis(10);
    assert_eq!(ask(&mut there, Target::Process(1)), (vec!["PID 1".to_owned()], Ok(())));
    assert_eq!((there.nvml_asked, there.ended), (0, [1].into()), "on one GPU, the error hits all clients");
}

#[test]
fn a_fault_that_comes_behind_the_list_has_ended_the_work_on_the_only_gpu() {
    let faulted = |has_two_gpus| Host {
        has_two_gpus,
        faults_behind_the_list: true,
        faulted_until: Duration::from_secs(60),
        ..host(&[(1, Process::default())])
    };
    let mut there = faulted(false);
    assert_eq!(ask(&mut there, Target::Process(1)), (vec!["PID 1".to_owned()], Ok(())));
    assert!(there.ended.is_empty() && there.now < Duration::from_secs(1), "{there:?}");
    let mut there = faulted(true);
    assert_eq!(ask(&mut there, Target::Process(1)), (vec!["PID 1".to_owned()], Ok(())));
    assert_eq!(there.ended, [1].into(), "once the fault is over");
}

#[test]
fn nvml_knows_who_is_on_several_gpus_of_a_server_that_handles_a_fault() {
    let of_two = || Host { has_two_gpus: true, ..host(&[(1, Process::default())]) };
    let mut there = of_two();
    assert_eq!(ask(&mut there, Target::Process(1)), (vec!["PID 1".to_owned()], Ok(())));
    assert_eq!((there.nvml_asked, there.ended), (0, [1].into()), "without a fault, the list is complete");
    let mut there = of_two();
    (there.faulted_until, there.nvml_from) = (Duration::from_secs(60), Duration::from_millis(10));
    assert_eq!(ask(&mut there, Target::Process(1)), (vec!["PID 1".to_owned()], Ok(())));
    assert!(there.nvml_asked > 1 && there.now >= there.faulted_until, "{there:?}");
    assert_eq!(there.ended, [1].into(), "once the fault is over");
}
