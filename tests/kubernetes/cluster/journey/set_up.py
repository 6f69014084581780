"""Makes a node of the machine: the simulated host, the packages, the control plane, the image of all pods."""

import pathlib

import node
from cluster import SLICES, Cluster
from objects import NAMESPACE, namespace
from wait import wait_for

HERE = pathlib.Path(__file__).parent.parent
HOST = "/srv/host"
HOST_CONF = pathlib.Path(HOST, "sysroot/etc/yunion/host.conf")
# A boot of the control plane takes longer than all else, in multiples of the usual time.
BOOT = 3


def set_up():
    """Takes the machine from its first boot to a node that offers slices."""
    install_service()
    start_containerd()
    start_cluster()


def install_service():
    """Installs both packages on a simulated host, by docs/kubernetes.md."""
    node.run("/usr/lib/simulated/yunion-mps-sim", "create", "h200", HOST)
    with open(HOST_CONF, "a") as conf:
        # The line that docs/kubernetes.md asks for.
        conf.write("cuda_mps_cdi_directory: /var/run/cdi\n")
    packages = sorted(str(path) for path in HERE.glob("*.deb"))
    node.run("apt-get", "install", "--yes", "--no-install-recommends", *packages)
    enable("nvidia-cdi-refresh", "yunion-mps-daemon", "yunion-mps-device-plugin")
    node.run("yunion-mpsctl", "is-ready", "--wait", "60")
    wait_for("the CDI spec of the slices", pathlib.Path("/var/run/cdi/yunion.io-mps.json").exists)


def start_containerd():
    """Starts containerd, and gives it the image of all pods."""
    enable("node-prepare", "containerd")
    image = str(HERE / "image.tar")
    node.run("ctr", "--namespace=k8s.io", "images", "import", "--local", "--snapshotter=native", image)


def start_cluster():
    """Starts the control plane and the kubelet, and makes the namespace of the trials."""
    enable("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
    cluster = Cluster()
    wait_for("the API server", cluster.api.answers, times=BOOT)
    cluster.api.create(namespace(NAMESPACE), "")
    wait_until_ready(cluster)
    versions = ["kubelet --version", "containerd --version", "runc --version", "etcd --version"]
    for version in versions:
        print("  " + node.run(*version.split()).splitlines()[0])


def enable(*units):
    node.run("systemctl", "daemon-reload")
    node.run("systemctl", "enable", "--now", *units)


def wait_until_ready(cluster):
    """Waits until the node takes pods with slices."""
    wait_for("the API server", cluster.api.answers, times=BOOT)

    def ready():
        found = cluster.api.get("Node", node.NODE)
        conditions = found["status"].get("conditions", []) if found else []
        return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)

    wait_for("a node that is Ready", ready, times=BOOT)
    # No pod is made without it.
    wait_for("the service account", lambda: cluster.api.get("ServiceAccount", "default", NAMESPACE))
    cluster.wait_for_registration()
    cluster.wait_for_allocatable(SLICES)
