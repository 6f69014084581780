//! The main loop: after every change it looks at the service and at the kubelet, and serves exactly the resources that `offers`
//! returns.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use common::whole_file;
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::counters::Counters;
use crate::kubelet::{DirectoryChanges, Kubelet, SocketFile};
use crate::names::Naming;
use crate::offers::{Offers, Remembered};
use crate::preference::Placement;
use crate::resource::{Manner, Registration, Resource};
use crate::service::{ServiceView, follow};

/// The time until the plugin looks at the slices and the kubelet again while something remains to be done.
const SOON: Duration = Duration::from_secs(1);

/// The time until the plugin looks at the slices and the kubelet again if no change is reported before.
const LATER: Duration = Duration::from_secs(10);

/// The time in which a kubelet that has accepted a registration should ask for the list of devices.
const LISTENS: Duration = Duration::from_secs(15);

/// The options that the administrator has chosen.
#[derive(Debug)]
pub(crate) struct Choices {
    pub(crate) kubelet_directory: PathBuf,
    pub(crate) naming: Naming,
    pub(crate) grace: Duration,
    pub(crate) metrics: Option<PathBuf>,
    pub(crate) placement: Placement,
    pub(crate) without_cdi: bool,
}

/// The result of a registration with the kubelet.
struct Registered {
    resource: String,
    /// The socket of the resource, and the kubelet's socket.
    own: SocketFile,
    kubelet: SocketFile,
    answer: Result<(), String>,
}

/// The state of the main loop.
struct Plugin {
    choices: Choices,
    manner: Manner,
    kubelet: Kubelet,
    /// Registrations that the kubelet has not answered yet. The loop does not wait for an answer: the kubelet answers
    /// only after it has reached the plugin's socket, and the loop may have to make that socket again.
    registrations: JoinSet<Registered>,
    remembered: Remembered,
    resources: BTreeMap<String, Resource>,
    /// The metrics, as they were last written to the file.
    written: String,
    /// The status line that was last sent to systemd for the unit.
    status: Option<String>,
    /// The last logged message of each kind. A message that has not changed is not repeated.
    said: BTreeMap<&'static str, String>,
}

