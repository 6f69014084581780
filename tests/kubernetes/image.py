#!/usr/bin/python3
"""Writes an image with busybox alone, as `docker save` does: image.py NAME FILE"""

import hashlib
import io
import json
import shutil
import sys
import tarfile

name, file = sys.argv[1:]


def entry(tar, path, content, mode=0o644):
    one = tarfile.TarInfo(path)
    one.size, one.mode = len(content), mode
    tar.addfile(one, io.BytesIO(content))


layer = io.BytesIO()
with tarfile.open(fileobj=layer, mode="w") as tar, open(shutil.which("busybox"), "rb") as busybox:
    entry(tar, "bin/busybox", busybox.read(), 0o755)
    for program in ("sh", "sleep"):
        link = tarfile.TarInfo(f"bin/{program}")
        link.type, link.linkname = tarfile.SYMTYPE, "busybox"
        tar.addfile(link)
digest = hashlib.sha256(layer.getvalue()).hexdigest()
config = {
    "architecture": "amd64",
    "os": "linux",
    "config": {"Cmd": ["/bin/sleep", "1000000"]},
    "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
}
manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
with tarfile.open(file, "w") as tar:
    entry(tar, "config.json", json.dumps(config).encode())
    entry(tar, "layer.tar", layer.getvalue())
    entry(tar, "manifest.json", json.dumps(manifest).encode())
