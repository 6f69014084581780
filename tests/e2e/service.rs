//! Tests of the installed service on a simulated host, with the shipped unit and on the real system bus.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::Check;
use crate::machine::{Machine, Stage, text};
use crate::wait::wait_for;

pub(crate) const SERVICE: &str = "yunion-mps-daemon.service";

const BOARD: &str = "h200";
pub(crate) const UUID: &str = "GPU-168acfc9-c926-5401-354d-2910ddcd391b";
pub(crate) const DEVICES: [&str; 4] = ["00:06.0-0", "00:06.0-1", "00:06.0-2", "00:06.0-3"];

/// The directory of the simulated host, two files in it, and the shell command that makes a shell use this host.
pub(crate) const HOST: &str = "/srv/host";
pub(crate) const HOST_CONF: &str = "/srv/host/sysroot/etc/yunion/host.conf";
pub(crate) const DEVICE_FILE: &str = "/srv/host/sysroot/etc/yunion/host_container_device.yml";
pub(crate) const ON_HOST: &str =
    "export YUNION_MPS_SIM=/srv/host PATH=/srv/host/bin:$PATH LD_LIBRARY_PATH=/srv/host/lib;";

pub(crate) const CHECKS: &[Check] = &[
    ("systemd_analyze_verify_is_clean", verified),
    ("it_starts_and_is_active", starts),
    ("systemctl_status_shows_the_status_text", status_text),
    ("the_bus_answers_root", bus_root),
    ("the_bus_answers_members_of_the_group_but_refuses_control", bus_member),
    ("a_pod_with_the_hosts_pids_finds_the_bus_behind_pid_1", bus_from_a_pod),
    ("a_kubelet_that_is_ordered_behind_it_finds_the_compute_mode", before_a_kubelet),
    ("the_journal_has_fields_and_no_colours", journal_fields),
    ("root_binds_the_control_group_of_its_command", root_binds),
    ("journalctl_x_explains_that_a_control_daemon_was_killed", explained),
    ("systemctl_reload_takes_over_a_new_configuration", reload),
    ("systemctl_reload_with_a_bad_configuration_changes_nothing", bad_reload),
    ("a_bad_configuration_fails_once_with_the_reason_in_the_journal", bad_configuration),
    ("enable_cuda_mps_false_is_active_and_disabled", disabled),
    ("a_pipe_directory_outside_the_sandbox_is_named_with_the_remedy", outside_the_sandbox),
    ("the_sandbox_lets_nvidias_devices_through_and_no_others", sandboxed_devices),
    ("the_services_limits_spare_control_daemons_and_the_oom_killer_takes_them_last", limits_spare),
    ("the_timer_of_the_metrics_writes_what_node_exporter_serves", textfile),
    ("systemctl_stop_ends_the_control_daemon_and_restores_the_compute_mode", stop),
    ("the_watchdog_restarts_a_stuck_process", watchdog),
    ("an_enabled_unit_comes_up_at_boot", boot),
];

fn built(name: &str) -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_yunion-mps-daemon")).with_file_name(name)
}

