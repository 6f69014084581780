//! Bystanders: clients that must survive while a test disturbs their host.

use std::path::Path;
use std::time::{Duration, Instant};

use super::client::Client;
use super::host::{Host, alive};
use super::wait::{DEADLINE, PAUSE, wait_for};

pub(crate) struct Bystander {
    child: Client,
    /// A client of another control daemon on the same GPU, if the topology has one.
    another: Option<Client>,
    ends: Instant,
}

impl Bystander {
    /// Starts a client that computes for this time, and waits until it is served.
    pub(crate) fn start(host: &Host, pipe: &Path, time: Duration) -> Self {
        let work = ["hold", &time.as_secs_f64().to_string()];
        let mut child = host.program(&work);
        let mut child = Client::start(child.env("CUDA_MPS_PIPE_DIRECTORY", pipe));
        let pid = child.id().to_string();
        wait_for("the client", || {
            let served = host.front_end(pipe, "ps").lines().any(|line| line.split(' ').next() == Some(&pid));
            // On a busy machine, the client may end before `ps` has listed it.
            let done = child.try_wait().unwrap().inspect(|status| assert!(status.success(), "{status}"));
            (served || done.is_some()).then_some(())
        });
        let another = host.program_of_another(&work);
        let another = another.map(|mut program| Client::start(&mut program));
        Self { child, another, ends: Instant::now() + time }
    }

    /// Returns true if the client has computed for its time and has ended. Fails if the client has ended early or with an
    /// error.
    pub(crate) fn done(&mut self) -> bool {
        let mut both = std::iter::once(&mut self.child).chain(&mut self.another);
        both.all(|client| {
            let Some(status) = client.try_wait().unwrap() else { return false };
            assert!(status.success(), "client {} was lost: {status}", client.id());
            true
        })
    }

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
