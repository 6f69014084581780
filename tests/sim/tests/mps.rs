//! Compares the simulated MPS control daemon, servers and clients with recordings of the real programs: of driver 580 on an
//! H200, and of drivers 535, 550 and 555 without a GPU.

// clippy.toml allows `unwrap` and the like only in functions marked as tests. Other functions of this file call `unwrap`, too.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../support/skip.rs"]
mod skip;
#[path = "../../support/wait.rs"]
mod wait;

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::thread;

use tempfile::TempDir;

use wait::wait_for;

const PROGRAMS: [&str; 5] = [
    env!("CARGO_BIN_EXE_yunion-mps-sim"),
    env!("CARGO_BIN_EXE_nvidia-cuda-mps-control"),
    env!("CARGO_BIN_EXE_nvidia-cuda-mps-server"),
    env!("CARGO_BIN_EXE_nvidia-smi"),
    env!("CARGO_BIN_EXE_cuda-client"),
];

/// A simulated host, with the directories of one control daemon.
struct Host {
    directory: Arc<TempDir>,
    place: &'static str,
}

impl Host {
    fn new(board: &str) -> Self {
        Self::made_by(PROGRAMS[0].as_ref(), board)
    }

    fn made_by(sim: &Path, board: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        // Programs of other users read files in the directory of the simulated host, too.
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
        let made = Command::new(sim).args(["create", board]).arg(directory.path()).output().unwrap();
        assert!(made.status.success(), "{made:?}");
        Self { directory: Arc::new(directory), place: "mps" }
    }

    /// Returns the same simulated host, with the directories of another control daemon.
    fn beside(&self, place: &'static str) -> Self {
        let host = Self { directory: Arc::clone(&self.directory), place };
        for name in ["pipe", "log"] {
            fs::create_dir_all(host.path(place).join(name)).unwrap();
        }
        host
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    fn fault(&self, name: &str, text: &str) {
        self.write(&format!("mps/fault/{name}"), text);
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.path("bin").join(program));
        command
            .env("YUNION_MPS_SIM", self.directory.path())
            .env("CUDA_MPS_PIPE_DIRECTORY", self.path(self.place).join("pipe"))
            .env("CUDA_MPS_LOG_DIRECTORY", self.path(self.place).join("log"))
            .env_remove("CUDA_VISIBLE_DEVICES")
            .stdin(Stdio::null());
        command
    }

    fn control(&self, options: &[&str], visible: Option<&str>) -> Control<'_> {
        let mut command = self.command("nvidia-cuda-mps-control");
        command
            .arg("-f")
            .args(options)
            .stdout(File::create(self.path(self.place).join("control.out")).unwrap());
        if let Some(visible) = visible {
            command.env("CUDA_VISIBLE_DEVICES", visible);
        }
        let control = Control { host: self, child: command.spawn().unwrap() };
        wait_for("a control daemon", || self.front_end("get_server_list").status.success().then_some(()));
        control
    }

    fn front_end(&self, commands: &str) -> Output {
        let mut command = self.command("nvidia-cuda-mps-control");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut front_end = command.spawn().unwrap();
        // Writing fails if the front end has found no control daemon and has ended without reading.
        _ = writeln!(front_end.stdin.take().unwrap(), "{commands}");
        front_end.wait_with_output().unwrap()
    }

    fn cuda(&self, arguments: &[&str], environment: &[(&str, &str)]) -> (String, i32) {
        let mut command = self.command("cuda-client");
        finished(&command.args(arguments).envs(environment.iter().copied()).output().unwrap())
    }

    fn spawn_cuda(&self, arguments: &[&str]) -> Client {
        let mut command = self.command("cuda-client");
        Client(Some(command.args(arguments).stdout(Stdio::piped()).spawn().unwrap()))
    }

    fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.path(self.place).join("control.out")).unwrap()).into_owned()
    }

    /// Returns the lines of the control daemon's log without times and PIDs.
    fn texts(&self) -> Vec<String> {
        self.log().lines().filter_map(|line| Some(line.split_once("] ")?.1.to_owned())).collect()
    }

    fn wait_for_log(&self, text: &str) {
        wait_for(text, || self.log().contains(text).then_some(()));
    }
}

fn finished(output: &Output) -> (String, i32) {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (text, output.status.code().unwrap_or(-1))
}

/// A CUDA program that is ended when the test ends.
struct Client(Option<Child>);

impl Client {
    fn pid(&self) -> u32 {
        self.0.as_ref().unwrap().id()
    }

    fn kill(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(self.0.as_ref().unwrap());
        rustix::process::kill_process(pid, signal).unwrap();
    }

    fn end(mut self) -> (String, i32) {
        finished(&self.0.take().unwrap().wait_with_output().unwrap())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            _ = child.kill();
            _ = child.wait();
        }
    }
}

struct Control<'a> {
    host: &'a Host,
    child: Child,
}