/// The machine gets the programs of a simulated host, and no file of the service.
pub(crate) fn simulated() -> Stage {
    let stage = Stage::new();
    for program in
        ["yunion-mps-sim", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-smi", "cuda-client"]
    {
        stage.install(&built(program), &format!("/usr/lib/simulated/{program}"));
    }
    // `cargo test` alone writes the library only into deps/. If the library is in both directories, the file in deps/ is at
    // least as new.
    let libraries = [built("deps/libnvidia_ml.so"), built("libnvidia_ml.so")];
    let library = libraries.iter().find(|library| library.exists()).unwrap_or(&libraries[1]);
    stage.install(library, "/usr/lib/simulated/libnvidia_ml.so");
    stage
}

/// Writes a drop-in that makes the service use the simulated host. The machine is a container, in which /sys can't be written.
/// So all files of the simulated host are below `HOST`.
pub(crate) fn on_the_simulated_host(machine: &Machine) {
    machine.write(
        &format!("/etc/systemd/system/{SERVICE}.d/simulated.conf"),
        &format!(
            "[Service]\nExecStart=\nExecStart=/usr/bin/yunion-mps-daemon --sysroot {HOST}/sysroot\n\
             Environment=YUNION_MPS_SIM={HOST} LD_LIBRARY_PATH={HOST}/lib PATH={HOST}/bin:/usr/bin:/bin\n\
             ReadWritePaths={HOST}\n"
        ),
    );
    machine.sh("systemctl daemon-reload");
}

/// Makes a new simulated host, on which no service and no control daemon runs.
pub(crate) fn new_host(machine: &Machine) {
    machine.sh(&format!(
        "systemctl kill --signal=CONT {SERVICE} 2>/dev/null || :; systemctl stop {SERVICE} || :"
    ));
    // Control daemons of an earlier check may still run.
    for pid in control_daemons(machine) {
        machine.sh(&format!("kill -KILL {pid} 2>/dev/null || :"));
    }
    machine.sh(&format!(
        "rm -rf {HOST} /etc/systemd/system/{SERVICE}.d/test.conf; \
         /usr/lib/simulated/yunion-mps-sim create {BOARD} {HOST} >/dev/null; systemctl daemon-reload"
    ));
}

pub(crate) fn serving(machine: &Machine) {
    new_host(machine);
    machine.sh(&format!("systemctl reset-failed {SERVICE} 2>/dev/null || :; systemctl start {SERVICE}"));
    wait_for("the state ready", || (state(machine) == "ready").then_some(()));
}

/// Writes a drop-in of the unit, as `systemctl edit` does. The next [`serving`] removes it.
pub(crate) fn drop_in(machine: &Machine, lines: &str) {
    machine.write(&format!("/etc/systemd/system/{SERVICE}.d/test.conf"), &format!("[Service]\n{lines}\n"));
    machine.sh("systemctl daemon-reload");
}

/// Returns the state that the service publishes on the bus, or an empty text while the service is not on the bus.
pub(crate) fn state(machine: &Machine) -> String {
    let property = [
        "busctl",
        "get-property",
        "--json=short",
        "io.yunion.Mps1",
        "/io/yunion/Mps1/Manager",
        "io.yunion.Mps1.Manager",
        "State",
    ];
    let answer: Value = serde_json::from_slice(&machine.run(&property).stdout).unwrap_or_default();
    answer["data"].as_str().unwrap_or_default().to_owned()
}

const CALL: [&str; 5] = ["busctl", "call", "--json=short", "io.yunion.Mps1", "/io/yunion/Mps1/Manager"];

pub(crate) fn devices(machine: &Machine) -> Vec<String> {
    let call: Vec<&str> = CALL.into_iter().chain(["io.yunion.Mps1.Manager", "ListDevices"]).collect();
    names(&machine.printed(&call))
}

fn names(answer: &str) -> Vec<String> {
    let answer: Value = serde_json::from_str(answer).unwrap();
    let address = |device: &Value| device["addr"]["data"].as_str().unwrap().to_owned();
    answer["data"][0].as_array().unwrap().iter().map(address).collect()
}

pub(crate) fn compute_mode(machine: &Machine) -> String {
    let query = "nvidia-smi --query-gpu=compute_mode --format=csv,noheader";
    machine.sh(&format!("{ON_HOST} {query}")).trim_end().to_owned()
}

/// Returns the PIDs of the running control daemons. A front end is the same program without an argument, so only processes with
/// an argument count.
pub(crate) fn control_daemons(machine: &Machine) -> Vec<String> {
    let processes = machine.printed(&["ps", "-e", "--no-headers", "--format=pid,args"]);
    let control = processes.lines().filter_map(|line| {
        let mut words = line.split_ascii_whitespace();
        let (pid, program, argument) = (words.next()?, words.next()?, words.next()?);
        let is_it =
            program.rsplit('/').next() == Some("nvidia-cuda-mps-control") && argument.starts_with('-');
        is_it.then(|| pid.to_owned())
    });
    control.collect()
}

fn ours(machine: &Machine, cursor: &str) -> Vec<Value> {
    machine.journal(cursor).into_iter().filter(|entry| entry["_SYSTEMD_UNIT"] == SERVICE).collect()
}

fn message(entry: &Value) -> &str {
    entry["MESSAGE"].as_str().unwrap_or_else(|| panic!("not a text: {entry}"))
}

fn nobody<'a>(command: &[&'a str]) -> Vec<&'a str> {
    let switch = ["setpriv", "--reuid=65534", "--regid=65534", "--init-groups"];
    switch.into_iter().chain(command.iter().copied()).collect()
}

