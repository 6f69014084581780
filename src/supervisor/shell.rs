//! Answers the core's questions and carries out its acts while a control daemon serves. For this, the shell uses the control
//! daemon's front end and process, NVML, files and the journal.

use std::collections::BTreeSet;
use std::time::Duration;

use mps_core::mps::{Client, ClientPids, Inspection, Limits};
use mps_core::serve::{
    ClientsOnGpus, Failure, GpuReach, GpuShell, News, Occurrence, Requested, RunEffect, Said, SeenGpus, Shell,
};
use mps_core::terms::ProcessId;
use mps_core::view::DaemonView;
use mps_core::{CoreTime, GpuUuid, Permit, Tenure};
use tokio::sync::mpsc;
use tokio::time::{sleep, sleep_until};
use tracing::level_filters::LevelFilter;

use crate::mps::log::Line;
use crate::mps::process;
use common::directories;
use common::host::cpus::Cpus;
use common::host::proc;
use common::host::socket::listener;
use common::plan::Present;
use common::problem::Problem;

use super::bypass;
use super::daemon_run::DaemonRun;
use super::{Answer, Worker};

/// The user id with which the service starts a server ahead of its first client.
const ROOT: u32 = 0;

#[derive(Debug)]
pub(super) struct RunShell<'m> {
    pub(super) worker: &'m mut Worker,
    pub(super) run: &'m mut DaemonRun,
    /// None if the present act takes no requests.
    pub(super) requests: Option<&'m mut mpsc::Receiver<(Requested, Option<Answer>)>>,
    /// The channel for the answer to the last request. None if this request has no answer.
    pub(super) reply: Option<Answer>,
}

impl GpuShell for RunShell<'_> {
    async fn read_gpus(&mut self, gpus: &[GpuUuid], together: bool) -> Option<SeenGpus> {
        // NVML may answer late or never. While the service waits for NVML, it must notice the end of the control daemon.
        let status = tokio::select! {
            seen = self.worker.read_gpus(gpus, together) => return seen,
            status = self.run.process.exited() => status,
        };
        self.run.exit_status = status;
        None
    }

    async fn take_mode(&mut self, gpu: &GpuUuid) -> Result<bool, String> {
        self.worker.take_mode(gpu).await
    }

    fn process(&self, pid: u32) -> Option<ProcessId> {
        self.worker.process(pid)
    }

    fn bypasses_are(&mut self, gpu: &GpuUuid, bypasses: &BTreeSet<ProcessId>) {
        self.worker.bypasses_are(gpu, bypasses);
    }

    fn show(&mut self, change: impl FnOnce(&mut DaemonView)) {
        self.worker.show(change);
    }

    fn tell(&mut self, news: News, text: String) {
        self.worker.tell(news, text);
    }

    fn passed(&self, step: &'static str, text: &str) {
        self.worker.passed(step, text);
    }
}

