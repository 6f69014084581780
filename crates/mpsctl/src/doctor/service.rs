//! Checks of the service: its name on the bus, its unit, and Cloudpods' own MPS daemon, which the service replaces.

// All checks return the type `Outcome`, which is a `Result`. So even a check that never fails wraps its findings in `Ok`.
#![allow(clippy::unnecessary_wraps)]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::facts::{Facts, UNIT};
use super::{Check, Finding, Outcome, Severity, edit_unit, error, info, warning};
use common::bus::error::RequestError;
use common::bus::proxy::BusError;
use common::directories::to_be_writable;
use common::host::proc;
use common::host::systemd::{self, UnitProperties};

pub(super) const CHECKS: &[Check] = &[
    ("the bus", bus),
    ("the state of the unit", unit_state),
    ("the settings of the unit", unit_settings),
    ("unit files that hide the unit of the package", shadowed),
    ("Cloudpods' own MPS daemon", upstream),
    ("the version that runs", version),
];

const POLICIES: [&str; 2] =
    ["/usr/share/dbus-1/system.d/io.yunion.Mps1.conf", "/etc/dbus-1/system.d/io.yunion.Mps1.conf"];

/// Cloudpods' own MPS daemon, which this service replaces.
const UPSTREAM: &str = "/opt/yunion/bin/mps-daemon";

fn bus(facts: &Facts) -> Outcome {
    let finding = match &facts.bus {
        Ok(_) => return Ok(Vec::new()),
        Err(reason @ BusError::Bus(_)) => {
            let remedy = "systemctl start dbus; see journalctl -u dbus";
            error("bus-unreachable", "the system bus", reason.to_string(), remedy)
        }
        Err(BusError::Refused(RequestError::AccessDenied(reason))) => {
            let remedy = if rustix::process::geteuid().is_root() {
                format!(
                    "install the package again, which restores {policy}, then run systemctl reload dbus",
                    policy = POLICIES[0]
                )
            } else {
                "run yunion-mpsctl doctor as root, or join the group yunion-mps".to_owned()
            };
            error("bus-refuses", "io.yunion.Mps1", reason, remedy)
        }
        // The service's name on the bus has an owner, so the bus works and the service hangs. A restart of the bus would harm
        // all other programs on the host, so the remedy restarts only the service.
        Err(BusError::Silent) => error(
            "service-silent",
            UNIT,
            "the service runs, but does not answer",
            "read journalctl -u yunion-mps-daemon, then run systemctl restart yunion-mps-daemon: running jobs \
             carry on",
        ),
        Err(reason @ (BusError::Refused(_) | BusError::Other { .. })) => error(
            "service-refuses",
            UNIT,
            format!("the service does not report its state: {reason}"),
            "run yunion-mpsctl doctor again, in case the service was just starting or ending; see \
             journalctl -u yunion-mps-daemon",
        ),
        Err(BusError::NotRunning) => error(
            "service-not-running",
            UNIT,
            "yunion-mps-daemon does not run: the name io.yunion.Mps1 has no owner on the system bus",
            "systemctl enable --now yunion-mps-daemon; if the service ends again, see journalctl -u \
             yunion-mps-daemon",
        ),
    };
    let no_policy = matches!(facts.bus, Err(BusError::NotRunning))
        && !POLICIES.iter().any(|file| facts.file(file).exists());
    let policy = no_policy.then(|| {
        error(
            "bus-policy-missing",
            POLICIES[0],
            "the file does not exist, so the bus lets no process own the name io.yunion.Mps1",
            "install the package again, then run systemctl reload dbus",
        )
    });
    Ok([finding].into_iter().chain(policy).collect())
}

fn word<'u>(unit: &'u UnitProperties, key: &str) -> &'u str {
    unit.get(key).and_then(Value::as_str).unwrap_or_default()
}

fn is_set(unit: &UnitProperties, key: &str) -> bool {
    unit.get(key) == Some(&Value::Bool(true))
}

fn unit_state(facts: &Facts) -> Outcome {
    Ok(judge_state(facts.unit.as_ref().map_err(Clone::clone)?))
}

