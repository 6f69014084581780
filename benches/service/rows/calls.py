"""Calls on D-Bus by an independent client: the time that it waits, and the CPU time that the service takes."""

import os

import process
from process import Unable
from scenario import LARGE, MIDDLE, SMALL, Row, Scenario, Serving, distinct, milliseconds

MANAGER = ["/io/yunion/Mps1/Manager", "io.yunion.Mps1.Manager"]
METHODS = {
    "ListDevices": [*MANAGER, "ListDevices"],
    "ListGpus": [*MANAGER, "ListGpus"],
    "GetDevice": [*MANAGER, "GetDevice", "s"],
    "GetContainerConfig": [*MANAGER, "GetContainerConfig", "as"],
    "GetManagedObjects": ["/io/yunion/Mps1", "org.freedesktop.DBus.ObjectManager", "GetManagedObjects"],
}


def rows(setting):
    rows = []
    for name in METHODS:
        aim = name == "ListDevices" and setting.slices == 768
        rows.append(Row("calls", name, f"{name}, the client's time", "ms", "<= 8" if aim else None))
        rows.append(Row("calls", f"{name}_cpu", f"{name}, the service's CPU time", "ms", "<= 2" if aim else None))
    return [*rows, Row("calls", "memory_after", "resident memory after these calls", "MiB")]


def measure(setting, variant, tools):
    with Serving(setting, variant, tools) as service:
        slice_name = f"{setting.base_addresses()[-1]}-0"
        for name, words in METHODS.items():
            if words[-1] in ("s", "as"):
                words = [*words, slice_name]
            # The first calls fill caches for later ones.
            call(service, 2, words)
            before = process.cpu_ns(service.pid)
            times = call(service, 20, words)
            yield f"{name}_cpu", [milliseconds(process.cpu_ns(service.pid) - before) / len(times)]
            yield name, times
        yield "memory_after", [process.status_kib(service.pid, "VmRSS") / 1024]
        service.stop()


def call(service, number, words):
    """The milliseconds of each of so many calls."""
    reader, writer = os.pipe()
    _, status = process.run([service.host.tools.bus, "call", str(number), *words], service.host.environment, writer)
    os.close(writer)
    with open(reader) as lines:
        times = [milliseconds(int(line)) for line in lines]
    if status or len(times) != number:
        raise Unable(f"{words[2]} failed")
    return times


SCENARIOS = [Scenario(setting, rows(setting), measure) for setting in distinct(SMALL, MIDDLE, LARGE)]
