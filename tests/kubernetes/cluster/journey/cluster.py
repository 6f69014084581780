"""The cluster as a trial sees it: its objects, and what they have to become."""

import node
from api import Api, Refused
from objects import NAMESPACE, NOTHING, RESOURCE, container, pod
from wait import wait_for

ADDRESS = "https://127.0.0.1:6443"
TOKEN = "token-of-admin"
PLUGIN = "yunion-mps-device-plugin"
SLICES = 4
# The kinds of objects that trials leave behind.
MADE = ["Deployment", "ResourceQuota", "Pod"]
# No event of these kinds explains anything.
USUAL = {"Pulled", "Created", "Started", "Scheduled", "MissingClusterDNS", "Killing"}


class Cluster:
    """The API server and the node, with an empty namespace for the trials."""

    def __init__(self, api=None):
        self.api = api or Api(ADDRESS, TOKEN)

    def create(self, *things):
        """Creates objects in the namespace of the trials."""
        for thing in things:
            self.api.create(thing, NAMESPACE)

    def refusal(self, thing, namespace=NAMESPACE):
        """Returns why the API server would refuse an object, None where it would take it."""
        try:
            self.api.create(thing, namespace, dry_run=True)
        except Refused as refused:
            return refused.message
        return None

    def status(self, name):
        """Returns the status of a pod, an empty one where there is no pod."""
        found = self.api.get("Pod", name, NAMESPACE)
        return found["status"] if found else {}

    def phase(self, name):
        """Returns the phase of a pod, None where there is no pod."""
        return self.status(name).get("phase")

    def pods(self, **selectors):
        """Returns the pods of the namespace."""
        return self.api.list("Pod", NAMESPACE, **selectors)

    def restarts(self, name):
        """Returns how often the containers of a pod have been started again."""
        return sum(one["restartCount"] for one in self.status(name).get("containerStatuses", []))

    def events(self, name):
        """Returns the events of a pod that explain something, each as one line."""
        found = self.api.list("Event", NAMESPACE, fieldSelector=f"involvedObject.name={name}")
        return [f"{one['reason']}: {one['message']}" for one in found if one["reason"] not in USUAL]

    def story(self, name):
        """Returns the words for a pod that is not as it should be."""
        status = self.status(name)
        parts = [status.get("phase"), status.get("reason"), status.get("message"), *self.events(name)]
        return f"{name}: " + "; ".join(part for part in parts if part)

    def wait_for_phase(self, name, phase):
        """Waits until a pod is in a phase."""
        wait_for(f"the phase {phase} of {name}", lambda: self.phase(name) == phase, why=lambda: self.story(name))

    def wait_until_client(self, *names):
        """Waits until each pod runs and its container is a client under the pod's name. Returns the PIDs."""
        labels = [f"{NAMESPACE}/{name}/main" for name in names]
        for name in names:
            self.wait_for_phase(name, "Running")

        def pids():
            known = node.clients()
            return {label: known[label] for label in labels} if known.keys() >= set(labels) else None

        def why():
            return "; ".join([f"the clients are {node.clients()}", *(self.story(name) for name in names)])

        return wait_for(f"clients of {', '.join(names)}", pids, why=why)

    def fill(self):
        """Makes a pod for each slice. Returns the PIDs of the clients."""
        names = [f"full-{number}" for number in range(SLICES)]
        self.create(*(pod(name) for name in names))
        return self.wait_until_client(*names)

    def wait_until_gone(self, name):
        """Waits until a pod is no more."""
        wait_for(f"the end of {name}", lambda: self.phase(name) is None, why=lambda: self.story(name))

    def delete(self, name, seconds=None):
        """Deletes a pod, and waits until it is gone."""
        self.api.delete("Pod", name, NAMESPACE, seconds)
        self.wait_until_gone(name)

    def allocatable(self):
        """Returns the number of slices that the node offers, as the API server knows it."""
        found = self.api.get("Node", node.NODE)
        return int(found["status"].get("allocatable", {}).get(RESOURCE, 0)) if found else 0

    def wait_for_allocatable(self, number):
        """Waits until the node offers so many slices. The kubelet reports them every 10 seconds."""
        wait_for(f"{number} allocatable slices", lambda: self.allocatable() == number, why=self.allocatable)

    def wait_for_registration(self):
        """Waits until the plugin has every resource at the kubelet."""
        wait_for(
            "the registration",
            lambda: node.status_text(PLUGIN) == "1 of 1 resources registered",
            why=lambda: node.status_text(PLUGIN),
        )

    def wait_until_taken_up(self):
        """Waits until a kubelet that was started has taken up all pods: it does so in the order of their creation, and the pod that
        is made here is the last one."""
        name = "taken-up"
        self.create(pod(name, container(command=NOTHING, limits={})))
        self.wait_for_phase(name, "Succeeded")
        self.delete(name)

    def empty(self):
        """Takes away all that a trial has made, and waits until every slice is free and offered."""

        def nothing_left():
            left = [(kind, one["metadata"]["name"]) for kind in MADE for one in self.api.list(kind, NAMESPACE)]
            for kind, name in left:
                self.api.delete(kind, name, NAMESPACE, 1 if kind == "Pod" else None)
            return not left

        wait_for("an empty namespace", nothing_left, why=lambda: [one["metadata"]["name"] for one in self.pods()])
        node.run("yunion-mpsctl", "undrain", "--all")
        self.api.patch("Node", node.NODE, {"spec": {"unschedulable": None}})
        wait_for("slices without an owner", lambda: not node.owners(), why=node.owners)
        self.wait_for_allocatable(SLICES)
