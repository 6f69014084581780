//! Tests the questions that the service asks a real systemd: for scopes, and for the reason of a SIGTERM.

use crate::machine::{Machine, Stage};
use crate::service::no_left_overs;
use crate::wait::wait_for;
use crate::{Check, asker};

const SERVICE: &str = "asker.service";
const SCOPE: &str = "yunion-mps-control-shared.scope";

pub(crate) const CHECKS: &[Check] = &[
    ("a_process_moves_to_a_scope_that_outlives_us", outlives),
    ("stop_restart_and_kill_are_told_apart", reasons),
    ("a_namesake_that_goes_away_is_waited_for", namesake),
    ("a_namesake_that_stays_is_an_error", namesake_stays),
    ("any_id_makes_a_name", odd_id),
    ("systemctl_stop_of_the_scope_ends_it_alone", scope_stopped),
    ("a_program_that_is_no_service_is_told_so", no_service),
    ("at_shutdown_we_stop_first", shutdown),
];

/// The checks that also run with control groups of version 1. In a container, systemd then does not notice that a scope is
/// empty. So no check in this list needs an empty scope.
pub(crate) const CHECKS_LEGACY: &[Check] = &[
    ("a_process_moves_to_a_scope_that_outlives_us", outlives),
    ("stop_restart_and_kill_are_told_apart", reasons),
    ("a_program_that_is_no_service_is_told_so", no_service),
];

pub(crate) fn stage() -> Stage {
    let stage = Stage::new();
    stage.install(&std::env::current_exe().unwrap(), "/usr/lib/yunion-mps-e2e");
    stage.write(
        &format!("/etc/systemd/system/{SERVICE}"),
        &format!(
            "[Unit]\nDescription=Asks systemd\nWants=dbus.service\nAfter=dbus.service\n\
             StartLimitIntervalSec=0\n[Service]\nType=notify\n\
             ExecStart=/usr/lib/yunion-mps-e2e {}\nKillMode=process\n[Install]\nWantedBy=multi-user.target\n",
            asker::ARGUMENT
        ),
    );
    stage
}

/// Removes the files of earlier checks, and restarts the small service of `asker.rs`. The small service then asks systemd for
/// the scope with the id `id`.
fn start(machine: &Machine, id: &str) {
    machine.sh(&format!(
        "systemctl stop {SERVICE}; systemctl stop 'yunion-mps-control-*.scope'; rm -f /var/order; \
         echo '{id}' >/run/asker; systemctl start {SERVICE}; rm /run/asker"
    ));
}

fn said(machine: &Machine, cursor: &str) -> Vec<String> {
    let ours = machine.journal(cursor).into_iter().filter(|entry| entry["_SYSTEMD_UNIT"] == SERVICE);
    ours.map(|entry| entry["MESSAGE"].as_str().unwrap().to_owned()).collect()
}

fn processes(machine: &Machine, unit: &str) -> Vec<String> {
    let group = machine.property(unit, "ControlGroup");
    let script = format!(
        "for hierarchy in /sys/fs/cgroup /sys/fs/cgroup/systemd; do \
         [ ! -e $hierarchy{group}/cgroup.procs ] || cat $hierarchy{group}/cgroup.procs; done"
    );
    machine.sh(&script).lines().map(str::to_owned).collect()
}

fn held(machine: &Machine) -> String {
    // A child of the shell has the shell's name until it executes its program.
    wait_for("one shell", || {
        let group = processes(machine, SCOPE);
        let is_shell = |pid: &String| machine.sh(&format!("cat /proc/{pid}/comm || :")) == "sh\n";
        let shells: Vec<String> = group.into_iter().filter(is_shell).collect();
        <[String; 1]>::try_from(shells).ok().map(|[shell]| shell)
    })
}

fn outlives(machine: &mut Machine) {
    let cursor = machine.cursor();
    start(machine, "shared");
    let pid = held(machine);
    assert_eq!(said(machine, &cursor), [format!("scope of {pid}: Ok(\"{SCOPE}\")")]);
    // The shell may have started a `sleep` before the shell moved to the scope. This `sleep` ends in a moment.
    let main = machine.property(SERVICE, "MainPID");
    wait_for("nobody else in the service", || (processes(machine, SERVICE) == [main.clone()]).then_some(()));
    for (property, value) in [
        ("ActiveState", "active"),
        ("Before", "asker.service shutdown.target"),
        ("CollectMode", "inactive-or-failed"),
        ("KillMode", "control-group"),
        ("TimeoutStopUSec", "10s"),
        ("Slice", "system.slice"),
        ("Description", "NVIDIA MPS control daemon shared of asker.service"),
    ] {
        let found = machine.property(SCOPE, property);
        let mut words: Vec<&str> = found.split(' ').collect();
        if property == "Before" {
            words.sort_unstable();
        }
        assert_eq!(words.join(" "), value, "{property}");
    }
    if machine.systemd_version() >= 253 {
        assert_eq!(machine.property(SCOPE, "OOMPolicy"), "continue");
    }
    machine
        .sh(&format!("systemctl restart {SERVICE}; systemctl kill --signal=KILL --kill-who=main {SERVICE}"));
    wait_for("the service's end", || (machine.property(SERVICE, "ActiveState") == "failed").then_some(()));
    machine.sh(&format!("systemctl start {SERVICE}; systemctl stop {SERVICE}; systemctl daemon-reload"));
    assert_eq!(held(machine), pid);
    no_left_overs(machine, &cursor);
}

