//! The end of the newest clients of a slice that is over its budget: who goes first, who is left alone and for how long.
//! Everything that comes together meanwhile is in the histories.

// All of this is tests; clippy's own exception for tests sees only the functions that are marked as such.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use mps_core::mps::ServerStatus;
use mps_core::tenants::budget::{Budget, Member, MemberProcess, may_cut_back};
use mps_core::tenants::{
    ClientShell, DaemonClients, Enforced, Enforcer, ListedClient, MemberShell, OverBudget, TerminateAnswer,
    UnknownClients, VictimState,
};
use mps_core::{CoreTime, Permit};

const SERVER: u32 = 200;

/// A PID, and a start time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Process(u32, u64);

impl MemberProcess for Process {
    fn pid(self) -> u32 {
        self.0
    }

    fn start_time(self) -> u64 {
        self.1
    }
}

/// A host with one control daemon, and one server.
#[derive(Default)]
struct Host {
    now: Duration,
    /// The processes that run, by PID, each with its start time and its connection.
    running: BTreeMap<u32, (u64, u64)>,
    /// The clients that something holds stopped.
    held: BTreeSet<u32>,
    is_faulted: bool,
    /// Its control daemon does not answer.
    is_silent: bool,
    /// The next answers to the end of a client, if they are not what they should be.
    answers: VecDeque<Result<TerminateAnswer, String>>,
    /// A list takes so long.
    list_takes: Duration,
    /// The end of a client takes so long.
    end_takes: Duration,
    /// A client ends while it is continued.
    ends_when_continued: Option<u32>,
    /// A client ends just before it is held, and another process has its PID.
    changes_hands: Option<u32>,
    asked: Vec<u32>,
}

impl ClientShell for Host {
    type Control = ();
    type Held = Process;
    type GoingOn = u32;

    fn now(&self) -> CoreTime {
        self.now
    }

    async fn pause(&mut self, duration: Duration) {
        self.now += duration;
    }

    async fn list(&mut self) -> Vec<((), Result<DaemonClients, UnknownClients>)> {
        let client = |(pid, (started, connection)): (&u32, &(u64, u64))| {
            let (connections, gpus) = ([Some(*connection)].into(), ["A".to_owned()].into());
            ((SERVER, *pid), ListedClient { started: Some(*started), connections, gpus })
        };
        let clients = self.running.iter().map(client).collect();
        self.now += self.list_takes;
        if self.is_silent {
            return vec![((), Err(UnknownClients { why: "no answer".to_owned(), has_no_server: false }))];
        }
        vec![((), Ok(DaemonClients { gpus: Some(vec!["A".to_owned()]), clients, ..Default::default() }))]
    }

    fn hold(&mut self, pid: u32) -> Result<Option<Process>, String> {
        if self.changes_hands.take_if(|its| *its == pid).is_some() {
            self.running.insert(pid, (99, 99));
        }
        Ok(self.running.get(&pid).map(|(started, _)| Process(pid, *started)))
    }

    fn is_alive(&self, held: &Process) -> bool {
        self.runs(*held)
    }

    async fn server_status(&mut self, (): &(), _: u32) -> Result<ServerStatus, String> {
        Ok(if self.is_faulted { ServerStatus::Fault } else { ServerStatus::Active })
    }

    async fn go_on(&mut self, held: &Process) -> Result<u32, String> {
        if self.ends_when_continued.take_if(|pid| *pid == held.0).is_some() {
            self.running.remove(&held.0);
            return Err("no such process".to_owned());
        }
        if self.held.contains(&held.0) { Err("a debugger holds it".to_owned()) } else { Ok(held.0) }
    }

    async fn terminate_client(
        &mut self,
        (): &(),
        _: u32,
        client: u32,
        _: Permit,
    ) -> Result<TerminateAnswer, String> {
        self.asked.push(client);
        self.now += self.end_takes;
        self.answers.pop_front().unwrap_or(Ok(TerminateAnswer::Done))
    }
}

impl MemberShell<Process> for Host {
    fn process(&self, held: &Process) -> Process {
        *held
    }

    fn runs(&self, process: Process) -> bool {
        self.running.get(&process.0).is_some_and(|(started, _)| *started == process.1)
    }
}

