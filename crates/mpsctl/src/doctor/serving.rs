//! Checks of the published state: problems that the service reports, and problems that clients will notice.

use std::collections::BTreeMap;
use std::fmt::Display;

use super::facts::Facts;
use super::{Check, Finding, Outcome, Severity, each, error, finding, info, warning};
use common::bus::proxy::Listed;
use common::bus::rows::{Client, ControlDaemon, Device, Gpu};
use common::bus::word::Word;
use common::config::Isolation;
use common::counted::counted;
use common::host::driver::MULTI_USER;
use common::host::proc;
use common::membership::records_without_effect;
use common::problem::Problem;
use common::published::control_daemon::ControlDaemonState;
use common::published::snapshot::State;
use mps_core::register::{KnownBy, MayCommand};

pub(super) const CHECKS: &[Check] = &[
    ("the control daemons", control_daemons),
    ("the health of the slices", slices),
    ("the state of the service", service),
    ("the confirmation of the limits", limits),
    ("the CPUs of the control daemons", cpus),
    ("the slices of the clients", devices),
    ("the records of the host agent", records),
    ("clients that can command the control daemon", commanders),
    ("drained slices", drained),
    ("full slices", full),
    ("the budgets of slices", budgets),
    ("the kernel's memory limits", kernel_limits),
    ("clients that wait for clients of other users", waiting),
];

/// The subject of the check [`gpus`]. This check is not in [`CHECKS`], since it needs the findings of all other checks.
pub(super) const GPUS: &str = "the health of the GPUs";

/// The most records of the host agent that a finding names.
const RECORDS: usize = 4;

/// The remedy if the published reason of a problem already says what an administrator has to do.
const DO_WHAT_IT_SAYS: &str = "do what the reason says; see also yunion-mpsctl status and the journal";

/// The remedy for containers that run as root of the host.
const OTHER_USER: &str = "run these containers as a user other than root, or in a user namespace";

fn name(daemon: &ControlDaemon) -> String {
    format!("control daemon {}", daemon.id)
}

pub(super) fn gpu_name(address: &impl Display, uuid: Option<&str>) -> String {
    uuid.map_or_else(|| address.to_string(), |uuid| format!("{address} ({uuid})"))
}

pub(super) fn named(client: &Client) -> String {
    format!("{} ({})", client.pid, client.command)
}

fn control_daemons(facts: &Facts) -> Outcome {
    let published = facts.published()?;
    each(&published.control_daemons, |daemon| {
        let reason = &daemon.reason;
        match daemon.state.known()? {
            ControlDaemonState::Faulted => Some(error(
                "control-daemon-faulted",
                name(daemon),
                format!("a server of this control daemon has met a fatal GPU error: {reason}"),
                "the server recovers or is replaced when the clients that were hit have ended, at the latest \
                 after cuda_mps_fault_grace; to end the fault sooner, run yunion-mpsctl terminate PID for \
                 each of these clients, which yunion-mpsctl status names",
            )),
            ControlDaemonState::Backoff => Some(error(
                "control-daemon-backoff",
                name(daemon),
                format!("the control daemon died or does not start: {reason}"),
                format!(
                    "the service tries again by itself; see the errors in journalctl -u yunion-mps-daemon, \
                     and every line of the control daemon in {log_directory}/control.log",
                    log_directory = daemon.log_directory
                ),
            )),
            ControlDaemonState::Waiting => {
                // A control daemon without a process does not wait for clients. Only its published reason says what an
                // administrator has to do.
                let remedy = if daemon.pid.is_none() {
                    "do what the reason says"
                } else {
                    "do what the reason says; if the control daemon waits for clients, yunion-mpsctl \
                     clients lists the clients and yunion-mpsctl apply --force ends their GPU work"
                };
                let is_served = published.served_by(&daemon.id).all(|gpu| gpu.healthy);
                let problem = Problem::new(reason, remedy);
                Some(finding(unless_served(is_served), "control-daemon-waiting", name(daemon), problem))
            }
            ControlDaemonState::Starting | ControlDaemonState::Ready | ControlDaemonState::Stopping => None,
        }
    })
}

