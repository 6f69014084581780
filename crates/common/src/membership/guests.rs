//! Reads the records of Cloudpods's host agent about its guests (virtual machines and groups of containers): the containers of
//! each guest, and the devices of each container. The host agent writes the files in place, so a reader may get half of a file.
//! The records contain credentials. So the service stores, logs and publishes only the names that this module returns.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::sleep;
use std::time::Duration;

use mps_core::register::GuestContainer;
use mps_core::terms::DeviceName;
use rustix::fs::{CWD, Dir, Mode, OFlags, Stat, fstat, openat};
use rustix::process::geteuid;
use serde_json::{Map, Value};

use super::CLAIMS;

const CONTAINERS: &str = "containers";

const DESCRIPTION: &str = "desc";

const OUR_TYPE: &str = "NVIDIA_MPS";

/// The largest record that the service reads, in bytes. A guest's description has some ten thousand bytes.
const LARGEST: u64 = 1024 * 1024;

/// The most bytes of all records that the service reads in one pass over the processes. In memory, container ids need about
/// five times as much as in the records, and several passes may run at once. The container ids of 4,096 guests, or the
/// descriptions of a thousand guests, stay below this limit.
const ALL: u64 = 16 * 1024 * 1024;

const GUESTS: usize = 4096;

const NAME: usize = 128;

const WRITTEN_BY_OTHERS: u32 = 0o022;

/// The attempts to read a file of which the host agent may have written only half. All attempts together take longer than the
/// agent needs to write a file.
const ATTEMPTS: usize = 5;
const PAUSE: Duration = Duration::from_millis(25);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GuestRecord {
    pub(super) names: GuestContainer,
    /// The container's devices of the type `NVIDIA_MPS`. The name of a GPU stands for one slice of the GPU.
    pub(super) devices: Vec<DeviceName>,
}

/// The host agent's records of all guests, for one pass over the processes. No record is read before the first call of
/// `record_of`, so a pass over processes without containers reads no record.
#[derive(Debug)]
pub(super) struct GuestRecords {
    directory: PathBuf,
    /// The number of bytes of records that may still be read in this pass.
    room: AtomicU64,
    /// The containers by id: the directory of the guest, and the container's key in the guest's record. None if two guests have
    /// a container with the same id.
    containers: OnceLock<BTreeMap<String, Option<(OsString, String)>>>,
    /// The record of each container, by the directory of its guest and the key of the container. A guest without a readable
    /// description has no records.
    guests: Mutex<BTreeMap<OsString, BTreeMap<String, GuestRecord>>>,
}

impl GuestRecords {
    pub(super) fn in_directory(directory: PathBuf) -> Self {
        let room = AtomicU64::new(ALL);
        Self { directory, room, containers: OnceLock::new(), guests: Mutex::default() }
    }

    /// The record of the container with this id of 64 hexadecimal digits. None if no guest, or more than one guest, has a
    /// container with this id.
    pub(super) fn record_of(&self, id: &str) -> Option<GuestRecord> {
        let containers = self.containers.get_or_init(|| read_containers(&self.directory, &self.room));
        let (guest, key) = containers.get(id)?.as_ref()?;
        let mut guests = self.guests.lock().unwrap_or_else(PoisonError::into_inner);
        let read = || {
            let description = believed_file(&self.directory, guest, DESCRIPTION, &self.room);
            description.map(|description| records_in(&description)).unwrap_or_default()
        };
        guests.entry(guest.clone()).or_insert_with(read).get(key).cloned()
    }
}

fn records_in(description: &Map<String, Value>) -> BTreeMap<String, GuestRecord> {
    let containers = description.get("containers").and_then(Value::as_array);
    let record = |container: &Value| {
        let names = GuestContainer {
            guest: shortened(description.get("name")),
            container: shortened(container.get("name")),
            project: shortened(description.get("tenant")),
        };
        let key = container.get("id")?.as_str()?.to_owned();
        Some((key, GuestRecord { names, devices: devices_of(container) }))
    };
    // If two containers have the same key, the first container counts.
    containers.into_iter().flatten().rev().filter_map(record).collect()
}

fn devices_of(container: &Value) -> Vec<DeviceName> {
    let listed = container.pointer("/spec/devices").and_then(Value::as_array);
    let isolated = listed.into_iter().flatten().filter_map(|device| device.get("isolated_device"));
    let mut devices = Vec::new();
    for device in isolated.filter(|device| device.is_object()).take(CLAIMS) {
        let text = |key: &str| device.get(key).and_then(Value::as_str);
        let is_ours = text("device_type").is_none_or(|word| word == OUR_TYPE);
        let name = text("addr").filter(|_| is_ours).and_then(|addr| addr.parse().ok());
        devices.extend(name.filter(|name| !devices.contains(name)));
    }
    devices
}

