"""SIGHUP: with nothing changed, and with another number of slices of one GPU."""

import os
import signal
import time

import process
from host import is_ready
from scenario import LARGE, MIDDLE, Row, Scenario, Serving, milliseconds

PER_GPU = MIDDLE._replace(topology="per_gpu")


def rows(kind, setting):
    aimed = kind == "one" and setting.gpus == 8
    name = "reload, one slice of one GPU gone or come" if kind == "one" else "reload, nothing changed"
    return [
        Row("reload", f"{kind}_settled", f"{name}: SIGHUP until READY=1 and the last signal", "ms", "<= 15" if aimed else None),
        Row("reload", f"{kind}_signals", f"{name}: signals on D-Bus", "signals"),
        Row("reload", f"{kind}_flaps", f"{name}: slices unhealthy in between", "slices", "0" if aimed else None),
        Row("reload", f"{kind}_cpu", f"{name}: the service's CPU time", "ms"),
    ]


def measure(setting, variant, tools):
    per_gpu = setting.slices // setting.gpus
    with Serving(setting, variant, tools) as service:
        service.listen()
        looks = {"none": [reload(service)], "one": []}
        for slices in (per_gpu - 1, per_gpu):
            service.host.cut_first_gpu(slices)
            looks["one"].append(reload(service))
        service.stop()
    figures = {}
    for kind, found in looks.items():
        for number, key in enumerate(["settled", "signals", "flaps", "cpu"]):
            figures[f"{kind}_{key}"] = [look[number] for look in found]
    return figures


def reload(service):
    mark = service.rest()
    cpu = process.cpu_ns(service.pid)
    start = time.monotonic_ns()
    os.kill(service.pid, signal.SIGHUP)
    last = service.events.first(mark, is_ready).time
    service.rest()
    cpu = process.cpu_ns(service.pid) - cpu
    signals = [event for event in service.events.all[mark:] if event.source == "bus"]
    last = max([last, *(event.time for event in signals)])
    unhealthy = {event.text.split()[0] for event in signals if event.text.endswith("Healthy=0")}
    flaps = {path for path in unhealthy if "/devices/" in path}
    return milliseconds(last - start), len(signals), len(flaps), cpu / 1e6


SCENARIOS = [
    Scenario(setting, [*rows("none", setting), *rows("one", setting)], measure) for setting in (MIDDLE, PER_GPU, LARGE)
]
