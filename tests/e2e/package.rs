//! Tests of the built packages: their installation, upgrade, removal and purge, and the effects on the host and on its clients.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Check;
use crate::adoption::Running;
use crate::machine::{Machine, Stage, text};
use crate::service::{
    DEVICE_FILE, DEVICES, HOST, HOST_CONF, ON_HOST, SERVICE, UUID, compute_mode, control_daemons, devices,
    new_host, no_left_overs, on_the_simulated_host, serving, simulated, state,
};
use crate::wait::wait_for;

pub(crate) const CHECKS: &[Check] = &[
    ("apt_get_install_enables_and_starts_nothing", install),
    ("started_without_any_configuration_it_is_disabled", unconfigured),
    ("two_files_and_enable_now_as_the_guide_says", enable),
    ("the_compute_mode_query_of_the_guide_says_exclusive_process", compute_mode_query),
    ("the_listing_of_the_guide_has_the_devices", listing),
    ("manual_pages_completions_and_interfaces_are_where_they_are_looked_for", looked_for),
    ("an_upgrade_from_the_previous_version_leaves_a_client_running", upgrade),
    ("an_upgrade_of_a_stopped_service_starts_nothing", upgrade_stopped),
    ("apt_get_remove_ends_the_control_daemon_and_restores_the_compute_mode", remove),
    ("apt_get_remove_names_the_clients_whose_work_ends", remove_with_a_client),
    ("apt_get_remove_of_a_failed_service_names_the_control_daemon_that_is_left", remove_failed),
    ("purge_leaves_nothing", purge),
    ("an_upgrade_from_the_platforms_package_leaves_its_client_running", take_over),
];

pub(crate) const RPM_CHECKS: &[Check] = &[
    ("rpm_root_has_the_files_of_the_deb", rpm_files),
    ("rpm_install_enables_and_starts_nothing", rpm_install),
    ("an_rpm_upgrade_leaves_a_client_running", rpm_upgrade),
    ("rpm_erase_ends_the_control_daemon_and_restores_the_compute_mode", rpm_erase),
    ("an_rpm_upgrade_from_the_platforms_package_leaves_its_client_running", rpm_take_over),
];

/// Returns the directory of the packages under test, the directory of their programs, and the command that makes the packages.
/// The variable `RELEASE` selects the packages of `make deb rpm`. Other packages are built only for tests.
fn packages() -> (&'static str, &'static str, &'static str) {
    if std::env::var_os("RELEASE").is_some_and(|value| !value.is_empty()) {
        ("dist", "target/packaged", "make deb rpm")
    } else {
        ("target/under-test", "target/under-test/programs", "scripts/build-under-test.sh")
    }
}

fn built(ending: &str) -> PathBuf {
    built_package("yunion-mps-daemon", ending)
}

/// Returns the only package with this name and this ending. Fails if a source file is newer than the package.
pub(crate) fn built_package(name: &str, ending: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (directory, _, command) = packages();
    let found: Vec<PathBuf> = fs::read_dir(source.join(directory))
        .into_iter()
        .flatten()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            let file = path.file_name().and_then(|file| file.to_str());
            file.is_some_and(|file| file.starts_with(name) && file.ends_with(ending))
        })
        .collect();
    let [package] = &found[..] else { panic!("not one *{ending} in {directory}: {found:?}; {command}") };
    let built = fs::metadata(package).unwrap().modified().unwrap();
    let documents = ["README.md", "README.zh-CN.md"];
    let parts = ["src", "crates", "config", "docs", "systemd", "packaging", "Cargo.toml", "Cargo.lock"];
    for part in parts.into_iter().chain(documents) {
        let newer = newer(&source.join(part), built);
        assert!(newer.is_none(), "{} is older than {newer:?}; {command}", package.display());
    }
    package.clone()
}

fn newer(path: &Path, than: std::time::SystemTime) -> Option<PathBuf> {
    if path.is_dir() {
        return fs::read_dir(path).unwrap().find_map(|entry| newer(&entry.unwrap().path(), than));
    }
    (fs::metadata(path).unwrap().modified().unwrap() > than).then(|| path.to_owned())
}

