//! The main loop: after each change of the service or the kubelet, the loop serves exactly the resources that `offers` returns.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use common::host::readable::Readable;
use common::whole_file;
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch::channel;
use tokio::task::{self, JoinSet};
use tokio::time::{Instant, sleep_until};

use crate::counters::{Counters, REGISTRATIONS};
use crate::kubelet::{SocketFile, kubelet_socket, next_change, register, watch};
use crate::names::Naming;
use crate::offers::{Offers, offers};
use crate::preference::Placement;
use crate::resource::{Manner, Registration, Resource};
use crate::service::{ServiceView, follow};

/// The pause before the next pass of the loop while some work could not be completed.
const SOON: Duration = Duration::from_secs(1);

/// The pause before the next pass of the loop if no change comes earlier.
const LATER: Duration = Duration::from_secs(10);

/// A kubelet that has accepted a registration should request the list of devices within this time.
const LISTENS: Duration = Duration::from_secs(15);

/// Offers the slices of yunion-mps-daemon to the kubelet, with one resource for each size of slice.
///
/// A resource is named after the memory of its slices in GiB, rounded down: yunion.io/mps-20gib. A pod asks for one slice
/// with `yunion.io/mps-20gib: 1` in resources.limits. docs/kubernetes.md has all rules, and examples.
#[derive(Debug, Parser)]
#[command(name = "yunion-mps-device-plugin", version)]
#[command(
    after_help = "The program needs root, yunion-mps-daemon on this host, and the system bus of the host (/run/dbus in a pod). It waits for the service and for the kubelet, and registers again when the kubelet restarts.\n\n\
    Exit status: 0 (stopped by a signal), 1 (failed), 2 (wrong usage).\n\n\
    Examples:\n  \
    yunion-mps-device-plugin\n  \
    yunion-mps-device-plugin --resource small=20GiB --resource fast=20GiB:50 --preferred spread\n  \
    yunion-mps-device-plugin --without-cdi --metrics /var/lib/prometheus/node-exporter/yunion-mps-device-plugin.prom"
)]
pub(crate) struct Arguments {
    /// The kubelet's root directory, which has the directory device-plugins
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    kubelet_directory: PathBuf,
    #[command(flatten)]
    naming: Naming,
    /// The rule that chooses the GPU for a container's slice
    #[arg(long, value_enum, default_value_t = Placement::Pack)]
    preferred: Placement,
    /// Give containers environment variables, mounts and device nodes, but no CDI devices: for container engines without CDI
    /// that use NVIDIA's runtime. Nothing then binds a container to its slice
    #[arg(long)]
    without_cdi: bool,
    /// The time that the service may be away before its slices are unhealthy
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(..=3600))]
    grace: u64,
    /// Keep metrics in this file, for the textfile collector of Prometheus's node exporter
    #[arg(long, value_name = "FILE")]
    metrics: Option<PathBuf>,
}

struct Plugin {
    arguments: Arguments,
    manner: Manner,
    /// The directory in which device plugins make their sockets.
    directory: PathBuf,
    /// Registrations that the kubelet has not answered yet. The loop does not wait for the answer, since the kubelet first
    /// connects to the plugin's socket. If this socket was removed, only the loop can make a new socket.
    registrations: JoinSet<Result<(), String>>,
    /// The name of the resource of each slice, by the name of the slice.
    names: BTreeMap<String, String>,
    resources: BTreeMap<String, Resource>,
    /// The text that was last written to the file with metrics.
    written: String,
    /// The status line that systemd received last.
    status: Option<String>,
    /// The last warning of each kind. An equal warning is not logged again.
    said: BTreeMap<&'static str, String>,
}

pub(crate) async fn run(arguments: Arguments) -> io::Result<()> {
    let mut terminate: Signal = signal(SignalKind::terminate())?;
    let mut interrupt: Signal = signal(SignalKind::interrupt())?;
    let (sender, mut view) = channel(ServiceView::unknown());
    tokio::spawn(follow(sender));
    let manner = Manner {
        placement: arguments.preferred,
        without_cdi: arguments.without_cdi,
        counters: Counters::default(),
        service: view.clone(),
    };
    let mut plugin = Plugin {
        directory: arguments.kubelet_directory.join("device-plugins"),
        arguments,
        manner,
        registrations: JoinSet::new(),
        names: BTreeMap::new(),
        resources: BTreeMap::new(),
        written: String::new(),
        status: None,
        said: BTreeMap::new(),
    };
    let mut watched = None;
    loop {
        if watched.is_none() {
            watched = plugin.watch_directory();
        }
        let service = view.borrow_and_update().clone();
        let pause = plugin.bring_up_to_date(&service)?;
        plugin.tell_systemd(&service);
        tokio::select! {
            changed = view.changed() => changed.map_err(io::Error::other)?,
            () = next_change(&mut watched) => {}
            Some(ended) = plugin.registrations.join_next_with_id() => {
                let (task, answer) = ended.map_err(io::Error::other)?;
                plugin.hear(task, answer);
            }
            () = sleep_until(Instant::now() + pause) => {}
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
        }
    }
}

