//! The questions to a host, and the acts there.

use std::collections::BTreeSet;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Poll;
use std::time::Duration;

use mps_core::mps::{Client, ClientPids, Inspection, Limits};
use mps_core::serve::{
    ClientsOnGpus, Failure, GpuNews, GpuReach, GpuShell, News, Occurrence, ProcessId, Said, SeenGpu,
    SeenGpus, Shell, Showing, ShownState,
};
use mps_core::{CoreTime, GpuUuid, Permit};

use super::host::{Host, PID};

/// A host, in the hands of a story and of the service.
#[derive(Clone)]
pub(crate) struct HostShell(pub(crate) Arc<Mutex<Host>>);

impl HostShell {
    /// Nobody waits for another one here: a story that asks twice at the same time fails.
    pub(crate) fn host(&self) -> MutexGuard<'_, Host> {
        self.0.try_lock().unwrap()
    }
}

fn of(servers: &[u32]) -> String {
    servers.iter().map(|server| format!(" {server}")).collect()
}

impl GpuShell for HostShell {
    async fn read_gpus(&mut self, gpus: &[GpuUuid], together: bool) -> Option<SeenGpus> {
        let mut host = self.host();
        host.note(if together { "read GPUs" } else { "read GPUs, each by itself" });
        host.turn_during("read GPUs");
        let look = |uuid: &GpuUuid| {
            let gpu = host.gpus.get(uuid)?;
            let seen = SeenGpu { has_our_mode: gpu.has_our_mode, processes: gpu.processes.clone() };
            Some((uuid.clone(), gpu.lost.clone().map_or(Ok(seen), Err)))
        };
        (!host.is_dead).then(|| gpus.iter().filter_map(look).collect())
    }

    async fn take_mode(&mut self, gpu: &GpuUuid) -> Result<bool, String> {
        let mut host = self.host();
        host.note(format!("take the mode of {gpu}"));
        let Some(gpu) = host.gpus.get_mut(gpu) else { return Err("it is not there".to_owned()) };
        match &gpu.refuses {
            Some(why) => Err(why.clone()),
            None => Ok(!std::mem::replace(&mut gpu.has_our_mode, true)),
        }
    }

    fn show_left_out(&mut self, gpu: &GpuUuid, why: String) {
        self.host().left_out.insert(gpu.clone(), why);
    }

    fn start_time(&self, pid: u32) -> Option<u64> {
        (!self.host().gone.contains(&pid)).then_some(u64::from(pid))
    }

    fn show_bypasses(&mut self, gpu: &GpuUuid, bypasses: &BTreeSet<ProcessId>, server_is_kept_out: bool) {
        self.host().bypasses.insert(gpu.clone(), (bypasses.clone(), server_is_kept_out));
    }

    fn tell_of_gpu(&mut self, _: &GpuUuid, news: GpuNews, text: String) {
        self.host().told.push(match news {
            GpuNews::Event => text,
            GpuNews::Warning => format!("warning: {text}"),
            GpuNews::Unreachable => format!("unreachable: {text}"),
        });
    }
}

impl Shell for HostShell {
    fn now(&self) -> CoreTime {
        self.host().now
    }

    async fn next(&mut self, until: CoreTime, takes_requests: bool) -> Result<Occurrence, Failure> {
        self.host().note("next");
        poll_fn(|_| match self.host().next(until, takes_requests) {
            Some(happened) => Poll::Ready(happened),
            None => Poll::Pending,
        })
        .await
    }

