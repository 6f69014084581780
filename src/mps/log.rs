//! The control daemon's log: it is followed while it is written, parsed, and passed on.
//!
//! A control daemon in the foreground and its servers write to one file. Only this file says which limits a server
//! applies, that a server is ready, and which faults it met.

use crate::host::proc;
use std::fs::File;
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, inotify};
use rustix::io::Errno;
use tracing::Level;

use super::directories;
use super::readable::Readable;

/// A parsed line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    /// The process that wrote the line, if the line names it.
    pub writer: Option<Writer>,
    /// The text after the prefix.
    pub text: String,
    /// The meaning of the line for this service.
    pub meaning: Meaning,
}

/// The process that wrote a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Writer {
    /// The control daemon, by its PID.
    Control(u32),
    /// A server, by its PID.
    Server(u32),
}

/// The meaning of a line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Meaning {
    /// The line changes nothing that the service knows.
    Ordinary,
    /// The line speaks of a failure that has no other meaning here.
    Trouble,
    /// The line appears in normal operation too, for example whenever a client comes or goes.
    Noise,
    /// A server is being started for a user.
    ServerStarting {
        /// The server.
        server: u32,
        /// The user.
        uid: u32,
    },
    /// A server takes clients.
    ServerReady(u32),
    /// A server has ended, with this exit status.
    ServerExited {
        /// The server.
        server: u32,
        /// Its exit status.
        status: i32,
    },
    /// The server that wrote the line limits its clients to this active thread percentage.
    ThreadPercentage {
        /// The server.
        server: u32,
        /// Tenths of a percent: `25.0` is 250.
        tenths: u32,
    },
    /// The server that wrote the line limits its clients to this much memory of one GPU.
    MemoryLimit {
        /// The server.
        server: u32,
        /// The GPU's ordinal.
        ordinal: usize,
        /// Bytes.
        bytes: u64,
    },
    /// A client met a fatal GPU error. It did not necessarily cause the error, which hits every client on that GPU.
    Fault {
        /// The server.
        server: u32,
        /// The client that the line names.
        client: u32,
    },
    /// A server ends every client on the GPUs with the error, and starts over.
    FaultHandling {
        /// The server.
        server: u32,
    },
    /// A client is torn down because of a fault.
    TornDown {
        /// The server.
        server: u32,
        /// The client.
        client: u32,
        /// The GPU's ordinal.
        ordinal: usize,
    },
    /// A client process has ended.
    ClientLeft(u32),
    /// A client waits, most often until the server of another user is idle.
    ClientPending {
        /// The client.
        client: u32,
        /// Its user.
        uid: u32,
    },
    /// The control daemon assigns a client to a server.
    ClientAdmitted(u32),
    /// A client was turned away, since the server has as many clients as it can hold.
    ClientRefused {
        /// The server.
        server: u32,
        /// The number of clients that the server can hold.
        capacity: u32,
    },
}

impl Meaning {
    /// Whether the line is about which servers exist or which limits they apply.
    pub(crate) fn is_of_servers(&self) -> bool {
        matches!(
            self,
            Self::ServerStarting { .. }
                | Self::ServerReady(_)
                | Self::ServerExited { .. }
                | Self::ThreadPercentage { .. }
                | Self::MemoryLimit { .. }
        )
    }
}

impl Line {
    /// Parses a line. It never fails: a line that it does not know is ordinary text.
    pub(crate) fn parse(line: &str) -> Self {
        let (writer, text) = split_prefix(line).unwrap_or((None, line));
        let meaning = meaning(writer, text);
        Self { writer, text: text.to_owned(), meaning }
    }

    /// Whether the line may explain why a control daemon or a server ended: a server wrote it, or it speaks of a
    /// failure.
    pub(crate) fn may_explain_an_end(&self) -> bool {
        match (&self.meaning, self.writer) {
            (Meaning::Trouble, _) => true,
            (Meaning::Noise, _) | (_, Some(Writer::Control(_))) => false,
            _ => !self.text.trim().is_empty(),
        }
    }

