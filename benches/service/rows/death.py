"""The sudden death of a control daemon, or of a server: when it is seen, said, and made good."""

import os
import signal
import time

import bare
from host import Host, Service
from process import Unable
from scenario import ALL, MIDDLE, SMALL, Row, Scenario, milliseconds


def rows(victim, setting):
    """The rows for a victim, a control daemon or a server."""
    name = "a control daemon" if victim == "control" else "a server"

    def row(key, what, target=None):
        return Row("death", f"{victim}_{key}", f"death of {name} {what}", "ms", target)

    if not setting.prewarm:
        return [row("again_no_server", "to serving again, no server waited for", "< 25")]
    reference = "the start of a bare control daemon with its server" if victim == "control" else "a server's start"
    return [
        row("noticed", "to the first line in the log", "< 1" if victim == "control" else None),
        row("published", "to the first signal on D-Bus"),
        row("again", "to serving again"),
        row("beyond", f"to serving again, beyond {reference}", "<= 30"),
    ]


def measure(victim):
    def one(setting, variant, tools):
        with Host(setting, tools) as host:
            one_gpu = host.setting._replace(gpus=1 if setting.topology == "per_gpu" else setting.gpus)
            control, server = start_bare(host, one_gpu) if setting.prewarm else (0, 0)
            with Service(host, variant) as service:
                service.rest()
                service.listen()
                noticed, published, again = die(service, victim)
                service.stop()
        if not setting.prewarm:
            return {f"{victim}_again_no_server": [again]}
        beyond = again - (control if victim == "control" else server)
        figures = {"noticed": noticed, "published": published, "again": again, "beyond": beyond}
        return {f"{victim}_{key}": [value] for key, value in figures.items()}

    return one


def start_bare(host, setting):
    return [milliseconds(time) for time in bare.start(host, setting)]


def die(service, victim):
    """Kills one, and returns the milliseconds until that is in the log, on D-Bus, and until all is served again."""
    pids = service.host.control_daemons() if victim == "control" else service.host.servers()
    if not pids:
        raise Unable("nothing runs that could be killed")
    mark = service.rest()
    start = time.monotonic_ns()
    os.kill(pids[0], signal.SIGKILL)
    events = service.events
    noticed = events.first(mark, lambda event: event.source == "log")
    published = events.first(mark, lambda event: event.source == "bus")
    lost = events.first(mark, lambda event: " State=" in event.text and not event.text.endswith("=ready"))
    later = events.all.index(lost)
    again = events.first(later, lambda event: event.text.endswith(" State=ready"))
    return [milliseconds(event.time - start) for event in (noticed, published, again)]


SCENARIOS = [
    Scenario(setting, rows(victim, setting), measure(victim)) for victim in ("control", "server") for setting in ALL
] + [
    Scenario(setting, rows("control", setting), measure("control"))
    for setting in (SMALL._replace(prewarm=False), MIDDLE._replace(topology="per_gpu", prewarm=False))
]