/// The gravest problem of the service's unit that systemd reports, with a remedy. None if systemd reports no error.
pub(crate) async fn why_not_running() -> Option<String> {
    let unit = systemd::unit(UNIT).await.ok()?;
    let gravest = judge_state(&unit).into_iter().find(|finding| finding.severity == Severity::Error);
    gravest.map(|finding| finding.problem.to_string())
}

fn judge_state(unit: &UnitProperties) -> Vec<Finding> {
    let mut findings = Vec::new();
    match word(unit, "LoadState") {
        "not-found" => {
            let remedy = "install the package again, then run systemctl daemon-reload";
            return vec![error("unit-not-installed", UNIT, "systemd knows no such unit", remedy)];
        }
        "masked" => {
            let remedy = "systemctl unmask yunion-mps-daemon && systemctl enable --now yunion-mps-daemon";
            return vec![error(
                "unit-masked",
                UNIT,
                "the unit is masked, so nothing starts the service",
                remedy,
            )];
        }
        "bad-setting" | "error" => {
            let (subject, remedy) = (word(unit, "FragmentPath"), format!("systemd-analyze verify {UNIT}"));
            findings.push(error("unit-broken", subject, "systemd can't read this unit file", remedy));
        }
        _ => {}
    }
    if word(unit, "UnitFileState") == "disabled" {
        let remedy = "systemctl enable yunion-mps-daemon";
        findings.push(warning("unit-not-enabled", UNIT, "the service does not start at boot", remedy));
    }
    if word(unit, "ActiveState") == "failed" {
        let status = unit.get("ExecMainStatus").and_then(Value::as_i64).unwrap_or_default();
        let (found, remedy) = match (word(unit, "Result"), status) {
            ("exit-code", 78) => (
                "the service ended because the configuration is wrong".to_owned(),
                "run yunion-mpsctl check, then run systemctl start yunion-mps-daemon",
            ),
            ("start-limit-hit", _) => (
                "the service ended too often in a short time, so systemd no longer starts it".to_owned(),
                "read journalctl -u yunion-mps-daemon, then run systemctl reset-failed yunion-mps-daemon and \
                 systemctl start yunion-mps-daemon",
            ),
            (result, status) => (
                format!("the service failed: {result}, exit status {status}"),
                "read journalctl -u yunion-mps-daemon, then run systemctl start yunion-mps-daemon",
            ),
        };
        findings.push(error("unit-failed", UNIT, found, remedy));
    }
    if is_set(unit, "NeedDaemonReload") {
        let (subject, found) =
            (word(unit, "FragmentPath"), "the unit file was changed after systemd had read it");
        findings.push(warning("unit-changed", subject, found, "systemctl daemon-reload"));
    }
    findings
}

fn unit_settings(facts: &Facts) -> Outcome {
    let unit = facts.unit.as_ref().map_err(Clone::clone)?;
    Ok(judge_settings(unit, &facts.all_directories()?.collect::<Vec<_>>()))
}

fn judge_settings(unit: &UnitProperties, needed: &[PathBuf]) -> Vec<Finding> {
    let mut findings = Vec::new();
    if matches!(word(unit, "LoadState"), "not-found" | "masked") {
        return findings;
    }
    let temporary = needed.iter().find(|path| path.starts_with("/tmp") || path.starts_with("/var/tmp"));
    if let Some(directory) = temporary.filter(|_| is_set(unit, "PrivateTmp")) {
        let found = format!(
            "PrivateTmp=yes: the service has its own {directory}, which is not the directory that \
             containers are given",
            directory = directory.display()
        );
        findings.push(error("unit-private-tmp", UNIT, found, edit_unit("PrivateTmp=no")));
    }
    let granted = unit.get("ReadWritePaths").and_then(Value::as_array).into_iter().flatten();
    let granted: Vec<&str> =
        granted.filter_map(Value::as_str).map(|path| path.trim_start_matches(['-', '+'])).collect();
    let protected: &[&str] = match word(unit, "ProtectSystem") {
        "yes" => &["/usr", "/boot", "/efi"],
        "full" => &["/usr", "/boot", "/efi", "/etc"],
        "strict" => &["/"],
        _ => &[],
    };
    for directory in needed {
        let covered = protected.iter().any(|path| directory.starts_with(path));
        // These directories stay writable with `ProtectSystem=strict`.
        let apart = ["/dev", "/proc", "/sys"].iter().any(|path| directory.starts_with(path));
        if covered && !apart && !granted.iter().any(|path| directory.starts_with(path)) {
            findings.push(error(
                "unit-protects-directory",
                directory.display(),
                format!(
                    "ProtectSystem={value}: the service can't write to this directory",
                    value = word(unit, "ProtectSystem")
                ),
                edit_unit(&format!("ReadWritePaths={}", to_be_writable(directory).display())),
            ));
        }
    }
    if word(unit, "KillMode") == "control-group" {
        findings.push(error(
            "unit-kill-mode",
            UNIT,
            "KillMode=control-group: a restart can end control daemons, and every job with them",
            edit_unit("KillMode=process"),
        ));
    }
    findings
}

