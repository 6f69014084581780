#!/usr/bin/env python3
"""Benchmarks on GPUs: benches/gpu/run.py BINARIES OUT [PART ...]

A PART is one of
  WORK[+WORK...][@COUNT,...]  the works of load.py and load.cu in so many processes at once: without MPS, under a bare
                              control daemon, and under this service with policies of cuda_mps_thread_percentage; if
                              jpeg fails once, dct stands in for it
  pairs     ResNet-50 in 8 processes under the service, by turns with a bare control daemon that gives the same limits
  beside    a small client beside three that fill the GPU
  killed    the service is killed and reloaded under load
  topology  ResNet-50 in 8 processes on each of two GPUs, with one control daemon and with one for each GPU, which is
            bound to the CPUs near its GPU or not; the processes are bound to all CPUs, to these and to the others
  nccl      an all-reduce over all GPUs of the host, a rank on each: without MPS, in slices with all SMs, and in slices with a quarter
  isolation  the same without MPS, with one control daemon for four slices, and with one for each: ResNet-50 in 8 processes,
            and in one beside seven that are idle; a small client beside three that fill the GPU; a fault in one slice, a
            kernel that fills the GPU; the memory of the servers, and the time to be ready with 4 and with 10 slices
All of them by default. OUT gets results.json, results.md, transcript.txt, and the logs of the service and of the
processes. A part that fails is told of, and the next one begins.

SECONDS_EACH is the time of a run (4; `pairs` and `killed` take twice as long), RUNS how many runs a figure of the works
and of `beside` is the median of (3), MODES a list of modes with commas (all), ROUNDS how often `pairs` repeats (3). After
SECONDS_AT_MOST nothing new begins.

It needs nvcc, PyTorch, NVIDIA's control daemon, and a system bus at DBUS_SYSTEM_BUS_ADDRESS on which root may own a
name. BINARIES has yunion-mps-daemon and yunion-mpsctl. Compute modes are not touched.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import traceback

from daemons import Bare, Service, WithoutMps
from processes import IN_PYTORCH, Failure, Group, Loads, Process, median_of, ordered, total, wait_until

HERE = pathlib.Path(__file__).resolve().parent
SECONDS = float(os.environ.get("SECONDS_EACH", "4"))
RUNS = int(os.environ.get("RUNS", "3"))
ROUNDS = int(os.environ.get("ROUNDS", "3"))
AT_MOST = float(os.environ.get("SECONDS_AT_MOST", "inf"))
POLICIES = ["equal", "balanced", "unlimited"]
ALL_MODES = ["without MPS", "bare", *POLICIES]
MODES = os.environ["MODES"].split(",") if "MODES" in os.environ else ALL_MODES
COUNTS = [1, 2, 4, 8, 16]
WORKS = ["resnet50", "train", "jpeg", "dct", "fma", "wide"]
PER_GPU = int(os.environ.get("PROCESSES_PER_GPU", "8"))
# The least time for a step.
A_STEP = 3 * RUNS * SECONDS + 5


class Run:
    def __init__(self, binaries, out):
        self.binaries, self.out, self.began = binaries, out, time.monotonic()
        self.transcript = open(out / "transcript.txt", "a")
        fields = "gpu_uuid,gpu_bus_id,name,driver_version,compute_mode"
        query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        self.gpus = [line.split(", ") for line in subprocess.check_output(query, text=True).splitlines()]
        name, driver, mode = self.gpus[0][2:]
        self.results = {
            "gpu": f"{name}, {driver}, {mode}", "gpus": len(self.gpus), "cpus": len(os.sched_getaffinity(0)),
            "date": time.strftime("%Y-%m-%d", time.gmtime()), "seconds_each": SECONDS,
            "runs": RUNS,
        }
        self.loads = Loads(out)
        self.failures = dict.fromkeys(WORKS, 0)

    def note(self, text):
        line = f"{time.strftime('%H:%M:%S', time.gmtime())} +{time.monotonic() - self.began:.1f} {text}"
        print(line, flush=True)
        self.transcript.write(line + "\n")
        self.transcript.flush()

    def save(self):
        text = json.dumps(self.results, indent=2, sort_keys=True) + "\n"
        (self.out / "results.json").write_text(text)
        (self.out / "results.md").write_text(tables(self.results))

    def step(self, name, do):
        if time.monotonic() - self.began + A_STEP > AT_MOST:
            return self.note(f"{name}: no time is left")
        self.note(f"{name}: begins")
        self.attempt(name, do)

    def attempt(self, name, do):
        """A failure is noted and ends this attempt alone."""
        try:
            do()
        except Exception as error:
            known = isinstance(error, (Failure, subprocess.SubprocessError))
            said = getattr(error, "stderr", None) or ""
            self.note(f"{name}: FAILED: {error if known else traceback.format_exc()} {said}")
        self.save()

    def service(self, gpus, slices, **keys):
        return Service(self.binaries, self.out, gpus, slices, **keys)

    @property
    def gpu(self):
        return self.gpus[0][0]

    def way(self, mode, count):
        """The way in which the processes reach the GPU."""
        if mode == "without MPS":
            return WithoutMps(self.gpu)
        if mode == "bare":
            return Bare(self.gpu)
        return self.service([self.gpu], count, cuda_mps_thread_percentage=mode)


def workloads(run, works, counts):
    def measured(clients, works, count, mode):
        with Group(run.loads, works[0], clients) as group:
            for work in works:
                # Counted as a failure until the measurement succeeds.
                run.failures[work] += 1
                said = group.prepare(work)
                found = median_of([total(group.measure(SECONDS)) for _ in range(RUNS)])
                found["sms"] = min(one["sms"] for one in said)
                run.results.setdefault(work, {}).setdefault(str(count), {})[mode] = found
                run.note(f"{work} in {count}, {mode}: {json.dumps(found)}")
                run.save()
                run.failures[work] -= 1

    def one(mode, count):
        with run.way(mode, count) as way:
            clients = way.clients(count)
            run.note(f"variables of the first process: {clients[0]}")
            # First the processes of load.cu, then those of load.py; each does one work after the other.
            attempt(clients, [work for work in works if work not in IN_PYTORCH], count, mode)
            attempt(clients, [work for work in works if work in IN_PYTORCH], count, mode)
            if "jpeg" in works and run.failures["jpeg"]:
                attempt(clients, ["dct"], count, mode)

    def attempt(clients, works, count, mode):
        # A failure may take long, so no work is tried again often.
        chosen = [work for work in works if run.failures[work] < (1 if work == "jpeg" else 2)]
        if chosen:
            name = f"{'+'.join(chosen)} in {count}, {mode}"
            run.attempt(name, lambda: measured(clients, chosen, count, mode))

    for count in counts:
        for mode in MODES:
            # With one slice, which is the whole GPU, all policies are the same.
            if count == 1 and mode in POLICIES[1:]:
                continue
            run.step(f"{'+'.join(works)} in {count}, {mode}", lambda: one(mode, count))


def pairs(run):
    def one(policy):
        with run.way(policy, 8) as service, Bare(run.gpu) as bare:
            limits = service.limits()
            run.note(f"variables of the first process of each: {service.clients(1)}, {bare.clients(1, limits)}")
            found = run.results.setdefault("pairs", {})[policy] = {"limits": limits, "ratios": [], "ours": []}
            with Group(run.loads, "resnet50", service.clients(8) + bare.clients(8, limits)) as group:
                group.prepare("resnet50")
                ours, theirs = group.processes[:8], group.processes[8:]
                for number in range(ROUNDS):
                    turns = [ours, theirs] if number % 2 == 0 else [theirs, ours]
                    rates = [total(group.measure(2 * SECONDS, turn))["per_second"] for turn in turns]
                    mine, other = rates if number % 2 == 0 else reversed(rates)
                    found["ours"].append(mine)
                    found["ratios"].append(mine / other)
                    run.note(f"pairs, {policy}: ours {mine:.1f}, bare {other:.1f}, ratio {mine / other:.4f}")
                    run.save()

    for policy in POLICIES:
        run.step(f"pairs, {policy}", lambda: one(policy))


def beside(run):
    mix = ["small", "wide", "wide", "wide"]

    def one(mode):
        with run.way(mode, 4) as way, Group(run.loads, "small", way.clients(4)) as group:
            group.prepare(mix)
            runs = [group.measure(SECONDS) for _ in range(RUNS)]
            small = median_of([total(each[:1]) for each in runs])
            found = {**small, "greedy": median_of([total(each[1:]) for each in runs])}
            run.results.setdefault("beside", {})[mode] = found
            run.note(f"beside, {mode}: {json.dumps(found)}")

    for mode in MODES:
        run.step(f"beside, {mode}", lambda: one(mode))


def killed(run):
    def one():
        with run.way("equal", 8) as service, Group(run.loads, "resnet50", service.clients(8)) as group:
            group.prepare("resnet50")
            calm = total(group.measure(2 * SECONDS))
            found = total(group.measure(2 * SECONDS, meanwhile=service.kill_and_reload))
        run.results["killed"] = {"calm": calm, "killed": found}
        run.note(f"killed: {json.dumps(run.results['killed'])}")

    run.step("killed", one)


def cpus_of(text):
    ends = (part.split("-") for part in text.strip().split(",") if part)
    return {cpu for end in ends for cpu in range(int(end[0]), int(end[-1]) + 1)}


def near(address):
    """The CPUs near the GPU, as the kernel names them; empty if it doesn't."""
    domain, rest = address.lower().split(":", 1)
    path = pathlib.Path(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/local_cpulist")
    return cpus_of(path.read_text()) if path.exists() else set()


def cpus_of_mps():
    """The CPUs that control daemons and servers may use."""
    lines = []
    for status in pathlib.Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            command = status.with_name("cmdline").read_text().split("\0")[0]
        except OSError:
            continue
        if fields["Name"].startswith("nvidia-cuda-mps"):
            lines.append(f"{command} {fields['Pid']}: CPUs {fields['Cpus_allowed_list']}")
    return lines


def topology(run):
    gpus = run.gpus[:2]
    everywhere = os.sched_getaffinity(0)
    local = {gpu[0]: near(gpu[1]) & everywhere for gpu in gpus}
    run.note(f"topology: CPUs near each GPU: {[sorted(cpus) for cpus in local.values()]}")
    bound = all(cpus and cpus != everywhere for cpus in local.values())

    def one(name, **keys):
        service = run.service([gpu[0] for gpu in gpus], PER_GPU, cuda_mps_thread_percentage="equal", **keys)
        complaints = service.complaints("cuda_mps_cpu_affinity")
        for line in complaints:
            run.note(f"topology, {name}: {line}")
        if any("no such key" in line for line in complaints):
            raise Failure("this service does not know cuda_mps_cpu_affinity")
        with service:
            names = service.names
            clients = [service.variables_of(name) for name in names]
            if len(names) != PER_GPU * len(gpus):
                raise Failure(f"{len(names)} slices: {names}")
            for line in cpus_of_mps():
                run.note(f"topology, {name}: {line}")
            # The slices of one GPU follow each other.
            halves = [slice(n * PER_GPU, (n + 1) * PER_GPU) for n in range(len(gpus))]
            order = list(dict.fromkeys(client["CUDA_VISIBLE_DEVICES"] for client in clients))
            run.note(f"topology, {name}: {order}, {clients[0]}")
            with Group(run.loads, "resnet50", clients) as group:
                group.prepare("resnet50")
                ways = [("anywhere", [everywhere] * len(gpus))] * 2
                if bound:
                    ways += [("near", list(local.values())), ("far", [everywhere - cpus for cpus in local.values()])]
                for way, cpus in ways:
                    for half, of_half in zip(halves, cpus):
                        for process in group.processes[half]:
                            process.use_cpus(of_half)
                    found = group.measure(SECONDS)
                    each = [total(found[half]) for half in halves]
                    run.results.setdefault("topology", {}).setdefault(name, {}).setdefault(way, []).append(each)
                    run.note(f"topology, {name}, {way}: {json.dumps(each)}")
                    run.save()

    if len(gpus) < 2:
        return run.note("topology: this host has one GPU")
    run.step("topology, shared", lambda: one("shared", cuda_mps_topology="shared"))
    for affinity in ("none", "auto"):
        keys = {"cuda_mps_topology": "per_gpu", "cuda_mps_cpu_affinity": affinity}
        run.step(f"topology, per_gpu, {affinity}", lambda: one(f"per_gpu, {affinity}", **keys))
    if not any(name.startswith("per_gpu") for name in run.results.get("topology", {})):
        run.step("topology, per_gpu", lambda: one("per_gpu", cuda_mps_topology="per_gpu"))


def nccl(run):
    gpus = [gpu[0] for gpu in run.gpus]

    def ranks(name, clients):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # The devices of a slice need no multicast group of NVLink, which not every host allows.
        common = {**os.environ, "NCCL_NVLS_ENABLE": "0"}
        words = lambda rank: [sys.executable, str(HERE / "nccl.py"), *map(str, (rank, len(gpus), port, RUNS))]
        log = open(run.out / "nccl.log", "a")
        started = [
            subprocess.Popen(words(rank), env={**common, **client}, stdout=subprocess.PIPE, stderr=log, text=True)
            for rank, client in enumerate(clients)
        ]
        try:
            said = started[0].communicate(timeout=60)[0]
            if any(one.wait(timeout=20) for one in started):
                raise Failure("a rank failed: see nccl.log")
        finally:
            for one in started:
                one.kill()
        run.results.setdefault("nccl", {})[name] = json.loads(said.splitlines()[-1])
        run.note(f"nccl, {name}: {said.strip()}")

    def in_slices(slices):
        with run.service(gpus, slices, cuda_mps_thread_percentage="equal") as service:
            # The slices of a GPU stand beside each other.
            ranks(f"{slices} to a GPU", [service.variables_of(name) for name in service.names[::slices]])

    if len(gpus) < 2:
        return run.note("nccl: this host has one GPU")
    run.step("nccl, without MPS", lambda: ranks("without MPS", [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus]))
    for slices in (1, 4):
        run.step(f"nccl, {slices} to a GPU", lambda: in_slices(slices))


def memory_of_servers():
    """The MiB that MPS servers have of the GPU, and the MiB that servers and control daemons have of the host."""
    query = ["nvidia-smi", "--query-compute-apps=name,used_memory", "--format=csv,noheader,nounits"]
    apps = (line.rsplit(", ", 1) for line in subprocess.check_output(query, text=True).splitlines())
    gpu = sum(int(mib) for name, mib in apps if "nvidia-cuda-mps-server" in name)
    host = 0
    for status in pathlib.Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        except OSError:
            continue
        if fields["Name"].startswith("nvidia-cuda-mps"):
            host += int(fields.get("VmRSS", "0").split()[0])
    return {"gpu_mib": gpu, "host_mib": host // 1024}


def isolation(run):
    ways = {
        "without MPS": None,
        "one for all": {"cuda_mps_thread_percentage": "equal"},
        "one for all, unlimited": {"cuda_mps_thread_percentage": "unlimited"},
        "one for each": {"cuda_mps_topology": "per_slice"},
    }

    def way_of(name, slices):
        keys = ways[name]
        return WithoutMps(run.gpu) if keys is None else run.service([run.gpu], slices, **keys)

    def start(name, slices, found):
        began = time.monotonic()
        with way_of(name, slices):
            found[f"ready_{slices}"] = time.monotonic() - began
            found[f"memory_{slices}"] = memory_of_servers()

    def works(way, clients, found):
        """Two processes for each slice."""
        with Group(run.loads, "resnet50", clients * 2) as group:
            group.prepare("resnet50")
            found["resnet50"] = median_of([total(group.measure(SECONDS)) for _ in range(RUNS)])
            found["alone"] = median_of([total(group.measure(SECONDS, group.processes[:1])) for _ in range(RUNS)])
            # The last process uses the second slice, while all others work.
            place = pathlib.Path(group.directory.name)
            culprit = Process(run.loads, "fault", place, "culprit", clients[1])
            group.processes.append(culprit)
            if not ordered([culprit], ["prepare fault"], 40)[0]:
                raise Failure("the culprit has ended before its time")
            workers = group.processes[:-1]
            found["fault"] = total(group.measure(SECONDS, workers, meanwhile=lambda: culprit.order("go 1")))

    def beside_others(clients, found):
        with Group(run.loads, "small", clients) as group:
            group.prepare(["small", "wide", "wide", "wide"])
            runs = [group.measure(SECONDS) for _ in range(RUNS)]
            found["small"] = median_of([total(each[:1]) for each in runs])
            found["greedy"] = median_of([total(each[1:]) for each in runs])
        with Group(run.loads, "small", clients[:2]) as group:
            small, flood = group.processes
            group.prepare(["small", "flood"])
            # The flood's kernel runs longer than the measurement of the small ones.
            found["flood"] = total(group.measure(3, [small], meanwhile=lambda: flood.order("go 1")))
            wait_until("the end of the flood", flood.answered, 120)

    def one(name):
        found = run.results.setdefault("isolation", {}).setdefault(name, {})
        if ways[name] is not None:
            for slices in (4, 10):
                start(name, slices, found)
        with way_of(name, 4) as way:
            clients = way.clients(4)
            run.attempt(f"isolation, {name}, works", lambda: works(way, clients, found))
        with way_of(name, 4) as way:
            clients = way.clients(4)
            run.attempt(f"isolation, {name}, beside", lambda: beside_others(clients, found))
        run.note(f"isolation, {name}: {json.dumps(found)}")

    for name in ways:
        run.step(f"isolation, {name}", lambda: one(name))


def table(rows, heads):
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]) + "\n"


