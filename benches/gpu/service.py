#!/usr/bin/env python3
"""The service itself on a GPU: benches/gpu/service.py BINARIES OUT

One GPU with four slices: the resident memory, beside that of NVIDIA's libnvidia-ml in another process that asks it the
same; the wake-ups of an idle service; the time from SIGTERM to the end. It needs what run.py needs. Compute modes are
not touched."""

import ctypes
import os
import pathlib
import select
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "service"))

import memory
import process
from daemons import Service

STOPS = 6
IDLE = 40
# Until the last look after a start.
SETTLE = 16
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


def idle(pid):
    time.sleep(SETTLE)
    before = process.sleeps(pid)
    time.sleep(IDLE)
    return sum(count - before.get(thread, 0) for thread, count in process.sleeps(pid).items())


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
    fields = "gpu_uuid,name,driver_version,compute_mode"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    gpu = subprocess.check_output(query, text=True).splitlines()[0]
    print(time.strftime("%Y-%m-%d", time.gmtime()), gpu)
    print("libnvidia-ml in another process, KiB:", of_library())
    for number in range(STOPS):
        with Service(binaries, out, [gpu.split(", ")[0]], 4) as service:
            pid = service.process.pid
            time.sleep(1)
            if number == 0:
                print("resident memory, KiB:", memory.resident(pid))
                print(f"wake-ups in {IDLE} s:", idle(pid))
            print(f"SIGTERM to exit, ms: {stop(pid):.0f}", flush=True)


main()
