"""The resident memory of the service, by the kind of its mappings."""

import os
import pathlib
import re

import process
from scenario import Row

KINDS = {
    "heap": "heap and other anonymous memory",
    "program": "the program",
    "nvml": "libnvidia-ml (simulated)",
    "stacks": "stacks",
    "rest": "libc, and the rest",
}


def rows(setting):
    target = "<= 8" if setting.slices == 768 else None
    named = [Row("start", f"memory_{kind}", f"of it: {what}", "MiB") for kind, what in KINDS.items()]
    return [Row("start", "memory", "resident memory", "MiB", target), *named]


def resident(pid):
    """The resident memory in KiB: the sum, and the sum of each kind."""
    sums = dict.fromkeys((f"memory_{kind}" for kind in KINDS), 0)
    stacks = stack_pointers(pid)
    program = os.readlink(f"/proc/{pid}/exe")
    for start, end, name, kib in mappings(pid):
        in_stack = any(start <= pointer < end for pointer in stacks)
        sums[f"memory_{kind(name, program, in_stack)}"] += kib
    return {"memory": process.status_kib(pid, "VmRSS"), **sums}


def kind(name, program, in_stack):
    if in_stack or name == "[stack]":
        return "stacks"
    if name in ("", "[heap]") or name.startswith("[anon"):
        return "heap"
    if name == program:
        return "program"
    if "nvidia_ml" in name or "nvidia-ml" in name:
        return "nvml"
    return "rest"


def mappings(pid):
    """Start, end, name and resident KiB of each mapping."""
    place = None
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        header = re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)$", line)
        if header:
            place = int(header[1], 16), int(header[2], 16), header[3]
        elif line.startswith("Rss:"):
            yield *place, int(line.split()[1])


def stack_pointers(pid):
    """The stack pointer of each thread that waits in the kernel; the kernel does not name the stacks of threads."""
    pointers = []
    for thread in process.threads(pid):
        try:
            words = pathlib.Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
        except OSError:
            continue
        if len(words) > 2:
            pointers.append(int(words[-2], 16))
    return pointers