/// Checks the steps of docs/metrics.md: the shipped unit in its sandbox writes metrics into Debian's directory, and Debian's
/// `node_exporter` reads them.
fn textfile(machine: &mut Machine) {
    const DIRECTORY: &str = "/var/lib/prometheus/node-exporter";
    const UNIT: &str = "/etc/systemd/system/yunion-mps-metrics";
    let is = |what: &str| {
        text(&machine.run(&["systemctl", what, "yunion-mps-metrics.timer"]).stdout).trim_end().to_owned()
    };
    serving(machine);
    assert_eq!((is("is-enabled").as_str(), is("is-active").as_str()), ("disabled", "inactive"));
    machine.sh(&format!("mkdir -p {DIRECTORY}"));
    // The shipped timer runs every half minute, which is too slow for a test.
    let often = "[Timer]\nOnBootSec=\nOnBootSec=1\nOnUnitActiveSec=1\nAccuracySec=100ms\n";
    machine.write(&format!("{UNIT}.timer.d/test.conf"), often);
    machine.write(&format!("{UNIT}.service.d/test.conf"), "[Service]\nEnvironment=OPTIONS=--clients\n");
    let cursor = machine.cursor();
    machine.sh("systemctl daemon-reload; systemctl enable --now yunion-mps-metrics.timer");
    let file = format!("{DIRECTORY}/yunion-mps.prom");
    let says = |line: &str| machine.run(&["grep", "-qx", line, &file]).status.success().then_some(());
    wait_for("the metrics", || says("yunion_mps_clients_left_out 0"));
    assert_eq!(machine.printed(&["stat", "--format=%U %a", &file]), "root 644\n");

    if machine.run(&["test", "-x", "/usr/bin/prometheus-node-exporter"]).status.success() {
        machine.sh(&format!(
            "systemd-run --quiet --unit=exporter --property=User=nobody prometheus-node-exporter \
             --web.listen-address=127.0.0.1:9100 --collector.disable-defaults --collector.textfile \
             --collector.textfile.directory={DIRECTORY}"
        ));
        let fetch = "import urllib.request; \
                     print(urllib.request.urlopen('http://127.0.0.1:9100/metrics').read().decode())";
        let served = wait_for("node_exporter", || {
            let answer = machine.run(&["/usr/bin/python3", "-c", fetch]);
            answer.status.success().then(|| text(&answer.stdout))
        });
        for line in [
            "yunion_mps_up 1",
            "# TYPE yunion_mps_faults_total counter",
            "# TYPE yunion_mps_gpu_memory_bytes gauge",
            "# HELP yunion_mps_up Whether yunion-mps-daemon runs.",
            "node_textfile_scrape_error 0",
        ] {
            assert!(served.lines().any(|found| found == line), "{line} in\n{served}");
        }
        assert!(served.contains(&format!("node_textfile_mtime_seconds{{file=\"{file}\"}}")), "{served}");
        machine.sh("systemctl stop exporter");
    } else {
        crate::skip::skip("node_exporter serves the metrics", "this machine has no prometheus-node-exporter");
    }

    // While the service is stopped, the timer runs on, and its runs write no message to the journal.
    machine.sh(&format!("systemctl stop {SERVICE}"));
    wait_for("the end of the service in the metrics", || says("yunion_mps_up 0"));
    let runs = machine.journal(&cursor);
    let runs = runs.iter().filter(|entry| {
        [&entry["UNIT"], &entry["_SYSTEMD_UNIT"]].iter().any(|unit| **unit == "yunion-mps-metrics.service")
    });
    assert_eq!(runs.map(message).collect::<Vec<_>>(), [""; 0]);
    machine.sh("systemctl disable --now yunion-mps-metrics.timer");

    let page = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md")).unwrap();
    let lines = page.lines().filter_map(|line| line.strip_prefix("    "));
    let lines: Vec<&str> = lines.skip_while(|line| *line != "[Service]").take(3).collect();
    assert!(lines[2].starts_with("ReadWritePaths="), "{lines:?}");
    machine.write(&format!("{UNIT}.service.d/test.conf"), &(lines.join("\n") + "\n"));
    machine.sh("mkdir /srv/textfile; systemctl daemon-reload; systemctl start yunion-mps-metrics.service; \
         grep -qx 'yunion_mps_up 0' /srv/textfile/yunion-mps.prom; rm -r /srv/textfile");

    machine.write(&format!("{UNIT}.service.d/test.conf"), "[Service]\nEnvironment=DIRECTORY=/srv/none\n");
    machine.sh("systemctl daemon-reload");
    machine.complained(&["systemctl", "start", "yunion-mps-metrics.service"]);
    let said = machine.messages(&cursor);
    let why = "yunion-mpsctl: can't write /srv/none/yunion-mps.prom: No such file or directory (os error 2)";
    assert!(said.iter().any(|message| message == why), "{said:#?}");
    machine.sh(&format!(
        "rm -r {UNIT}.timer.d {UNIT}.service.d {file}; systemctl daemon-reload; \
         systemctl reset-failed yunion-mps-metrics.service"
    ));
}

