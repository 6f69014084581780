//! The memory that programs of the simulated world allocate. The limits of a program and the free memory of the GPU bound the
//! allocation. The slices of a GPU together may have more memory than the GPU (overcommit).

use super::kernel_limits::room_in_groups;
use super::serving::{only_slice, size_of};
use super::tenants::SliceKnownBy;
use super::{Dice, World};

const GPU_MIB: u64 = 6 * 1024;

/// The memory limits of a program on one GPU, in MiB.
struct Place {
    gpu: String,
    /// `None` if the server enforces no limits on this GPU.
    of_server: Option<u64>,
    /// The limit in the environment of the program, which is the limit of its slice.
    own: Option<u64>,
}

impl Place {
    fn limit(&self) -> u64 {
        [self.of_server, self.own].into_iter().flatten().min().unwrap_or(u64::MAX)
    }
}

impl World {
    pub(crate) fn program_takes(&mut self, dice: &mut Dice) {
        let daemons: Vec<u32> = self.daemons.keys().copied().collect();
        let Some(daemon) = dice.pick(&daemons).copied() else { return };
        let clients: Vec<u32> = self.daemons[&daemon].lock().clients.keys().copied().collect();
        let Some(client) = dice.pick(&clients).copied() else { return };
        let wanted = 100 * (1 + dice.below(80) as u64);
        let (places, has) = self.places(daemon, client);
        let room = places.iter().map(|place| self.room(place, client, has)).min().unwrap_or_default();
        // A program keeps the memory that it already has, even if its limit becomes smaller.
        let granted = wanted.min(room.max(has.min(wanted)));
        if let Some(client) = self.daemons[&daemon].lock().clients.get_mut(&client) {
            client.program.mib = granted;
        }
        self.add_to_story(|| format!("{client} asks for {wanted} MiB, and has {granted}"));
        self.check_published_limits(daemon, &places);
        self.budgets_hear_of_clients();
    }

    /// Returns the memory limits of a client on each of its GPUs, and the memory in MiB that the client already has.
    fn places(&self, daemon: u32, client: u32) -> (Vec<Place>, u64) {
        let mps = self.daemons[&daemon].lock();
        let Some(client) = mps.clients.get(&client) else { return (Vec::new(), 0) };
        let server = mps.servers.get(&client.server).map(|server| server.setting);
        let place = |ordinal: &usize| {
            let gpu = mps.gpus.get(*ordinal)?.clone();
            let is_enforced = mps.is_enforced(*ordinal);
            let of_server = server.and_then(|setting| setting.mib.get(*ordinal).copied());
            let slice =
                client.program.slice.filter(|_| client.tenant.slice_known_by != SliceKnownBy::Nothing);
            let own = slice.zip(self.payload_on(&gpu)).map(|(slice, payload)| size_of(payload, slice));
            Some(Place {
                gpu,
                of_server: of_server.filter(|_| is_enforced),
                own: own.filter(|_| is_enforced),
            })
        };
        (client.ordinals.iter().filter_map(place).collect(), client.program.mib)
    }

    /// Returns the most memory in MiB that a client can have on a GPU. `has` is the memory that the client already has.
    fn room(&self, place: &Place, client: u32, has: u64) -> u64 {
        let programs = self.programs_on(&place.gpu);
        let used: u64 = programs.iter().map(|program| program.mib).sum();
        let left = GPU_MIB.saturating_sub(used - has.min(used));
        let group =
            programs.iter().find(|program| program.process.pid == client).map(|program| program.group);
        let of_groups = group.map_or(u64::MAX, |group| room_in_groups(self, &place.gpu, group, has));
        place.limit().min(left).min(of_groups)
    }

    /// Checks the promise `a-published-limit-is-enforced`: a program with the environment of a slice can have exactly the
    /// memory of the slice, and no program of the slice has a lower limit.
    fn check_published_limits(&self, daemon: u32, places: &[Place]) {
        for order in &self.demand.orders {
            let is_its = self.living(&order.id).is_some_and(|(pid, _)| pid == daemon);
            if !is_its || !self.serves(daemon, order) {
                continue;
            }
            let served = places.iter().filter(|place| place.of_server.is_some());
            for place in served.filter(|place| order.gpus.contains(&place.gpu)) {
                let of_server = place.of_server.unwrap_or(u64::MAX);
                let slices = only_slice(&order.id).map_or(0..=1, |slice| slice..=slice);
                for published in slices.map(|slice| size_of(order.payload, slice)) {
                    assert!(
                        of_server.min(published) == published,
                        "a-published-limit-is-enforced: a slice of {} on {} has {published} MiB, and its server gives {of_server}",
                        order.id,
                        place.gpu
                    );
                }
            }
        }
    }
}
