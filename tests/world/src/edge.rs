//! The simulated `Shell`, through which the service's real code for a running control daemon acts on the world. Before each
//! answer the code waits for its turn, so that any event can happen between question and answer.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::Duration;

use mps_core::mps::{Client, ClientPids, Inspection, Limits, ServerStatus};
use mps_core::serve::{ClientsOnGpus, Failure, GpuReach, Occurrence, Requested, RunEffect, Said, Shell};
use mps_core::{CoreTime, DaemonId, Permit, Tenure};

use super::answers::{difference, inspect, listed, read_line, setting};
use super::mps::{Mps, NO_LIMITS, OLD_GPU, Setting, SimServer};
use super::reader::Waits;
use super::story::spaced;
use super::ways::SimAdmission;

const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone)]
pub struct SimShell {
    pub(crate) mps: Arc<Mutex<Mps>>,
    pub(crate) id: DaemonId,
    pub(crate) gpus: Vec<String>,
    pub(crate) setting: Setting,
    pub(crate) admission: SimAdmission,
}

impl SimShell {
    /// True if NVML lists the clients of this control daemon on the GPU. NVML lists no clients of `OLD_GPU`. If several control
    /// daemons take turns on a GPU, NVML does not tell their clients apart.
    pub(crate) fn lists_clients(&self, gpu: &str) -> bool {
        gpu != OLD_GPU && self.id.tenure() == Tenure::Alone
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Mps> {
        self.mps.lock().unwrap()
    }

    /// Suspends the act until the wait that `waits` describes is over. The world then polls the act again.
    async fn wait(&self, waits: Waits) {
        let mut has_begun = false;
        poll_fn(|_| {
            let mut mps = self.lock();
            if has_begun && mps.is_awake() {
                mps.reader.waits = Waits::Nothing;
                return Poll::Ready(());
            }
            if !has_begun {
                mps.count_step();
                mps.reader.waits = waits;
                has_begun = true;
            }
            Poll::Pending
        })
        .await;
    }

    pub(crate) async fn turn(&self) {
        let now = self.lock().now;
        self.wait(Waits::Turn(now)).await;
    }

    /// Asks the control daemon a question. If another control daemon listens in this control daemon's directory, the answer is
    /// `other`.
    async fn ask<T: Send>(
        &self,
        question: &'static str,
        other: T,
        effect: impl FnOnce(&mut Mps) -> Result<T, Failure> + Send,
    ) -> Result<T, Failure> {
        self.lock().reader.questions.push(question);
        self.turn().await;
        let hangs_for = {
            let mut mps = self.lock();
            mps.turn_during(question);
            if let Some(failure) = mps.stage.answer_to(question) {
                return Err(failure);
            }
            let is_asked = mps.taken_by.is_none() && mps.listener().is_some();
            (is_asked && !mps.answers()).then(|| mps.now + ANSWER_TIMEOUT)
        };
        let silent = |why: &str| Failure::Silent(format!("the control daemon {why}"));
        if let Some(deadline) = hangs_for {
            self.wait(Waits::Until(deadline)).await;
            return Err(silent("has not answered for 5 s"));
        }
        let mut mps = self.lock();
        match mps.listener() {
            None => return Err(Failure::Unreachable("nobody listens".to_owned())),
            Some(listener) if listener != mps.pid => return Ok(other),
            Some(_) => {}
        }
        if mps.goes_wrong(300) {
            return Err(Failure::NotUnderstood("it answers in other words".to_owned()));
        }
        if mps.goes_wrong(300) {
            return Err(Failure::NotYet("the front end can't be run".to_owned()));
        }
        if mps.goes_wrong(60) {
            return Err(silent("has dropped a question"));
        }
        effect(&mut mps)
    }

    /// Gives the control daemon a command. The control daemon may carry out the command although its answer is late or lost.
    async fn command<T: Send>(
        &self,
        question: &'static str,
        other: T,
        effect: impl FnOnce(&mut Mps) -> Result<T, Failure> + Send,
    ) -> Result<T, Failure> {
        let answer = self.ask(question, other, effect).await;
        let (is_late, is_lost) = {
            let mut mps = self.lock();
            (mps.goes_wrong(3), mps.goes_wrong(100))
        };
        if is_late {
            self.turn().await;
        }
        if is_lost && answer.is_ok() {
            return Err(Failure::Silent("an answer got lost".to_owned()));
        }
        answer
    }

    /// Checks the promise `limits-are-in-force`: a control daemon that the service shows as ready has the limits of its order,
    /// unless another program has just changed them.
    pub(crate) fn check_limits_are_in_force(&self, mps: &Mps) {
        if mps.reader.is_ready() && mps.reader.shown.view.settled && mps.taken_by.is_none() {
            let differing = mps.differing(self.setting, false);
            assert!(differing.is_none(), "limits-are-in-force: {} is ready, and {differing:?}", mps.pid);
        }
    }

    /// Checks the promise `the-view-is-true`: a control daemon that is shown as serving a GPU has the GPU, with the limits of
    /// its order. The check is skipped if an event has happened that the service can't know yet.
    pub(crate) fn check_the_view_is_true(&self, mps: &Mps) {
        if mps.taken_by.is_some() || mps.has_news() {
            return;
        }
        let served = self.gpus.iter().filter(|gpu| mps.reader.shown.view.unserved(gpu).is_none());
        for gpu in served {
            let ordinal = mps.gpus.iter().position(|one| one == gpu);
            let ordinal = ordinal.unwrap_or_else(|| {
                panic!("the-view-is-true: {} is shown as serving {gpu}, and has not got it", mps.pid)
            });
            let of_gpu = |one: Setting| (one.percentage, one.mib[ordinal]);
            let differing = mps.differing_in(of_gpu, self.setting, false);
            assert!(differing.is_none(), "the-view-is-true: {gpu} is shown as served, and {differing:?}");
        }
    }

    /// Returns the next event that the service sees: a line of the log, the end of a process, or an administrator's request. A
    /// request counts only if `takes_requests` is true. `Ok(None)` means that nothing has happened.
    fn happened(&self, takes_requests: bool) -> Result<Option<Occurrence>, Failure> {
        let mut mps = self.lock();
        mps.count_step();
        if mps.stage.log_is_unreadable {
            return Err(Failure::Failed("the log can't be read".to_owned()));
        }
        if let Some(said) = read_line(&mut mps) {
            return Ok(Some(Occurrence::Said(said)));
        }
        if !mps.is_alive {
            return Ok(Some(Occurrence::Ended));
        }
        if let Some(server) = mps.reader.ended.pop_front() {
            return Ok(Some(Occurrence::ServerEnded(server)));
        }
        let asked = if takes_requests { mps.reader.requests.pop_front() } else { None };
        Ok(asked.map(|(asked, request)| {
            mps.reader.asked_at = Some(asked);
            mps.reader.is_forced = request == Requested::Apply { force: true };
            Occurrence::Asked(request)
        }))
    }
}

/// Checks the promise `what-is-ready-takes-clients`: no server of a control daemon that is shown as ready has a fatal GPU error
/// that the log has reported. Old drivers do not report the status of servers. With an old driver the check waits until the log
/// has named the clients that the error has hit.
pub(crate) fn check_what_is_ready_takes_clients(mps: &Mps) {
    let reader = &mps.reader;
    let was_read = |line: usize| (reader.quiet_until..reader.position).contains(&line);
    let is_known = |one: &SimServer| {
        (!mps.is_old || mps.hits.is_subset(&reader.read))
            && one.status == ServerStatus::Fault
            && !one.is_ending
            && one.fault_line.is_some_and(was_read)
    };
    let faulted = mps.servers.iter().find(|(_, one)| reader.is_ready() && is_known(one));
    assert!(faulted.is_none(), "what-is-ready-takes-clients: {} is ready, and {faulted:?}", mps.pid);
}

/// Checks the promise `programs-wait-for-a-server`: the service releases the waiting programs only when a server has the
/// GPUs. Programs that are released too early run without MPS, and then no server can start. The check is skipped if the
/// server may have ended without the service's knowledge. The check is also skipped if the control daemon serves one user at a
/// time, since its server starts only with the first client.
fn check_programs_wait_for_a_server(mps: &Mps) {
    let is_known = mps.is_alive && mps.reader.ended.is_empty() && mps.reader.position == mps.log.len();
    assert!(
        !mps.servers.is_empty() || mps.serves_one_user || mps.ways.is_none() || !is_known,
        "programs-wait-for-a-server: {} has none, and programs that have waited begin",
        mps.pid
    );
}

impl Shell for SimShell {
    fn now(&self) -> CoreTime {
        self.lock().now
    }

