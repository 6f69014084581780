"""The programs and packages of the cluster, their origins, and which of them are missing."""

import os
import pathlib
import shutil

SOURCES = pathlib.Path(__file__).resolve().parents[3]

# The programs in the folder KUBERNETES, by their origin. They are any that fit together: Kubernetes says which versions do.
UPSTREAM = {
    "the server binaries of a release of Kubernetes": [
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "kubelet",
        "kubectl",
    ],
    "a release of etcd": ["etcd"],
    "a release of containerd, 2.1 or newer": ["containerd", "containerd-shim-runc-v2", "ctr"],
    "a release of runc": ["runc"],
    "a release of the CNI project's plugins": ["bridge", "host-local", "loopback"],
}

# The programs of the simulated host, which cargo builds.
SIMULATED = ["yunion-mps-sim", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-smi", "cuda-client"]
LIBRARY = "libnvidia_ml.so"

PACKAGES = ["yunion-mps-daemon", "yunion-mps-device-plugin"]


def upstream_folder():
    """The folder that KUBERNETES names, if any."""
    named = os.environ.get("KUBERNETES")
    return pathlib.Path(named).resolve() if named else None


def packages_folder():
    """The folder of the packages: that of make deb, unless PACKAGES names another one."""
    return pathlib.Path(os.environ.get("PACKAGES") or SOURCES / "dist")


def package(name):
    """The path of a package, None where there is not exactly one."""
    found = list(packages_folder().glob(f"{name}_*.deb"))
    return found[0] if len(found) == 1 else None


def built(name):
    """A program or library that cargo has built for the tests. cargo leaves a library in deps alone at times, and a copy there is
    never older."""
    folder = SOURCES / "target" / "debug"
    inner = folder / "deps" / name
    return inner if name == LIBRARY and inner.exists() else folder / name


def missing_upstream(folder):
    """A line for each origin of which a program is not in the folder."""
    if folder is None:
        programs = ", ".join(name for names in UPSTREAM.values() for name in names)
        origins = "; ".join(UPSTREAM)
        return [
            "KUBERNETES names no folder: make cluster KUBERNETES=DIRECTORY, with these programs in DIRECTORY: "
            f"{programs}. The projects publish them, for this machine's architecture: {origins}"
        ]
    lines = []
    for origin, names in UPSTREAM.items():
        absent = [name for name in names if not os.access(folder / name, os.X_OK)]
        if absent:
            lines.append(f"{folder} has no program {', '.join(absent)}: they are in {origin}")
    return lines


def missing_of_host():
    """A line for each thing that this host lacks."""
    folder = packages_folder()
    lines = [f"{folder} has not exactly one {name}_*.deb: make deb" for name in PACKAGES if package(name) is None]
    # scripts/deps.sh looks for all other programs.
    if shutil.which("openssl") is None:
        lines.append("openssl is missing (Debian: openssl)")
    if os.geteuid() != 0:
        lines.append("only root can boot a machine")
    return lines
