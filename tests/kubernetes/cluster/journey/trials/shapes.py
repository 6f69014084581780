"""Wrong shapes: the plugin refuses what it can't give, and with docs/kubernetes/policy.yaml the API server refuses it before."""

import node
from objects import NAMESPACE, RESOURCE, container, deployment, job, pod
from wait import holds, same, wait_for

MANIFESTS = "/opt/cluster/manifests"
TWO = {RESOURCE: 2}
TWO_SIZES = {RESOURCE: 1, "yunion.io/mps-70gib": 1}

# Each shape with words of the refusal; None where it has to be taken.
VERDICTS = [
    ("a pod with a slice", pod("a"), None),
    ("a pod with a slice in each of two containers", pod("b", container("one"), container("two")), None),
    ("a pod without a slice", pod("c", container(limits={"memory": "64Mi"})), None),
    ("a pod with two slices in a container", pod("d", container(limits=TWO)), "two or more slices"),
    ("a pod with two sizes in a container", pod("e", container(limits=TWO_SIZES)), "two sizes"),
    ("a Deployment with two slices in a container", deployment("f", 1, container(limits=TWO)), "two or more slices"),
    ("a Job with a slice in an init container", job("g", initContainers=[container("warm")]), "init container"),
]


def trial(cluster):
    two_containers(cluster)
    refused_by_the_plugin(cluster)
    cluster.empty()
    node.kubectl("apply", "--filename", f"{MANIFESTS}/policy.yaml")
    try:
        refused_by_the_policy(cluster)
    finally:
        node.kubectl("delete", "--filename", f"{MANIFESTS}/policy.yaml")


def two_containers(cluster):
    cluster.create(pod("pair", container("one"), container("two")))
    labels = {f"{NAMESPACE}/pair/one", f"{NAMESPACE}/pair/two"}
    wait_for("both clients", lambda: labels <= node.clients().keys(), why=lambda: cluster.story("pair"))
    same("the owners of the slices of a pod with two containers", set(node.owners().values()), labels)


def refused_by_the_plugin(cluster):
    cluster.create(pod("two", container(limits=TWO)))
    cluster.wait_for_phase("two", "Failed")
    status = cluster.status("two")
    same("the reason of a pod with two slices of one GPU", status["reason"], "UnexpectedAdmissionError")
    holds("its message says what to do", "ask for one slice of a larger size" in status["message"], status["message"])


def refused_by_the_policy(cluster):
    # The API server learns a policy in a moment.
    wait_for("the policy", lambda: cluster.refusal(pod("two", container(limits=TWO))))
    for shape, thing, words in VERDICTS:
        refusal = cluster.refusal(thing)
        if words is None:
            same(f"the refusal of {shape}", refusal, None)
        else:
            holds(f"the refusal of {shape} has its reason", words in (refusal or ""), refusal)
    node.kubectl("create", "--dry-run=server", "--filename", f"{MANIFESTS}/vllm.yaml")
    print("  vllm.yaml is taken")
