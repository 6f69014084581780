//! The devices that a command is for: named one by one, chosen by the number of their clients (`--free`),
//! or given by Slurm (`--slurm`).

use std::collections::{BTreeMap, BTreeSet};

use clap::Args;

use crate::complete;
use crate::given_out::GivenOut;
use crate::screen::say;
use crate::show::health::describe_state;
use crate::slurm;
use crate::{Error, Result};
use common::bus::answers::{given, is_called, published_name};
use common::bus::proxy::{DaemonProxy, Listed};
use common::bus::rows::{Client, Device};
use common::counted::counted;
use common::host::device_name;

#[derive(Debug, Args)]
pub(crate) struct Devices {
    /// Names as `list` shows them: 00:06.0-1; a GPU's address or UUID stands for one slice of it
    #[arg(required_unless_present_any = ["free", "slurm"], value_name = "DEVICE", add = complete::devices())]
    names: Vec<String>,
    /// Take the slice with the fewest clients, of all or of the ones that DEVICE names; part of a model's name will do: h200
    #[arg(long)]
    free: bool,
    /// Take the slices that Slurm has given to this step or job
    #[arg(long, conflicts_with_all = ["free", "names"])]
    slurm: bool,
}

impl Devices {
    pub(crate) fn are_from_slurm(&self) -> bool {
        self.slurm
    }

    /// The names to ask the service for. Says which slice was chosen, if the command line leaves the choice to us.
    pub(crate) async fn names(&self, daemon: &DaemonProxy) -> Result<Vec<String>> {
        if self.slurm {
            return slurm::given().map_err(Error::Failed);
        }
        if !self.free {
            return Ok(self.names.clone());
        }
        // Held until the choice is written down, so that the next command makes another.
        let given_out = GivenOut::open().await;
        let devices = daemon.devices().await?;
        if devices.is_empty() {
            let why = describe_state(&*daemon.service().await?);
            return Err(Error::Failed(format!("there is no slice: {why}")));
        }
        let clients = daemon.clients().await?;
        let recent = given_out.as_ref().map(GivenOut::slices).unwrap_or_default();
        let (slice, clients) = choose(&self.names, &devices, &clients, &recent).map_err(Error::Failed)?;
        if let Err(why) = given_out.and_then(|given_out| given_out.add(&slice.addr)) {
            say(&format!(
                "note: the next --free may take the same slice, since no record can be kept: {why}"
            ));
        }
        say(&format!("takes {} ({}, {})", slice.addr, model(slice), counted(clients, "client")));
        Ok(vec![slice.addr.clone()])
    }
}

/// The free slice with the fewest clients, of all or of the named ones, and the number of its clients. Among several it is
/// on the GPU with the fewest clients, and the first of them in the order of the configuration. A slice that is among the
/// `recent` ones counts as one with a client more each time. The error says why there is none.
fn choose<'d>(
    names: &[String],
    devices: &'d [Listed<Device>],
    clients: &[Listed<Client>],
    recent: &[&str],
) -> Result<(&'d Device, usize), String> {
    let meant = |device: &Device, name: &str| {
        is_called(device, &published_name(name, devices)) || is_model(device, name)
    };
    if let Some(name) = names.iter().find(|name| !devices.iter().any(|device| meant(device, name))) {
        return Err(format!("no slice, GPU or model is called {name:?}; there are {}", gpus(devices)));
    }
    let wanted: Vec<(&Device, usize)> = devices
        .iter()
        .filter(|device| names.is_empty() || names.iter().any(|name| meant(device, name)))
        .map(|device| (&**device, count(clients, |client| has(client, device))))
        .collect();
    let free = wanted.iter().filter(|(device, clients)| obstacle(device, *clients).is_none());
    let expected = |of: &dyn Fn(&str) -> bool| recent.iter().filter(|slice| of(slice)).count();
    let expected_on_gpu =
        |device: &Device| expected(&|slice| device_name::parts(slice).0 == device.base_addr);
    let on_gpu =
        |device: &Device| count(clients, |client| uses_gpu(client, device)) + expected_on_gpu(device);
    let on_slice = |device: &Device, clients| clients + expected(&|slice| slice == device.addr);
    let first = free.min_by_key(|(device, clients)| (on_slice(device, *clients), on_gpu(device)));
    first.copied().ok_or_else(|| format!("no slice is free: {}", obstacles(&wanted)))
}

/// Whether this is part of a name of the GPU's model.
fn is_model(device: &Device, name: &str) -> bool {
    let part = name.to_lowercase();
    let mut models = device.model.iter().chain(&device.nvidia_name);
    !part.is_empty() && models.any(|model| model.to_lowercase().contains(&part))
}

fn model(device: &Device) -> &str {
    device.model.as_ref().or(device.nvidia_name.as_ref()).map_or("unknown model", String::as_str)
}

/// The number of processes.
fn count(clients: &[Listed<Client>], of: impl Fn(&Client) -> bool) -> usize {
    let pids = clients.iter().filter(|client| !client.bypass && of(client)).map(|client| client.pid);
    pids.collect::<BTreeSet<u32>>().len()
}

