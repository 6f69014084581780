//! Takes over a control daemon that an earlier process of the service has started.

use alloc::format;

use super::Serving;
use super::blocker::Blocker;
use super::news::News;
use super::shell::{Failure, Shell};

impl<S: Shell> Serving<'_, S> {
    /// Takes over a control daemon that still runs. Returns false if the control daemon has ended meanwhile.
    ///
    /// # Errors
    /// Another control daemon listens in the control daemon's directory.
    pub async fn take_over(&mut self) -> Result<bool, Failure> {
        self.continue_if_stopped();
        let answers = match self.listens().await {
            Ok(()) => self.shell.inspect(&[], None).await.map(drop),
            Err(failure) => Err(failure),
        };
        let (pid, is_heard) = (self.shell.pid(), answers.is_ok());
        match answers {
            Ok(()) if self.shell.listener().is_none_or(|listener| listener == pid) => {}
            Ok(()) => {
                return Err(Failure::Waiting(format!(
                    "another control daemon listens in the directory of the control daemon with PID {pid}"
                )));
            }
            Err(Failure::Ended { .. }) => return Ok(false),
            // The control daemon hangs or can't be reached, but may have clients. The service takes it over, and a blocker
            // records that it does not answer.
            Err(failure) => {
                self.run.blockers.observe(Some(Blocker::no_answer(failure.into_text())));
            }
        }
        self.read_on().await;
        if is_heard {
            self.learn_clients().await;
        }
        let text = format!(
            "control daemon {id} (PID {pid}) taken over from the previous run of the service",
            id = self.wanted.id
        );
        self.shell.tell(News::Event, text);
        self.shell.passed("taken-over", &format!("control daemon {pid} was taken over"));
        Ok(true)
    }
}