fn limits_spare(machine: &mut Machine) {
    let oom = |pid: &str| machine.sh(&format!("cat /proc/{pid}/oom_score_adj")).trim().to_owned();
    let memory = |unit: &str| {
        machine.printed(&["systemctl", "show", "--value", "--property=MemoryMax", unit]).trim().to_owned()
    };
    let only = || match control_daemons(machine).as_slice() {
        [pid] => pid.clone(),
        others => panic!("not one control daemon: {others:?}"),
    };
    serving(machine);
    let main = machine.printed(&["systemctl", "show", "--value", "--property=MainPID", SERVICE]);
    let set = machine.printed(&["systemctl", "show", "--value", "--property=OOMScoreAdjust", SERVICE]);
    assert_eq!(set.trim(), "-900");
    // Without CAP_SYS_RESOURCE, as in many containers, systemd can't lower the OOM score of a service. systemd does not report
    // this failure.
    let try_it =
        "systemd-run --quiet --pipe --wait --property=OOMScoreAdjust=-900 cat /proc/self/oom_score_adj";
    let possible = machine.sh(try_it);
    if possible.trim() != "-900" {
        crate::skip::skip("control daemons go last", "this machine can't lower an oom_score_adj");
    }
    assert_eq!((oom(main.trim()).as_str(), oom(&only()).as_str()), ("0", possible.trim()));
    // The service must be able to write to /sys/fs/cgroup, since it thaws clients with a frozen control group.
    machine.sh(&format!("nsenter --mount --target {} test -w /sys/fs/cgroup", main.trim()));
    assert_eq!(memory(SERVICE), (2u64 << 30).to_string());
    assert_eq!(memory("yunion-mps-control-shared.scope"), "infinity");

    // Another program's scope already has the name of the control daemon's scope. The control daemon therefore stays in the
    // service's control group, and the service removes the memory limit of this control group.
    new_host(machine);
    let namesake = "yunion-mps-control-shared.scope";
    machine.sh(&format!(
        "systemd-run --quiet --scope --unit={namesake} sleep 600 </dev/null >/dev/null 2>&1 & \
         until systemctl --quiet is-active {namesake}; do sleep 0.05; done; systemctl start {SERVICE}"
    ));
    wait_for("the state ready", || (state(machine) == "ready").then_some(()));
    assert!(machine.sh(&format!("cat /proc/{}/cgroup", only())).contains(SERVICE));
    assert_eq!(memory(SERVICE), "infinity");
    new_host(machine);
    machine.sh(&format!("systemctl stop {namesake}; systemctl revert {SERVICE}; systemctl daemon-reload"));
    on_the_simulated_host(machine);
}

fn verified(machine: &mut Machine) {
    let unit = format!("/usr/lib/systemd/system/{SERVICE}");
    let output = machine.run(&["systemd-analyze", "verify", &unit]);
    // systemd-analyze also checks the host's units that the service's unit names. Complaints about them do not count.
    let complaints = text(&output.stderr);
    let about_ours: Vec<&str> = complaints.lines().filter(|line| line.contains(SERVICE)).collect();
    assert_eq!(about_ours, Vec::<&str>::new());
}

fn starts(machine: &mut Machine) {
    serving(machine);
    for (property, value) in [
        ("ActiveState", "active"),
        ("SubState", "running"),
        ("Result", "success"),
        ("NRestarts", "0"),
        ("Type", "notify"),
        ("KillMode", "process"),
    ] {
        assert_eq!(machine.property(SERVICE, property), value, "{property}");
    }
    assert_eq!(control_daemons(machine).len(), 1);
    assert_eq!(compute_mode(machine), "Exclusive_Process");
    assert_eq!(devices(machine), DEVICES);
    let client = machine.sh(&format!("{ON_HOST} eval \"$(yunion-mpsctl env 00:06.0-1)\"; cuda-client props"));
    assert!(client.contains("NVIDIA H200"), "{client}");
}

fn status_text(machine: &mut Machine) {
    serving(machine);
    let status = machine.printed(&["systemctl", "status", SERVICE]);
    assert!(status.contains("Active: active (running)"), "{status}");
    assert!(status.contains("Status: \"ready: 4 slices on 1 of 1 GPUs\""), "{status}");
}

fn bus_root(machine: &mut Machine) {
    serving(machine);
    assert_eq!(devices(machine), DEVICES);
    let reload: Vec<&str> = CALL.into_iter().chain(["io.yunion.Mps1.Control", "Reload"]).collect();
    let generation: Value = serde_json::from_str(&machine.printed(&reload)).unwrap();
    assert!(generation["data"][0].as_u64().unwrap() >= 1, "{generation}");
}

