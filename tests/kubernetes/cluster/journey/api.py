"""The API of Kubernetes over HTTPS, with what Python has of its own."""

import http.client
import json
import ssl
import urllib.error
import urllib.parse
import urllib.request

SECONDS = 30

# The paths of the objects of a namespace; those of the cluster have no namespace.
PATHS = {
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "Event": "/api/v1/namespaces/{namespace}/events",
    "ResourceQuota": "/api/v1/namespaces/{namespace}/resourcequotas",
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "Deployment": "/apis/apps/v1/namespaces/{namespace}/deployments",
    "Job": "/apis/batch/v1/namespaces/{namespace}/jobs",
    "Namespace": "/api/v1/namespaces",
    "Node": "/api/v1/nodes",
}


class Refused(Exception):
    """The API server has refused a call: its status, and its words."""

    def __init__(self, status, message):
        super().__init__(f"{status}: {message}")
        self.status, self.message = status, message


class Api:
    """An API server at an address, for the user of a token."""

    def __init__(self, address, token):
        self.address, self.token = address, token
        # The server has made its certificate itself, and no packet leaves the machine.
        self.context = ssl.create_default_context()
        self.context.check_hostname = False
        self.context.verify_mode = ssl.CERT_NONE

    def call(self, method, path, body=None, content="application/json"):
        """Returns the answer: an object of JSON, or the text of anything else."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": content}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, method=method, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, context=self.context, timeout=SECONDS) as answer:
                text = answer.read().decode()
                return json.loads(text) if answer.headers.get_content_type() == "application/json" else text
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            try:
                message = json.loads(text).get("message", text)
            except ValueError:
                message = text
            raise Refused(error.code, message) from None

    def answers(self):
        """Returns whether the server is ready."""
        try:
            return self.call("GET", "/readyz") == "ok"
        except (Refused, OSError, http.client.HTTPException):
            return False

    def create(self, thing, namespace, dry_run=False):
        """Creates an object, or only asks the server, admission included, what it would say."""
        path = PATHS[thing["kind"]].format(namespace=namespace)
        return self.call("POST", path + ("?dryRun=All" if dry_run else ""), thing)

    def get(self, kind, name, namespace=""):
        """Returns an object, None where there is none."""
        try:
            return self.call("GET", f"{PATHS[kind].format(namespace=namespace)}/{name}")
        except Refused as refused:
            if refused.status == 404:
                return None
            raise

    def list(self, kind, namespace="", **selectors):
        """Returns all objects of a kind: labelSelector= and fieldSelector= choose."""
        query = urllib.parse.urlencode(selectors)
        return self.call("GET", PATHS[kind].format(namespace=namespace) + (f"?{query}" if query else ""))["items"]

    def patch(self, kind, name, change, namespace=""):
        """Changes the keys of an object that the change has."""
        path = f"{PATHS[kind].format(namespace=namespace)}/{name}"
        return self.call("PATCH", path, change, content="application/strategic-merge-patch+json")

    def delete(self, kind, name, namespace="", seconds=None):
        """Deletes an object, with this time of grace; with 0 at once, whatever its node says. One that is gone is no error."""
        # A Deployment ends after its pods, so that it makes no other ones.
        options = {"propagationPolicy": "Background" if kind == "Pod" else "Foreground"}
        if seconds is not None:
            options["gracePeriodSeconds"] = seconds
        try:
            self.call("DELETE", f"{PATHS[kind].format(namespace=namespace)}/{name}", options)
        except Refused as refused:
            if refused.status != 404:
                raise

    def log(self, pod, namespace, container="main"):
        """Returns what a container has printed."""
        return self.call("GET", f"{PATHS['Pod'].format(namespace=namespace)}/{pod}/log?container={container}")