    async fn pause(&mut self, duration: Duration) {
        let until = {
            let mut host = self.host();
            host.note("pause");
            host.now + duration
        };
        poll_fn(|_| {
            let mut host = self.host();
            let ends = host.story_ends;
            host.pass(until.min(ends));
            if until <= ends { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    fn end_of_log(&mut self, skips: bool) -> Option<u64> {
        if skips {
            self.host().note("skip");
        }
        self.host().turn_during("read on");
        Some(0)
    }

    async fn line_before(&mut self, _: u64) -> Option<Said> {
        self.host().log.pop_front()
    }

    fn words(&self) -> String {
        "; its log ends here".to_owned()
    }

    async fn ends_now(&mut self) -> bool {
        self.host().is_dead
    }

    fn how_it_ended(&self) -> Failure {
        self.host().how_it_ended()
    }

    async fn inspect(&mut self, servers: &[u32], limits: Option<&Limits>) -> Result<Inspection, Failure> {
        let limited = if limits.is_some() { " with limits" } else { "" };
        let details = format!("{}{limited}", of(servers));
        self.host().ask("inspect", &details, |host| host.inspect(servers, limits))
    }

    async fn set_limits(&mut self, server: Option<u32>, limits: &Limits) -> Result<Vec<u32>, Failure> {
        let details = server.map(|server| format!(" of {server}")).unwrap_or_default();
        self.host().ask("set limits", &details, |host| host.set_limits(server, limits))
    }

    async fn set_limits_and_start(&mut self, limits: &Limits) -> Result<Vec<u32>, Failure> {
        self.host().ask("set limits", " and start", |host| {
            let servers = host.set_limits(None, limits);
            host.start_server();
            servers
        })
    }

    async fn start_server(&mut self) -> Result<(), Failure> {
        self.host().ask("start server", "", Host::start_server)
    }

    async fn client_pids(&mut self, _: &[u32]) -> Result<ClientPids, Failure> {
        self.host().ask("client PIDs", "", |host| {
            let of = |server: u32| host.clients.iter().filter(move |client| client.server == server);
            let pids = |server: u32| of(server).map(|client| client.pid).collect();
            host.servers.keys().map(|server| (*server, pids(*server))).collect()
        })
    }

    async fn clients(&mut self, expected: &[u32]) -> Result<Vec<Client>, Failure> {
        self.host().ask("clients", &of(expected), |host| host.clients.clone())
    }

    async fn shut_down_idle_server(&mut self, server: u32, may_end: Permit) -> Result<(), Failure> {
        let details = format!(" {server} ({:?})", may_end.cause());
        self.host().ask("shut down idle server", &details, |host| {
            if !host.clients.iter().any(|client| client.server == server) && !host.stays {
                host.server_ends(server, 0);
            }
        })
    }

    async fn shut_down_server(&mut self, server: u32, may_end: Permit) -> Result<(), Failure> {
        let details = format!(" {server} ({:?})", may_end.cause());
        self.host().ask("shut down server", &details, |host| host.server_ends(server, 0))
    }

    fn id(&self) -> String {
        "shared".to_owned()
    }

    fn pid(&self) -> u32 {
        PID
    }

    fn listener(&self) -> Option<u32> {
        let host = self.host();
        if host.is_nobody { None } else { host.taken_by.or(Some(PID)) }
    }

    fn is_nobody(&self) -> bool {
        self.host().is_nobody
    }

    fn has_children(&self) -> Option<bool> {
        self.host().has_children
    }

    fn continue_if_stopped(&mut self, servers: &[u32]) {
        self.host().note(format!("continue{}", of(servers)));
    }

    async fn quit_if_idle(&mut self, may_end: Permit) -> bool {
        let mut host = self.host();
        host.turn_during("quit");
        let stays = host.stays || !host.clients.is_empty();
        host.quit(format!("quit if idle ({:?})", may_end.cause()), stays)
    }

    async fn quit(&mut self, may_end: Permit) -> bool {
        let mut host = self.host();
        let stays = host.stays;
        host.quit(format!("quit ({:?})", may_end.cause()), stays)
    }

    async fn end_by_signal(&mut self, may_end: Permit) -> bool {
        let mut host = self.host();
        let survives = host.survives;
        host.quit(format!("signal ({:?})", may_end.cause()), survives)
    }

    async fn clients_on_gpus(&mut self, _: &BTreeSet<u32>) -> ClientsOnGpus {
        let mut host = self.host();
        host.note("clients on GPUs");
        host.nvml.clone()
    }

    async fn holders(&mut self, servers: &[u32]) -> String {
        let mut host = self.host();
        host.note(format!("holders besides{}", of(servers)));
        host.holders.clone()
    }

    fn runs_as(&self, _: u32, _: u32) -> bool {
        true
    }

    fn command(&self, pid: u32) -> String {
        format!("command of {pid}")
    }

    fn let_users_in(&mut self) -> Vec<String> {
        self.host().bad_directories.clone()
    }

    fn lead_here(&mut self) -> Result<(), Failure> {
        let mut host = self.host();
        host.note("lead here");
        host.does_not_lead.clone().map_or(Ok(()), Err)
    }

    fn keep_links(&mut self) -> Option<String> {
        let mut host = self.host();
        host.note("keep links");
        host.bad_links.clone()
    }

    fn keep_state_file(&mut self, stays: bool) {
        self.host().note(format!("keep the state file, stays: {stays}"));
    }

    fn rotate_log(&mut self) {
        self.host().note("rotate the log");
    }

    fn is_in_place(&self) -> bool {
        !self.host().is_elsewhere
    }

    fn misfit(&self, _: &GpuReach) -> Option<String> {
        self.host().misfit.clone()
    }

    fn passed(&self, step: &'static str, _: &str) {
        self.host().steps.push(step);
    }

    fn tell(&mut self, news: News, text: String) {
        self.host().told.push(match news {
            News::Event => text,
            News::Warning => format!("warning: {text}"),
            News::ServerFault { server } => format!("fault of {server}: {text}"),
            News::ServerFailed { server } => format!("failure of {server}: {text}"),
        });
    }

    fn show(&mut self, shown: Showing) {
        let mut host = self.host();
        match shown {
            Showing::State { state, ends_when_idle } => {
                host.ends_when_idle = ends_when_idle;
                host.shown = state.or(host.shown.take());
            }
            Showing::PutOff => host.note("put off"),
            Showing::InForce { thread_percentage } => host.in_force = Some(thread_percentage),
            Showing::WaitingClients(waiting) => {
                host.waiting = waiting.into_iter().map(|(pid, _)| pid).collect();
            }
            Showing::Servers { alive, gpus } => (host.alive, host.shown_gpus) = (alive, gpus),
        }
    }

    fn tell_hit(&mut self, server: u32, ordinal: usize, clients: Vec<u32>) {
        self.host().hit.push((server, ordinal, clients));
    }

    fn describe(&self, clients: &BTreeSet<u32>) -> String {
        clients.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
    }

    fn client_came(&mut self, client: u32) {
        self.host().note(format!("client {client} came"));
    }

    fn remember_clients(&mut self, clients: &BTreeSet<u32>) {
        self.host().note(format!("remember {clients:?}"));
    }

    fn checked_in_use(&mut self) {
        self.host().note("checked in use");
    }

    fn watch_server(&mut self, server: u32) {
        let mut host = self.host();
        host.note(format!("watch {server}"));
        host.turn_during("watch");
        host.watched.insert(server);
    }

    fn is_awaited(&self) -> bool {
        true
    }

    fn answer(&mut self, answer: Result<(), String>) {
        self.host().answered.push(answer);
    }
}

/// A state in a few words.
pub(crate) fn in_words(state: Option<&ShownState>) -> String {
    let Some(ShownState { state, serving, reason, .. }) = state else { return "nothing".to_owned() };
    let serves = if *serving { "serving" } else { "not serving" };
    format!("{state:?}, {serves}: {reason}").trim_end_matches(": ").to_owned()
}
