//! Tests the device plugin's unit on a booted machine, in its sandbox and with the policy of the bus. A Python program plays
//! the kubelet.

use std::path::Path;

use crate::machine::{Machine, Stage};
use crate::wait::wait_for;
use crate::{Check, package, service};

pub(crate) const CHECKS: &[Check] = &[
    ("the_device_plugin_is_up_before_the_kubelet", up_before_the_kubelet),
    ("the_device_plugin_registers_and_allocates_in_its_sandbox", in_its_sandbox),
    ("a_device_plugin_whose_directory_was_made_anew_gets_another_sandbox", directory_made_anew),
    ("a_device_plugin_that_was_restarted_or_upgraded_registers_again", restarted),
    ("a_removed_device_plugin_leaves_the_service_alone", removed),
];

const UNIT: &str = "yunion-mps-device-plugin";
const DEB: &str = "/var/tmp/yunion-mps-device-plugin.deb";

/// The file to which the kubelet writes its events.
const SAID: &str = "/var/tmp/kubelet.said";
const CALLS: &str = "/var/tmp/kubelet.calls";

const RESOURCE: &str = "yunion.io/mps-35gib";

pub(crate) fn stage() -> Stage {
    let stage = package::stage();
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    stage.put(&package::built_package(UNIT, ".deb"), DEB);
    let messages = ".cache/kubernetes-api/deviceplugin_pb2.py";
    for program in ["tests/kubernetes/kubelet.py", "tests/kubernetes/device_manager.py", messages] {
        let file = source.join(program);
        assert!(
            file.is_file(),
            "{} is missing; make it with scripts/fetch-kubernetes-api.sh",
            file.display()
        );
        stage.put(&file, &format!("/var/tmp/{}", file.file_name().unwrap().to_str().unwrap()));
    }
    stage
}

fn said(machine: &Machine, text: &str) -> usize {
    machine.sh(&format!("cat {SAID} 2>/dev/null || :")).matches(text).count()
}

fn up_before_the_kubelet(machine: &mut Machine) {
    service::serving(machine);
    machine.sh(&format!("apt-get install --yes --no-install-recommends {DEB}"));
    assert_eq!(machine.property(UNIT, "UnitFileState"), "disabled");
    assert_eq!(machine.property(UNIT, "ActiveState"), "inactive");
    machine.sh(&format!("systemctl enable --now {UNIT}"));
    assert_eq!(machine.property(UNIT, "ActiveState"), "active");
    wait_for("the word about the kubelet", || {
        machine
            .sh(&format!("journalctl -u {UNIT} --output=cat"))
            .contains("waiting for the kubelet")
            .then_some(())
    });
    assert_eq!(machine.property(UNIT, "StatusText"), "0 of 1 resources registered");
}

fn start_kubelet(machine: &Machine) {
    // The shell opens the kubelet's input for writing too. Otherwise the kubelet would read the end of its input after the
    // first message.
    machine.sh(&format!(
        "systemd-run --quiet --unit=fake-kubelet sh -c \
         'exec /usr/bin/python3 /var/tmp/kubelet.py /var/tmp /var/lib/kubelet <>{CALLS} >>{SAID}'"
    ));
}

fn in_its_sandbox(machine: &mut Machine) {
    machine.sh(&format!("mkfifo {CALLS}"));
    start_kubelet(machine);
    let healthy = r#""health": "Healthy""#;
    wait_for("four devices", || (said(machine, healthy) == 4).then_some(()));
    wait_for("the status line", || {
        (machine.property(UNIT, "StatusText") == "1 of 1 resources registered").then_some(())
    });
    let call = format!(r#"{{"call": "allocate", "resource": "{RESOURCE}", "containers": [["00:06.0-2"]]}}"#);
    machine.sh(&format!("echo '{call}' >{CALLS}"));
    wait_for("the slice", || (said(machine, r#""yunion.io/mps=00:06.0-2""#) == 1).then_some(()));
}

/// When a node joins a cluster again, kubeadm removes the kubelet's directory and makes it again. The device plugin must then
/// register again.
fn directory_made_anew(machine: &mut Machine) {
    let before = said(machine, r#""event": "registered""#);
    // The device plugin makes its socket again each time that the socket is removed. So the test repeats `rm` until the
    // kubelet's directory is removed.
    machine.sh("systemctl stop fake-kubelet; timeout 60 sh -c 'until rm -rf /var/lib/kubelet/device-plugins; do :; done'");
    start_kubelet(machine);
    wait_for("a registration", || (said(machine, r#""event": "registered""#) > before).then_some(()));
    assert_eq!(machine.property(UNIT, "ActiveState"), "active");
}

fn restarted(machine: &mut Machine) {
    let before = said(machine, r#""event": "registered""#);
    machine.sh(&format!("systemctl restart {UNIT}"));
    wait_for("a registration", || (said(machine, r#""event": "registered""#) > before).then_some(()));
    let pid = machine.property(UNIT, "MainPID");
    machine.sh(&format!("apt-get install --yes --reinstall {DEB}"));
    wait_for("another process", || (machine.property(UNIT, "MainPID") != pid).then_some(()));
    wait_for("a registration", || (said(machine, r#""event": "registered""#) > before + 1).then_some(()));
}

fn removed(machine: &mut Machine) {
    machine.sh(&format!("apt-get purge --yes {UNIT}"));
    let left = machine.sh(&format!("pgrep -x {UNIT:.15} || :; ls /var/lib/kubelet/device-plugins"));
    assert_eq!(left.trim_end(), "kubelet.sock");
    assert_eq!(machine.property("yunion-mps-daemon", "ActiveState"), "active");
    machine.sh("systemctl stop fake-kubelet");
}