/// Whether a client was given this slice, and uses its GPU or still waits for a server.
fn has(client: &Client, device: &Device) -> bool {
    uses_gpu(client, device) && given(client).any(|name| name == device.addr)
}

fn uses_gpu(client: &Client, device: &Device) -> bool {
    if client.gpu.is_empty() {
        given(client).any(|name| name == device.addr || device_name::parts(name).0 == device.base_addr)
    } else {
        device.device_path.as_ref() == Some(&client.gpu)
    }
}

/// The reason why a slice takes no client now.
fn obstacle(device: &Device, clients: usize) -> Option<String> {
    let full = device.max_clients.filter(|most| usize::try_from(*most).is_ok_and(|most| clients >= most));
    if device.drained {
        Some("drained".to_owned())
    } else if !device.bound_to.is_empty() {
        Some(format!("bound to {}", device.bound_to))
    } else if !device.healthy {
        Some(format!("not served: {}", device.reason))
    } else {
        full.map(|most| format!("full: {} at most (max_clients)", counted(most as usize, "client")))
    }
}

/// The obstacles of the slices of each GPU.
fn obstacles(wanted: &[(&Device, usize)]) -> String {
    let of_gpu = |slices: &[(&Device, usize)]| {
        let mut found: BTreeMap<String, usize> = BTreeMap::new();
        for obstacle in slices.iter().filter_map(|(device, clients)| obstacle(device, *clients)) {
            *found.entry(obstacle).or_default() += 1;
        }
        let found: Vec<String> = match found.iter().next() {
            Some((only, _)) if found.len() == 1 => vec![only.clone()],
            _ => found.iter().map(|(why, slices)| format!("{} {why}", counted(*slices, "slice"))).collect(),
        };
        let gpu = slices.first().map_or("", |(device, _)| &device.base_addr);
        format!("{gpu}: {}", found.join(", "))
    };
    let gpus = wanted.chunk_by(|(one, _), (next, _)| one.base_addr == next.base_addr);
    gpus.map(of_gpu).collect::<Vec<_>>().join("; ")
}