impl Control<'_> {
    /// Runs a front end with these commands, and returns its output. The exit status of the front end must be 0.
    fn ask(&self, commands: &str) -> String {
        let output = self.host.front_end(commands);
        assert_eq!(output.status.code(), Some(0), "{commands}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn start_server(&self) -> String {
        assert_eq!(self.ask("start_server -uid 0"), "");
        self.active_server()
    }

    fn active_server(&self) -> String {
        wait_for("an active server", || {
            let server = self.ask("get_server_list").trim().to_owned();
            (self.ask(&format!("get_server_status {server}")) == "ACTIVE\n").then_some(server)
        })
    }

    fn client(&self, server: &str, arguments: &[&str]) -> Client {
        let client = self.host.spawn_cuda(arguments);
        self.wait_for_client(server, &client);
        client
    }

    fn wait_for_client(&self, server: &str, client: &Client) {
        let pid = client.pid().to_string();
        wait_for("a client", || {
            self.ask(&format!("get_client_list {server}")).lines().any(|line| line == pid).then_some(())
        });
    }

    fn wait_for_end(&mut self) -> ExitStatus {
        wait_for("the control daemon's end", || self.child.try_wait().unwrap())
    }
}

impl Drop for Control<'_> {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

const HELD: &str = "an illegal memory access was encountered (700)\n";

#[test]
fn without_a_server_it_answers_as_580_did() {
    let host = Host::new("h200");
    let control = host.control(&[], None);
    let recorded = [
        ("get_server_list", ""),
        ("get_default_active_thread_percentage", "100.0\n"),
        ("ps", "Server not found\n"),
        (
            "device_query",
            "Default\n\
             Device Ordinal  PCI IDs        UUID                                      Name                              Attributes\n\
             0               0000:00.06.00  GPU-168acfc9-c926-5401-354d-2910ddcd391b  NVIDIA H200                       N/A\n",
        ),
        ("get_default_client_priority", "0\n"),
        ("get_default_device_pinned_mem_limit 0", ""),
        ("get_device_client_list", ""),
        ("bogus", "Unknown command \"bogus\"\n"),
        ("help", "Unknown command \"help\"\n"),
        ("get_server_status 1", "Server 1 not found\n"),
        ("sm_partition add 0 1", "Unknown command \"sm_partition\"\n"),
        ("shutdown_server 77", "Server 77 not found\n"),
        ("start_server", "A user id (UID) is required to start a new server\n"),
        ("set_default_active_thread_percentage 25", "25.0\n"),
        ("set_default_device_pinned_mem_limit 0 35000M", ""),
        ("get_default_device_pinned_mem_limit 0", "34G\n"),
        ("set_default_active_thread_percentage abc", "25.0\n"),
        ("set_default_active_thread_percentage 0", "25.0\n"),
        ("set_default_active_thread_percentage 101", "25.0\n"),
        ("set_default_device_pinned_mem_limit 9 1G", ""),
        ("set_default_device_pinned_mem_limit 0 99999999M", ""),
        ("get_default_device_pinned_mem_limit 0", "97656G\n"),
        ("get_server_list\nbogus\nget_default_active_thread_percentage", "Unknown command \"bogus\"\n25.0\n"),
    ];
    for (command, answer) in recorded {
        assert_eq!(control.ask(command), answer, "{command}");
    }
    let texts = host.texts();
    let pipe = host.path("mps/pipe");
    let start = [
        format!("Starting control daemon using socket {}/control", pipe.display()),
        format!(
            "To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={}",
            pipe.display()
        ),
        "CUDA MPS Control binary version: 13000".to_owned(),
    ];
    assert_eq!(texts[..3], start);
    let lines = |wanted: &[&str]| texts.windows(wanted.len()).any(|texts| texts == wanted);
    assert!(lines(&["Accepting connection...", "NEW UI", "Cmd:ps", "Server not found", "UI closed"]));
    assert!(lines(&[
        "Cmd:set_default_active_thread_percentage abc",
        "Invalid percentage, expected between (0.0, 100.0]",
        "25.0"
    ]));
    assert!(lines(&[
        "Cmd:set_default_device_pinned_mem_limit 0 35000M",
        "set_default_device_pinned_mem_limit 0 35000M.",
        "UI closed"
    ]));
    assert!(lines(&[
        "Cmd:get_default_device_pinned_mem_limit 0",
        "No default pinned memory limit set for the device!"
    ]));
}

#[test]
fn the_log_has_the_recorded_grammar() {
    let host = Host::new("h200");
    let control = host.control(&[], None);
    let pid = control.child.id();
    let log = host.log();
    let (time, rest) = log.split_at(25);
    assert!(
        time.starts_with("[20") && &time[11..12] == " " && &time[20..21] == "." && &time[24..] == " ",
        "{time}"
    );
    assert!(rest.starts_with(&format!("Control {pid:>5}] Starting control daemon")), "{rest}");
}

