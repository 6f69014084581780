#!/usr/bin/env python3
"""Measures the service on simulated hosts: make bench. docs/benchmarks.md explains the rows.

Variables: OUT (a folder for the results, target/bench), N (runs of each, 10), QUICK=1 (one run of each, on small
hosts), BENCH_SECONDS (of idling, 60), ONLY (groups of rows, with commas), BASE (a revision to compare with), PEER
(another daemon to compare with), PEER_READY (the text in that daemon's log with which it is ready, if it does not say
READY=1), BINARIES (the folder of the programs, target/release), REAL=1 (this host's GPUs, in the place of a simulated
host; their compute modes are left alone).

A run counts only if the planned control daemons and servers ran and the service said that it was ready, to the end. Each
row of the table has the number of runs that failed. The exit status is 1 if any did, or if the idle service of one GPU wakes
up once a second or more often."""

import datetime
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time

# A measurement leaves no files in the sources.
sys.dont_write_bytecode = True

import table
import variants as programs
from host import REPOSITORY
from process import Lacking, NotReady, Unable
from rows import calls, commands, death, idle, reload, start, stop
from scenario import QUICK

SCENARIOS = [scenario for group in (start, death, stop, reload, calls, commands) for scenario in group.SCENARIOS]

GROUPS = [*dict.fromkeys(row.group for scenario in SCENARIOS for row in scenario.rows), "idle"]

# A scenario that takes longer has fewer runs than requested.
MOST_SECONDS = 60
FEWEST_RUNS = 3


class Run:
    """The samples and the failed runs so far, by place in the table and variant."""

    def __init__(self, variants, tools):
        self.variants, self.tools = variants, tools
        self.samples = {}
        self.failures = {}
        # If another daemon is never ready, all its other measurements fail too.
        self.hopeless = []

    def able(self):
        return [variant for variant in self.variants if variant not in self.hopeless]

    def scenario(self, scenario, runs):
        """Measures a scenario, the variants in turn. One that can't do it twice is not asked again."""
        able = self.able()
        failures = []
        begin = time.monotonic()
        for number in range(runs):
            if number >= FEWEST_RUNS and time.monotonic() - begin > MOST_SECONDS * len(able):
                break
            # The variants take turns in being the first.
            for variant in able[:: 1 if number % 2 == 0 else -1]:
                try:
                    # A run that fails at its end has no values.
                    for key, samples in list(scenario.measure(scenario.setting, variant, self.tools)):
                        self.take(scenario.setting, key, variant.name, samples)
                except (Unable, OSError) as error:
                    failures.append(variant)
                    if failures.count(variant) == 2 or isinstance(error, (Lacking, NotReady)):
                        able.remove(variant)
                    if variant.name != "this" and isinstance(error, NotReady):
                        self.hopeless.append(variant)
                    self.failed(scenario.setting, scenario.rows, variant.name, error)

    def idle(self, seconds, settle):
        figures, errors = idle.measure(self.able(), self.tools, seconds, settle)
        for (setting, variant), found in figures.items():
            for key, samples in found.items():
                self.take(setting, key, variant, samples)
            # Shortly after a start the service still has work.
            if variant == "this" and settle and setting.gpus == 1 and found["wakeups"][0] >= 60:
                error = "the idle service wakes up once a second or more often"
                self.failed(setting, idle.rows(setting), variant, error)
        for setting, variant, error in errors:
            self.failed(setting, idle.rows(setting), variant.name, error)

    def take(self, setting, key, variant, samples):
        self.samples.setdefault((setting, key), {}).setdefault(variant, []).extend(samples)

    def failed(self, setting, rows, variant, error):
        print(f"{variant}: {rows[0].group}, {setting.host()}: {error}", file=sys.stderr)
        for row in () if isinstance(error, Lacking) else rows:
            of_row = self.failures.setdefault((setting, row.key), {})
            of_row[variant] = of_row.get(variant, 0) + 1

    def rows(self, wanted):
        """All rows of these groups, those of one kind together."""
        placed = [(scenario.setting, row) for scenario in SCENARIOS for row in scenario.rows]
        placed += [(setting, row) for setting in idle.SETTINGS for row in idle.rows(setting)]
        order = list(dict.fromkeys(row.key for _, row in placed))
        placed.sort(key=lambda place: order.index(place[1].key))
        return [
            (setting, row, self.samples.get((setting, row.key), {}), self.failures.get((setting, row.key), {}))
            for setting, row in placed
            if wanted(row.group)
        ]


def facts():
    def git(*words):
        return subprocess.run(["git", "-C", REPOSITORY, *words], capture_output=True, text=True).stdout.strip()

    return {
        "groups": GROUPS,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "commit": git("describe", "--always", "--dirty"),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
    }


def main():
    variable = os.environ.get
    runs = int(variable("N") or (1 if QUICK else 10))
    seconds = int(variable("BENCH_SECONDS") or (1 if QUICK else 60))
    out = pathlib.Path(variable("OUT") or REPOSITORY / "target/bench").absolute()
    out.mkdir(parents=True, exist_ok=True)
    binaries = pathlib.Path(variable("BINARIES") or REPOSITORY / "target/release").absolute()
    only = [group for group in (variable("ONLY") or "").split(",") if group]

    def wanted(group):
        return not only or group in only

    variants = [programs.of_folder("this", binaries)]
    if variable("BASE"):
        variants.append(programs.base(variable("BASE"), out))
    if variable("PEER"):
        variants.append(programs.peer(variable("PEER"), variable("PEER_READY")))

    # Ctrl-C and SIGTERM end everything that was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(variants, programs.tools(binaries, out, 0.05 if QUICK else 0.3))
    for scenario in SCENARIOS:
        if wanted(scenario.rows[0].group):
            print(f"{scenario.rows[0].group}: {scenario.setting.host()}", file=sys.stderr)
            run.scenario(scenario, runs)
    if wanted("idle"):
        print(f"idle: {seconds} s", file=sys.stderr)
        run.idle(seconds, 0 if QUICK else 15)
    table.write(table.document(run.rows(wanted), variants, facts()), variants, out)
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
