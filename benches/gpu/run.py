#!/usr/bin/env python3
"""Benchmarks on one GPU: benches/gpu/run.py BINARIES OUT [PART ...]

Each workload of load.py and load.cu runs in 1 to 16 processes at once: without MPS, under a bare control daemon, and
under this service with each policy of cuda_mps_thread_percentage. `pairs`: ResNet-50 in 8 processes under the
service, by turns with a bare control daemon that gives the same limits. `beside`: a small client beside three that
fill the GPU. `killed`: the service is killed and reloaded under load. A PART is a workload or one of these three; all
by default. OUT gets results.json, results.md and the service's log.

It needs nvcc, PyTorch, NVIDIA's control daemon, and a system bus at DBUS_SYSTEM_BUS_ADDRESS on which root may own a
name. BINARIES has yunion-mps-daemon and yunion-mpsctl. Compute modes are not touched.
"""

import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
SECONDS = float(os.environ.get("SECONDS_EACH", "4"))
PATIENCE = 120
POLICIES = ["equal", "balanced", "unlimited"]
NAMES = ["without MPS", "bare", *POLICIES]
COUNTS = [1, 2, 4, 8, 16]
LOAD = pathlib.Path(tempfile.gettempdir()) / "mps-load"
WORKS = ["resnet50", "train", "fma", "wide"]
IN_PYTORCH = ["resnet50", "train"]


def program(work):
    return [sys.executable, str(HERE / "load.py")] if work in IN_PYTORCH else [str(LOAD)]


