"""The ways in which processes reach a GPU: without MPS, under a bare control daemon, under this service."""

import os
import pathlib
import shlex
import signal
import subprocess
import tempfile

from processes import Failure, wait_until

LIMITS = ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")


class WithoutMps:
    def __init__(self, gpu):
        self.gpu = gpu

    def __enter__(self):
        return self

    def clients(self, count):
        """The variables of each."""
        return [{"CUDA_VISIBLE_DEVICES": self.gpu}] * count

    def __exit__(self, *_):
        pass


class Bare:
    """A control daemon for one GPU, as an administrator starts it by hand."""

    def __init__(self, gpu):
        self.directory = tempfile.TemporaryDirectory(dir="/tmp")
        self.variables = {
            "CUDA_VISIBLE_DEVICES": gpu,
            "CUDA_MPS_PIPE_DIRECTORY": f"{self.directory.name}/p", "CUDA_MPS_LOG_DIRECTORY": f"{self.directory.name}/l",
        }

    def __enter__(self):
        os.mkdir(f"{self.directory.name}/p")
        os.mkdir(f"{self.directory.name}/l")
        variables = {**os.environ, **self.variables}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], env=variables, check=True, timeout=20)
        return self

    def clients(self, count, limits=None):
        return [{**self.variables, **(limits or {})}] * count

    def __exit__(self, *_):
        variables = {**os.environ, **self.variables}
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, env=variables, timeout=20)
        self.directory.cleanup()


class Service:
    """This service with so many slices of each of the GPUs. SYSROOT is for a simulated host."""

    def __init__(self, binaries, out, gpus, slices, **keys):
        self.binaries, self.log = binaries, open(out / "service.log", "a")
        self.directory = tempfile.TemporaryDirectory(dir="/tmp")
        place = pathlib.Path(self.directory.name)
        place.chmod(0o755)
        entries = (f"- path: {gpu}\n  type: NVIDIA_MPS\n  virtual_number: {slices}\n" for gpu in gpus)
        (place / "devices.yml").write_text("devices:\n" + "".join(entries))
        settings = {
            "enable_cuda_mps": "true", "cuda_mps_set_compute_mode": "false", "cuda_mps_pipe_directory": place / "pipe",
            "cuda_mps_log_directory": place / "log", "container_device_config_file": place / "devices.yml", **keys,
        }
        self.conf = place / "host.conf"
        self.conf.write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
        self.command = [str(binaries / "yunion-mps-daemon"), "--config", str(self.conf)]
        if "SYSROOT" in os.environ:
            self.command += ["--sysroot", os.environ["SYSROOT"]]
        self.variables = {**os.environ, "RUNTIME_DIRECTORY": f"{self.directory.name}/run"}

    def complaints(self, key):
        """The lines in which the service's check names this key."""
        checked = subprocess.run(
            [*self.command, "--check"], env=self.variables, timeout=20, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        return [line for line in checked.stdout.splitlines() if key in line]

    def start(self):
        self.process = subprocess.Popen(self.command, env=self.variables, stdout=self.log, stderr=self.log)
        asking = [str(self.binaries / "yunion-mpsctl"), "is-ready", "--wait", "20", "--quiet"]
        with subprocess.Popen(asking, env=self.variables, stdout=self.log, stderr=self.log) as asker:
            wait_until("the service", lambda: asker.poll() is not None or self.process.poll() is not None, 30)
            if self.process.poll() is not None:
                asker.kill()
                raise Failure(f"the service ended with {self.process.returncode}: see service.log")
        if asker.returncode != 0:
            raise Failure("the service is not ready: see service.log")

    def ctl(self, *words):
        command = [str(self.binaries / "yunion-mpsctl"), *words]
        return subprocess.run(
            command, env=self.variables, check=True, timeout=30, capture_output=True, text=True
        ).stdout

    def __enter__(self):
        try:
            self.start()
            self.names = self.ctl("list", "--names").split()
        except BaseException:
            self.__exit__()
            raise
        return self

    def clients(self, count):
        """The variables of each, as `yunion-mpsctl run` sets them; each has a slice of its own."""
        return [self.variables_of(name) for name in self.names[:count]]

    def variables_of(self, name):
        words = shlex.split(self.ctl("env", name).replace(";", " "))
        return dict(word.split("=", 1) for word in words if "=" in word)

    def limits(self):
        """The limits of a slice, for clients of a bare control daemon."""
        variables = self.variables_of(self.names[0])
        return {name: variables[name] for name in LIMITS if name in variables}

    def kill_and_reload(self):
        for _ in range(3):
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.start()
        self.ctl("reload")

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()
        self.directory.cleanup()