/// Finds a file in `/etc` that hides the unit file of the package. A link to `/dev/null` is no finding here: the link masks the
/// unit, and another check reports a masked unit.
fn shadowed(facts: &Facts) -> Outcome {
    let hidden = Path::new("/etc/systemd/system").join(UNIT);
    let file = facts.file(&hidden);
    let Ok(text) = fs::read_to_string(&file) else { return Ok(Vec::new()) };
    let ours =
        ["/usr/lib/systemd/system", "/lib/systemd/system"].map(|directory| Path::new(directory).join(UNIT));
    let ours: Vec<String> =
        ours.iter().filter_map(|path| fs::read_to_string(facts.file(path)).ok()).collect();
    if text.trim().is_empty() || ours.contains(&text) {
        return Ok(Vec::new());
    }
    let starts = text.lines().find_map(|line| line.trim().strip_prefix("ExecStart="));
    let found = format!(
        "this file hides the unit of the package and starts {program}",
        program = starts.unwrap_or("nothing")
    );
    let hidden = hidden.display();
    let remedy = format!(
        "rm {hidden} && systemctl daemon-reload; put your own settings into a drop-in: systemctl edit {UNIT}"
    );
    Ok(vec![warning("unit-shadowed", hidden, found, remedy)])
}

/// Finds Cloudpods' own MPS daemon. Two programs that set compute modes and start control daemons undo each other's work.
fn upstream(facts: &Facts) -> Outcome {
    let installed = facts.file(UPSTREAM).exists().then(|| {
        let found = "Cloudpods' own MPS daemon is still installed, and would use the same GPUs";
        let remedy =
            "remove the package of this program (find it with dpkg -S or rpm -qf), or delete the file";
        warning("upstream-installed", UPSTREAM, found, remedy)
    });
    let processes = if facts.own_processes() { proc::pids() } else { Vec::new() };
    let runs = processes.into_iter().filter(|pid| proc::name(*pid).as_deref() == Some("mps-daemon"));
    let running = runs.map(|pid| {
        let found =
            "Cloudpods' own MPS daemon runs: it sets compute modes and starts control daemons as well";
        let remedy =
            format!("stop the unit that `systemctl status {pid}` names (systemctl stop), or kill {pid}");
        error("upstream-running", format!("process {pid}"), found, remedy)
    });
    Ok(installed.into_iter().chain(running).collect())
}

