"""The machine of the cluster: a booted systemd over this host's files, as the tests of tests/e2e have it."""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import programs

BOOT = programs.SOURCES / "tests" / "e2e" / "boot.sh"
CONTROL_GROUPS = pathlib.Path("/sys/fs/cgroup")
# The hierarchies in which boot.sh makes a group.
OF_BOOT = ["", "systemd", "unified", "freezer"]
UNIFIED = (CONTROL_GROUPS / "cgroup.controllers").exists()
SECONDS = 120
PAUSE = 0.1
# Moves the process into the groups before "--", then executes the words behind it.
JOIN = 'while [ "$1" != -- ]; do echo $$ >"$1/cgroup.procs"; shift; done; shift; exec "$@"'


class Machine:
    """A machine that runs until the end of the block: with Machine(stage, kubernetes) as machine."""

    def __init__(self, stage, kubernetes):
        self.folder = tempfile.TemporaryDirectory(prefix="mps-cluster-")
        self.name = f"mps-cluster-{os.getpid()}"
        self.kubernetes = kubernetes
        path = pathlib.Path(self.folder.name)
        (path / "mnt").mkdir()
        (path / "stage").symlink_to(stage)
        self.console = path / "console"
        self.script, self.leader = None, None

    def __enter__(self):
        with open(self.console, "wb") as console:
            unshare = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--propagation", "private"]
            boot = [BOOT, self.folder.name, self.name, "1" if UNIFIED else "0"]
            self.script = subprocess.Popen(
                ["sh", "-euc", JOIN, "sh", *self.own_groups(), "--", *unshare, *boot],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env={**os.environ, "E2E_PROGRAMS": f"{self.kubernetes}:/opt/kubernetes"},
            )
        try:
            self.wait_until_up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.leader is not None:
            self.command("systemctl", "poweroff")
        try:
            self.script.wait(SECONDS if self.leader is not None else 0)
        except subprocess.TimeoutExpired:
            print("the machine did not power off and is killed", file=sys.stderr)
            self.script.kill()
            self.script.wait()
        for hierarchy in hierarchies():
            remove_groups(hierarchy / self.name)
        self.folder.cleanup()

    def own_groups(self):
        """Makes a group in each hierarchy with controllers that boot.sh leaves out, so that no pod is in a group of this host."""
        groups = []
        for hierarchy in hierarchies():
            if hierarchy.relative_to(CONTROL_GROUPS).name in OF_BOOT:
                continue
            group = hierarchy / self.name
            group.mkdir()
            for file in ("cpuset.cpus", "cpuset.mems"):
                if (group / file).exists():
                    # No process gets into a group without processors.
                    (group / file).write_text((hierarchy / file).read_text())
            groups.append(group)
        return groups

    def wait_until_up(self):
        """Waits for another systemd than before, and until it has booted."""
        before, deadline = self.leader, time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if self.script.poll() is not None:
                break
            found = child(child(self.script.pid, "systemd-nspawn"), "systemd")
            if found is not None and found != before:
                self.leader = found
                # It complains as long as its bus is missing.
                state = self.command("systemctl", "is-system-running", "--wait", capture_output=True)
                # A unit of this host that fails in a container does not matter.
                if state.stdout.strip() in ("running", "degraded"):
                    return
            time.sleep(PAUSE)
        sys.exit(f"the machine does not boot:\n{self.console.read_text(errors='replace')}")

    def reboot(self):
        """Restarts the machine, and waits until it is up again."""
        self.command("systemctl", "reboot")
        self.wait_until_up()

    def command(self, *words, **settings):
        """Runs a command inside, as root with a plain environment."""
        enter = ["nsenter", f"--target={self.leader}", "--all", "--wd", "--", "/usr/bin/env", "-i"]
        path = "PATH=/opt/kubernetes:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        plain = [path, "LC_ALL=C.UTF-8", "PYTHONDONTWRITEBYTECODE=1"]
        words = [*enter, *plain, *words]
        return subprocess.run(words, stdin=subprocess.DEVNULL, text=True, check=False, **settings)


def hierarchies():
    """The hierarchies of control groups of this host. A link is another name of one."""
    places = [CONTROL_GROUPS, *sorted(CONTROL_GROUPS.iterdir())]
    if UNIFIED:
        places = [CONTROL_GROUPS]
    return [place for place in places if not place.is_symlink() and (place / "cgroup.procs").exists()]


def child(of, name):
    """The first child of a process with this name, None for a child of nobody."""
    if of is None:
        return None
    try:
        children = pathlib.Path(f"/proc/{of}/task/{of}/children").read_text().split()
        named = [int(pid) for pid in children if pathlib.Path(f"/proc/{pid}/comm").read_text().strip() == name]
    except OSError:
        # One of them has just ended.
        return None
    return named[0] if named else None


def remove_groups(group):
    """Removes a control group and those below it. The last process of a machine may still be on its way out."""
    deadline = time.monotonic() + SECONDS
    while group.exists():
        try:
            for place, _, _ in os.walk(group, topdown=False):
                os.rmdir(place)
        except OSError as error:
            if time.monotonic() > deadline:
                print(f"{group} is left: {error}", file=sys.stderr)
                return
            time.sleep(PAUSE)
