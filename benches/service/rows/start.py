"""From the start of the program to READY=1, beside bare control daemons; the memory that it has then; and SIGTERM."""

import bare
import memory
import process
from host import Host, Service
from scenario import ALL, LARGE, MIDDLE, PER_SLICE, SMALL, Row, Scenario, distinct, milliseconds

BARE = Row("start", "bare", "start of bare control daemons, each with a server", "ms")
READY = Row("start", "ready", "exec to READY=1", "ms")
BEYOND = Row("start", "beyond", "exec to READY=1, beyond bare control daemons", "ms")
OWN_CPU = Row("start", "ready_cpu", "exec to READY=1: the service's CPU time", "ms")
FRONT_ENDS_CPU = Row("start", "ready_front_ends", "exec to READY=1: the CPU time of NVIDIA's front ends", "ms")
READY_NO_SERVER = Row("start", "ready_no_server", "exec to READY=1, no server waited for", "ms")
STOP = Row("start", "stop", "SIGTERM to exit", "ms")


def measure(setting, variant, tools):
    with Host(setting, tools) as host:
        bare_start = milliseconds(bare.start(host, setting)[0])
        yield "bare", [bare_start]
        with Service(host, variant) as service:
            # Another daemon may be ready without a server. A row that waits for a server has no value then.
            if host.servers():
                yield "ready", [milliseconds(service.ready)]
                yield "beyond", [milliseconds(service.ready) - bare_start]
                yield "ready_cpu", [milliseconds(process.cpu_ns(service.pid))]
                yield "ready_front_ends", [milliseconds(process.children_cpu_ns(service.pid))]
            service.rest()
            for key, kib in memory.resident(service.pid).items():
                yield key, [kib / 1024]
            yield "stop", [milliseconds(service.stop())]


def measure_no_server(setting, variant, tools):
    with Host(setting, tools) as host, Service(host, variant) as service:
        yield "ready_no_server", [milliseconds(service.ready)]
        service.stop()


def rows(setting):
    beyond = BEYOND._replace(target="<= 30" if setting.gpus == 8 else None)
    stop = STOP._replace(target="<= 40" if (setting.gpus, setting.topology) == (8, "per_gpu") else None)
    return [BARE, READY, beyond, OWN_CPU, FRONT_ENDS_CPU, *memory.rows(setting), stop]


SCENARIOS = [Scenario(setting, rows(setting), measure) for setting in [*ALL, *PER_SLICE]] + [
    Scenario(setting._replace(prewarm=False), [READY_NO_SERVER], measure_no_server)
    for setting in distinct(SMALL, MIDDLE, MIDDLE._replace(topology="per_gpu"), LARGE)
]