def tables(results):
    texts = [f"{results['gpu']}, {results['gpus']} GPUs, {results['cpus']} CPUs, {results['date']}\n"]
    cell = lambda one: f"{one['per_second']:.0f} ({one['median_ms']:.2f} ms)" if one and one["median_ms"] else "-"
    for work in (work for work in WORKS if work in results):
        rows = [[n, *(cell(results[work][str(n)].get(mode)) for mode in ALL_MODES)]
                for n in COUNTS if str(n) in results[work]]
        texts.append(f"{work}: units a second of all processes (median latency of a unit)\n")
        texts.append(table(rows, ["processes", *ALL_MODES]))
    if "pairs" in results:
        words = lambda ratios: " ".join(f"{ratio:.3f}" for ratio in ratios)
        rows = [[policy, words(one["ratios"])] for policy, one in results["pairs"].items()]
        texts.append("ResNet-50, 8 processes: this service / a bare control daemon with the same limits\n")
        texts.append(table(rows, ["policy", "ratios"]))
    if "beside" in results:
        found = ((mode, one) for mode, one in results["beside"].items() if one)
        rows = [
            [mode, f"{one['median_ms']:.2f}", f"{one['p99_ms']:.2f}", f"{one['greedy']['per_second']:.0f}"]
            for mode, one in found
        ]
        texts.append("Latency of a small kernel beside three clients that fill the GPU, ms, and their kernels a second\n")
        texts.append(table(rows, ["", "median", "99th percentile", "kernels of the three"]))
    if "killed" in results:
        calm, found = results["killed"]["calm"], results["killed"]["killed"]
        texts.append(
            f"ResNet-50, 8 processes: {calm['per_second']:.0f} a second; {found['per_second']:.0f} while the service "
            f"was killed three times and reloaded; {found['failed']} processes failed\n"
        )
    if "topology" in results:
        rows = [
            [name, way, *(f"{gpu['per_second']:.0f}" for gpu in each)]
            for name, ways in results["topology"].items() for way, rounds in ways.items() for each in rounds
        ]
        texts.append(f"ResNet-50, {PER_GPU} processes on each of two GPUs: images a second of each GPU\n")
        texts.append(table(rows, ["control daemons", "CPUs of the processes", "first GPU", "second GPU"]))
    if "nccl" in results:
        rows = [
            [name, one["sms"], *(f"{rate:.0f}" for rate in one["gb_per_second"])] for name, one in results["nccl"].items()
        ]
        texts.append("An all-reduce of 1 GiB over all GPUs: the bus bandwidth of each run, GB/s\n")
        texts.append(table(rows, ["slices", "SMs", *range(1, results["runs"] + 1)]))
    if "isolation" in results:
        texts.append("Four slices: one control daemon for all, one for each, and without MPS\n")
        texts.append(isolation_table(results["isolation"]))
    return "\n".join(texts)