pub(crate) const DEB: &str = "/var/tmp/yunion-mps-daemon.deb";
/// `yunion-mps-metrics.timer` starts a service that writes this file.
const METRICS: &str = "/var/lib/prometheus/node-exporter/yunion-mps.prom";
const PREVIOUS_DEB: &str = "/var/tmp/previous.deb";
const PLATFORM_DEB: &str = "/var/tmp/platform.deb";
const RPM: &str = "/var/tmp/yunion-mps-daemon.rpm";
const PREVIOUS_RPM: &str = "/var/tmp/previous.rpm";
const PLATFORM_RPM: &str = "/var/tmp/platform.rpm";
const NEXT_STEP: &str =
    "yunion-mps-daemon: run 'yunion-mpsctl setup', then 'systemctl enable --now yunion-mps-daemon'.";
/// rpm uses an empty database and checks no dependencies, since only dpkg knows the packages that are installed on the machine.
const RPMS: &str = "rpm --dbpath /var/tmp/rpmdb --nodeps";

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

pub(crate) fn stage() -> Stage {
    let stage = simulated();
    stage.put(&built(".deb"), DEB);
    stage
}

/// Adds two packages to [`stage`]: an earlier version of the deb, and Cloudpods' own package `yunion-mps-daemon`, which the deb
/// replaces.
pub(crate) fn stage_upgrades() -> Stage {
    let stage = stage();
    let work = tempfile::tempdir().unwrap();
    let previous = work.path().join("previous");
    run(Command::new("dpkg-deb").arg("-R").arg(built(".deb")).arg(&previous));
    let control = previous.join("DEBIAN/control");
    let lines = fs::read_to_string(&control).unwrap();
    let lines =
        lines.lines().map(|line| if line.starts_with("Version: ") { "Version: 1:0.0.1" } else { line });
    fs::write(&control, lines.collect::<Vec<_>>().join("\n") + "\n").unwrap();
    pack(&previous, &stage, PREVIOUS_DEB);

    let platform = work.path().join("platform");
    for (path, contents, mode) in PLATFORM {
        let path = platform.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, contents).unwrap();
        run(Command::new("chmod").arg(mode).arg(&path));
    }
    pack(&platform, &stage, PLATFORM_DEB);
    stage
}

fn pack(tree: &Path, stage: &Stage, path: &str) {
    let package = tree.with_extension("deb");
    run(Command::new("dpkg-deb").args(["--root-owner-group", "-Zgzip", "-z1", "-b"]).arg(tree).arg(&package));
    stage.put(&package, path);
}

/// The own package of the platform Cloudpods, reduced to the parts that matter here. The package's version is a date. Its
/// scripts stop and disable its service even at an upgrade. A control daemon with clients outlives this stop: `quit` does not
/// return while there are clients, so systemd kills the service's main process. `KillMode=process` spares the control daemon.
const PLATFORM: &[(&str, &str, &str)] = &[
    (
        "DEBIAN/control",
        "Package: yunion-mps-daemon\nVersion: 20230911.0-26053021\nArchitecture: all\nSection: base\n\
         Maintainer: Somebody <somebody@example.org>\nDescription: the platform's own\n",
        "644",
    ),
    (
        "DEBIAN/prerm",
        "#!/bin/sh\nsystemctl --no-reload disable yunion-mps-daemon.service\n\
         systemctl stop yunion-mps-daemon.service\n",
        "755",
    ),
    ("DEBIAN/postrm", "#!/bin/sh\nsystemctl daemon-reload\n", "755"),
    (
        "usr/lib/systemd/system/yunion-mps-daemon.service",
        "[Service]\nUser=root\nGroup=root\nWorkingDirectory=/opt/yunion/bin\nKillMode=process\nRestart=always\n\
         RestartSec=30\nExecStart=/opt/yunion/bin/mps-daemon\n[Install]\nWantedBy=multi-user.target\n",
        "644",
    ),
    (
        "opt/yunion/bin/mps-daemon",
        "#!/bin/sh\nnvidia-smi -c EXCLUSIVE_PROCESS\nnvidia-cuda-mps-control -d\n\
         trap 'echo quit | nvidia-cuda-mps-control; exit' TERM\nwhile :; do sleep 1; done\n",
        "755",
    ),
];

pub(crate) fn installed(machine: &Machine) {
    machine.sh(&format!("apt-get install --yes --no-install-recommends {DEB}"));
    on_the_simulated_host(machine);
}