/// The first characters of a name, without control characters: the name stands in labels of bindings and in events, which are
/// single lines.
fn shortened(name: Option<&Value>) -> String {
    let plain = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    name.and_then(Value::as_str).unwrap_or_default().chars().take(NAME).map(plain).collect()
}

/// The reason why a record is not used. The reason quotes nothing from the record, which may contain credentials.
#[derive(Debug)]
enum BadRecord {
    Failed(io::Error),
    /// Users other than root can write the record, or the record is no regular file or directory.
    NotTheAgents,
    TooLarge,
    /// The records that were read before have used up the allowed bytes.
    NoRoom,
    /// The text is no valid record. The host agent may have written only half of the record yet.
    NotUnderstood {
        line: usize,
        column: usize,
    },
}

impl BadRecord {
    fn is_missing(&self) -> bool {
        matches!(self, Self::Failed(error) if error.kind() == io::ErrorKind::NotFound)
    }
}

impl fmt::Display for BadRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(error) => write!(f, "{error}"),
            Self::NotTheAgents => {
                write!(
                    f,
                    "users other than root can write to this path, or the path is neither a file nor a \
                     directory, so the service ignores the path"
                )
            }
            Self::TooLarge => {
                write!(f, "the file is larger than {LARGEST} bytes, so the service does not read the file")
            }
            Self::NoRoom => write!(
                f,
                "all records of the host agent together are larger than {ALL} bytes, so the service does \
                 not read this file"
            ),
            Self::NotUnderstood { line, column } => {
                write!(f, "the service can't parse the file at line {line}, column {column}")
            }
        }
    }
}

impl From<rustix::io::Errno> for BadRecord {
    fn from(error: rustix::io::Errno) -> Self {
        Self::Failed(error.into())
    }
}

fn read_containers(directory: &Path, room: &AtomicU64) -> BTreeMap<String, Option<(OsString, String)>> {
    let mut containers = BTreeMap::new();
    let mut left = guests_in(directory).unwrap_or_else(|error| {
        tracing::debug!("{}: {error}", directory.display());
        Vec::new()
    });
    for attempt in 1..=ATTEMPTS {
        let mut half_written = Vec::new();
        for guest in left {
            match read_file(directory, &guest, CONTAINERS, room) {
                Ok(found) => keep(&mut containers, &guest, found),
                Err(BadRecord::NotUnderstood { .. }) if attempt < ATTEMPTS => half_written.push(guest),
                Err(error) => not_read(&directory.join(&guest).join(CONTAINERS), &error),
            }
        }
        left = half_written;
        if left.is_empty() {
            break;
        }
        sleep(PAUSE);
    }
    containers
}

fn keep(
    containers: &mut BTreeMap<String, Option<(OsString, String)>>,
    guest: &OsString,
    found: Map<String, Value>,
) {
    for (key, container) in found {
        let Some(id) = container.get("cri_id").and_then(Value::as_str) else { continue };
        // A container's id is unique. If two records have the same id, at least one of them is wrong.
        let owner = if containers.contains_key(id) { None } else { Some((guest.clone(), key)) };
        containers.insert(id.to_owned(), owner);
    }
}

fn guests_in(directory: &Path) -> Result<Vec<OsString>, BadRecord> {
    let opened = File::from(openat(CWD, directory, directory_flags(), Mode::empty())?);
    believed(&fstat(&opened)?)?;
    let names =
        Dir::read_from(&opened)?.filter_map(Result::ok).map(|entry| entry.file_name().to_bytes().to_vec());
    Ok(names.filter(|name| !name.starts_with(b".")).take(GUESTS).map(OsString::from_vec).collect())
}

