"""The node as its administrator sees it: the commands that are typed there."""

import json
import pathlib
import subprocess

from wait import Failed

NODE = "gpu1"


def run(*words, seconds=120):
    """Returns the output of a command that succeeds."""
    ended = subprocess.run(words, capture_output=True, text=True, timeout=seconds, check=False)
    if ended.returncode != 0:
        raise Failed(f"{' '.join(words)}: exit status {ended.returncode}: {ended.stderr}{ended.stdout}")
    return ended.stdout


def kubectl(*words):
    """Returns the output of kubectl as the cluster's administrator."""
    return run("kubectl", "--kubeconfig=/etc/kubernetes/admin.conf", *words)


def mpsctl(*words):
    """Returns the rows of a table of yunion-mpsctl; none while the service does not answer."""
    ended = subprocess.run(["yunion-mpsctl", *words, "--json"], capture_output=True, text=True, check=False)
    return json.loads(ended.stdout) if ended.returncode == 0 else []


def clients():
    """Returns the PID of each client, by its label: namespace/pod/container."""
    return {client["label"]: client["pid"] for client in mpsctl("clients") if client.get("label")}


def owners():
    """Returns for each slice that somebody has the label of its owner."""
    return {one["addr"]: one["bound_to"] for one in mpsctl("list") if one["bound_to"]}


def slices():
    """Returns the names of all slices."""
    return [one["addr"] for one in mpsctl("list")]


def environment(pid):
    """Returns the environment that a process was started with."""
    text = pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    return dict(one.split("=", 1) for one in text.split("\0") if "=" in one)


def main_pid(unit):
    """Returns the PID of a unit's program, 0 while it does not run."""
    return int(run("systemctl", "show", "--value", "--property=MainPID", unit))


def status_text(unit):
    """Returns the status line of a unit."""
    return run("systemctl", "show", "--value", "--property=StatusText", unit).strip()