/// Removes the package and its files. Works after every other check, even if the package is only partly installed.
fn absent(machine: &Machine) {
    machine.sh(&format!(
        "rm -rf /etc/systemd/system/{SERVICE}.d; systemctl daemon-reload; \
         ! dpkg-query --show yunion-mps-daemon >/dev/null 2>&1 || apt-get purge --yes yunion-mps-daemon"
    ));
}

fn is(machine: &Machine, what: &str) -> String {
    text(&machine.run(&["systemctl", what, SERVICE]).stdout).trim_end().to_owned()
}

fn active_timer(machine: &Machine) -> String {
    let timer = ["systemctl", "is-active", "yunion-mps-metrics.timer"];
    text(&machine.run(&timer).stdout).trim_end().to_owned()
}

fn nothing_runs(machine: &Machine) {
    assert_eq!(active_timer(machine), "inactive");
    assert_eq!(is(machine, "is-active"), "inactive");
    assert_eq!(control_daemons(machine), Vec::<String>::new());
}

fn install(machine: &mut Machine) {
    for (configured, said) in [(true, 0), (false, 1)] {
        absent(machine);
        if configured {
            machine.write("/etc/yunion/host.conf", "enable_cuda_mps: true\n");
        }
        let words = machine.sh(&format!("apt-get install --yes --no-install-recommends {DEB}"));
        assert_eq!(words.matches(NEXT_STEP).count(), said, "{words}");
        machine.sh("rm -rf /etc/yunion");
    }
    assert_eq!(
        machine.printed(&["dpkg-query", "--show", "--showformat=${db:Status-Abbrev}", "yunion-mps-daemon"]),
        "ii "
    );
    assert_eq!(is(machine, "is-enabled"), "disabled");
    nothing_runs(machine);
    // `dpkg --verify` reports every installed file that differs from the package.
    assert_eq!(machine.printed(&["dpkg", "--verify", "yunion-mps-daemon"]), "");
    // The programs can be executed with the C library of this machine.
    machine.printed(&["yunion-mps-daemon", "--version"]);
    machine.printed(&["yunion-mpsctl", "--version"]);
}

/// Starts the service without a configuration: on the machine's own root, /etc/host.conf is a file of the C library.
fn unconfigured(machine: &mut Machine) {
    machine
        .sh(&format!("test -e /etc/host.conf || echo multi on >/etc/host.conf; systemctl start {SERVICE}"));
    assert_eq!(state(machine), "disabled");
    machine.sh(&format!("systemctl stop {SERVICE}"));
    assert_eq!(machine.property(SERVICE, "Result"), "success");
    nothing_runs(machine);
}

fn enable(machine: &mut Machine) {
    new_host(machine);
    on_the_simulated_host(machine);
    // The configuration files have the contents that the platform's guide gives, with the directories of the simulated host.
    machine.write(
        HOST_CONF,
        &format!(
            "enable_cuda_mps: true\ncontainer_device_config_file: /etc/yunion/host_container_device.yml\n\
             cuda_mps_pipe_directory: {HOST}/mps/pipe\ncuda_mps_log_directory: {HOST}/mps/log\n"
        ),
    );
    machine.write(
        DEVICE_FILE,
        "devices:\n- path: \"/dev/dri/renderD128\"\n  type: \"NVIDIA_MPS\"\n  virtual_number: 4\n",
    );
    let cursor = machine.cursor();
    machine.sh(&format!("systemctl enable --now {SERVICE}"));
    // `systemctl enable --now` returns after the service has checked all GPUs once. Only then does systemd call the unit
    // active.
    assert_eq!(is(machine, "is-active"), "active");
    assert_eq!(is(machine, "is-enabled"), "enabled");
    wait_for("the state ready", || (state(machine) == "ready").then_some(()));
    no_left_overs(machine, &cursor);
}

fn compute_mode_query(machine: &mut Machine) {
    let query = "nvidia-smi --query-gpu=gpu_uuid,gpu_name,gpu_bus_id,memory.total,compute_mode --format=csv";
    let answer = machine.sh(&format!("{ON_HOST} {query}"));
    let lines: Vec<&str> = answer.lines().collect();
    assert_eq!(lines.len(), 2, "{answer}");
    assert_eq!(lines[0], "uuid, name, pci.bus_id, memory.total [MiB], compute_mode");
    assert!(lines[1].starts_with(UUID) && lines[1].ends_with(", Exclusive_Process"), "{answer}");
}

