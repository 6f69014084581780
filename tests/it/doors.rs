//! Tests that programs can start at any moment while configuration changes replace the control daemon. No program gets CUDA
//! error 805 or runs without MPS, even with slow front ends.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::host::{Host, control_daemon, control_pid, text};
use crate::support::wait::wait_for;

/// The pauses between the starts of two programs, in ms. The service can replace a control daemon only in a pause without
/// clients. Some pauses are just long enough for this, and the longest is long enough on a busy machine too.
const PAUSES: [u64; 8] = [250, 2200, 250, 2400, 250, 2800, 250, 6000];

/// Delays each front end by up to 0.4 s, as on a busy host.
fn delay_front_ends(host: &mut Host) {
    let (real, wrapper) = (host.path("bin"), host.path("wrapper"));
    fs::create_dir(&wrapper).unwrap();
    let program = wrapper.join("nvidia-cuda-mps-control");
    let script = format!(
        "#!/bin/bash\n[ $# -eq 0 ] && sleep 0.$((RANDOM % 4))$((RANDOM % 10))\nexec {}/nvidia-cuda-mps-control \"$@\"\n",
        real.display()
    );
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    host.prefer(&wrapper);
}

/// Tells from the output of a CUDA program how it was served. A slice has 32 of the GPU's 132 multiprocessors.
fn outcome(said: &str) -> &'static str {
    match said {
        _ if said.contains(" sms 32 ") => "served",
        _ if said.contains("(46)") => "refused",
        _ if said.contains("(805)") => "error 805",
        _ if said.contains(" sms 132 ") => "without MPS",
        _ => "something else",
    }
}

/// The drop of this guard sets the flag, which ends the loop that starts programs. If the test has failed, the drop also prints
/// the service's log.
struct Over<'a>(&'a AtomicBool, &'a Host);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
        if std::thread::panicking() {
            println!("{}", self.1.log());
        }
    }
}

/// Makes `changes` changes of the configuration, each of which needs another control daemon, while programs start one after
/// another. Returns how many programs had each outcome.
fn changes_among_programs(changes: usize) -> BTreeMap<&'static str, usize> {
    let mut host = Host::new("h200");
    delay_front_ends(&mut host);
    host.start();
    host.wait_for_state("ready");
    let slice = host.list()[1]["addr"].as_str().unwrap().to_owned();
    // A container has the environment from its start, whatever changes in the configuration later. So all programs of the test
    // use this environment.
    let environment = host.environment_of(&slice);
    let is_over = AtomicBool::new(false);
    let mut outcomes = BTreeMap::new();
    std::thread::scope(|scope| {
        let programs = scope.spawn(|| {
            let mut outcomes = BTreeMap::new();
            for pause in PAUSES.into_iter().cycle().take_while(|_| !is_over.load(Ordering::SeqCst)) {
                let mut program = host.program(&["props"]);
                program.envs(environment.clone()).stdout(Stdio::piped());
                let said = text(&program.output().unwrap());
                let outcome = outcome(&said);
                assert_ne!(outcome, "something else", "{said}");
                *outcomes.entry(outcome).or_default() += 1;
                std::thread::sleep(Duration::from_millis(pause));
            }
            outcomes
        });
        // If a change fails, the drop of `over` still ends the loop of the programs. Otherwise the scope would wait forever.
        let over = Over(&is_over, &host);
        let mut before = host.wait_for_state("ready");
        for number in 0..changes {
            host.configure(&format!(
                "cuda_mps_log_directory: {}",
                host.path("mps").join(format!("log-{}", number % 2)).display()
            ));
            host.reload();
            before = wait_for("another control daemon", || {
                let status = host.json(&["status"]).filter(|status| status["service"]["state"] == "ready")?;
                let is_another = control_pid(&status) != control_pid(&before);
                (is_another && control_daemon(&status)["state"] == "ready").then_some(status)
            });
        }
        drop(over);
        outcomes = programs.join().unwrap();
    });
    assert!(!host.log().contains("panicked"), "{}", host.log());
    assert_eq!(host.stop().code(), Some(0));
    outcomes
}

fn check(outcomes: &BTreeMap<&'static str, usize>) {
    assert!(outcomes["served"] > 0, "{outcomes:?}");
    let bad = outcomes.keys().any(|outcome| ["error 805", "without MPS"].contains(outcome));
    assert!(!bad, "{outcomes:?}");
}

#[test]
fn no_program_is_lost_to_a_change() {
    let outcomes = changes_among_programs(4);
    check(&outcomes);
}

mod soak {
    use super::*;

    const HOSTS: usize = 10;

    #[test]
    #[ignore = "ten minutes: make soak"]
    fn no_program_is_lost_to_500_changes() {
        let outcomes = std::thread::scope(|scope| {
            let hosts: Vec<_> =
                (0..HOSTS).map(|_| scope.spawn(|| changes_among_programs(500 / HOSTS))).collect();
            let mut all = BTreeMap::new();
            for (outcome, count) in hosts.into_iter().flat_map(|host| host.join().unwrap()) {
                *all.entry(outcome).or_default() += count;
            }
            all
        });
        println!("{outcomes:?}");
        check(&outcomes);
    }
}
