#!/usr/bin/env python3
"""The service itself on a GPU, and what its clients cost: benches/gpu/service.py BINARIES OUT

One GPU with four slices: the resident memory, beside that of NVIDIA's libnvidia-ml in another process that asks it the
same; the wake-ups and the CPU time of the service, and of the front ends that it starts for its health checks, with 0,
12 and 48 clients; the time of calls and commands with them; the memory of a client on the GPU and on the host, under the
service and without MPS; the time from SIGTERM to the end. A client launches a short kernel each 10 ms.

OUT gets service.json and service.log. BUS is benches/service/bus.c, compiled, if this host lacks cc or libsystemd's
headers. WATCH is how many seconds are watched without a client (60), and half of it with clients. It needs what run.py needs, but no PyTorch. Compute modes are not
touched."""

import ctypes
import json
import os
import pathlib
import re
import select
import signal
import statistics
import subprocess
import sys
import time

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "service"))

import memory
import process
import variants
from daemons import Service, WithoutMps
from processes import Group, Loads

WATCH = float(os.environ.get("WATCH", "60"))
CLIENTS = [int(count) for count in os.environ.get("CLIENTS", "12,48").split(",")]
SLICES = 4
STOPS = 3
CALLS = 20
COMMANDS = ["list", "clients", "status"]
# The time until the last look after a start.
SETTLE = float(os.environ.get("SETTLE", "16"))
XID = 8


def of_library():
    """The KiB that libnvidia-ml takes in this process."""
    before = process.status_kib("self", "VmRSS")
    library = ctypes.CDLL("libnvidia-ml.so.1")
    device, events, number = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint(64)
    for answer in (
        library.nvmlInit_v2(),
        library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)),
        library.nvmlDeviceGetComputeMode(device, ctypes.byref(ctypes.c_int())),
        library.nvmlEventSetCreate(ctypes.byref(events)),
        library.nvmlDeviceRegisterEvents(device, ctypes.c_ulonglong(XID), events),
        library.nvmlDeviceGetComputeRunningProcesses_v3(
            device, ctypes.byref(number), ctypes.create_string_buffer(64 * 32)
        ),
    ):
        if answer != 0:
            sys.exit(f"libnvidia-ml answered {answer}")
    return process.status_kib("self", "VmRSS") - before


def asked(fields):
    return subprocess.check_output(["nvidia-smi", f"--query-{fields}", "--format=csv,noheader,nounits"], text=True)


