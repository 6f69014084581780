"""Rolling updates of a Deployment on a full GPU, in the middle of kernels, beside a neighbour that computes: behind yunion-mps-runc
no stop harms it, and no slice is given twice."""

import os

import node
from cluster import SLICES
from objects import COMPUTE, NAMESPACE, container, deployment, pod
from wait import same, wait_for

MANIFESTS = "/opt/cluster/manifests"
NAME = "rolls"
REPLICAS = SLICES - 1
# make cluster UPDATES=50 for more of them.
UPDATES = int(os.environ.get("UPDATES") or 10)


def trial(cluster):
    node.kubectl("apply", "--filename", f"{MANIFESTS}/runtime-class.yaml")
    computes = container(command=COMPUTE)
    harmless = {"runtimeClassName": "yunion-mps"}
    cluster.create(pod("neighbour", computes, **harmless), deployment(NAME, REPLICAS, computes, **harmless))
    before = cluster.wait_until_client("neighbour")
    wait_for("the Deployment", lambda: rolled_out(cluster), why=lambda: deployment_status(cluster))
    for number in range(UPDATES):
        update(cluster, number)
        wait_for(f"update {number + 1}", lambda: rolled_out(cluster), why=lambda: deployment_status(cluster), times=5)
        wait_for("an owner of each slice", lambda: len(node.owners()) == SLICES, why=node.owners)
        same(f"the neighbour's PID after update {number + 1}", cluster.wait_until_client("neighbour"), before)
        same("the different owners", len(set(node.owners().values())), SLICES)
    same("failed pods", failed(cluster), [])


def update(cluster, number):
    template = {"metadata": {"annotations": {"update": str(number)}}}
    cluster.api.patch("Deployment", NAME, {"spec": {"template": template}}, NAMESPACE)


def deployment_status(cluster):
    return cluster.api.get("Deployment", NAME, NAMESPACE)["status"]


def rolled_out(cluster):
    """Returns whether every replica is of the newest template, and no other one is left."""
    found = cluster.api.get("Deployment", NAME, NAMESPACE)
    status = found["status"]
    counts = [status.get(key, 0) for key in ("replicas", "updatedReplicas", "availableReplicas")]
    return status.get("observedGeneration") == found["metadata"]["generation"] and counts == [REPLICAS] * 3


def failed(cluster):
    return [one["metadata"]["name"] for one in cluster.pods(fieldSelector="status.phase=Failed")]
