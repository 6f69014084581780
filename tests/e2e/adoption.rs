//! Tests that restarts and crashes of the service do not disturb a running CUDA program. Only `systemctl stop` ends the
//! program.

use crate::Check;
use crate::machine::{Machine, text};
use crate::service::{
    HOST_CONF, ON_HOST, SERVICE, compute_mode, control_daemons, drop_in, no_left_overs, serving, state,
};
use crate::wait::wait_for;

const SCOPE: &str = "yunion-mps-control-shared.scope";
const CLIENT: &str = "client.service";

pub(crate) const CHECKS: &[Check] = &[
    ("the_control_daemon_is_in_a_scope_of_its_own", scope),
    ("systemctl_restart_leaves_a_client_running", restart),
    ("systemctl_daemon_reexec_changes_nothing", reexec),
    ("sigkill_of_the_main_process_leaves_a_client_running", sigkill),
    ("sigterm_that_is_not_systemds_leaves_a_client_running", sigterm),
    ("the_watchdog_leaves_a_client_running", watchdog),
    ("a_members_flood_of_calls_leaves_a_client_running", flood),
    ("a_kernel_without_pidfds_is_as_good", old_kernel),
    ("the_cdi_spec_stays_at_a_restart_and_at_a_stop", cdi),
    ("systemctl_stop_ends_the_control_daemon_and_its_client", stop),
    ("a_reboot_with_a_client_running_comes_up_again", reboot),
];

#[derive(Debug, PartialEq)]
pub(crate) struct Running {
    control_daemon: String,
    client: String,
}

impl Running {
    /// Starts the service on a new simulated host, and then a client. `lines` are added to the `[Service]` section of the
    /// service's unit.
    pub(crate) fn start(machine: &Machine, lines: &str) -> Self {
        machine.run(&["systemctl", "stop", CLIENT]);
        machine.run(&["systemctl", "reset-failed", CLIENT]);
        serving(machine);
        drop_in(machine, lines);
        machine.sh(&format!("systemctl restart {SERVICE}"));
        wait_for("the state ready", || (state(machine) == "ready").then_some(()));
        let script = format!("{ON_HOST} eval \"$(yunion-mpsctl env 00:06.0-1)\"; exec cuda-client hold 600");
        machine.printed(&["systemd-run", "--quiet", "--unit", CLIENT, "sh", "-euc", &script]);
        wait_for("the client at work", || clients(machine).contains("cuda-client").then_some(()));
        Self::now(machine)
    }

    fn now(machine: &Machine) -> Self {
        assert_eq!(machine.property(CLIENT, "ActiveState"), "active", "the client has ended");
        let control_daemons = control_daemons(machine);
        assert_eq!(control_daemons.len(), 1, "{control_daemons:?}");
        Self { control_daemon: control_daemons[0].clone(), client: machine.property(CLIENT, "MainPID") }
    }

    /// Fails unless systemd has started a new main process of the service and the client still runs under the same control
    /// daemon.
    pub(crate) fn unharmed(&self, machine: &Machine, old_main: &str, cursor: &str) {
        wait_for("another main process, ready", || {
            let main = machine.property(SERVICE, "MainPID");
            (main != "0" && main != old_main && state(machine) == "ready").then_some(())
        });
        assert_eq!(Self::now(machine), *self);
        assert!(clients(machine).contains("cuda-client"));
        assert!(group(machine, &self.control_daemon).contains(SCOPE));
        assert_eq!(compute_mode(machine), "Exclusive_Process");
        no_left_overs(machine, cursor);
        machine.sh(&format!("{ON_HOST} eval \"$(yunion-mpsctl env 00:06.0-2)\"; cuda-client props"));
    }
}

fn clients(machine: &Machine) -> String {
    let call = ["busctl", "call", "--json=short", "io.yunion.Mps1", "/io/yunion/Mps1/Manager"];
    let call: Vec<&str> = call.into_iter().chain(["io.yunion.Mps1.Manager", "ListClients"]).collect();
    text(&machine.run(&call).stdout)
}

fn group(machine: &Machine, pid: &str) -> String {
    machine.printed(&["cat", &format!("/proc/{pid}/cgroup")])
}