/// A slice with these clients, of which two fit.
struct Story {
    host: Host,
    enforcer: Enforcer<Process, Process>,
    members: Vec<Process>,
    looked_at: Duration,
}

impl Story {
    /// The clients have the PIDs 1, 2 and so on. The last one is the newest.
    fn with_clients(clients: u32) -> Self {
        let members: Vec<Process> = (1..=clients).map(|pid| Process(pid, u64::from(pid) * 10)).collect();
        let running = members.iter().map(|one| (one.0, (one.1, u64::from(one.0))));
        let host = Host { running: running.collect(), ..Host::default() };
        Self { host, enforcer: Enforcer::default(), members, looked_at: Duration::ZERO }
    }

    /// One attempt. Returns the PIDs that were asked for, and the outcome.
    fn attempt(&mut self) -> (Vec<u32>, Enforced<Process>) {
        self.host.asked.clear();
        let (members, as_of) = (self.members.clone(), self.looked_at);
        let over = || {
            let member = |process: &Process| Member {
                process: *process,
                memory_mib: Some(1),
                only_claims: false,
                tenant: Some(()),
                stays: false,
            };
            let budget = Budget { memory_mib: 100, max_clients: 2 };
            let may_end = may_cut_back::<Process, ()>(&[]).unwrap();
            vec![OverBudget {
                as_of,
                slice: 7,
                budget,
                members: members.iter().map(member).collect(),
                may_end,
            }]
        };
        let enforced = {
            let mut run = pin!(self.enforcer.enforce(&mut self.host, over));
            match run.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(enforced) => enforced,
                Poll::Pending => unreachable!("this host answers at once"),
            }
        };
        (std::mem::take(&mut self.host.asked), enforced)
    }

    /// So much later, after another look.
    fn later(&mut self, seconds: u64) {
        self.host.now += Duration::from_secs(seconds);
        self.looked_at = self.host.now;
    }
}

fn states(enforced: &Enforced<Process>) -> Vec<(u32, VictimState)> {
    enforced.victims.iter().map(|victim| (victim.process.0, victim.state.clone())).collect()
}

#[test]
fn the_newest_go_until_the_rest_fits() {
    let mut story = Story::with_clients(4);
    let (asked, enforced) = story.attempt();
    assert_eq!(asked, [4, 3]);
    assert_eq!(states(&enforced), [(4, VictimState::Ended), (3, VictimState::Ended)]);
    assert_eq!((enforced.victims[0].slice, enforced.broken_off), (7, None));
    // They stay listed until their next call to CUDA, and count no more.
    story.later(5);
    assert_eq!(story.attempt().0, [0; 0]);
    // One of them starts over.
    story.host.running.insert(3, (30, 33));
    story.later(5);
    assert_eq!(story.attempt().0, [3]);
}

#[test]
fn one_that_cannot_be_ended_is_left_alone_longer_each_time_and_the_next_newest_goes() {
    let mut story = Story::with_clients(3);
    story.host.held.insert(3);
    let (asked, enforced) = story.attempt();
    assert_eq!(asked, [2], "the rest fits without it");
    let stays = VictimState::Stays("a debugger holds it".to_owned());
    assert_eq!(states(&enforced), [(3, stays.clone()), (2, VictimState::Ended)]);
    // Another one comes. The client that is held is tried again after 1 s, then after 2 s.
    story.host.running.insert(4, (40, 4));
    story.members.push(Process(4, 40));
    story.later(1);
    assert_eq!(states(&story.attempt().1), [(4, VictimState::Ended)]);
    story.host.running.insert(5, (50, 5));
    story.members.push(Process(5, 50));
    story.host.held.insert(5);
    let tried =
        |story: &mut Story| states(&story.attempt().1).iter().map(|(pid, _)| *pid).collect::<Vec<_>>();
    story.later(1);
    assert_eq!(tried(&mut story), [5, 3, 1]);
    story.host.running.insert(1, (10, 11));
    story.later(1);
    assert_eq!(tried(&mut story), [5, 1], "3 has another second");
    story.host.running.insert(1, (10, 12));
    story.later(1);
    assert_eq!(tried(&mut story), [3, 1], "and 5 has one now");
}