/// Every GPU with its model.
fn gpus(devices: &[Listed<Device>]) -> String {
    let mut gpus: Vec<String> =
        devices.iter().map(|device| format!("{} ({})", device.base_addr, model(device))).collect();
    gpus.dedup();
    gpus.join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn listed<R: serde::de::DeserializeOwned>(row: Value) -> Listed<R> {
        let Value::Object(row) = row else { panic!("{row}") };
        Listed::read(row).unwrap()
    }

    /// A Tesla P40 with two slices, which count no clients, and an H200 with two slices of two clients at most.
    fn devices(change: impl Fn(&mut Value)) -> Vec<Listed<Device>> {
        let mut rows = Vec::new();
        for (gpu, model, name, most) in
            [("06", "Tesla P40", "Tesla P40", None), ("07", "H200 SXM 141GB", "NVIDIA H200", Some(2))]
        {
            for ordinal in [0, 1] {
                let mut row = json!({
                    "addr": format!("00:{gpu}.0-{ordinal}"),
                    "base_addr": format!("00:{gpu}.0"),
                    "pci_bdf": format!("0000:00:{gpu}.0"),
                    "device_path": format!("GPU-{gpu}"),
                    "model": model,
                    "nvidia_name": name,
                    "healthy": true,
                });
                if let Some(most) = most {
                    row["max_clients"] = json!(most);
                }
                change(&mut row);
                rows.push(listed(row));
            }
        }
        rows
    }

    fn clients(of: &[(&str, &str)]) -> Vec<Listed<Client>> {
        let client = |(pid, (gpu, device)): (usize, &(&str, &str))| {
            listed(json!({"pid": pid + 1, "gpu": gpu, "device": device}))
        };
        of.iter().enumerate().map(client).collect()
    }

    fn chosen(
        names: &[&str],
        devices: &[Listed<Device>],
        clients: &[Listed<Client>],
    ) -> Result<String, String> {
        chosen_after(&[], names, devices, clients)
    }

    fn chosen_after(
        recent: &[&str],
        names: &[&str],
        devices: &[Listed<Device>],
        clients: &[Listed<Client>],
    ) -> Result<String, String> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        choose(&names, devices, clients, recent).map(|(slice, clients)| format!("{} {clients}", slice.addr))
    }

    #[test]
    fn the_slice_with_the_fewest_clients_is_taken() {
        let devices = devices(|_| ());
        let (p40, h200) = ("GPU-06", "GPU-07");
        for (of, expected) in [
            (&[][..], "00:06.0-0 0"),
            // An idle GPU comes before an idle slice of a busy one.
            (&[(p40, "00:06.0-0")], "00:07.0-0 0"),
            (&[(p40, "00:06.0-0"), (h200, "00:07.0-0")], "00:06.0-1 0"),
            (&[(p40, "00:06.0-0"), (p40, "00:06.0-1"), (h200, "00:07.0-0")], "00:07.0-1 0"),
            // A client that waits for a server has a slice and no GPU yet.
            (&[("", "00:06.0-0"), ("", "00:07.0-1"), ("", "00:07.0-1")], "00:06.0-1 0"),
            // A client without a known slice is somewhere on its GPU.
            (&[(p40, "")], "00:07.0-0 0"),
            (&[(p40, "00:06.0-0, 00:07.0-1"), (p40, "00:06.0-1"), (h200, "00:07.0-0")], "00:07.0-1 0"),
        ] {
            assert_eq!(chosen(&[], &devices, &clients(of)).unwrap(), expected, "{of:?}");
        }
        let twice = [(p40, "00:06.0-0"), (p40, "00:06.0-1"), (p40, "00:06.0-1"), (h200, "00:07.0-0")];
        assert_eq!(chosen(&["00:06.0"], &devices, &clients(&twice)).unwrap(), "00:06.0-0 1");
        let bypass = listed(json!({"pid": 1, "gpu": p40, "device": "00:06.0-0", "bypass": true}));
        assert_eq!(chosen(&[], &devices, &[bypass]).unwrap(), "00:06.0-0 0", "it has no slice");
    }

    #[test]
    fn a_slice_that_was_given_out_just_now_counts_as_one_with_a_client_more() {
        let devices = devices(|_| ());
        let (p40, first, other) = ("GPU-06", "00:06.0-0", "00:07.0-0");
        for (recent, of, expected) in [
            (&[first][..], &[][..], "00:07.0-0 0"),
            (&[first, other], &[], "00:06.0-1 0"),
            (&[first, other, "00:06.0-1", "00:07.0-1"], &[], "00:06.0-0 0"),
            (&[first, first, other, "00:06.0-1", "00:07.0-1"], &[], "00:07.0-0 0"),
            (&[other, "00:07.0-1"], &[(p40, first)], "00:06.0-1 0"),
            (&["gone-0", "-", ""], &[], "00:06.0-0 0"),
        ] {
            assert_eq!(chosen_after(recent, &[], &devices, &clients(of)).unwrap(), expected, "{recent:?}");
        }
        // It refuses nobody: a command that has ended within the minute leaves the slice to the next one.
        assert_eq!(chosen_after(&["00:07.0-1"; 3], &["00:07.0-1"], &devices, &[]).unwrap(), "00:07.0-1 0");
    }

    #[test]
    fn a_name_is_that_of_a_slice_or_a_gpu_or_part_of_a_models() {
        let devices = devices(|_| ());
        for (names, expected) in [
            (&["h200"][..], "00:07.0-0 0"),
            (&["NVIDIA H200"], "00:07.0-0 0"),
            (&["sxm"], "00:07.0-0 0"),
            (&["gpu-07"], "00:07.0-0 0"),
            (&["0000:00:07.0"], "00:07.0-0 0"),
            (&["00:07.0-1"], "00:07.0-1 0"),
            (&["h200", "p40"], "00:06.0-0 0"),
        ] {
            assert_eq!(chosen(names, &devices, &[]).unwrap(), expected, "{names:?}");
        }
        for wrong in ["h100", "", "00:08.0", "00:07.0-2"] {
            assert_eq!(
                chosen(&["p40", wrong], &devices, &[]).unwrap_err(),
                format!(
                    "no slice, GPU or model is called {wrong:?}; there are 00:06.0 (Tesla P40), \
                     00:07.0 (H200 SXM 141GB)"
                )
            );
        }
    }

    #[test]
    fn without_a_free_slice_each_gpu_has_its_reason() {
        let full = clients(&[("GPU-07", "00:07.0-0"); 2]);
        assert_eq!(chosen(&["h200"], &devices(|_| ()), &full).unwrap(), "00:07.0-1 0");
        let one_drained = devices(|row| row["drained"] = json!(row["addr"] == "00:07.0-1"));
        assert_eq!(
            chosen(&["h200"], &one_drained, &full).unwrap_err(),
            "no slice is free: 00:07.0: 1 slice drained, 1 slice full: 2 clients at most (max_clients)"
        );
        let bound = devices(|row| {
            row["bound_to"] = json!(if row["base_addr"] == "00:07.0" { "train-1" } else { "" });
        });
        assert_eq!(chosen(&[], &bound, &clients(&[("GPU-06", "00:06.0-0")])).unwrap(), "00:06.0-1 0");
        assert_eq!(
            chosen(&["h200"], &bound, &[]).unwrap_err(),
            "no slice is free: 00:07.0: bound to train-1"
        );
        let lost = devices(|row| {
            row["drained"] = json!(row["base_addr"] == "00:07.0");
            row["healthy"] = json!(false);
            row["reason"] = json!("GPU is lost");
        });
        assert_eq!(
            chosen(&[], &lost, &[]).unwrap_err(),
            "no slice is free: 00:06.0: not served: GPU is lost; 00:07.0: drained"
        );
    }
}
