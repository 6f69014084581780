//! A simulated host with its own message bus, on which the real service runs.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::LazyLock;
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::bus::{AS_MEMBER, PrivateBus};
use super::processes::processes_with;
use super::wait::{DEADLINE, PAUSE, wait_for};

/// The variable with the directory of the programs for aarch64, which an emulator runs. [`crate::arm64`] sets it.
pub(crate) const EMULATED: &str = "MPS_TEST_EMULATED";

pub(crate) fn emulated() -> bool {
    std::env::var_os(EMULATED).is_some()
}

pub(crate) fn binaries() -> PathBuf {
    if let Some(directory) = std::env::var_os(EMULATED) {
        return directory.into();
    }
    let daemon = Path::new(env!("CARGO_BIN_EXE_yunion-mps-daemon"));
    let directory = daemon.parent().unwrap().to_owned();
    assert!(
        directory.join("yunion-mps-sim").exists(),
        "the other programs aren't built: cargo build --workspace"
    );
    directory
}

/// Makes a directory with the programs of the simulated host, in which a script replaces the program `name`.
pub(crate) fn programs_with(out: &Path, name: &str, script: &str) -> PathBuf {
    let programs = out.join("programs");
    fs::create_dir(&programs).unwrap();
    for entry in fs::read_dir(binaries()).unwrap().map(Result::unwrap) {
        let is_program = entry.file_type().unwrap().is_file();
        if is_program && entry.file_name() != name {
            fs::hard_link(entry.path(), programs.join(entry.file_name())).unwrap();
        }
    }
    fs::write(programs.join(name), script).unwrap();
    fs::set_permissions(programs.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    programs
}

pub(crate) fn nvidias(series: &str) -> PathBuf {
    let cache = if emulated() { ".cache/mps-arm64" } else { ".cache/mps" };
    let programs = Path::new(env!("CARGO_MANIFEST_DIR")).join(cache).join(series);
    for program in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"] {
        let file = programs.join(program);
        assert!(file.is_file(), "{} is missing; fetch it with scripts/fetch-mps-control.sh", file.display());
    }
    programs
}

pub(crate) fn daemon() -> PathBuf {
    binaries().join("yunion-mps-daemon")
}

pub(crate) fn mpsctl() -> &'static str {
    static PROGRAM: LazyLock<String> =
        LazyLock::new(|| binaries().join("yunion-mpsctl").into_os_string().into_string().unwrap());
    &PROGRAM
}

pub(crate) struct Host {
    directory: tempfile::TempDir,
    /// The name of the first slice if each slice has its own control daemon. None if one control daemon serves all slices.
    pub(super) first_slice: Option<String>,
    bus: PrivateBus,
    /// The dbus-daemon that [`Host::restart_bus`] has started.
    second_bus: Option<Child>,
    environment: Vec<(String, String)>,
    daemon: Option<Child>,
}

/// Options of setpriv that take away the capability to set the immutable flag.
const WITHOUT_THE_FLAG: [&str; 4] = ["--bounding-set", "-linux_immutable", "--inh-caps", "-linux_immutable"];

impl Host {
    /// Makes a host on which only the bus runs.
    pub(crate) fn new(board: &str) -> Self {
        // The path of a socket must fit into 107 bytes. So the path of this directory is short.
        let directory = tempfile::Builder::new().prefix("mps").tempdir_in("/tmp").unwrap();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let root = directory.path().join("h");
        let made = Command::new(binaries().join("yunion-mps-sim"))
            .arg("create")
            .arg(board)
            .arg(&root)
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        // yunion-mpsctl looks for the runtime directory at this path, so a link there leads to the host's runtime directory.
        fs::create_dir_all(root.join("sysroot/run")).unwrap();
        symlink(root.join("run"), root.join("sysroot/run/yunion-mps-daemon")).unwrap();
        let bus = PrivateBus::start();
        let path = std::env::var("PATH").unwrap_or_default();
        let environment = [
            ("YUNION_MPS_SIM", root.display().to_string()),
            ("PATH", format!("{}:{path}", root.join("bin").display())),
            ("LD_LIBRARY_PATH", root.join("lib").display().to_string()),
            ("DBUS_SYSTEM_BUS_ADDRESS", bus.address()),
            ("RUNTIME_DIRECTORY", root.join("run").display().to_string()),
        ];
        let environment = environment.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        Self { directory, first_slice: None, bus, second_bus: None, environment, daemon: None }
    }

