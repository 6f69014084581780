//! The loop of the program: after every change it looks at the service and at the kubelet, and serves exactly the resources that
//! `offers` names.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use common::whole_file;
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::kubelet::{DirectoryChanges, Kubelet, is_silence};
use crate::names::Naming;
use crate::offers::{GivenToPods, Offers, Remembered};
use crate::resource::{Manner, Resource};
use crate::service::{ServiceView, follow};
use crate::slice::NodeSlice;

/// The time to the next look while something is left to do.
const SOON: Duration = Duration::from_secs(1);

/// The time to the next look where nobody tells of a change.
const LATER: Duration = Duration::from_secs(10);

/// The time in which a kubelet that has taken a registration asks for the list of devices.
const LISTENS: Duration = Duration::from_secs(15);

/// The choices of the administrator.
#[derive(Debug)]
pub(crate) struct Choices {
    pub(crate) kubelet_directory: PathBuf,
    pub(crate) naming: Naming,
    pub(crate) grace: Duration,
    pub(crate) metrics: Option<PathBuf>,
    pub(crate) manner: Manner,
}

/// All that the program knows and serves.
struct Plugin {
    choices: Choices,
    kubelet: Kubelet,
    remembered: Remembered,
    resources: BTreeMap<String, Resource>,
    /// The metrics as they were written last.
    written: String,
    /// The status line of the unit, as systemd has it.
    status: Option<String>,
    /// The last complaint of each kind: one that goes on is said once.
    said: BTreeMap<&'static str, String>,
}

/// Runs until a signal ends the program.
pub(crate) async fn run(choices: Choices) -> io::Result<()> {
    let mut terminate: Signal = signal(SignalKind::terminate())?;
    let mut interrupt: Signal = signal(SignalKind::interrupt())?;
    let (sender, mut view) = watch::channel(ServiceView::unknown());
    tokio::spawn(follow(sender));
    let kubelet = Kubelet::new(choices.kubelet_directory.clone());
    let mut plugin = Plugin {
        choices,
        kubelet,
        remembered: Remembered::default(),
        resources: BTreeMap::new(),
        written: String::new(),
        status: None,
        said: BTreeMap::new(),
    };
    let mut directory = DirectoryChanges::default();
    loop {
        if !directory.is_watching() {
            directory = plugin.watch_directory();
        }
        let service = view.borrow_and_update().clone();
        let pause = plugin.bring_up_to_date(&service).await;
        plugin.tell_systemd();
        tokio::select! {
            changed = view.changed() => changed.map_err(io::Error::other)?,
            () = directory.next() => {}
            () = sleep_until(Instant::now() + pause) => {}
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
        }
    }
}

impl Plugin {
    fn watch_directory(&mut self) -> DirectoryChanges {
        let directory = self.kubelet.plugins();
        let watched = DirectoryChanges::watch(&directory);
        let complaint = watched.as_ref().err().map(|error| {
            format!("{}: {error}; waiting for the kubelet, which makes this directory", directory.display())
        });
        self.say("directory", complaint);
        watched.unwrap_or_default()
    }

    /// Makes everything as it has to be, and returns the time to the next look.
    async fn bring_up_to_date(&mut self, service: &ServiceView) -> Duration {
        let Some(slices) = &service.slices else { return SOON };
        let given = self.given_to_pods(slices).await;
        let unwatched = service.is_away_for(self.choices.grace);
        let offers = self.remembered.offers(slices, &self.choices.naming, &given, unwatched);
        self.serve(&offers);
        let registered = self.register().await;
        self.write_metrics(&offers);
        let waits_for_service = service.away_since.is_some() && !unwatched;
        if waits_for_service || registered < offers.len() { SOON } else { LATER }
    }

    async fn given_to_pods(&mut self, slices: &[NodeSlice]) -> GivenToPods {
        if !self.remembered.must_ask(slices) {
            return GivenToPods::Known([].into());
        }
        let naming = &self.choices.naming;
        let answer = self.kubelet.given_to_pods(|resource| naming.is_ours(resource)).await;
        let complaint = answer.as_ref().err().map(|error| {
            let why = "every owner of a slice counts as a pod, since the kubelet does not say which devices it has given";
            format!("{why}: {}", error.message())
        });
        self.say("pods", complaint);
        answer.map_or(GivenToPods::Unknown, GivenToPods::Known)
    }

