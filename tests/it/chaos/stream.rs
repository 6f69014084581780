//! Clients that come and go all the time, as the programs of many tenants do, and a record of each of them.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::host::Host;
use crate::support::random::Random;
use crate::support::skip::root_or_skip;
use crate::support::wait::wait_for;

/// The user nobody. Only root can start clients of another user.
const OTHER_USER: u32 = 65534;

/// A slice as the service offers it, with all that a container gets.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    pub(crate) pipe: PathBuf,
    environment: Vec<(&'static str, String)>,
}

impl Offer {
    /// From what `yunion-mpsctl list` says of a device.
    pub(crate) fn of(device: &Value) -> Self {
        let text = |key: &str| device[key].as_str().unwrap().to_owned();
        let pipe = text("pipe_directory");
        let limit = format!("{}={}M", text("device_path"), device["mps_memory_limit"]);
        let environment = vec![
            ("CUDA_MPS_PIPE_DIRECTORY", pipe.clone()),
            ("CUDA_VISIBLE_DEVICES", text("device_path")),
            ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", device["mps_thread_percentage"].to_string()),
            ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", limit),
            ("YUNION_MPS_DEVICE", text("addr")),
        ];
        Self { pipe: pipe.into(), environment }
    }

    /// The same GPU for a program that does not know of MPS.
    pub(crate) fn without_mps(&self, nowhere: &Path) -> Self {
        let mut offer = self.clone();
        offer.pipe = nowhere.to_owned();
        offer.environment.retain(|(name, _)| *name == "CUDA_VISIBLE_DEVICES");
        offer.environment.push(("CUDA_MPS_PIPE_DIRECTORY", nowhere.display().to_string()));
        offer
    }
}

/// The way to the GPU on which a client's work began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    WithMps,
    WithoutMps,
}

/// The end of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Done,
    /// Nothing of its work had begun.
    TurnedAway(String),
    /// It was at work.
    Lost(String),
}

/// One client.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    /// The GPU's number in the stream.
    pub(crate) gpu: usize,
    pub(crate) pid: u32,
    pub(crate) pipe: PathBuf,
    /// It only sees whether it is let in.
    pub(crate) knocks: bool,
    pub(crate) came: Instant,
    pub(crate) began: Option<Way>,
    pub(crate) gone: Option<(Instant, Outcome)>,
    /// Whether somebody has looked at how its work began.
    pub(crate) examined: bool,
}

/// All that the threads share.
struct Shared {
    program: PathBuf,
    environment: Vec<(OsString, Option<OsString>)>,
    other_user: bool,
    /// The slices of each GPU.
    offers: Mutex<Vec<Vec<Offer>>>,
    clients: Mutex<Vec<Client>>,
    over: AtomicBool,
}

/// The stream, until it is ended.
pub(crate) struct Stream {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Stream {
    /// Starts the stream: for each GPU so many clients at once that work for a while, and one after the other that only
    /// see whether they are let in.
    pub(crate) fn start(host: &Host, offers: Vec<Vec<Offer>>, workers: usize, random: &mut Random) -> Self {
        let command = host.command("cuda-client");
        let environment = command.get_envs().map(|(name, value)| (name.to_owned(), value.map(Into::into)));
        let gpus = offers.len();
        let shared = Arc::new(Shared {
            program: host.path("bin/cuda-client"),
            environment: environment.collect(),
            other_user: root_or_skip("chaos: clients of another user"),
            offers: Mutex::new(offers),
            clients: Mutex::default(),
            over: AtomicBool::new(false),
        });
        let mut stream = Self { shared, threads: Vec::new() };
        for gpu in 0..gpus {
            for _ in 0..workers {
                stream.spawn(random.fork(), move |shared, random| shared.work_on(gpu, random));
            }
            stream.spawn(random.fork(), move |shared, random| shared.knock_on(gpu, random));
        }
        stream
    }