#[test]
fn one_that_cannot_be_ended_is_left_alone_as_long_though_a_control_daemon_says_nothing_meanwhile() {
    let mut story = Story::with_clients(3);
    story.host.held.insert(3);
    let tried =
        |story: &mut Story| states(&story.attempt().1).iter().map(|(pid, _)| *pid).collect::<Vec<_>>();
    for connection in [21, 22] {
        assert_eq!(tried(&mut story), [3, 2]);
        story.host.running.insert(2, (20, connection));
        story.later(1);
    }
    story.host.is_silent = true;
    assert_eq!(tried(&mut story), [0; 0]);
    story.host.is_silent = false;
    assert_eq!(tried(&mut story), [2], "3 has another second");
}

#[test]
fn one_that_may_have_lost_its_work_is_settled_before_anybody_else_is_touched() {
    let mut story = Story::with_clients(3);
    story.host.answers.push_back(Err("no answer".to_owned()));
    let (asked, enforced) = story.attempt();
    assert_eq!(asked, [3]);
    assert_eq!(states(&enforced), [(3, VictimState::Unknown("no answer".to_owned()))]);
    assert_eq!(enforced.broken_off.as_deref(), Some("no answer"));
    // A newer one comes, which waits for that.
    story.host.running.insert(4, (40, 4));
    story.members.push(Process(4, 40));
    assert_eq!(story.attempt().0, [0; 0], "it is tried again after a pause");
    story.later(1);
    assert_eq!(story.attempt().0, [3, 4]);
    story.later(1);
    assert_eq!(story.attempt().0, [0; 0]);
}

#[test]
fn nobody_is_touched_while_the_server_handles_a_fault() {
    let mut story = Story::with_clients(3);
    story.host.is_faulted = true;
    let (asked, enforced) = story.attempt();
    assert_eq!((asked, enforced.victims.len()), (vec![], 0));
    assert_eq!(enforced.broken_off.as_deref(), Some("server 200 handles a fault"));
    story.host.is_faulted = false;
    assert_eq!(story.attempt().0, [3]);
}

#[test]
fn another_process_with_the_pid_of_a_client_is_left_alone() {
    let mut story = Story::with_clients(3);
    story.host.running.insert(3, (99, 3));
    assert_eq!(story.attempt().0, [0; 0], "without the client, the rest fits");
    story.host.running.remove(&3);
    story.later(1);
    assert_eq!(story.attempt().0, [0; 0]);
    let mut story = Story::with_clients(3);
    story.host.changes_hands = Some(3);
    assert_eq!(story.attempt().0, [0; 0]);
}

#[test]
fn one_that_the_control_daemon_does_not_know_has_gone() {
    let mut story = Story::with_clients(4);
    story.host.answers.push_back(Ok(TerminateAnswer::NoSuchClient));
    let (asked, enforced) = story.attempt();
    assert_eq!(asked, [4, 3]);
    assert_eq!(states(&enforced), [(3, VictimState::Ended)]);
}

#[test]
fn an_old_look_ends_nobody() {
    let mut story = Story::with_clients(3);
    story.host.now = Duration::from_secs(2);
    assert_eq!(story.attempt().0, [0; 0]);
    story.later(0);
    story.host.list_takes = Duration::from_secs(2);
    assert_eq!(story.attempt().0, [0; 0], "the list has taken too long as well");
    story.later(0);
    story.host.list_takes = Duration::from_millis(1999);
    assert_eq!(story.attempt().0, [3]);
}

#[test]
fn an_old_list_ends_nobody() {
    let mut story = Story::with_clients(9);
    story.host.end_takes = Duration::from_secs(1);
    story.looked_at = Duration::from_secs(1);
    assert_eq!(story.attempt().0, [9, 8]);
}

#[test]
fn one_that_ends_while_it_is_continued_has_gone() {
    let mut story = Story::with_clients(4);
    story.host.ends_when_continued = Some(4);
    let (asked, enforced) = story.attempt();
    assert_eq!((asked, states(&enforced)), (vec![3], vec![(3, VictimState::Ended)]));
}
