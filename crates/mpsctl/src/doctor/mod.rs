//! `yunion-mpsctl doctor`: finds problems on this host, and names a remedy for each.
//!
//! Each check is a function of the facts about the host, which are gathered once. Each module has the checks of one subject.
//! The service and `doctor` use the same code for the rules about the configuration, the plan and the directories.

mod configuration;
mod directories;
mod driver;
mod engines;
mod facts;
mod gpus;
mod processes;
mod service;
mod serving;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use serde_json::json;

use self::facts::Facts;
pub(super) use self::service::why_not_running;
use super::{Result, print_json};
use crate::show::table::{hanging, pairs};
use common::check::within;
use common::config::Sources;
use common::counted::counted;
use common::problem::Problem;
use common::text::printable;

/// The longest time for one check, since a file system or a program may hang.
const DEADLINE: Duration = Duration::from_secs(5);

/// The exit status of `doctor` when the worst finding is a warning.
const WARNINGS: u8 = 4;
/// The exit status of `doctor` when it has found errors.
const ERRORS: u8 = 5;

#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// The main configuration file [default: the file that the service reads]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check the files below this directory instead of /, and check no processes
    #[arg(long, value_name = "DIR", default_value = "/")]
    sysroot: PathBuf,
    /// Name the checks that could not be made, each with the reason
    #[arg(short, long, conflicts_with = "json")]
    verbose: bool,
    /// Print the findings, and the checks that could not be made, as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Severity {
    /// A slice or a GPU is not served, or is not in the state that the service publishes.
    Error,
    /// The service works now, but the problem will cause a failure later or surprise users.
    Warning,
    Info,
}

impl Severity {
    fn word(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Info => "info",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    /// The name of this kind of finding. Scripts compare the name, so it never changes.
    name: &'static str,
    severity: Severity,
    /// The file, the GPU or the process that the finding is about.
    subject: String,
    #[serde(flatten)]
    problem: Problem,
}

type Name = &'static str;

#[expect(
    clippy::needless_pass_by_value,
    reason = "callers make texts and displayed paths for this call alone"
)]
fn finding(severity: Severity, name: Name, subject: impl ToString, problem: Problem) -> Finding {
    Finding { name, severity, subject: subject.to_string(), problem }
}

fn error(name: Name, subject: impl ToString, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
    finding(Severity::Error, name, subject, Problem::new(found, remedy))
}

fn warning(
    name: Name,
    subject: impl ToString,
    found: impl Into<String>,
    remedy: impl Into<String>,
) -> Finding {
    finding(Severity::Warning, name, subject, Problem::new(found, remedy))
}

fn info(name: Name, subject: impl ToString, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
    finding(Severity::Info, name, subject, Problem::new(found, remedy))
}

fn edit_unit(setting: &str) -> String {
    format!(
        "write [Service] and {setting} with systemctl edit yunion-mps-daemon, then run systemctl restart \
         yunion-mps-daemon"
    )
}

/// The findings of a check. The error is the reason why the check was not possible.
type Outcome = Result<Vec<Finding>, Problem>;

#[expect(clippy::unnecessary_wraps, reason = "each check returns this type")]
fn each<T, F: IntoIterator<Item = Finding>>(
    of: impl IntoIterator<Item = T>,
    judge: impl FnMut(T) -> F,
) -> Outcome {
    Ok(of.into_iter().flat_map(judge).collect())
}

