#!/usr/bin/env python3
"""Starts and stops of the service beside bare control daemons: benches/gpu/starts.py BINARIES OUT

The bare control daemons are as many as the service starts, all at once, each with a server; they are told `quit` all at once.
RUNS is how often they and the service take turns (5). OUT gets starts.json. BUS is benches/service/bus.c, compiled, if this host
lacks cc or libsystemd's headers. It needs dbus-daemon and NVIDIA's control daemon. Compute modes are not touched."""

import json
import os
import pathlib
import subprocess
import sys
import time

sys.dont_write_bytecode = True
os.environ["REAL"] = "1"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "service"))

import bare
import variants
from host import REAL_GPUS, Host, Service, Setting
from scenario import milliseconds

RUNS = int(os.environ.get("RUNS", "5"))
GPUS = len(REAL_GPUS)
# The whole host where it has several GPUs.
SETTINGS = {
    f"{GPUS} GPUs, shared": Setting(GPUS, 4 * GPUS),
    f"{GPUS} GPUs, per_gpu": Setting(GPUS, 4 * GPUS, "per_gpu"),
    f"{GPUS} GPUs, per_slice": Setting(GPUS, 4 * GPUS, "per_slice"),
} if GPUS > 1 else {
    "4 slices, shared": Setting(1, 4),
    "4 slices, per_slice": Setting(1, 4, "per_slice"),
    "10 slices, per_slice": Setting(1, 10, "per_slice"),
}
KEYS = ["bare_start", "start", "bare_stop", "stop"]


def facts():
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_mode", "--format=csv,noheader"]
    gpus = subprocess.check_output(query, text=True).splitlines()
    return {
        "gpu": gpus[0], "gpus": len(gpus), "cpus": len(os.sched_getaffinity(0)), "runs": RUNS,
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "starts": {name: {key: [] for key in KEYS} for name in SETTINGS},
    }


def measure(setting, variant, tools):
    with Host(setting, tools) as host:
        bare_start, _, bare_stop = bare.start(host, setting)
        with Service(host, variant) as service:
            times = [bare_start, service.ready, bare_stop, service.stop()]
    return dict(zip(KEYS, map(milliseconds, times)))


def main():
    binaries, out = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    bus = os.environ.get("BUS")
    tools = variants.Tools(None, binaries / "yunion-mpsctl", bus, 0) if bus else variants.tools(binaries, out, 0)
    result = facts()
    for _ in range(RUNS):
        for name, setting in SETTINGS.items():
            found = measure(setting, variants.of_folder("present", binaries), tools)
            for key, value in found.items():
                result["starts"][name][key].append(value)
            print(name, json.dumps(found), flush=True)
            (out / "starts.json").write_text(json.dumps(result, indent=2, sort_keys=True) + "\n")


main()
