"""From the start of the program to READY=1, beside bare control daemons; and the memory that it has then."""

import bare
import memory
from host import Host, Service
from scenario import ALL, MIDDLE, SMALL, Row, Scenario, milliseconds

START = [
    Row("start", "bare", "start of bare control daemons, each with a server", "ms"),
    Row("start", "ready", "exec to READY=1", "ms"),
]
BEYOND = Row("start", "beyond", "exec to READY=1, beyond bare control daemons", "ms")
NO_PREWARM = Row("start", "ready_no_server", "exec to READY=1, no server waited for", "ms")


def measure(setting, variant, tools):
    figures = {}
    with Host(setting, tools) as host:
        if setting.prewarm:
            figures["bare"] = [milliseconds(bare.start(host, setting)[0])]
        with Service(host, variant) as service:
            ready = milliseconds(service.ready)
            service.rest()
            for key, kib in memory.resident(service.pid, variant.daemon).items():
                figures[key] = [kib / 1024]
            service.stop()
    if setting.prewarm:
        figures["ready"] = [ready]
        figures["beyond"] = [ready - figures["bare"][0]]
    else:
        figures["ready_no_server"] = [ready]
    return figures


def rows(setting):
    if not setting.prewarm:
        return [NO_PREWARM]
    target = "<= 30" if setting.gpus == 8 else None
    return [*START, BEYOND._replace(target=target), *memory.rows(setting)]


SCENARIOS = [
    Scenario(setting, rows(setting), measure)
    for setting in [*ALL, SMALL._replace(prewarm=False), MIDDLE._replace(topology="per_gpu", prewarm=False)]
]
