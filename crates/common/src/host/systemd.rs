//! Asks systemd for a scope for a control daemon or a command, and for the reason why this service is stopped.
//!
//! A control daemon must outlive this service, but systemd ends every process in a unit's control group when the unit stops. So
//! each control daemon gets its own scope, which is a unit for processes that systemd has not started. `systemctl stop` of a
//! scope ends the control daemon in it, with all servers and clients.
//!
//! Each request uses its own connection to the bus. The connection with the service's bus name may not be open yet, or may be
//! closing.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use zbus::proxy::{self, CacheProperties};
use zbus::{Connection, OwnedObjectPath, Proxy, Variant, fdo};

use super::variant::json;
use crate::host::proc;
use crate::problem::Problem;

/// The time that `yunion-mpsctl doctor` waits for systemd's answer about a unit.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// The time that the service waits for systemd's answers about scopes, limits and jobs, and for the move of a process into its
/// scope. systemd needs milliseconds, but answers no request while it reloads its units, which can take seconds on a large
/// host. A service that does not get the reason for its stop in this time leaves the control daemons running, so the time is
/// long. If the bus has ended, a call fails at once.
const PATIENCE: Duration = Duration::from_secs(10);

const NAMESAKE_TIMEOUT: Duration = Duration::from_secs(5);

const NAMESAKE_PAUSE: Duration = Duration::from_millis(50);

/// The pause between two looks at a process that systemd is to move into a scope. systemd needs about a millisecond.
const MOVE_PAUSE: Duration = Duration::from_millis(2);

/// The time that a control daemon and its servers have to end after SIGTERM when systemd stops their scope. In a measurement
/// they took 4 ms. systemd's default of 90 s would only delay a shutdown of the host.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stopping {
    /// systemd stops the unit, alone or together with the host.
    Stop,
    /// systemd starts the unit again at once, after `systemctl restart`, an upgrade, or a start that took too long.
    Restart,
    /// This process is no service of systemd, so SIGTERM counts as a stop and not as a restart.
    NotUnderSystemd,
    /// The text says why the reason is unknown: systemd did not answer, or has no job for the unit. Without a job, the cause of
    /// SIGTERM is `kill`, `systemctl kill`, or a limit such as `RuntimeMaxSec=`. Then the service leaves the control daemons
    /// running, as for a restart. Control daemons can still be stopped later, but a client's work that was ended is lost.
    Unknown(String),
}

pub fn runs_host() -> bool {
    sd_notify::booted().unwrap_or(false)
}

/// True if systemd runs this process as a system service. False for a process that a user has started.
pub fn runs_us() -> bool {
    own_service().is_some()
}

/// Moves a process into its own scope, `yunion-mps-control-<id>.scope`. Returns the scope's name once the process is in the
/// scope. After an error, the process is most likely still in its old unit, but systemd may still move the process a moment
/// later.
pub async fn move_to_scope(id: &str, pid: u32) -> Result<String, Problem> {
    let own = own_service().ok_or("this process does not run in a service of systemd")?;
    let name = scope_name(id);
    let started = start_scope(&name, scope_properties(id, pid, &own));
    answer(PATIENCE, &format!("refuses to make {name}"), started).await?;
    arrival(pid, &name).await?;
    Ok(name)
}

/// Moves this process, and every process that it starts later, into the scope `yunion-mps-run-<PID>.scope`. After an error, the
/// process is most likely still in its old unit.
pub async fn move_self_to_scope(description: &str) -> Result<(), Problem> {
    let pid = std::process::id();
    let name = format!("yunion-mps-run-{pid}.scope");
    let properties = vec![
        ("Description", Variant::from(description.to_owned())),
        ("PIDs", Variant::from(vec![pid])),
        ("CollectMode", Variant::from("inactive-or-failed")),
    ];
    answer(PATIENCE, &format!("refuses to make {name}"), start_scope(&name, properties)).await?;
    arrival(pid, &name).await
}

