#!/usr/bin/python3
"""Writes an image with busybox, as `docker save` does: image.py NAME FILE [PROGRAM ...]

The programs are in /bin, with the libraries that they are linked with.
"""

import hashlib
import io
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile

name, file, *programs = sys.argv[1:]


def entry(tar, path, content, mode=0o644):
    one = tarfile.TarInfo(path)
    one.size, one.mode = len(content), mode
    tar.addfile(one, io.BytesIO(content))


def libraries(program):
    """The files that the dynamic linker would load, and the linker itself."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return re.findall(r"(/\S+) \(0x", listed)


layer = io.BytesIO()
with tarfile.open(fileobj=layer, mode="w") as tar:
    entry(tar, "bin/busybox", pathlib.Path(shutil.which("busybox")).read_bytes(), 0o755)
    for applet in ("sh", "sleep", "true"):
        link = tarfile.TarInfo(f"bin/{applet}")
        link.type, link.linkname = tarfile.SYMTYPE, "busybox"
        tar.addfile(link)
    for program in programs:
        entry(tar, f"bin/{pathlib.Path(program).name}", pathlib.Path(program).read_bytes(), 0o755)
    for library in sorted({library for program in programs for library in libraries(program)}):
        entry(tar, library.lstrip("/"), pathlib.Path(library).read_bytes(), 0o755)
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
