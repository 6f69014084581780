//! Makes a running control daemon serve its order: sets its limits and starts its server.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::vec::Vec;
use core::time::Duration;

use super::Serving;
use super::blocker::{Blocker, ClearedBy};
use super::limits::{LIMITS_TIMEOUT, TAKES_LIMITS};
use super::news::News;
use super::servers::{SERVER_PAUSE, SERVER_TIMEOUT, Server};
use super::shell::{Failure, Shell};
use crate::mps::Limits;

/// The longest time until a new control daemon listens. Measured: 20 ms.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(10);

const LISTEN_PAUSE: Duration = Duration::from_millis(5);

impl<S: Shell> Serving<'_, S> {
    /// Waits until the control daemon listens.
    ///
    /// # Errors
    /// The control daemon has ended, or does not listen before the deadline.
    pub async fn listens(&mut self) -> Result<(), Failure> {
        let deadline = self.shell.now() + LISTEN_TIMEOUT;
        while self.shell.is_nobody() {
            if self.wait(LISTEN_PAUSE).await? >= deadline {
                return Err(Failure::Failed(format!(
                    "the control daemon does not listen {seconds} s after its start{last_words}",
                    seconds = LISTEN_TIMEOUT.as_secs(),
                    last_words = self.shell.words()
                )));
            }
        }
        Ok(())
    }

    /// Carries out the order with the running control daemon, as far as possible without ending a client.
    pub(super) async fn configure(&mut self) -> Result<(), Failure> {
        if self.run.blockers.is_unreached() {
            self.show_state();
            return Ok(());
        }
        // A control daemon that a signal has stopped can't answer, so the service continues it first.
        self.continue_if_stopped();
        self.find_misfit();
        if self.place_is_taken() {
            self.show_state();
            return Ok(());
        }
        self.let_users_in();
        if self.wanted.retiring {
            // A retiring control daemon keeps its limits until it ends, so that a client that still reaches the control daemon
            // gets the same limits as the present clients.
            self.show_state();
            return Ok(());
        }
        let limits = self.limits();
        self.put_in_force(&limits).await?;
        // If another control daemon has taken the pipe directory in the meantime, that control daemon may have got the commands
        // that set limits.
        if self.place_is_taken() {
            self.show_state();
            return Ok(());
        }
        self.shell.passed("limits", "limits are confirmed");
        let run = &*self.run;
        self.shell.show(|view| {
            view.multiuser = Some(run.multiuser);
            for (uuid, gpu) in &mut view.gpus {
                gpu.thread_percentage = run.gpus.contains(uuid).then_some(limits.thread_percentage);
            }
        });
        self.run.configured = true;
        // Programs without MPS may have used a GPU before the control daemon started, so the first search for them is due at
        // once.
        self.run.bypasses_at = Some(self.shell.now());
        self.compare_servers();
        self.keep_state_file();
        if !self.run.blockers.has_failed_check() {
            let text = format!("control daemon {id} is ready", id = self.wanted.id);
            self.shell.tell(News::Event, text);
        }
        self.show_state();
        self.shell.passed("ready", "the control daemon serves");
        Ok(())
    }

    /// Sets the defaults, makes the links for clients, and sets the limits of each running server. If the order asks for a
    /// server before the first client, and no server runs, starts a server.
    async fn put_in_force(&mut self, limits: &Limits) -> Result<(), Failure> {
        let prewarm = self.run.multiuser && self.wanted.prewarm;
        let starts = prewarm && self.run.servers.alive().is_empty();
        let servers = if starts {
            self.run.servers.forget_ended();
            self.shell.set_limits_and_start(limits).await?
        } else {
            self.shell.set_limits(None, limits).await?
        };
        self.shell.passed("defaults", "defaults are set");
        // The links are made as early as possible. A program that finds no control daemon runs without MPS, and can then
        // prevent the start of a server.
        self.shell.lead_here()?;
        self.door_is_open();
        self.shell
            .passed("linked", "the pipe directory and the directories of slices lead to the control daemon");
        self.run.servers.keep(&servers);
        for server in &servers {
            self.watch_server(*server);
            self.set_live(*server, limits).await?;
        }
        if servers.is_empty() && starts {
            self.server_comes(limits).await?;
        } else if servers.is_empty() && prewarm {
            self.prewarm(limits).await?;
        }
        Ok(())
    }

    /// Starts a server before the first client comes, and waits until the server is ready with the planned limits.
    pub(super) async fn prewarm(&mut self, limits: &Limits) -> Result<(), Failure> {
        self.run.servers.forget_ended();
        self.shell.start_server().await?;
        self.server_comes(limits).await
    }

    async fn server_comes(&mut self, limits: &Limits) -> Result<(), Failure> {
        self.shell.passed("prewarm", "a server was asked for");
        let deadline = self.shell.now() + SERVER_TIMEOUT;
        let mut there = Vec::new();
        let server = loop {
            let ask_at = self.shell.now() + SERVER_PAUSE;
            let mut ready = Vec::new();
            while ready.is_empty() && self.step(ask_at).await? {
                ready = self.run.servers.ready();
            }
            // While the log can't be written, no line names a ready server. A tenant may also have forged a line about a ready
            // server. The service therefore asks the control daemon for the state of the servers too.
            let asked = if ready.is_empty() { there } else { ready };
            let look = self.shell.inspect(&asked, None).await?;
            // An old driver lists a server without a status until the control daemon notices the server's end.
            let is_running = |server: &u32| self.run.servers.get(*server).is_none_or(Server::is_running);
            if let Some(server) = look.with(&TAKES_LIMITS).filter(is_running).last() {
                // While the log can't be written, no line reports the end of a server. Servers that the control daemon does not
                // list are therefore forgotten.
                self.run.servers.keep(&look.servers);
                break server;
            }
            there = look.servers;
            let servers = &self.run.servers;
            if servers.alive().is_empty()
                && let Some((server, ended)) = servers.last_ended()
                && let Some(status) = ended.exit_status
                && there.iter().all(|server| !is_running(server))
            {
                // The control daemon has noticed the end of the previous server only now, and has started no server.
                if ended.has_ended || ended.ready {
                    return Err(Failure::Failed(self.how_the_server_ended()));
                }
                if let Some(text) = self.shell.not_ready_yet() {
                    return Err(Failure::NotYet(text));
                }
                return Err(Failure::Failed(format!(
                    "server {server} exited with status {status} before it was ready{last_words}",
                    last_words = self.shell.words()
                )));
            }
            if self.shell.now() >= deadline {
                // The control daemon may still list a server that was wrongly taken for ended.
                self.run.servers.keep_running();
                return Err(self.no_server_is_ready());
            }
        };
        self.watch_server(server);
        // The control daemon lists a server a moment before the server's line is in the log, so the service waits for the line.
        let deadline = self.shell.now() + LIMITS_TIMEOUT;
        while self.run.servers.running(server).is_some_and(|known| !known.ready)
            && self.step(deadline).await?
        {}
        self.confirm_or_correct(server, limits).await?;
        if self.run.servers.running(server).is_none() {
            return Err(Failure::Failed(self.how_the_server_ended()));
        }
        Ok(())
    }

    pub(super) fn no_server_is_ready(&self) -> Failure {
        let seconds = SERVER_TIMEOUT.as_secs();
        Failure::Failed(format!(
            "no MPS server became ready within {seconds} s{last_words}",
            last_words = self.shell.words()
        ))
    }

    pub(super) fn find_misfit(&mut self) {
        let misfit = if self.wanted.retiring {
            Some("this control daemon is no longer needed".to_owned())
        } else {
            self.shell.misfit(self.reach)
        };
        match misfit {
            Some(why) => self.run.blockers.put(Blocker::Misfit(why)),
            None => self.run.blockers.clear(ClearedBy::Order),
        }
    }
}