    fn carry_out(&mut self, effect: RunEffect) {
        let mut mps = self.lock();
        match effect {
            RunEffect::ContinueIfStopped(servers) => {
                mps.note(format_args!("continue{}", spaced(&servers)));
                mps.go_on(&servers);
            }
            RunEffect::ReopenWays => {
                mps.note(format_args!("lead again"));
                self.admission.reopen_ways(&mut mps);
            }
            RunEffect::LetGo => {
                mps.note(format_args!("let go"));
                check_programs_wait_for_a_server(&mps);
                self.admission.let_go();
            }
            RunEffect::KeepStateFile { stays } => {
                mps.note(format_args!("keep the state file, stays: {stays}"));
                mps.keep_state_file();
            }
            RunEffect::RotateLog => mps.note(format_args!("rotate the log")),
            RunEffect::TellHit { server, ordinal, clients } => mps.tell_hit(server, ordinal, &clients),
            RunEffect::ClientCame(client) => mps.note(format_args!("client {client} came")),
            RunEffect::RememberClients(clients) => {
                mps.note(format_args!("remember {clients:?}"));
                mps.look_at_clients(true);
            }
            RunEffect::ClientsAre(listed) => {
                mps.note(format_args!("clients are {:?}", listed.keys()));
                mps.are_listed(listed);
            }
            RunEffect::CheckedInUse => mps.note(format_args!("checked in use")),
            RunEffect::WatchServer(server) => {
                mps.note(format_args!("watch {server}"));
                mps.turn_during("watch");
                if mps.servers.get(&server).is_some_and(|one| !one.has_ended) {
                    mps.reader.watched.insert(server);
                } else {
                    mps.reader.ended.push_back(server);
                }
            }
            RunEffect::Answer(answer) => {
                mps.stage.answered.push(answer);
                (mps.reader.is_forced, mps.reader.asked_at) = (false, None);
            }
        }
    }

