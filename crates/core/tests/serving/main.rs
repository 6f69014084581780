//! Stories of serving: a host does as the story says, and the service does its work on it. They are of states that the histories
//! have no promise for: what is told, what is asked, and in which order.

// All of this is tests; clippy's own exception for tests sees only the functions that are marked as such.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, clippy::unnecessary_wraps)]

mod capacity;
mod check;
mod ends;
mod faults;
mod gpus;
mod host;
mod limits;
mod servers;
mod shell;
mod start;

use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use mps_core::Tenure;
use mps_core::serve::{Ended, Failure, GpuReach, Known, Serving, Wanted, WantedGpu};

use host::Host;
use shell::{HostShell, in_words};

/// The first server that the service starts.
const SERVER: u32 = 200;

/// All that the service knows of the control daemon.
struct Memory {
    known: Known,
    reach: GpuReach,
}

/// A control daemon that is served.
type Act = Pin<Box<dyn Future<Output = Result<Ended, Failure>>>>;

/// One control daemon, what is known of it, and its order.
struct Story {
    shell: HostShell,
    memory: Arc<Mutex<Memory>>,
    wanted: Wanted,
    /// It is served since the last time that it was not.
    act: Option<Act>,
}

fn wanted_gpu(uuid: &str) -> WantedGpu {
    WantedGpu {
        uuid: uuid.to_owned(),
        name: format!("name of {uuid}"),
        memory_limit_mib: 1024,
        limits_enforced: true,
        capacity: 2,
        clients_listed: true,
    }
}

/// Whatever is ready at once, without anybody who wakes.
fn polled<T>(future: Pin<&mut (impl Future<Output = T> + ?Sized)>) -> Option<T> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(done) => Some(done),
        Poll::Pending => None,
    }
}

impl Story {
    /// A control daemon for these GPUs has just been started, in multi-user mode, and gets a server ahead of its first client.
    fn of(gpus: &[&str]) -> Self {
        Self::with(gpus, true)
    }

    /// The same without multi-user mode: a server comes with the first client.
    fn of_one_user(gpus: &[&str]) -> Self {
        Self::with(gpus, false)
    }

    fn with(gpus: &[&str], multiuser: bool) -> Self {
        let wanted = Wanted {
            gpus: gpus.iter().map(|uuid| wanted_gpu(uuid)).collect(),
            thread_percentage: 50,
            prewarm: true,
            retiring: false,
            tenure: Tenure::Alone,
            guard_period: None,
            held: [].into(),
            sets_modes: true,
            fault_grace: Duration::from_secs(30),
        };
        let known =
            Known::new(gpus.iter().map(|uuid| (*uuid).to_owned()).collect(), multiuser, true, Duration::ZERO);
        let shell = HostShell(Arc::new(Mutex::new(Host::new(gpus))));
        let memory = Arc::new(Mutex::new(Memory { known, reach: GpuReach::default() }));
        Self { shell, memory, wanted, act: None }
    }

    fn host(&self) -> MutexGuard<'_, Host> {
        self.shell.host()
    }

    /// Serves until so many milliseconds after the beginning, unless it ends before. The next call goes on with that.
    // Whoever wants the memory breaks the act off first.
    #[allow(clippy::await_holding_lock)]
    fn serve(&mut self, until: u64) -> Option<Result<Ended, Failure>> {
        self.host().story_ends = Duration::from_millis(until);
        let (shell, memory, wanted) = (self.shell.clone(), Arc::clone(&self.memory), self.wanted.clone());
        let act = self.act.get_or_insert_with(|| {
            Box::pin(async move {
                let Memory { known, reach } = &mut *memory.lock().unwrap();
                Serving::new(shell, known, reach, wanted).serve().await
            })
        });
        let ended = polled(act.as_mut());
        if ended.is_some() {
            self.act = None;
        }
        ended
    }

    /// Serving is broken off, for another order.
    fn break_off(&mut self, change: impl FnOnce(&mut Wanted)) {
        self.act = None;
        change(&mut self.wanted);
    }

    /// Something else is done with the control daemon.
    #[allow(clippy::await_holding_lock)]
    fn once<T>(&mut self, act: impl AsyncFnOnce(&mut Serving<'_, HostShell>) -> T) -> T {
        self.act = None;
        self.host().story_ends = Duration::MAX;
        let Memory { known, reach } = &mut *self.memory.lock().unwrap();
        let mut serving = Serving::new(self.shell.clone(), known, reach, self.wanted.clone());
        polled(pin!(act(&mut serving))).unwrap()
    }

    /// Serves until so many milliseconds after the beginning.
    fn served(&mut self, until: u64) {
        let ended = self.serve(until);
        assert!(ended.is_none(), "{ended:?}");
    }

    /// The state that is shown, in words.
    fn shown(&self) -> String {
        in_words(self.host().shown.as_ref())
    }

    /// The number of calls with a name that begins so, since the last time.
    fn calls(&self, name: &str) -> usize {
        self.times(name).len()
    }

    /// The times in milliseconds of the calls with a name that begins so.
    fn times(&self, name: &str) -> Vec<u128> {
        let host = self.host();
        let calls = host.calls.iter().filter(|(_, call)| call.starts_with(name));
        calls.map(|(at, _)| at.as_millis()).collect()
    }

    /// Forgets all that was done and told.
    fn forget(&self) {
        let mut host = self.host();
        host.calls.clear();
        host.told.clear();
        host.steps.clear();
    }

    fn has_told(&self, text: &str) -> bool {
        self.host().told.iter().any(|told| told.contains(text))
    }

    fn has_done(&self, call: &str) -> bool {
        self.host().calls.iter().any(|(_, done)| done == call)
    }
}
