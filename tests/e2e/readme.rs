//! Types the commands of the README and of docs/operations.md on a newly installed machine. The service must serve GPUs after
//! the commands of the README, and again after all commands. [`ELSEWHERE`] lists the commands that the test does not type.

use std::fs;
use std::path::Path;

use crate::Check;
use crate::machine::{Machine, text};
use crate::package::DEB;
use crate::service::{HOST, ON_HOST, SERVICE, compute_mode, control_daemons, new_host, state};

/// The README and docs/operations.md in each language. All languages must have the same commands.
const GUIDES: [[&str; 2]; 2] =
    [["README.md", "docs/operations.md"], ["README.zh-CN.md", "docs/operations.zh-CN.md"]];

/// The command of the README that shows that GPUs are served.
const FIRST_PROGRAM: &str = "yunion-mpsctl run --free -- ./a-cuda-program";

/// The commands of the guides that the test does not type. Each row has the test that runs the command, or the reason why no
/// test can.
const ELSEWHERE: [(&str, &str); 11] = [
    ("yunion-mpsctl top", "needs a terminal and somebody at the keys; tests/it/top.rs"),
    ("yunion-mpsctl events --follow", "ends when somebody presses Ctrl-C; tests/it/watch.rs"),
    ("kubectl rollout restart ds -n onecloud default-host", "needs a platform"),
    ("climc isolated-device-list", "needs a platform"),
    ("make demo", "run by .ci/run"),
    ("make test", "runs this"),
    ("make build && make install", "needs the sources; tests/it/packaging.rs runs make install"),
    (
        "options=$(yunion-mpsctl env 00:06.0-1 --format docker) && docker run $options IMAGE",
        "the checks of containers run it",
    ),
    (
        "options=$(yunion-mpsctl env 00:06.0-1 --format podman) && podman run $options IMAGE",
        "the checks of containers run it",
    ),
    ("yunion-mpsctl terminate 1153 && kill 1153", "has a PID of its own; tests/it/release.rs"),
    (
        "yunion-mpsctl terminate --container 4f1c2d3e5a6b",
        "needs a container; tests/it/release.rs ends the work of a container",
    ),
];

pub(crate) const CHECKS: &[Check] = &[("its_words_alone_make_a_fresh_system_serve", words)];

/// The directory in which the test types the commands. It has the package of the service and a CUDA program.
const DIRECTORY: &str = "/root/readme";

/// Makes the simulated GPUs appear as the machine's own GPUs, without an option or a setting of the service. A container can't
/// write to /sys, so a copy with the simulated GPUs is mounted over /sys.
pub(crate) fn on_simulated_hardware(machine: &Machine) {
    new_host(machine);
    machine.sh(&format!(
        "cp -a {HOST}/sysroot/sys /srv/sys
        for part in $(cd /sys && echo * devices/system); do
            [ ! -e /srv/sys/$part ] || continue
            mkdir /srv/sys/$part
            mount --rbind /sys/$part /srv/sys/$part
        done
        mount --rbind /srv/sys /sys
        cp -a {HOST}/sysroot/dev/dri {HOST}/sysroot/dev/nvidia* /dev/
        mkdir -p /usr/share/hwdata
        cp {HOST}/sysroot/usr/share/hwdata/pci.ids /usr/share/hwdata/"
    ));
    // The simulated driver is not in the system's directories. These variables lead the service to it.
    machine.write(
        &format!("/etc/systemd/system/{SERVICE}.d/simulated.conf"),
        &format!(
            "[Service]\nEnvironment=YUNION_MPS_SIM={HOST} LD_LIBRARY_PATH={HOST}/lib PATH={HOST}/bin:/usr/bin:/bin\n\
             ReadWritePaths={HOST}\n"
        ),
    );
    // apt answers its question with yes, as a user would. It installs no recommended packages, since the machine has no
    // network.
    let settings = "APT::Get::Assume-Yes \"true\";\nAPT::Install-Recommends \"false\";\n";
    machine.write("/etc/apt/apt.conf.d/99readme", settings);
    machine.sh(&format!(
        "mkdir {DIRECTORY}; cp {DEB} {DIRECTORY}/yunion-mps-daemon_0_all.deb
        printf '#!/bin/sh\\nexec cuda-client props\\n' >{DIRECTORY}/a-cuda-program
        chmod +x {DIRECTORY}/a-cuda-program; systemctl daemon-reload"
    ));
}

