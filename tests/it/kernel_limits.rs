//! Tests of memory limits that the kernel enforces for bound control groups, with a simulated driver that supports such limits.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::bindings::{bind, client, path, with_containers};
use crate::support::container::ContainerGroup;
use crate::support::host::{Host, succeeded, text};
use crate::support::wait::wait_for;

/// A slice of the board `h200`, its memory in MiB, and another slice.
const OWN: &str = "00:06.0-1";
const MEMORY: u64 = 35942;
const NEIGHBOURS: &str = "00:06.0-2";

/// Starts a host with driver 615, which supports memory limits for control groups, and makes the control groups of two
/// containers.
fn with_driver_615(test: &str, lines: &str) -> Option<(Host, [ContainerGroup; 2])> {
    let (host, groups) = with_containers(test, lines)?;
    host.plant("driver", "615.71.09\n");
    host.plant("gpus/0/memory_accounting", "");
    Some((host, groups))
}

fn limits_file(host: &Host, group: &ContainerGroup) -> PathBuf {
    let name = group.directory.to_str().unwrap().replace('/', "%");
    host.path("gpus/0/memory_limits").join(name)
}

/// Returns the hard memory limit of a control group in MiB, or None without a limit.
fn limit(host: &Host, group: &ContainerGroup) -> Option<u64> {
    let text = fs::read_to_string(limits_file(host, group)).ok()?;
    let (soft, hard) = text.trim().split_once(' ').unwrap();
    assert_eq!(soft, "0", "a soft limit would stay with the control groups above");
    let bytes: u64 = hard.parse().unwrap();
    (bytes != u64::MAX).then_some(bytes >> 20)
}

fn device(host: &Host, slice: &str) -> Value {
    host.list().into_iter().find(|device| device["addr"] == slice).unwrap()
}

fn enforced_by(host: &Host, slice: &str, word: &str) {
    wait_for(&format!("the word {word} for {slice}"), || {
        (device(host, slice)["memory_enforced_by"] == word).then_some(())
    });
}

fn limited(host: &Host, group: &ContainerGroup, wanted: Option<u64>) {
    wait_for(&format!("the limit {wanted:?}"), || (limit(host, group) == wanted).then_some(()));
}

fn can_have(host: &Host, group: &ContainerGroup, mib: u64) -> bool {
    let enter = "echo $$ > \"$0/cgroup.procs\" && exec cuda-client alloc \"$1\"";
    let mut command = host.command("sh");
    command.args(["-c", enter]).arg(&group.directory).arg(mib.to_string()).stdout(Stdio::null());
    command.env("CUDA_MPS_PIPE_DIRECTORY", host.path("mps/pipe"));
    command.status().unwrap().success()
}

/// After Bind, the kernel enforces the slice's memory limit for all programs of the control group together, and for no other
/// program.
#[test]
fn the_kernel_holds_the_memory_of_a_bound_control_group() {
    let test = "the_kernel_holds_the_memory_of_a_bound_control_group";
    let Some((mut host, [group, other])) = with_driver_615(test, "") else { return };
    succeeded(&bind(&host, OWN, &group, &["--label", "train-1"]));
    assert_eq!((limit(&host, &group), limit(&host, &other)), (Some(MEMORY), None));
    enforced_by(&host, OWN, "kernel");
    assert_eq!(device(&host, NEIGHBOURS)["memory_enforced_by"], "watch");

    let first = client(&host, &group.directory, &["hold", "600", "--mib", "30000"], "");
    assert!(!can_have(&host, &group, 10_000) && can_have(&host, &other, 10_000));
    // The limit stays in the kernel when the service is killed, and the next service shows it.
    host.signal(Signal::KILL);
    host.ended();
    assert_eq!(limit(&host, &group), Some(MEMORY));
    host.start();
    host.wait_for_state("ready");
    enforced_by(&host, OWN, "kernel");
    first.end();

    succeeded(&host.mpsctl(&["unbind", "--control-group", &path(&group)]));
    limited(&host, &group, None);
    enforced_by(&host, OWN, "watch");
}

#[test]
fn a_refused_limit_leaves_the_watch_and_says_why() {
    let test = "a_refused_limit_leaves_the_watch_and_says_why";
    let Some((host, [group, other])) = with_driver_615(test, "") else { return };
    host.clear("gpus/0/memory_accounting");
    succeeded(&bind(&host, OWN, &group, &["--label", "train-1"]));
    let refused = |slice: &str| device(&host, slice)["kernel_limit_refused"].as_str().map(str::to_owned);
    let why = wait_for("the reason", || refused(OWN));
    assert!(why.contains("cgroup v2"), "{why}");
    assert_eq!(device(&host, OWN)["memory_enforced_by"], "watch");
    let told = host.log().matches("so only the service watches the memory").count();
    assert_eq!(told, 1, "{}", host.log());
    let advice = text(&host.mpsctl(&["doctor"]));
    assert!(
        advice.contains("kernel-limit-refused: 00:06.0-1\n") && advice.contains("(train-1):"),
        "{advice}"
    );

    // The kernel now accepts memory limits. A reload makes the service try again.
    host.plant("gpus/0/memory_accounting", "");
    host.reload();
    enforced_by(&host, OWN, "kernel");
    assert_eq!(refused(OWN), None);

    // The kernel refuses a limit below the memory that the programs already have.
    let greedy = client(&host, &other.directory, &["hold", "600", "--mib", "40000"], "");
    succeeded(&bind(&host, NEIGHBOURS, &other, &[]));
    let why = wait_for("the reason", || refused(NEIGHBOURS));
    assert!(why.contains("have more"), "{why}");
    assert_eq!(
        (limit(&host, &other), &device(&host, NEIGHBOURS)["memory_enforced_by"]),
        (None, &json!("watch"))
    );
    assert!(crate::support::host::alive(greedy.id()));
}

