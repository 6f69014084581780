#!/usr/bin/python3
"""Takes the service and the device plugin through the life of a real cluster of one node, before a release, as root:

    make deb
    make cluster KUBERNETES=DIRECTORY
    make cluster KUBERNETES=DIRECTORY TRIALS='basic updates' UPDATES=50

DIRECTORY has these programs, of any releases that fit together, for this machine's architecture: kube-apiserver,
kube-controller-manager, kube-scheduler, kubelet and kubectl (the server binaries of a release of Kubernetes, 1.30 or newer),
etcd, containerd with containerd-shim-runc-v2 and ctr (2.1 or newer), runc, and the plugins bridge, host-local and loopback of the
CNI project. No package of Debian has all of them, so no other test runs a real kubelet; what is missing is named at the start.

It boots a machine as tests/e2e does: systemd in systemd-nspawn over this host's files and those of .cache/machine, with a network
of its own. On top of it come the files in root/ (the units and the configuration of the control plane, containerd and the kubelet),
the packages in dist (or in the folder PACKAGES), a simulated H200 with four slices, and one image for all pods, of busybox and the
simulated cuda-client. The trials in journey/trials run inside, over HTTPS with the API server and with the programs of an
administrator. Each trial begins with an empty node, and says on one line what has held or failed. If one fails, the journals
of the service, the plugin, the kubelet and containerd since its beginning are in the folder that is named at the end.

    run.py [TRIAL ...]        the trials; all without a name
    run.py --check            says what is missing, and ends
    run.py --dry-run FOLDER   only writes the files of the machine that need no program into FOLDER (make test looks at them)
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile

# The sources stay as they are.
sys.dont_write_bytecode = True

import programs
import stage
from machine import Machine

JOURNEY = ["/usr/bin/python3", "/opt/cluster/journey"]
# Such a trial has a second part after a reboot.
REBOOT = 75
UNITS = ["yunion-mps-daemon", "yunion-mps-device-plugin", "kubelet", "containerd"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], epilog="The head of this file has the rest.")
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help="a file in journey/trials; all if none is named")
    parser.add_argument("--check", action="store_true", help="only say what is missing")
    parser.add_argument("--dry-run", type=pathlib.Path, metavar="FOLDER", help="only write the machine's files")
    given = parser.parse_args()
    unknown = [name for name in given.trials if name not in known_trials()]
    if unknown:
        parser.error(f"no trial {', '.join(unknown)}; there are {', '.join(known_trials())}")
    return given


def known_trials():
    """The trials in their order: a reboot comes last."""
    files = (pathlib.Path(__file__).parent / "journey" / "trials").glob("*.py")
    return sorted((file.stem for file in files if file.stem != "__init__"), key=lambda name: (name == "reboot", name))


def check():
    """Ends with a line for everything that is missing."""
    missing = programs.missing_upstream(programs.upstream_folder()) + programs.missing_of_host()
    if missing:
        sys.exit("\n".join(f"cluster: {line}" for line in missing))


def passes(machine, name):
    """Runs a trial, and returns whether all has held."""
    journey = ["env", f"UPDATES={os.environ.get('UPDATES', '')}", *JOURNEY]
    status = machine.command(*journey, name).returncode
    if status == REBOOT:
        machine.reboot()
        status = machine.command(*journey, name, "--after-reboot").returncode
    return status == 0


def keep_journals(machine, folder, name):
    """Keeps what the programs have said, for a trial that has failed."""
    with open(folder / f"{name}.journal", "wb") as kept:
        units = [f"--unit={unit}" for unit in UNITS]
        since = machine.command("cat", "/var/tmp/trial.begun", stdout=subprocess.PIPE).stdout.strip()
        machine.command("journalctl", "--no-pager", "--output=short-precise", f"--since=@{since or 0}", *units, stdout=kept)


def run(names):
    """Boots the machine and runs the trials. Returns those that have failed."""
    with tempfile.TemporaryDirectory(prefix="mps-cluster-stage-") as folder:
        files = pathlib.Path(folder)
        files.chmod(0o755)
        stage.write_files(files)
        stage.add_programs(files)
        with Machine(files, programs.upstream_folder()) as machine:
            kept = pathlib.Path(tempfile.mkdtemp(prefix="mps-cluster-journals-"))
            if not passes(machine, "set-up"):
                keep_journals(machine, kept, "set-up")
                sys.exit(f"cluster: there is no cluster; the journals are in {kept}")
            failed = []
            for name in names:
                if not passes(machine, name):
                    failed.append(name)
                    keep_journals(machine, kept, name)
            if failed:
                print(f"the journals are in {kept}", flush=True)
            else:
                kept.rmdir()
            return failed


def main():
    given = arguments()
    if given.dry_run:
        stage.write_files(given.dry_run)
        return
    check()
    if given.check:
        return
    failed = run(given.trials or known_trials())
    if failed:
        sys.exit(f"cluster: failed: {', '.join(failed)}")
    print("cluster: everything has held")


main()