    pub(crate) fn serving(board: &str) -> Self {
        let mut host = Self::new(board);
        host.start();
        host.wait_for_state("ready");
        host
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.directory.path().join("h").join(below)
    }

    /// The real path of the file that the service sees at the absolute path `path`.
    pub(crate) fn file(&self, path: &str) -> PathBuf {
        self.path("sysroot").join(path.trim_start_matches('/'))
    }

    pub(crate) fn bus_address(&self) -> String {
        self.bus.address()
    }

    pub(crate) fn stop_bus(&mut self) {
        self.bus.stop();
        if let Some(mut bus) = self.second_bus.take() {
            let _ = bus.kill();
            let _ = bus.wait();
        }
    }

    pub(crate) fn restart_bus(&mut self) {
        let address = self.bus.address();
        let socket = Path::new(address.strip_prefix("unix:path=").unwrap());
        let configuration = socket.with_file_name("bus.conf");
        let bus = Command::new("dbus-daemon")
            .args(["--nofork", "--nopidfile"])
            .arg(format!("--config-file={}", configuration.display()))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        self.second_bus = Some(bus);
    }

    /// Installs the files of the package that the programs under test read.
    pub(crate) fn install(&self) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR"));
        for (from, to) in [
            ("config/io.yunion.Mps1.conf", "/usr/share/dbus-1/system.d/io.yunion.Mps1.conf"),
            ("systemd/yunion-mps-daemon.service", "/usr/lib/systemd/system/yunion-mps-daemon.service"),
            ("systemd/yunion-mps-daemon.tmpfiles.conf", "/usr/lib/tmpfiles.d/yunion-mps-daemon.conf"),
        ] {
            let file = self.file(to);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::copy(source.join(from), file).unwrap();
        }
    }

    /// Adds lines to host.conf. A line replaces a line with the same key.
    pub(crate) fn configure(&self, lines: &str) {
        let file = self.file("/etc/yunion/host.conf");
        let keys: Vec<&str> = lines.lines().filter_map(|line| Some(line.split_once(':')?.0)).collect();
        let old = fs::read_to_string(&file).unwrap();
        let kept = old.lines().filter(|line| !keys.iter().any(|key| line.starts_with(&format!("{key}:"))));
        let new: Vec<&str> = kept.chain(lines.lines()).collect();
        replace(&file, &(new.join("\n") + "\n"));
    }

    /// Replaces the entries of the device file. Each entry is the text of a YAML flow mapping.
    pub(crate) fn devices(&self, entries: &[&str]) {
        let lines: Vec<String> = entries.iter().map(|entry| format!("- {{{entry}}}\n")).collect();
        let text = format!("devices:\n{}", lines.concat());
        replace(&self.file("/etc/yunion/host_container_device.yml"), &text);
    }

    /// Writes a file of the simulator's state, for example to cause a fault.
    pub(crate) fn plant(&self, file: &str, text: &str) {
        let path = self.path(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let new = path.with_extension("new");
        fs::write(&new, text).unwrap();
        fs::rename(&new, &path).unwrap();
    }

    /// Causes a critical error (Xid) on a GPU, after the service has begun to wait for NVML's events.
    pub(crate) fn meets_xid(&self, gpu: u32, number: u32) {
        let directory = self.path(&format!("gpus/{gpu}"));
        let inode = format!(" ino:{:x} ", fs::metadata(&directory).unwrap().ino());
        wait_for("the daemon waits for events", || {
            let files = fs::read_dir(format!("/proc/{}/fdinfo", self.pid())).unwrap().flatten();
            let mut files = files.map(|file| fs::read_to_string(file.path()).unwrap_or_default());
            files
                .any(|file| file.lines().any(|line| line.starts_with("inotify") && line.contains(&inode)))
                .then_some(())
        });
        let mut file = fs::File::options().create(true).append(true).open(directory.join("xids")).unwrap();
        writeln!(file, "{number}").unwrap();
    }

    pub(crate) fn clear(&self, file: &str) {
        fs::remove_file(self.path(file)).unwrap();
    }

    pub(crate) fn prefer(&mut self, directory: &Path) {
        self.change("PATH", |path| format!("{}:{path}", directory.display()));
    }

    pub(crate) fn change(&mut self, name: &str, change: impl FnOnce(&str) -> String) {
        let variable = self.environment.iter_mut().find(|(known, _)| known == name).unwrap();
        variable.1 = change(&variable.1);
    }

    pub(crate) fn set(&mut self, name: &str, value: &str) {
        self.environment.retain(|(known, _)| known != name);
        self.environment.push((name.to_owned(), value.to_owned()));
    }

    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        without_foreign_variables(&mut command);
        command.envs(self.environment.iter().map(|(name, value)| (name, value))).stdin(Stdio::null());
        command
    }

    pub(crate) fn command_as_member(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = self.command("setpriv");
        command.args(AS_MEMBER).arg(program);
        command
    }

    fn daemon_command(&self) -> Command {
        let mut command = self.command(daemon());
        command.arg("--sysroot").arg(self.path("sysroot"));
        command
    }

    pub(crate) fn check(&self) -> Output {
        self.daemon_command().arg("--check").output().unwrap()
    }

    /// Starts the service. Its messages go to the file daemon.log.
    pub(crate) fn start(&mut self) {
        let daemon = self.daemon_command();
        self.spawn(daemon);
    }

    /// Starts the service in a new mount namespace, as its unit does.
    pub(crate) fn start_in_its_own_namespace(&mut self) {
        let daemon = self.daemon_command();
        let mut command = self.command("unshare");
        command.args(["--mount", "--propagation", "slave", "sh", "-c"]);
        command.arg("mount --bind /tmp /tmp && exec \"$0\" \"$@\"");
        command.arg(daemon.get_program()).args(daemon.get_args());
        self.spawn(command);
    }

    /// Makes a command that runs a program in a user namespace in which the kernel allows no inotify instances. Programs
    /// outside of the namespace are not affected.
    pub(crate) fn without_inotify(&self, program: &Command) -> Command {
        let mut command = self.command("unshare");
        command.args(["--user", "--map-root-user", "sh", "-c"]);
        command.arg("echo 0 >/proc/sys/user/max_inotify_instances && exec \"$0\" \"$@\"");
        command.arg(program.get_program()).args(program.get_args());
        command
    }

    pub(crate) fn start_without_inotify(&mut self) {
        let daemon = self.without_inotify(&self.daemon_command());
        self.spawn(daemon);
    }

    /// Removes the immutable flag from a directory and all directories below it.
    pub(crate) fn let_change(&self, below: &str) {
        let mut chattr = Command::new("chattr");
        let _ = chattr.args(["-R", "-f", "-i"]).arg(self.path(below)).stderr(Stdio::null()).status();
    }

    pub(crate) fn start_without_the_flag(&mut self) {
        let daemon = self.daemon_command();
        let mut command = self.command("setpriv");
        command.args(WITHOUT_THE_FLAG).arg(daemon.get_program()).args(daemon.get_args());
        self.spawn(command);
    }

    /// Makes a command that runs without the capability to set the immutable flag, like root in a container.
    pub(crate) fn without_the_flag(&self, program: &str) -> Command {
        let mut command = self.command("setpriv");
        command.args(WITHOUT_THE_FLAG).arg(program);
        command
    }

    fn spawn(&mut self, mut daemon: Command) {
        let log = fs::File::options().append(true).create(true).open(self.path("daemon.log")).unwrap();
        let child = daemon.stdout(log.try_clone().unwrap()).stderr(log).process_group(0).spawn().unwrap();
        self.daemon = Some(child);
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.path("daemon.log")).unwrap_or_default()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.daemon.as_ref().unwrap().id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        signal_pid(self.pid(), signal);
    }

    pub(crate) fn ended(&mut self) -> ExitStatus {
        let mut daemon = self.daemon.take().unwrap();
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = daemon.try_wait().unwrap() {
                return status;
            }
            if Instant::now() >= deadline {
                let _ = daemon.kill();
                let _ = daemon.wait();
                panic!("the daemon did not end:\n{}", self.log());
            }
            std::thread::sleep(PAUSE);
        }
    }

    pub(crate) fn stop(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.ended()
    }

    pub(crate) fn mpsctl(&self, arguments: &[&str]) -> Output {
        self.command(binaries().join("yunion-mpsctl")).args(arguments).output().unwrap()
    }

    pub(crate) fn json(&self, arguments: &[&str]) -> Option<Value> {
        let output =
            self.command(binaries().join("yunion-mpsctl")).args(arguments).arg("--json").output().unwrap();
        output.status.success().then(|| serde_json::from_slice(&output.stdout).unwrap())
    }

    pub(crate) fn list(&self) -> Vec<Value> {
        let listed = self.json(&["list"]).unwrap_or_else(|| panic!("no list of devices\n{}", self.log()));
        listed.as_array().unwrap().clone()
    }

    pub(crate) fn wait_for_state(&self, state: &str) -> Value {
        self.wait_for_status(state, |status| status["service"]["state"] == state)
    }

    /// Waits until the status satisfies `check`, and returns the status. A failure names `what`.
    pub(crate) fn wait_for_status(&self, what: &str, check: impl Fn(&Value) -> bool) -> Value {
        let mut last = Value::Null;
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.json(&["status"]) {
                if check(&status) {
                    return status;
                }
                last = status;
            }
            assert!(Instant::now() < deadline, "never {what}, last {last:#}");
            std::thread::sleep(PAUSE);
        }
    }

    /// Waits until no GPU is served and the reason for the service's state contains this text, and returns the status. The
    /// state is then `failed`, or `degraded` during a planned wait for the clients of another control daemon.
    pub(crate) fn wait_for_failure(&self, reason: &str) -> Value {
        self.wait_for_status(reason, |status| {
            let service = &status["service"];
            let is_served = |gpus: &Vec<Value>| gpus.iter().any(|gpu| gpu["healthy"] == true);
            ["failed", "degraded"].iter().any(|state| service["state"] == *state)
                && service["state_reason"].as_str().unwrap().contains(reason)
                && !status["gpus"].as_array().is_some_and(is_served)
        })
    }

    /// Calls a method of the Manager with gdbus, which prints the name of a D-Bus error.
    pub(crate) fn call(&self, method: &str) -> Output {
        self.command("gdbus")
            .args(["call", "--system", "--dest", "io.yunion.Mps1", "--object-path"])
            .args(["/io/yunion/Mps1/Manager", "--method", &format!("io.yunion.Mps1.{method}")])
            .output()
            .unwrap()
    }

    /// Reloads the service. A reload also makes a health check at once.
    #[track_caller]
    pub(crate) fn reload(&self) {
        succeeded(&self.call("Control.Reload"));
    }

    pub(crate) fn events(&self) -> Vec<String> {
        let status = self.json(&["status"]).unwrap();
        let events = status["events"].as_array().unwrap().iter();
        events.map(|event| event["text"].as_str().unwrap().to_owned()).collect()
    }

    /// Returns the answer of a method of the Manager, without its D-Bus types.
    pub(crate) fn busctl(&self, method: &str) -> Value {
        let output = self
            .command("busctl")
            .args(["--system", "--json=short", "call", "io.yunion.Mps1", "/io/yunion/Mps1/Manager"])
            .args(["io.yunion.Mps1.Manager", method])
            .output()
            .unwrap();
        assert!(output.status.success(), "{method}: {}", text(&output));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        untyped(&answer["data"][0])
    }

    /// Waits until NVML lists the memory of the only client, a moment after the control daemon has admitted it. On GPUs from
    /// before Volta, NVML lists no memory, so the client alone is enough.
    pub(crate) fn wait_for_only_client(&self) -> Value {
        let unknown = self.list().iter().all(|slice| slice["limits_enforced"] == false);
        wait_for("one client, with its memory", || {
            match self.busctl("ListClients").as_array().unwrap().as_slice() {
                [client] if unknown || client["memory_mib"].is_u64() => Some(client.clone()),
                _ => None,
            }
        })
    }

    pub(crate) fn compute_mode(&self, gpu: usize) -> String {
        let output = self
            .command(self.path("bin/nvidia-smi"))
            .args(["-i", &gpu.to_string(), "--query-gpu=compute_mode", "--format=csv,noheader"])
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    pub(crate) fn front_end(&self, pipe_directory: &Path, command: &str) -> String {
        let mut front_end = self
            .command("nvidia-cuda-mps-control")
            .env("CUDA_MPS_PIPE_DIRECTORY", pipe_directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // A front end that finds no control daemon ends before it reads. The write then fails, which does not matter.
        let _ = writeln!(front_end.stdin.take().unwrap(), "{command}");
        let output = front_end.wait_with_output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    }

    /// Waits until no process of the host runs. A front end that the service has interrupted may end a moment after the
    /// service.
    pub(crate) fn nothing_runs(&self) {
        wait_for("no process", || self.processes().is_empty().then_some(()));
    }

    /// Returns the PIDs of all processes of this host, the service included. All of them have inherited the variable
    /// `YUNION_MPS_SIM`.
    pub(crate) fn processes(&self) -> Vec<u32> {
        let mark = format!("YUNION_MPS_SIM={}", self.path("").display().to_string().trim_end_matches('/'));
        processes_with(&mark)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = writeln!(std::io::stderr(), "--- the daemon's log\n{}", self.log());
        }
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
        self.stop_bus();
        for pid in self.processes() {
            signal_pid(pid, Signal::KILL);
        }
        // A killed service leaves the immutable flag on directories, which then could not be removed.
        self.let_change("");
    }
}