/// Waits until systemd has moved a process into a unit. systemd answers as soon as the job for the move is queued. Only the
/// control group of the process shows that the move is done.
async fn arrival(pid: u32, name: &str) -> Result<(), Problem> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let cgroup = proc::cgroups_text(pid)
            .map_err(|error| format!("process {pid} ended before systemd had moved it to {name}: {error}"))?;
        let unit = unit_of(&cgroup);
        if unit == Some(name) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            let unit = unit.unwrap_or("no unit");
            return Err(format!(
                "process {pid} is still in {unit} {seconds} s after systemd was asked to move it to {name}",
                seconds = PATIENCE.as_secs()
            )
            .into());
        }
        sleep(MOVE_PAUSE).await;
    }
}

/// Removes the limits of the service's unit until the next boot, for a control daemon that stays in the unit's control group.
/// With the limits the kernel could kill servers, and with them tenants' jobs, to free memory.
pub async fn lift_limits() -> Result<(), Problem> {
    let own = own_service().ok_or("this process does not run in a service of systemd")?;
    let lifted = async {
        let limits = ["MemoryHigh", "MemoryMax", "TasksMax"].map(|limit| (limit, Variant::from(u64::MAX)));
        SystemdProxy::new(&Connection::system().await?).await?.set_unit_properties(&own, true, &limits).await
    };
    answer(PATIENCE, &format!("refuses to remove the memory and task limits of {own}"), lifted).await
}

/// Asks systemd which job it has for this service's unit. The call takes at most 10 s.
pub async fn why_stopping() -> Stopping {
    let Some(own) = own_service() else { return Stopping::NotUnderSystemd };
    let refused = format!("does not report the queued job of {own} (stop or restart)");
    match answer(PATIENCE, &refused, own_job()).await {
        Ok(job) => classify(job.as_deref(), &own),
        Err(reason) => Stopping::Unknown(reason.into()),
    }
}

fn classify(job: Option<&str>, unit: &str) -> Stopping {
    match job {
        Some("stop") => Stopping::Stop,
        // If a start job is running, the start took too long: systemd stops the service and starts it again. If a start job is
        // waiting, systemd runs the job right after the stop.
        Some("restart" | "try-restart" | "start" | "reload-or-start") => Stopping::Restart,
        Some(other) => {
            Stopping::Unknown(format!("systemd's job on {unit} is {other}, which does not stop the unit"))
        }
        None => {
            let found = format!("systemd has no job that stops or restarts {unit}");
            Stopping::Unknown(found)
        }
    }
}

pub type UnitProperties = serde_json::Map<String, serde_json::Value>;

pub async fn unit(name: &str) -> Result<UnitProperties, Problem> {
    let asked = async {
        let connection = Connection::system().await?;
        let unit = SystemdProxy::new(&connection).await?.load_unit(name).await?;
        let properties = fdo::PropertiesProxy::new(&connection, "org.freedesktop.systemd1", unit).await?;
        let mut all = UnitProperties::new();
        for interface in ["org.freedesktop.systemd1.Unit", "org.freedesktop.systemd1.Service"] {
            let values = properties.get_all(interface.try_into()?).await?;
            all.extend(values.iter().map(|(name, value)| (name.clone(), json(value))));
        }
        Ok(all)
    };
    answer(ANSWER_TIMEOUT, "gives yunion-mpsctl no information over the system bus", asked).await
}

/// Waits for an answer of systemd. If systemd refuses the request, the error begins with "systemd" and the text of `refused`.
async fn answer<T>(
    patience: Duration,
    refused: &str,
    asked: impl Future<Output = zbus::Result<T>>,
) -> Result<T, Problem> {
    match timeout(patience, asked).await {
        Ok(answer) => answer.map_err(|error| format!("systemd {refused}: {error}").into()),
        Err(_) => {
            Err(format!("systemd did not answer within {seconds} s", seconds = patience.as_secs()).into())
        }
    }
}