fn read_file(
    directory: &Path,
    guest: &OsString,
    file: &str,
    room: &AtomicU64,
) -> Result<Map<String, Value>, BadRecord> {
    let flags = directory_flags() | OFlags::NOFOLLOW;
    let guest = openat(CWD, directory.join(guest), flags, Mode::empty())?;
    believed(&fstat(&guest)?)?;
    // With NONBLOCK, opening a FIFO does not block.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = File::from(openat(&guest, file, flags, Mode::empty())?);
    believed(&fstat(&file)?)?;
    let found = file.metadata().map_err(BadRecord::Failed)?;
    if !found.is_file() {
        return Err(BadRecord::NotTheAgents);
    }
    if found.len() > LARGEST {
        return Err(BadRecord::TooLarge);
    }
    let left = room.load(Ordering::Relaxed);
    if found.len() > left {
        return Err(BadRecord::NoRoom);
    }
    let mut bytes = Vec::new();
    // The agent may be writing the file now, so the read stops at the size that was checked.
    file.take(found.len()).read_to_end(&mut bytes).map_err(BadRecord::Failed)?;
    room.store(left.saturating_sub(bytes.len() as u64), Ordering::Relaxed);
    // The parser's error text could quote the file, so only the place of the error is used.
    let place =
        |error: serde_json::Error| BadRecord::NotUnderstood { line: error.line(), column: error.column() };
    serde_json::from_slice(&bytes).map_err(place)
}

fn directory_flags() -> OFlags {
    OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECTORY
}

/// Refuses a file that another user can write, since that user may have written it. The host agent runs as root.
fn believed(stat: &Stat) -> Result<(), BadRecord> {
    let is_the_agents = stat.st_uid == geteuid().as_raw() && stat.st_mode & WRITTEN_BY_OTHERS == 0;
    if is_the_agents { Ok(()) } else { Err(BadRecord::NotTheAgents) }
}

/// Reads a record of the host agent. If the agent may have written only half of the record, tries again. If the record can't be
/// read, logs the reason.
fn believed_file(
    directory: &Path,
    guest: &OsString,
    file: &str,
    room: &AtomicU64,
) -> Result<Map<String, Value>, BadRecord> {
    let mut read = read_file(directory, guest, file, room);
    for _ in 1..ATTEMPTS {
        if !matches!(read, Err(BadRecord::NotUnderstood { .. })) {
            break;
        }
        sleep(PAUSE);
        read = read_file(directory, guest, file, room);
    }
    read.inspect_err(|error| not_read(&directory.join(guest).join(file), error))
}

pub fn records_without_effect(directory: &Path) -> Vec<(PathBuf, String)> {
    let guests = match guests_in(directory) {
        Ok(guests) => guests,
        Err(error) if error.is_missing() => return Vec::new(),
        Err(error) => return vec![(directory.to_owned(), error.to_string())],
    };
    let (mut found, room) = (Vec::new(), AtomicU64::new(ALL));
    for guest in guests {
        let mut look = |file: &str, error: BadRecord| {
            if !error.is_missing() {
                found.push((directory.join(&guest).join(file), error.to_string()));
            }
        };
        match believed_file(directory, &guest, CONTAINERS, &room) {
            // A virtual machine has no containers, so the service does not need its description.
            Ok(containers) if containers.is_empty() => {}
            Ok(_) => {
                let room = AtomicU64::new(ALL);
                if let Err(error) = believed_file(directory, &guest, DESCRIPTION, &room) {
                    look(DESCRIPTION, error);
                }
            }
            Err(error) => look(CONTAINERS, error),
        }
    }
    found
}