fn listing(machine: &mut Machine) {
    let table = machine.printed(&["yunion-mpsctl", "list", "--platform"]);
    let cells = |line: &str| -> Vec<String> {
        line.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()
    };
    let rows: Vec<Vec<String>> = table.lines().filter(|line| line.starts_with('|')).map(cells).collect();
    assert_eq!(rows[0][..3], ["Dev_type", "Model", "Addr"]);
    let shown: Vec<&str> = rows[1..].iter().map(|row| row[2].as_str()).collect();
    assert_eq!(shown, DEVICES);
    for row in &rows[1..] {
        assert_eq!(row[0], "NVIDIA_MPS");
        assert_eq!(row[5], UUID);
        assert_eq!(row[9], "healthy");
    }
}

fn looked_for(machine: &mut Machine) {
    // Each file that the unit's `Documentation=` names must be installed.
    let documentation = machine.property(SERVICE, "Documentation");
    let files: Vec<&str> =
        documentation.split_ascii_whitespace().filter_map(|word| word.strip_prefix("file:")).collect();
    assert!(!files.is_empty(), "{documentation}");
    for path in files {
        machine.sh(&format!("test -s {path}"));
    }
    for page in ["yunion-mps-daemon.8", "yunion-mpsctl.1", "yunion-mps-host.conf.5", "yunion-mps-runc.8"] {
        let section = page.rsplit('.').next().unwrap();
        machine.sh(&format!("test -s /usr/share/man/man{section}/{page}.gz"));
    }
    // bash splits a word at colons before it calls a completion function, and replaces only the last part by the answer.
    let asked = "complete -p yunion-mpsctl >/dev/null && COMP_WORDS=(yunion-mpsctl drain 00 : 06.0-) COMP_CWORD=4 && \
                 COMP_LINE=\"yunion-mpsctl drain 00:06.0-\" COMP_POINT=28 && _yunion_mpsctl && \
                 test \"${COMPREPLY[*]}\" = \"06.0-0 06.0-1 06.0-2 06.0-3\"";
    machine.sh(&format!("bash -c '. /usr/share/bash-completion/completions/yunion-mpsctl && {asked}'"));
    // With the installed interface files, other programs can read all methods and properties of the service.
    machine.sh("test -s /usr/share/dbus-1/interfaces/io.yunion.Mps1.Manager.xml");
}

fn upgrade(machine: &mut Machine) {
    absent(machine);
    machine.sh(&format!("apt-get install --yes --no-install-recommends {PREVIOUS_DEB}"));
    on_the_simulated_host(machine);
    machine.sh(&format!("systemctl enable {SERVICE}"));
    let running = Running::start(machine, "");
    let (main, cursor) = (machine.property(SERVICE, "MainPID"), machine.cursor());
    machine.sh(&format!("apt-get install --yes --no-install-recommends {DEB}"));
    running.unharmed(machine, &main, &cursor);
    assert_eq!(is(machine, "is-enabled"), "enabled");
}

fn upgrade_stopped(machine: &mut Machine) {
    absent(machine);
    machine.sh(&format!("apt-get install --yes --no-install-recommends {PREVIOUS_DEB}"));
    nothing_runs(machine);
    let words = machine.sh(&format!("apt-get install --yes --no-install-recommends {DEB}"));
    assert!(!words.contains("yunion-mpsctl setup"), "{words}");
    nothing_runs(machine);
    assert_eq!(is(machine, "is-enabled"), "disabled");
}

fn remove(machine: &mut Machine) {
    installed(machine);
    serving(machine);
    machine.sh(&format!("systemctl enable {SERVICE}; systemctl enable --now yunion-mps-metrics.timer"));
    assert_eq!(compute_mode(machine), "Exclusive_Process");
    let cursor = machine.cursor();
    machine.write(METRICS, "yunion_mps_up 1\n");
    machine.sh("apt-get remove --yes yunion-mps-daemon");
    assert_eq!(active_timer(machine), "inactive");
    machine.sh(&format!("test ! -e {METRICS}"));
    assert_eq!(control_daemons(machine), Vec::<String>::new());
    assert_eq!(compute_mode(machine), "Default");
    assert_eq!(machine.sh("ls /usr/bin | grep yunion || :"), "");
    assert_eq!(state(machine), "");
    no_left_overs(machine, &cursor);
}

const REMOVE: &str = "apt-get remove --yes yunion-mps-daemon 2>&1";

