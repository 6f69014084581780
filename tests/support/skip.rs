//! The only way to skip a test or a part of it. `make test` prints all skipped parts at its end. `.ci/run` fails for a skipped
//! part, unless this file allows its reason.

use std::fs::File;
use std::io::{self, Write};

/// The environment variable with the path of a file. Each skipped part adds a line to the file.
const LIST: &str = "YUNION_MPS_SKIPPED";

/// The environment variable that forbids to skip a part, except for the reasons in [`EVEN_THERE`].
const NOTHING: &str = "YUNION_MPS_SKIP_NOTHING";

/// The reasons that are allowed even with [`NOTHING`], each with an explanation.
const EVEN_THERE: &[(&str, &str)] = &[
    (
        "this machine can't lower an oom_score_adj",
        "it is a container without CAP_SYS_RESOURCE, which nobody in it can get",
    ),
    ("this kernel has no emulators for a user namespace", "Linux has them from 6.7 on"),
    ("this machine is aarch64", "every other test runs programs for aarch64 there"),
];

/// Skips a test, or the part of a test that `what` names.
///
/// # Panics
///
/// [`NOTHING`] is set, and `reason` is not in [`EVEN_THERE`].
pub(crate) fn skip(what: &str, reason: &str) {
    let excused = EVEN_THERE.iter().find(|(known, _)| *known == reason);
    if std::env::var_os(NOTHING).is_some() {
        assert!(excused.is_some(), "{what}: {reason}, and nothing may be skipped where {NOTHING} is set");
    }
    let why = excused.map(|(_, why)| format!(" ({why})")).unwrap_or_default();
    let line = format!("SKIP {what}: {reason}{why}\n");
    // libtest hides the output of `eprint` in a test that passes. So the line is written to stderr directly.
    let _ = io::stderr().write_all(line.as_bytes());
    if let Some(list) = std::env::var_os(LIST) {
        let list = File::options().create(true).append(true).open(list);
        list.and_then(|mut list| list.write_all(line.as_bytes())).expect("the list of what is skipped");
    }
}

/// Returns true if the test runs as root. Otherwise reports `what` as skipped.
pub(crate) fn root_or_skip(what: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip(what, "only root can do that");
    }
    root
}
