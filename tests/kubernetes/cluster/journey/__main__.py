"""Runs inside the machine: journey set-up, or journey TRIAL [--after-reboot]. The exit status is 0 where all has held, 75 where the
trial goes on after a reboot, which run.py makes."""

import argparse
import importlib
import pathlib
import subprocess
import sys
import time

import set_up
from api import Refused
from cluster import Cluster
from wait import Failed

REBOOT = 75
# run.py takes the journals from then on.
BEGUN = pathlib.Path("/var/tmp/trial.begun")


def arguments():
    parser = argparse.ArgumentParser(prog="journey")
    parser.add_argument("name")
    parser.add_argument("--after-reboot", action="store_true")
    return parser.parse_args()


def run(given):
    """Runs a part of a trial. Returns the exit status."""
    if given.name == "set-up":
        set_up.set_up()
        return 0
    trial = importlib.import_module(f"trials.{given.name}")
    cluster = Cluster()
    if given.after_reboot:
        set_up.wait_until_ready(cluster)
        trial.after_reboot(cluster)
    else:
        trial.trial(cluster)
        if hasattr(trial, "after_reboot"):
            return REBOOT
    cluster.empty()
    return 0


def main():
    given = arguments()
    begun = time.time()
    if not given.after_reboot:
        BEGUN.write_text(f"{begun:.0f}\n")
    print(f"{given.name}{' after the reboot' if given.after_reboot else ''}", flush=True)
    try:
        status = run(given)
    except (Failed, Refused, OSError, subprocess.TimeoutExpired) as error:
        print(f"  FAILED {given.name}: {error}", flush=True)
        status = 1
        tidy_up(given.name)
    print(f"  {time.time() - begun:.0f} s", flush=True)
    sys.exit(status)


def tidy_up(name):
    """Empties the node after a trial that has failed, for the next one."""
    if name == "set-up":
        return
    try:
        Cluster().empty()
    except (Failed, Refused, OSError) as error:
        print(f"  the node is not empty: {error}", flush=True)


main()