fn bus_member(machine: &mut Machine) {
    serving(machine);
    let list: Vec<&str> = CALL.into_iter().chain(["io.yunion.Mps1.Manager", "ListDevices"]).collect();
    machine.complained(&nobody(&list));
    let refusal = machine.complained(&nobody(&["yunion-mpsctl", "list"]));
    let (_, join) = refusal.split_once('`').unwrap_or_else(|| panic!("{refusal}"));
    let join = join.split_once('`').unwrap().0.trim_start_matches("sudo ");
    machine.sh(&format!("USER=nobody; {join}"));
    let table = machine.printed(&nobody(&["yunion-mpsctl", "list"]));
    assert_eq!(names(&machine.printed(&nobody(&list))), DEVICES);
    assert!(table.contains("00:06.0-3"), "{table}");
    let reload: Vec<&str> = CALL.into_iter().chain(["io.yunion.Mps1.Control", "Reload"]).collect();
    let refusal = machine.complained(&nobody(&reload));
    assert!(refusal.contains("Access denied") || refusal.contains("AccessDenied"), "{refusal}");
    let owner =
        nobody(&["busctl", "call", "org.freedesktop.DBus", "/", "org.freedesktop.DBus", "RequestName", "su"]);
    let owner: Vec<&str> = owner.into_iter().chain(["io.yunion.Mps1", "0"]).collect();
    machine.complained(&owner);
    machine.sh("gpasswd --delete nobody yunion-mps; systemctl reload dbus");
}

/// Calls the service as a program in a pod would: as root with the host's PIDs, in a mount namespace without /run/dbus.
fn bus_from_a_pod(machine: &mut Machine) {
    serving(machine);
    let pod = "unshare --mount sh -euc 'mount -t tmpfs tmpfs /run; [ ! -e /var/run/dbus ]; exec \"$@\"' sh";
    let call = CALL.map(|word| if word == "busctl" { "busctl --address=$BUS" } else { word }).join(" ");
    let bus = "unix:path=/proc/1/root/run/dbus/system_bus_socket";
    let answer = machine.sh(&format!("BUS={bus}; {pod} {call} io.yunion.Mps1.Manager ListDevices"));
    assert_eq!(names(&answer), DEVICES);
    // The bus lets root call `ReleaseContainer`. The service answers without an error, although the container does not exist.
    let id = "4f1c2d3e5a6b";
    machine.sh(&format!("BUS={bus}; {pod} {call} io.yunion.Mps1.Control ReleaseContainer s {id}"));
}

/// Checks the drop-in of docs/host-agent.md: the service is ready before a kubelet starts and reads the compute mode.
fn before_a_kubelet(machine: &mut Machine) {
    let page = include_str!("../../docs/host-agent.md");
    let order = page.lines().map(str::trim).find(|line| line.starts_with("Before=")).unwrap();
    assert_eq!(order, "Before=kubelet.service k3s.service k3s-agent.service");
    let drop_in = format!("/etc/systemd/system/{SERVICE}.d/kubelet.conf");
    machine.write(&drop_in, &format!("[Unit]\n{order}\n"));
    let look = "nvidia-smi --query-gpu=compute_mode --format=csv,noheader >/srv/seen";
    machine.write(
        "/etc/systemd/system/kubelet.service",
        &format!("[Service]\nType=oneshot\nExecStart=/bin/sh -euc '{ON_HOST} {look}'\n"),
    );
    // One systemd transaction starts both units, as at boot.
    machine.write("/etc/systemd/system/both.target", &format!("[Unit]\nWants=kubelet.service {SERVICE}\n"));
    new_host(machine);
    assert_eq!(compute_mode(machine), "Default");
    machine.sh("systemctl start both.target");
    assert_eq!(machine.sh("cat /srv/seen").trim(), "Exclusive_Process");
    machine.sh(&format!(
        "cd /etc/systemd/system; rm {drop_in} kubelet.service both.target /srv/seen; systemctl daemon-reload"
    ));
}

fn journal_fields(machine: &mut Machine) {
    let cursor = machine.cursor();
    serving(machine);
    let entries = ours(machine, &cursor);
    let with = |field: &str, value: &str| entries.iter().filter(|entry| entry[field] == value).count();
    assert!(with("MPS_CONTROL", "shared") > 0, "{entries:#?}");
    assert!(with("GPU_UUID", UUID) > 0, "{entries:#?}");
    assert!(with("SYSLOG_IDENTIFIER", "yunion-mps-daemon") > 0, "{entries:#?}");
    for entry in &entries {
        assert!(!message(entry).contains('\u{1b}'), "{entry}");
        assert!(["3", "4", "5", "6"].contains(&entry["PRIORITY"].as_str().unwrap()), "{entry}");
    }
}

