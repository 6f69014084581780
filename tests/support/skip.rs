//! The one way for a test to leave something out. It is said, and counted: `make test` prints all of it at the end, and
//! `.ci/run` lets nothing be left out but what is named here.

use std::fs::File;
use std::io::{self, Write};

/// Names a file that gets a line for all that is left out.
const LIST: &str = "YUNION_MPS_SKIPPED";

/// Set where nothing may be left out.
const NOTHING: &str = "YUNION_MPS_SKIP_NOTHING";

/// Reasons that hold even there, each with why that can't be helped.
const EVEN_THERE: &[(&str, &str)] = &[(
    "this machine can't lower an oom_score_adj",
    "it is a container without CAP_SYS_RESOURCE, which nobody in it can get",
)];

/// Leaves out a test, or the part of one that is named.
///
/// # Panics
/// No test may be left out, and the reason is not one of the excused reasons.
pub(crate) fn skip(what: &str, reason: &str) {
    let excused = EVEN_THERE.iter().find(|(known, _)| *known == reason);
    if std::env::var_os(NOTHING).is_some() {
        assert!(excused.is_some(), "{what}: {reason}, and nothing may be skipped where {NOTHING} is set");
    }
    let why = excused.map(|(_, why)| format!(" ({why})")).unwrap_or_default();
    let line = format!("SKIP {what}: {reason}{why}\n");
    // Not with eprint, which libtest keeps to itself where the test passes.
    let _ = io::stderr().write_all(line.as_bytes());
    if let Some(list) = std::env::var_os(LIST) {
        let list = File::options().create(true).append(true).open(list);
        list.and_then(|mut list| list.write_all(line.as_bytes())).expect("the list of what is skipped");
    }
}

/// True if what only root can do can be tried; otherwise it is left out.
pub(crate) fn root_or_skip(what: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        skip(what, "only root can do that");
    }
    root
}
