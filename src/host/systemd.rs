//! What is asked of systemd: a scope for a control daemon, and why it wants us to stop.
//!
//! A control daemon has to outlive this service, but what is in a unit's control group is systemd's to end. So each
//! control daemon gets a scope of its own, a unit that holds processes which systemd has not started. `systemctl stop`
//! of such a scope ends the control daemon with all of its servers and clients.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use zbus::connection::Builder;
use zbus::proxy::CacheProperties;
use zbus::{Connection, OwnedObjectPath, Variant, fdo};

use super::variant::json;
use crate::host::proc;

/// What systemd gets to say what it knows of a unit: somebody waits for that.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// What it gets to say why we stop. While it reads its units anew it answers nobody for a while, and a stop that we don't
/// know for one leaves the control daemons running. A bus that is gone is known at once.
const WHY_TIMEOUT: Duration = Duration::from_secs(10);

/// What it gets to answer a request for a scope, and then to move the process there. It needs milliseconds, but while it
/// reads its units anew, which can take seconds on a large host, it answers nobody.
const SCOPE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a scope of the same name may take to go away.
const NAMESAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause between two requests while a namesake is there.
const NAMESAKE_PAUSE: Duration = Duration::from_millis(50);

/// The pause between two looks at a process that is being moved. systemd needs about a millisecond.
const MOVE_PAUSE: Duration = Duration::from_millis(2);

/// What a control daemon and its servers get to end by SIGTERM when systemd stops the scope. Measured: 4 ms; systemd's
/// own default of 90 s would only hold up a shutdown.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Why this process has got SIGTERM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stopping {
    /// The unit is being stopped, alone or with the host.
    Stop,
    /// The unit is wanted up again at once: `systemctl restart`, an upgrade, a start that took too long.
    Restart,
    /// No systemd runs this process as a service, so SIGTERM means what it says: stop.
    NotUnderSystemd,
    /// It can't be told, for this reason: systemd did not answer, or nothing was asked of it (somebody's `kill`,
    /// `systemctl kill`, a limit such as `RuntimeMaxSec=`). Clients should be left running then, as for a restart: a
    /// control daemon that is left too long can still be stopped, a job that was ended is lost.
    Unknown(String),
}

/// Whether systemd runs this process as a service of the system. Started by hand, it is not systemd's to look after,
/// even where systemd is there.
pub fn runs_us() -> bool {
    own_service().is_some()
}

/// Moves a process into a scope of its own, `yunion-mps-control-<id>.scope`, and returns that name. It is there when
/// this returns.
///
/// # Errors
/// No systemd runs us, or it does not do it, with the reason. The process is then most likely where it was; it may also
/// be in the scope a moment later.
pub async fn move_to_scope(id: &str, pid: u32) -> Result<String, String> {
    let own = own_service().ok_or("this process is not a service of systemd's")?;
    let name = scope_name(id);
    match timeout(SCOPE_TIMEOUT, start_scope(&name, &scope_properties(id, pid, &own))).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => return Err(format!("systemd does not make {name}: {error}")),
        Err(_) => return Err(format!("systemd has not made {name} within {} s", SCOPE_TIMEOUT.as_secs())),
    }
    let deadline = Instant::now() + SCOPE_TIMEOUT;
    // The answer says that the job is queued. That it is done shows where the process is.
    loop {
        let cgroup = proc::cgroups_text(pid)
            .map_err(|error| format!("process {pid} has ended on its way to {name}: {error}"))?;
        let unit = unit_of(&cgroup);
        if unit == Some(&name) {
            return Ok(name);
        }
        if Instant::now() >= deadline {
            let unit = unit.unwrap_or("no unit");
            return Err(format!(
                "process {pid} is still in {unit} {} s after systemd was asked to move it to {name}",
                SCOPE_TIMEOUT.as_secs()
            ));
        }
        sleep(MOVE_PAUSE).await;
    }
}