fn remove_with_a_client(machine: &mut Machine) {
    installed(machine);
    Running::start(machine, "");
    let said = machine.sh(REMOVE);
    assert!(said.contains("the GPU work of these clients ends:") && said.contains("cuda-client"), "{said}");
    assert!(!said.contains("still running"), "{said}");
    assert_eq!(control_daemons(machine), Vec::<String>::new());
}

/// Removes the package after the service has failed. No script stops the control daemon, so the client runs on although the
/// programs of the package are removed.
fn remove_failed(machine: &mut Machine) {
    installed(machine);
    Running::start(machine, "");
    machine.write(HOST_CONF, "enable_cuda_mps: perhaps\n");
    machine.run(&["systemctl", "restart", SERVICE]);
    wait_for("a service that failed", || (is(machine, "is-active") == "failed").then_some(()));
    let said = machine.sh(REMOVE);
    assert!(said.contains("still running, with their clients: yunion-mps-control-shared.scope"), "{said}");
    assert_eq!(machine.property("client.service", "ActiveState"), "active");
    machine.sh("systemctl stop yunion-mps-control-shared.scope client.service");
    assert_eq!(control_daemons(machine), Vec::<String>::new());
}

fn purge(machine: &mut Machine) {
    absent(machine);
    // The search also finds source trees on the host, since the machine shows the host's files. These paths are in `before`
    // too, so they do not count.
    let ours = || -> BTreeSet<String> {
        let found = machine.sh(
            "find / -xdev \\( -path /proc -o -path /sys -o -path /srv -o -path /var/tmp -o -path '/var/log/*' \
             -o -path /tmp -o -path /usr/lib/simulated -o -path /var/cache -o -path '*/target' -o -path '*/.cache' \\) -prune \
             -o \\( -name '*yunion-mps*' -o -name 'io.yunion.*' \\) -print || :; find /run -name '*yunion*' || :",
        );
        found.lines().map(str::to_owned).collect()
    };
    let before = ours();
    installed(machine);
    serving(machine);
    machine.sh(&format!("systemctl enable {SERVICE}"));
    assert!(ours().len() > before.len() + 10, "the search finds what is installed");
    machine.sh("apt-get purge --yes yunion-mps-daemon");
    // The administrator has made this directory, so the purge must not remove it. The test removes it here.
    machine.sh(&format!("rm -r /etc/systemd/system/{SERVICE}.d; systemctl daemon-reload"));
    assert_eq!(ours().difference(&before).collect::<Vec<_>>(), Vec::<&String>::new());
    machine.sh("dpkg-query --show yunion-mps-daemon && exit 1 || :");
}

fn take_over(machine: &mut Machine) {
    absent(machine);
    let theirs = platforms(machine, &format!("apt-get install --yes {PLATFORM_DEB}"));
    // The service's version has an epoch. Therefore apt treats the installation as an upgrade of the platform's package.
    let said = machine.sh(&format!("apt-get install --yes --no-install-recommends {DEB} 2>&1"));
    assert!(said.contains("1 upgraded"), "{said}");
    // The scripts of the platform's package have stopped and disabled the service. The installation prints how to enable the
    // service again.
    assert!(said.contains("systemctl enable --now yunion-mps-daemon"), "{said}");
    on_the_simulated_host(machine);
    machine.sh(&format!("systemctl enable --now {SERVICE}"));
    taken_over(machine, &theirs);
}

/// Installs the platform's own package, and starts its service and a client. Returns the PID of the platform's control daemon.
fn platforms(machine: &Machine, install: &str) -> String {
    new_host(machine);
    machine.sh(install);
    machine.write(
        &format!("/etc/systemd/system/{SERVICE}.d/simulated.conf"),
        &format!(
            "[Service]\nEnvironment=YUNION_MPS_SIM={HOST} LD_LIBRARY_PATH={HOST}/lib PATH={HOST}/bin:/usr/bin:/bin\n\
             Environment=CUDA_MPS_PIPE_DIRECTORY={HOST}/mps/pipe CUDA_MPS_LOG_DIRECTORY={HOST}/mps/log\n\
             TimeoutStopSec=5\n"
        ),
    );
    machine.sh(&format!(
        "systemctl daemon-reload; mkdir -p {HOST}/mps/pipe {HOST}/mps/log; systemctl enable --now {SERVICE}"
    ));
    let theirs_is = format!("{ON_HOST} export CUDA_MPS_PIPE_DIRECTORY={HOST}/mps/pipe;");
    let asked = format!("{theirs_is} echo get_server_list | nvidia-cuda-mps-control 2>&1 || :");
    wait_for("their control daemon", || (!machine.sh(&asked).contains("Cannot find")).then_some(()));
    let client = format!("{theirs_is} exec cuda-client hold 600");
    machine.printed(&["systemd-run", "--quiet", "--unit=their-client", "sh", "-euc", &client]);
    let listed = format!("{theirs_is} echo ps | nvidia-cuda-mps-control");
    wait_for("their client at work", || machine.sh(&listed).contains("cuda-client").then_some(()));
    // The process that starts the platform's control daemon has the same name and ends a moment later.
    wait_for("one control daemon", || {
        <[String; 1]>::try_from(control_daemons(machine)).ok().map(|[theirs]| theirs)
    })
}

