"""The processes of a benchmark, and the orders that they follow (load.py explains the orders)."""

import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
PATIENCE = 40
IN_PYTORCH = ["resnet50", "train", "jpeg", "dct"]


class Failure(Exception):
    pass


def wait_until(what, condition, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise Failure(f"waited in vain for {what}")
        time.sleep(0.002)


class Loads:
    """Starts processes: load.cu's, and load.py's as forks of one process that has loaded PyTorch."""

    def __init__(self, out, pytorch=True):
        self.log = open(out / "load.log", "a")
        self.place = pathlib.Path(tempfile.mkdtemp(prefix="load", dir="/tmp"))
        compile_it = ["nvcc", "-O2", "-arch=native", "-o", self.place / "load", HERE / "load.cu"]
        self.compiler = subprocess.Popen(compile_it, stderr=self.log)
        self.pytorch = pytorch and subprocess.Popen(
            [sys.executable, str(HERE / "load.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
            text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
        )

    def start(self, work, directory, name, variables):
        """The PID, and the process if it is ours to wait for."""
        if work not in IN_PYTORCH:
            if self.compiler.wait(timeout=PATIENCE) != 0:
                raise Failure("nvcc failed: see load.log")
            process = subprocess.Popen(
                [self.place / "load", directory, name], env={**os.environ, **variables}, stdout=self.log,
                stderr=self.log,
            )
            return process.pid, process
        wanted = {"variables": variables, "directory": str(directory), "name": name}
        self.pytorch.stdin.write(json.dumps(wanted) + "\n")
        self.pytorch.stdin.flush()
        return int(self.pytorch.stdout.readline()), None

    def end(self):
        if self.pytorch:
            self.pytorch.kill()
            self.pytorch.wait()
        shutil.rmtree(self.place, ignore_errors=True)


class Process:
    def __init__(self, loads, work, directory, name, variables):
        self.path, self.number = directory / name, 0
        self.pid, self.process = loads.start(work, directory, name, variables)

    def lives(self):
        if self.process:
            return self.process.poll() is None
        return os.path.exists(f"/proc/{self.pid}")

    def order(self, text):
        written = self.path.with_suffix(".next")
        written.write_text(text)
        self.wanted = self.path.with_suffix(f".done.{self.number}")
        written.rename(self.path.with_suffix(f".order.{self.number}"))
        self.number += 1

    def answered(self):
        return self.wanted.exists()

    def answer(self):
        return json.loads(self.wanted.read_text()) if self.answered() else None

    def use_cpus(self, cpus):
        for thread in os.listdir(f"/proc/{self.pid}/task"):
            os.sched_setaffinity(int(thread), cpus)


def ordered(processes, texts, seconds, meanwhile=lambda: None):
    """The answers; None for a process that has ended instead."""
    for process, text in zip(processes, texts):
        process.order(text)
    meanwhile()
    wait_until(texts[0], lambda: all(one.answered() or not one.lives() for one in processes), seconds)
    return [process.answer() for process in processes]


class Group:
    """Processes that start together, one for each set of variables; they end with the group."""

    def __init__(self, loads, work, variables):
        self.directory = tempfile.TemporaryDirectory(dir="/tmp")
        place = pathlib.Path(self.directory.name)
        self.processes = [Process(loads, work, place, f"p{n}", one) for n, one in enumerate(variables)]

    def __enter__(self):
        return self

    def prepare(self, works):
        """Each process has its work ready. Returns what they say of it."""
        if isinstance(works, str):
            works = [works] * len(self.processes)
        said = ordered(self.processes, [f"prepare {work}" for work in works], PATIENCE)
        if not all(said):
            raise Failure(f"{said.count(None)} of {len(said)} processes ended before they had {works[0]} ready")
        return said

    def measure(self, seconds, some=None, meanwhile=lambda: None):
        """All processes work, or only some of them."""
        some = some or self.processes
        return ordered(some, [f"go {seconds}"] * len(some), seconds + PATIENCE, meanwhile)

    def __exit__(self, *_):
        living = [process for process in self.processes if process.lives()]
        for process in living:
            process.order("end")
        try:
            wait_until("the end of the processes", lambda: not any(process.lives() for process in living), 10)
        except Failure:
            for process in living:
                if process.lives():
                    os.kill(process.pid, signal.SIGKILL)
        self.directory.cleanup()


def total(found):
    """Units a second of all, the median of their median latencies, and how many failed."""
    good = [one for one in found if one]
    return {
        "per_second": sum(one["units"] / one["seconds"] for one in good),
        "median_ms": statistics.median(one["median_ms"] for one in good) if good else None,
        "p99_ms": max(one["p99_ms"] for one in good) if good else None,
        "failed": len(found) - len(good),
    }


def median_of(runs):
    """The median of each figure of these runs, with the runs."""
    middle = {key: statistics.median(run[key] for run in runs) for key in ("per_second", "median_ms", "p99_ms")}
    return {**middle, "failed": sum(run["failed"] for run in runs), "runs": runs}
