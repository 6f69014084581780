"""A kubelet that starts admits every pod again. It wants the slices of containers that do not run: of init containers that have
ended, and of containers in back-off."""

import node
from cluster import SLICES
from objects import NOTHING, container, pod
from wait import holds, same, wait_for

ROUNDS = 5
# The time between two starts of a container is five minutes at most: in multiples of the usual time to wait.
BACK_OFF = 3
INIT = container("warm", ["/bin/cuda-client", "hold", "1"])
FAILS = container(command=["/bin/sh", "-c", "/bin/cuda-client hold 1; exit 1"])


def trial(cluster):
    with_the_plugin(cluster)
    while_drained(cluster)


def with_the_plugin(cluster):
    """The plugin registers again before the kubelet looks, each time."""
    cluster.create(
        pod("init", initContainers=[INIT]),
        pod("fails", FAILS, restartPolicy="Always"),
        pod("plain", initContainers=[container("first", NOTHING, {})]),
    )
    before = cluster.wait_until_client("init", "plain")
    wait_for_back_off(cluster)
    for number in range(ROUNDS):
        restart_kubelet(cluster)
        same(f"the PIDs after restart {number + 1}", cluster.wait_until_client("init", "plain"), before)
        holds(f"the pod in back-off outlasts restart {number + 1}", alive(cluster, "fails"), cluster.story("fails"))
    cluster.empty()


def while_drained(cluster):
    """The kubelet has given these slices out, so a drain does not make them unhealthy."""
    cluster.create(pod("init", initContainers=[INIT]), pod("fails", FAILS, restartPolicy="Always"), pod("plain"))
    before = cluster.wait_until_client("init", "plain")
    wait_for_back_off(cluster)
    node.run("yunion-mpsctl", "drain", "--all")
    # The slice of no pod is no longer offered, so the drain has reached the kubelet.
    cluster.wait_for_allocatable(SLICES - 1)
    restart_kubelet(cluster)
    same("the PIDs after a restart on drained slices", cluster.wait_until_client("init", "plain"), before)
    holds("the pod in back-off outlasts it on a drained slice", alive(cluster, "fails"), cluster.story("fails"))
    count = cluster.restarts("fails")
    node.run("yunion-mpsctl", "undrain", "--all")
    wait_for("its next start", lambda: cluster.restarts("fails") > count, why=lambda: cluster.story("fails"), times=BACK_OFF)


def wait_for_back_off(cluster):
    """Waits until the kubelet waits before it starts the container once more."""
    wait_for("a container in back-off", lambda: cluster.restarts("fails") >= 2, why=lambda: cluster.story("fails"))


def restart_kubelet(cluster):
    node.run("systemctl", "restart", "kubelet")
    cluster.wait_until_taken_up()
    cluster.wait_for_registration()


def alive(cluster, name):
    return cluster.phase(name) not in ("Failed", None)