fn version(facts: &Facts) -> Outcome {
    let running = &facts.published()?.service.version;
    let ours = env!("CARGO_PKG_VERSION");
    if running.is_empty() || running == ours {
        return Ok(Vec::new());
    }
    let found = format!("version {running} of the service runs, but yunion-mpsctl has version {ours}");
    let remedy = "systemctl restart yunion-mps-daemon: running jobs carry on";
    Ok(vec![info("service-of-another-version", UNIT, found, remedy)])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn unit(changes: &Value) -> UnitProperties {
        let mut unit = json!({
            "LoadState": "loaded",
            "ActiveState": "active",
            "UnitFileState": "enabled",
            "FragmentPath": "/usr/lib/systemd/system/yunion-mps-daemon.service",
            "NeedDaemonReload": false,
            "Result": "success",
            "ExecMainStatus": 0,
            "PrivateTmp": false,
            "ProtectSystem": "no",
            "ReadWritePaths": [],
            "KillMode": "process",
        });
        let all = unit.as_object_mut().unwrap();
        all.extend(changes.as_object().unwrap().clone());
        all.clone()
    }

    fn found(changes: &Value, needed: &[&str]) -> Vec<&'static str> {
        let (unit, needed) = (unit(changes), needed.iter().map(PathBuf::from).collect::<Vec<_>>());
        let findings = judge_state(&unit).into_iter().chain(judge_settings(&unit, &needed));
        findings.map(|finding| finding.name).collect()
    }

    #[test]
    fn a_unit_is_judged_by_what_systemd_says_of_it() {
        const TMP: &[&str] = &["/tmp/nvidia-mps/pipe", "/tmp/nvidia-mps/log"];
        for (changes, needed, expected) in [
            (json!({}), TMP, &[][..]),
            (json!({"LoadState": "not-found", "UnitFileState": ""}), TMP, &["unit-not-installed"]),
            (json!({"LoadState": "masked", "UnitFileState": "masked"}), TMP, &["unit-masked"]),
            (json!({"LoadState": "bad-setting"}), TMP, &["unit-broken"]),
            (json!({"UnitFileState": "disabled"}), TMP, &["unit-not-enabled"]),
            (
                json!({"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": 78}),
                TMP,
                &["unit-failed"],
            ),
            (json!({"ActiveState": "failed", "Result": "start-limit-hit"}), TMP, &["unit-failed"]),
            (json!({"ActiveState": "failed", "Result": "watchdog"}), TMP, &["unit-failed"]),
            (json!({"NeedDaemonReload": true}), TMP, &["unit-changed"]),
            (json!({"PrivateTmp": true}), TMP, &["unit-private-tmp"]),
            (json!({"PrivateTmp": true}), &["/run/mps/pipe"], &[]),
            (json!({"ProtectSystem": "full"}), TMP, &[]),
            (json!({"ProtectSystem": "full"}), &["/etc/mps"], &["unit-protects-directory"]),
            (json!({"ProtectSystem": "strict"}), &["/run/mps/pipe"], &["unit-protects-directory"]),
            (json!({"ProtectSystem": "strict", "ReadWritePaths": ["-/run/mps"]}), &["/run/mps/pipe"], &[]),
            (json!({"ProtectSystem": "strict"}), &["/dev/shm/mps"], &[]),
            (json!({"KillMode": "control-group"}), TMP, &["unit-kill-mode"]),
        ] {
            assert_eq!(found(&changes, needed), expected, "{changes} {needed:?}");
        }
    }

    /// The service makes hard links between the pipe directory and a directory beside the pipe directory, which needs both on
    /// one mount. systemd makes each directory in `ReadWritePaths=` a mount of its own. So the remedy names the parent.
    #[test]
    fn the_remedy_allows_the_parent() {
        let strict = unit(&json!({"ProtectSystem": "strict"}));
        for needed in ["/run/mps/pipe", "/run/mps/pipe/GPU-168acfc9"] {
            let remedy = judge_settings(&strict, &[needed.into()]).remove(0).problem.remedy;
            assert!(remedy.contains("ReadWritePaths=/run/mps") && !remedy.contains("/run/mps/"), "{remedy}");
        }
    }

    #[test]
    fn a_failed_unit_says_why() {
        let of = |changes: Value| judge_state(&unit(&changes)).remove(0);
        let wrong = of(json!({"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": 78}));
        assert!(
            wrong.problem.found.contains("configuration")
                && wrong.problem.remedy.contains("yunion-mpsctl check"),
            "{wrong:?}"
        );
        let other = of(json!({"ActiveState": "failed", "Result": "watchdog", "ExecMainStatus": 6}));
        assert!(other.problem.found.contains("watchdog, exit status 6"), "{other:?}");
    }
}