type Property = (&'static str, Variant<'static>);

#[zbus::proxy(
    interface = "org.freedesktop.systemd1.Manager",
    default_service = "org.freedesktop.systemd1",
    default_path = "/org/freedesktop/systemd1"
)]
trait Systemd {
    fn start_transient_unit(
        &self,
        name: &str,
        mode: &str,
        properties: &[Property],
        aux: &[(&str, &[Property])],
    ) -> zbus::Result<OwnedObjectPath>;

    fn set_unit_properties(&self, name: &str, runtime: bool, properties: &[Property]) -> zbus::Result<()>;

    #[zbus(name = "GetUnitByPID")]
    fn get_unit_by_pid(&self, pid: u32) -> zbus::Result<OwnedObjectPath>;

    fn load_unit(&self, name: &str) -> zbus::Result<OwnedObjectPath>;
}

async fn own_job() -> zbus::Result<Option<String>> {
    let connection = Connection::system().await?;
    let systemd = |path, interface| {
        let object = proxy::Builder::<Proxy<'_>>::new(&connection).destination("org.freedesktop.systemd1");
        object.path(path).interface(interface).cache_properties(CacheProperties::No).build()
    };
    let unit = SystemdProxy::new(&connection).await?.get_unit_by_pid(std::process::id()).await?;
    let unit = systemd(unit, "org.freedesktop.systemd1.Unit").await?;
    // The property `Job` has the job's number and object path. The number is 0 if systemd has no job for the unit.
    let (number, job): (u32, OwnedObjectPath) = unit.get_property("Job").await?;
    if number == 0 {
        return Ok(None);
    }
    let job = systemd(job, "org.freedesktop.systemd1.Job").await?;
    job.get_property("JobType").await.map(Some)
}

async fn start_scope(name: &str, mut properties: Vec<Property>) -> zbus::Result<()> {
    let connection = Connection::system().await?;
    let deadline = Instant::now() + NAMESAKE_TIMEOUT;
    let systemd = SystemdProxy::new(&connection).await?;
    // If the kernel's OOM killer ends a process in the scope, systemd must not stop the other processes. systemd 253 and later
    // stop them unless `OOMPolicy` is `continue`. Earlier versions have no `OOMPolicy` for scopes and leave the other processes
    // running.
    let policy = ("OOMPolicy", Variant::from("continue"));
    properties.push(policy.clone());
    loop {
        match systemd.start_transient_unit(name, "fail", &properties, &[]).await {
            Ok(_) => return Ok(()),
            Err(zbus::Error::FDO(error))
                if matches!(*error, fdo::Error::PropertyReadOnly(_)) && properties.contains(&policy) =>
            {
                properties.pop();
            }
            // The former control daemon had a scope with the same name. The scope exists until the former control daemon's
            // servers have ended.
            Err(zbus::Error::MethodError(error, ..))
                if error == "org.freedesktop.systemd1.UnitExists" && Instant::now() < deadline =>
            {
                sleep(NAMESAKE_PAUSE).await;
            }
            Err(error) => return Err(error),
        }
    }
}

/// The properties of a control daemon's scope. The default `KillMode=control-group` fits, since servers and clients end with
/// their control daemon anyway. `BindsTo=` is not set, since systemd would then stop the scope together with the service's
/// unit.
fn scope_properties(id: &str, pid: u32, own_unit: &str) -> Vec<Property> {
    let stop_timeout = u64::try_from(STOP_TIMEOUT.as_micros()).unwrap_or(u64::MAX);
    vec![
        ("Description", Variant::from(format!("NVIDIA MPS control daemon {id} of {own_unit}"))),
        ("PIDs", Variant::from(vec![pid])),
        // At shutdown systemd stops units in the reverse order of `Before`. So the service stops before the scope, and can end
        // the control daemon itself.
        ("Before", Variant::from(vec![own_unit.to_owned()])),
        // With the default value systemd would not remove a failed scope, and no new scope could have the same name.
        ("CollectMode", Variant::from("inactive-or-failed")),
        ("TimeoutStopUSec", Variant::from(stop_timeout)),
    ]
}

