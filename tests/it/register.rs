//! Tests that all outputs of the service name a client with the same slice. Meanwhile clients start and end, faults hit them,
//! and their control groups are bound.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::bindings::{bind, client, path, with_containers};
use crate::support::client::{Client, own_user};
use crate::support::container::ContainerGroup;
use crate::support::exposition::samples_of;
use crate::support::host::{Host, succeeded, text};
use crate::support::listener::Listener;
use crate::support::random::Random;
use crate::support::wait::wait_for;

const SLICES: [&str; 4] = ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"];

/// The number of clients of each slice: on D-Bus, and in the metrics.
type Counts = BTreeMap<String, (u64, f64)>;

fn counted(host: &Host) -> Counts {
    let samples = samples_of(&succeeded(&host.mpsctl(&["metrics"])));
    let devices = host.json(&["list"]).unwrap();
    let count = |device: &Value| {
        let name = device["addr"].as_str().unwrap().to_owned();
        let series = format!("yunion_mps_device_clients{{device={name},");
        let sample =
            samples.iter().find(|(key, _)| key.starts_with(&series)).map_or(-1.0, |(_, value)| *value);
        (name, (device["clients"].as_u64().unwrap_or(u64::MAX), sample))
    };
    devices.as_array().unwrap().iter().map(count).collect()
}

/// A host with clients that have the slices of their environments. One client has a bound control group instead.
struct Rounds {
    host: Host,
    group: ContainerGroup,
    random: Random,
}

impl Rounds {
    fn check_doors(&self, clients: &[(Client, String)]) {
        let none = |slice: &&str| ((*slice).to_owned(), (0, 0.0));
        let mut expected: Counts = SLICES.iter().map(none).collect();
        for (client, slice) in clients {
            let listed = self.host.listed(client.id()).unwrap();
            assert_eq!(listed["device"], slice.as_str(), "{listed:#}");
            let count = expected.get_mut(slice).unwrap();
            *count = (count.0 + 1, count.1 + 1.0);
        }
        wait_for("the counts of all slices", || (counted(&self.host) == expected).then_some(()));
        let words = self.host.busctl("ListClients").to_string();
        for (client, slice) in clients {
            assert!(words.contains(&client.id().to_string()) && words.contains(slice.as_str()), "{words}");
        }
    }

    /// Waits until the service has logged `said` about the client with its slice, after the offset `since` of the log.
    fn is_told(&self, since: usize, pid: u32, slice: &str, said: &str) {
        let owner = |label: &str| format!("PID {pid} of {label}, slice {slice}");
        let known = [owner("job-17"), owner(&format!("user {}", own_user()))];
        wait_for(said, || {
            let log = self.host.log();
            let mut lines = log[since..].lines().filter(|line| line.contains(said));
            lines.any(|line| known.iter().any(|words| line.contains(words))).then_some(())
        });
    }

    fn play(&mut self, round: usize) {
        let is_bound = self.random.below(2) == 0;
        let mut clients: Vec<(Client, String)> = Vec::new();
        for _ in 0..=self.random.below(2) {
            let slice = SLICES[1 + usize::try_from(self.random.below(3)).unwrap()];
            clients.push((self.host.client_of(slice), slice.to_owned()));
        }
        if is_bound {
            // The client's environment claims one slice, and the test binds the client's control group to another slice. In
            // some rounds the test makes the binding before the client's start, and in the other rounds after it.
            let start = || client(&self.host, &self.group.directory, &["hold", "600"], SLICES[1]);
            let bind_it = || succeeded(&bind(&self.host, SLICES[0], &self.group, &["--label", "job-17"]));
            let bound = if round.is_multiple_of(2) {
                let bound = start();
                self.host.wait_until_listed(bound.id());
                bind_it();
                bound
            } else {
                bind_it();
                start()
            };
            self.host.wait_until_listed(bound.id());
            clients.push((bound, SLICES[0].to_owned()));
        }
        self.check_doors(&clients);
        let since = self.host.log().len();
        match self.random.below(3) {
            0 => {
                let pids: Vec<u32> = clients.iter().map(|(client, _)| client.id()).collect();
                // A later round may have the same PIDs, so each round has a listener of its own.
                let listener = Listener::start(&self.host);
                self.host.fault();
                let told = listener.wait_for_fault(&pids);
                for (client, slice) in &clients {
                    self.is_told(since, client.id(), slice, "was hit by the fatal GPU error");
                    assert!(told.contains(&format!("slice {slice}")), "{told}");
                }
            }
            1 => {
                let (client, slice) = &clients[0];
                let ended = self.host.mpsctl(&["terminate", "--device", slice]);
                assert!(ended.status.success(), "{}", text(&ended));
                self.is_told(since, client.id(), slice, "GPU work ended on request");
            }
            _ => {}
        }
        drop(clients);
        if is_bound {
            succeeded(&self.host.mpsctl(&["unbind", "--control-group", &path(&self.group)]));
        }
        wait_for("the end of all clients", || {
            let status = self.host.json(&["status"])?;
            (self.host.clients().is_empty() && status["service"]["state"] == "ready").then_some(())
        });
    }
}

fn all_doors_agree(test: &str, rounds: usize) {
    let Some((host, [group, _])) = with_containers(test, "log_level: debug") else { return };
    let (random, _seed) = Random::seeded(test);
    let mut all = Rounds { host, group, random };
    (0..rounds).for_each(|round| all.play(round));
}

#[test]
fn every_door_names_a_client_with_the_same_slice() {
    all_doors_agree("every_door_names_a_client_with_the_same_slice", 40);
}

mod soak {
    #[test]
    #[ignore = "a thousand rounds: make soak"]
    fn every_door_names_a_client_with_the_same_slice() {
        super::all_doors_agree("soak::every_door_names_a_client_with_the_same_slice", 1000);
    }
}
