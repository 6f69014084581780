"""The form of what is measured: rows of the table, and scenarios, each of which gives the samples of some rows."""

import os
from typing import Callable, NamedTuple, Optional

from host import REAL_GPUS, Host, Service, Setting


class Row(NamedTuple):
    group: str
    key: str
    what: str
    unit: str
    target: Optional[str] = None


class Scenario(NamedTuple):
    """`measure(setting, variant, tools)` yields the keys of `rows`, each with a list of samples."""

    setting: Setting
    rows: list
    measure: Callable


# QUICK=1 shows that everything can be measured, on hosts that a busy machine can serve too.
QUICK = os.environ.get("QUICK", "") not in ("", "0")

SMALL = Setting(1, 4)
MIDDLE, LARGE = (Setting(2, 16), Setting(4, 64)) if QUICK else (Setting(8, 64), Setting(16, 768))
if REAL_GPUS:
    MIDDLE = LARGE = Setting(len(REAL_GPUS), 4 * len(REAL_GPUS))


def distinct(*settings):
    """Each once: on a host with GPUs, some are the same."""
    return list(dict.fromkeys(settings))


ALL = distinct(
    SMALL,
    MIDDLE,
    MIDDLE._replace(topology="per_gpu"),
    LARGE,
    LARGE._replace(topology="per_gpu"),
)

# A control daemon for each slice. This many on one host are only for optimised programs.
PER_SLICE = [SMALL._replace(topology="per_slice")]
if not REAL_GPUS and not QUICK:
    PER_SLICE.append(Setting(16, 160, "per_slice"))


def milliseconds(nanoseconds):
    return nanoseconds / 1e6


class Serving:
    """A service at rest on a new host, for one measurement, and its end."""

    def __init__(self, setting, variant, tools, listen=False):
        self.host = Host(setting, tools)
        self.variant, self.listen = variant, listen

    def __enter__(self):
        self.host.__enter__()
        try:
            self.service = Service(self.host, self.variant, self.listen)
            self.service.rest()
        except BaseException:
            self.__exit__()
            raise
        return self.service

    def __exit__(self, *_):
        if hasattr(self, "service"):
            self.service.__exit__()
        self.host.__exit__()