    /// Passes the line on, with the fields by which journalctl can filter.
    pub(crate) fn trace(&self, control_daemon: &str) {
        let text = self.text.as_str();
        let (server, client, ordinal) = self.subjects();
        let (server, client, ordinal) =
            (server.map(u64::from), client.map(u64::from), ordinal.and_then(|n| u64::try_from(n).ok()));
        macro_rules! pass_on {
            ($level:ident) => {
                tracing::$level!(
                    mps_control = control_daemon,
                    mps_server_pid = server,
                    mps_client_pid = client,
                    mps_device = ordinal,
                    "mps: {text}"
                )
            };
        }
        match self.level() {
            Level::WARN => pass_on!(warn),
            Level::INFO => pass_on!(info),
            _ => pass_on!(debug),
        }
    }

    /// The importance of the line for an administrator.
    pub(crate) fn level(&self) -> Level {
        match &self.meaning {
            Meaning::Ordinary | Meaning::Noise | Meaning::ClientAdmitted(_) | Meaning::ClientLeft(_) => {
                Level::DEBUG
            }
            Meaning::ServerStarting { .. }
            | Meaning::ServerReady(_)
            | Meaning::ThreadPercentage { .. }
            | Meaning::MemoryLimit { .. }
            | Meaning::ClientPending { .. }
            | Meaning::ServerExited { status: 0, .. }
            // The supervisor tells the fault once for each GPU, with all that these lines say.
            | Meaning::Fault { .. }
            | Meaning::FaultHandling { .. }
            | Meaning::TornDown { .. } => Level::INFO,
            Meaning::Trouble | Meaning::ServerExited { .. } | Meaning::ClientRefused { .. } => Level::WARN,
        }
    }

    fn subjects(&self) -> (Option<u32>, Option<u32>, Option<usize>) {
        let writing_server = match self.writer {
            Some(Writer::Server(pid)) => Some(pid),
            _ => None,
        };
        match &self.meaning {
            Meaning::Ordinary | Meaning::Trouble | Meaning::Noise => (writing_server, None, None),
            Meaning::ServerStarting { server, .. }
            | Meaning::ServerReady(server)
            | Meaning::ServerExited { server, .. }
            | Meaning::ThreadPercentage { server, .. }
            | Meaning::FaultHandling { server }
            | Meaning::ClientRefused { server, .. } => (Some(*server), None, None),
            Meaning::MemoryLimit { server, ordinal, .. } => (Some(*server), None, Some(*ordinal)),
            Meaning::Fault { server, client } => (Some(*server), Some(*client), None),
            Meaning::TornDown { server, client, ordinal } => (Some(*server), Some(*client), Some(*ordinal)),
            Meaning::ClientLeft(client) => (writing_server, Some(*client), None),
            Meaning::ClientPending { client, .. } | Meaning::ClientAdmitted(client) => {
                (None, Some(*client), None)
            }
        }
    }
}

/// Splits `[2026-11-21 02:13:53.814 Control   879] text`. The answer to one command spans lines without a prefix.
fn split_prefix(line: &str) -> Option<(Option<Writer>, &str)> {
    let (prefix, text) = line.strip_prefix('[')?.split_once(']')?;
    let mut words = prefix.split_ascii_whitespace();
    let (_date, _time) = (words.next()?, words.next()?);
    let pid = words.next_back()?.parse().ok()?;
    let kind: Vec<&str> = words.collect();
    let writer = match kind.as_slice() {
        ["Control"] => Some(Writer::Control(pid)),
        // A server calls itself Other until it knows that it is a server, and Legacy Server if it does not become one.
        ["Server" | "Other"] | ["Legacy", "Server"] => Some(Writer::Server(pid)),
        _ => None,
    };
    Some((writer, text.strip_prefix(' ').unwrap_or(text)))
}

fn meaning(writer: Option<Writer>, text: &str) -> Meaning {
    let understood = match writer {
        Some(Writer::Server(server)) => said_by_server(server, text),
        Some(Writer::Control(_)) => said_by_control(text),
        None => None,
    };
    // The new process writes `Starting new server`, sometimes under the control daemon's name, so the line is accepted
    // from any writer.
    let understood = understood.or_else(|| server_starting(text));
    understood.or_else(|| trouble(writer, text)).unwrap_or(Meaning::Ordinary)
}

/// The beginnings of the words that speak of a failure.
const OF_FAILURE: [&str; 9] =
    ["fatal", "fail", "error", "invalid", "cannot", "can't", "unable", "exception", "denied"];