impl Shell for RunShell<'_> {
    fn now(&self) -> CoreTime {
        self.worker.tools.begun.elapsed()
    }

    fn carry_out(&mut self, effect: RunEffect) {
        let (run, tools) = (&mut *self.run, &self.worker.tools);
        match effect {
            RunEffect::ContinueIfStopped(servers) => self.continue_if_stopped(servers),
            RunEffect::ReopenWays => self.worker.admission.reopen_ways(),
            RunEffect::LetGo => self.worker.let_go(),
            RunEffect::KeepStateFile { stays } => self.keep_state_file(stays),
            RunEffect::RotateLog => self.rotate_log(),
            RunEffect::TellHit { server, ordinal, clients } => {
                run.tell_hit(server, ordinal, clients, &self.worker.reporter, tools);
            }
            RunEffect::ClientCame(_) => tools.wake_ups.wake(&run.running.gpus, |wake_ups| &wake_ups.came),
            RunEffect::CheckedInUse => tools.wake_ups.wake(&run.running.gpus, |wake_ups| &wake_ups.look),
            RunEffect::RememberClients(clients) => tools.clients.want(clients),
            RunEffect::ClientsAre(listed) => tools.clients.are(&self.worker.reporter.id(), listed),
            RunEffect::WatchServer(server) => self.watch_server(server),
            RunEffect::Answer(answer) => {
                if let Some(reply) = self.reply.take() {
                    // Sending fails only if the caller no longer waits for the answer.
                    let _ = reply.send(answer.map_err(Problem::from));
                }
            }
        }
    }

    async fn next(&mut self, until: CoreTime, takes_requests: bool) -> Result<Occurrence, Failure> {
        let deadline = self.worker.tools.begun + until;
        let requests = self.requests.as_mut().filter(|_| takes_requests);
        let request = async {
            match requests {
                Some(requests) => requests.recv().await,
                None => std::future::pending().await,
            }
        };
        Ok(tokio::select! {
            biased;
            // A tenant can make the control daemon write log lines without end. So the few requests of administrators come
            // before the log lines.
            Some((request, reply)) = request => {
                self.reply = reply;
                Occurrence::Asked(request)
            }
            // Lines of the log come before the end of the control daemon, since they may say why it ends.
            line = self.run.log.next() => match line {
                Ok(line) => Occurrence::Said(self.note(&line)),
                Err(error) => {
                    let path = self.run.log.path().display();
                    return Err(Failure::Failed(format!("{path}: {error}")));
                }
            },
            status = self.run.process.exited() => {
                self.run.exit_status = status;
                Occurrence::Ended
            }
            Some(Ok(server)) = self.run.server_ends.join_next() => Occurrence::ServerEnded(server),
            () = sleep_until(deadline) => Occurrence::Nothing,
        })
    }

    async fn pause(&mut self, duration: Duration) {
        sleep(duration).await;
    }

    fn end_of_log(&mut self, skips: bool) -> Option<u64> {
        if skips && let Err(error) = self.run.log.skip_to_end() {
            tracing::debug!("the service can't skip to the end of the control daemon's log: {error}");
        }
        self.run.log.length().ok()
    }

    async fn line_before(&mut self, end: u64) -> Option<Said> {
        if self.run.log.offset() >= end {
            return None;
        }
        let line = self.run.log.next_there().await.ok()??;
        Some(self.note(&line))
    }

    fn words(&self) -> String {
        self.run.words()
    }

    fn not_ready_yet(&self) -> Option<String> {
        self.run.not_ready_yet().map(str::to_owned)
    }

    async fn ends_now(&mut self) -> bool {
        let Some(status) = self.run.process.exited_by_now().await else { return false };
        self.run.exit_status = status;
        true
    }

    fn how_it_ended(&self) -> Failure {
        Failure::Ended { text: self.run.how_it_ended(), refuses_multiuser: self.run.refuses_multiuser() }
    }

    async fn inspect(&mut self, servers: &[u32], limits: Option<&Limits>) -> Result<Inspection, Failure> {
        Ok(self.run.control.inspect(servers, limits).await?)
    }

    async fn set_limits(&mut self, server: Option<u32>, limits: &Limits) -> Result<Vec<u32>, Failure> {
        Ok(self.run.control.set_limits(server, limits).await?)
    }

    async fn set_limits_and_start(&mut self, limits: &Limits) -> Result<Vec<u32>, Failure> {
        Ok(self.run.control.set_limits_and_start(limits, ROOT).await?)
    }

    async fn start_server(&mut self) -> Result<(), Failure> {
        Ok(self.run.control.start_server(ROOT).await?)
    }

    async fn client_pids(&mut self, expected: &[u32]) -> Result<ClientPids, Failure> {
        Ok(self.run.control.client_pids(expected).await?)
    }

    async fn clients(&mut self, expected: &[u32]) -> Result<Vec<Client>, Failure> {
        Ok(self.run.control.clients(expected).await?)
    }

    async fn shut_down_idle_server(&mut self, server: u32, may_end: Permit) -> Result<(), Failure> {
        Ok(self.run.control.shut_down_idle_server(server, may_end).await?)
    }

    async fn shut_down_server(&mut self, server: u32, may_end: Permit) -> Result<(), Failure> {
        Ok(self.run.control.shut_down_server(server, may_end).await?)
    }

    fn pid(&self) -> u32 {
        self.run.running.process.pid
    }

    fn listener(&self) -> Option<u32> {
        self.run.control.daemon_pid()
    }

    fn is_nobody(&self) -> bool {
        self.run.control.is_nobody()
    }

    fn has_children(&self) -> Option<bool> {
        proc::has_children(self.pid()).ok()
    }

    async fn quit_if_idle(&mut self, may_end: Permit) -> bool {
        let run = &mut *self.run;
        if !process::stop_idle(&mut run.process, &run.control, may_end).await {
            return false;
        }
        let why = if self.worker.is_retiring() {
            ", since the configuration no longer needs this control daemon, which had no client"
        } else {
            " for a restart, at a time when it had no client"
        };
        let (id, pid) = (self.worker.reporter.id(), self.pid());
        self.worker.reporter.event(format!("control daemon {id} (PID {pid}) ended{why}"));
        true
    }

    async fn quit(&mut self, may_end: Permit) -> bool {
        let run = &mut *self.run;
        tracing::debug!(step = "quit", "control daemon {pid} is asked to end", pid = run.running.process.pid);
        let quit_timeout = self.worker.plan.supervision.quit_timeout;
        let has_ended = process::stop(&mut run.process, &run.control, quit_timeout, may_end).await;
        if has_ended {
            self.say_how_it_ended("quit");
        }
        has_ended
    }

    async fn end_by_signal(&mut self, may_end: Permit) -> bool {
        let (id, pid) = (self.worker.reporter.id(), self.pid());
        let reporter = &self.worker.reporter;
        reporter
            .warning(format!("control daemon {id} (PID {pid}) does not quit and is sent SIGTERM: {may_end}"));
        match process::end_by_signal(&mut self.run.process, may_end).await {
            Ok(how) => {
                self.say_how_it_ended(how);
                true
            }
            Err(error) => {
                reporter.warning(format!("control daemon {id} (PID {pid}) can't be stopped: {error}"));
                false
            }
        }
    }

    async fn clients_on_gpus(&mut self, ours: &BTreeSet<u32>) -> ClientsOnGpus {
        let clients = self.worker.tools.nvml.mps_clients(&self.run.running.gpus).await;
        if self.worker.plan.tenure() == Tenure::Alone {
            return clients;
        }
        let of_several =
            || "NVML does not say to which of several control daemons a client belongs".to_owned();
        let certainly = |there: Result<BTreeSet<u32>, String>| {
            let there = there?;
            let left = &there & ours;
            if there.is_empty() || !left.is_empty() { Ok(left) } else { Err(of_several()) }
        };
        clients.into_iter().map(|(gpu, there)| (gpu, certainly(there))).collect()
    }

    async fn holders(&mut self, servers: &[u32]) -> String {
        let mut holders = Vec::new();
        for (uuid, there) in self.worker.tools.nvml.all_processes(&self.run.running.gpus).await {
            let mut there = there.unwrap_or_default();
            there.retain(|process| !process.via_mps);
            holders.extend(bypass::find(&uuid, &there, servers, &[].into()));
        }
        bypass::describe(&holders)
    }

    fn runs_as(&self, pid: u32, uid: u32) -> bool {
        proc::status(pid).is_ok_and(|status| status.uids().contains(&uid))
    }

    fn command(&self, pid: u32) -> String {
        proc::name(pid).unwrap_or_default()
    }

    fn let_users_in(&mut self) -> Vec<String> {
        let running = &self.run.running;
        let mut bad_directories = Vec::new();
        match directories::let_users_in(&running.pipe_directory, running.control_directory()) {
            Ok(repaired) => {
                for what in repaired {
                    self.worker
                        .reporter
                        .warning(format!("{what}; until then, clients of other users could not connect"));
                }
            }
            Err(bad) => bad_directories.push(bad.to_string()),
        }
        match running
            .private_directory
            .as_ref()
            .map_or(Ok(None), |private| directories::keep_others_out(private))
        {
            Ok(None) => {}
            Ok(Some(what)) => {
                self.worker
                    .reporter
                    .warning(format!("{what}; until then, other users could command the control daemon"));
            }
            Err(bad) => bad_directories.push(bad.to_string()),
        }
        bad_directories
    }

    fn lead_here(&mut self) -> Result<(), Failure> {
        let admission = &self.worker.admission;
        let led = admission.lead(&self.run.running, &self.worker.plan);
        self.run.running.slice_directories = admission.slice_directories();
        self.worker.report_links(&self.run.running.pipe_directory, None);
        // A missing link counts as a failure, after which the service pauses. A missing link is no blocker of the core
        // (`mps_core::serve`): for a blocker, the service would end an idle control daemon and start it again without a pause.
        led.map_err(Failure::Waiting)
    }

    fn keep_links(&mut self) -> Option<String> {
        let running = &self.run.running;
        let other = listener(&running.pipe_directory).filter(|pid| *pid != running.process.pid);
        let kept = self.worker.admission.apply();
        self.worker.report_links(&running.pipe_directory, other);
        kept.err()
    }

    fn keep_waiting(&mut self) -> Result<(), String> {
        self.worker.admission.keep_waiting()
    }

    fn is_in_place(&self) -> bool {
        self.run.running.pipe_directory == self.worker.plan.pipe_directory
    }

    fn misfit(&self, reach: &GpuReach) -> Option<String> {
        let running = &self.run.running;
        let present = Present {
            pipe_directory: &running.pipe_directory,
            control_directory: running.control_directory(),
            log_directory: &running.log_directory,
            gpus: &running.gpus,
            multiuser: running.multiuser,
            near_cpus: running.near_cpus,
        };
        self.worker.plan.misfit(&present, |uuid| !reach.is_left_out(uuid))
    }

    fn describe(&self, clients: &BTreeSet<u32>) -> String {
        let named = clients.iter().map(|pid| format!("{pid} ({})", proc::program(*pid)));
        named.collect::<Vec<_>>().join(", ")
    }

    fn has_clients(&self) -> bool {
        self.worker.tools.clients.has_clients(&self.worker.reporter.id())
    }

    fn is_awaited(&self) -> bool {
        self.reply.as_ref().is_some_and(|reply| !reply.is_closed())
    }
}

