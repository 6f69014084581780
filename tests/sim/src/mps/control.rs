//! The simulated MPS control daemon: its options, its sockets, and the server that it starts for its clients.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::log::Log;
use super::wire::{self, ClientHello, Event, Hello, Order, Report, Status};
use super::{front_end, log_directory, pipe_directory};
use crate::state::{Gpu, Host, visible};

/// The option `-d` starts a process in the background, and sets this environment variable for the process.
const BACKGROUND: &str = "YUNION_MPS_SIM_BACKGROUND";

/// The control daemon in the background writes this line to its stdout as soon as it serves.
const SERVING: &str = "serving\n";

/// CUDA's error `MPS client failed to connect to the MPS control daemon or the MPS server`.
const NO_SERVER: u32 = 805;

const USAGE: &str = "CUDA MPS Control for Linux/Unix.
Copyright (C) 2003 - 2024 NVIDIA Corporation.

  This program allows multiple CUDA processes to share a single GPU context. For information on how to use the CUDA \
  MPS, see the nvidia-cuda-mps-control manual page.

";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    FrontEnd,
    Foreground,
    Background,
}

pub fn run(arguments: &[String]) -> u8 {
    let host = match Host::from_env() {
        Ok(host) => host,
        Err(error) => {
            _ = writeln!(io::stderr(), "{error}");
            return 1;
        }
    };
    let version = host.mps_version();
    if version >= 615 && std::env::var("CUDA_MPS_PROTOCOL_VERSION").is_ok_and(|protocol| protocol != "2") {
        _ = writeln!(io::stderr(), "the simulated control daemon has no other protocol than 2");
        return 1;
    }
    let multiuser_spellings: &[&str] = match version {
        580.. => &["-multiuser-server", "--multiuser-server", "-M"],
        555 => &["-multiuser-server"],
        _ => &[],
    };
    let (mut mode, mut multiuser) = (Mode::FrontEnd, false);
    for argument in arguments {
        match argument.as_str() {
            "-d" => mode = Mode::Background,
            "-f" => mode = Mode::Foreground,
            "-v" if version >= 580 => {
                _ = write!(
                    io::stdout(),
                    "CUDA MPS Control for Linux/Unix/QNX. Binary version: {}\n\
                     Copyright (C) 2003 - 2025 NVIDIA Corporation.\n\n",
                    host.cuda_version()
                );
                return 0;
            }
            option if multiuser_spellings.contains(&option) => multiuser = true,
            _ if version == 555 => {
                _ = io::stdout().write_all(USAGE.as_bytes());
                return 1;
            }
            _ => {
                // The real `nvidia-cuda-mps-control`, too, becomes a front end if it does not know an option.
                if version >= 580 {
                    _ = writeln!(io::stderr(), "Unrecognized option  ");
                }
                mode = Mode::FrontEnd;
                break;
            }
        }
    }
    let child = std::env::var_os(BACKGROUND).is_some();
    let done = match mode {
        Mode::FrontEnd => return front_end::run(&host),
        Mode::Background if !child => to_background(arguments),
        Mode::Foreground | Mode::Background => Daemon::serve(host, multiuser, mode == Mode::Background),
    };
    done.unwrap_or_else(|error| {
        _ = writeln!(io::stderr(), "{}: {error}", pipe_directory().display());
        1
    })
}

/// Starts this program again in the background, and waits until the new process serves or has failed.
fn to_background(arguments: &[String]) -> io::Result<u8> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg0("nvidia-cuda-mps-control")
        .args(arguments)
        .env(BACKGROUND, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        // The control daemon must not inherit this process's stderr. Otherwise a reader of stderr would wait until the control
        // daemon ends.
        .stderr(Stdio::piped())
        .spawn()?;
    let mut said = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut said)?;
    }
    if said == SERVING {
        return Ok(0);
    }
    io::stdout().write_all(said.as_bytes())?;
    if let Some(mut stderr) = child.stderr.take() {
        io::copy(&mut stderr, &mut io::stderr())?;
    }
    Ok(exit_code(&mut child))
}

fn exit_code(child: &mut Child) -> u8 {
    use std::os::unix::process::ExitStatusExt;
    let status = child.wait().ok();
    let code = status.and_then(|status| status.code().or(status.signal()));
    code.and_then(|code| code.try_into().ok()).unwrap_or(1)
}

pub(super) struct Defaults {
    pub(super) percentage: f64,
    /// The memory limits in bytes, by the ordinals of the GPUs.
    pub(super) limits: Vec<(usize, u64)>,
}

