"""A pod has its slice, with the slice's limits and the pod's name; a full GPU lets the next pod wait."""

import node
from cluster import SLICES
from objects import NAMESPACE, RESOURCE, container, pod
from wait import holds, same, wait_for


def trial(cluster):
    one_pod(cluster)
    full_gpu(cluster)


def one_pod(cluster):
    cluster.create(pod("first"))
    (label, pid), *_ = cluster.wait_until_client("first").items()
    same("the name of the client", label, f"{NAMESPACE}/first/main")
    same("the owners of slices", list(node.owners().values()), [f"{NAMESPACE}/first/main"])
    environment = node.environment(pid)
    same("the memory limit", environment.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"), "0=35942M")
    same("the active thread percentage", environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), "25")
    cluster.create(pod("looks", container(command=["/bin/cuda-client", "props"])))
    cluster.wait_for_phase("looks", "Succeeded")
    seen = cluster.api.log("looks", NAMESPACE)
    holds("a pod sees the multiprocessors of its slice", " sms 32 " in seen, seen)
    cluster.delete("looks")
    cluster.delete("first")
    wait_for("slices without an owner", lambda: not node.owners(), why=node.owners)


def full_gpu(cluster):
    cluster.fill()
    same("the slices with an owner", sorted(node.owners()), sorted(node.slices()))
    same("the owners", len(set(node.owners().values())), SLICES)
    cluster.create(pod("next"))
    wait_for(
        "the reason why the fifth pod waits",
        lambda: any(f"Insufficient {RESOURCE}" in event for event in cluster.events("next")),
        why=lambda: cluster.story("next"),
    )
    same("the phase of the fifth pod", cluster.phase("next"), "Pending")
    cluster.delete("full-0")
    cluster.wait_until_client("next")
    print("  the fifth pod runs after the end of the first")