fn explained(machine: &mut Machine) {
    serving(machine);
    let cursor = machine.cursor();
    let killed = control_daemons(machine);
    assert_eq!(killed.len(), 1, "{killed:?}");
    machine.sh(&format!("kill -KILL {}", killed[0]));
    // Alerts find the message by this message id, which docs/journal.md documents.
    let entry_of = |kind: &str| {
        let of_kind = |entry: &Value| entry["MESSAGE_ID"] == kind;
        wait_for("the message of its kind", || ours(machine, &cursor).into_iter().find(of_kind))
    };
    let entry = entry_of("f7779102edd04208a50ce6a74cd46996");
    assert!(message(&entry).starts_with("the control daemon ended"), "{entry}");
    assert_eq!((&entry["PRIORITY"], &entry["MPS_CONTROL"]), (&"4".into(), &"shared".into()), "{entry}");
    let ready = entry_of("c026232c7047440a84b6f9e477130c55");
    assert!(message(&ready).starts_with("ready"), "{ready}");
    let after = format!("--after-cursor={cursor}");
    let shown =
        machine.printed(&["journalctl", "--quiet", "--catalog", &after, &format!("--unit={SERVICE}")]);
    for words in
        ["Subject: A control daemon has failed", "Control daemon: shared", "Subject: The GPUs are served"]
    {
        assert!(shown.contains(words), "no {words} in {shown}");
    }
    // The catalog also explains the message in Chinese, for users with a Chinese locale.
    machine.sh("grep -q 一个控制守护进程失败 /var/lib/systemd/catalog/database");
}

/// In a login session, `yunion-mpsctl run` makes a scope and binds it to the slice. In a unit, the command binds the unit,
/// unless the unit has other processes.
fn root_binds(machine: &mut Machine) {
    serving(machine);
    let clients = |number: usize| {
        wait_for("the clients", || {
            let clients: Vec<Value> =
                serde_json::from_str(&machine.printed(&["yunion-mpsctl", "clients", "--json"])).unwrap();
            (clients.len() == number).then_some(clients)
        })
    };
    let run = "yunion-mpsctl run 00:06.0-1 -- cuda-client hold 600";
    let session = "systemd-run --quiet --scope --unit=session-$$.scope";
    let terminal = "/sys/fs/cgroup/user.slice/user@77.service/terminal.scope";
    let in_terminal = format!("mkdir -p {terminal}; echo $$ >{terminal}/cgroup.procs; {run}; :");
    let unit = "systemd-run --quiet --collect --unit=job --setenv=YUNION_MPS_SIM --setenv=PATH --setenv=LD_LIBRARY_PATH";
    for (start, group, known_by, label) in [
        (format!("{session} {run}"), "/yunion-mps-run-", "bound", "cuda-client (PID "),
        (format!("sh -c '{in_terminal}'"), "/yunion-mps-run-", "bound", "cuda-client (PID "),
        (format!("{unit} {run}"), "/job.service", "bound", "cuda-client (PID "),
        (format!("{unit} sh -c 'sleep 600 & {run}; wait'"), "/job.service", "environment", ""),
    ] {
        let script = format!("{ON_HOST} {start} >/dev/null 2>&1 &");
        machine.sh(&script);
        let client = &clients(1)[0];
        let pid = client["pid"].to_string();
        assert!(machine.sh(&format!("cat /proc/{pid}/cgroup")).contains(group), "{script}");
        assert_eq!(
            (&client["device"], &client["known_by"]),
            (&"00:06.0-1".into(), &known_by.into()),
            "{script}"
        );
        assert!(client["label"].as_str().unwrap_or_default().starts_with(label), "{script}: {client}");
        let other = format!("{ON_HOST} {session} yunion-mpsctl run 00:06.0-1");
        if known_by == "bound" {
            let complaint = machine.complained(&["sh", "-c", &format!("{other} -- cuda-client props")]);
            assert!(complaint.contains("00:06.0-1 is taken by cuda-client (PID "), "{complaint}");
        }
        machine.sh(&format!("{other} --share -- cuda-client props"));
        machine.sh(&format!("kill $(cat /proc/{pid}/stat | cut -d' ' -f4)"));
        clients(0);
        machine.sh("systemctl stop job 2>/dev/null || :");
        wait_for("no binding", || {
            (!machine.printed(&["yunion-mpsctl", "list", "--json"]).contains("cuda-client (PID"))
                .then_some(())
        });
    }
}

