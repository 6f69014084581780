//! Tests the example program in docs/ that reads the service's state from D-Bus.

use std::fs::{self, File};

use rustix::process::Signal;

use crate::support::host::Host;
use crate::support::wait::wait_for;

#[test]
fn the_example_prints_the_devices_and_what_becomes_of_them() {
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/devices.py");
    let lines = fs::read_to_string(program).unwrap().lines().count();
    assert!(lines <= 50, "an example of {lines} lines is not read");
    let mut host = Host::new("tesla-p40");
    let (shown, complaints) = (host.path("shown"), host.path("complaints"));
    let example = |host: &Host| {
        host.command("/usr/bin/python3")
            .arg(program)
            .stdout(File::create(&shown).unwrap())
            .stderr(File::create(&complaints).unwrap())
            .spawn()
            .unwrap()
    };
    let complains_of = |words: &str| {
        wait_for(words, || fs::read_to_string(&complaints).unwrap().contains(words).then_some(()));
    };
    let mut first = example(&host);
    complains_of("The name io.yunion.Mps1 was not provided");
    host.start();
    // The example program prints an empty line after each list of slices.
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
    assert!(first.try_wait().unwrap().is_none(), "it goes on");
    first.kill().unwrap();
    first.wait().unwrap();

    // If the service does not answer, the example program asks again.
    host.signal(Signal::STOP);
    let mut second = example(&host);
    complains_of("Did not receive a reply");
    host.signal(Signal::CONT);
    wait_for("the devices of the service that goes on", || (last()? == rows(2, 11520)).then_some(()));
    assert!(second.try_wait().unwrap().is_none(), "it goes on");
    second.kill().unwrap();
    second.wait().unwrap();
    assert_eq!(host.stop().code(), Some(0));
}
