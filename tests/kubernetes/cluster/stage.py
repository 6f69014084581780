"""Writes the files that are laid over those of this host in the machine of the cluster: tests/e2e/boot.sh boots it."""

import pathlib
import shutil
import subprocess
import sys

import programs

HERE = pathlib.Path(__file__).resolve().parent

# The users of the API server: name of the kubeconfig, user, group, token. The only way to it is from the machine itself.
USERS = [
    ("admin", "admin", "system:masters", "token-of-admin"),
    ("controller-manager", "system:kube-controller-manager", "system:masters", "token-of-controller-manager"),
    ("scheduler", "system:kube-scheduler", "system:masters", "token-of-scheduler"),
    ("kubelet", "system:node:gpu1", "system:nodes", "token-of-kubelet"),
]

# The API server makes its own certificate at its first start.
KUBECONFIG = """apiVersion: v1
kind: Config
clusters:
- name: cluster
  cluster: {{server: "https://127.0.0.1:6443", insecure-skip-tls-verify: true}}
users:
- name: user
  user: {{token: {token}}}
contexts:
- name: context
  context: {{cluster: cluster, user: user}}
current-context: context
"""

# The manifests that the trials apply, in the documentation.
MANIFESTS = ["policy.yaml", "runtime-class.yaml", "vllm.yaml"]


def write_files(stage):
    """Writes everything that needs no program: units, configuration, the manifests of the documentation, the trials."""
    shutil.copytree(HERE / "root", stage, symlinks=True, dirs_exist_ok=True)
    kubernetes = stage / "etc" / "kubernetes"
    tokens = [f'{token},{user},{name},"{group}"\n' for name, user, group, token in USERS]
    (kubernetes / "tokens.csv").write_text("".join(tokens))
    for name, _, _, token in USERS:
        (kubernetes / f"{name}.conf").write_text(KUBECONFIG.format(token=token))
    # The folder where containerd looks for plugins of the network.
    plugins = stage / "opt" / "cni" / "bin"
    plugins.parent.mkdir(parents=True)
    plugins.symlink_to("/opt/kubernetes")
    journey = stage / "opt" / "cluster"
    shutil.copytree(HERE / "journey", journey / "journey", ignore=shutil.ignore_patterns("__pycache__"))
    (journey / "manifests").mkdir()
    for name in MANIFESTS:
        shutil.copy(programs.SOURCES / "docs" / "kubernetes" / name, journey / "manifests" / name)


def add_programs(stage):
    """Adds the simulated host, the image of the pods, the packages, and the key that signs the tokens of service accounts."""
    simulated = stage / "usr" / "lib" / "simulated"
    simulated.mkdir(parents=True)
    for name in [*programs.SIMULATED, programs.LIBRARY]:
        # Without the symbols, which are most of it.
        call("install", "-s", "-m", "755", programs.built(name), simulated / name)
    cluster = stage / "opt" / "cluster"
    image = HERE.parent / "image.py"
    client = simulated / "cuda-client"
    call(sys.executable, image, "docker.io/library/cuda:1", cluster / "image.tar", client)
    for name in programs.PACKAGES:
        shutil.copy(programs.package(name), cluster / f"{name}.deb")
    keys = stage / "etc" / "kubernetes" / "pki"
    keys.mkdir()
    call("openssl", "genrsa", "-out", keys / "sa.key", "2048")
    call("openssl", "rsa", "-in", keys / "sa.key", "-pubout", "-out", keys / "sa.pub")


def call(*words):
    """Runs a program, and ends with its complaint where it fails."""
    ended = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        sys.exit(f"{words[0]} {words[1]}: {ended.stderr}{ended.stdout}")