fn reload(machine: &mut Machine) {
    serving(machine);
    let main = machine.property(SERVICE, "MainPID");
    machine.sh(&format!(
        "sed -i 's/virtual_number: 4/virtual_number: 2/' {DEVICE_FILE}; systemctl reload {SERVICE}"
    ));
    // `systemctl reload` returns when the new configuration is in force.
    assert_eq!(devices(machine), DEVICES[..2]);
    assert_eq!(machine.property(SERVICE, "ActiveState"), "active");
    assert_eq!(machine.property(SERVICE, "MainPID"), main);
    assert_eq!(machine.property(SERVICE, "NRestarts"), "0");
}

fn bad_reload(machine: &mut Machine) {
    serving(machine);
    let cursor = machine.cursor();
    machine.sh(&format!("sed -i 's/virtual_number: 4/virtual_number: 0/' {DEVICE_FILE}"));
    machine.complained(&["systemctl", "reload", SERVICE]);
    let refusal = wait_for("the refusal in the journal", || {
        ours(machine, &cursor)
            .into_iter()
            .find(|entry| message(entry).contains("the new configuration was refused"))
    });
    assert!(message(&refusal).contains("host_container_device.yml"), "{refusal}");
    assert_eq!(refusal["PRIORITY"], "3");
    assert_eq!(refusal["MESSAGE_ID"], "ec90e16fdebb4b67b510bf1af0b35ff9");
    assert_eq!(machine.property(SERVICE, "ActiveState"), "active");
    assert_eq!(devices(machine), DEVICES);
    // The change to `degraded` has the priority of a warning, so `journalctl --priority=warning` shows it.
    wait_for("the state in the journal", || {
        ours(machine, &cursor).iter().find(|entry| message(entry).starts_with("degraded: ")).map(|entry| {
            let found = (&entry["PRIORITY"], &entry["MESSAGE_ID"]);
            assert_eq!(found, (&"4".into(), &"291e469758344a35a1f4b5133cc5ae6a".into()), "{entry}");
        })
    });
}

fn bad_configuration(machine: &mut Machine) {
    serving(machine);
    let cursor = machine.cursor();
    machine.sh(&format!(
        "systemctl stop {SERVICE}; sed -i 's/virtual_number: 4/virtual_number: 0/' {DEVICE_FILE}"
    ));
    machine.complained(&["systemctl", "start", SERVICE]);
    // If systemd were about to restart the service, `ActiveState` would be "activating".
    for (property, value) in
        [("ActiveState", "failed"), ("Result", "exit-code"), ("ExecMainStatus", "78"), ("NRestarts", "0")]
    {
        assert_eq!(machine.property(SERVICE, property), value, "{property}");
    }
    // Another start would fail too, so the message tells the administrator to correct the configuration first.
    assert_eq!(
        machine.complained(&["yunion-mpsctl", "list"]),
        "yunion-mpsctl: yunion-mps-daemon is not running: the service ended because the configuration is \
         wrong; run yunion-mpsctl check, then run systemctl start yunion-mps-daemon\n"
    );
    let entries = ours(machine, &cursor);
    let reasons: Vec<&str> = entries.iter().filter(|entry| entry["PRIORITY"] == "3").map(message).collect();
    assert_eq!(reasons.len(), 1, "{reasons:?}");
    assert!(
        reasons[0].contains("host_container_device.yml") && reasons[0].contains("virtual_number"),
        "{reasons:?}"
    );
}

fn disabled(machine: &mut Machine) {
    serving(machine);
    machine.sh(&format!(
        "systemctl stop {SERVICE}; sed -i 's/enable_cuda_mps: true/enable_cuda_mps: false/' {HOST_CONF}; \
         systemctl start {SERVICE}"
    ));
    assert_eq!(machine.property(SERVICE, "ActiveState"), "active");
    assert_eq!(state(machine), "disabled");
    assert_eq!(devices(machine), Vec::<String>::new());
    assert_eq!(control_daemons(machine), Vec::<String>::new());
    assert_eq!(compute_mode(machine), "Default");
}