fn scope(machine: &mut Machine) {
    serving(machine);
    let control_daemon = &control_daemons(machine)[0];
    assert!(group(machine, control_daemon).contains(SCOPE), "{}", group(machine, control_daemon));
    let status = machine.printed(&["systemctl", "status", SCOPE]);
    for part in ["Active: active (running)", "nvidia-cuda-mps-control -f", "nvidia-cuda-mps-server"] {
        assert!(status.contains(part), "{status}");
    }
    let own = machine.printed(&["systemctl", "status", SERVICE]);
    assert!(!own.contains("nvidia-cuda-mps"), "{own}");
}

fn restart(machine: &mut Machine) {
    let running = Running::start(machine, "");
    for _ in 0..3 {
        let (cursor, main) = (machine.cursor(), machine.property(SERVICE, "MainPID"));
        machine.sh(&format!("systemctl restart {SERVICE}"));
        running.unharmed(machine, &main, &cursor);
    }
}

fn reexec(machine: &mut Machine) {
    let running = Running::start(machine, "");
    let (cursor, main) = (machine.cursor(), machine.property(SERVICE, "MainPID"));
    machine.sh(&format!("systemctl daemon-reexec; systemctl restart {SERVICE}"));
    running.unharmed(machine, &main, &cursor);
}

fn sigkill(machine: &mut Machine) {
    let running = Running::start(machine, "RestartSec=100ms");
    let (cursor, main) = (machine.cursor(), machine.property(SERVICE, "MainPID"));
    machine.sh(&format!("kill -KILL {main}"));
    running.unharmed(machine, &main, &cursor);
    assert_eq!(machine.property(SERVICE, "NRestarts"), "1");
}

/// After a SIGTERM from `kill`, systemd starts the service again and the clients run on. `systemctl stop` ends the clients.
fn sigterm(machine: &mut Machine) {
    let running = Running::start(machine, "RestartSec=100ms");
    let cursor = machine.cursor();
    let main = machine.property(SERVICE, "MainPID");
    machine.sh(&format!("kill -TERM {main}"));
    wait_for("its end", || (machine.property(SERVICE, "MainPID") != main).then_some(()));
    machine.sh(&format!("systemctl start {SERVICE}"));
    running.unharmed(machine, &main, &cursor);
}

/// A flood of requests makes the service exceed its memory limit. The kernel kills the service, and systemd starts it again.
fn flood(machine: &mut Machine) {
    const SCRIPT: &str = "/srv/attack.py";
    machine.write(SCRIPT, include_str!("../it/attack.py"));
    let running = Running::start(machine, "MemoryMax=48M\nRestartSec=100ms");
    machine.sh("usermod -aG yunion-mps nobody; systemctl reload dbus");
    let cursor = machine.cursor();
    machine.sh(&format!(
        "chmod 755 {SCRIPT}; setpriv --reuid=65534 --regid=65534 --init-groups python3 {SCRIPT} \
         /run/dbus/system_bus_socket long-name 8 8"
    ));
    wait_for("the state ready", || (state(machine) == "ready").then_some(()));
    let said = machine.messages(&cursor);
    let is_counted = machine.property(SERVICE, "MemoryCurrent").parse::<u64>().is_ok();
    let restarts = machine.property(SERVICE, "NRestarts");
    assert!(!is_counted || restarts != "0", "{said:#?}");
    wait_for("the client, which is listed", || clients(machine).contains("cuda-client").then_some(()));
    assert_eq!(Running::now(machine), running);
    machine.sh(&format!("{ON_HOST} eval \"$(yunion-mpsctl env 00:06.0-2)\"; cuda-client props"));
    machine.sh("gpasswd --delete nobody yunion-mps; systemctl reload dbus");
}

fn watchdog(machine: &mut Machine) {
    // A core dump of a debug build would fill the machine's memory, so core dumps are switched off.
    let running = Running::start(machine, "WatchdogSec=8\nRestartSec=100ms\nLimitCORE=0");
    let (cursor, main) = (machine.cursor(), machine.property(SERVICE, "MainPID"));
    machine.sh(&format!("kill -STOP {main}"));
    running.unharmed(machine, &main, &cursor);
    let messages = machine.messages(&cursor);
    assert!(messages.iter().any(|message| message.contains("Watchdog timeout")), "{messages:#?}");
}

