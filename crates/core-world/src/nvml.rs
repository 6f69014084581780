//! NVML in memory: the compute modes of GPUs, and the processes on them.

use std::collections::BTreeSet;

use mps_core::serve::{GpuNews, GpuShell, News, ProcessId, SeenGpu, SeenGpus, SeenProcess, Shell};

use mps_core::tenants::budget::MemberProcess;

use super::edge::SimShell;

impl GpuShell for SimShell {
    async fn read_gpus(&mut self, gpus: &[String], _: bool) -> Option<SeenGpus> {
        self.turn().await;
        let mps = self.lock();
        if !mps.is_alive {
            return None;
        }
        let look = |gpu: &String| {
            if mps.gpu_is_lost {
                return Err("it fell off the bus".to_owned());
            }
            let ordinal = mps.gpus.iter().position(|one| one == gpu);
            let clients = mps.clients.iter().filter(|(_, one)| {
                self.lists_clients(gpu) && ordinal.is_some_and(|gpu| one.ordinals.contains(&gpu))
            });
            let servers = mps.servers.iter().filter(|(_, one)| !one.has_ended && ordinal.is_some());
            let client = |(pid, _)| SeenProcess { pid, via_mps: true };
            let server = |(pid, _)| SeenProcess { pid, via_mps: false };
            let clients = clients.map(|(pid, one)| client((*pid, one)));
            let processes = clients.chain(servers.map(|(pid, one)| server((*pid, one)))).collect();
            Ok(SeenGpu { has_our_mode: mps.with_our_mode.contains(gpu), processes })
        };
        Some(gpus.iter().map(|gpu| (gpu.clone(), look(gpu))).collect())
    }

    async fn take_mode(&mut self, gpu: &String) -> Result<bool, String> {
        if self.lock().goes_wrong(12) {
            return Err("no permission".to_owned());
        }
        let was_ours = self.lock().with_our_mode.contains(gpu);
        for half in 0..2 {
            self.lock().reader.mode_steps.push((gpu.clone(), half));
            self.turn().await;
        }
        let is_ours = self.lock().with_our_mode.contains(gpu);
        if is_ours { Ok(!was_ours) } else { Err("the mode of before can't be written down".to_owned()) }
    }

    fn show_left_out(&mut self, gpu: &String, why: String) {
        let left_out = &mut self.lock().reader.left_out;
        if why.is_empty() {
            left_out.remove(gpu);
        } else {
            left_out.insert(gpu.clone());
        }
    }

    fn start_time(&self, pid: u32) -> Option<u64> {
        let mps = self.lock();
        let client = mps.clients.get(&pid).map(|client| client.program.process.start_time());
        client.or_else(|| mps.servers.contains_key(&pid).then_some(u64::from(pid)))
    }

    /// Nobody of ours is called a bypass: nothing else runs on these GPUs.
    fn show_bypasses(&mut self, gpu: &String, bypasses: &BTreeSet<ProcessId>, _: bool) {
        assert!(bypasses.is_empty(), "ours-are-no-strangers: {bypasses:?} on {gpu}");
    }

    fn tell_of_gpu(&mut self, _: &String, _: GpuNews, text: String) {
        self.tell(News::Warning, text);
    }
}