/// While the platform's control daemon has a client, the service must not end it, and `yunion-mpsctl status` must print its PID
/// `theirs`. After the client's end, the service replaces this control daemon.
fn taken_over(machine: &Machine, theirs: &str) {
    machine.sh("test ! -e /opt/yunion/bin/mps-daemon");
    wait_for("its PID in the reason", || {
        machine.printed(&["yunion-mpsctl", "status"]).contains(theirs).then_some(())
    });
    assert_eq!(control_daemons(machine), [theirs]);
    assert_eq!(machine.property("their-client.service", "ActiveState"), "active");
    machine.sh("systemctl stop their-client.service");
    wait_for("the state ready", || (state(machine) == "ready").then_some(()));
    let ours = control_daemons(machine);
    assert!(ours.len() == 1 && ours[0] != theirs, "{ours:?}, theirs was {theirs}");
    assert_eq!(devices(machine), DEVICES);
}

fn rpm_take_over(machine: &mut Machine) {
    let theirs = platforms(machine, &format!("{RPMS} --install {PLATFORM_RPM}"));
    machine.sh(&format!("{RPMS} --upgrade {RPM}"));
    assert_eq!(is(machine, "is-enabled"), "enabled");
    on_the_simulated_host(machine);
    machine.sh(&format!("systemctl restart {SERVICE}"));
    taken_over(machine, &theirs);
}

/// The machine gets the rpm of the service, an earlier version of this rpm, and the platform's own rpm. The test compares the
/// files of the rpm with those of the deb.
pub(crate) fn stage_rpm() -> Stage {
    let stage = simulated();
    stage.put(&built(".rpm"), RPM);
    stage.put(&built(".deb"), DEB);
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let work = tempfile::tempdir().unwrap();
    let spec = run(Command::new(source.join("packaging/rpm/spec.sh")).arg("0.0.1"));
    let previous_spec = work.path().join("previous.spec");
    fs::write(&previous_spec, spec).unwrap();
    let mut previous = Command::new("rpmbuild");
    previous.current_dir(source).args(["-bb", "--with", "prebuilt", "--build-in-place"]);
    previous.args(["--define", "package_compression 0"]);
    previous.env("BIN", source.join(packages().1)).env("PAGES", source.join("target/pages"));
    previous.arg("--define").arg(format!("_builddir {}", source.display()));
    stage.put(&packed(&mut previous, work.path(), previous_spec.to_str().unwrap()), PREVIOUS_RPM);

    let spec = work.path().join("platform.spec");
    fs::write(&spec, PLATFORM_SPEC).unwrap();
    for (path, contents, mode) in PLATFORM.iter().filter(|(path, ..)| !path.starts_with("DEBIAN/")) {
        let path = work.path().join("platform").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, contents).unwrap();
        run(Command::new("chmod").arg(mode).arg(&path));
    }
    let mut platform = Command::new("rpmbuild");
    platform.args(["-bb", "--define"]).arg(format!("tree {}", work.path().join("platform").display()));
    stage.put(&packed(&mut platform, &work.path().join("build"), spec.to_str().unwrap()), PLATFORM_RPM);
    stage
}

fn packed(rpmbuild: &mut Command, work: &Path, spec: &str) -> PathBuf {
    run(rpmbuild.arg("--define").arg(format!("_topdir {}", work.display())).arg(spec));
    let made = run(Command::new("find").arg(work.join("RPMS")).args(["-name", "yunion-mps-daemon-*.rpm"]));
    PathBuf::from(made.trim_end())
}

