"""The objects that the trials create."""

RESOURCE = "yunion.io/mps-35gib"
NAMESPACE = "ml"
IMAGE = "docker.io/library/cuda:1"

# A client of its slice that computes nothing, and does not handle SIGTERM; one in the middle of a kernel; no client at all.
HOLD = ["/bin/cuda-client", "hold", "36000", "--tell"]
COMPUTE = ["/bin/cuda-client", "long", "36000"]
NOTHING = ["/bin/true"]


def container(name="main", command=HOLD, limits=None, **rest):
    """A container with one slice, unless the limits say otherwise."""
    return {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": list(command),
        "resources": {"limits": {RESOURCE: 1} if limits is None else limits},
        **rest,
    }


def pod_spec(*containers, **rest):
    """The part of a pod that a Deployment has as well."""
    return {"terminationGracePeriodSeconds": 1, "containers": list(containers) or [container()], **rest}


def pod(name, *containers, **rest):
    """A pod whose containers are not started again, unless the rest says otherwise."""
    spec = pod_spec(*containers, **{"restartPolicy": "Never", **rest})
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def deployment(name, replicas, *containers, **rest):
    """A Deployment that replaces one pod after the other: no slice is free for a second one."""
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod_spec(*containers, **rest)},
        },
    }


def job(name, *containers, **rest):
    """A Job of one pod."""
    spec = pod_spec(*containers, **{"restartPolicy": "Never", **rest})
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {"backoffLimit": 0, "template": {"spec": spec}},
    }


def namespace(name, **labels):
    """A namespace with labels."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def quota(name, **hard):
    """A limit for all pods of a namespace together."""
    return {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": name}, "spec": {"hard": hard}}