/// Returns the commands in the indented blocks of a guide, without comments. Fenced blocks are recorded screens, which
/// `tests/it/screens.rs` compares.
pub(crate) fn lines(readme: &str) -> Vec<&str> {
    let outside = readme.split("```").step_by(2).flat_map(str::lines);
    let indented = outside.filter_map(|line| line.strip_prefix("    "));
    let lines = indented.map(|line| line.split("  #").next().unwrap_or_default().trim());
    lines.filter(|line| !line.is_empty() && !line.starts_with('#')).collect()
}

fn words(machine: &mut Machine) {
    for pages in GUIDES {
        let guide = pages.join(" and ");
        let texts =
            pages.map(|page| fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(page)).unwrap());
        assert!(lines(&texts[0]).contains(&FIRST_PROGRAM), "{} serves nobody", pages[0]);
        let lines: Vec<&str> = texts.iter().flat_map(|text| lines(text)).collect();
        for (line, why) in ELSEWHERE {
            assert!(lines.contains(&line), "{guide} have no line {line:?}, which was not run: {why}");
        }
        fresh(machine);
        let commands = lines.iter().filter(|line| !ELSEWHERE.iter().any(|(elsewhere, _)| elsewhere == *line));
        let mut served = 0;
        for command in commands {
            let printed = typed(machine, command);
            println!("    {guide}: {command}");
            match *command {
                FIRST_PROGRAM => {
                    assert!(printed.contains("yunion-mpsctl: takes 00:06.0-0 (H200"), "{printed}");
                    // A slice has a tenth of the 132 SMs, and a GPU assigns SMs in pairs.
                    assert!(printed.contains(" sms 12 "), "{printed}");
                    // On a host without the platform Cloudpods, `setup` chooses CUDA's default pipe directory. So a program
                    // without a slice also connects to MPS and gets the limits of a slice.
                    assert!(typed(machine, "./a-cuda-program").contains(" sms 12 "));
                    assert_eq!(compute_mode(machine), "Exclusive_Process");
                    assert_eq!(state(machine), "ready");
                    served += 1;
                }
                "yunion-mpsctl list" => assert!(printed.contains("00:06.0-9"), "{printed}"),
                "systemctl start yunion-mps-daemon" => assert_eq!(state(machine), "ready"),
                "yunion-mpsctl undrain --all" => {
                    // No slice has a client now. The command may still pass over the slice that it took a moment ago, so the
                    // test accepts any slice.
                    let again = typed(machine, FIRST_PROGRAM);
                    assert!(again.contains("yunion-mpsctl: takes 00:06.0-"), "{again}");
                    served += 1;
                }
                _ => {}
            }
        }
        assert_eq!(served, 2, "{guide} do not end with a host that serves");
    }
}

/// Removes the package and the files that the commands of the previous guide have made.
fn fresh(machine: &Machine) {
    machine
        .sh("! dpkg-query --show yunion-mps-daemon >/dev/null 2>&1 || apt-get purge --yes yunion-mps-daemon
        rm -rf /etc/yunion /tmp/nvidia-mps");
    assert_eq!(control_daemons(machine), Vec::<String>::new());
}

#[track_caller]
fn typed(machine: &Machine, command: &str) -> String {
    let script = format!("{ON_HOST} export HOME=/root; cd {DIRECTORY}; {command}");
    let output = machine.run(&["bash", "-c", &script]);
    let printed = text(&output.stdout) + &text(&output.stderr);
    assert!(output.status.success(), "{command}: {}\n{printed}", output.status);
    printed
}
