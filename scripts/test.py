#!/usr/bin/python3
"""Runs every test, and names in the end what failed and why, and what was left out and why: make test.

Tests wait for other programs most of the time. So the tests on simulated hosts (it), the tests on booted machines (e2e) and all
others run side by side, and more of `it` at a time than there are cores (RUST_TEST_THREADS says how many).
STRESS=2 has two busy loops for each core beside them.
Where YUNION_MPS_SKIP_NOTHING is set, what is left out is a failure, but for the reasons that tests/support/skip.rs has.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
THREADS_FOR_EACH_CORE = 3
# These test programs run in parallel to all others. The others run one after another.
LANES = ["e2e", "it"]


class Program:
    """A program with tests, and what came of it."""

    def __init__(self, name, words, directory):
        self.name, self.words, self.directory = name, words, directory
        self.lines, self.status, self.seconds = [], None, 0.0

    def run(self, own_session):
        begun = time.monotonic()
        process = subprocess.Popen(
            self.words,
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=own_session,
        )
        for line in process.stdout:
            self.lines.append(line)
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        self.status = process.wait()
        self.seconds = time.monotonic() - begun

    def failures(self):
        """The words of each panic, or the end of the output of a program without one."""
        lines = [line.decode(errors="replace").rstrip("\n") for line in self.lines]
        why = [
            "\n".join(lines[number : number + 3]) for number, line in enumerate(lines) if " panicked at " in line
        ]
        return f"{self.name}: exit status {self.status}\n" + "\n".join(why or lines[-20:])


def built():
    """Builds all tests, and returns their programs."""
    command = ["cargo", "test", "--workspace", "--locked", "--no-run", "--message-format=json-render-diagnostics"]
    build = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if build.returncode != 0:
        sys.exit(build.returncode)
    programs = []
    for message in map(json.loads, build.stdout.splitlines()):
        if message.get("executable") and message["profile"]["test"]:
            directory = pathlib.Path(message["manifest_path"]).parent
            programs.append(Program(message["target"]["name"], [message["executable"]], directory))
    programs.append(Program("examples in documentation", ["cargo", "test", "--workspace", "--locked", "--doc"], ROOT))
    return programs


def ignored_signals_become_handled():
    """Returns whether this process ignored a signal of the terminal, as nohup and a shell in the background make it do. Programs
    would inherit that, and tests send them these signals. So the tests get the defaults, in a session of their own."""
    names = [signal.SIGHUP, signal.SIGINT, signal.SIGQUIT]
    ignored = [name for name in names if signal.getsignal(name) == signal.SIG_IGN]
    for name in ignored:
        # Child processes do not inherit a handler.
        signal.signal(name, lambda *_: None)
    return bool(ignored)


def busy_loops(number):
    """Load beside the tests, which ends with this process."""
    loop = ["setpriv", "--pdeathsig", "KILL", "sh", "-c", "while :; do :; done"]
    return [subprocess.Popen(loop, stdin=subprocess.DEVNULL) for _ in range(number)]


def run(programs, own_session):
    lanes = [[program for program in programs if program.name == name] for name in LANES]
    lanes.append([program for program in programs if program.name not in LANES])
    threads = [
        threading.Thread(target=lambda lane=lane: [program.run(own_session) for program in lane], daemon=True)
        for lane in lanes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main():
    own_session = ignored_signals_become_handled()
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("RUST_TEST_THREADS", str(THREADS_FOR_EACH_CORE * cores))
    programs = built()
    with tempfile.TemporaryDirectory() as directory:
        skipped = pathlib.Path(directory, "skipped")
        skipped.touch()
        os.environ["YUNION_MPS_SKIPPED"] = str(skipped)
        loops = busy_loops(int(os.environ.get("STRESS") or 0) * cores)
        try:
            run(programs, own_session)
        finally:
            for loop in loops:
                loop.kill()
        left_out = sorted(skipped.read_text().splitlines())
    # The reason of a failed test is in the middle of the output, and hundreds of lines may follow.
    failed = [program for program in programs if program.status != 0]
    print()
    for program in failed:
        print(program.failures())
    slow = sorted(programs, key=lambda program: program.seconds, reverse=True)
    print("seconds: " + ", ".join(f"{one.name} {one.seconds:.0f}" for one in slow if one.seconds >= 1))
    print(f"skipped: {len(left_out)}", *left_out, sep="\n")
    sys.exit(1 if failed else 0)


main()
