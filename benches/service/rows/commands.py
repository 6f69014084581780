"""Commands of yunion-mpsctl, from the start of the program to its end."""

import process
from process import Lacking, Unable
from scenario import LARGE, MIDDLE, SMALL, Row, Scenario, Serving, distinct, milliseconds

COMMANDS = {
    "is-ready": [],
    "list": [],
    "list --json": [],
    "status": [],
    "status --json": [],
    "clients": [],
    "metrics": [],
    "env": ["SLICE"],
    "run": ["SLICE", "--", "true"],
    "check": ["--sysroot", "SYSROOT"],
    "doctor": ["--sysroot", "SYSROOT"],
    "probe": ["SLICE"],
}


def key(command):
    return "ctl_" + command.replace(" --", "_").replace("-", "_")


def measure(setting, variant, tools):
    if not variant.ctl:
        raise Lacking("there is no yunion-mpsctl")
    with Serving(setting, variant, tools) as service:
        words = {"SLICE": f"{setting.base_addresses()[-1]}-0", "SYSROOT": service.host.root / "sysroot"}
        for command, more in COMMANDS.items():
            line = [variant.ctl, *command.split(), *(words.get(word, word) for word in more)]
            answer = service.host.directory / "answer"
            with open(answer, "w") as file:
                time, status = process.run(line, service.host.environment, file.fileno(), file.fileno())
            # doctor has findings on a host without systemd.
            if status != 0 and not (command == "doctor" and status == 1):
                raise Unable(f"yunion-mpsctl {command} ended with exit status {status}: {answer.read_text()}")
            yield key(command), [milliseconds(time)]
        service.stop()


ROWS = [Row("commands", key(command), f"yunion-mpsctl {command}", "ms") for command in COMMANDS]
SCENARIOS = [Scenario(setting, ROWS, measure) for setting in distinct(SMALL, MIDDLE, LARGE)]