/// The platform's own package as an rpm, like [`PLATFORM`]. Its `%preun` script stops and disables the service even at an
/// upgrade.
const PLATFORM_SPEC: &str = "
Name: yunion-mps-daemon
Version: 20230911.0
Release: 26053021
Summary: the platform's own
License: GPL
BuildArch: noarch
%description
The platform's own.
%install
cp -a %{tree}/. %{buildroot}/
%files
/opt/yunion/bin/mps-daemon
/usr/lib/systemd/system/yunion-mps-daemon.service
%preun
systemctl --no-reload disable yunion-mps-daemon.service
systemctl stop yunion-mps-daemon.service
%postun
systemctl daemon-reload
";

/// Returns the sorted paths in a package's list of files, without directories.
fn listed(names: &str) -> Vec<String> {
    let mut names: Vec<String> = names
        .lines()
        .filter(|name| !name.ends_with('/'))
        .map(|name| name.trim_start_matches('.').to_owned())
        .collect();
    names.sort();
    names
}

fn rpm_files(machine: &mut Machine) {
    machine.sh(&format!(
        "mkdir -p /var/tmp/root; rpm --root /var/tmp/root --initdb; \
         rpm --root /var/tmp/root --install --nodeps --noscripts {RPM}"
    ));
    let files = |list: &str| listed(&machine.sh(list));
    let rpm =
        files("cd /var/tmp/root; find ./usr ./etc ! -type d 2>/dev/null | grep -v -e /rpm/ -e /build-id/");
    let deb = files(&format!("dpkg-deb --fsys-tarfile {DEB} | tar -t"));
    // Debian uses other directories for zsh's completions and for lintian, and its packages have other documentation.
    let plain = |names: Vec<String>| -> Vec<String> {
        let mut names: Vec<String> = names
            .into_iter()
            .map(|name| name.replace("/zsh/vendor-completions/", "/zsh/site-functions/"))
            .map(|name| name.trim_end_matches(".gz").to_owned())
            .filter(|name| !name.contains("/doc/") && !name.contains("/lintian/"))
            .collect();
        names.sort();
        names
    };
    assert_eq!(plain(rpm), plain(deb));
    let verified =
        machine.sh("rpm --root /var/tmp/root --verify --nodeps yunion-mps-daemon 2>/dev/null || :");
    assert_eq!(verified, "");
}

fn rpm_install(machine: &mut Machine) {
    let words = machine.sh(&format!("{RPMS} --install {PREVIOUS_RPM}"));
    assert_eq!(words.trim_end(), NEXT_STEP);
    assert_eq!(is(machine, "is-enabled"), "disabled");
    nothing_runs(machine);
}

fn rpm_upgrade(machine: &mut Machine) {
    on_the_simulated_host(machine);
    let running = Running::start(machine, "");
    machine.sh(&format!("systemctl enable {SERVICE}"));
    let (main, cursor) = (machine.property(SERVICE, "MainPID"), machine.cursor());
    assert_eq!(machine.sh(&format!("{RPMS} --upgrade {RPM}")), "");
    running.unharmed(machine, &main, &cursor);
    assert_eq!(is(machine, "is-enabled"), "enabled");
}

fn rpm_erase(machine: &mut Machine) {
    // The removal of the package must also stop a service that is masked.
    machine.sh(&format!("systemctl disable {SERVICE}; systemctl mask {SERVICE}"));
    machine.sh("systemctl enable --now yunion-mps-metrics.timer");
    machine.write(METRICS, "yunion_mps_up 1\n");
    assert_eq!(is(machine, "is-active"), "active");
    let said = machine.sh(&format!("{RPMS} --erase yunion-mps-daemon 2>&1; systemctl unmask {SERVICE}"));
    assert!(said.contains("the GPU work of these clients ends:") && said.contains("cuda-client"), "{said}");
    assert!(!said.contains("still running"), "{said}");
    assert_eq!(control_daemons(machine), Vec::<String>::new());
    assert_eq!(compute_mode(machine), "Default");
    assert_eq!(machine.sh("ls /usr/bin | grep yunion || :"), "");
    machine.sh("test ! -e /usr/share/doc/yunion-mps-daemon");
    assert_eq!(active_timer(machine), "inactive");
    assert_eq!(machine.sh("find /etc/systemd/system -name 'yunion-mps-*' -type l"), "");
    machine.sh(&format!("test ! -e {METRICS}"));
}