def memory_now():
    """The MiB that are taken on the GPU, and on the host."""
    info = dict(line.split(":") for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    kib = lambda key: int(info[key].split()[0])
    return int(asked("gpu=memory.used").split()[0]), (kib("MemTotal") - kib("MemAvailable")) / 1024


def of_processes(pids):
    """What NVML says of these processes in MiB, if it lists them, and their memory on the host in MiB."""
    rows = (line.split(", ") for line in asked("compute-apps=pid,used_memory").splitlines())
    on_gpu = [int(mib) for pid, mib in rows if int(pid) in pids and mib.isdigit()]
    texts = [pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    sums = lambda key: [sum(map(int, re.findall(rf"^{key}:\s+(\d+)", text, re.M))) / 1024 for text in texts]
    found = {"resident": sums("Rss"), "shared_out": sums("Pss"), "own": sums(r"Private_\w+")}
    found["gpu_by_nvml"] = on_gpu
    return {key: statistics.median(values) for key, values in found.items() if values}


def watched(pid, seconds):
    """A while without a call: the wake-ups and the CPU time, for a minute, and the memory at the end."""
    started = process.Started(pid)
    exact = started.group is not None
    try:
        wakes, own, others, begin = process.sleeps(pid), process.cpu_ns(pid), started.cpu_ns(), time.monotonic()
        time.sleep(seconds)
        minutes = (time.monotonic() - begin) / 60
        wakes = sum(count - wakes.get(thread, 0) for thread, count in process.sleeps(pid).items())
        return {
            "seconds": seconds, "wakeups_a_minute": wakes / minutes,
            "cpu_ms_a_minute": (process.cpu_ns(pid) - own) / 1e6 / minutes,
            "front_ends_cpu_ms_a_minute": (started.cpu_ns() - others) / 1e6 / minutes,
            "front_ends_exact": exact, "resident_kib": process.status_kib(pid, "VmRSS"),
        }
    finally:
        started.end()


def timed(service, bus):
    """Calls and commands: the median of their milliseconds, and the CPU time of the service for a call."""
    pid, found = service.process.pid, {}
    for method in ("ListClients", "ListDevices") if bus else ():
        words = [bus, "call", str(CALLS), "/io/yunion/Mps1/Manager", "io.yunion.Mps1.Manager", method]
        before = process.cpu_ns(pid)
        said = subprocess.run(words, env=service.variables, check=True, timeout=30, capture_output=True, text=True)
        found[f"{method}_cpu_ms"] = (process.cpu_ns(pid) - before) / 1e6 / CALLS
        found[f"{method}_ms"] = statistics.median(int(line) for line in said.stdout.split()) / 1e6
    for command in COMMANDS:
        words = [str(service.binaries / "yunion-mpsctl"), command]
        times = [process.run(words, service.variables) for _ in range(10)]
        if any(status for _, status in times):
            raise process.Unable(f"yunion-mpsctl {command} failed")
        found[f"{command}_ms"] = statistics.median(took for took, _ in times) / 1e6
    return found


def front_end(service):
    """One of NVIDIA's front ends with one command: its time, CPU time and memory."""
    variables = {**service.variables, "CUDA_MPS_PIPE_DIRECTORY": f"{service.directory.name}/pipe"}
    samples = []
    for _ in range(10):
        begin = time.monotonic()
        asking = subprocess.Popen(["nvidia-cuda-mps-control"], env=variables, stdin=-1, stdout=-3)
        asking.stdin.write(b"get_server_list\n")
        asking.stdin.close()
        usage = os.wait4(asking.pid, 0)[2]
        cpu = usage.ru_utime + usage.ru_stime
        samples.append((1000 * (time.monotonic() - begin), 1000 * cpu, usage.ru_maxrss))
    return dict(zip(("ms", "cpu_ms", "most_memory_kib"), map(statistics.median, zip(*samples))))


def with_clients(loads, variables, empty, watch=None):
    """So many clients that work, one for each set of variables: what they cost each, and what `watch` finds meanwhile."""
    found = {}

    def look():
        time.sleep(2)
        gpu, host = memory_now()
        count = len(variables)
        found["each_mib"] = {"gpu": (gpu - empty[0]) / count, "host": (host - empty[1]) / count}
        found["each_mib"] |= of_processes([one.pid for one in group.processes])
        if watch:
            found.update(watch())

    with Group(loads, "small", variables) as group:
        group.prepare("small")
        rates = group.measure(WATCH / 2 + 8 if watch else 4, meanwhile=look)
    if not all(rates):
        raise process.Unable(f"{rates.count(None)} of {len(rates)} clients ended")
    return found


def stop(pid):
    """The milliseconds from SIGTERM to the end."""
    end = os.pidfd_open(pid)
    start = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    select.select([end], [], [], 20)
    took = 1000 * (time.monotonic() - start)
    os.close(end)
    return took


def main():
    binaries, out = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    bus = os.environ.get("BUS") or str(variants.tools(binaries, out, 0).bus)
    gpu, *facts = asked("gpu=gpu_uuid,name,driver_version,compute_mode").splitlines()[0].split(", ")
    result = {
        "gpu": ", ".join(facts), "date": time.strftime("%Y-%m-%d", time.gmtime()), "slices": SLICES,
        "cpus": len(os.sched_getaffinity(0)), "service": {}, "clients": {}, "without_mps": {}, "stop_ms": [],
    }

    def keep(part, name, found):
        result[part][name] = found
        (out / "service.json").write_text(json.dumps(result, indent=2, sort_keys=True) + "\n")
        print(part, name, json.dumps(found), flush=True)

    keep("service", "library_alone_kib", of_library())
    loads = Loads(out, pytorch=False)
    try:
        with Service(binaries, out, [gpu], SLICES) as service:
            pid = service.process.pid
            time.sleep(SETTLE)
            keep("service", "resident_kib", memory.resident(pid))
            keep("service", "front_end", front_end(service))
            time.sleep(2)
            empty = memory_now()
            keep("clients", "0", watched(pid, WATCH) | timed(service, bus))
            # One client for each slice, in turn.
            of_slices = service.clients(SLICES)
            for count in CLIENTS:
                variables = [of_slices[number % SLICES] for number in range(count)]
                look = lambda: watched(pid, WATCH / 2) | timed(service, bus)
                keep("clients", str(count), with_clients(loads, variables, empty, look))
        empty = memory_now()
        for count in CLIENTS:
            variables = WithoutMps(gpu).clients(count)
            keep("without_mps", str(count), with_clients(loads, variables, empty))
    finally:
        loads.end()
    for _ in range(STOPS):
        with Service(binaries, out, [gpu], SLICES) as service:
            time.sleep(1)
            result["stop_ms"].append(stop(service.process.pid))
    keep("service", "stops", len(result["stop_ms"]))


main()