fn reasons(machine: &mut Machine) {
    start(machine, "shared");
    for (command, reason) in [
        ("restart", "Restart"),
        ("try-restart", "Restart"),
        ("reload-or-restart", "Restart"),
        ("stop", "Stop"),
        ("kill", "Unknown(\"systemd has no job that stops or restarts asker.service\")"),
    ] {
        let cursor = machine.cursor();
        machine.sh(&format!("systemctl start {SERVICE}; systemctl {command} {SERVICE}"));
        let heard = wait_for("the service's last words", || said(machine, &cursor).pop());
        assert_eq!(heard, reason, "{command}");
    }
}

fn namesake(machine: &mut Machine) {
    start(machine, "shared");
    let old = held(machine);
    let cursor = machine.cursor();
    let main = machine.property(SERVICE, "MainPID");
    // The small service waits only a limited time for the end of the old scope. So one shell command restarts the small service
    // and then ends the process in the old scope.
    let meanwhile = machine.sh(&format!(
        "echo shared >/run/asker; systemctl restart --no-block {SERVICE}; \
         until next=$(systemctl show --value --property=MainPID {SERVICE}); [ $next != 0 ] && [ $next != {main} ]; \
         do sleep 0.02; done; systemctl show --value --property=ActiveState {SERVICE}; kill -KILL {old}"
    ));
    assert_eq!(meanwhile, "activating\n");
    wait_for("the next start", || (machine.property(SERVICE, "ActiveState") == "active").then_some(()));
    let new = held(machine);
    assert_ne!(new, old);
    let said = said(machine, &cursor);
    assert_eq!(said, ["Restart".to_owned(), format!("scope of {new}: Ok(\"{SCOPE}\")")]);
}

fn namesake_stays(machine: &mut Machine) {
    start(machine, "shared");
    let old = held(machine);
    let cursor = machine.cursor();
    machine.sh(&format!("echo shared >/run/asker; systemctl restart {SERVICE}; rm /run/asker"));
    let said = said(machine, &cursor);
    assert!(said[1].contains(&format!("Err(\"systemd refuses to make {SCOPE}: ")), "{said:?}");
    assert!(said[1].contains("UnitExists"), "{said:?}");
    assert_eq!(held(machine), old);
    assert!(processes(machine, SERVICE).len() > 1);
    machine.sh(&format!("systemctl kill --signal=KILL {SERVICE}"));
}

fn odd_id(machine: &mut Machine) {
    let cursor = machine.cursor();
    start(machine, "a b@c/../ü");
    let said = said(machine, &cursor);
    let name = r"yunion-mps-control-a\x20b\x40c\x2f..\x2f\xc3\xbc.scope";
    assert!(said[0].ends_with(&format!("Ok({name:?})")), "{said:?}");
    assert_eq!(machine.property(name, "ActiveState"), "active");
}

fn scope_stopped(machine: &mut Machine) {
    start(machine, "shared");
    machine.sh(&format!("systemctl stop {SCOPE}"));
    assert_eq!(machine.sh("cat /var/order"), "held\n");
    assert_eq!(machine.property(SERVICE, "ActiveState"), "active");
    // systemd has unloaded the scope's unit, so the name can be used again.
    assert_eq!(machine.property(SCOPE, "LoadState"), "not-found");
}

fn no_service(machine: &mut Machine) {
    let answer =
        "not a service: NotUnderSystemd, Err(\"this process does not run in a service of systemd\")\n";
    let program = ["/usr/lib/yunion-mps-e2e", asker::ARGUMENT];
    assert_eq!(machine.printed(&program), answer);
    let in_scope = ["systemd-run", "--scope", "--quiet"].into_iter().chain(program);
    assert_eq!(machine.printed(&in_scope.collect::<Vec<_>>()), answer);
}

fn shutdown(machine: &mut Machine) {
    start(machine, "shared");
    machine.reboot();
    assert_eq!(machine.sh("cat /var/order"), "Stop\nheld\n");
}
