//! Stories of one slice that exceeds its budget, on a simulated host without any other trouble.

use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use mps_core::tenants::budget::may_cut_back;
use mps_core::tenants::{Enforcer, OverBudget, SliceBudgets, Victim};
use mps_core::terms::SliceSize;

use super::budgets::Program;
use super::enforcing::{Facts, SimEnforcement, SimHeld};
use super::mps::Mps;
use super::story::{SERVER, Story};

pub const SLICE: u32 = 1;

/// The budget allows two clients. Its memory is so large that only the number of clients can exceed the budget.
const BUDGET: SliceSize = SliceSize { memory_mib: 100_000, thread_percentage: 50, max_clients: 2 };

pub struct Overuse {
    story: Story,
    shell: SimEnforcement,
    enforcer: Enforcer<SimHeld>,
    /// The clients of the slice when the service last listed them.
    members: Vec<Program>,
    pub looked_at: Duration,
}

impl Mps {
    /// A client comes to the slice, or the client with this PID starts its work again with another connection.
    pub fn member(&mut self, pid: u32, start_time: u64, connection: u64) {
        self.clients.remove(&pid);
        self.client(pid, SERVER, "A");
        let program = &mut self.clients.get_mut(&pid).unwrap().program;
        *program = Program {
            slice: Some(SLICE),
            tenant: 0,
            only_claims: false,
            is_held: false,
            connection,
            ..Program::new(pid, start_time)
        };
    }

    pub fn is_held(&mut self, pid: u32) {
        self.clients.get_mut(&pid).unwrap().program.is_held = true;
    }
}

impl Overuse {
    /// A slice with this number of clients. The clients have the PIDs 1, 2 and so on, and the client with the highest PID is
    /// the newest.
    pub fn with_clients(clients: u32) -> Self {
        let story = Story::with_gpus(&["A"]);
        story.host().server_comes(SERVER);
        for pid in 1..=clients {
            story.host().member(pid, u64::from(pid) * 10, u64::from(pid));
        }
        let budgets = SliceBudgets { budgets: vec![BUDGET; 2], terminate: true };
        let mut facts = Facts::default();
        facts.is_in_force(&budgets, &[]);
        facts.are_seen(&[], Duration::ZERO);
        let shell = SimEnforcement { daemons: vec![story.shell().mps], facts: Arc::new(Mutex::new(facts)) };
        let mut overuse = Self {
            story,
            shell,
            enforcer: Enforcer::default(),
            members: Vec::new(),
            looked_at: Duration::ZERO,
        };
        overuse.list_members();
        overuse
    }

    pub fn host(&self) -> MutexGuard<'_, Mps> {
        self.story.host()
    }

    pub fn list_members(&mut self) {
        let (host, now) = (self.story.host(), self.facts().now);
        self.members = host.clients.values().map(|client| client.program.clone()).collect();
        drop(host);
        self.looked_at = now;
    }

    pub fn pass(&mut self, time: Duration) {
        self.facts().now += time;
    }

    /// The service makes one attempt to end clients of the slice. Returns the PIDs that the service has asked a control daemon
    /// to end, the clients that it has tried to end, and the reason why it has broken off the attempt.
    pub fn attempt(&mut self) -> (Vec<u32>, Vec<Victim>, Option<String>) {
        self.facts().are_seen(&self.members, self.looked_at);
        let over = || {
            vec![OverBudget {
                as_of: self.looked_at,
                slice: SLICE,
                budget: BUDGET,
                members: self.members.iter().map(Program::member).collect(),
                may_end: may_cut_back::<usize>(&[]).unwrap(),
            }]
        };
        let (victims, broken_off) = {
            let (facts, host) = (Arc::clone(&self.shell.facts), self.shell.clone());
            let mut attempt =
                pin!(self.enforcer.enforce(&mut self.shell, over, |process| host.runs(process)));
            loop {
                if let Poll::Ready(enforced) = attempt.as_mut().poll(&mut Context::from_waker(Waker::noop()))
                {
                    break enforced;
                }
                let mut facts = facts.lock().unwrap();
                facts.now = facts.waits_until.unwrap_or_default().max(facts.now);
            }
        };
        let calls = std::mem::take(&mut self.host().stage.calls);
        let asked = calls.iter().filter_map(|(_, call)| call.strip_prefix("end the work of ")?.parse().ok());
        (asked.collect(), victims, broken_off)
    }

    fn facts(&self) -> MutexGuard<'_, Facts> {
        self.shell.facts.lock().unwrap()
    }
}