#[test]
fn a_server_and_its_client_are_listed_as_recorded() {
    let host = Host::new("h200");
    let control = host.control(&[], None);
    let server = control.start_server();
    assert_eq!(
        control.ask("start_server -uid 0\nget_server_list"),
        format!("{server}\n"),
        "one server is enough"
    );
    assert_eq!(control.ask("ps"), "", "a server without a client");
    let client = control.client(&server, &["hold", "600"]);
    let pid = client.pid();
    let namespace = fs::read_link("/proc/self/ns/pid")
        .unwrap()
        .to_string_lossy()
        .replace(['p', 'i', 'd', ':', '[', ']'], "");
    let command = host.path("bin/cuda-client");
    let row = format!(
        "{pid:<10}1         {server:<15}GPU-168acfc9-c926-5401    {namespace:<15}{:<15}\n",
        command.display()
    );
    let head =
        "PID       ID        SERVER         DEVICE                    NAMESPACE      COMMAND        \n";
    assert_eq!(control.ask("ps"), format!("{head}{row}"));
    assert_eq!(control.ask(&format!("ps -p {server}")), format!("{head}{row}"));
    assert_eq!(control.ask("ps -p 5"), "Server 5 not found\nServer 5 not found\n\n");
    assert_eq!(control.ask("get_device_client_list"), format!("[0] 00:00.0, NVIDIA H200\n{pid}.1\n"));
    assert_eq!(control.ask(&format!("get_active_thread_percentage {server}")), "100.0\n");
    assert_eq!(control.ask(&format!("get_device_pinned_mem_limit {server} 0")), "");
    let devices = control.ask("device_query");
    let (default, of_server) = devices.split_once(&format!("\nServer {server}\n")).unwrap();
    assert_eq!(default.strip_prefix("Default\n").unwrap(), of_server);
    host.wait_for_log("Received device query command. There are 1 devices");
    let used = host.command("nvidia-smi").args(["--query-gpu=memory.used", "--format=csv,noheader"]).output();
    assert_eq!(finished(&used.unwrap()), ("583 MiB\n".to_owned(), 0), "66 of the server, 517 of the client");
}

#[test]
fn limits_apply_to_the_next_server_only() {
    let host = Host::new("h200");
    let control = host.control(&[], None);
    let seen = |environment: &[(&str, &str)]| {
        let (text, status) = host.cuda(&["props"], environment);
        assert_eq!(status, 0, "{text}");
        text.rsplit_once(" init").unwrap().0.to_owned()
    };
    let of = |sms: u32, free: u32| {
        format!("dev 0 NVIDIA H200 pci 00:06 sms {sms} attr_sm {sms} free {free} total 143155 cc 9.0")
    };
    let server = control.start_server();
    assert_eq!(seen(&[]), of(132, 142_565));
    control.ask("set_default_active_thread_percentage 25\nset_default_device_pinned_mem_limit 0 35000M");
    assert_eq!(seen(&[]), of(132, 142_565), "a running server keeps its limits");
    assert_eq!(control.ask(&format!("shutdown_server {server}")), "");
    wait_for("the server's end", || control.ask("get_server_list").is_empty().then_some(()));

    assert_eq!(seen(&[]), of(32, 34_855));
    let server = control.active_server();
    host.wait_for_log(&format!("Server {server:>5}] Active Threads Percentage set to 25.0"));
    host.wait_for_log(&format!(
        "Server {server:>5}] Device pinned memory limit for device 0 set to 0x88b800000 bytes"
    ));
    assert_eq!(control.ask(&format!("get_active_thread_percentage {server}")), "25.0\n");
    assert_eq!(control.ask(&format!("get_device_pinned_mem_limit {server} 0")), "34G\n");
    assert_eq!(
        host.cuda(&["alloc", "60000"], &[]),
        ("alloc stopped at 34816 MiB: out of memory\n".to_owned(), 3)
    );

    assert_eq!(control.ask(&format!("set_device_pinned_mem_limit {server} 0 10G")), "");
    host.wait_for_log("Device pinned memory limit for device 0 set to 0x280000000 bytes");
    assert_eq!(
        host.cuda(&["alloc", "60000"], &[]),
        ("alloc stopped at 9984 MiB: out of memory\n".to_owned(), 3)
    );
    assert_eq!(control.ask(&format!("set_active_thread_percentage {server} 10")), "10.0\n");
    assert_eq!(seen(&[]), of(12, 10_168));
    control.ask(&format!(
        "set_active_thread_percentage {server} 50\nset_device_pinned_mem_limit {server} 0 71885M"
    ));
    assert_eq!(seen(&[]), of(66, 71_614));

    let percentage = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
    let memory = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
    assert_eq!(seen(&[(percentage, "10"), (memory, "0=2G,1=3G")]), of(12, 1976));
    assert_eq!(seen(&[(percentage, "90"), (memory, "0=99G")]), of(66, 71_614), "a client can only tighten");
    let own = [(memory, "GPU-168acfc9-c926-5401-354d-2910ddcd391b=4G")];
    assert_eq!(seen(&own), of(66, 3825));
}

