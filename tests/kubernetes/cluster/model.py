"""A cluster of one node in memory, for the tests of the trials: an API server over HTTP, and what a command on the node would do.
It behaves as the real one has to, but for the defects that a test turns on."""

import http.server
import itertools
import json
import threading

from api import PATHS
from objects import NAMESPACE, NOTHING, RESOURCE

TOKEN = "token"
SLICES = [f"00:06.0-{number}" for number in range(4)]
UNITS = ["yunion-mps-daemon", "yunion-mps-device-plugin", "kubelet", "containerd", "dbus"]
WRONG = "ValidatingAdmissionPolicy denied request: "


class Model(http.server.ThreadingHTTPServer):
    """Objects by their path, and the slices with their owners."""

    daemon_threads = True

    def __init__(self, *defects):
        super().__init__(("127.0.0.1", 0), Handler)
        self.defects, self.lock, self.numbers = set(defects), threading.RLock(), itertools.count(100)
        self.objects, self.calls, self.clients, self.owners, self.drained = {}, [], {}, {}, set()
        self.pids = {unit: next(self.numbers) for unit in UNITS}
        self.cordoned, self.policy, self.fails_next = False, False, False
        self.put("ServiceAccount", "default")
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()

    def put(self, kind, name, namespace=NAMESPACE, **parts):
        """Puts an object there, whatever was there before."""
        path = f"{PATHS[kind].format(namespace=namespace)}/{name}"
        self.objects[path] = {"kind": kind, "metadata": {"name": name, "generation": 1}, **parts}

    def of_kind(self, kind, namespace=NAMESPACE):
        """The objects of a kind, by their path."""
        parent = PATHS[kind].format(namespace=namespace) + "/"
        return {path: one for path, one in self.objects.items() if path.startswith(parent)}

    # The part of the API server.

    def refusal(self, thing, namespace):
        """The status and the words with which admission refuses an object."""
        spec = thing.get("spec", {})
        template = spec.get("template", {}).get("spec", spec)
        containers = template.get("containers", [])
        wishes = [one["resources"]["limits"] for one in containers]
        if self.policy and "policy ignored" not in self.defects:
            if any(len([key for key in wish if key.startswith("yunion.io/")]) > 1 for wish in wishes):
                return 422, WRONG + "two sizes"
            if any(wish.get(RESOURCE, 0) > 1 for wish in wishes):
                return 422, WRONG + "two or more slices"
            if any(RESOURCE in one["resources"]["limits"] for one in template.get("initContainers", [])):
                return 422, WRONG + "an init container asks for a slice"
        levels = self.objects.get(f"/api/v1/namespaces/{namespace}", {}).get("metadata", {}).get("labels", {})
        if "baseline" in levels.values() and any("hostPath" in one for one in template.get("volumes", [])):
            return 403, "violates PodSecurity: hostPath volumes"
        used = len(self.owners)
        for quota in self.of_kind("ResourceQuota", namespace).values():
            if thing["kind"] == "Pod" and used >= int(quota["spec"]["hard"].get(f"requests.{RESOURCE}", 99)):
                return None if "quota ignored" in self.defects else (403, "exceeded quota")
        return None

    def created(self, path, thing):
        """An object has been created."""
        made = {**thing, "metadata": {**thing["metadata"], "generation": 1}, "status": {}}
        self.objects[f"{path}/{thing['metadata']['name']}"] = made
        if thing["kind"] == "Pod":
            made["status"] = {"phase": "Pending"}
        elif thing["kind"] == "Deployment":
            self.control(made)
        elif thing["kind"] == "ResourceQuota":
            made["status"] = {"hard": thing["spec"]["hard"]}
        elif thing["kind"] == "Namespace":
            self.put("ServiceAccount", "default", thing["metadata"]["name"])
        self.schedule()

    def patched(self, path, change):
        """An object has been changed: a template, or whether the node takes pods."""
        thing = self.objects.get(path)
        if "unschedulable" in change["spec"]:
            self.cordoned = bool(change["spec"]["unschedulable"])
        else:
            thing["metadata"]["generation"] += 1
            if "a stop hits the neighbour" in self.defects:
                self.clients.pop(f"{NAMESPACE}/neighbour/main")
            for pod in [one for one in self.of_kind("Pod") if f"/{thing['metadata']['name']}-" in one]:
                self.deleted(pod)
            self.control(thing)
        self.schedule()

    def deleted(self, path, seconds=None):
        """An object has been deleted."""
        gone = self.objects.pop(path)
        name = gone["metadata"]["name"]
        if gone["kind"] == "Deployment":
            for pod in [one for one in self.of_kind("Pod") if f"/{name}-" in one]:
                self.deleted(pod)
        elif gone["kind"] == "Pod":
            self.end(name)
            if seconds == 0 and "a taken slice fails the next pod" in self.defects:
                self.fails_next = True
        for thing in list(self.of_kind("Deployment").values()):
            self.control(thing)
        self.schedule()

    def control(self, thing):
        """A Deployment makes the pods that it lacks."""
        name, wanted = thing["metadata"]["name"], thing["spec"]["replicas"]
        have = [one for one in self.of_kind("Pod") if f"/{name}-" in one]
        for _ in range(wanted - len(have)):
            spec = thing["spec"]["template"]["spec"]
            self.put("Pod", f"{name}-{next(self.numbers)}", spec=spec, status={"phase": "Pending"})
        counts = {key: wanted for key in ("replicas", "updatedReplicas", "availableReplicas")}
        thing["status"] = {"observedGeneration": thing["metadata"]["generation"], **counts}

    # The part of the node.

    def schedule(self):
        """Pods that wait get their slices, as far as there are any."""
        for pod in list(self.of_kind("Pod").values()):
            if pod["status"].get("phase") != "Pending" or self.cordoned:
                continue
            name, containers = pod["metadata"]["name"], pod["spec"]["containers"]
            wanted = [one for one in containers if RESOURCE in one["resources"]["limits"]]
            free = [one for one in SLICES if one not in self.owners and one not in self.drained]
            words = "ask for one slice of a larger size"
            if any(one["resources"]["limits"][RESOURCE] > 1 for one in wanted):
                pod["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": words}
            elif len(wanted) > len(free) and not ("a slice is given twice" in self.defects and self.owners):
                self.put("Event", f"{name}.1", reason="FailedScheduling", message=f"Insufficient {RESOURCE}")
            elif self.fails_next:
                pod["status"], self.fails_next = {"phase": "Failed", "reason": "StartError"}, False
            else:
                self.start(pod, wanted, free or [next(iter(self.owners))])

    def start(self, pod, wanted, free):
        """A pod starts, with a slice for each container that wants one."""
        name, command = pod["metadata"]["name"], pod["spec"]["containers"][0]["command"]
        if command == NOTHING or "props" in command:
            pod["status"] = {"phase": "Succeeded"}
            return
        pod["status"] = {"phase": "Running", "containerStatuses": [{"restartCount": 0}]}
        for one, has in zip(wanted, free):
            label = f"{NAMESPACE}/{name}/{one['name']}"
            self.owners[has], self.clients[label] = label, next(self.numbers)

    def end(self, name):
        """The containers of a pod are gone."""
        prefix = f"{NAMESPACE}/{name}/"
        self.owners = {one: label for one, label in self.owners.items() if not label.startswith(prefix)}
        self.clients = {label: pid for label, pid in self.clients.items() if not label.startswith(prefix)}

    def reject(self, name):
        """The kubelet ends a pod."""
        self.objects[f"{PATHS['Pod'].format(namespace=NAMESPACE)}/{name}"]["status"] = {"phase": "Failed"}
        self.end(name)

    def kubelet_starts(self):
        """It admits every pod again."""
        for pod in list(self.of_kind("Pod").values()):
            name = pod["metadata"]["name"]
            if "a drain ends pods with init containers" in self.defects and self.drained and name == "init":
                self.reject(name)
            if "pods in back-off are ended" in self.defects and name == "fails":
                self.reject(name)

    def allocatable(self):
        """The number of slices that the kubelet takes for healthy."""
        keeps = {} if "a drained slice is counted twice" in self.defects else self.owners
        return len([one for one in SLICES if one not in self.drained or one in keeps])

    def look(self, path):
        """An object as it is now: the node's numbers, and the restarts of a container that fails, change by themselves."""
        found = self.objects.get(path)
        if path.startswith(PATHS["Node"]):
            ready = [{"type": "Ready", "status": "True"}]
            return {"status": {"allocatable": {RESOURCE: str(self.allocatable())}, "conditions": ready}}
        if found and found["metadata"]["name"] == "fails" and found["status"].get("phase") == "Running":
            found["status"]["containerStatuses"][0]["restartCount"] += 1
        return found

    # The part of the commands.

    def run(self, *words, **_):
        """In the place of node.run."""
        with self.lock:
            if words[:2] == ("systemctl", "show"):
                shown = self.pids[words[-1]] if "--property=MainPID" in words else "1 of 1 resources registered"
                return f"{shown}\n"
            known = {"yunion-mpsctl": self.mpsctl_command, "systemctl": self.systemctl, "kubectl": self.kubectl}
            known[words[0]](*words[1:])
            self.schedule()
            return ""

    def mpsctl_command(self, what, *rest):
        named = set(SLICES) if "--all" in rest else {one for one in rest if not one.startswith("-")}
        self.drained = {"drain": self.drained | named, "undrain": self.drained - named}.get(what, self.drained)

    def systemctl(self, what, *units):
        for unit in units:
            self.pids[unit] = 0 if what == "stop" else next(self.numbers)
            if unit == "kubelet" and what == "restart":
                self.kubelet_starts()
            if unit == "yunion-mps-daemon" and "a restart of the service ends clients" in self.defects:
                self.clients = {label: next(self.numbers) for label in self.clients}

    def kubectl(self, _, what, *rest):
        if what in ("apply", "delete") and rest[-1].endswith("policy.yaml"):
            self.policy = what == "apply"
        elif what in ("drain", "uncordon"):
            self.cordoned = what == "drain"
            for path in list(self.of_kind("Pod")) if self.cordoned else []:
                self.deleted(path)

    def kill(self, pid, _):
        """In the place of os.kill: systemd starts another program."""
        unit = next(name for name, its in self.pids.items() if its == pid)
        self.pids[unit] = next(self.numbers)

    def rows(self, table):
        """In the place of node.mpsctl."""
        with self.lock:
            if table == "clients":
                return [{"label": label, "pid": pid} for label, pid in self.clients.items()]
            return [{"addr": one, "bound_to": self.owners.get(one, "")} for one in SLICES]

    def reboots(self):
        """Everything starts again, and a pod on its slice."""
        self.clients = {label: next(self.numbers) for label in self.clients}
        if "a reboot ends a pod" in self.defects:
            self.reject("alone")