/// A problem that can prevent a GPU from being served is only a warning as long as the GPU is served.
pub(super) fn unless_served(is_served: bool) -> Severity {
    if is_served { Severity::Warning } else { Severity::Error }
}

/// Finds GPUs that are not served, unless another check has reported an error about the GPU or its control daemon.
pub(super) fn gpus(facts: &Facts, findings: &[Finding]) -> Outcome {
    let published = facts.published()?;
    let errors = || findings.iter().filter(|finding| finding.severity == Severity::Error);
    let daemon = |gpu: &Gpu| published.control_daemons.iter().find(|one| one.id == gpu.control_daemon);
    let has_error = |gpu: &&Listed<Gpu>| {
        let (of_gpu, of_daemon) =
            (gpu_name(&gpu.addr, gpu.device_path.as_deref()), daemon(gpu).map(|one| name(one)));
        errors()
            .any(|error| [Some(&gpu.addr), Some(&of_gpu), of_daemon.as_ref()].contains(&Some(&error.subject)))
    };
    // A starting control daemon gets another state within a minute, so its GPUs are no finding.
    let is_starting =
        |gpu: &&Listed<Gpu>| daemon(gpu).is_some_and(|one| one.state == ControlDaemonState::Starting);
    if facts.inventory.driver.is_err() && errors().next().is_some() {
        return Ok(Vec::new());
    }
    let sick = published.gpus.iter().filter(|gpu| !gpu.healthy && !has_error(gpu) && !is_starting(gpu));
    each(sick, |gpu| [error("gpu-not-served", &gpu.addr, &gpu.reason, DO_WHAT_IT_SAYS)])
}

/// Finds slices that are not served although their GPU is served.
fn slices(facts: &Facts) -> Outcome {
    let published = facts.published()?;
    let is_served = |device: &Listed<Device>| {
        published.gpus.iter().any(|gpu| gpu.addr == device.base_addr && gpu.healthy)
    };
    let devices = published.devices.as_deref().unwrap_or_default().iter();
    let sick = devices.filter(|device| !device.healthy && !device.drained && is_served(device));
    each(sick, |device| [error("slice-not-served", &device.addr, &device.reason, DO_WHAT_IT_SAYS)])
}

/// Finds a problem of the service that affects no GPU, no slice and no control daemon, such as a new configuration that the
/// service has refused.
fn service(facts: &Facts) -> Outcome {
    let published = facts.published()?;
    let state = &published.service.state;
    let all_well = published.gpus.iter().all(|gpu| gpu.healthy)
        && published.devices.iter().flatten().all(|device| device.healthy || device.drained)
        && published.control_daemons.iter().all(|daemon| daemon.state == ControlDaemonState::Ready);
    let is_as_wanted = matches!(state.known(), Some(State::Ready | State::Disabled | State::Stopping));
    if is_as_wanted || !all_well || facts.inventory.driver.is_err() {
        return Ok(Vec::new());
    }
    let severity = if *state == State::Failed { Severity::Error } else { Severity::Warning };
    let subject = format!("the service is {state}");
    Ok(vec![finding(
        severity,
        "service-not-ready",
        subject,
        Problem::new(&published.service.state_reason, DO_WHAT_IT_SAYS),
    )])
}

/// Finds slices with a memory limit that the kernel should enforce for a control group, but does not enforce. This is no error,
/// since the service watches the memory of each slice too.
fn kernel_limits(facts: &Facts) -> Outcome {
    let devices = facts.published()?.devices.as_deref().unwrap_or_default().iter();
    each(devices, |device| {
        let reason = device.kernel_limit_refused.as_ref()?;
        Some(info(
            "kernel-limit-refused",
            &device.addr,
            format!(
                "the kernel enforces no memory limit for the control group that is bound to this slice \
                 ({bound_to}): {reason}; only the service watches the memory of this slice",
                bound_to = device.bound_to
            ),
            "remove the cause, then run yunion-mpsctl reload; or write cuda_mps_memory_limit: watch in \
             host.conf, so that only the service watches the memory of slices",
        ))
    })
}