    async fn next(&mut self, until: CoreTime, takes_requests: bool) -> Result<Occurrence, Failure> {
        loop {
            if let Some(occurrence) = self.happened(takes_requests)? {
                return Ok(occurrence);
            }
            if self.lock().now >= until {
                return Ok(Occurrence::Nothing);
            }
            self.wait(Waits::Event { until, takes_requests }).await;
        }
    }

    async fn pause(&mut self, duration: Duration) {
        self.lock().note(format_args!("pause"));
        let until = self.lock().now + duration;
        self.wait(Waits::Until(until)).await;
    }

    fn end_of_log(&mut self, skips: bool) -> Option<u64> {
        let mut mps = self.lock();
        mps.turn_during("read on");
        if skips {
            mps.note(format_args!("skip"));
            mps.lines_are_missing = true;
            mps.reader.position = mps.reader.position.max(mps.log.len().saturating_sub(3));
        }
        u64::try_from(mps.log.len()).ok()
    }

    /// Reads the next line of the log before position `end`. Before some lines the function waits for its turn, so that any
    /// event can happen between two lines.
    async fn line_before(&mut self, end: u64) -> Option<Said> {
        let takes_long = self.lock().goes_wrong(10);
        if takes_long {
            self.turn().await;
        }
        let mut mps = self.lock();
        if mps.reader.position as u64 >= end { None } else { read_line(&mut mps) }
    }