/// Lifts the limits of our unit until the host is booted again, since a control daemon stays in its control group: for
/// memory, the kernel would end servers, and tenants' jobs with them.
///
/// # Errors
/// systemd does not do it, with the reason.
pub async fn lift_limits() -> Result<(), String> {
    let own = own_service().ok_or("this process is not a service of systemd's")?;
    let lifted = async {
        let connection = connect().await?;
        let systemd =
            SystemdProxy::builder(&connection).cache_properties(CacheProperties::No).build().await?;
        let limits = ["MemoryHigh", "MemoryMax", "TasksMax"];
        systemd.set_unit_properties(&own, true, &limits.map(|limit| (limit, Variant::from(u64::MAX)))).await
    };
    match timeout(SCOPE_TIMEOUT, lifted).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(format!("systemd does not lift the limits of {own}: {error}")),
        Err(_) => {
            Err(format!("systemd has not lifted the limits of {own} within {} s", SCOPE_TIMEOUT.as_secs()))
        }
    }
}

/// Asks systemd what it is doing with our unit. Takes 10 s at most.
pub async fn why_stopping() -> Stopping {
    let Some(own) = own_service() else { return Stopping::NotUnderSystemd };
    match timeout(WHY_TIMEOUT, own_job()).await {
        Ok(Ok(job)) => classify(job.as_deref(), &own),
        Ok(Err(error)) => {
            Stopping::Unknown(format!("systemd can't be asked what it does with {own}: {error}"))
        }
        Err(_) => Stopping::Unknown(format!("systemd did not answer within {} s", WHY_TIMEOUT.as_secs())),
    }
}

/// What a job on our unit says of its future.
fn classify(job: Option<&str>, unit: &str) -> Stopping {
    match job {
        Some("stop") => Stopping::Stop,
        // A start job that still runs while we are told to stop has taken too long, and systemd starts anew. One that
        // waits comes right after us.
        Some("restart" | "try-restart" | "start" | "reload-or-start") => Stopping::Restart,
        Some(other) => {
            Stopping::Unknown(format!("systemd's job on {unit} is {other}, which is no reason to stop"))
        }
        None => Stopping::Unknown(format!(
            "systemd was not asked to stop or restart {unit}: it has no job for it"
        )),
    }
}

/// What systemd knows of a unit: the properties of its Unit and Service interfaces, under systemd's names.
pub type UnitProperties = serde_json::Map<String, serde_json::Value>;