/// True if this process can set the immutable flag in /tmp. Then the service can set it too.
pub(crate) fn flag_can_be_set() -> bool {
    static CAN: LazyLock<bool> = LazyLock::new(|| {
        let directory = tempfile::tempdir_in("/tmp").unwrap();
        let chattr =
            |how| Command::new("chattr").arg(how).arg(directory.path()).stderr(Stdio::null()).status();
        chattr("+i").unwrap().success() && chattr("-i").unwrap().success()
    });
    *CAN
}

/// Removes variables that the test process may have inherited from a CUDA container or a systemd service. They could change
/// what the command does.
pub(crate) fn without_foreign_variables(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["CUDA_", "NVIDIA_", "YUNION_", "NOTIFY_", "WATCHDOG_"]
            .iter()
            .any(|prefix| text.starts_with(prefix))
        {
            command.env_remove(&name);
        }
    }
}

/// Replaces a file in one step, as an editor does. A reader finds the old text or the new text, and nothing between.
fn replace(file: &Path, text: &str) {
    let new = file.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(&new, file).unwrap();
}

/// Sends a signal to a process. A process that has ended is no error.
pub(crate) fn signal_pid(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    let _ = kill_process(pid, signal);
}

pub(crate) fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[track_caller]
pub(crate) fn succeeded(output: &Output) -> String {
    assert!(output.status.success(), "{}", text(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Removes the types from busctl's JSON: `{"type": "s", "data": "x"}` becomes `"x"`.
fn untyped(value: &Value) -> Value {
    match value {
        Value::Object(fields) if fields.len() == 2 && fields.contains_key("type") => untyped(&fields["data"]),
        Value::Object(fields) => fields.iter().map(|(key, value)| (key.clone(), untyped(value))).collect(),
        Value::Array(items) => items.iter().map(untyped).collect(),
        other => other.clone(),
    }
}

/// Fails unless `found` has all values of `golden`. `found` may have more.
pub(crate) fn assert_has(found: &Value, golden: &Value) {
    for (key, value) in golden.as_object().unwrap() {
        assert_eq!(&found[key], value, "{key} of {found:#}");
    }
}

/// Returns the only control daemon in a status, or that of the first slice. Null without a control daemon.
pub(crate) fn control_daemon(status: &Value) -> &Value {
    let control_daemons = status["control_daemons"].as_array().unwrap();
    let is_slice = |daemon: &Value| daemon["id"].as_str().unwrap().ends_with("-0");
    assert!(control_daemons.len() < 2 || is_slice(&control_daemons[0]), "{status:#}");
    control_daemons.first().unwrap_or(&Value::Null)
}

pub(crate) fn control_pid(status: &Value) -> u32 {
    let pid = &control_daemon(status)["pid"];
    u32::try_from(pid.as_u64().unwrap_or_else(|| panic!("no PID in {status:#}"))).unwrap()
}

/// Returns the fields of /proc/PID/stat after the process's name, which may be no valid UTF-8. The first field is the state,
/// the second the parent. None without a process with this PID.
pub(crate) fn stat_fields(pid: u32) -> Option<Vec<String>> {
    let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
    let name_ends = stat.iter().rposition(|byte| *byte == b')')?;
    let fields = std::str::from_utf8(&stat[name_ends + 1..]).unwrap();
    Some(fields.split_whitespace().map(str::to_owned).collect())
}

pub(crate) fn process_state(pid: u32) -> Option<char> {
    stat_fields(pid)?[0].chars().next()
}

/// Returns the start time of a process in clock ticks since boot, as in the files of the simulated GPUs.
pub(crate) fn start_time(pid: u32) -> String {
    stat_fields(pid).unwrap()[19].clone()
}

pub(crate) fn alive(pid: u32) -> bool {
    process_state(pid).is_some_and(|state| !matches!(state, 'Z' | 'X'))
}