impl RunShell<'_> {
    fn continue_if_stopped(&self, servers: Vec<u32>) {
        for pid in servers.into_iter().chain([self.pid()]) {
            if let Some(continued) = process::continue_if_stopped(pid) {
                self.worker.reporter.warning(continued);
            }
        }
    }

    fn keep_state_file(&mut self, stays: bool) {
        self.show_cpus();
        self.tell_left_out();
        let run = &mut *self.run;
        let trouble = if stays { run.log.trouble() } else { run.log_trouble };
        if trouble != run.log_trouble {
            run.log_trouble = trouble;
            let path = run.log.path().display();
            match trouble {
                Some(trouble) => self.worker.reporter.warning(format!("{path}: {trouble}")),
                None => self.worker.reporter.event(format!("{path} can be written again")),
            }
        }
        run.running.log_offset = run.log.offset();
        let (id, running) = (self.worker.reporter.id(), run.running.clone());
        let mut state_file = self.worker.tools.state_file.lock();
        let repaired = state_file.repair();
        match repaired.and_then(|repaired| state_file.remember_control_daemon(id, running).map(|()| repaired))
        {
            Ok(false) => {}
            Ok(true) => {
                self.worker.reporter.warning(
                    "the state file was lost or damaged; the service has written the file again".to_owned(),
                );
            }
            Err(error) => self.worker.reporter.warning(format!("the state file can't be written: {error}")),
        }
    }

    fn rotate_log(&mut self) {
        let log = &mut self.run.log;
        match log.rotated() {
            Some(Ok(())) => tracing::debug!("{} was rotated", log.path().display()),
            Some(Err(error)) => {
                let text = format!(
                    "{path} was emptied, but its lines could not be copied to {path}.1: {error}",
                    path = log.path().display()
                );
                self.worker.reporter.warning(text);
            }
            None if log.offset() > self.worker.plan.supervision.log_max_bytes => {
                log.rotate(self.worker.plan.supervision.log_max_bytes);
            }
            None => {}
        }
    }

    fn watch_server(&mut self, server: u32) {
        if std::mem::replace(&mut self.worker.has_served, true) {
            self.worker.reporter.update(|status| status.view.server_restarts += 1);
        }
        self.run.server_ends.spawn(async move {
            process::ended(server).await;
            server
        });
    }

    fn say_how_it_ended(&self, how: &str) {
        let (id, pid) = (self.worker.reporter.id(), self.pid());
        tracing::debug!(
            step = "ended",
            "control daemon {pid} has ended, but is not yet removed from the state file"
        );
        self.worker.reporter.event(format!("control daemon {id} (PID {pid}) ended by {how}"));
    }

    /// Publishes the CPUs on which the control daemon may run, since another program may have changed them.
    fn show_cpus(&self) {
        let cpus = Cpus::allowed_for(self.pid()).map(Cpus::describe);
        self.worker.reporter.update(|status| status.view.cpus = cpus);
    }

    /// Updates the register of clients from a line of the log. A new line also goes to the journal, unless too many lines come.
    /// A line is not new if an earlier service has read it.
    fn note(&mut self, line: &Line) -> Said {
        let run = &mut *self.run;
        let is_news = run.log.offset() > run.quiet_until;
        let id = self.worker.reporter.id();
        self.worker.tools.clients.observe(&id, &line.meaning);
        if is_news {
            run.quiet_until = 0;
            run.remember_words(line);
            self.pass_on(line);
        }
        Said { meaning: line.meaning.clone(), is_news }
    }

    fn pass_on(&mut self, line: &Line) {
        self.tell_left_out();
        if line.level() <= LevelFilter::current() && self.worker.rate_limit.take(1, self.now()) {
            line.trace(&self.worker.reporter.id().to_string());
        }
    }

    fn tell_left_out(&mut self) {
        let now = self.now();
        if let Some(count) = self.worker.rate_limit.suppressed_before(now) {
            self.worker.reporter.warning(self.run.too_much_is_written(count));
        }
    }
}
