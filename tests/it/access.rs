//! Every door that hands out a slice gives the same answer at the same moment.

use crate::bindings::{bind, path, with_containers};
use crate::support::container::ContainerGroup;
use crate::support::host::{Host, binaries, control_pid, signal_pid, succeeded, text};
use crate::support::wait::wait_for;

use rustix::process::Signal;

const SLICE: &str = "00:06.0-1";

/// The answer of a method: `yes`, or the name of its error.
fn answer(host: &Host, method: &str, arguments: &[&str]) -> String {
    let asked = host
        .command("gdbus")
        .args(["call", "--system", "--dest", "io.yunion.Mps1", "--object-path", "/io/yunion/Mps1/Manager"])
        .args(["--method", &format!("io.yunion.Mps1.{method}")])
        .args(arguments)
        .output()
        .unwrap();
    if asked.status.success() {
        return "yes".to_owned();
    }
    let said = text(&asked);
    let name = said.split("io.yunion.Mps1.Error.").nth(1).unwrap_or_else(|| panic!("{said}"));
    name.split(':').next().unwrap().to_owned()
}

/// The answers of all doors about the slice, for a program of which nothing but this control group is known.
fn answers(host: &Host, group: &ContainerGroup, share: bool) -> [String; 5] {
    let (devices, path) = (format!("['{SLICE}']"), path(group));
    let options = |more: &str| format!("{{'share': <{share}>{more}}}");
    let bind = |more: &str| {
        let options = options(&format!(", 'control_group': <'{path}'>{more}"));
        let answer = answer(host, "Control.Bind", &[&devices, "0", &options]);
        if answer == "yes" {
            succeeded(&host.mpsctl(&["unbind", "--control-group", &path]));
        }
        answer
    };
    [
        answer(host, "Manager.TakeDevices", &[&devices, &options("")]),
        answer(host, "Manager.TakeDevices", &[&devices, &options(", 'free': <true>")]),
        bind(""),
        bind(", 'free': <true>"),
        // It has no options.
        if share { "yes".to_owned() } else { answer(host, "Manager.GetContainerConfig", &[&devices]) },
    ]
}

/// Waits until all doors give this answer. They may not differ once it is published.
#[track_caller]
fn all_answer(host: &Host, group: &ContainerGroup, expected: &str) {
    wait_for(expected, || (answers(host, group, false)[0] == expected).then_some(()));
    assert_eq!(answers(host, group, false), [expected; 5]);
}

fn doors_agree(lines: &str, test: &str) {
    let Some((mut host, [group, other])) = with_containers(test, lines) else { return };
    all_answer(&host, &group, "yes");

    succeeded(&host.mpsctl(&["drain", SLICE]));
    all_answer(&host, &group, "Drained");
    assert_eq!(answers(&host, &group, true), ["Drained", "Drained", "Drained", "Drained", "yes"]);
    succeeded(&host.mpsctl(&["undrain", SLICE]));

    succeeded(&bind(&host, SLICE, &other, &["--label", "train-1"]));
    all_answer(&host, &group, "Taken");
    assert_eq!(answers(&host, &group, true), ["yes"; 5]);
    let said = text(&host.mpsctl(&["env", SLICE]));
    assert!(said.contains("is taken by train-1; "), "{said}");
    succeeded(&host.mpsctl(&["unbind", "--control-group", &path(&other)]));
    all_answer(&host, &group, "yes");

    // A slice that is on its way is waited for: the command of a person as well as the hook of a container.
    host.plant("mps/fault/start-exits", "");
    let status = host.json(&["status"]).unwrap();
    let daemons = status["control_daemons"].as_array().unwrap().len();
    if daemons == 1 {
        signal_pid(control_pid(&status), Signal::KILL);
    } else {
        let daemons = status["control_daemons"].as_array().unwrap();
        let own = daemons.iter().find(|daemon| daemon["id"] == SLICE).unwrap();
        signal_pid(u32::try_from(own["pid"].as_u64().unwrap()).unwrap(), Signal::KILL);
    }
    all_answer(&host, &group, "NotServed");
    let waiting =
        host.command(binaries().join("yunion-mpsctl")).args(["run", SLICE, "--", "true"]).spawn().unwrap();
    host.clear("mps/fault/start-exits");
    let waited = waiting.wait_with_output().unwrap();
    assert!(waited.status.success(), "{waited:?}");
    all_answer(&host, &group, "yes");

    host.meets_xid(0, 48);
    all_answer(&host, &group, "Failed");
    let said = text(&host.mpsctl(&["env", SLICE]));
    assert!(said.contains("can't be served") && said.contains("Xid 48"), "{said}");
    host.reload();
    all_answer(&host, &group, "yes");

    host.plant("gpus/0/lost", "");
    host.reload();
    all_answer(&host, &group, "Failed");
    host.clear("gpus/0/lost");
    all_answer(&host, &group, "yes");
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn all_doors_agree_with_one_control_daemon() {
    doors_agree("", "all_doors_agree_with_one_control_daemon");
}

#[test]
fn all_doors_agree_with_a_control_daemon_for_each_slice() {
    doors_agree("cuda_mps_topology: per_slice", "all_doors_agree_with_a_control_daemon_for_each_slice");
}