/// Asks systemd about a service, installed or not. Takes 2 s at most.
///
/// # Errors
/// No systemd is on the system bus, or it does not answer.
pub async fn unit(name: &str) -> Result<UnitProperties, String> {
    let asked = async {
        let connection = connect().await?;
        let systemd =
            SystemdProxy::builder(&connection).cache_properties(CacheProperties::No).build().await?;
        let unit = systemd.load_unit(name).await?;
        let properties = fdo::PropertiesProxy::builder(&connection)
            .destination("org.freedesktop.systemd1")
            .path(unit)
            .build()
            .await?;
        let mut all = UnitProperties::new();
        for interface in ["org.freedesktop.systemd1.Unit", "org.freedesktop.systemd1.Service"] {
            let values = properties.get_all(interface.try_into()?).await?;
            all.extend(values.iter().map(|(name, value)| (name.clone(), json(value))));
        }
        Ok::<_, zbus::Error>(all)
    };
    match timeout(ANSWER_TIMEOUT, asked).await {
        Ok(Ok(all)) => Ok(all),
        Ok(Err(error)) => Err(format!("systemd can't be asked on the system bus: {error}")),
        Err(_) => Err(format!("systemd did not answer within {} s", ANSWER_TIMEOUT.as_secs())),
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

#[zbus::proxy(interface = "org.freedesktop.systemd1.Unit", default_service = "org.freedesktop.systemd1")]
trait Unit {
    /// Number and path; 0 for no job.
    #[zbus(property)]
    fn job(&self) -> zbus::Result<(u32, OwnedObjectPath)>;
}

#[zbus::proxy(interface = "org.freedesktop.systemd1.Job", default_service = "org.freedesktop.systemd1")]
trait Job {
    #[zbus(property)]
    fn job_type(&self) -> zbus::Result<String>;
}

/// A connection of its own: the one that serves our name may just be coming or going.
async fn connect() -> zbus::Result<Connection> {
    Builder::system().build().await
}

async fn own_job() -> zbus::Result<Option<String>> {
    let connection = connect().await?;
    let systemd = SystemdProxy::builder(&connection).cache_properties(CacheProperties::No).build().await?;
    let unit = systemd.get_unit_by_pid(std::process::id()).await?;
    let unit = UnitProxy::builder(&connection).path(unit).cache_properties(CacheProperties::No);
    let (number, job) = unit.build().await?.job().await?;
    if number == 0 {
        return Ok(None);
    }
    let job = JobProxy::builder(&connection).path(job).cache_properties(CacheProperties::No);
    job.build().await?.job_type().await.map(Some)
}

async fn start_scope(name: &str, properties: &[Property]) -> zbus::Result<()> {
    let connection = connect().await?;
    let deadline = Instant::now() + NAMESAKE_TIMEOUT;
    let systemd = SystemdProxy::builder(&connection).cache_properties(CacheProperties::No).build().await?;
    // A victim of the kernel's OOM killer in the scope is no reason to stop the rest of it. Scopes know this since
    // systemd 253, and before that they behave so anyway.
    let mut extended = vec![("OOMPolicy", Variant::from("continue"))];
    extended.extend(properties.iter().cloned());
    let mut properties = extended.as_slice();
    loop {
        let Err(error) = systemd.start_transient_unit(name, "fail", properties, &[]).await else {
            return Ok(());
        };
        match &error {
            zbus::Error::FDO(what)
                if matches!(**what, fdo::Error::PropertyReadOnly(_))
                    && properties.len() == extended.len() =>
            {
                properties = properties.get(1..).unwrap_or_default();
            }
            // The control daemon that this one replaces has ended, its servers may be about to.
            zbus::Error::MethodError(name, _, _)
                if *name == "org.freedesktop.systemd1.UnitExists" && Instant::now() < deadline =>
            {
                sleep(NAMESAKE_PAUSE).await;
            }
            _ => return Err(error),
        }
    }
}

/// Of the defaults, two are meant: `KillMode=control-group`, since servers and clients end with their control daemon
/// anyway, and no `BindsTo=` or the like that would end the scope with our unit.
fn scope_properties(id: &str, pid: u32, own_unit: &str) -> Vec<Property> {
    let stop_timeout = u64::try_from(STOP_TIMEOUT.as_micros()).unwrap_or(u64::MAX);
    vec![
        ("Description", Variant::from(format!("NVIDIA MPS control daemon {id} of {own_unit}"))),
        ("PIDs", Variant::from(vec![pid])),
        // Stopping goes the other way round: at shutdown we stop first, and end the control daemon in order.
        ("Before", Variant::from(vec![own_unit.to_owned()])),
        // A scope that failed must not keep its name.
        ("CollectMode", Variant::from("inactive-or-failed")),
        ("TimeoutStopUSec", Variant::from(stop_timeout)),
    ]
}

/// The scope's name. Whatever a unit's name can't have is written as systemd writes it, `\x` and two digits; a `-`
/// stays, as it has no meaning here.
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

/// The service that systemd runs this process as.
fn own_service() -> Option<String> {
    if !sd_notify::booted().unwrap_or(false) {
        return None;
    }
    let cgroup = proc::cgroups_text(proc::OWN).ok()?;
    let unit = unit_of(&cgroup)?;
    // user@1000.service is the manager of that user's services, none of which is ours to be.
    (unit.ends_with(".service") && !unit.starts_with("user@")).then(|| unit.to_owned())
}

/// The unit that a process is in, from its /proc/PID/cgroup. systemd keeps its units in the unified hierarchy, or on
/// older hosts in one named systemd. Slices are the way to a unit, and what is below one is the unit's own business.
fn unit_of(cgroup: &str) -> Option<&str> {
    cgroup.lines().find_map(|line| {
        let (_, hierarchy_and_path) = line.split_once(':')?;
        let (hierarchy, path) = hierarchy_and_path.split_once(':')?;
        if !hierarchy.is_empty() && hierarchy != "name=systemd" {
            return None;
        }
        path.split('/').find(|part| part.ends_with(".service") || part.ends_with(".scope"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_names_hold_what_unit_names_may() {
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
        // Another controller's group has a name of its own, and a slice is no unit that holds processes.
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
        for job in [Some("reload"), Some("nop"), Some("news to us"), None] {
            let Stopping::Unknown(reason) = of(job) else { panic!("{job:?}") };
            assert!(reason.contains("a.service"), "{reason}");
        }
    }
}