/// The control daemon logs each command, and for `ps` the table of clients. Both hold text that tenants choose, so
/// neither counts as trouble.
fn trouble(writer: Option<Writer>, text: &str) -> Option<Meaning> {
    let repeated = text.starts_with("Cmd:") || text.starts_with(|first: char| first.is_ascii_digit());
    if repeated && !matches!(writer, Some(Writer::Server(_))) {
        return None;
    }
    let text = text.to_ascii_lowercase();
    let mut words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '\'');
    words.any(|word| OF_FAILURE.iter().any(|begin| word.starts_with(begin))).then_some(Meaning::Trouble)
}

fn server_starting(text: &str) -> Option<Meaning> {
    let (server, uid) = text.strip_prefix("Starting new server ")?.split_once(" for user ")?;
    Some(Meaning::ServerStarting { server: server.parse().ok()?, uid: uid.trim().parse().ok()? })
}

fn said_by_control(text: &str) -> Option<Meaning> {
    // Someone connected and said nothing, as the service does to learn who listens.
    if ["User did not send valid credentials", "Unable to accept connection"].contains(&text.trim_end()) {
        return Some(Meaning::Noise);
    }
    if let Some(rest) = text.strip_prefix("NEW SERVER ") {
        let (server, state) = rest.split_once(':')?;
        return (state.trim() == "Ready").then_some(Meaning::ServerReady(server.parse().ok()?));
    }
    if let Some(rest) = text.strip_prefix("NEW CLIENT ") {
        let (client, rest) = rest.split_once(" from user ")?;
        let (uid, rest) = rest.split_once(':')?;
        let client = client.parse().ok()?;
        return match rest.trim() {
            "Server already exists" => Some(Meaning::ClientAdmitted(client)),
            rest if rest.contains("push client to pending list") => {
                Some(Meaning::ClientPending { client, uid: uid.parse().ok()? })
            }
            _ => None,
        };
    }
    let (server, status) = text.strip_prefix("Server ")?.split_once(" exited with status ")?;
    Some(Meaning::ServerExited { server: server.parse().ok()?, status: status.trim().parse().ok()? })
}

fn said_by_server(server: u32, text: &str) -> Option<Meaning> {
    // The misspellings are the server's own. The last three belong to a fault, which other lines tell.
    let noise = [
        "Server failed to recevie command with status 806",
        "Server was unable to shutdown due to",
        "All clients belonging to error trigging process",
        "The following client process have a sticky error set",
    ];
    if noise.iter().any(|noise| text.starts_with(noise)) || text.contains(" on the error-trigging process ") {
        return Some(Meaning::Noise);
    }
    if let Some(value) = text.strip_prefix("Active Threads Percentage set to ") {
        return Some(Meaning::ThreadPercentage { server, tenths: tenths(value.trim())? });
    }
    if let Some(rest) = text.strip_prefix("Device pinned memory limit for device ") {
        let (ordinal, rest) = rest.split_once(" set to 0x")?;
        let bytes = u64::from_str_radix(rest.strip_suffix(" bytes")?, 16).ok()?;
        return Some(Meaning::MemoryLimit { server, ordinal: ordinal.parse().ok()?, bytes });
    }
    if text.starts_with("Server is handling a fatal GPU error") {
        return Some(Meaning::FaultHandling { server });
    }
    if let Some((_, rest)) = text.split_once("Maximum number of clients (") {
        let (capacity, _) = rest.split_once(')')?;
        return Some(Meaning::ClientRefused { server, capacity: capacity.parse().ok()? });
    }
    if let Some(rest) = text.strip_prefix("Client process ") {
        let client = rest.strip_suffix(" disconnected")?;
        return Some(Meaning::ClientLeft(client.parse().ok()?));
    }
    let (client, rest) = text.strip_prefix("Client {PID: ")?.split_once(',')?;
    let client = client.parse().ok()?;
    if rest.contains("encountered a fatal GPU error") {
        return Some(Meaning::Fault { server, client });
    }
    let (_, rest) = rest.split_once("} on device ")?;
    let (ordinal, rest) = rest.split_once(' ')?;
    (rest == "to be torn down").then_some(Meaning::TornDown {
        server,
        client,
        ordinal: ordinal.parse().ok()?,
    })
}

