"""A simulated host with a bus of its own, and the service on it. With REAL=1 this host and its GPUs take its place."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from typing import NamedTuple

import process
from events import END, Events
from process import Lacking, NotReady, Unable

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]

# The runtime directory of a real host is in memory too.
MEMORY = pathlib.Path("/dev/shm")


def real_gpus():
    """The UUIDs of this host's GPUs, if they are to be used."""
    if not os.environ.get("REAL"):
        return []
    query = ["nvidia-smi", "--query-gpu=gpu_uuid", "--format=csv,noheader"]
    return subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()


REAL_GPUS = real_gpus()


class Setting(NamedTuple):
    """The hardware and the configuration of a host."""

    gpus: int
    slices: int
    topology: str = "shared"
    prewarm: bool = True

    def host(self):
        """The column of the table."""
        gpus = f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}, {self.slices} slices"
        return gpus + (f", {self.topology}" if self.topology != "shared" else "")

    def planned(self):
        """How many control daemons are to serve these GPUs."""
        return {"shared": 1, "per_gpu": self.gpus, "per_slice": self.slices}[self.topology]

    def uuids(self):
        return REAL_GPUS[: self.gpus] or [f"GPU-{number:08x}-0000-4000-8000-000000000000" for number in range(self.gpus)]

    def base_addresses(self):
        return [f"{0x10 + number:02x}:00.0" for number in range(self.gpus)]

    def board(self):
        """The board for the simulator: H200s only. JSON is YAML."""
        cards = []
        for uuid, address in zip(self.uuids(), self.base_addresses()):
            gpu = {
                "uuid": uuid,
                "name": "NVIDIA H200",
                "memory_total_mib": 143771,
                "memory_reserved_kib": 629824,
                "compute_capability": "9.0",
                "sms": 132,
                "mig": False,
            }
            cards.append(
                {
                    "pci": f"0000:{address}",
                    "id": "10de:2335",
                    "vendor_name": "NVIDIA Corporation",
                    "device_name": "GH100 [H200 SXM 141GB]",
                    "numa_node": 0,
                    "link_gen": 5,
                    "link_width": 16,
                    "entry": {"type": "NVIDIA_MPS", "virtual_number": self.slices // self.gpus},
                    "gpu": gpu,
                }
            )
        return json.dumps({"driver": "580.159.04", "mps": 580, "cards": cards})


class Host:
    """Nothing runs on it but its bus. Everything that runs on it later ends with it."""

    def __init__(self, setting, tools):
        self.setting, self.tools = setting, tools
        # A short path: the path of a socket below it must fit in 107 bytes.
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="mps", dir=MEMORY if MEMORY.is_dir() else "/tmp"))
        self.root = self.directory / "h"
        self.bus = None

    def __enter__(self):
        try:
            self.make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def make(self):
        self.directory.chmod(0o755)
        self.configure_gpus() if REAL_GPUS else self.simulate()
        with open(self.configuration, "a") as configuration:
            configuration.write(f"cuda_mps_topology: {self.setting.topology}\n")
            configuration.write(f"cuda_mps_prewarm: {str(self.setting.prewarm).lower()}\n")
        libraries = [f"{self.root}/lib", *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        self.environment = {
            "PATH": f"{self.root}/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": ":".join(libraries),
            # On a host with GPUs it only marks the processes of this measurement.
            "YUNION_MPS_SIM": f"{self.root}",
            "RUNTIME_DIRECTORY": f"{self.root}/run",
            # The same value as in the unit.
            "MALLOC_ARENA_MAX": "1",
            "DBUS_SYSTEM_BUS_ADDRESS": f"unix:path={self.directory}/socket",
            "LC_ALL": "C.UTF-8",
        }
        subprocess.run([REPOSITORY / "scripts/bus-conf.sh", self.directory], check=True)
        reader, writer = os.pipe()
        bus = ["dbus-daemon", f"--config-file={self.directory}/bus.conf", "--nofork", "--nopidfile", "--print-address"]
        with open(self.directory / "bus.log", "w") as complaints:
            self.bus = process.spawn(bus, self.environment, stdout=writer, stderr=complaints.fileno())
        os.close(writer)
        # It prints its address once it listens.
        with open(reader) as answer:
            if not answer.readline():
                raise Unable("dbus-daemon did not start")

    def simulate(self):
        board = self.directory / "board.yaml"
        board.write_text(self.setting.board())
        subprocess.run([self.tools.simulator, "create", board, self.root], check=True, stdout=subprocess.DEVNULL)
        self.configuration = self.root / "sysroot/etc/yunion/host.conf"
        self.arguments = ["--sysroot", self.root / "sysroot"]
        # doctor looks for it where the unit has it.
        runtime_directory = self.root / "sysroot/run/yunion-mps-daemon"
        runtime_directory.parent.mkdir(parents=True, exist_ok=True)
        runtime_directory.symlink_to(self.root / "run")

    def configure_gpus(self):
        """The compute modes stay as they are."""
        self.root.mkdir()
        slices = self.setting.slices // self.setting.gpus
        entry = "- path: {}\n  type: NVIDIA_MPS\n  virtual_number: {}\n"
        devices = self.root / "devices.yml"
        devices.write_text("devices:\n" + "".join(entry.format(uuid, slices) for uuid in self.setting.uuids()))
        self.configuration = self.root / "host.conf"
        self.configuration.write_text(
            "enable_cuda_mps: true\ncuda_mps_set_compute_mode: false\n"
            f"cuda_mps_pipe_directory: {self.root}/pipe\ncuda_mps_log_directory: {self.root}/log\n"
            f"container_device_config_file: {devices}\n"
        )
        self.arguments = ["--config", self.configuration]

    def __exit__(self, *_):
        own = b"YUNION_MPS_SIM=" + os.fsencode(self.root) + b"\0"
        for pid, _ in process.marked(own):
            if self.bus is None or pid != self.bus.pid:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        if self.bus:
            self.bus.end()
        shutil.rmtree(self.directory, ignore_errors=True)

    def processes(self, program):
        """The PIDs and command lines of the processes of one of NVIDIA's programs on this host."""
        own = b"YUNION_MPS_SIM=" + os.fsencode(self.root) + b"\0"
        return [(pid, words) for pid, words in process.marked(own) if os.path.basename(words[0]) == program]

    def control_daemons(self):
        return [pid for pid, words in self.processes("nvidia-cuda-mps-control") if not is_front_end(words)]

    def front_ends(self):
        return [pid for pid, words in self.processes("nvidia-cuda-mps-control") if is_front_end(words)]

    def servers(self):
        return [pid for pid, _ in self.processes("nvidia-cuda-mps-server")]

    def cut_first_gpu(self, slices):
        """Changes the device file: the number of slices of the first GPU."""
        file = self.root / "sysroot/etc/yunion/host_container_device.yml"
        before, key, after = file.read_text().partition("virtual_number: ")
        new = file.with_suffix(".new")
        new.write_text(before + key + str(slices) + "\n" + after.partition("\n")[2])
        new.rename(file)


class Service:
    """The service, started on a host. `ready` is the time from its start to READY=1 in nanoseconds.

    With `listen` an independent client reports the service's signals, as source "bus" of the events."""

    def __init__(self, host, variant, listen=False):
        if listen and variant.ready:
            raise Lacking("it has no D-Bus interface")
        self.host, self.variant = host, variant
        self.events = Events()
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self.notify.bind(f"{host.directory}/notify")
        self.events.add("notify", self.notify.fileno())
        log, writer = os.pipe()
        self.pipes = [log]
        self.events.add("log", log)
        self.others = []
        if listen:
            self.listen()
        environment = {**host.environment, "NOTIFY_SOCKET": f"{host.directory}/notify"}
        start = time.monotonic_ns()
        self.process = process.spawn(
            [variant.daemon, *host.arguments], environment, stdout=writer, stderr=writer
        )
        os.close(writer)
        self.pid = self.process.pid
        try:
            self.ready = self.wait_for_ready() - start
            self.check_processes()
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        # A daemon that still runs is killed, and then the host ends the daemon's leftovers.
        for child in [self.process, *self.others]:
            child.end()
        self.notify.close()
        (self.host.directory / "notify").unlink()
        for pipe in self.pipes:
            os.close(pipe)

    def wait_for_ready(self):
        try:
            event = self.events.first(0, lambda event: self.says_ready(event) or (event.source, event.text) == ("log", END))
        except Unable as error:
            raise NotReady(error) from error
        if event.text == END:
            raise NotReady("it ended before it was ready")
        return event.time

    def check_processes(self):
        """Fails unless the control daemons run that are to run, and their servers: whoever starts nothing is quick. The
        service is not asked, so none of its figures changes."""
        controls, servers, planned = self.host.control_daemons(), self.host.servers(), self.host.setting.planned()
        if self.variant.ready:
            # The other daemon has its own plan.
            if not controls:
                raise NotReady("it was ready, but no control daemon ran")
        elif len(controls) != planned:
            raise NotReady(f"{len(controls)} control daemons ran, not {planned}{self.warnings()}")
        elif self.host.setting.prewarm and len(servers) != planned:
            raise NotReady(f"{len(servers)} servers ran, not {planned}{self.warnings()}")

    def warnings(self):
        """The warnings and errors of the service so far, as the end of a message."""
        while self.events.take(0):
            pass
        lines = [event.text for event in self.events.all if re.match(r"(\S+ )?\s*(WARN|ERROR) ", event.text)]
        return "".join(f"\n  {line}" for line in lines)

    def check(self):
        """Fails unless everything is served, as the service itself says too."""
        self.check_processes()
        if not self.variant.ready:
            words = [self.host.tools.ctl, "is-ready"]
            asked = subprocess.run(words, env=self.host.environment, capture_output=True, text=True, timeout=60)
            if asked.returncode:
                raise Unable(f"yunion-mpsctl is-ready: {(asked.stdout + asked.stderr).strip()}")

    def says_ready(self, event):
        if self.variant.ready:
            return event.source == "log" and self.variant.ready in event.text
        return is_ready(event)

    def listen(self):
        signals, writer = os.pipe()
        self.pipes.append(signals)
        self.others.append(process.spawn([self.host.tools.bus, "listen"], self.host.environment, stdout=writer))
        os.close(writer)
        if os.read(signals, 64) != b"listening\n":
            raise Unable("the client can't listen on the bus")
        self.events.add("bus", signals, stamped=True)

    def rest(self, most=60):
        """Waits until the service has nothing more to do after a start. Returns the number of events until then.

        On a busy machine the service may have work and say nothing for long. So silence is not enough: the service, the bus
        and the client must sleep, and no front end may run."""
        deadline = time.monotonic() + most
        while True:
            before = self.asleep()
            said = self.events.take(self.host.tools.quiet)
            if before and not said and before == self.asleep():
                break
            if time.monotonic() > deadline:
                raise Unable(f"the service was not at rest within {most} s")
        states = [event for event in self.events.all if " State=" in event.text]
        # There is no signal if the state was ready as soon as the service was on the bus.
        if states and not is_served(states[-1]):
            raise Unable(f"the service is at rest and not ready: {states[-1].text}")
        return len(self.events.all)

    def asleep(self):
        """How often each thread of the service, the bus and the client has begun to sleep. None unless all of them sleep."""
        pids = [one.pid for one in (self.process, self.host.bus, *self.others)]
        if self.host.front_ends() or not all(process.is_asleep(pid) for pid in pids):
            return None
        return [process.sleeps(pid) for pid in pids]

    def stop(self):
        """SIGTERM. Returns the nanoseconds until the service has ended. Fails if it did not serve until then, or left
        anything running."""
        self.check()
        start = time.monotonic_ns()
        os.kill(self.pid, signal.SIGTERM)
        ended = self.process.wait()
        if self.process.status != 0:
            raise Unable(f"the service ended with exit status {self.process.status}")
        left = self.host.control_daemons()
        if left:
            raise Unable(f"the service left control daemons running: {left}")
        return ended - start


def is_front_end(words):
    """A front end has no option, and a control daemon has one of these."""
    return not any(word in ("-f", "-d") for word in words)


def is_served(event):
    return event.source == "bus" and event.text.endswith(" State=ready")


def is_ready(event):
    return event.source == "notify" and event.text == "READY=1"