/// Tests the service without pidfds, as on Linux before 5.3. Some distributions still have an older kernel, but a systemd and a
/// C library that are new enough for the service.
fn old_kernel(machine: &mut Machine) {
    let pidfds = |machine: &Machine| {
        let main = machine.property(SERVICE, "MainPID");
        machine.sh(&format!("ls -l /proc/{main}/fd 2>/dev/null || :")).matches("pidfd").count()
    };
    serving(machine);
    assert_ne!(pidfds(machine), 0);
    let filter = "SystemCallFilter=~pidfd_open:ENOSYS pidfd_send_signal:ENOSYS";
    let running = Running::start(machine, &format!("RestartSec=100ms\n{filter}"));
    assert_eq!(pidfds(machine), 0);
    let (cursor, main) = (machine.cursor(), machine.property(SERVICE, "MainPID"));
    machine.sh(&format!("kill -KILL {main}"));
    running.unharmed(machine, &main, &cursor);

    machine.sh("yunion-mpsctl terminate --device 00:06.0-1");
    wait_for("the client's end", || (machine.property(CLIENT, "ActiveState") != "active").then_some(()));
    // Even without pidfds, the service notices the end of a control daemon that it has taken over.
    machine.sh(&format!("kill -KILL {}", running.control_daemon));
    wait_for("another control daemon", || {
        let others = control_daemons(machine);
        (state(machine) == "ready" && others.len() == 1 && others[0] != running.control_daemon).then_some(())
    });
    machine.sh(&format!("systemctl stop {SERVICE}"));
    assert_eq!(control_daemons(machine), Vec::<String>::new());
    assert_eq!(compute_mode(machine), "Default");
}

fn cdi(machine: &mut Machine) {
    const SPEC: &str = "/var/run/cdi/yunion.io-mps.json";
    serving(machine);
    machine.sh(&format!(
        "echo 'cuda_mps_cdi_directory: /var/run/cdi' >>{HOST_CONF}; systemctl reload {SERVICE}"
    ));
    // A change of the inode number or of the time of the last change shows that the service has removed or written the CDI
    // spec.
    let identity = |machine: &Machine| text(&machine.run(&["stat", "--format=%i %Z", SPEC]).stdout);
    wait_for("the spec", || (!identity(machine).is_empty()).then_some(()));
    let before = identity(machine);
    machine.sh(&format!("systemctl restart {SERVICE}"));
    wait_for("the state ready", || (state(machine) == "ready").then_some(()));
    assert_eq!(identity(machine), before);
    machine.sh(&format!("systemctl stop {SERVICE}"));
    assert_eq!(identity(machine), before, "an engine finds the slices before the next service does");
}

fn stop(machine: &mut Machine) {
    Running::start(machine, "");
    let cursor = machine.cursor();
    machine.sh(&format!("systemctl stop {SERVICE}"));
    assert_eq!(control_daemons(machine), Vec::<String>::new());
    wait_for("the client's end", || (machine.property(CLIENT, "ActiveState") != "active").then_some(()));
    wait_for("the scope's end", || (machine.property(SCOPE, "LoadState") == "not-found").then_some(()));
    assert_eq!(compute_mode(machine), "Default");
    no_left_overs(machine, &cursor);
}

fn reboot(machine: &mut Machine) {
    Running::start(machine, "");
    machine.sh(&format!("systemctl enable --quiet {SERVICE}"));
    machine.reboot();
    wait_for("the state ready", || (state(machine) == "ready").then_some(()));
    assert_eq!(machine.property(SERVICE, "NRestarts"), "0");
    assert_eq!(control_daemons(machine).len(), 1);
    assert_eq!(compute_mode(machine), "Exclusive_Process");
    let before = machine.printed(&["journalctl", "--boot=-1", "--output=cat", &format!("--unit={SERVICE}")]);
    assert!(before.contains("restored from Exclusive_Process to Default"), "{before}");
    machine.sh(&format!("systemctl disable --quiet {SERVICE}"));
}