impl Plugin {
    fn watch_directory(&mut self) -> Option<Readable> {
        let watched = watch(&self.directory);
        let complaint = watched.as_ref().err().map(|error| {
            let place = self.directory.display();
            match error.kind() {
                io::ErrorKind::NotFound => {
                    format!("{place}: {error}; waiting for the kubelet, which makes this directory")
                }
                _ => format!(
                    "{place}: {error}; the device plugin can't watch this directory, and sees changes in it \
                     only after some seconds"
                ),
            }
        });
        self.say("directory", complaint);
        watched.ok()
    }

    /// Makes sockets and registrations match the service and the kubelet. Returns the pause before the next pass of the loop.
    fn bring_up_to_date(&mut self, service: &ServiceView) -> io::Result<Duration> {
        self.say("service", service.complaint());
        let Some(slices) = &service.slices else { return Ok(SOON) };
        self.say("names", self.arguments.naming.joined(slices.iter().filter_map(|slice| slice.share)));
        // At its start, the kubelet removes all sockets, and then makes its own socket. So the kubelet's socket is read before
        // the plugin's sockets are checked. If the kubelet's socket is new, the later check finds that the plugin's sockets
        // were removed.
        let kubelet = SocketFile::at(&kubelet_socket(&self.directory));
        let unwatched = service.is_away_for(Duration::from_secs(self.arguments.grace));
        let offers = offers(&mut self.names, slices, &self.arguments.naming, unwatched);
        self.serve(&offers)?;
        let registered = self.register(kubelet);
        self.write_metrics(&offers);
        let waits_for_service = service.absent_since.is_some() && !unwatched;
        Ok(if waits_for_service || registered < offers.len() { SOON } else { LATER })
    }

    /// Makes and removes sockets, so that exactly the resources in `offers` are served. Returns an error only if this process
    /// can never again write to the directory of the sockets.
    fn serve(&mut self, offers: &Offers) -> io::Result<()> {
        let gone: Vec<String> =
            self.resources.keys().filter(|name| !offers.contains_key(*name)).cloned().collect();
        for name in gone {
            if let Some(resource) = self.resources.remove(&name) {
                // Without the empty list, the kubelet would still count the devices of a resource that is no longer served.
                resource.offer(Vec::new());
                tracing::info!(
                    "{name}: the device plugin removes this resource, since no slice has its size any more"
                );
            }
        }
        self.resources.retain(|name, resource| {
            let is_there = resource.is_there();
            if !is_there {
                tracing::info!(
                    "{name}: the socket was removed, usually by a kubelet that starts; the device plugin \
                     makes the socket again, so nothing has to be done"
                );
            }
            is_there
        });
        let mut complaint = None;
        for (name, offered) in offers {
            if let Some(resource) = self.resources.get(name) {
                if resource.offer(offered.clone()) {
                    tracing::info!("{name}: {}", devices_in_words(offers, name));
                }
                continue;
            }
            let path = self.directory.join(socket_name(name));
            match Resource::serve(name, &path, offered.clone(), self.manner.clone()) {
                Ok(resource) => {
                    tracing::info!("{name}: {}", devices_in_words(offers, name));
                    self.resources.insert(name.clone(), resource);
                }
                Err(error) if is_former_directory(&self.directory, &error) => {
                    return Err(io::Error::other(format!(
                        "{path}: {error}: the directory was replaced, and this process reaches only the old \
                         directory; restart the device plugin (its unit does so by itself)",
                        path = path.display()
                    )));
                }
                Err(error) => complaint = Some(format!("{}: {error}", path.display())),
            }
        }
        self.say("socket", complaint);
        Ok(())
    }

    /// Registers each resource with the kubelet, unless the kubelet reads the resource's list of devices already, or the last
    /// registration is pending or recent. Returns the number of resources with lists that the kubelet reads.
    fn register(&mut self, kubelet: Option<SocketFile>) -> usize {
        let Some(kubelet) = kubelet else {
            let directory = self.directory.display();
            let complaint = format!(
                "{directory}: the socket kubelet.sock does not exist; waiting for the kubelet to start"
            );
            self.say("kubelet", Some(complaint));
            return 0;
        };
        let (mut listens, mut deaf) = (0, None);
        for (name, resource) in &mut self.resources {
            match resource.registration {
                Registration::Accepted(with, _) | Registration::Listens(with)
                    if with == kubelet && resource.has_listener() =>
                {
                    resource.registration = Registration::Listens(kubelet);
                    listens += 1;
                    continue;
                }
                Registration::Asked(with, _) if with == kubelet => continue,
                Registration::Failed(with, at) if with == kubelet && at.elapsed() < SOON => continue,
                Registration::Accepted(with, at) if with == kubelet && at.elapsed() < LISTENS => continue,
                Registration::Accepted(with, _) if with == kubelet => {
                    deaf = Some(format!(
                        "{name}: the kubelet has accepted the registration, but does not ask for the \
                         devices; a kubelet before 1.26 never asks: upgrade the kubelet"
                    ));
                }
                _ => {}
            }
            let asked = register(kubelet_socket(&self.directory), name.clone(), socket_name(name));
            resource.registration = Registration::Asked(kubelet, self.registrations.spawn(asked).id());
        }
        if deaf.is_some() || listens == self.resources.len() {
            self.say("listener", deaf);
        }
        listens
    }