#[test]
fn a_gpu_before_volta_enforces_nothing() {
    let host = Host::new("tesla-p40");
    let control = host.control(&[], None);
    control.ask("set_default_active_thread_percentage 25\nset_default_device_pinned_mem_limit 0 5760M");
    assert_eq!(control.ask("get_default_device_pinned_mem_limit 0"), "5G\n");
    let (text, _) = host.cuda(&["props"], &[]);
    assert!(text.starts_with("dev 0 Tesla P40 pci 00:06 sms 30 attr_sm 30 free 22"), "{text}");
    assert!(!host.log().contains("Device pinned memory limit"));
}

#[test]
fn the_control_daemons_environment_decides_the_ordinals() {
    let host = Host::new("h200x8");
    let [first, second] =
        ["gpus/0/uuid", "gpus/1/uuid"].map(|file| fs::read_to_string(host.path(file)).unwrap());
    let (first, second) = (first.trim(), second.trim());
    let control = host.control(&["-multiuser-server"], Some(&format!("{second},{first}")));
    assert_eq!(
        control.ask("device_query"),
        format!(
            "Default\n\
             Device Ordinal  PCI IDs        UUID                                      Name                              Attributes\n\
             0               0000:2d.00.00  {second}  NVIDIA H200                       N/A\n\
             1               0000:1b.00.00  {first}  NVIDIA H200                       N/A\n"
        )
    );
    control.ask("set_default_device_pinned_mem_limit 0 10G");
    control.ask(&format!("set_default_device_pinned_mem_limit {first} 7G"));
    assert_eq!(control.ask(&format!("get_default_device_pinned_mem_limit {first}")), "7G\n");
    assert_eq!(control.ask("get_default_device_pinned_mem_limit 1"), "7G\n");
    control.start_server();
    let seen = |visible: Option<&str>| {
        let environment: Vec<_> = visible.map(|names| ("CUDA_VISIBLE_DEVICES", names)).into_iter().collect();
        let (text, _) = host.cuda(&["props"], &environment);
        let field =
            |line: &str, name: &str| line.split_once(name).unwrap().1.split(' ').next().unwrap().to_owned();
        text.lines().map(|line| (field(line, "pci "), field(line, "free "))).collect::<Vec<_>>()
    };
    let pair = |pci: &str, free: &str| (pci.to_owned(), free.to_owned());
    // Measurements on a host with two GPUs show that a client numbers its GPUs by PCI address. The number of a GPU in a memory
    // limit is the number that the client gives to the GPU.
    assert_eq!(seen(None), [pair("1b:00", "9726"), pair("2d:00", "6654")]);
    assert_eq!(seen(Some(first)), [pair("1b:00", "9726")]);
    assert_eq!(seen(Some(second)), [pair("2d:00", "9726")]);
    let third = fs::read_to_string(host.path("gpus/2/uuid")).unwrap();
    let not_ours = host.cuda(&["props"], &[("CUDA_VISIBLE_DEVICES", third.trim())]);
    assert_eq!(not_ours, ("ERR cudaFree(0): no CUDA-capable device is detected (100)\n".to_owned(), 3));
}

#[test]
fn the_end_of_the_control_daemon_is_the_end_of_its_clients() {
    use rustix::process::Signal;
    let host = Host::new("h200");
    for signal in [Signal::TERM, Signal::KILL] {
        let mut control = host.control(&[], None);
        let server = control.start_server();
        let client = control.client(&server, &["hold", "600"]);
        let pid = client.pid();
        rustix::process::kill_process(rustix::process::Pid::from_child(&control.child), signal).unwrap();
        let (text, status) = client.end();
        assert!(text.starts_with(&format!("hold pid {pid} after ")), "{text}");
        let why = ": the remote procedural call between the MPS server and the MPS client failed (806)\n";
        assert!(text.ends_with(why), "{text}");
        assert_eq!(status, 4);
        assert_eq!(control.wait_for_end().signal(), Some(signal.as_raw()));
        let none = host.front_end("get_server_list");
        assert_eq!(String::from_utf8(none.stderr).unwrap(), "Cannot find MPS control daemon process\n");
        assert_eq!(none.status.code(), Some(1));
        // A control daemon that a signal ends does not remove these files. The second round of the loop shows that the files do
        // not prevent the next start.
        for file in ["control", "control_lock", "control_privileged", "log", "nvidia-cuda-mps-control.pid"] {
            assert!(host.path("mps/pipe").join(file).exists(), "{file}");
        }
    }
    let alone = host.cuda(&["props"], &[]).0;
    assert!(alone.contains(" free 142629 total 143155 "), "without MPS: {alone}");
}