    fn spawn(&mut self, mut random: Random, run: impl FnOnce(&Shared, &mut Random) + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        self.threads.push(std::thread::spawn(move || run(&shared, &mut random)));
    }

    /// Starts one program beside the stream.
    pub(crate) fn one_more(&mut self, gpu: usize, offer: Offer, time: Duration, random: &mut Random) {
        self.spawn(random.fork(), move |shared, _| shared.run(gpu, &offer, time, false, false));
    }

    /// Sets the slices that are offered from now on of a GPU.
    pub(crate) fn offer(&self, gpu: usize, offers: Vec<Offer>) {
        lock(&self.shared.offers)[gpu] = offers;
    }

    /// A slice of a GPU.
    pub(crate) fn any_offer(&self, gpu: usize, random: &mut Random) -> Offer {
        self.shared.any_offer(gpu, random)
    }

    /// All clients that there were and are.
    pub(crate) fn clients(&self) -> MutexGuard<'_, Vec<Client>> {
        lock(&self.shared.clients)
    }

    /// Lets nobody else come, waits for the end of all clients, and gives their records.
    pub(crate) fn end(&mut self) -> Vec<Client> {
        self.shared.over.store(true, Ordering::SeqCst);
        let threads = std::mem::take(&mut self.threads);
        wait_for("the end of all clients", || threads.iter().all(JoinHandle::is_finished).then_some(()));
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        self.clients().clone()
    }
}

impl Drop for Stream {
    /// A test that fails ends their processes with the host; the threads must not go on starting others.
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn any_offer(&self, gpu: usize, random: &mut Random) -> Offer {
        let offers = &lock(&self.offers)[gpu];
        offers[usize::try_from(random.below(offers.len() as u64)).unwrap()].clone()
    }

    fn work_on(&self, gpu: usize, random: &mut Random) {
        while !self.over.load(Ordering::SeqCst) {
            let offer = self.any_offer(gpu, random);
            let time = Duration::from_millis(200) + random.millis(4800);
            let other_user = self.other_user && random.below(3) == 0;
            self.run(gpu, &offer, time, other_user, false);
            std::thread::sleep(Duration::from_millis(20) + random.millis(200));
        }
    }

    fn knock_on(&self, gpu: usize, random: &mut Random) {
        while !self.over.load(Ordering::SeqCst) {
            self.run(gpu, &self.any_offer(gpu, random), Duration::ZERO, false, true);
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Runs one client to its end.
    fn run(&self, gpu: usize, offer: &Offer, time: Duration, other_user: bool, knocks: bool) {
        let mut command = Command::new(&self.program);
        for (name, value) in &self.environment {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.envs(offer.environment.iter().map(|(name, value)| (name, value)));
        command.args(["hold", &time.as_secs_f64().to_string(), "--tell"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        if other_user {
            command.uid(OTHER_USER).gid(OTHER_USER);
        }
        let came = Instant::now();
        let mut child = command.spawn().unwrap();
        let client = Client {
            gpu,
            pid: child.id(),
            pipe: offer.pipe.clone(),
            knocks,
            came,
            began: None,
            gone: None,
            examined: false,
        };
        let place = {
            let mut clients = lock(&self.clients);
            clients.push(client);
            clients.len() - 1
        };
        let mut said = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let mut last = said.next().unwrap_or_default();
        if last.contains(" begins ") {
            let way = if last.ends_with("with MPS") { Way::WithMps } else { Way::WithoutMps };
            lock(&self.clients)[place].began = Some(way);
        }
        last = said.last().unwrap_or(last);
        let status = child.wait().unwrap();
        let outcome = match status.code() {
            Some(0) => Outcome::Done,
            Some(3) => Outcome::TurnedAway(last),
            _ => Outcome::Lost(format!("{status}: {last}")),
        };
        lock(&self.clients)[place].gone = Some((Instant::now(), outcome));
    }
}
