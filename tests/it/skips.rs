//! Tests that `make test` counts skipped tests. With the variable `YUNION_MPS_SKIP_NOTHING`, a test that would be skipped
//! fails.

use std::fs;
use std::process::Command;

use crate::support::skip::skip;

const FROM_ALL: &str = "this machine has no such thing";
const EXCUSED: &str = "this machine can't lower an oom_score_adj";

#[test]
#[ignore = "run by what_is_left_out_is_counted"]
fn leaves_out() {
    skip("one thing", FROM_ALL);
}

#[test]
#[ignore = "run by what_is_left_out_is_counted"]
fn leaves_out_with_an_excuse() {
    skip("another thing", EXCUSED);
}

#[test]
fn what_is_left_out_is_counted() {
    let directory = tempfile::tempdir().unwrap();
    let list = directory.path().join("skipped");
    let run = |test: &str, nothing: bool| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--ignored", &format!("skips::{test}")]);
        command.env("YUNION_MPS_SKIPPED", &list).env_remove("YUNION_MPS_SKIP_NOTHING");
        if nothing {
            command.env("YUNION_MPS_SKIP_NOTHING", "1");
        }
        command.output().unwrap()
    };
    assert!(run("leaves_out", false).status.success());
    let line = format!("SKIP one thing: {FROM_ALL}\n");
    assert_eq!(fs::read_to_string(&list).unwrap(), line);
    let refused = run("leaves_out", true);
    let said = String::from_utf8_lossy(&refused.stdout).into_owned();
    assert!(
        !refused.status.success() && said.contains(&format!("one thing: {FROM_ALL}, and nothing")),
        "{said}"
    );
    let excused = run("leaves_out_with_an_excuse", true);
    assert!(excused.status.success());
    let listed = fs::read_to_string(&list).unwrap();
    let another = format!("{line}SKIP another thing: {EXCUSED} (");
    assert!(listed.starts_with(&another), "{listed}");
    let said = String::from_utf8_lossy(&excused.stderr).into_owned();
    assert!(said.contains("SKIP another thing"), "{said}");
}