fn not_read(file: &Path, error: &BadRecord) {
    // Most guests are virtual machines, which have no file of containers. So a missing file is not logged.
    if !error.is_missing() {
        tracing::debug!("{}: {error}", file.display());
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use serde_json::{Value, json};

    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn id(digit: char) -> String {
        digit.to_string().repeat(64)
    }

    struct Servers(tempfile::TempDir);

    impl Servers {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn file(&self, guest: &str, file: &str) -> PathBuf {
            self.0.path().join(guest).join(file)
        }

        fn write(&self, guest: &str, containers: &Value, description: &Value) {
            let directory = self.0.path().join(guest);
            if !directory.exists() {
                fs::create_dir(&directory).unwrap();
            }
            fs::set_permissions(&directory, Permissions::from_mode(0o755)).unwrap();
            for (file, value) in [(CONTAINERS, containers), (DESCRIPTION, description)] {
                fs::write(self.file(guest, file), value.to_string()).unwrap();
                fs::set_permissions(self.file(guest, file), Permissions::from_mode(0o644)).unwrap();
            }
        }

        fn one(&self, guest: &str, id: &str, devices: &[(&str, Option<&str>)]) {
            self.write(guest, &containers(id), &description(devices));
        }

        fn record_of(&self, id: &str) -> Option<GuestRecord> {
            GuestRecords::in_directory(self.0.path().to_owned()).record_of(id)
        }
    }

    fn containers(id: &str) -> Value {
        json!({"c-1": {"id": "c-1", "index": 0, "cri_id": id}, "c-2": {"id": "c-2", "index": 1}})
    }

    fn description(devices: &[(&str, Option<&str>)]) -> Value {
        let device = |(addr, device_type): &(&str, Option<&str>)| {
            let device = json!({"id": "d", "addr": addr, "path": "GPU-1", "device_type": device_type});
            json!({"isolated_device": device})
        };
        let devices: Vec<Value> = devices.iter().map(device).collect();
        json!({
            "name": "train-1", "uuid": "u", "tenant": "vision", "cpu": 4,
            "isolated_devices": [{"addr": "00:06.0-7"}],
            "containers": [
                {"id": "c-0", "name": "sidecar", "spec": null},
                {"id": "c-1", "name": "main", "spec": {"image_credential_token": "secret", "devices": devices}},
            ],
        })
    }

    fn names(devices: &[DeviceName]) -> Vec<String> {
        devices.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_container_has_the_devices_that_its_guest_is_described_with() {
        let servers = Servers::new();
        fs::create_dir(servers.0.path().join("virtual-machine")).unwrap();
        let ours = Some(OUR_TYPE);
        for (devices, expected) in [
            (&[("00:06.0-1", ours)][..], &["00:06.0-1"][..]),
            (&[("00:06.0", ours)], &["00:06.0"]),
            (&[("00:06.0-1", ours), ("00:07.0-3", None), ("00:06.0-1", ours)], &["00:06.0-1", "00:07.0-3"]),
            (&[("00:08.0", Some("NVIDIA_GPU")), ("/dev/x", ours), ("", ours)], &[]),
            (&[], &[]),
        ] {
            servers.one("guest", ID, devices);
            let record = servers.record_of(ID).unwrap();
            assert_eq!(names(&record.devices), expected);
            let GuestContainer { guest, container, project } = record.names;
            assert_eq!([guest, container, project], ["train-1", "main", "vision"]);
        }
        assert_eq!(servers.record_of(&id('a')), None);
        // The host agent writes the record before the container runtime makes the container. Until then the record has no
        // container id.
        servers.write("guest", &json!({"c-1": {"id": "c-1", "cri_id": null}}), &description(&[]));
        assert_eq!(servers.record_of(ID), None);
        servers.write(
            "guest",
            &containers(ID),
            &json!({"name": "n".repeat(9999), "containers": [{"id": "c-1"}]}),
        );
        let names = servers.record_of(ID).unwrap().names;
        assert_eq!((names.guest.len(), names.container, names.project), (NAME, String::new(), String::new()));
    }

    #[test]
    fn a_container_of_two_guests_is_nobodys() {
        let servers = Servers::new();
        servers.one("one", ID, &[("00:06.0-1", None)]);
        servers.one("other", &id('b'), &[("00:06.0-2", None)]);
        assert_eq!(names(&servers.record_of(&id('b')).unwrap().devices), ["00:06.0-2"]);
        for guest in ["other", "third"] {
            servers.one(guest, ID, &[("00:06.0-2", None)]);
            assert_eq!(servers.record_of(ID), None);
        }
    }

    #[test]
    fn only_what_root_alone_can_write_is_believed() {
        let servers = Servers::new();
        let one = |servers: &Servers| servers.one("guest", ID, &[("00:06.0-1", None)]);
        let path = |file: &str| servers.file("guest", file);
        for (file, mode) in [(CONTAINERS, 0o664), (DESCRIPTION, 0o646), ("", 0o775), ("", 0o757)] {
            one(&servers);
            assert!(servers.record_of(ID).is_some());
            fs::set_permissions(path(file), Permissions::from_mode(mode)).unwrap();
            assert_eq!(servers.record_of(ID), None, "{file} {mode:o}");
        }
        for file in [CONTAINERS, DESCRIPTION] {
            one(&servers);
            fs::rename(path(file), path("elsewhere")).unwrap();
            symlink("elsewhere", path(file)).unwrap();
            assert_eq!(servers.record_of(ID), None, "a link as {file}");
            fs::remove_file(path(file)).unwrap();
            rustix::fs::mknodat(CWD, path(file), rustix::fs::FileType::Fifo, 0o644.into(), 0).unwrap();
            assert_eq!(servers.record_of(ID), None, "a FIFO as {file}");
            fs::remove_file(path(file)).unwrap();
        }
        one(&servers);
        fs::rename(path(""), servers.0.path().join(".hidden")).unwrap();
        symlink(".hidden", servers.0.path().join("guest")).unwrap();
        assert_eq!(servers.record_of(ID), None, "a link as the guest's directory");
        fs::set_permissions(servers.0.path(), Permissions::from_mode(0o777)).unwrap();
        assert!(guests_in(servers.0.path()).is_err());
        assert!(GuestRecords::in_directory("/no such directory".into()).record_of(ID).is_none());
    }

    #[test]
    fn bad_records_cost_their_own_guest_alone() {
        let servers = Servers::new();
        servers.one("good", ID, &[("00:06.0-1", None)]);
        let bad: [&[u8]; 7] =
            [b"", b"{", b"[]", b"\xff\xfe", b"{\"c\": 7}", b"{\"c\": {\"cri_id\": 7}}", b"null"];
        for bytes in bad {
            servers.one("bad", &id('b'), &[]);
            fs::write(servers.file("bad", CONTAINERS), bytes).unwrap();
            assert_eq!((servers.record_of(&id('b')), servers.record_of(ID).is_some()), (None, true));
            servers.one("bad", &id('b'), &[]);
            fs::write(servers.file("bad", DESCRIPTION), bytes).unwrap();
            assert_eq!((servers.record_of(&id('b')), servers.record_of(ID).is_some()), (None, true));
        }
        servers.one("bad", &id('b'), &[]);
        let huge = File::options().write(true).open(servers.file("bad", DESCRIPTION)).unwrap();
        huge.set_len(LARGEST + 1).unwrap();
        assert!(matches!(
            read_file(servers.0.path(), &"bad".into(), DESCRIPTION, &AtomicU64::new(ALL)),
            Err(BadRecord::TooLarge)
        ));
    }

    #[test]
    fn all_files_together_are_bounded() {
        let servers = Servers::new();
        let large = format!("{{{}}}", " ".repeat(usize::try_from(LARGEST).unwrap() - 2));
        for number in 0..ALL / LARGEST + 2 {
            servers.one(&format!("g{number}"), ID, &[]);
            fs::write(servers.file(&format!("g{number}"), CONTAINERS), &large).unwrap();
        }
        let records = GuestRecords::in_directory(servers.0.path().to_owned());
        assert_eq!(records.record_of(ID), None);
        assert_eq!(records.room.load(Ordering::Relaxed), 0);
        let told = records_without_effect(servers.0.path());
        let words = "all records of the host agent together are larger than 16777216 bytes, so the service \
                     does not read this file";
        assert!(told.len() == 2 && told.iter().all(|(_, why)| why == words), "{told:?}");
        // A file that is too large does not count towards the limit for all files together, so the good file is still read.
        servers.one("good", &id('b'), &[("00:06.0-1", None)]);
        for number in 0..ALL / LARGEST + 2 {
            fs::write(servers.file(&format!("g{number}"), CONTAINERS), large.clone() + " ").unwrap();
        }
        assert_eq!(names(&servers.record_of(&id('b')).unwrap().devices), ["00:06.0-1"]);
    }

    #[test]
    fn a_half_written_record_is_read_again() {
        let servers = Servers::new();
        for file in [CONTAINERS, DESCRIPTION] {
            servers.one("guest", ID, &[("00:06.0-1", None)]);
            let path = servers.file("guest", file);
            let whole = fs::read(&path).unwrap();
            fs::write(&path, whole.split_at(whole.len() / 2).0).unwrap();
            let found = std::thread::scope(|scope| {
                let reader = scope.spawn(|| servers.record_of(ID));
                sleep(PAUSE);
                fs::write(&path, &whole).unwrap();
                reader.join().unwrap()
            });
            assert_eq!(names(&found.unwrap().devices), ["00:06.0-1"], "{file}");
        }
    }

    /// The records contain credentials, and the text of an error may be logged.
    #[test]
    fn an_error_quotes_nothing_of_a_record() {
        let servers = Servers::new();
        servers.one("guest", ID, &[]);
        for text in
            [r#"["secret"]"#, r#"{"name": "secret"#, r#"{"name": secret}"#, r#"{"secret": 1, secret}"#]
        {
            fs::write(servers.file("guest", DESCRIPTION), text).unwrap();
            let read = read_file(servers.0.path(), &"guest".into(), DESCRIPTION, &AtomicU64::new(ALL));
            let error = read.unwrap_err();
            let words = format!("{error} {error:?}");
            assert!(
                words.contains("can't parse the file at line 1, column") && !words.contains("secret"),
                "{words}"
            );
        }
    }
}
