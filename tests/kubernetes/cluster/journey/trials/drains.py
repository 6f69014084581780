"""A drain of slices and of the node: pods that run stay, the node counts each slice once, and a node comes back."""

import node
from cluster import SLICES
from objects import deployment, pod
from wait import same, wait_for


def trial(cluster):
    slices_out_of_use(cluster)
    node_out_of_use(cluster)


def slices_out_of_use(cluster):
    cluster.create(pod("stays"))
    before = cluster.wait_until_client("stays")
    (taken,) = node.owners()
    free = next(name for name in node.slices() if name != taken)
    node.run("yunion-mpsctl", "drain", taken)
    node.run("yunion-mpsctl", "drain", free)
    # The drained slice of the pod is among them: the kubelet has given it out, and gives it to no other pod.
    cluster.wait_for_allocatable(SLICES - 1)
    same("the PIDs on a drained slice", cluster.wait_until_client("stays"), before)
    cluster.create(pod("second"), pod("third"))
    cluster.wait_until_client("second", "third")
    cluster.create(pod("fourth"))
    wait_for(
        "the fourth pod waits",
        lambda: any("Insufficient" in event for event in cluster.events("fourth")),
        why=lambda: cluster.story("fourth"),
    )
    node.run("yunion-mpsctl", "undrain", free)
    cluster.wait_until_client("fourth")
    same("the PIDs after the drain", cluster.wait_until_client("stays"), before)
    cluster.empty()


def node_out_of_use(cluster):
    """The lines of docs/kubernetes.md for a new driver."""
    cluster.create(deployment("served", 2), pod("alone"))
    cluster.wait_until_client("alone")
    wait_for("three owners", lambda: len(node.owners()) == 3, why=node.owners)
    node.kubectl("drain", node.NODE, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s")
    node.run("yunion-mpsctl", "drain", "--all", "--wait")
    same("the owners on a drained node", node.owners(), {})
    node.run("systemctl", "stop", "yunion-mps-daemon")
    node.run("systemctl", "start", "yunion-mps-daemon")
    node.run("yunion-mpsctl", "undrain", "--all")
    node.run("yunion-mpsctl", "is-ready", "--wait", "60")
    node.kubectl("uncordon", node.NODE)
    wait_for("the Deployment on its slices", lambda: len(node.owners()) == 2, why=node.owners)
    same("failed pods", [one["metadata"]["name"] for one in cluster.pods(fieldSelector="status.phase=Failed")], [])