/// Runs the device plugin until a signal ends it.
pub(crate) async fn run(choices: Choices) -> io::Result<()> {
    let mut terminate: Signal = signal(SignalKind::terminate())?;
    let mut interrupt: Signal = signal(SignalKind::interrupt())?;
    let (sender, mut view) = watch::channel(ServiceView::unknown());
    tokio::spawn(follow(sender));
    let kubelet = Kubelet::new(choices.kubelet_directory.clone());
    let manner = Manner {
        placement: choices.placement,
        without_cdi: choices.without_cdi,
        counters: Counters::default(),
        service: view.clone(),
    };
    let mut plugin = Plugin {
        choices,
        manner,
        kubelet,
        registrations: JoinSet::new(),
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
        let pause = plugin.bring_up_to_date(&service)?;
        plugin.tell_systemd(&service);
        tokio::select! {
            changed = view.changed() => changed.map_err(io::Error::other)?,
            () = directory.next() => {}
            Some(ended) = plugin.registrations.join_next() => plugin.hear(ended.map_err(io::Error::other)?),
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
            let place = directory.display();
            match error.kind() {
                io::ErrorKind::NotFound => {
                    format!("{place}: {error}; waiting for the kubelet, which makes this directory")
                }
                _ => format!(
                    "{place}: {error}; until this works, the program sees changes in this directory some \
                     seconds later"
                ),
            }
        });
        self.say("directory", complaint);
        watched.unwrap_or_default()
    }

    /// Makes sockets and registrations match the service and the kubelet, and returns the time until the next look.
    fn bring_up_to_date(&mut self, service: &ServiceView) -> io::Result<Duration> {
        self.say("service", service.complaint());
        let Some(slices) = &service.slices else { return Ok(SOON) };
        self.say("names", self.choices.naming.joined(slices.iter().filter_map(|slice| slice.share)));
        // The kubelet's socket is looked up before the plugin's sockets. When a kubelet starts, it removes all sockets and
        // then makes its own. In this order, the later check of the plugin's sockets notices if a kubelet has removed them
        // before it made its own.
        let kubelet = self.kubelet.socket();
        let unwatched = service.is_away_for(self.choices.grace);
        let offers = self.remembered.offers(slices, &self.choices.naming, unwatched);
        self.serve(&offers)?;
        let registered = self.register(kubelet);
        self.write_metrics(&offers);
        let waits_for_service = service.absence.is_some() && !unwatched;
        Ok(if waits_for_service || registered < offers.len() { SOON } else { LATER })
    }

    /// Serves exactly the resources in `offers`: makes and removes sockets.
    ///
    /// # Errors
    /// This process can never write to the directory again.
    fn serve(&mut self, offers: &Offers) -> io::Result<()> {
        let gone: Vec<String> =
            self.resources.keys().filter(|name| !offers.contains_key(*name)).cloned().collect();
        for name in gone {
            if let Some(resource) = self.resources.remove(&name) {
                // Without this empty list, the kubelet would keep the devices of a resource that is no longer served.
                resource.offer(Vec::new());
                tracing::info!("{name}: no slice has this size any more");
            }
        }
        self.resources.retain(|name, resource| {
            let is_there = resource.is_there();
            if !is_there {
                tracing::info!(
                    "{name}: the socket is gone, as at the start of a kubelet; the program makes the socket \
                     again"
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
            let directory = self.kubelet.plugins();
            let path = directory.join(socket_name(name));
            match Resource::serve(name, &path, offered.clone(), self.manner.clone()) {
                Ok(resource) => {
                    tracing::info!("{name}: {}", devices_in_words(offers, name));
                    self.resources.insert(name.clone(), resource);
                }
                Err(error) if is_former_directory(&directory, &error) => {
                    return Err(io::Error::other(format!(
                        "{path}: {error}: the directory was replaced, and this process can reach the old \
                         directory alone; start the program again, as its unit does by itself",
                        path = path.display()
                    )));
                }
                Err(error) => complaint = Some(format!("{}: {error}", path.display())),
            }
        }
        self.say("socket", complaint);
        Ok(())
    }

    /// Registers every resource that this kubelet does not know. Returns the number of resources that the kubelet listens to.
    fn register(&mut self, kubelet: Option<SocketFile>) -> usize {
        let Some(kubelet) = kubelet else {
            let directory = self.kubelet.plugins();
            self.say(
                "kubelet",
                Some(format!(
                    "{directory}: no kubelet.sock; waiting for the kubelet",
                    directory = directory.display()
                )),
            );
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
                Registration::Asked(with) if with == kubelet => continue,
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
            resource.registration = Registration::Asked(kubelet);
            let (asked, name, own) = (self.kubelet.clone(), name.clone(), resource.file());
            self.registrations.spawn(async move {
                let answer = asked.register(&name, socket_name(&name)).await;
                Registered { resource: name, own, kubelet, answer }
            });
        }
        if deaf.is_some() || listens == self.resources.len() {
            self.say("listener", deaf);
        }
        listens
    }

    /// Records the kubelet's answer to a registration, unless the answer is about an earlier socket.
    fn hear(&mut self, ended: Registered) {
        let Registered { resource: name, own, kubelet, answer } = ended;
        let is_asked = |resource: &&mut Resource| {
            resource.file() == own && resource.registration == Registration::Asked(kubelet)
        };
        let Some(resource) = self.resources.get_mut(&name).filter(is_asked) else { return };
        let complaint = match answer {
            Ok(()) => {
                resource.registration = Registration::Accepted(kubelet, Instant::now());
                self.manner.counters.registered(&name);
                // A kubelet that accepts registrations but never reads the list of devices is reported by another
                // message.
                if !self.said.contains_key("listener") {
                    tracing::info!("{name}: registered with the kubelet");
                }
                None
            }
            Err(error) => {
                resource.registration = Registration::Failed(kubelet, Instant::now());
                Some(format!("{name} is not registered with the kubelet: {error}; trying again"))
            }
        };
        self.say("kubelet", complaint);
    }

    fn write_metrics(&mut self, offers: &Offers) {
        let Some(file) = &self.choices.metrics else { return };
        let text = self.manner.counters.text(offers);
        if text == self.written {
            return;
        }
        let complaint = match whole_file::write(file, text.as_bytes()) {
            Ok(()) => {
                self.written = text;
                None
            }
            Err(error) => {
                Some(format!("{file}: {error}; the metrics in this file are old", file = file.display()))
            }
        };
        self.say("metrics", complaint);
    }

    /// Sends systemd the status line. The first message tells systemd that the program has started.
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
        // Sending fails without systemd, and then no program reads the message.
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

/// Returns true if the error means that the directory of sockets was replaced, and this process can't reach the new
/// one: in a sandbox the old directory stays mounted, and the new one is not writable.
fn is_former_directory(directory: &Path, error: &io::Error) -> bool {
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem => true,
        // A directory that was removed while it is open has no links.
        io::ErrorKind::NotFound => directory.metadata().is_ok_and(|found| found.nlink() == 0),
        _ => false,
    }
}

/// Describes the devices of a resource, for the log.
fn devices_in_words(offers: &Offers, name: &str) -> String {
    let devices = offers.get(name).map(Vec::as_slice).unwrap_or_default();
    let unusable = devices.iter().filter_map(|device| {
        device.unusable.as_ref().map(|why| format!("{} is unhealthy ({why})", device.name))
    });
    let mut words = vec![format!("{} devices", devices.len())];
    words.extend(unusable);
    words.join(", ")
}

/// The file name of the socket of a resource. The name does not have the domain, which is the same for all resources.
fn socket_name(resource: &str) -> String {
    let name = resource.rsplit('/').next().unwrap_or(resource);
    format!("yunion-{name}.sock")
}
