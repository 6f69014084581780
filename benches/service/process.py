"""Processes: their start, their end and their figures in /proc, without a pause in any measured time."""

import os
import pathlib
import re
import select
import shutil
import signal
import time


class Unable(Exception):
    """A figure that could not be measured, with the reason."""


class Lacking(Unable):
    """A figure that this program can't have, since it has no such interface. No failure."""


class NotReady(Unable):
    """A service that never says that it is ready."""


def spawn(command, environment, stdin=None, stdout=None, stderr=None):
    """Starts a program with these file descriptors. One that is not given is /dev/null, and stderr is ours."""
    null = os.open("/dev/null", os.O_RDWR)
    actions = [
        (os.POSIX_SPAWN_DUP2, null if stdin is None else stdin, 0),
        (os.POSIX_SPAWN_DUP2, null if stdout is None else stdout, 1),
    ]
    if stderr is not None:
        actions.append((os.POSIX_SPAWN_DUP2, stderr, 2))
    try:
        program = shutil.which(command[0], path=environment["PATH"])
        if program is None:
            raise Unable(f"there is no program {command[0]}")
        # Python ignores SIGPIPE, and a child would inherit that.
        pid = os.posix_spawn(program, command, environment, file_actions=actions, setsigdef=[signal.SIGPIPE])
    finally:
        os.close(null)
    return Process(pid)


class Process:
    """A child."""

    def __init__(self, pid):
        self.pid = pid
        self.status = None
        self.pidfd = os.pidfd_open(pid)

    def wait(self, seconds=60):
        """Waits for the end. Returns its time (time.monotonic_ns) and keeps the exit status in `status`."""
        if self.status is None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            if not poll.poll(seconds * 1000):
                raise Unable(f"process {self.pid} did not end within {seconds} s")
            ended = time.monotonic_ns()
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self.pidfd)
            return ended
        return time.monotonic_ns()

    def end(self, number=signal.SIGKILL):
        """Ends the process, unless it has ended."""
        if self.status is None:
            os.kill(self.pid, number)
            self.wait()


def run(command, environment, stdout=None, stderr=None, stdin=None):
    """Runs a program to its end. Returns the time that took in nanoseconds, and the exit status."""
    start = time.monotonic_ns()
    process = spawn(command, environment, stdin, stdout, stderr)
    return process.wait() - start, process.status


def cpu_ns(pid):
    """The CPU time of a process with all its threads, also the ended ones. The clock's number is made as
    clock_getcpuclockid(3) makes it."""
    return time.clock_gettime_ns((~pid << 3) | 2)


def children_cpu_ns(pid):
    """The CPU time of the children of a process that have ended, in whole ticks of the kernel (10 ms)."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) * 10**9 // os.sysconf("SC_CLK_TCK")


def own_cgroup():
    """The directory of this program's control group in a cgroup2 file system; None where there is none."""
    name = re.search(r"^0::(/.*)$", pathlib.Path("/proc/self/cgroup").read_text(), re.M)
    mounts = (line.split() for line in pathlib.Path("/proc/self/mounts").read_text().splitlines())
    places = [words[1] for words in mounts if words[2] == "cgroup2"]
    return pathlib.Path(places[0] + name[1]) if places and name else None


class Started:
    """The CPU time of what a process starts, to the microsecond: a control group counts it, from now on. Where no control
    group can be made, the kernel's figure for children that have ended does, in whole ticks (10 ms)."""

    def __init__(self, pid):
        self.pid, self.group = pid, None
        place = own_cgroup()
        if place:
            group = place / f"bench-{pid}"
            try:
                group.mkdir()
                self.group = group
                (group / "cgroup.procs").write_text(str(pid))
            except OSError:
                self.end()
        self.before, self.children_before = cpu_ns(pid), children_cpu_ns(pid)

    def cpu_ns(self):
        if not self.group:
            return children_cpu_ns(self.pid) - self.children_before
        all_of_it = int(re.search(r"^usage_usec (\d+)", (self.group / "cpu.stat").read_text(), re.M)[1]) * 1000
        return all_of_it - (cpu_ns(self.pid) - self.before)

    def end(self):
        """What still runs goes back."""
        if self.group:
            for pid in (self.group / "cgroup.procs").read_text().split():
                (self.group.parent / "cgroup.procs").write_text(pid)
            self.group.rmdir()
            self.group = None


def threads(pid):
    return [int(name) for name in os.listdir(f"/proc/{pid}/task")]


def sleeps(pid):
    """How often each thread has begun to sleep, which is how often it woke up. A switch that was forced on a thread,
    because other programs want the CPU too, is none."""
    counts = {}
    for thread in threads(pid):
        try:
            status = pathlib.Path(f"/proc/{pid}/task/{thread}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        counts[thread] = int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.M)[1])
    return counts


def is_asleep(pid):
    """False if a thread runs, or waits for a CPU or for a disk."""
    try:
        states = [pathlib.Path(f"/proc/{pid}/task/{thread}/status").read_text() for thread in threads(pid)]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return all("\nState:\tS" in state for state in states)


def status_kib(pid, key):
    """A value in KiB of /proc/PID/status, such as VmRSS."""
    return int(re.search(rf"^{key}:\s*(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text(), re.M)[1])


def marked(mark):
    """The PIDs and command lines of all processes that have this text (bytes) in their environment."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            if mark in pathlib.Path(f"/proc/{name}/environ").read_bytes():
                words = pathlib.Path(f"/proc/{name}/cmdline").read_bytes().decode().split("\0")
                found.append((int(name), words))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return sorted(found)