class Handler(http.server.BaseHTTPRequestHandler):
    """Speaks HTTP for a model."""

    def answer(self, status, body):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_call(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        path, _, query = self.path.partition("?")
        with self.server.lock:
            self.server.calls.append((self.command, path, query, self.headers["Content-Type"], body))
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                self.answer(401, {"message": "Unauthorized"})
            elif self.command == "POST":
                self.post(path, query, body)
            elif self.command == "DELETE" and path in self.server.objects:
                self.server.deleted(path, body.get("gracePeriodSeconds"))
                self.answer(200, {})
            elif self.command == "PATCH":
                self.server.patched(path, body)
                self.answer(200, {})
            else:
                self.get(path, query)

    do_GET = do_POST = do_DELETE = do_PATCH = handle_call

    def get(self, path, query):
        found = self.server.look(path)
        last = path.rsplit("/", 1)[-1]
        if path == "/readyz":
            self.answer(200, "ok")
        elif last == "log":
            self.answer(200, "dev 0 H200 sms 32 free 35797")
        elif found:
            self.answer(200, found)
        elif last in {one.rsplit("/", 1)[-1] for one in PATHS.values()}:
            items = [one for key, one in self.server.objects.items() if key.rsplit("/", 1)[0] == path]
            phase = query.partition("status.phase%3D")[2]
            name = query.partition("involvedObject.name%3D")[2]
            items = [one for one in items if not phase or one["status"].get("phase") == phase]
            self.answer(200, {"items": [one for one in items if not name or one["metadata"]["name"].startswith(f"{name}.")]})
        else:
            self.answer(404, {"message": f"{path} not found"})

    def post(self, path, query, body):
        refused = self.server.refusal(body, path.split("/")[-2])
        if refused:
            self.answer(refused[0], {"message": refused[1]})
        elif f"{path}/{body['metadata']['name']}" in self.server.objects:
            self.answer(409, {"message": f"{body['metadata']['name']} already exists"})
        else:
            if "dryRun=All" not in query:
                self.server.created(path, body)
            self.answer(201, body)

    def log_message(self, *_):
        """A test that fails says enough."""