pub(super) struct Daemon {
    pub(super) host: Host,
    pub(super) version: u32,
    pub(super) gpus: Vec<Gpu>,
    multiuser: bool,
    pipe: PathBuf,
    log: Log,
    server_log: Option<File>,
    defaults: Mutex<Defaults>,
    state: Mutex<State>,
    changed: Condvar,
    /// A thread locks `busy` for an action during which the control daemon answers no program.
    busy: Mutex<()>,
}

struct State {
    server: Option<Arc<Server>>,
    quitting: bool,
    /// The exit status of the last server that has ended. The control daemon ends with the same exit status.
    exit_status: u8,
}

pub(super) struct Server {
    pub(super) pid: u32,
    uid: u32,
    channel: OwnedFd,
    ready: AtomicBool,
    clients: AtomicUsize,
    answers: Mutex<Receiver<Status>>,
}

impl Server {
    pub(super) fn ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst)
    }

    pub(super) fn idle(&self) -> bool {
        self.clients.load(Ordering::SeqCst) == 0
    }

    /// Sends an order to the server. If the server has ended, the order is lost.
    pub(super) fn order(&self, order: &Order) {
        _ = wire::send(&self.channel, order);
    }

    pub(super) fn ask(&self, order: &Order) -> Option<Status> {
        let answers = lock(&self.answers);
        wire::send(&self.channel, order).ok()?;
        answers.recv().ok()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A process that runs a front end. The kernel reports the user of the process.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asker {
    pub(super) uid: u32,
    /// True if the front end has connected to the socket `control_privileged`.
    privileged: bool,
}

impl Asker {
    /// True if the front end may give commands that change a server or a client.
    pub(super) fn may_change(self) -> bool {
        self.uid == rustix::process::geteuid().as_raw()
    }

    /// True if the front end may change the defaults, and end the control daemon.
    pub(super) fn may_command(self) -> bool {
        self.may_change() && self.privileged
    }
}

impl Daemon {
    fn serve(host: Host, multiuser: bool, background: bool) -> io::Result<u8> {
        if host.fault("start-exits").is_some() {
            return Ok(1);
        }
        while host.fault("start-hangs").is_some() {
            thread::park();
        }
        let pipe = pipe_directory();
        make_directory(&pipe)?;
        let lock_file = OpenOptions::new().create(true).append(true).open(pipe.join("control_lock"))?;
        lock_file.set_permissions(Permissions::from_mode(0o666))?;
        if rustix::fs::flock(&lock_file, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_err() {
            io::stdout().write_all(b"An instance of this daemon is already running\n")?;
            return Ok(1);
        }
        let (log, server_log) = logs(&pipe, background)?;
        let version = host.mps_version();
        if host.fault("start-garbage").is_some() {
            io::stdout().write_all(b"\x00\xff\xfe garbage \x1b[2J\n[not a time Control] \xc3\n")?;
        }
        // A front end of the control daemon's own user connects to `control_privileged`, and may give any command. Like a real
        // control daemon, the program makes `control_privileged` before `control`. So a front end that finds `control` also
        // finds `control_privileged`.
        let privileged = wire::listen(&pipe.join("control_privileged"))?;
        fs::set_permissions(pipe.join("control_privileged"), Permissions::from_mode(0o755))?;
        let control = wire::listen(&pipe.join("control"))?;
        fs::set_permissions(pipe.join("control"), Permissions::from_mode(0o666))?;
        leave_files(&pipe, version)?;

        let names = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let daemon: &'static Self = Box::leak(Box::new(Self {
            gpus: visible(&host.gpus(), names.as_deref()).into_iter().flatten().collect(),
            version,
            multiuser,
            log,
            server_log,
            defaults: Mutex::new(Defaults { percentage: 100.0, limits: Vec::new() }),
            state: Mutex::new(State { server: None, quitting: false, exit_status: 0 }),
            changed: Condvar::new(),
            busy: Mutex::new(()),
            pipe,
            host,
        }));
        daemon.announce();
        if background {
            rustix::process::setsid()?;
            io::stdout().write_all(SERVING.as_bytes())?;
        }
        if let Some(after) = daemon.host.fault("die-after-ms").and_then(|text| text.parse().ok()) {
            thread::spawn(move || {
                thread::sleep(Duration::from_millis(after));
                std::process::exit(1);
            });
        }
        thread::spawn(move || daemon.accept(&privileged, true));
        daemon.accept(&control, false)
    }

    fn announce(&self) {
        let pipe = self.pipe.display();
        self.log(&format!("Starting control daemon using socket {pipe}/control"));
        let connect = "To connect CUDA applications to this daemon, set env";
        self.log(&format!("{connect} CUDA_MPS_PIPE_DIRECTORY={pipe}"));
        if self.version >= 580 {
            self.log(&format!("CUDA MPS Control binary version: {}", self.host.cuda_version()));
        }
    }

    pub(super) fn log(&self, text: &str) {
        self.log.line("Control", std::process::id(), text);
    }

    pub(super) fn defaults(&self) -> MutexGuard<'_, Defaults> {
        lock(&self.defaults)
    }

    pub(super) fn server(&self) -> Option<Arc<Server>> {
        lock(&self.state).server.clone()
    }

    fn accept(&'static self, socket: &OwnedFd, privileged: bool) -> io::Result<u8> {
        loop {
            let connection = rustix::net::accept_with(socket, rustix::net::SocketFlags::CLOEXEC)?;
            thread::spawn(move || self.answer(&connection, privileged));
        }
    }

    pub(super) fn nothing_else(&self) -> MutexGuard<'_, ()> {
        lock(&self.busy)
    }

    fn answer(&'static self, connection: &OwnedFd, privileged: bool) {
        drop(self.nothing_else());
        self.log("Accepting connection...");
        let hello = wire::receive(connection).zip(wire::peer(connection));
        match hello {
            Some((Hello::FrontEnd, (_, uid))) => {
                self.user_interface(connection, Asker { uid, privileged });
            }
            Some((Hello::Client(hello), (pid, uid))) => {
                // A real client connects more than once, and each connection causes this line about credentials in the log.
                self.log("User did not send valid credentials");
                self.log("Accepting connection...");
                self.admit(connection, pid, uid, hello);
            }
            None => self.log("Unable to accept connection"),
        }
    }

    fn user_interface(&'static self, connection: &OwnedFd, asker: Asker) {
        self.log("NEW UI");
        while let Some(line) = wire::receive::<String>(connection) {
            // After `quit`, a control daemon that still has a client handles no further command. Real control daemons behave in
            // the same way.
            let is_quitting = lock(&self.state).quitting;
            let answer = (!is_quitting).then(|| self.command(&line, asker));
            if wire::send(connection, &answer).is_err() {
                break;
            }
        }
        self.log("UI closed");
    }

    /// Passes a client on to a server, as soon as a server for the client's user runs.
    fn admit(&'static self, connection: &OwnedFd, pid: u32, uid: u32, hello: ClientHello) {
        let arrived = |end: &str| self.log(&format!("NEW CLIENT {pid} from user {uid}: {end}"));
        let (mut pending, mut started) = (false, false);
        let mut state = lock(&self.state);
        loop {
            let server = state.server.clone();
            if state.quitting || (started && server.is_none()) {
                _ = wire::send(connection, &Event::Error(NO_SERVER));
                return;
            }
            if let Some(server) = &server
                && server.ready()
                && (self.multiuser || server.uid == uid)
            {
                if !pending {
                    arrived("Server already exists");
                    self.log("Accepting connection...");
                }
                arrived("Server already exists");
                server.clients.fetch_add(1, Ordering::SeqCst);
                _ = wire::send_with(&server.channel, &Order::Client { pid, hello }, Some(connection));
                return;
            }
            if !pending {
                arrived("Server is not ready, push client to pending list");
                pending = true;
            }
            match server {
                None => {
                    self.start(&mut state, uid);
                    started = true;
                }
                // The server belongs to another user and has no client, so it ends before a server for the new user starts.
                Some(server) if server.ready() && server.idle() => {
                    drop(state);
                    if self.try_shutdown(&server) == 0 {
                        self.wait_until(|now| now.is_none_or(|now| now.pid != server.pid), None);
                    }
                    state = lock(&self.state);
                }
                Some(_) => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    pub(super) fn start_server(&'static self, uid: u32) {
        let mut state = lock(&self.state);
        if state.server.is_none() {
            self.start(&mut state, uid);
        }
    }

    fn start(&'static self, state: &mut State, uid: u32) {
        let uid = if self.multiuser { rustix::process::geteuid().as_raw() } else { uid };
        match self.spawn(uid) {
            Ok((mut child, channel)) => {
                let pid = child.id();
                self.log.line("Control", pid, &format!("Starting new server {pid} for user {uid}"));
                let (sender, answers) = mpsc::channel();
                let server = Arc::new(Server {
                    pid,
                    uid,
                    channel,
                    ready: AtomicBool::new(false),
                    clients: AtomicUsize::new(0),
                    answers: Mutex::new(answers),
                });
                let defaults = self.defaults();
                let (percentage, limits) = (defaults.percentage, defaults.limits.clone());
                server.order(&Order::Start { percentage, limits });
                state.server = Some(Arc::clone(&server));
                thread::spawn(move || self.follow(&server, &mut child, &sender));
            }
            Err(error) => self.log(&format!("Failed to start a server: {error}")),
        }
    }

    fn spawn(&self, uid: u32) -> io::Result<(Child, OwnedFd)> {
        let (ours, theirs) = wire::pair()?;
        let program = std::env::current_exe()?.with_file_name("nvidia-cuda-mps-server");
        let mut command = Command::new(program);
        command.arg0("nvidia-cuda-mps-server").stdin(Stdio::from(theirs));
        command.env("CUDA_MPS_PIPE_DIRECTORY", &self.pipe).env_remove(BACKGROUND);
        if let Some(log) = &self.server_log {
            command.stdout(log.try_clone()?);
        }
        if uid != rustix::process::geteuid().as_raw() {
            command.uid(uid);
        }
        Ok((command.spawn()?, ours))
    }

    fn follow(&self, server: &Server, child: &mut Child, answers: &Sender<Status>) {
        while let Some(report) = wire::receive(&server.channel) {
            match report {
                Report::Ready => {
                    self.log(&format!("NEW SERVER {}: Ready", server.pid));
                    self.note(|_| server.ready.store(true, Ordering::SeqCst));
                }
                Report::Gone => self.note(|_| _ = server.clients.fetch_sub(1, Ordering::SeqCst)),
                Report::Status(status) => _ = answers.send(status),
            }
        }
        let status = exit_code(child);
        self.note(|state| {
            // The server's process has already ended when this line appears in the log.
            self.log(&format!("Server {} exited with status {status}", server.pid));
            if self.version < 580 {
                self.log("Removed Shm file at ");
            }
            state.server = None;
            state.exit_status = status;
        });
    }

    fn note(&self, change: impl FnOnce(&mut State)) {
        change(&mut lock(&self.state));
        self.changed.notify_all();
    }

    /// Waits until `wanted` returns true for the server, or for `None` if no server runs. Returns false if the deadline comes
    /// first.
    pub(super) fn wait_until(
        &self,
        wanted: impl Fn(Option<&Server>) -> bool,
        deadline: Option<Instant>,
    ) -> bool {
        let mut state = lock(&self.state);
        while !wanted(state.server.as_deref()) {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
            let left = left.unwrap_or(Duration::from_secs(3600));
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    pub(super) fn refuse_clients(&self) {
        self.note(|state| state.quitting = true);
    }

    /// Ends the process after the command `quit`. Like a real control daemon, it removes only two of its files.
    pub(super) fn exit(&self) -> ! {
        let status = lock(&self.state).exit_status;
        self.log(&format!("Exit with status {status}"));
        for file in [FIFO, PID_FILE] {
            _ = fs::remove_file(self.pipe.join(file));
        }
        std::process::exit(status.into());
    }
}

const FIFO: &str = "log";
const PID_FILE: &str = "nvidia-cuda-mps-control.pid";

fn make_directory(path: &Path) -> io::Result<()> {
    if !path.is_dir() {
        fs::create_dir_all(path)?;
        fs::set_permissions(path, Permissions::from_mode(0o777))?;
    }
    Ok(())
}

/// Opens `control.log` for the control daemon, and `server.log` for its servers. In the foreground both log to the control
/// daemon's stdout. If the FIFO `log` in the pipe directory can't be made, all lines of the log are lost.
fn logs(pipe: &Path, background: bool) -> io::Result<(Log, Option<File>)> {
    if pipe.join(FIFO).is_dir() {
        return Ok((Log::to(io::sink()), Some(File::options().write(true).open("/dev/null")?)));
    }
    if !background {
        return Ok((Log::to(io::stdout()), None));
    }
    let directory = log_directory();
    make_directory(&directory)?;
    let open = |name| OpenOptions::new().create(true).append(true).open(directory.join(name));
    Ok((Log::to(open("control.log")?), Some(open("server.log")?)))
}

/// Makes the FIFO `log` in the pipe directory, and from version 555 on the PID file. Every user may write both files.
fn leave_files(pipe: &Path, version: u32) -> io::Result<()> {
    let fifo = pipe.join(FIFO);
    _ = fs::remove_file(&fifo);
    let made = rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o777),
        0,
    );
    if made.is_ok() {
        fs::set_permissions(&fifo, Permissions::from_mode(0o777))?;
    }
    if version >= 555 {
        let file = pipe.join(PID_FILE);
        fs::write(&file, std::process::id().to_string())?;
        fs::set_permissions(&file, Permissions::from_mode(0o666))?;
    }
    Ok(())
}