    /// Records the kubelet's answer to a registration. The answer to a registration that was replaced by a newer one is
    /// ignored.
    fn hear(&mut self, task: task::Id, answer: Result<(), String>) {
        let asked = self.resources.iter_mut().find_map(|(name, resource)| match resource.registration {
            Registration::Asked(kubelet, by) if by == task => Some((name, resource, kubelet)),
            _ => None,
        });
        let Some((name, resource, kubelet)) = asked else { return };
        let complaint = match answer {
            Ok(()) => {
                resource.registration = Registration::Accepted(kubelet, Instant::now());
                self.manner.counters.count(name, REGISTRATIONS);
                // If the kubelet never reads the list of devices, the plugin registers the resource again and again, and a
                // warning of the kind `listener` reports the problem. Then an accepted registration is no success, and is not
                // logged.
                if !self.said.contains_key("listener") {
                    tracing::info!("{name}: registered with the kubelet");
                }
                None
            }
            Err(error) => {
                resource.registration = Registration::Failed(kubelet, Instant::now());
                Some(format!(
                    "{name} is not registered with the kubelet: {error}; the device plugin tries again"
                ))
            }
        };
        self.say("kubelet", complaint);
    }

    fn write_metrics(&mut self, offers: &Offers) {
        let Some(file) = &self.arguments.metrics else { return };
        let text = self.manner.counters.text(offers);
        if text == self.written {
            return;
        }
        let complaint = match whole_file::write(file, text.as_bytes()) {
            Ok(()) => {
                self.written = text;
                None
            }
            Err(error) => Some(format!(
                "{file}: the new metrics can't be written, so the file has old metrics: {error}",
                file = file.display()
            )),
        };
        self.say("metrics", complaint);
    }

    /// Sends the status line to systemd. The first message also tells systemd that the program has started.
    fn tell_systemd(&mut self, service: &ServiceView) {
        let is_listened_to = |resource: &&Resource| matches!(resource.registration, Registration::Listens(_));
        let registered = self.resources.values().filter(is_listened_to).count();
        let mut status = format!("{registered} of {all} resources registered", all = self.resources.len());
        if let Some(complaint) = service.complaint() {
            status = format!("{status}; {complaint}");
        }
        let mut states = vec![NotifyState::Status(&status)];
        match &self.status {
            Some(told) if *told == status => return,
            Some(_) => {}
            None => states.push(NotifyState::Ready),
        }
        // Sending fails if systemd has not started this program, and then no program needs the message.
        let _ = sd_notify::notify(&states);
        self.status = Some(status);
    }

    fn say(&mut self, kind: &'static str, complaint: Option<String>) {
        match complaint {
            Some(complaint) if self.said.get(kind) != Some(&complaint) => {
                tracing::warn!("{complaint}");
                self.said.insert(kind, complaint);
            }
            Some(_) => {}
            None => _ = self.said.remove(kind),
        }
    }
}

/// True if the directory of sockets was replaced by a new directory that this process can't reach. In a sandbox, the old
/// directory stays mounted, and the new directory is not writable.
fn is_former_directory(directory: &Path, error: &io::Error) -> bool {
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => true,
        // A removed directory that stays mounted in the sandbox has a link count of 0.
        io::ErrorKind::NotFound => directory.metadata().is_ok_and(|found| found.nlink() == 0),
        _ => false,
    }
}

fn devices_in_words(offers: &Offers, name: &str) -> String {
    let devices = offers.get(name).map(Vec::as_slice).unwrap_or_default();
    let unusable = devices.iter().filter_map(|device| {
        device.unusable.as_ref().map(|why| format!("{} is unhealthy ({why})", device.name))
    });
    let mut words = vec![format!("{} devices", devices.len())];
    words.extend(unusable);
    words.join(", ")
}

/// The domain of the resource's name is omitted, since all resources have the same domain.
fn socket_name(resource: &str) -> String {
    let name = resource.rsplit('/').next().unwrap_or(resource);
    format!("yunion-{name}.sock")
}
