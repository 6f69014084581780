"""From SIGTERM to the end of the program, with everything that it has started."""

import os
import signal

from scenario import ALL, MIDDLE, Row, Scenario, Serving, milliseconds

STOP = Row("stop", "stop", "SIGTERM to exit", "ms")
STOPPED = Row("stop", "stop_stopped", "SIGTERM to exit, one control daemon stopped (SIGSTOP)", "ms", "< 100")


def stop(setting, variant, tools):
    with Serving(setting, variant, tools) as service:
        return {"stop": [milliseconds(service.stop())]}


def stop_stopped(setting, variant, tools):
    with Serving(setting, variant, tools) as service:
        os.kill(service.host.control_daemons()[0], signal.SIGSTOP)
        return {"stop_stopped": [milliseconds(service.stop())]}


def target(setting):
    return "<= 40" if setting.gpus == 8 and setting.topology == "per_gpu" else None


SCENARIOS = [Scenario(setting, [STOP._replace(target=target(setting))], stop) for setting in ALL] + [
    Scenario(MIDDLE._replace(topology="per_gpu"), [STOPPED], stop_stopped)
]