/// Compares the limits that servers have confirmed with the limits that the service has requested. A control daemon enforces
/// the limits of its largest slice, so these limits are expected on all its GPUs.
fn limits(facts: &Facts) -> Outcome {
    let published = facts.published()?;
    let mut findings = Vec::new();
    let is_ready = |daemon: &&Listed<ControlDaemon>| daemon.state == ControlDaemonState::Ready;
    for daemon in published.control_daemons.iter().filter(is_ready) {
        let served = || published.served_by(&daemon.id);
        let percentage = served().map(|gpu| gpu.mps_thread_percentage).max();
        let memory = served().filter_map(|gpu| gpu.mps_memory_limit).max();
        // If each slice has its own control daemon and the slices have different sizes, the control daemons confirm different
        // limits. The GPU then has no common limit to compare.
        let is_common = |gpu: &&Gpu| gpu.equal_slices || gpu.isolation == Isolation::Gpu;
        for gpu in served().filter(is_common) {
            let pairs = [
                (percentage, gpu.confirmed_thread_percentage, "%"),
                (memory, gpu.confirmed_memory_limit, "MiB"),
            ];
            for (asked, confirmed, unit) in pairs {
                let Some(asked) = asked else { continue };
                let found = match confirmed {
                    Some(confirmed) if confirmed != asked => {
                        format!(
                            "the service has asked for a limit of {asked} {unit} for each client, but a \
                             limit of {confirmed} {unit} is in force"
                        )
                    }
                    None if gpu.limits_enforced && !daemon.servers.is_empty() => {
                        format!(
                            "the service has asked for a limit of {asked} {unit} for each client, but no \
                             server has confirmed this limit"
                        )
                    }
                    _ => continue,
                };
                findings.push(warning(
                    "limits-unconfirmed",
                    &gpu.addr,
                    found,
                    format!(
                        "yunion-mpsctl reload sets the limits again; if a server keeps wrong limits, wait \
                         until the control daemon has no clients, then replace the server with busctl call \
                         io.yunion.Mps1 /io/yunion/Mps1/Manager io.yunion.Mps1.Control RestartServer s \
                         {gpu}",
                        gpu = gpu.addr
                    ),
                ));
            }
        }
    }
    Ok(findings)
}

fn devices(facts: &Facts) -> Outcome {
    let published = facts.published()?;
    let clients = match &published.clients {
        Ok(clients) => clients,
        Err(reason) => {
            let remedy = "run yunion-mpsctl doctor again: the service refuses the list of clients only while \
                          too many callers ask for the list";
            return Ok(vec![warning("clients-unknown", "the clients", reason.to_string(), remedy)]);
        }
    };
    // Other checks report clients that bypass MPS and clients that wait. The service lists a client on several GPUs once for
    // each GPU, but a finding names the client once.
    let list = |of: &dyn Fn(&Client) -> bool| -> Vec<String> {
        let found = clients.iter().filter(|client| !client.bypass && !client.waiting && of(client));
        found.map(|client| (client.pid, named(client))).collect::<BTreeMap<_, _>>().into_values().collect()
    };
    let nameless = list(&|client| client.device.is_none());
    // A program outside of containers can name its slice only in its environment, unless its control group is bound. So the
    // finding names only clients in containers.
    let claims = |client: &Client| client.known_by.as_ref().is_some_and(|word| *word == KnownBy::Environment);
    let claim = list(&|client| client.container_id.is_some() && claims(client));
    let mut findings = Vec::new();
    if !nameless.is_empty() {
        findings.push(info(
            "clients-without-device",
            counted(nameless.len(), "client"),
            format!(
                "the service does not know the slices of these clients: {clients}",
                clients = nameless.join(", ")
            ),
            "start such clients with yunion-mpsctl run, or with the environment that yunion-mpsctl env \
             prints",
        ));
    }
    if !claim.is_empty() {
        findings.push(info(
            "clients-claim-slices",
            counted(claim.len(), "client"),
            format!(
                "these clients are in containers, and only their environment says which slice they have, so \
                 cuda_mps_overuse: terminate does not end their work: {clients}; yunion-mpsctl clients -o \
                 wide shows how the service knows the slice of each client",
                clients = claim.join(", ")
            ),
            "start the containers with CDI devices, or let the program that starts them call Control.Bind on \
             D-Bus; yunion-mpsctl bind 00:06.0-1 --pid PID binds a slice to a container that runs already",
        ));
    }
    Ok(findings)
}