/// Without the kernel's controller `dmem`, the driver does not count memory that was allocated before the limit was set. So the
/// limit does not hold for that memory.
#[test]
fn memory_from_before_the_limit_is_no_limit() {
    let test = "memory_from_before_the_limit_is_no_limit";
    let Some((host, [group, _other])) = with_driver_615(test, "") else { return };
    let first = client(&host, &group.directory, &["hold", "600", "--mib", "5000"], "");
    host.plant("gpus/0/memory_uncounted_mib", "4000");
    succeeded(&bind(&host, OWN, &group, &[]));
    let why =
        wait_for("the reason", || device(&host, OWN)["kernel_limit_refused"].as_str().map(str::to_owned));
    assert!(
        why.contains("memory that a program had before the limit was set is counted only after"),
        "{why}"
    );
    assert_eq!(device(&host, OWN)["memory_enforced_by"], "watch");
    first.end();
    host.clear("gpus/0/memory_uncounted_mib");
    host.reload();
    enforced_by(&host, OWN, "kernel");
}

/// A hook of NVIDIA's container toolkit may set other limits just after the service's hook has bound the container. The service
/// notices this and sets its limit again.
#[test]
fn the_limits_of_another_hook_are_replaced_within_seconds_and_told() {
    let test = "the_limits_of_another_hook_are_replaced_within_seconds_and_told";
    let Some((host, [group, _other])) = with_driver_615(test, "") else { return };
    let file = limits_file(&host, &group);
    let ours = format!("0 {}", MEMORY << 20);
    for (reserved, mib, found) in
        [(100_000_u64, 140_000_u64, "140000 MiB, with 100000 MiB reserved"), (0, 7, "7 MiB")]
    {
        succeeded(&bind(&host, OWN, &group, &[]));
        assert_eq!(limit(&host, &group), Some(MEMORY));
        let begun = Instant::now();
        fs::write(&file, format!("{} {}", reserved << 20, mib << 20)).unwrap();
        let text = || fs::read_to_string(&file).unwrap().trim().to_owned();
        wait_for("the limit of the slice", || (text() == ours).then_some(()));
        // The service's regular check of the limits comes once a minute. The service must notice the changed limit earlier.
        assert!(begun.elapsed() < Duration::from_secs(50), "{:?}", begun.elapsed());
        let told = format!("it was {found}, and is {MEMORY} MiB again");
        wait_for(&told, || host.log().contains(&told).then_some(()));
        let status = host.json(&["status"]).unwrap();
        let events = status["events"].as_array().unwrap();
        assert!(events.iter().any(|event| event["text"].as_str().unwrap().contains(&told)), "{status:#}");
        succeeded(&host.mpsctl(&["unbind", "--control-group", &path(&group)]));
        limited(&host, &group, None);
    }
}

/// The file of a control group also shows the limit of the group above it, which several control groups share. The service must
/// not take that limit for the group's own.
#[test]
fn a_limit_above_a_control_group_is_not_its_own() {
    let test = "a_limit_above_a_control_group_is_not_its_own";
    let Some((host, [group, _other])) = with_driver_615(test, "") else { return };
    let above = group.directory.parent().unwrap().to_str().unwrap().replace('/', "%");
    host.plant(&format!("gpus/0/memory_limits/{above}"), &format!("0 {}", MEMORY << 20));
    succeeded(&bind(&host, OWN, &group, &[]));
    assert_eq!(limit(&host, &group), Some(MEMORY));
    enforced_by(&host, OWN, "kernel");
}

/// The kernel's limit follows the size of the slice and the configuration. A stop of the service removes the limit.
#[test]
fn a_limit_follows_the_configuration() {
    let test = "a_limit_follows_the_configuration";
    let Some((mut host, [group, shared])) = with_driver_615(test, "") else { return };
    succeeded(&bind(&host, OWN, &group, &[]));
    let sized = |memory: u64| {
        host.devices(&[&format!(
            "path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 4, memory: {memory}"
        )]);
        host.reload();
        limited(&host, &group, Some(memory));
        enforced_by(&host, OWN, "kernel");
    };
    sized(20_000);
    sized(30_000);
    // Two control groups share the slice, and each could have the whole memory of the slice. So the kernel's limits do not
    // enforce the limit of the slice.
    succeeded(&bind(&host, OWN, &shared, &["--share"]));
    enforced_by(&host, OWN, "watch");
    assert_eq!((limit(&host, &group), limit(&host, &shared)), (Some(30_000), Some(30_000)));
    succeeded(&host.mpsctl(&["unbind", "--control-group", &path(&shared)]));
    limited(&host, &shared, None);

    host.configure("cuda_mps_memory_limit: watch");
    host.reload();
    limited(&host, &group, None);
    enforced_by(&host, OWN, "watch");
    host.configure("cuda_mps_memory_limit: auto");
    host.reload();
    limited(&host, &group, Some(30_000));
    host.configure("cuda_mps_memory_limit: watch");
    host.signal(Signal::KILL);
    host.ended();
    host.start();
    host.wait_for_state("ready");
    limited(&host, &group, None);

    host.configure("cuda_mps_memory_limit: auto");
    host.reload();
    limited(&host, &group, Some(30_000));
    assert!(host.stop().success());
    assert_eq!(limit(&host, &group), None);
}
