//! A client beside all that a test does to its host.

use std::path::Path;
use std::time::{Duration, Instant};

use super::client::Client;
use super::host::{Host, alive};
use super::wait::{DEADLINE, PAUSE, wait_for};

/// A client that must not notice anything.
pub(crate) struct Bystander {
    child: Client,
    /// The same under another control daemon of the GPU.
    another: Option<Client>,
    ends: Instant,
}

impl Bystander {
    /// Starts one that computes for so long, and waits until it is served.
    pub(crate) fn start(host: &Host, pipe: &Path, time: Duration) -> Self {
        let work = ["hold", &time.as_secs_f64().to_string()];
        let mut child = host.program(&work);
        let mut child = Client::start(child.env("CUDA_MPS_PIPE_DIRECTORY", pipe));
        let pid = child.id().to_string();
        wait_for("the client", || {
            let served = host.front_end(pipe, "ps").lines().any(|line| line.split(' ').next() == Some(&pid));
            // On a busy machine its time may be over between two looks.
            let done = child.try_wait().unwrap().inspect(|status| assert!(status.success(), "{status}"));
            (served || done.is_some()).then_some(())
        });
        let another = host.program_of_another(&work);
        let another = another.map(|mut program| Client::start(&mut program));
        Self { child, another, ends: Instant::now() + time }
    }

    /// True if its time is over. Anything else that ended it is a failure.
    pub(crate) fn done(&mut self) -> bool {
        let mut both = std::iter::once(&mut self.child).chain(&mut self.another);
        both.all(|client| {
            let Some(status) = client.try_wait().unwrap() else { return false };
            assert!(status.success(), "client {} was lost: {status}", client.id());
            true
        })
    }

    /// It must still compute.
    pub(crate) fn check(&self) {
        for client in std::iter::once(&self.child).chain(&self.another) {
            assert!(alive(client.id()), "client {} was lost", client.id());
        }
    }

    pub(crate) fn wait(mut self) {
        let left = self.ends.saturating_duration_since(Instant::now()) + DEADLINE;
        let deadline = Instant::now() + left;
        while !self.done() {
            assert!(Instant::now() < deadline, "client {} does not end", self.child.id());
            std::thread::sleep(PAUSE);
        }
    }
}
