"""SIGHUP: with nothing changed, and with another number of slices of one GPU."""

import os
import signal
import time

import process
from host import is_ready
from scenario import LARGE, MIDDLE, Row, Scenario, Serving, distinct, milliseconds

PER_GPU = MIDDLE._replace(topology="per_gpu")


def rows(kind, setting):
    aimed = kind == "one" and setting.gpus == 8
    name = "reload, one GPU with one slice less or more" if kind == "one" else "reload, nothing changed"
    settled = f"{name}: SIGHUP to READY=1 and the last signal"
    return [
        Row("reload", f"{kind}_settled", settled, "ms", "<= 15" if aimed else None),
        Row("reload", f"{kind}_signals", f"{name}: signals on D-Bus", "signals"),
        Row("reload", f"{kind}_flaps", f"{name}: slices of other GPUs unhealthy in between", "slices", "0" if aimed else None),
        Row("reload", f"{kind}_cpu", f"{name}: the service's CPU time", "ms"),
    ]


def measure(setting, variant, tools):
    with Serving(setting, variant, tools, listen=True) as service:
        yield from reload(service, "none")
        for fewer in (1, 0):
            service.host.cut_first_gpu(setting.slices // setting.gpus - fewer)
            yield from reload(service, "one")
        service.stop()


def reload(service, kind):
    mark = service.rest()
    cpu_before = process.cpu_ns(service.pid)
    start = time.monotonic_ns()
    os.kill(service.pid, signal.SIGHUP)
    last = service.events.first(mark, is_ready).time
    service.rest()
    cpu = process.cpu_ns(service.pid) - cpu_before
    signals = [event for event in service.events.all[mark:] if event.source == "bus"]
    last = max([last, *(event.time for event in signals)])
    unhealthy = {event.text.split()[0] for event in signals if event.text.endswith("Healthy=0")}
    changed = "/devices/_" + service.host.setting.base_addresses()[0].translate({ord(":"): "_", ord("."): "_"}) + "_"
    flaps = {path for path in unhealthy if "/devices/" in path and changed not in path}
    yield f"{kind}_settled", [milliseconds(last - start)]
    yield f"{kind}_signals", [len(signals)]
    yield f"{kind}_flaps", [len(flaps)]
    yield f"{kind}_cpu", [milliseconds(cpu)]


SCENARIOS = [
    Scenario(setting, [*rows("none", setting), *rows("one", setting)], measure) for setting in distinct(MIDDLE, PER_GPU, LARGE)
]
