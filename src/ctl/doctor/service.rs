//! The service: its place on the bus, its unit, and what is left of the program that it replaces.

// All checks have one type, with a Result for the ones that may lack a fact.
#![allow(clippy::unnecessary_wraps)]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::facts::{Facts, UNIT};
use super::{Check, Outcome, error, info, warning};
use crate::ctl::published::Bus;
use crate::host::proc;
use crate::host::systemd::UnitProperties;

pub(super) const CHECKS: &[Check] = &[
    ("the bus", bus),
    ("the state of the unit", unit_state),
    ("the settings of the unit", unit_settings),
    ("unit files that hide ours", shadowed),
    ("the program of the platform", upstream),
    ("the version that runs", version),
];

const POLICIES: [&str; 2] =
    ["/usr/share/dbus-1/system.d/io.yunion.Mps1.conf", "/etc/dbus-1/system.d/io.yunion.Mps1.conf"];

/// The program that this service replaces.
const UPSTREAM: &str = "/opt/yunion/bin/mps-daemon";

fn bus(facts: &Facts) -> Outcome {
    let mut findings = Vec::new();
    match &facts.bus {
        Bus::Answers(_) => {}
        Bus::Unreachable(reason) => findings.push(error(
            "bus-unreachable",
            "the system bus",
            reason.clone(),
            "systemctl start dbus; journalctl -u dbus says more",
        )),
        Bus::Denied(reason) => findings.push(error(
            "bus-refuses",
            "io.yunion.Mps1",
            reason.clone(),
            format!("install {} and systemctl reload dbus", POLICIES[0]),
        )),
        // The bus is well; to start it again would hurt everything else on the host.
        Bus::Silent => findings.push(error(
            "service-silent",
            UNIT,
            "it runs and does not answer",
            "journalctl -u yunion-mps-daemon, then systemctl restart yunion-mps-daemon: running jobs carry on",
        )),
        Bus::Refuses(reason) => findings.push(error(
            "service-refuses",
            UNIT,
            format!("it does not say how it is: {reason}"),
            "run yunion-mpsctl doctor again, in case it was just starting or ending; journalctl -u \
             yunion-mps-daemon says more",
        )),
        Bus::NotRunning => {
            findings.push(error(
                "service-not-running",
                UNIT,
                "nobody owns the name io.yunion.Mps1 on the system bus",
                "systemctl enable --now yunion-mps-daemon; if it does not stay: journalctl -u yunion-mps-daemon",
            ));
            if !POLICIES.iter().any(|file| facts.file(file).exists()) {
                findings.push(error(
                    "bus-policy-missing",
                    POLICIES[0],
                    "it does not exist, so the bus gives the name io.yunion.Mps1 to nobody",
                    "install it again with the package, then systemctl reload dbus",
                ));
            }
        }
    }
    Ok(findings)
}

fn word<'u>(unit: &'u UnitProperties, key: &str) -> &'u str {
    unit.get(key).and_then(Value::as_str).unwrap_or_default()
}

fn unit_state(facts: &Facts) -> Outcome {
    Ok(judge_state(facts.unit.as_ref().map_err(Clone::clone)?))
}

fn judge_state(unit: &UnitProperties) -> Vec<super::Finding> {
    let mut findings = Vec::new();
    match word(unit, "LoadState") {
        "not-found" => {
            findings.push(error(
                "unit-not-installed",
                UNIT,
                "systemd knows no such unit",
                "install the package again, then systemctl daemon-reload",
            ));
            return findings;
        }
        "masked" => {
            findings.push(error(
                "unit-masked",
                UNIT,
                "it is masked: nothing starts it",
                "systemctl unmask yunion-mps-daemon && systemctl enable --now yunion-mps-daemon",
            ));
            return findings;
        }
        "bad-setting" | "error" => findings.push(error(
            "unit-broken",
            word(unit, "FragmentPath"),
            "systemd can't read it",
            format!("systemd-analyze verify {UNIT}"),
        )),
        _ => {}
    }
    if word(unit, "UnitFileState") == "disabled" {
        findings.push(warning(
            "unit-not-enabled",
            UNIT,
            "it does not start at boot",
            "systemctl enable yunion-mps-daemon",
        ));
    }
    if word(unit, "ActiveState") == "failed" {
        let status = unit.get("ExecMainStatus").and_then(Value::as_i64).unwrap_or_default();
        let (found, remedy) = match (word(unit, "Result"), status) {
            ("exit-code", 78) => (
                "it ended because the configuration is wrong".to_owned(),
                "yunion-mpsctl check, then systemctl start yunion-mps-daemon",
            ),
            ("start-limit-hit", _) => (
                "it ended too often".to_owned(),
                "journalctl -u yunion-mps-daemon, then systemctl reset-failed yunion-mps-daemon and start it",
            ),
            (result, status) => (
                format!("it failed: {result}, exit status {status}"),
                "journalctl -u yunion-mps-daemon, then systemctl start yunion-mps-daemon",
            ),
        };
        findings.push(error("unit-failed", UNIT, found, remedy));
    }
    if unit.get("NeedDaemonReload") == Some(&Value::Bool(true)) {
        findings.push(warning(
            "unit-changed",
            word(unit, "FragmentPath"),
            "it was changed since systemd read it",
            "systemctl daemon-reload",
        ));
    }
    findings
}

