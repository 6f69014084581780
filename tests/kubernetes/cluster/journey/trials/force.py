"""`kubectl delete --force` frees a slice while its container lives: the next pod gets another slice, or waits for this one."""

import node
from cluster import SLICES
from objects import pod
from wait import same

ROUNDS = 10


def trial(cluster):
    for number in range(ROUNDS):
        one_for_another(cluster, f"free-{number}")
        cluster.empty()
    print(f"  {ROUNDS} of {ROUNDS} pods with free slices on the GPU run")
    cluster.fill()
    for number in range(SLICES):
        # The container of the pod that was deleted still has the only slice that the kubelet takes for free.
        force_delete(cluster, f"full-{number}")
        cluster.create(pod(f"next-{number}"))
        cluster.wait_until_client(f"next-{number}")
    same("the owners on a full GPU", len(set(node.owners().values())), SLICES)


def one_for_another(cluster, name):
    cluster.create(pod(name))
    cluster.wait_until_client(name)
    force_delete(cluster, name)
    cluster.create(pod(f"{name}-next"))
    cluster.wait_until_client(f"{name}-next")


def force_delete(cluster, name):
    """Deletes the object at once; the kubelet ends the container later."""
    cluster.delete(name, seconds=0)
