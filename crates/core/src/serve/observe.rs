//! Records the events of a control daemon and the lines of its log.

use alloc::format;
use core::time::Duration;

use super::Serving;
use super::effect::RunEffect;
use super::news::News;
use super::shell::{Failure, Occurrence, Said, Shell};
use crate::CoreTime;
use crate::mps::Meaning;

impl<S: Shell> Serving<'_, S> {
    pub(super) async fn next(
        &mut self,
        deadline: CoreTime,
        takes_requests: bool,
    ) -> Result<Occurrence, Failure> {
        let occurrence = self.shell.next(deadline, takes_requests).await?;
        if let Occurrence::Said(said) = &occurrence {
            self.observe(said);
        }
        Ok(occurrence)
    }

    /// Waits for the next event of the log or of the process, and records the event. Returns false if the deadline has passed
    /// without an event.
    pub(super) async fn step(&mut self, deadline: CoreTime) -> Result<bool, Failure> {
        match self.next(deadline, false).await? {
            Occurrence::ServerEnded(server) => {
                self.forget_server(server).await;
                Ok(true)
            }
            Occurrence::Ended => Err(self.ended().await),
            Occurrence::Said(_) | Occurrence::Asked(_) => Ok(true),
            Occurrence::Nothing => Ok(false),
        }
    }

    /// Waits for one event, at most for `duration`. Returns the moment at which the wait has ended.
    pub(super) async fn wait(&mut self, duration: Duration) -> Result<CoreTime, Failure> {
        self.step(self.shell.now() + duration).await?;
        Ok(self.shell.now())
    }

    pub async fn ended(&mut self) -> Failure {
        // The last lines of the log explain the end of the control daemon. Older lines are skipped, since the next control
        // daemon has to start soon.
        self.read(true).await;
        // A server that a signal has stopped does not notice the end of its control daemon, and would occupy the GPU forever.
        // The service therefore continues the server.
        self.continue_if_stopped();
        self.shell.how_it_ended()
    }

    /// Reads the log up to its present end.
    pub async fn read_on(&mut self) {
        self.read(false).await;
    }

    async fn read(&mut self, last_ones: bool) {
        let Some(end) = self.shell.end_of_log(last_ones) else { return };
        while let Some(said) = self.shell.line_before(end).await {
            self.observe(&said);
        }
    }

    /// Continues the control daemon and its servers if a signal has stopped them, since a stopped process serves no client.
    pub fn continue_if_stopped(&mut self) {
        self.shell.carry_out(RunEffect::ContinueIfStopped(self.run.servers.alive()));
    }

    fn observe(&mut self, said: &Said) {
        self.observe_waiting(&said.meaning);
        let now = self.shell.now();
        let run = &mut *self.run;
        run.servers.observe(&said.meaning);
        if !said.is_news {
            return;
        }
        let first_refusal = run.capacity.observe(&said.meaning, &self.wanted.gpus, now);
        match said.meaning {
            Meaning::ServerReady(server) => {
                self.shell.tell(News::Event, format!("server {server} is ready"));
                // A process that has prevented the start of the server may have ended, so the service searches again for
                // programs without MPS.
                run.bypasses_at = Some(now);
            }
            Meaning::ServerExited { server, status: 0 } => {
                self.shell.tell(News::Event, format!("server {server} exited with status 0"));
            }
            Meaning::ServerExited { server, status } => {
                let text = format!(
                    "server {server} exited with status {status}{last_words}",
                    last_words = self.shell.words()
                );
                self.shell.tell(News::ServerFailed { server }, text);
            }
            Meaning::FaultHandling { server } => self.fault_told(server),
            Meaning::TornDown { server, client, ordinal } => self.client_hit(server, client, ordinal),
            Meaning::ClientAdmitted(client) => {
                (run.in_use, run.quiet_since) = (true, now);
                self.shell.carry_out(RunEffect::ClientCame(client));
            }
            Meaning::ClientLeft(_) => (run.client_left, run.quiet_since) = (true, now),
            Meaning::ClientRefused { server, capacity } if first_refusal => {
                let text = format!("server {server} refused a client: its limit is {capacity} clients");
                self.shell.tell(News::Warning, text);
            }
            _ => {}
        }
    }
}