fn unit_settings(facts: &Facts) -> Outcome {
    let unit = facts.unit.as_ref().map_err(Clone::clone)?;
    let directories = facts.directories()?;
    let needed: Vec<&Path> =
        directories.iter().flat_map(|(pipe, log)| [pipe.as_path(), log.as_path()]).collect();
    Ok(judge_settings(unit, &needed))
}

fn judge_settings(unit: &UnitProperties, needed: &[&Path]) -> Vec<super::Finding> {
    let mut findings = Vec::new();
    if matches!(word(unit, "LoadState"), "not-found" | "masked") {
        return findings;
    }
    let edit = |what: &str| {
        format!(
            "systemctl edit yunion-mps-daemon, add [Service] and {what}, then systemctl restart yunion-mps-daemon"
        )
    };
    let temporary = needed.iter().find(|path| path.starts_with("/tmp") || path.starts_with("/var/tmp"));
    if let Some(directory) = temporary.filter(|_| unit.get("PrivateTmp") == Some(&Value::Bool(true))) {
        findings.push(error(
            "unit-private-tmp",
            UNIT,
            format!("PrivateTmp=yes: {} is not the one that containers are given", directory.display()),
            edit("PrivateTmp=no"),
        ));
    }
    let granted = unit.get("ReadWritePaths").and_then(Value::as_array);
    let granted: Vec<PathBuf> = granted
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .map(|path| PathBuf::from(path.trim_start_matches(['-', '+'])))
        .collect();
    let protected: &[&str] = match word(unit, "ProtectSystem") {
        "yes" => &["/usr", "/boot", "/efi"],
        "full" => &["/usr", "/boot", "/efi", "/etc"],
        "strict" => &["/"],
        _ => &[],
    };
    for directory in needed {
        let covered = protected.iter().any(|path| directory.starts_with(path));
        // These stay writable under strict too.
        let apart = ["/dev", "/proc", "/sys"].iter().any(|path| directory.starts_with(path));
        if covered && !apart && !granted.iter().any(|path| directory.starts_with(path)) {
            findings.push(error(
                "unit-protects-directory",
                directory.display(),
                format!("ProtectSystem={}: the service can't write there", word(unit, "ProtectSystem")),
                edit(&format!("ReadWritePaths={}", directory.display())),
            ));
        }
    }
    if word(unit, "KillMode") == "control-group" {
        findings.push(error(
            "unit-kill-mode",
            UNIT,
            "KillMode=control-group: a restart can end control daemons, and every job with them",
            edit("KillMode=process"),
        ));
    }
    findings
}

/// A file in /etc wins over the package's. A link to /dev/null is a mask, which the unit's state tells.
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
    Ok(vec![warning(
        "unit-shadowed",
        hidden.display(),
        format!("it hides the unit of the package and starts {}", starts.unwrap_or("nothing")),
        format!(
            "rm {} && systemctl daemon-reload; own settings belong in a drop-in: systemctl edit",
            hidden.display()
        ),
    )])
}

/// Two programs that set compute modes and start control daemons would be at each other's throats.
fn upstream(facts: &Facts) -> Outcome {
    let mut findings = Vec::new();
    if facts.file(UPSTREAM).exists() {
        findings.push(warning(
            "upstream-installed",
            UPSTREAM,
            "the platform's own MPS daemon is still installed, and would use the same GPUs",
            "remove the package that it is from (dpkg -S or rpm -qf), or rm it",
        ));
    }
    if facts.own_processes() {
        for pid in proc::pids().into_iter().filter(|pid| proc::name(*pid).as_deref() == Some("mps-daemon")) {
            findings.push(error(
                "upstream-running",
                format!("process {pid}"),
                "the platform's own MPS daemon runs: it sets compute modes and starts control daemons as well",
                format!("systemctl stop the unit that `systemctl status {pid}` names, or kill {pid}"),
            ));
        }
    }
    Ok(findings)
}

fn version(facts: &Facts) -> Outcome {
    let running = &facts.published()?.service.version;
    let ours = env!("CARGO_PKG_VERSION");
    if running.is_empty() || running == ours {
        return Ok(Vec::new());
    }
    Ok(vec![info(
        "service-of-another-version",
        UNIT,
        format!("version {running} runs, and this program is {ours}"),
        "systemctl restart yunion-mps-daemon: running jobs carry on",
    )])
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
        let (unit, needed) = (unit(changes), needed.iter().map(Path::new).collect::<Vec<_>>());
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

    #[test]
    fn a_failed_unit_says_why() {
        let of = |changes: Value| judge_state(&unit(&changes)).remove(0);
        let wrong = of(json!({"ActiveState": "failed", "Result": "exit-code", "ExecMainStatus": 78}));
        assert!(
            wrong.found.contains("configuration") && wrong.remedy.contains("yunion-mpsctl check"),
            "{wrong:?}"
        );
        let other = of(json!({"ActiveState": "failed", "Result": "watchdog", "ExecMainStatus": 6}));
        assert!(other.found.contains("watchdog, exit status 6"), "{other:?}");
    }
}
