//! The program in docs/ that shows how to read the bus.

use std::fs::{self, File};
use std::process::Stdio;

use crate::support::host::Host;
use crate::support::wait::wait_for;

#[test]
fn the_example_prints_the_devices_and_what_becomes_of_them() {
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/devices.py");
    let lines = fs::read_to_string(program).unwrap().lines().count();
    assert!(lines <= 20, "an example of {lines} lines is not read");
    let mut host = Host::serving("tesla-p40");
    let shown = host.path("shown");
    let mut example = host
        .command("/usr/bin/python3")
        .arg(program)
        .stdout(File::create(&shown).unwrap())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    // An empty line ends a list.
    let last = || {
        let shown = fs::read_to_string(&shown).unwrap();
        let whole = shown.strip_suffix("\n\n")?;
        Some(whole.rsplit("\n\n").next().unwrap_or_default().to_owned())
    };
    let row = |ordinal: u32, mib: u32| {
        format!("00:06.0-{ordinal} GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400 {mib} MiB healthy")
    };
    let rows =
        |number: u32, mib: u32| (0..number).map(|ordinal| row(ordinal, mib)).collect::<Vec<_>>().join("\n");
    wait_for("the devices", || (last()? == rows(4, 5760)).then_some(()));
    host.devices(&["path: /dev/dri/renderD128, type: NVIDIA_MPS, virtual_number: 2"]);
    assert!(host.call("Control.Reload").status.success());
    wait_for("the devices of the new configuration", || (last()? == rows(2, 11520)).then_some(()));
    assert!(example.try_wait().unwrap().is_none(), "it goes on");
    example.kill().unwrap();
    example.wait().unwrap();
    assert_eq!(host.stop().code(), Some(0));
}
