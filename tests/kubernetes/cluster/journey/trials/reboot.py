"""A reboot of the node: the pods come back on their slices. The service and the plugin are units, so they are there before the
kubelet takes up its pods."""

import node
from objects import container, deployment, pod
from wait import same, wait_for

OWNERS = 3


def trial(cluster):
    cluster.create(deployment("served", 2), pod("alone", container(), restartPolicy="Always"))
    cluster.wait_until_client("alone")
    wait_for("an owner of each slice of a pod", lambda: len(node.owners()) == OWNERS, why=node.owners)


def after_reboot(cluster):
    cluster.wait_until_client("alone")
    wait_for("an owner of each slice of a pod", lambda: len(node.owners()) == OWNERS, why=node.owners)
    same("the different owners", len(set(node.owners().values())), OWNERS)
    cluster.wait_until_taken_up()
    same("failed pods", [one["metadata"]["name"] for one in cluster.pods(fieldSelector="status.phase=Failed")], [])
