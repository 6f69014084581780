"""SIGTERM while a control daemon can't answer."""

import os
import signal

from scenario import MIDDLE, Row, Scenario, Serving, milliseconds

STOPPED = Row("stop", "stop_stopped", "SIGTERM to exit, one control daemon stopped (SIGSTOP)", "ms", "< 100")


def measure(setting, variant, tools):
    with Serving(setting, variant, tools) as service:
        os.kill(service.host.control_daemons()[0], signal.SIGSTOP)
        yield "stop_stopped", [milliseconds(service.stop())]


SCENARIOS = [Scenario(MIDDLE._replace(topology="per_gpu"), [STOPPED], measure)]
