"""The sudden death of a control daemon, or of a server: when it is seen, said, and made good."""

import os
import signal
import time

import bare
from host import Host, Service, is_served
from process import Unable
from scenario import ALL, MIDDLE, SMALL, Row, Scenario, milliseconds

NAMES = {"control": "a control daemon", "server": "a server"}
REFERENCES = {"control": "the start of a bare control daemon with its server", "server": "a server's start"}


def row(victim, key, what, target=None):
    return Row("death", f"{victim}_{key}", f"death of {NAMES[victim]} to {what}", "ms", target)


def rows(victim):
    return [
        row(victim, "noticed", "the first line in the log", "< 1" if victim == "control" else None),
        row(victim, "published", "the first signal on D-Bus"),
        row(victim, "again", "serving again"),
        row(victim, "beyond", f"serving again, beyond {REFERENCES[victim]}", "<= 30"),
    ]


NO_SERVER = row("control", "again_no_server", "serving again, no server waited for", "< 25")


def measure(victim):
    def one(setting, variant, tools):
        with Host(setting, tools) as host:
            replaced = setting._replace(gpus=1) if setting.topology == "per_gpu" else setting
            control, server = (milliseconds(time) for time in bare.start(host, replaced)[:2])
            with Service(host, variant, listen=True) as service:
                noticed, published, again = die(service, victim)
                yield f"{victim}_noticed", [noticed]
                yield f"{victim}_published", [published]
                yield f"{victim}_again", [again]
                yield f"{victim}_beyond", [again - (control if victim == "control" else server)]
                service.stop()

    return one


def measure_no_server(setting, variant, tools):
    with Host(setting, tools) as host, Service(host, variant, listen=True) as service:
        yield "control_again_no_server", [die(service, "control")[2]]
        service.stop()


def die(service, victim):
    """Kills one, and returns the milliseconds until that is in the log, on D-Bus, and until all is served again."""
    mark = service.rest()
    pids = service.host.control_daemons() if victim == "control" else service.host.servers()
    if not pids:
        raise Unable("nothing runs that could be killed")
    start = time.monotonic_ns()
    os.kill(pids[0], signal.SIGKILL)
    events = service.events
    noticed = events.first(mark, lambda event: event.source == "log")
    published = events.first(mark, lambda event: event.source == "bus")
    lost = events.first(mark, lambda event: " State=" in event.text and not is_served(event))
    again = events.first(events.all.index(lost), is_served)
    return [milliseconds(event.time - start) for event in (noticed, published, again)]


SCENARIOS = [Scenario(setting, rows(victim), measure(victim)) for victim in NAMES for setting in ALL] + [
    Scenario(setting._replace(prewarm=False), [NO_SERVER], measure_no_server)
    for setting in (SMALL, MIDDLE._replace(topology="per_gpu"))
]