/// Finds records of the host agent that the service can't use. The host agent's records name the slices of each container.
/// Without a usable record, the service knows the slices of a container's clients only from the environment of the clients, or
/// not at all.
fn records(facts: &Facts) -> Outcome {
    let servers = &facts.enabled()?.supervision.servers_path;
    if !rustix::process::geteuid().is_root() {
        return Err("only root can read the records of the host agent".into());
    }
    let bad = records_without_effect(servers);
    if bad.is_empty() {
        return Ok(Vec::new());
    }
    let mut words: Vec<String> =
        bad.iter().take(RECORDS).map(|(file, why)| format!("{}: {why}", file.display())).collect();
    if bad.len() > RECORDS {
        words.push(format!("and {} more", bad.len() - RECORDS));
    }
    Ok(vec![warning(
        "records-without-effect",
        servers.display(),
        words.join("; "),
        "give the files and their directories to root with chown root:root and chmod go-w, and let the host \
         agent write damaged files again; until then the service knows the slices of the clients in \
         the containers of these files only from the clients' environment",
    )])
}

/// Finds slices and GPUs that have as many clients as possible. A full GPU is no error, since all its clients are served.
fn full(facts: &Facts) -> Outcome {
    let published = facts.published()?;
    let is_full = |device: &&Listed<Device>| {
        device.max_clients.zip(device.clients).is_some_and(|(most, clients)| clients >= most)
    };
    each(&published.gpus, |gpu| {
        let slices = published.devices.iter().flatten().filter(|device| device.pci_bdf == gpu.pci_bdf);
        let names: Vec<&str> = slices.filter(is_full).map(|device| device.addr.as_str()).collect();
        let most = gpu.clients.zip(gpu.max_clients).filter(|(clients, most)| clients >= most);
        let found = match (most, names.as_slice()) {
            (Some((_, most)), _) => format!("the GPU has {most} clients, and can't hold more"),
            (None, []) => return None,
            (None, names) => format!(
                "the number of clients has reached max_clients in {slices}",
                slices = names.join(", ")
            ),
        };
        Some(info(
            "slices-full",
            &gpu.addr,
            found,
            "start no more work on the full GPU, or in the full slices, until a client has ended; \
             yunion-mpsctl clients lists the \
             clients",
        ))
    })
}

/// Finds clients in containers from which a control daemon accepts commands that harm other clients. Root processes on the host
/// are no finding, since root can harm clients in any case.
fn commanders(facts: &Facts) -> Outcome {
    let clients = &facts.published()?.clients;
    let list = |of: &dyn Fn(&Client) -> bool| -> Vec<String> {
        let found = clients.iter().flatten().filter(|client| of(client));
        found.map(|client| (client.pid, named(client))).collect::<BTreeMap<_, _>>().into_values().collect()
    };
    let all = list(&|client| {
        let is_contained =
            || client.container_id.is_some() || proc::is_elsewhere(client.pid).unwrap_or_default();
        // A newer version of the service may publish a value of `may_command` that this program does not know. A client with
        // an unknown value counts as harmful.
        let is_harmless =
            |may: &Word<_>| matches!(may.known(), Some(MayCommand::Nothing | MayCommand::Neighbours));
        client.may_command.as_ref().is_some_and(|may| !is_harmless(may)) && is_contained()
    });
    // Only clients in containers have `Neighbours`: from a root program on the host, a control daemon accepts every command.
    let neighbours =
        list(&|client| client.may_command.as_ref().is_some_and(|may| *may == MayCommand::Neighbours));
    let mut findings = Vec::new();
    if !all.is_empty() {
        findings.push(warning(
            "clients-command-all",
            counted(all.len(), "client"),
            format!(
                "these clients are in containers, run as root of the host and have the control daemon's own \
                 directory, so they can set the limits of all clients and end the control daemon: {clients}",
                clients = all.join(", ")
            ),
            format!(
                "let the host agent or the container engine give each container only the directory of its \
                 slice (yunion-mpsctl env prints this directory if the GPU is a Volta or newer and the driver \
                 is 580 or newer), or {OTHER_USER}"
            ),
        ));
    }
    if !neighbours.is_empty() {
        findings.push(info(
            "clients-command-neighbours",
            counted(neighbours.len(), "client"),
            format!(
                "these clients are in containers and run as root of the host, so they can end the GPU work \
                 of other clients: {clients}",
                clients = neighbours.join(", ")
            ),
            OTHER_USER,
        ));
    }
    Ok(findings)
}

