"""Levels of pod security, and quotas: a pod with a slice needs no more than other pods, and counts."""

from api import Refused
from objects import NAMESPACE, RESOURCE, container, namespace, pod, quota
from wait import holds, same, wait_for

LEVEL = "pod-security.kubernetes.io/enforce"
# The level asks this of every pod.
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}
DIRECTORY_OF_SOCKETS = {"name": "sockets", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}}


def trial(cluster):
    levels(cluster)
    quotas(cluster)


def levels(cluster):
    for level in ("baseline", "restricted"):
        name = f"level-{level}"
        if cluster.api.get("Namespace", name) is None:
            cluster.api.create(namespace(name, **{LEVEL: level}), "")
        wait_for("the service account", lambda name=name: cluster.api.get("ServiceAccount", "default", name))
    same("the refusal of a slice at baseline", cluster.refusal(pod("a"), "level-baseline"), None)
    restricted = pod("b", container(securityContext=RESTRICTED))
    same("the refusal of a slice at restricted", cluster.refusal(restricted, "level-restricted"), None)
    # docs/kubernetes.md: the plugin's own namespace has to be privileged.
    plugin = pod("c", container(limits={}), volumes=[DIRECTORY_OF_SOCKETS])
    refusal = cluster.refusal(plugin, "level-baseline")
    holds("baseline refuses the plugin's volumes", "hostPath" in (refusal or ""), refusal)


def quotas(cluster):
    cluster.create(quota("slices", **{f"requests.{RESOURCE}": "2"}))
    wait_for("the quota", lambda: (cluster.api.get("ResourceQuota", "slices", NAMESPACE).get("status") or {}).get("hard"))
    cluster.create(pod("one"), pod("two"))
    cluster.wait_until_client("one", "two")
    try:
        cluster.create(pod("three"))
    except Refused as refused:
        holds("the third pod is above the quota", "exceeded quota" in refused.message, refused.message)
    else:
        holds("the third pod is above the quota", False, "it was taken")