/// The subject of a check, in words for people, and the function that makes the check.
type Check = (&'static str, fn(&Facts) -> Outcome);

#[derive(Debug)]
struct DoctorReport {
    findings: Vec<Finding>,
    made: usize,
    /// The checks that were not possible, each with the reason. A report without findings proves little if many checks were not
    /// possible.
    not_checked: Vec<(&'static str, String)>,
}

impl DoctorReport {
    fn add(&mut self, what: &'static str, outcome: Outcome) {
        match outcome {
            Ok(findings) => {
                self.made += 1;
                // Two directories may have the same parent directory, and then cause the same finding twice.
                for finding in findings {
                    if !self.findings.contains(&finding) {
                        self.findings.push(finding);
                    }
                }
            }
            Err(reason) => self.not_checked.push((what, reason.into())),
        }
    }
}

pub(super) async fn doctor(arguments: &Arguments, out: &mut dyn Write) -> Result<u8> {
    let sources = Sources { config: arguments.config.clone(), sysroot: arguments.sysroot.clone() };
    let report = examine(&Arc::new(Facts::gather(sources).await));
    if arguments.json {
        let not_checked = report.not_checked.iter();
        let not_checked = not_checked.map(|(check, reason)| json!({"check": check, "reason": reason}));
        print_json(
            out,
            &json!({
                "findings": report.findings, "checks_made": report.made,
                "not_checked": not_checked.collect::<Vec<_>>(),
            }),
        )?;
    } else {
        write(&report, arguments.verbose, out)?;
    }
    Ok(match report.findings.first().map(|worst| worst.severity) {
        Some(Severity::Error) => ERRORS,
        Some(Severity::Warning) => WARNINGS,
        Some(Severity::Info) | None => 0,
    })
}

fn examine(facts: &Arc<Facts>) -> DoctorReport {
    let modules = [
        configuration::CHECKS,
        driver::CHECKS,
        gpus::CHECKS,
        directories::CHECKS,
        service::CHECKS,
        serving::CHECKS,
        processes::CHECKS,
        engines::CHECKS,
    ];
    let mut report = DoctorReport { findings: Vec::new(), made: 0, not_checked: Vec::new() };
    for (what, check) in modules.into_iter().flatten() {
        let all = Arc::clone(facts);
        match within(DEADLINE, move || check(&all)) {
            Some(outcome) => report.add(what, outcome),
            None => report.findings.push(error(
                "check-hangs",
                what,
                format!(
                    "this check has not ended within {seconds} s: a file system or a process hangs",
                    seconds = DEADLINE.as_secs()
                ),
                "look for mounts without a server (findmnt -t nfs,nfs4,cifs,fuse), and for lines with \
                 `blocked for more than` in dmesg",
            )),
        }
    }
    let unnamed = serving::gpus(facts, &report.findings);
    report.add(serving::GPUS, unnamed);
    // The checks report causes before their consequences. A stable sort preserves this order among findings of the same
    // severity.
    report.findings.sort_by_key(|finding| finding.severity);
    report
}

fn write(report: &DoctorReport, verbose: bool, out: &mut dyn Write) -> io::Result<()> {
    for finding in &report.findings {
        let Finding { name, severity, subject, problem: Problem { found, remedy } } = finding;
        writeln!(out, "{}", hanging(&format!("{}: {name}: {subject}", severity.word())))?;
        let mut lines = pairs();
        lines.add_row(["  found:", &printable(found)]);
        lines.add_row(["  remedy:", &printable(remedy)]);
        writeln!(out, "{lines}\n")?;
    }
    let count = |severity| report.findings.iter().filter(|finding| finding.severity == severity).count();
    if report.findings.is_empty() {
        writeln!(out, "Nothing wrong: {made} checks made.", made = report.made)?;
    } else {
        writeln!(
            out,
            "{errors}, {warnings}, {notes}; {made} checks made.",
            errors = counted(count(Severity::Error), "error"),
            warnings = counted(count(Severity::Warning), "warning"),
            notes = counted(count(Severity::Info), "note"),
            made = report.made
        )?;
    }
    if verbose {
        return write_not_checked(&report.not_checked, out);
    }
    match report.not_checked.len() {
        0 => Ok(()),
        left_out => {
            let checks = counted(left_out, "check");
            writeln!(
                out,
                "{checks} could not be made; yunion-mpsctl doctor -v names these checks and the reasons."
            )
        }
    }
}

fn write_not_checked(not_checked: &[(&str, String)], out: &mut dyn Write) -> io::Result<()> {
    let mut by_reason: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (check, reason) in not_checked {
        by_reason.entry(reason).or_default().push(check);
    }
    for (reason, checks) in by_reason {
        writeln!(
            out,
            "{}",
            hanging(&format!("Not checked, since {reason}: {checks}", checks = checks.join("; ")))
        )?;
    }
    Ok(())
}