def wait_until(what, condition, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            sys.exit(f"waited in vain for {what}")
        time.sleep(0.02)


def measure(starts, work, seconds=SECONDS, meanwhile=lambda: None):
    """Runs `work` once for each start, all at the same time. A start is the words before the command, and variables."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        place = pathlib.Path(directory)
        works = work if isinstance(work, list) else [work] * len(starts)
        processes = [
            subprocess.Popen(
                [*words, *program(one), one, str(seconds), directory],
                env={**os.environ, **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for (words, variables), one in zip(starts, works)
        ]
        ended = lambda: any(process.poll() is not None for process in processes)
        wait_until("the processes", lambda: len(list(place.glob("ready.*"))) == len(processes) or ended())
        (place / "go").touch()
        meanwhile()
        found = []
        for process in processes:
            out, complaints = process.communicate(timeout=PATIENCE)
            if process.returncode != 0:
                print(complaints[-600:], file=sys.stderr)
                found.append(None)
            else:
                found.append(json.loads(out))
    return found


def total(found):
    """Units a second of all, the median of their median latencies, and how many failed."""
    good = [one for one in found if one]
    return {
        "per_second": sum(one["units"] / one["seconds"] for one in good),
        "median_ms": statistics.median(one["median_ms"] for one in good) if good else None,
        "p99_ms": max(one["p99_ms"] for one in good) if good else None,
        "failed": len(found) - len(good),
    }


class Bare:
    """A control daemon as an administrator starts it by hand."""

    def __enter__(self):
        self.directory = tempfile.TemporaryDirectory(dir="/tmp")
        self.variables = {
            "CUDA_MPS_PIPE_DIRECTORY": f"{self.directory.name}/p", "CUDA_MPS_LOG_DIRECTORY": f"{self.directory.name}/l",
        }
        for path in self.variables.values():
            os.mkdir(path)
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **self.variables}, check=True)
        return self

    def starts(self, count, limits=None):
        return [([], {**self.variables, **(limits or {})})] * count

    def __exit__(self, *_):
        subprocess.run(
            ["nvidia-cuda-mps-control"], input="quit\n", text=True, env={**os.environ, **self.variables}, check=False
        )
        self.directory.cleanup()


class Service:
    def __init__(self, binaries, out, slices, policy):
        self.binaries, self.log = binaries, open(out / "service.log", "a")
        self.directory = tempfile.TemporaryDirectory(dir="/tmp")
        os.chmod(self.directory.name, 0o755)
        self.conf = pathlib.Path(self.directory.name) / "host.conf"
        self.conf.write_text(
            f"enable_cuda_mps: true\ncuda_mps_set_compute_mode: false\ncuda_mps_replicas: {slices}\n"
            f"cuda_mps_thread_percentage: {policy}\ncuda_mps_pipe_directory: {self.directory.name}/pipe\n"
            f"cuda_mps_log_directory: {self.directory.name}/log\n"
        )
        self.variables = {**os.environ, "RUNTIME_DIRECTORY": f"{self.directory.name}/run"}

    def start(self):
        command = [str(self.binaries / "yunion-mps-daemon"), "--config", str(self.conf)]
        self.process = subprocess.Popen(command, env=self.variables, stdout=self.log, stderr=self.log)
        self.ctl("is-ready", "--wait", "60", "--quiet")

    def ctl(self, *words):
        command = [str(self.binaries / "yunion-mpsctl"), *words]
        return subprocess.run(command, env=self.variables, check=True, capture_output=True, text=True).stdout

    def __enter__(self):
        self.start()
        self.names = self.ctl("list", "--names").split()
        return self

    def starts(self, count):
        program = str(self.binaries / "yunion-mpsctl")
        return [([program, "run", name, "--"], {}) for name in self.names[:count]]

    def limits(self):
        """The limits of a slice, for clients of a bare control daemon."""
        environment = json.loads(self.ctl("env", self.names[0], "--format", "json"))["environment"]
        wanted = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")
        return {name: environment[name] for name in wanted if name in environment}

    def kill_and_reload(self):
        for _ in range(3):
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.start()
        self.ctl("reload")

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        self.directory.cleanup()


def table(rows, heads):
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]) + "\n"


def workload(binaries, out, work, note):
    found = {}
    for count in COUNTS:
        row = found[str(count)] = {"without MPS": total(measure([([], {})] * count, work))}
        with Bare() as bare:
            row["bare"] = total(measure(bare.starts(count), work))
        for policy in POLICIES:
            # One slice is the whole GPU, whatever the policy.
            if count == 1 and policy != "equal":
                continue
            with Service(binaries, out, count, policy) as service:
                row[policy] = total(measure(service.starts(count), work))
        note(f"{work} {count}: " + ", ".join(f"{name} {one['per_second']:.0f}" for name, one in row.items()))
    cell = lambda one: f"{one['per_second']:.0f} ({one['median_ms']:.2f} ms)" if one else "-"
    rows = [[count, *(cell(row.get(name)) for name in NAMES)] for count, row in found.items()]
    text = f"{work}: units a second of all processes (median latency of a unit)\n\n"
    return found, text + table(rows, ["processes", *NAMES])


def pairs(binaries, out, note):
    found = {}
    for policy in POLICIES:
        with Service(binaries, out, 8, policy) as service, Bare() as bare:
            limits, ratios = service.limits(), []
            for _ in range(3):
                ours = total(measure(service.starts(8), "resnet50"))["per_second"]
                theirs = total(measure(bare.starts(8, limits), "resnet50"))["per_second"]
                ratios.append(ours / theirs)
            found[policy] = {"limits": limits, "ratios": ratios}
            note(f"{policy}: ours / bare {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    rows = [[policy, *(f"{ratio:.3f}" for ratio in one["ratios"])] for policy, one in found.items()]
    text = "ResNet-50, 8 processes: this service / a bare control daemon with the same limits\n\n"
    return found, text + table(rows, ["policy", "1", "2", "3"])


def beside(binaries, out, note):
    mix = ["small", "wide", "wide", "wide"]
    found = {"without MPS": measure([([], {})] * 4, mix)[0]}
    with Bare() as bare:
        found["bare"] = measure(bare.starts(4), mix)[0]
    for policy in POLICIES:
        with Service(binaries, out, 4, policy) as service:
            found[policy] = measure(service.starts(4), mix)[0]
    note("small client: " + ", ".join(f"{name} {one['p99_ms']:.2f} ms" for name, one in found.items() if one))
    rows = [[name, f"{one['median_ms']:.2f}", f"{one['p99_ms']:.2f}"] for name, one in found.items() if one]
    text = "Latency of a small kernel beside three clients that fill the GPU, ms\n\n"
    return found, text + table(rows, ["", "median", "99th percentile"])


def killed(binaries, out, note):
    with Service(binaries, out, 8, "equal") as service:
        calm = total(measure(service.starts(8), "resnet50", 8))
        found = total(measure(service.starts(8), "resnet50", 8, service.kill_and_reload))
    text = (
        f"ResNet-50, 8 processes: {calm['per_second']:.0f} a second; {found['per_second']:.0f} while the service was "
        f"killed three times and reloaded; {found['failed']} processes failed\n"
    )
    note(text.strip())
    return {"calm": calm, "killed": found}, text


def main():
    binaries, out = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run(["nvcc", "-O2", "-arch=native", "-o", LOAD, HERE / "load.cu"], check=True)
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_mode", "--format=csv,noheader"]
    gpu = subprocess.check_output(query, text=True).splitlines()[0]
    results = {"gpu": gpu, "seconds_each": SECONDS}
    texts = [f"{gpu}\n"]
    note = lambda text: print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
    others = {"pairs": pairs, "beside": beside, "killed": killed}
    for part in sys.argv[3:] or [*WORKS, *others]:
        if part in others:
            results[part], text = others[part](binaries, out, note)
        else:
            results[part], text = workload(binaries, out, part, note)
        texts.append(text)
        (out / "results.json").write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
        (out / "results.md").write_text("\n".join(texts))
    print("\n".join(texts))


main()