#[test]
fn the_end_of_a_server_leaves_the_control_daemon() {
    let host = Host::new("h200");
    let control = host.control(&[], None);
    let server = control.start_server();
    let client = control.client(&server, &["hold", "600"]);
    let pid = rustix::process::Pid::from_raw(server.parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    assert_eq!(client.end().1, 4);
    wait_for("an empty list", || control.ask("get_server_list").is_empty().then_some(()));
    assert_eq!(host.cuda(&["hold", "0"], &[]).1, 0, "the next client gets a new server");
    assert_ne!(control.active_server(), server);
}

#[test]
fn a_fault_hits_every_client() {
    let host = Host::new("h200");
    let control = host.control(&[], None);
    let server = control.start_server();
    let bystander = control.client(&server, &["hold", "600"]);
    let pid = bystander.pid();
    assert_eq!(host.cuda(&["fault"], &[]), (format!("fault client: {HELD}"), 4));
    let (text, status) = bystander.end();
    assert!(text.ends_with(HELD), "{text}");
    assert_eq!(status, 4);
    host.wait_for_log("Destroy server context on device 0 (NVIDIA H200)");
    let named = format!("Client {{PID: {pid}, Context: 1}} encountered a fatal GPU error.");
    assert!(host.texts().contains(&named), "the log names the bystander");
    assert_eq!(control.active_server(), server, "with all of them gone it serves again by itself");
    assert_eq!(host.cuda(&["hold", "0"], &[]).1, 0);
}

#[test]
fn a_client_that_stays_keeps_the_server_faulted() {
    let host = Host::new("h200");
    let control = host.control(&[], None);
    let server = control.start_server();
    let stays = control.client(&server, &["hold", "600", "--stay"]);
    host.cuda(&["fault"], &[]);
    assert_eq!(control.ask(&format!("get_server_status {server}")), "FAULT\n");
    let refused = host.cuda(&["props"], &[]);
    let text = "ERR cudaFree(0): MPS server is not ready to accept new MPS client requests (807)\n";
    assert_eq!(refused, (text.to_owned(), 3));
    wait_for("the other one's end", || {
        (control.ask(&format!("get_client_list {server}")) == format!("{}\n", stays.pid())).then_some(())
    });
    assert_eq!(control.ask(&format!("shutdown_server {server}")), "");
    host.wait_for_log(&format!("Server {server} has 2 active worker threads. Server will not shutdown."));
    assert_eq!(control.ask("get_server_list"), format!("{server}\n"));
    assert_eq!(control.ask(&format!("shutdown_server {server} -f")), "");
    wait_for("the server's end", || control.ask("get_server_list").is_empty().then_some(()));
    host.wait_for_log(&format!("Force shutting down server {server}"));
    assert_eq!(host.cuda(&["hold", "0"], &[]).1, 0, "the next client gets a new server");
}

#[test]
fn a_client_killed_in_a_long_kernel_ends_its_neighbours() {
    use rustix::process::Signal;
    let host = Host::new("h200");
    let control = host.control(&[], None);
    let server = control.start_server();
    let bystander = control.client(&server, &["hold", "600"]);
    for signal in [Signal::KILL, Signal::TERM, Signal::INT] {
        let victim = control.client(&server, &["hold", "600"]);
        let gone = format!("Client process {} disconnected", victim.pid());
        victim.kill(signal);
        host.wait_for_log(&gone);
        assert!(!host.log().contains("fatal GPU error"), "between short kernels it hurts nobody");
    }
    let victim = control.client(&server, &["long", "600"]);
    assert_eq!(control.ask(&format!("terminate_client {server} {}", victim.pid())), "0\n");
    let text = "ERR cudaDeviceSynchronize(): the MPS client has been terminated by the server (810)\n";
    assert_eq!(victim.end(), (text.to_owned(), 3));
    assert_eq!(control.ask(&format!("terminate_client {server} 99999999")), "Invalid process 99999999!\n1\n");
    let missing = "Server 1 not found\nServer 1 not found!\n1\n";
    assert_eq!(control.ask("terminate_client 1 2"), missing);
    assert_eq!(control.ask(&format!("get_server_status {server}")), "ACTIVE\n");

    let mut victim = host.command("cuda-client");
    let mut victim = victim.args(["long", "600"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut runs = [0];
    victim.stderr.take().unwrap().read_exact(&mut runs).unwrap();
    victim.kill().unwrap();
    victim.wait().unwrap();
    let (text, status) = bystander.end();
    assert!(text.ends_with(HELD), "{text}");
    assert_eq!(status, 4);
}

#[test]
fn quit_waits_for_clients_and_hangs_with_a_time_limit() {
    let host = Host::new("h200");
    let mut control = host.control(&[], None);
    control.start_server();
    assert_eq!(control.ask("quit -t 1"), "");
    assert_eq!(control.wait_for_end().code(), Some(0));
    let mut left: Vec<_> =
        fs::read_dir(host.path("mps/pipe")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort_unstable();
    assert_eq!(left, ["control", "control_lock", "control_privileged"]);

    let mut control = host.control(&[], None);
    let server = control.start_server();
    let client = control.client(&server, &["hold", "600"]);
    thread::scope(|scope| {
        let quit = scope.spawn(|| host.front_end("quit"));
        host.wait_for_log("Cmd:quit");
        assert!(!quit.is_finished());
        client.kill(rustix::process::Signal::KILL);
        assert_eq!(quit.join().unwrap().status.code(), Some(0));
    });
    assert_eq!(control.wait_for_end().code(), Some(0));

    let mut control = host.control(&[], None);
    let server = control.start_server();
    let client = control.client(&server, &["hold", "600"]);
    let mut quit = host.command("nvidia-cuda-mps-control").stdin(Stdio::piped()).spawn().unwrap();
    writeln!(quit.stdin.take().unwrap(), "quit -t 0").unwrap();
    host.wait_for_log(&format!("Force shutting down server {server}"));
    client.kill(rustix::process::Signal::KILL);
    host.wait_for_log(&format!("Client process {} disconnected", client.pid()));
    assert!(quit.try_wait().unwrap().is_none(), "it hangs though the client is gone");
    control.child.kill().unwrap();
    assert_eq!(control.wait_for_end().signal(), Some(9));
    assert_eq!(quit.wait().unwrap().code(), Some(0));
}

#[test]
fn there_is_one_control_daemon_in_a_directory() {
    let host = Host::new("h200");
    let _control = host.control(&[], None);
    for option in ["-f", "-d"] {
        let second = host.command("nvidia-cuda-mps-control").arg(option).output().unwrap();
        assert_eq!(
            finished(&second),
            ("An instance of this daemon is already running\n".to_owned(), 1),
            "{option}"
        );
    }
}

#[test]
fn in_the_background_it_writes_two_files() {
    let host = Host::new("h200");
    let started = host.command("nvidia-cuda-mps-control").arg("-d").output().unwrap();
    assert_eq!(finished(&started), (String::new(), 0));
    host.front_end("start_server -uid 0");
    let read = |name: &str| fs::read_to_string(host.path("mps/log").join(name)).unwrap();
    wait_for("a server", || read("control.log").contains(": Ready\n").then_some(()));
    assert!(read("server.log").contains("] Server has started\n"));
    assert!(!read("control.log").contains("] Server has started\n"));
    assert_eq!(host.front_end("quit").status.code(), Some(0));
    wait_for("its end", || read("control.log").contains("] Exit with status 0\n").then_some(()));
}

#[test]
fn the_versions_differ_as_recorded() {
    let host = Host::new("h200");
    let uuid = "GPU-168acfc9-c926-5401-354d-2910ddcd391b";
    for (version, status, multiuser) in [
        ("535", "Unknown command \"get_server_status\"\n", false),
        ("550", "Server 1 not found\n", false),
        ("555", "Server 1 not found\n", true),
    ] {
        host.write("mps/version", version);
        let mut control = host.control(&[], None);
        assert_eq!(control.ask("get_server_status 1"), status, "{version}");
        assert_eq!(control.ask("device_query"), "Unknown command \"device_query\"\n", "{version}");
        assert_eq!(control.ask(&format!("set_default_device_pinned_mem_limit {uuid} 7G")), "", "{version}");
        assert_eq!(control.ask(&format!("get_default_device_pinned_mem_limit {uuid}")), "", "{version}");
        assert!(!host.log().contains("binary version"), "{version}");
        control.ask("quit");
        control.wait_for_end();
        if multiuser {
            host.control(&["-multiuser-server"], None);
        } else {
            let refused =
                host.command("nvidia-cuda-mps-control").args(["-f", "-multiuser-server"]).output().unwrap();
            assert_eq!(refused.status.code(), Some(1), "{version}");
            assert_eq!(
                String::from_utf8(refused.stderr).unwrap(),
                "Cannot find MPS control daemon process\n"
            );
        }
    }
}

#[test]
fn a_gpu_takes_48_clients() {
    let host = Host::new("h200");
    let control = host.control(&[], None);
    let server = control.start_server();
    let clients: Vec<Client> = (0..48).map(|_| host.spawn_cuda(&["hold", "600"])).collect();
    wait_for("48 clients", || {
        (control.ask(&format!("get_client_list {server}")).lines().count() == 48).then_some(())
    });
    let text = "ERR cudaFree(0): CUDA-capable device(s) is/are busy or unavailable (46)\n";
    assert_eq!(host.cuda(&["hold", "0"], &[]), (text.to_owned(), 3));
    host.wait_for_log("Failed to accept new client. Maximum number of clients (48) reached.");
    drop(clients);
}

/// In compute mode DEFAULT several control daemons can have servers on one GPU. A fault of one server's client does not hit the
/// clients of another server.
#[test]
fn control_daemons_side_by_side_are_fault_domains() {
    let host = Host::new("h200");
    let hosts = [host.beside("first"), host.beside("second"), host.beside("third")];
    let mut controls: Vec<Control> = hosts.iter().map(|host| host.control(&[], None)).collect();
    let servers: Vec<String> = controls.iter().map(Control::start_server).collect();
    let hold = |of: usize| controls[of].client(&servers[of], &["hold", "600"]);
    let (neighbour, second, third) = (hold(0), hold(1), hold(2));
    let on_gpu = fs::read_dir(host.path("gpus/0/processes")).unwrap().count();
    assert_eq!(on_gpu, 6, "three servers and three clients");
    for (control, (server, client)) in controls.iter().zip(servers.iter().zip([&neighbour, &second, &third]))
    {
        assert_eq!(control.ask(&format!("get_client_list {server}")), format!("{}\n", client.pid()));
    }
    assert_eq!(controls[1].ask("set_default_active_thread_percentage 25"), "25.0\n");
    assert_eq!(controls[2].ask("get_default_active_thread_percentage"), "100.0\n");

    assert_eq!(hosts[0].cuda(&["fault"], &[]), (format!("fault client: {HELD}"), 4));
    assert!(neighbour.end().0.ends_with(HELD));
    for host in &hosts {
        assert_eq!(host.cuda(&["hold", "0"], &[]).1, 0, "all of them take clients");
    }
    let full: Vec<Client> = (0..47).map(|_| hosts[1].spawn_cuda(&["hold", "600"])).collect();
    wait_for("48 clients", || {
        (controls[1].ask(&format!("get_client_list {}", servers[1])).lines().count() == 48).then_some(())
    });
    assert_eq!((hosts[1].cuda(&["hold", "0"], &[]).1, hosts[2].cuda(&["hold", "0"], &[]).1), (3, 0));
    drop(full);
    // If a control daemon is killed, only its own clients end.
    controls.remove(1);
    let (text, status) = second.end();
    assert!(text.contains("(806)") && status == 4, "{text}");
    wait_for("the third alone", || {
        (controls[1].ask(&format!("get_client_list {}", servers[2])).lines().count() == 1).then_some(())
    });
    assert_eq!(hosts[2].cuda(&["hold", "0"], &[]).1, 0);
    // In the mode EXCLUSIVE_PROCESS, only one server can open the GPU.
    let set = host.command("nvidia-smi").args(["-i", "0", "-c", "EXCLUSIVE_PROCESS"]).output().unwrap();
    assert!(set.status.success());
    let again = hosts[1].control(&[], None);
    again.ask("start_server -uid 0");
    hosts[1].wait_for_log("exited with status 1");
    drop(third);
}

#[test]
fn an_initialising_server_dies_with_its_control_daemon() {
    let host = Host::new("h200");
    host.write("mps/start-ms", "600000");
    let control = host.control(&[], None);
    control.ask("start_server -uid 0");
    let server = control.ask("get_server_list").trim().to_owned();
    assert_eq!(control.ask(&format!("get_server_status {server}")), "INITIALIZING\n");
    drop(control);
    let stat = format!("/proc/{server}/stat");
    wait_for("the server's end", || {
        // If no process reaps orphans, the server's process stays a zombie after its end.
        fs::read_to_string(&stat).map_or(true, |stat| stat.contains(") Z ")).then_some(())
    });
}

#[test]
fn an_exclusive_gpu_has_one_process() {
    let host = Host::new("h200");
    let set = host.command("nvidia-smi").args(["-i", "0", "-c", "EXCLUSIVE_PROCESS"]).output().unwrap();
    let text = "Set compute mode to EXCLUSIVE_PROCESS for GPU 00000000:00:06.0.\nAll done.\n";
    assert_eq!(finished(&set), (text.to_owned(), 0));
    let alone = host.spawn_cuda(&["hold", "600"]);
    let entered = host.path("gpus/0/processes").join(alone.pid().to_string());
    wait_for("the first process", || entered.exists().then_some(()));
    let busy = "ERR cudaFree(0): CUDA-capable device(s) is/are busy or unavailable (46)\n";
    assert_eq!(host.cuda(&["hold", "0"], &[]), (busy.to_owned(), 3));

    let control = host.control(&[], None);
    control.ask("start_server -uid 0");
    host.wait_for_log("exited with status 1");
    drop(alone);
    let server = control.start_server();
    let client = control.client(&server, &["hold", "600"]);
    assert_eq!(host.cuda(&["hold", "0"], &[]).1, 0, "under MPS there is room for more");
    drop(client);
}

#[test]
fn a_server_needs_every_gpu() {
    for (file, text) in [("lost", ""), ("mig", "Enabled"), ("compute_mode", "Prohibited")] {
        let host = Host::new("h200x8");
        host.write(&format!("gpus/5/{file}"), text);
        let control = host.control(&[], None);
        control.ask("start_server -uid 0");
        host.wait_for_log("exited with status 1");
        assert_eq!(control.ask("get_server_list"), "", "{file}");
    }
    let host = Host::new("h200");
    let control = host.control(&[], Some("GPU-00000000-0000-0000-0000-000000000000"));
    control.ask("start_server -uid 0");
    host.wait_for_log("exited with status 1");
    assert_eq!(control.ask("get_server_list"), "");
}

#[test]
fn injected_faults_happen() {
    let host = Host::new("h200");
    host.fault("start-exits", "");
    assert_eq!(host.command("nvidia-cuda-mps-control").arg("-f").output().unwrap().status.code(), Some(1));
    fs::remove_file(host.path("mps/fault/start-exits")).unwrap();

    host.fault("die-after-ms", "1");
    assert_eq!(host.command("nvidia-cuda-mps-control").arg("-f").output().unwrap().status.code(), Some(1));
    fs::remove_file(host.path("mps/fault/die-after-ms")).unwrap();

    host.fault("start-garbage", "");
    host.fault("server-start-fails", "");
    let mut control = host.control(&[], None);
    assert!(host.log().starts_with("\0\u{fffd}\u{fffd} garbage"));
    control.ask("start_server -uid 0");
    host.wait_for_log("exited with status 1");
    control.ask("quit");
    assert_eq!(control.wait_for_end().code(), Some(1), "as the server that ended last");
    fs::remove_file(host.path("mps/fault/start-garbage")).unwrap();
    fs::remove_file(host.path("mps/fault/server-start-fails")).unwrap();

    host.fault("server-dies-after-ms", "1");
    host.fault("quit-hangs", "");
    let mut control = host.control(&[], None);
    control.ask("start_server -uid 0");
    host.wait_for_log("exited with status 1");
    host.fault("front-end-garbage", "");
    assert_eq!(host.front_end("get_server_list").stdout, b"\x00\xff\xfe garbage \x1b[2J\n");
    fs::remove_file(host.path("mps/fault/front-end-garbage")).unwrap();
    let mut quit = host.command("nvidia-cuda-mps-control").stdin(Stdio::piped()).spawn().unwrap();
    writeln!(quit.stdin.take().unwrap(), "quit").unwrap();
    host.wait_for_log("Cmd:quit");
    assert!(quit.try_wait().unwrap().is_none());
    control.child.kill().unwrap();
    quit.wait().unwrap();
    control.wait_for_end();

    for fault in ["start-hangs", "front-end-hangs"] {
        host.fault(fault, "");
        let option = if fault == "start-hangs" { &["-f"][..] } else { &[] };
        let mut hangs = host.command("nvidia-cuda-mps-control").args(option).spawn().unwrap();
        let stat = format!("/proc/{}/stat", hangs.id());
        wait_for("a process that waits", || {
            fs::read_to_string(&stat).unwrap().contains(") S ").then_some(())
        });
        assert!(hangs.try_wait().unwrap().is_none(), "{fault}");
        hangs.kill().unwrap();
        hangs.wait().unwrap();
    }
}

#[test]
fn one_user_at_a_time_or_all_at_once() {
    // Only root can start programs as another user.
    if !skip::root_or_skip("one_user_at_a_time_or_all_at_once") {
        return;
    }
    // Other users may not be able to read the target directory, so the test copies the programs to a directory that every user
    // can read.
    let programs = tempfile::tempdir().unwrap();
    fs::set_permissions(&programs, fs::Permissions::from_mode(0o755)).unwrap();
    // `cp` writes the files instead of this process. Otherwise a child that another thread forks meanwhile could have a program
    // open for writing, and the kernel would refuse to execute the program.
    let copied = Command::new("cp").args(PROGRAMS).arg(programs.path()).status().unwrap();
    assert!(copied.success());
    let host = Host::made_by(&programs.path().join("yunion-mps-sim"), "h200");
    let as_other = || {
        let mut command = host.command("cuda-client");
        command.args(["hold", "0"]).uid(1000).gid(1000).stdout(Stdio::piped());
        Client(Some(command.spawn().unwrap()))
    };

    let control = host.control(&[], None);
    let server = control.start_server();
    let first = control.client(&server, &["hold", "600"]);
    let other = as_other();
    let waits = format!(
        "NEW CLIENT {} from user 1000: Server is not ready, push client to pending list",
        other.pid()
    );
    host.wait_for_log(&waits);
    assert_eq!(control.ask("get_server_list"), format!("{server}\n"));
    drop(first);
    assert_eq!(other.end().1, 0);
    let next = control.active_server();
    host.wait_for_log(&format!("Starting new server {next} for user 1000"));
    drop(control);

    let control = host.control(&["-multiuser-server"], None);
    let server = control.start_server();
    let first = control.client(&server, &["hold", "600"]);
    assert_eq!(as_other().end().1, 0);
    assert_eq!(control.ask("get_server_list"), format!("{server}\n"));
    drop(first);
}
