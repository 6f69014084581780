"""A service that nobody asks anything: how often it wakes up, and what it holds. All variants idle at the same time."""

import contextlib
import os
import time

import process
from process import Unable
from scenario import MIDDLE, SMALL, Row, Serving

SETTINGS = [SMALL, MIDDLE, MIDDLE._replace(topology="per_gpu")]


def rows(setting):
    target = "<= 20" if setting.gpus == 1 else "<= 25"
    return [
        Row("idle", "wakeups", "idle minute: wake-ups of all threads", "wake-ups", target),
        Row("idle", "idle_cpu", "idle minute: CPU time", "ms"),
        Row("idle", "idle_front_ends", "idle minute: the CPU time of NVIDIA's front ends", "ms"),
        Row("idle", "idle_memory", "idle: resident memory", "MiB"),
        Row("idle", "idle_threads", "idle: threads", "threads"),
        Row("idle", "idle_files", "idle: open files", "files"),
    ]


def measure(variants, tools, seconds, settle):
    """The figures by setting and variant. Their services start one after the other, rest for `settle` seconds, and then
    idle for `seconds`."""
    figures, errors = {}, []
    with contextlib.ExitStack() as stack:
        services = {}
        for setting in SETTINGS:
            for variant in variants:
                try:
                    services[setting, variant.name] = stack.enter_context(Serving(setting, variant, tools))
                except Unable as error:
                    errors.append((setting, variant, error))
        time.sleep(settle)
        watches = {place: Watch(service.pid) for place, service in services.items()}
        cpu = {place: process.cpu_ns(service.pid) for place, service in services.items()}
        started = {}
        for place, service in services.items():
            started[place] = process.Started(service.pid)
            stack.callback(started[place].end)
        start = time.monotonic()
        # A thread may end: then its last value counts.
        for second in range(seconds):
            time.sleep(max(0, start + second + 1 - time.monotonic()))
            for watch in watches.values():
                watch.look()
        minutes = (time.monotonic() - start) / 60
        for place, service in services.items():
            found = {
                "wakeups": [watches[place].count() / minutes],
                "idle_cpu": [(process.cpu_ns(service.pid) - cpu[place]) / 1e6 / minutes],
                "idle_front_ends": [started[place].cpu_ns() / 1e6 / minutes],
                "idle_memory": [process.status_kib(service.pid, "VmRSS") / 1024],
                "idle_threads": [len(process.threads(service.pid))],
                "idle_files": [len(os.listdir(f"/proc/{service.pid}/fd"))],
            }
            try:
                service.check()
                figures[place] = found
            except Unable as error:
                errors.append((place[0], service.variant, error))
    return figures, errors


class Watch:
    """Counts the wake-ups of a process. A new thread counts from 0."""

    def __init__(self, pid):
        self.pid = pid
        self.begin = process.sleeps(pid)
        self.last = dict(self.begin)

    def look(self):
        self.last.update(process.sleeps(self.pid))

    def count(self):
        return sum(self.last.values()) - sum(self.begin.values())