/// Parses `25.0` as 250.
fn tenths(value: &str) -> Option<u32> {
    let (whole, part) = value.split_once('.').unwrap_or((value, "0"));
    let first = part.chars().next().and_then(|digit| digit.to_digit(10))?;
    whole.parse::<u32>().ok()?.checked_mul(10)?.checked_add(first)
}

/// The length at which a line is cut. A file that is no log must not fill the memory.
const LINE_MAX_BYTES: usize = 16 << 10;

/// The number of bytes per read. At most this and the beginning of a line are held in memory.
const CHUNK_BYTES: usize = 16 << 10;

/// The last bytes of a log, in which the reason for an end is looked for.
const END_BYTES: u64 = 256 << 10;

/// The number of lines after which other tasks have a turn. A tenant can make a control daemon write thousands of lines
/// a second.
const LINES_AT_A_TIME: u32 = 256;

/// The number of bytes that are copied before other tasks have a turn.
const COPIED_AT_A_TIME: u64 = 1 << 20;

/// Follows a file to which others append, from a given offset on.
#[derive(Debug)]
pub(crate) struct Follower {
    path: PathBuf,
    /// The file is never opened by its path again, since somebody may have put another file there.
    file: File,
    /// The offset up to which the file has been read.
    read: u64,
    /// The bytes of the last reads. They have been handed out up to `handed_out`.
    unread: Vec<u8>,
    handed_out: usize,
    lines_since_pause: u32,
    rotation: Option<Rotation>,
    rotated: Option<io::Result<()>>,
    changes: Readable,
}

/// The rotation of the file, while it lasts.
#[derive(Debug)]
struct Rotation {
    /// The file that takes the contents, or the reason why there is none.
    copy: io::Result<File>,
    copied: u64,
}