    fn words(&self) -> String {
        "; its log ends here".to_owned()
    }

    fn not_ready_yet(&self) -> Option<String> {
        let is_too_early = self.lock().goes_wrong(3);
        is_too_early.then(|| "the fabric manager is not ready".to_owned())
    }

    async fn ends_now(&mut self) -> bool {
        self.turn().await;
        !self.lock().is_alive
    }

    fn how_it_ended(&self) -> Failure {
        let refuses_multiuser = self.lock().refuses_multiuser;
        Failure::Ended { text: "the control daemon ended".to_owned(), refuses_multiuser }
    }

    async fn inspect(&mut self, servers: &[u32], limits: Option<&Limits>) -> Result<Inspection, Failure> {
        let differences = limits.and_then(|limits| Some((None, difference(NO_LIMITS, limits)?)));
        let other = Inspection {
            servers: Vec::new(),
            statuses: servers.iter().map(|pid| (*pid, ServerStatus::Gone)).collect(),
            differences: differences.into_iter().collect(),
        };
        let limited = if limits.is_some() { " with limits" } else { "" };
        self.lock().note(format_args!("inspect{}{limited}", spaced(servers)));
        self.ask("inspect", other, |mps| Ok(inspect(mps, servers, limits))).await
    }

    async fn set_limits(&mut self, server: Option<u32>, limits: &Limits) -> Result<Vec<u32>, Failure> {
        let effect = |mps: &mut Mps| {
            let setting = setting(limits);
            match server.map(|pid| mps.servers.get_mut(&pid)) {
                None => mps.defaults = setting,
                Some(Some(one)) if one.status != ServerStatus::Initializing => one.setting = setting,
                Some(Some(_)) => return Err(Failure::NotUnderstood("the server takes no limits".to_owned())),
                Some(None) => {}
            }
            mps.foreign.remove(&server);
            if let Some(pid) = server.filter(|pid| mps.servers.contains_key(pid)) {
                mps.say_memory(pid, setting);
            }
            Ok(mps.servers.keys().copied().collect())
        };
        let of = server.map(|server| format!(" of {server}")).unwrap_or_default();
        {
            let mut mps = self.lock();
            mps.note(format_args!("set limits{of}"));
            let ended = server.filter(|server| mps.has_read_the_end_of(*server));
            assert!(ended.is_none(), "the-ended-get-no-limits: {} is asked for limits of {ended:?}", mps.pid);
        }
        self.command("set limits", Vec::new(), effect).await
    }

    async fn set_limits_and_start(&mut self, limits: &Limits) -> Result<Vec<u32>, Failure> {
        let effect = |mps: &mut Mps| {
            mps.defaults = setting(limits);
            mps.foreign.remove(&None);
            mps.count_start();
            let before = mps.servers.keys().copied().collect();
            mps.start_server();
            Ok(before)
        };
        self.lock().note(format_args!("set limits and start"));
        self.command("set limits", Vec::new(), effect).await
    }

    async fn start_server(&mut self) -> Result<(), Failure> {
        let effect = |mps: &mut Mps| {
            mps.count_start();
            mps.start_server();
            Ok(())
        };
        self.lock().note(format_args!("start server"));
        self.command("start server", (), effect).await
    }

    async fn client_pids(&mut self, _: &[u32]) -> Result<ClientPids, Failure> {
        self.lock().note(format_args!("client PIDs"));
        self.ask("client PIDs", ClientPids::new(), |mps| Ok(listed(mps))).await
    }

    async fn clients(&mut self, expected: &[u32]) -> Result<Vec<Client>, Failure> {
        let effect = |mps: &mut Mps| {
            let listed = listed(mps);
            let pids = listed.into_values().flatten();
            let on_gpus = |pid: u32| {
                let one = mps.clients.get(&pid).cloned().into_iter();
                one.flat_map(move |one| {
                    let places = one.ordinals.into_iter().map(move |ordinal| (pid, one.server, ordinal));
                    places.flat_map(move |place| std::iter::repeat_n(place, one.connections))
                })
            };
            let client = |(pid, server, ordinal): (u32, u32, usize)| {
                let gpu_prefix = mps.gpus.get(ordinal)?.clone();
                Some(Client { pid, id: Some(u64::from(pid)), server, gpu_prefix })
            };
            Ok(pids.flat_map(on_gpus).filter_map(client).collect())
        };
        self.lock().note(format_args!("clients{}", spaced(expected)));
        self.ask("clients", Vec::new(), effect).await
    }

