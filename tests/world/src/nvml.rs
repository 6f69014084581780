//! The simulated NVML of the world: the compute modes of GPUs, and the processes on GPUs.

use std::collections::BTreeSet;

use mps_core::serve::{GpuShell, News, SeenGpu, SeenGpus};
use mps_core::terms::{GpuProcess, ProcessId};
use mps_core::view::{ControlDaemonState, DaemonView};

use super::edge::{SimShell, check_what_is_ready_takes_clients};

impl GpuShell for SimShell {
    async fn read_gpus(&mut self, gpus: &[String], together: bool) -> Option<SeenGpus> {
        let way = if together { "" } else { ", each by itself" };
        self.lock().note(format_args!("read GPUs{way}"));
        self.turn().await;
        let mut mps = self.lock();
        mps.turn_during("read GPUs");
        if !mps.is_alive {
            return None;
        }
        let failing = if mps.goes_wrong(30) { mps.dice.pick(gpus).cloned() } else { None };
        let unlisted = if mps.goes_wrong(30) { mps.dice.pick(gpus).cloned() } else { None };
        let look = |gpu: &String| {
            if mps.out_of_reach.contains(gpu) {
                return Err("it can't be reached".to_owned());
            }
            if failing.as_ref() == Some(gpu) {
                return Err("an internal driver error".to_owned());
            }
            if let Some(why) = mps.stage.lost.get(gpu) {
                return Err(why.clone());
            }
            let ordinal = mps.gpus.iter().position(|one| one == gpu);
            let clients = mps.clients.iter().filter(|(_, one)| {
                self.lists_clients(gpu) && ordinal.is_some_and(|gpu| one.ordinals.contains(&gpu))
            });
            let is_there = ordinal.is_some() && !mps.stage.servers_are_kept_out;
            let servers = mps.servers.iter().filter(|(_, one)| !one.has_ended && is_there);
            let client = |(pid, _)| GpuProcess { pid, memory_mib: None, via_mps: true };
            let server = |(pid, _)| GpuProcess { pid, memory_mib: None, via_mps: false };
            let clients = clients.map(|(pid, one)| client((*pid, one)));
            let others = mps.stage.processes.get(gpu).into_iter().flatten().copied();
            let processes = match mps.stage.unlisted.get(gpu) {
                Some(why) => Err(why.clone()),
                None if unlisted.as_ref() == Some(gpu) => Err("an internal driver error".to_owned()),
                None => {
                    Ok(clients.chain(servers.map(|(pid, one)| server((*pid, one)))).chain(others).collect())
                }
            };
            Ok(SeenGpu { has_our_mode: mps.with_our_mode.contains(gpu), processes })
        };
        Some(gpus.iter().map(|gpu| (gpu.clone(), look(gpu))).collect())
    }

    async fn take_mode(&mut self, gpu: &String) -> Result<bool, String> {
        self.lock().note(format_args!("take the mode of {gpu}"));
        if self.lock().goes_wrong(12) {
            return Err("no permission".to_owned());
        }
        if self.lock().out_of_reach.contains(gpu) {
            return Err("it can't be reached".to_owned());
        }
        if let Some(why) = self.lock().stage.refuses.get(gpu) {
            return Err(why.clone());
        }
        let was_ours = self.lock().with_our_mode.contains(gpu);
        for half in 0..2 {
            self.lock().reader.mode_steps.push((gpu.clone(), half));
            self.turn().await;
        }
        let is_ours = self.lock().with_our_mode.contains(gpu);
        if is_ours { Ok(!was_ours) } else { Err("the mode of before can't be written down".to_owned()) }
    }

    fn process(&self, pid: u32) -> Option<ProcessId> {
        let mps = self.lock();
        if mps.stage.is_on {
            return (!mps.stage.gone.contains(&pid)).then_some(as_old_as_its_pid(pid));
        }
        let client = mps.clients.get(&pid).map(|client| client.program.process);
        client.or_else(|| mps.servers.contains_key(&pid).then_some(as_old_as_its_pid(pid)))
    }

    /// Checks the promise `ours-are-no-strangers`: the service reports none of its own servers and clients as a bypass.
    fn bypasses_are(&mut self, gpu: &String, bypasses: &BTreeSet<ProcessId>) {
        let stage = &mut self.lock().stage;
        let is_others =
            |process: &ProcessId| stage.processes.values().flatten().any(|one| one.pid == process.pid);
        assert!(bypasses.iter().all(is_others), "ours-are-no-strangers: {bypasses:?} on {gpu}");
        stage.bypasses.insert(gpu.clone(), bypasses.clone());
    }

    fn show(&mut self, change: impl FnOnce(&mut DaemonView)) {
        let mut mps = self.lock();
        let before = mps.reader.shown.view.clone();
        change(&mut mps.reader.shown.view);
        let view = &mps.reader.shown.view;
        if *view != before {
            mps.reader.news += 1;
            self.check_limits_are_in_force(&mps);
            self.check_the_view_is_true(&mps);
            check_what_is_ready_takes_clients(&mps);
        }
        let stays = [ControlDaemonState::Faulted, ControlDaemonState::Stopping]
            .contains(&mps.reader.shown.view.state);
        if before.state == ControlDaemonState::Faulted && !stays {
            mps.fault_is_over();
        }
    }

    fn passed(&self, step: &'static str, _: &str) {
        self.lock().stage.steps.push(step);
    }

    fn tell(&mut self, news: News, text: String) {
        let mut mps = self.lock();
        match news {
            News::Event => mps.tell(format_args!(""), &text),
            News::Warning => mps.tell(format_args!("warning: "), &text),
            News::GpuUnreachable { .. } => mps.tell(format_args!("unreachable: "), &text),
            News::ServerFault { server } => mps.tell(format_args!("fault of {server}: "), &text),
            News::ServerFailed { server } => mps.tell(format_args!("failure of {server}: "), &text),
        }
    }
}

fn as_old_as_its_pid(pid: u32) -> ProcessId {
    ProcessId { pid, start_time: u64::from(pid) }
}
