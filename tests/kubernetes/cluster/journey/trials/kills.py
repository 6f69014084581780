"""Every part of the node is restarted or killed under a full GPU: the same programs run on, and none is started again."""

import os
import signal

import node
from cluster import SLICES
from wait import same, wait_for

UNITS = ["yunion-mps-device-plugin", "yunion-mps-daemon", "kubelet", "containerd"]


def trial(cluster):
    before = cluster.fill()
    for name, act in acts(cluster):
        act()
        cluster.wait_for_registration()
        cluster.wait_until_taken_up()
        same(f"the PIDs after: {name}", cluster.wait_until_client(*pods()), before)
        same("restarts of containers", sum(cluster.restarts(name) for name in pods()), 0)
    cluster.wait_for_allocatable(SLICES)


def pods():
    return [f"full-{number}" for number in range(SLICES)]


def acts(cluster):
    """Returns each act with its name."""
    every = [(f"{unit} is restarted", lambda unit=unit: restart(unit)) for unit in UNITS]
    every += [(f"{unit} is killed", lambda unit=unit: kill(unit)) for unit in UNITS]
    every += [
        ("kubelet and plugin are restarted", lambda: restart("kubelet", "yunion-mps-device-plugin")),
        ("kubelet and service are restarted", lambda: restart("kubelet", "yunion-mps-daemon")),
        ("kubelet is restarted without a plugin", lambda: kubelet_without_plugin(cluster)),
        ("the bus is restarted", lambda: restart("dbus")),
    ]
    return every


def restart(*units):
    node.run("systemctl", "restart", *units)
    wait_for_answers()


def kill(unit):
    """Kills the program of a unit, and waits until systemd has started another one."""
    before = node.main_pid(unit)
    os.kill(before, signal.SIGKILL)
    wait_for(f"another {unit}", lambda: node.main_pid(unit) not in (0, before))
    wait_for_answers()


def kubelet_without_plugin(cluster):
    """The kubelet takes up its pods while no plugin is registered."""
    node.run("systemctl", "stop", "yunion-mps-device-plugin")
    restart("kubelet")
    cluster.wait_until_taken_up()
    restart("yunion-mps-device-plugin")


def wait_for_answers():
    """Waits until the service answers, which a restart of the bus or of the service keeps it from."""
    node.run("yunion-mpsctl", "is-ready", "--wait", "60")