/// Escapes the characters that are not allowed in a unit's name, as systemd does: `\x` and two hexadecimal digits. A `-` is not
/// escaped, since it has no special meaning in the name of a scope.
fn scope_name(id: &str) -> String {
    let mut name = "yunion-mps-control-".to_owned();
    for byte in id.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte) {
            name.push(char::from(byte));
        } else {
            name.push_str(&format!("\\x{byte:02x}"));
        }
    }
    name + ".scope"
}

fn own_service() -> Option<String> {
    if !runs_host() {
        return None;
    }
    let cgroup = proc::cgroups_text(proc::OWN).ok()?;
    let unit = unit_of(&cgroup)?;
    // user@1000.service is the service manager of a user. Processes in it are no system services.
    (unit.ends_with(".service") && !unit.starts_with("user@")).then(|| unit.to_owned())
}

/// The unit of a process, from the text of its /proc/PID/cgroup. systemd has its units in the unified hierarchy, or on older
/// hosts in the hierarchy `name=systemd`. In the path, systemd's slices stand before the unit, and control groups in the unit
/// stand after it.
fn unit_of(cgroup: &str) -> Option<&str> {
    cgroup.lines().find_map(|line| {
        let (_, hierarchy_and_path) = line.split_once(':')?;
        let (hierarchy, path) = hierarchy_and_path.split_once(':')?;
        if !hierarchy.is_empty() && hierarchy != "name=systemd" {
            return None;
        }
        path.split('/').find(|part| matches!(part.rsplit_once('.'), Some((_, "service" | "scope"))))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_names_are_valid_unit_names() {
        assert_eq!(scope_name("shared"), "yunion-mps-control-shared.scope");
        assert_eq!(
            scope_name("GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"),
            "yunion-mps-control-GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400.scope"
        );
        assert_eq!(scope_name("a/b@c\\ü"), r"yunion-mps-control-a\x2fb\x40c\x5c\xc3\xbc.scope");
    }

    #[test]
    fn a_unit_is_found_in_every_kind_of_hierarchy() {
        let unified = "0::/system.slice/yunion-mps-daemon.service\n";
        assert_eq!(unit_of(unified), Some("yunion-mps-daemon.service"));
        let legacy = "9:name=systemd:/system.slice/a.service\n4:memory:/system.slice\n0::/\n";
        assert_eq!(unit_of(legacy), Some("a.service"));
        // The hierarchies of other controllers do not count. A slice of systemd has no processes itself, so it is no process's
        // unit.
        assert_eq!(unit_of("4:memory:/system.slice/a.service\n0::/system.slice\n"), None);
        assert_eq!(
            unit_of("0::/system.slice/yunion-mps-control-a:b.scope/sub\n"),
            Some("yunion-mps-control-a:b.scope")
        );
        let of_a_user = "0::/user.slice/user-0.slice/user@0.service/app.slice/a.service\n";
        assert_eq!(unit_of(of_a_user), Some("user@0.service"));
        assert_eq!(unit_of("0::/docker/5f3c\n"), None);
        assert_eq!(unit_of("nonsense\n1:\n\n"), None);
    }

    #[test]
    fn a_job_says_what_comes_next() {
        let of = |job| classify(job, "a.service");
        assert_eq!(of(Some("stop")), Stopping::Stop);
        for job in ["restart", "try-restart", "start", "reload-or-start"] {
            assert_eq!(of(Some(job)), Stopping::Restart, "{job}");
        }
        for job in [Some("reload"), Some("nop"), Some("a later kind"), None] {
            let Stopping::Unknown(reason) = of(job) else { panic!("{job:?}") };
            assert!(reason.contains("a.service"), "{reason}");
        }
    }
}