def isolation_table(found):
    def row(what, cell):
        cells = []
        for one in found.values():
            try:
                cells.append(cell(one))
            except KeyError:
                cells.append("-")
        return [what, *cells]

    rows = [
        row("ResNet-50, 8 processes: images a second", lambda one: f"{one['resnet50']['per_second']:.0f}"),
        row("ResNet-50, one beside 7 idle ones: images a second", lambda one: f"{one['alone']['per_second']:.0f}"),
        row("a fault in one slice: of 8 processes, these lost their work", lambda one: one["fault"]["failed"]),
        row("a small kernel beside 3 greedy clients: median, ms", lambda one: f"{one['small']['median_ms']:.2f}"),
        row("the same, 99th percentile, ms", lambda one: f"{one['small']['p99_ms']:.2f}"),
        row("kernels of the 3 greedy clients a second", lambda one: f"{one['greedy']['per_second']:.0f}"),
        row("a small kernel beside a kernel that fills the GPU: median, ms", lambda one: f"{one['flood']['median_ms']:.2f}"),
        row("the same, 99th percentile, ms", lambda one: f"{one['flood']['p99_ms']:.2f}"),
        row("exec to ready with 4 slices, s", lambda one: f"{one['ready_4']:.2f}"),
        row("exec to ready with 10 slices, s", lambda one: f"{one['ready_10']:.2f}"),
        row("servers of 4 slices: MiB of the GPU", lambda one: one["memory_4"]["gpu_mib"]),
        row("servers and control daemons of 4 slices: MiB of the host", lambda one: one["memory_4"]["host_mib"]),
    ]
    return table(rows, ["", *found])


OTHERS = {"pairs": pairs, "beside": beside, "killed": killed, "topology": topology, "nccl": nccl, "isolation": isolation}


def main():
    binaries, out = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    # With this handler, SIGTERM also ends everything that was started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    run = Run(binaries, out)
    run.note(f"parts: {' '.join(sys.argv[3:])}; {json.dumps(run.results)}; {run.gpus}")
    try:
        for part in sys.argv[3:] or [*WORKS, *OTHERS]:
            if part in OTHERS:
                OTHERS[part](run)
            else:
                works, _, counts = part.partition("@")
                workloads(run, works.split("+"), [int(count) for count in counts.split(",")] if counts else COUNTS)
    finally:
        run.save()
        run.loads.end()
    run.note("the end")
    print((out / "results.md").read_text())


main()