    /// Serves these resources and no others.
    fn serve(&mut self, offers: &Offers) {
        let gone: Vec<String> =
            self.resources.keys().filter(|name| !offers.contains_key(*name)).cloned().collect();
        for name in gone {
            if let Some(resource) = self.resources.remove(&name) {
                // The kubelet would keep the devices of a resource that only falls silent.
                resource.offer(Vec::new());
                tracing::info!("{name}: no slice has this size any more");
            }
        }
        self.resources.retain(|name, resource| {
            let is_there = resource.is_there();
            if !is_there {
                tracing::info!("{name}: the socket is gone, as at the start of a kubelet; making it again");
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
            let path = self.kubelet.plugins().join(socket_name(name));
            match Resource::serve(name, &path, offered.clone(), self.choices.manner.clone()) {
                Ok(resource) => {
                    tracing::info!("{name}: {}", devices_in_words(offers, name));
                    self.resources.insert(name.clone(), resource);
                }
                Err(error) => complaint = Some(format!("{}: {error}", path.display())),
            }
        }
        self.say("socket", complaint);
    }

    /// Registers every resource that the kubelet of this moment does not know. Returns how many it knows.
    async fn register(&mut self) -> usize {
        let Some(socket) = self.kubelet.socket() else {
            let directory = self.kubelet.plugins();
            self.say(
                "kubelet",
                Some(format!("{}: no kubelet.sock; waiting for the kubelet", directory.display())),
            );
            return 0;
        };
        let (mut registered, mut complaint) = (0, None);
        for (name, resource) in &mut self.resources {
            let is_known = resource.registered.is_some_and(|(with, at)| {
                with == socket && (resource.has_listener() || at.elapsed() < LISTENS)
            });
            if is_known {
                registered += 1;
                continue;
            }
            match self.kubelet.register(name, socket_name(name)).await {
                Ok(()) => {
                    tracing::info!("{name}: registered with the kubelet");
                    self.choices.manner.counters.registered(name);
                    resource.registered = Some((socket, Instant::now()));
                    registered += 1;
                }
                Err(error) => {
                    complaint = Some(format!("{name} is not registered: {}; trying again", error.message()));
                    // The changes of devices must not wait for a kubelet that hangs.
                    if is_silence(&error) {
                        break;
                    }
                }
            }
        }
        self.say("kubelet", complaint);
        registered
    }

    fn write_metrics(&mut self, offers: &Offers) {
        let Some(file) = &self.choices.metrics else { return };
        let text = self.choices.manner.counters.text(offers);
        if text == self.written {
            return;
        }
        let complaint = match whole_file::write(file, text.as_bytes()) {
            Ok(()) => {
                self.written = text;
                None
            }
            Err(error) => Some(format!("{}: {error}; the metrics there are old", file.display())),
        };
        self.say("metrics", complaint);
    }

    /// The first time it is the word that the program has started.
    fn tell_systemd(&mut self) {
        let registered = self.resources.values().filter(|resource| resource.registered.is_some()).count();
        let status = format!("{registered} of {} resources registered", self.resources.len());
        let mut states = vec![NotifyState::Status(&status)];
        match &self.status {
            Some(told) if *told == status => return,
            Some(_) => {}
            None => states.push(NotifyState::Ready),
        }
        // Without systemd there is nobody to tell.
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

/// The devices of a resource, for the log.
fn devices_in_words(offers: &Offers, name: &str) -> String {
    let devices = offers.get(name).map(Vec::as_slice).unwrap_or_default();
    let unusable = devices.iter().filter_map(|device| {
        device.unusable.as_ref().map(|why| format!("{} is unhealthy ({why})", device.name))
    });
    let mut words = vec![format!("{} devices", devices.len())];
    words.extend(unusable);
    words.join(", ")
}

/// The name of the socket of a resource. A domain is the same for all of ours.
fn socket_name(resource: &str) -> String {
    let name = resource.rsplit('/').next().unwrap_or(resource);
    format!("yunion-{name}.sock")
}