impl Follower {
    /// Follows `file`, which is or was at `path`, from `offset` in bytes. It can be rotated only if it is open for
    /// writing too.
    pub(crate) fn new(file: File, path: &Path, offset: u64) -> io::Result<Self> {
        let changes = inotify::init(inotify::CreateFlags::NONBLOCK | inotify::CreateFlags::CLOEXEC).map_err(
            |error| {
                let remedy =
                    "raise the sysctl fs.inotify.max_user_instances, or the open files of this service";
                if error == Errno::MFILE {
                    io::Error::other(format!("{error}; {remedy}"))
                } else {
                    error.into()
                }
            },
        )?;
        // The watch uses the descriptor, so it watches this file, whatever the path leads to now.
        let this_file = proc::open_file(proc::OWN, file.as_raw_fd());
        inotify::add_watch(&changes, this_file, inotify::WatchFlags::MODIFY)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            read: offset,
            unread: Vec::new(),
            handed_out: 0,
            lines_since_pause: 0,
            rotation: None,
            rotated: None,
            changes: Readable::new(changes)?,
        })
    }

    /// The file's path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The offset up to which lines have been handed out, in bytes.
    pub(crate) fn offset(&self) -> u64 {
        let held = self.unread.len().saturating_sub(self.handed_out);
        self.read.saturating_sub(held as u64)
    }

    /// The length of the file, in bytes.
    pub(crate) fn length(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Skips all lines that are not handed out yet, except at the end of the file.
    pub(crate) fn skip_to_end(&mut self) -> io::Result<()> {
        let end = self.length()?.saturating_sub(END_BYTES);
        if self.offset() < end {
            self.read = end;
            self.unread.clear();
            self.handed_out = 0;
        }
        Ok(())
    }

    /// Whether the file is still the file at its path.
    pub(crate) fn is_in_place(&self) -> bool {
        let (Ok(ours), Ok(there)) = (self.file.metadata(), std::fs::symlink_metadata(&self.path)) else {
            return false;
        };
        (ours.dev(), ours.ino()) == (there.dev(), there.ino())
    }

    /// The reason why the control daemon can't write to the file, if there is one.
    pub(crate) fn trouble(&self) -> Option<&'static str> {
        if !self.is_in_place() {
            return Some("was removed; the control daemon still writes to the removed file");
        }
        let full = rustix::fs::fstatvfs(&self.file).is_ok_and(|statistics| statistics.f_bfree == 0);
        full.then_some(
            "its file system is full; until there is room, the control daemon and its servers can't log",
        )
    }

    /// Rotates the file if it is longer than `max_bytes`: its contents replace `<path>.1`. The file is copied and
    /// truncated, since the processes that write to it can't be told to use another. That happens in steps while its
    /// lines are waited for. [`Follower::rotated`] reports the end.
    pub(crate) fn rotate(&mut self, max_bytes: u64) {
        let writable = || rustix::fs::fcntl_getfl(&self.file).is_ok_and(|flags| flags.contains(OFlags::RDWR));
        let due = || self.length().is_ok_and(|length| length > max_bytes) && writable();
        if self.rotation.is_none() && due() && self.is_in_place() {
            self.rotation = Some(Rotation { copy: self.place_of_copy(), copied: 0 });
        }
    }

    /// Whether a rotation has finished since the last call. An error if the contents could not be kept.
    pub(crate) fn rotated(&mut self) -> Option<io::Result<()>> {
        self.rotated.take()
    }

    /// Makes a new, empty `<path>.1`. The former one is removed first, since a full disk may have room for only one.
    fn place_of_copy(&self) -> io::Result<File> {
        let (Some(directory), Some(name)) = (self.path.parent(), self.path.file_name()) else {
            return Err(io::Error::other("it is in no directory"));
        };
        let mut old = name.to_owned();
        old.push(".1");
        directories::replace(directory, Path::new(&old)).map_err(io::Error::other)
    }

    /// Takes the next step of a rotation.
    fn copy_on(&mut self) -> io::Result<()> {
        let Some(rotation) = &mut self.rotation else { return Ok(()) };
        let length = self.file.metadata()?.len();
        if let Ok(copy) = &mut rotation.copy {
            let end = length.min(rotation.copied + COPIED_AT_A_TIME);
            match copy_between(&self.file, copy, rotation.copied, end) {
                Ok(()) => rotation.copied = end,
                Err(error) => rotation.copy = Err(error),
            }
        }
        let copied = rotation.copy.is_err() || rotation.copied >= length;
        // Truncation removes the bytes that were not read yet, so they must be few enough to be read first.
        if !copied || length.saturating_sub(self.read) > CHUNK_BYTES as u64 {
            return Ok(());
        }
        while self.read < length && self.fill()? {}
        rustix::fs::ftruncate(&self.file, 0)?;
        self.read = 0;
        self.rotated = self.rotation.take().map(|rotation| rotation.copy.map(drop));
        Ok(())
    }

    /// Reads the next bytes. False if there are none.
    fn fill(&mut self) -> io::Result<bool> {
        self.unread.drain(..self.handed_out.min(self.unread.len()));
        self.handed_out = 0;
        let mut chunk = [0; CHUNK_BYTES];
        let mut count = self.file.read_at(&mut chunk, self.read)?;
        if count == 0 && self.file.metadata()?.len() < self.read {
            // Somebody else truncated the file and writes it from the beginning.
            (self.read, self.rotation) = (0, None);
            self.unread.clear();
            count = self.file.read_at(&mut chunk, 0)?;
        }
        self.read += count as u64;
        self.unread.extend(chunk.iter().take(count));
        Ok(count > 0)
    }

    /// The next line that is already in the file, if there is one.
    fn try_next(&mut self) -> io::Result<Option<Line>> {
        loop {
            let held = self.unread.get(self.handed_out..).unwrap_or_default();
            let end = held.iter().take(LINE_MAX_BYTES).position(|byte| *byte == b'\n');
            let end = end.map(|end| end + 1).or((held.len() >= LINE_MAX_BYTES).then_some(LINE_MAX_BYTES));
            if let Some(line) = end.and_then(|end| held.get(..end)) {
                self.handed_out += line.len();
                return Ok(Some(Line::parse(String::from_utf8_lossy(line).trim_end())));
            }
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    /// The same, but other tasks have a turn now and then. Nothing is lost if the call is cancelled.
    pub(crate) async fn next_there(&mut self) -> io::Result<Option<Line>> {
        if self.lines_since_pause >= LINES_AT_A_TIME {
            self.pause().await?;
        }
        self.lines_since_pause += 1;
        self.try_next()
    }

    async fn pause(&mut self) -> io::Result<()> {
        self.lines_since_pause = 0;
        self.copy_on()?;
        tokio::task::yield_now().await;
        Ok(())
    }

    /// Waits for the next line. Nothing is lost if the call is cancelled.
    pub(crate) async fn next(&mut self) -> io::Result<Line> {
        loop {
            if let Some(line) = self.next_there().await? {
                return Ok(line);
            }
            if self.rotation.is_some() {
                self.pause().await?;
            } else {
                self.changed().await?;
            }
        }
    }

    /// Waits until the file has changed.
    async fn changed(&self) -> io::Result<()> {
        self.changes
            .until(|queue| {
                let mut buffer = [MaybeUninit::uninit(); 1024];
                let mut events = inotify::Reader::new(queue, &mut buffer);
                events.next()?;
                // Further events say the same.
                while !events.is_buffer_empty() && events.next().is_ok() {}
                Ok(())
            })
            .await
    }
}

/// Copies the bytes between two offsets, or as many of them as the file has.
fn copy_between(from: &File, to: &mut File, begin: u64, end: u64) -> io::Result<()> {
    let mut chunk = [0; CHUNK_BYTES];
    let mut at = begin;
    while at < end {
        let count = from.read_at(&mut chunk, at)?;
        let wanted = count.min(usize::try_from(end - at).unwrap_or(usize::MAX));
        let Some(bytes) = chunk.get(..wanted).filter(|bytes| !bytes.is_empty()) else { break };
        to.write_all(bytes)?;
        at += wanted as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn open(path: &Path) -> File {
        File::options().read(true).write(true).open(path).unwrap()
    }

    fn meaning_of(line: &str) -> Meaning {
        Line::parse(line).meaning
    }

    // Control daemons and servers of drivers 535 to 580 wrote these lines.
    #[test]
    fn recorded_lines() {
        let server = 939;
        for (line, expected) in [
            (
                "[2026-11-21 02:13:53.859 Control   939] Starting new server 939 for user 0",
                Meaning::ServerStarting { server, uid: 0 },
            ),
            ("[2026-11-21 02:13:54.006 Control   879] NEW SERVER 939: Ready", Meaning::ServerReady(939)),
            (
                "[2026-11-21 07:29:56.814 Control  2384] Server 2415 exited with status 1",
                Meaning::ServerExited { server: 2415, status: 1 },
            ),
            (
                "[2026-11-21 02:18:31.017 Server   939] Active Threads Percentage set to 25.0",
                Meaning::ThreadPercentage { server, tenths: 250 },
            ),
            (
                "[2026-11-21 03:04:52.619 Server   939] Device pinned memory limit for device 0 set to 0x8c6600000 bytes",
                Meaning::MemoryLimit { server, ordinal: 0, bytes: 35942 << 20 },
            ),
            (
                "[2026-11-21 02:18:24.236 Server   939] Client {PID: 807, Context: 1} encountered a fatal GPU error.",
                Meaning::Fault { server, client: 807 },
            ),
            (
                "[2026-11-21 02:18:24.236 Server   939] Server is handling a fatal GPU error.",
                Meaning::FaultHandling { server },
            ),
            (
                "[2026-11-21 02:18:24.236 Server   939] Client {PID: 822, Context ID: 1} on device 0 to be torn down",
                Meaning::TornDown { server, client: 822, ordinal: 0 },
            ),
            (
                "[2026-11-21 02:13:53.859 Control   879] NEW CLIENT 937 from user 1000: Server is not ready, push client to pending list",
                Meaning::ClientPending { client: 937, uid: 1000 },
            ),
            (
                "[2026-11-21 03:04:08.511 Server   939] Failed to accept new client. Maximum number of clients (48) reached.",
                Meaning::ClientRefused { server, capacity: 48 },
            ),
            (
                "[2026-11-21 02:24:24.137 Server   939] Client process 611 disconnected",
                Meaning::ClientLeft(611),
            ),
            ("[2026-11-21 02:13:53.859 Control   879] User did not send valid credentials", Meaning::Noise),
            ("[2026-11-22 09:30:08.912 Control   496] Unable to accept connection", Meaning::Noise),
            (
                "[2026-11-22 09:30:56.266 Server   513] All clients belonging to error trigging process 797 will be torn down",
                Meaning::Noise,
            ),
            (
                "[2026-11-22 09:30:56.266 Server   513] Client {PID: 797, Context ID: 1} on the error-trigging process 797 to be torn down",
                Meaning::Noise,
            ),
            (
                "[2026-11-22 09:30:56.266 Server   513] The following client process have a sticky error set:",
                Meaning::Noise,
            ),
            (
                "[2026-11-21 02:24:21.335 Server   939] Server failed to recevie command with status 806, assuming client {PID: 592, Context ID: 0} exit",
                Meaning::Noise,
            ),
            (
                "[2026-11-21 02:13:54.019 Control   879] NEW CLIENT 937 from user 0: Server already exists",
                Meaning::ClientAdmitted(937),
            ),
            ("Device Ordinal  PCI IDs        UUID", Meaning::Ordinary),
            (
                "[2024-04-29 11:22:10.440 Legacy Server    95] Failed to start : invalid argument",
                Meaning::Trouble,
            ),
            (
                "[2024-04-29 11:22:10.441 Control    73] Server encountered a fatal exception. Shutting down",
                Meaning::Trouble,
            ),
            (
                "[2026-11-21 02:24:21.335 Server   939] Server was unable to shutdown due to 2 active clients",
                Meaning::Noise,
            ),
            // The name of a program and the command of a user are no failures.
            ("[2026-11-21 02:14:03.189 Control   879] Cmd:fail", Meaning::Ordinary),
            (
                "[2026-11-21 02:14:03.190 Control   879] 1153  33  939  GPU-168acfc9  4026531836  ./fatal",
                Meaning::Ordinary,
            ),
            (
                "nvidia-cuda-mps-server: error while loading shared libraries: libcuda.so.1: cannot open shared object file",
                Meaning::Trouble,
            ),
        ] {
            assert_eq!(meaning_of(line), expected, "{line}");
        }
    }

    #[test]
    fn a_writer_may_have_two_words() {
        let line =
            Line::parse("[2024-04-29 11:22:10.440 Legacy Server    95] Failed to start : invalid argument");
        assert_eq!((line.writer, line.level()), (Some(Writer::Server(95)), Level::WARN));
        assert_eq!(line.text, "Failed to start : invalid argument");
        assert_eq!(line.subjects().0, Some(95));
    }

    #[tokio::test]
    async fn follows_appends_cut_lines_and_truncation() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.log");
        std::fs::write(&path, "old\n[d t Control 7] first\n").unwrap();
        let mut follower = Follower::new(open(&path), &path, 4).unwrap();
        let mut writer = File::options().append(true).open(&path).unwrap();
        assert_eq!(follower.next().await.unwrap().text, "first");
        assert_eq!(follower.try_next().unwrap(), None);

        writer.write_all(b"[d t Server 8] half").unwrap();
        assert_eq!(follower.try_next().unwrap(), None);
        let (line, ()) = tokio::join!(follower.next(), async {
            tokio::task::yield_now().await;
            writer.write_all(b" and half\n").unwrap();
        });
        let line = line.unwrap();
        assert_eq!((line.writer, line.text.as_str()), (Some(Writer::Server(8)), "half and half"));

        writer.set_len(0).unwrap();
        let (line, ()) = tokio::join!(follower.next(), async {
            tokio::task::yield_now().await;
            writer.write_all(b"again\n").unwrap();
        });
        assert_eq!(line.unwrap().text, "again");
    }

    #[tokio::test]
    async fn rotation_keeps_one_old_file_and_loses_no_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.log");
        std::fs::write(&path, "").unwrap();
        let mut writer = File::options().append(true).open(&path).unwrap();
        let mut follower = Follower::new(open(&path), &path, 0).unwrap();
        for round in 0..3 {
            let line = format!("line of round {round}");
            writer.write_all(format!("{line}\n").as_bytes()).unwrap();
            follower.rotate(10);
            // The line is read before the file is truncated.
            assert_eq!(follower.next().await.unwrap().text, line);
            let kept = loop {
                assert_eq!(follower.next_there().await.unwrap(), None);
                follower.pause().await.unwrap();
                if let Some(kept) = follower.rotated() {
                    break kept;
                }
            };
            kept.unwrap();
            writer.write_all(b"after\n").unwrap();
            assert_eq!(follower.next().await.unwrap().text, "after");
            let old = std::fs::read_to_string(directory.path().join("control.log.1")).unwrap();
            assert!(old.ends_with(&format!("{line}\n")), "{old}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "after\n");
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
        assert!(follower.is_in_place());
        std::fs::remove_file(&path).unwrap();
        assert!(!follower.is_in_place());
        follower.rotate(0);
        assert!(follower.rotation.is_none());
    }

    /// While the file is copied, somebody replaces it with a link to another file. That other file must stay unharmed.
    #[tokio::test]
    async fn rotation_follows_no_link_that_takes_the_place_of_the_file() {
        for _ in 0..5 {
            let directory = tempfile::tempdir().unwrap();
            let [path, elsewhere] = ["control.log", "elsewhere"].map(|name| directory.path().join(name));
            let line = format!("{}\n", "x".repeat(1000));
            std::fs::write(&path, line.repeat(16 << 10)).unwrap();
            std::fs::write(&elsewhere, "not a log\n").unwrap();
            let length = path.metadata().unwrap().len();
            let mut follower = Follower::new(open(&path), &path, length).unwrap();
            follower.rotate(1);
            follower.pause().await.unwrap();
            assert!(follower.rotated().is_none(), "it is copied in steps");
            std::fs::remove_file(&path).unwrap();
            std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
            while follower.rotated().is_none() {
                follower.pause().await.unwrap();
            }
            assert_eq!(std::fs::read_to_string(&elsewhere).unwrap(), "not a log\n");
            assert_eq!(follower.length().unwrap(), 0);
            assert_eq!(directory.path().join("control.log.1").metadata().unwrap().len(), length);
        }
    }

    /// Other tasks have a turn while many lines are read and copied, and no line is lost.
    #[tokio::test]
    async fn a_burst_is_read_and_kept_in_steps() {
        const LINES: usize = 100_000;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.log");
        std::fs::write(&path, "[d t Server 8] some words of a line\n".repeat(LINES)).unwrap();
        let mut follower = Follower::new(open(&path), &path, 0).unwrap();
        let turns = std::rc::Rc::new(std::cell::Cell::new(0));
        let counting = std::rc::Rc::clone(&turns);
        let others = tokio::task::LocalSet::new();
        others.spawn_local(async move {
            loop {
                counting.set(counting.get() + 1);
                tokio::task::yield_now().await;
            }
        });
        others
            .run_until(async {
                follower.rotate(1);
                for _ in 0..LINES {
                    assert_eq!(follower.next().await.unwrap().text, "some words of a line");
                    assert!(follower.unread.capacity() <= 4 * CHUNK_BYTES, "{}", follower.unread.capacity());
                }
                while follower.rotated().is_none() {
                    follower.pause().await.unwrap();
                }
            })
            .await;
        assert!(turns.get() >= LINES / LINES_AT_A_TIME as usize, "{} turns", turns.get());
        assert_eq!((follower.offset(), follower.length().unwrap()), (0, 0));
    }

    #[tokio::test]
    async fn an_endless_line_is_cut() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control.log");
        std::fs::write(&path, vec![b'x'; 10 * LINE_MAX_BYTES]).unwrap();
        let mut follower = Follower::new(open(&path), &path, 0).unwrap();
        let mut lines = 0;
        while let Some(line) = follower.try_next().unwrap() {
            assert!(line.text.len() <= LINE_MAX_BYTES);
            lines += 1;
        }
        assert_eq!(lines, 10);
    }

    proptest! {
        #[test]
        fn no_line_makes_the_parser_panic(line in "\\PC{0,200}") {
            let _ = Line::parse(&line);
            let _ = Line::parse(&format!("[d t Server 1] {line}")).subjects();
        }

        #[test]
        fn no_percentage_makes_the_parser_panic(text in "[0-9.]{0,30}") {
            let _ = tenths(&text);
        }

        #[test]
        fn memory_limits_round_trip(ordinal in 0usize..64, mib in 0u64..(1 << 40)) {
            let line = format!(
                "[d t Server 5] Device pinned memory limit for device {ordinal} set to {:#x} bytes", mib << 20
            );
            prop_assert_eq!(meaning_of(&line), Meaning::MemoryLimit { server: 5, ordinal, bytes: mib << 20 });
        }
    }
}