    async fn shut_down_idle_server(&mut self, server: u32, may_end: Permit) -> Result<(), Failure> {
        let effect = |mps: &mut Mps| {
            if !mps.clients.values().any(|client| client.server == server) && !mps.stage.stays {
                mps.end_server(server, false, Some(may_end.cause()));
            }
            Ok(())
        };
        self.lock().note(format_args!("shut down idle server {server} ({:?})", may_end.cause()));
        self.command("shut down idle server", (), effect).await
    }

    async fn shut_down_server(&mut self, server: u32, may_end: Permit) -> Result<(), Failure> {
        let effect = |mps: &mut Mps| {
            mps.end_server(server, false, Some(may_end.cause()));
            Ok(())
        };
        self.lock().note(format_args!("shut down server {server} ({:?})", may_end.cause()));
        self.command("shut down server", (), effect).await
    }

    fn pid(&self) -> u32 {
        self.lock().pid
    }

    fn listener(&self) -> Option<u32> {
        self.lock().listener()
    }

    fn is_nobody(&self) -> bool {
        self.lock().listener().is_none()
    }

    fn has_children(&self) -> Option<bool> {
        let mut mps = self.lock();
        let is_known = !mps.stage.children_are_unknown && !mps.goes_wrong(20);
        is_known.then(|| !mps.servers.is_empty())
    }

    async fn quit_if_idle(&mut self, may_end: Permit) -> bool {
        let is_ours = |mps: &Mps| mps.listener() == Some(mps.pid);
        if !is_ours(&self.lock()) {
            return false;
        }
        let effect = |mps: &mut Mps| {
            if mps.stage.stays {
                return Ok(());
            }
            let open = self.admission.leading_to(mps.pid);
            assert!(
                open.is_empty() || mps.door_is_stuck,
                "the-door-is-closed-first: {open:?} lead to {}, which is asked to end",
                mps.pid
            );
            assert!(
                mps.clients.is_empty() || mps.door_is_stuck || mps.stage.is_on,
                "the-door-is-closed-first: {} is asked to end with {} clients",
                mps.pid,
                mps.clients.len()
            );
            if mps.clients.is_empty() {
                mps.end(Some(may_end.cause()));
            } else {
                mps.quits_when_idle = true;
            }
            Ok(())
        };
        self.lock().note(format_args!("quit if idle ({:?})", may_end.cause()));
        let _ = self.ask("quit if idle", (), effect).await;
        !self.lock().is_alive
    }

    async fn quit(&mut self, may_end: Permit) -> bool {
        self.lock().begins_to_end();
        if self.listener() != Some(self.pid()) {
            return false;
        }
        let effect = |mps: &mut Mps| {
            if !mps.stage.stays && !mps.goes_wrong(8) {
                mps.end(Some(may_end.cause()));
            }
            Ok(())
        };
        self.lock().note(format_args!("quit ({:?})", may_end.cause()));
        let _ = self.ask("quit", (), effect).await;
        !self.lock().is_alive
    }

    /// The real service sends the signal at once, so this function does not wait for a turn. During such a wait a client could
    /// connect after the service has listed the clients for the last time, and the signal would end the client's work.
    async fn end_by_signal(&mut self, may_end: Permit) -> bool {
        let mut mps = self.lock();
        mps.note(format_args!("signal ({:?})", may_end.cause()));
        if mps.stage.survives || mps.goes_wrong(4) {
            return false;
        }
        mps.end(Some(may_end.cause()));
        true
    }