fn outside_the_sandbox(machine: &mut Machine) {
    serving(machine);
    let reason = || machine.sh("yunion-mpsctl status --json | sed -n 's/.*\"state_reason\": //p'");
    machine.sh(&format!(
        "sed -i 's|^cuda_mps_pipe_directory:.*|cuda_mps_pipe_directory: /opt/pipe|' {HOST_CONF}"
    ));
    machine.sh(&format!("systemctl stop {SERVICE}; systemctl start {SERVICE}"));
    wait_for("the reason", || reason().contains("/opt/pipe: can't be made: the file system").then_some(()));
    assert!(reason().contains("ReadWritePaths=/opt (systemctl edit yunion-mps-daemon)"), "{}", reason());
    assert_eq!(control_daemons(machine), Vec::<String>::new());
    // If the pipe directory already exists, the service checks that it can write there before it uses the directory.
    machine.sh(&format!("mkdir /opt/pipe; systemctl restart {SERVICE}"));
    wait_for("the reason", || reason().contains("/opt/pipe: can't be written").then_some(()));
    // The reason proposes this drop-in. With it, the service becomes ready.
    drop_in(machine, "ReadWritePaths=/opt");
    machine.sh(&format!("systemctl restart {SERVICE}"));
    wait_for("the state ready", || (state(machine) == "ready").then_some(()));
    machine.sh(&format!("systemctl stop {SERVICE}; rm -r /opt/pipe"));
}

/// A device node without a driver can't be opened. The error shows whether the sandbox or the missing driver is the cause.
fn sandboxed_devices(machine: &mut Machine) {
    serving(machine);
    machine.sh("cd /srv; mknod nvidia0 c 195 0; mknod other c 60 0; chmod 666 nvidia0 other");
    let open = "for node in nvidia0 other; do cat /srv/$$node; done >/run/opened 2>&1; :";
    drop_in(machine, &format!("ExecStartPre=/bin/sh -c '{open}'"));
    machine.sh(&format!("systemctl restart {SERVICE}"));
    let opened = machine.sh("cat /run/opened; rm /srv/nvidia0 /srv/other");
    let lines: Vec<&str> = opened.lines().collect();
    assert_eq!(lines.len(), 2, "{opened}");
    assert!(lines[0].contains("nvidia0") && lines[0].ends_with("No such device or address"), "{opened}");
    assert!(lines[1].contains("other") && lines[1].ends_with("Operation not permitted"), "{opened}");
}

fn stop(machine: &mut Machine) {
    serving(machine);
    let cursor = machine.cursor();
    machine.sh(&format!("systemctl stop {SERVICE}"));
    for (property, value) in [("ActiveState", "inactive"), ("Result", "success"), ("ExecMainStatus", "0")] {
        assert_eq!(machine.property(SERVICE, property), value, "{property}");
    }
    assert_eq!(control_daemons(machine), Vec::<String>::new());
    assert_eq!(compute_mode(machine), "Default");
    assert_eq!(state(machine), "");
    no_left_overs(machine, &cursor);
}

fn watchdog(machine: &mut Machine) {
    serving(machine);
    // A core dump of a debug build would fill the machine's memory, so core dumps are switched off.
    drop_in(machine, "WatchdogSec=8\nRestartSec=100ms\nLimitCORE=0");
    machine.sh(&format!("systemctl restart {SERVICE}"));
    assert_eq!(machine.property(SERVICE, "WatchdogUSec"), "8s");
    let cursor = machine.cursor();
    let main = machine.property(SERVICE, "MainPID");
    machine.sh(&format!("kill -STOP {main}"));
    wait_for("a restart", || {
        let (restarts, state) =
            (machine.property(SERVICE, "NRestarts"), machine.property(SERVICE, "ActiveState"));
        (restarts != "0" && state == "active").then_some(())
    });
    assert_ne!(machine.property(SERVICE, "MainPID"), main);
    let messages = machine.messages(&cursor);
    assert!(messages.iter().any(|message| message.contains("Watchdog timeout")), "{messages:#?}");
}

fn boot(machine: &mut Machine) {
    serving(machine);
    machine.sh(&format!("systemctl enable --quiet {SERVICE}"));
    machine.reboot();
    wait_for("the state ready", || (state(machine) == "ready").then_some(()));
    assert_eq!(machine.property(SERVICE, "NRestarts"), "0");
    assert_eq!(compute_mode(machine), "Exclusive_Process");
    let before = machine.printed(&["journalctl", "--boot=-1", "--output=cat", &format!("--unit={SERVICE}")]);
    // At the reboot, systemd stopped the service before the programs that the service needs. So the service could still restore
    // the compute mode.
    assert!(before.contains("restored from Exclusive_Process to Default"), "{before}");
    machine.sh(&format!("systemctl disable --quiet {SERVICE}"));
}

/// Fails if systemd has reported unexpected processes in the service's control group.
pub(crate) fn no_left_overs(machine: &Machine, cursor: &str) {
    for message in machine.messages(cursor) {
        for complaint in ["left-over process", "remains running after unit stopped"] {
            assert!(!message.contains(complaint), "{message}");
        }
    }
}