/// An administrator may have forgotten the drain of a slice.
fn drained(facts: &Facts) -> Outcome {
    let devices = facts.published()?.devices.as_deref().unwrap_or_default();
    let drained: Vec<&str> =
        devices.iter().filter(|device| device.drained).map(|device| device.addr.as_str()).collect();
    if drained.is_empty() {
        return Ok(Vec::new());
    }
    Ok(vec![info(
        "slices-drained",
        counted(drained.len(), "slice"),
        format!("drained for new clients: {drained}", drained = drained.join(", ")),
        "yunion-mpsctl undrain NAME ends the drain of a slice or a GPU, undrain --all ends every drain",
    )])
}

fn budgets(facts: &Facts) -> Outcome {
    each(facts.published()?.devices.iter().flatten(), |device| {
        let overuse = device.overuse.as_deref().filter(|overuse| !overuse.is_empty())?;
        let in_use = match (device.clients, device.memory_used) {
            (Some(clients), Some(mib)) => {
                format!(" ({}, {mib} MiB)", counted(usize::try_from(clients).unwrap_or(usize::MAX), "client"))
            }
            _ => String::new(),
        };
        Some(warning(
            "slice-over-budget",
            &device.addr,
            format!("{overuse}{in_use}"),
            "yunion-mpsctl clients lists the clients, and yunion-mpsctl terminate PID ends the work of one \
             client; a higher max_clients in host_container_device.yml allows more clients; with \
             cuda_mps_overuse: terminate \
             in host.conf the service ends the newest clients by itself; the service ends no client if the \
             clients of the slice belong to several users or containers, or if only the environment of a \
             client says that the client has this slice",
        ))
    })
}

fn cpus(facts: &Facts) -> Outcome {
    each(&facts.published()?.control_daemons, |daemon| {
        let (wanted, cpus) = (daemon.wanted_cpus.as_ref()?, daemon.cpus.as_ref()?);
        let found = format!(
            "the control daemon should run on CPUs {wanted}, which are near its GPUs, but may run on CPUs \
             {cpus}"
        );
        (daemon.state == ControlDaemonState::Ready && wanted != cpus).then(|| {
            warning(
                "cpus-elsewhere",
                name(daemon),
                found,
                format!(
                    "let the service and its control group use CPUs {wanted} (CPUAffinity= of the unit, \
                     AllowedCPUs= of system.slice); the control daemon is bound to these CPUs at its next \
                     start; or write cuda_mps_cpu_affinity: none in host.conf"
                ),
            )
        })
    })
}

/// Without multi-user mode, a control daemon serves one user at a time. A client of another user waits, and prints nothing
/// while it waits.
fn waiting(facts: &Facts) -> Outcome {
    let clients = facts.published()?.clients.iter().flatten();
    each(clients.filter(|client| client.waiting), |client| {
        [warning(
            "client-waits-for-other-user",
            format!("process {}", client.pid),
            format!(
                "{command} of user {user} waits for a server; a control daemon without multi-user mode \
                 serves one user until the clients of that user have all ended",
                command = client.command,
                user = client.user.as_deref().unwrap_or_default()
            ),
            format!(
                "with a driver from {series} on and GPUs from Volta on, write cuda_mps_multiuser: auto in \
                 host.conf; otherwise run the clients as one user, or write cuda_mps_topology: per_gpu",
                series = MULTI_USER.series
            ),
        )]
    })
}