    async fn clients_on_gpus(&mut self, ours: &BTreeSet<u32>) -> ClientsOnGpus {
        self.lock().note(format_args!("clients on GPUs"));
        self.turn().await;
        let mut mps = self.lock();
        let gpus = mps.gpus.clone();
        let failing = if mps.goes_wrong(30) { mps.dice.pick(&gpus).cloned() } else { None };
        let on = |ordinal: usize| {
            let there = mps.clients.iter().filter(|(_, one)| one.ordinals.contains(&ordinal));
            there.map(|(pid, _)| *pid).collect::<BTreeSet<u32>>()
        };
        let list = |(ordinal, gpu): (usize, &String)| {
            let there = match self.id.tenure() {
                Tenure::Alone => Some(on(ordinal)).filter(|_| self.lists_clients(gpu)),
                // Several control daemons take turns on the GPU, and NVML lists the clients of all of them. Only the clients in
                // `ours` are known to belong to this control daemon.
                Tenure::InTurns => Some(&on(ordinal) & ours).filter(|ours| !ours.is_empty()),
            };
            let there = there.filter(|_| !mps.out_of_reach.contains(gpu) && failing.as_ref() != Some(gpu));
            (gpu.clone(), there.ok_or_else(|| "NVML does not list them".to_owned()))
        };
        let mut listed: ClientsOnGpus = mps.gpus.iter().enumerate().map(list).collect();
        listed.extend(mps.stage.nvml.clone());
        listed
    }

    async fn holders(&mut self, servers: &[u32]) -> String {
        self.lock().note(format_args!("holders besides{}", spaced(servers)));
        self.turn().await;
        let mut mps = self.lock();
        if mps.goes_wrong(8) { "a program".to_owned() } else { mps.stage.holders.clone() }
    }

    fn runs_as(&self, _: u32, _: u32) -> bool {
        true
    }

    fn command(&self, pid: u32) -> String {
        format!("command of {pid}")
    }

    fn let_users_in(&mut self) -> Vec<String> {
        let mut mps = self.lock();
        if mps.goes_wrong(100) {
            vec!["its directory has another mode".to_owned()]
        } else {
            mps.stage.bad_directories.clone()
        }
    }

    fn lead_here(&mut self) -> Result<(), Failure> {
        self.lock().note(format_args!("lead here"));
        if let Some(failure) = &self.lock().stage.does_not_lead {
            return Err(failure.clone());
        }
        let led = self.admission.lead(&mut self.lock(), &self.gpus);
        if self.lock().goes_wrong(200) {
            Err(Failure::Waiting("no link".to_owned()))
        } else {
            led.map_err(Failure::Waiting)
        }
    }

    fn keep_links(&mut self) -> Option<String> {
        let mut mps = self.lock();
        mps.note(format_args!("keep links"));
        let applied = self.admission.apply(Some(&mut mps));
        applied.err().or_else(|| mps.stage.bad_links.clone())
    }

    fn keep_waiting(&mut self) -> Result<(), String> {
        let mut mps = self.lock();
        mps.note(format_args!("keep waiting"));
        let kept = self.admission.keep_waiting(&mut mps);
        let kept = kept.and(mps.stage.bad_links.clone().map_or(Ok(()), Err));
        mps.door_is_stuck = kept.is_err();
        kept
    }

    fn is_in_place(&self) -> bool {
        !self.lock().stage.is_elsewhere
    }

    fn misfit(&self, reach: &GpuReach) -> Option<String> {
        let mps = self.lock();
        if mps.stage.is_on {
            return mps.stage.misfit.clone();
        }
        let wanted = self.gpus.iter().filter(|gpu| !reach.is_left_out(gpu));
        (!wanted.eq(mps.gpus.iter())).then(|| "it has other GPUs".to_owned())
    }

    fn describe(&self, clients: &BTreeSet<u32>) -> String {
        clients.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
    }

    fn has_clients(&self) -> bool {
        self.lock().has_known_clients()
    }

    fn is_awaited(&self) -> bool {
        self.lock().is_awaited()
    }
}
