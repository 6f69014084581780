"""The bookkeeping of the kubelet's device manager: which devices there are, and which pod has which.

The rules are those that a real kubelet (1.36) kept: an ended init container hands its devices on within its pod, and a kubelet
that starts admits each pod again. A container that runs is left alone then; for any other container its devices have to be
healthy, or the whole pod is rejected.
"""

import json
import os
import threading


class Rejected(Exception):
    """The reason why a pod is not admitted."""


class DeviceManager:
    """`prefer(resource, available, must, number)` and `allocate(resource, names)` ask the plugin; `allocate` raises Rejected."""

    def __init__(self, checkpoint, prefer, allocate):
        self.checkpoint, self.prefer, self.allocate = checkpoint, prefer, allocate
        # The lists of plugins come from threads of their own.
        self.lock = threading.RLock()
        # By resource. A resource without an entry has never been registered.
        self.healthy, self.unhealthy = {}, {}
        # The containers of each pod, and what each of them has been given, by resource.
        self.pods = {}
        if checkpoint.exists():
            known = json.loads(checkpoint.read_text())
            self.pods = known["pods"]
            # No device is healthy until its plugin registers again.
            self.healthy = {resource: set() for resource in known["resources"]}
            self.unhealthy = {resource: set() for resource in known["resources"]}

    def save(self):
        with self.lock:
            new = self.checkpoint.with_suffix(".new")
            new.write_text(json.dumps({"pods": self.pods, "resources": sorted(self.healthy)}))
            os.replace(new, self.checkpoint)

    def listed(self, resource, health):
        """The plugin has listed its devices."""
        with self.lock:
            self.healthy[resource] = {name for name, healthy in health.items() if healthy}
            self.unhealthy[resource] = set(health) - self.healthy[resource]
            self.save()

    def gone(self, resource):
        """The plugin no longer lists its devices."""
        with self.lock:
            self.unhealthy[resource] = self.unhealthy[resource] | self.healthy[resource]
            self.healthy[resource] = set()

    def numbers(self):
        """The node's devices of each resource, and those among them that are healthy. The scheduler takes off what pods have."""
        with self.lock:
            return {
                "capacity": {one: len(names) + len(self.unhealthy[one]) for one, names in self.healthy.items()},
                "allocatable": {one: len(names) for one, names in self.healthy.items()},
            }

    def given(self):
        """The containers that have each device, as POD/CONTAINER, by resource. Containers of one pod may share a device."""
        owners = {}
        for pod, known in self.pods.items():
            for container, devices in known["devices"].items():
                for resource, names in devices.items():
                    for name in names:
                        owners.setdefault(resource, {}).setdefault(name, []).append(f"{pod}/{container}")
        return owners

    def admit(self, pod, containers):
        """Admits a new pod: the devices of each container, and the settings from the plugin."""
        known = self.pods[pod] = {"containers": containers, "devices": {}}
        try:
            settings = self._admit(known, [])
        except Rejected:
            self.ended(pod)
            raise
        return known["devices"], settings

    def admit_again(self, running):
        """Admits all pods, of which these containers run, and returns why pods are rejected, by pod."""
        rejected = {}
        for pod, known in list(self.pods.items()):
            try:
                self._admit(known, running.get(pod, []))
            except Rejected as why:
                rejected[pod] = why
                self.ended(pod)
        return rejected

    def ended(self, pod):
        """The devices of a pod are free."""
        self.pods.pop(pod, None)
        self.save()

    def _admit(self, known, running):
        settings, reusable = {}, []
        for container in sorted(known["containers"], key=lambda one: not one["init"]):
            name, resource = container["name"], container.get("resource")
            if resource is None:
                continue
            chosen = None
            # A kubelet that has just started leaves a container alone that runs.
            if name not in running:
                chosen = self._choose(known, container, reusable)
            if chosen:
                settings[name] = self.allocate(resource, chosen)
                known["devices"][name] = {resource: chosen}
                self.save()
            has = known["devices"].get(name, {}).get(resource, [])
            others = [one for one in reusable if one not in has]
            reusable = others + has if container["init"] else others
        return settings

    def _choose(self, known, container, reusable):
        """New devices for a container; none if it has them already."""
        resource, number = container["resource"], container["number"]
        has = known["devices"].get(container["name"], {}).get(resource, [])
        if resource not in self.healthy:
            raise Rejected(f"cannot allocate unregistered device {resource}")
        healthy = self.healthy[resource]
        if not healthy:
            raise Rejected(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        if not healthy.issuperset(has):
            why = "previously allocated devices are no longer healthy"
            raise Rejected(f"{why}; cannot allocate unhealthy devices {resource}")
        if has:
            return None
        chosen = sorted(reusable)[:number]
        if len(chosen) == number:
            return chosen
        free = healthy - set(self.given().get(resource, {}))
        missing = number - len(chosen)
        if len(free) < missing:
            words = f"requested number of devices unavailable for {resource}"
            raise Rejected(f"{words}. Requested: {missing}, Available: {len(free)}")
        proposed = self.prefer(resource, sorted(free | set(chosen)), chosen, number)
        in_order = [one for one in proposed if one in free] + sorted(free - set(proposed))
        return chosen + in_order[:missing]
