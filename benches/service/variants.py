"""The programs that are measured: the present ones, those of a base commit, and another daemon."""

import os
import pathlib
import subprocess
from typing import NamedTuple, Optional

from host import REPOSITORY


class Variant(NamedTuple):
    name: str
    daemon: pathlib.Path
    ctl: Optional[pathlib.Path]
    # The text in the log that shows that a daemon is ready if it has neither READY=1 nor the D-Bus interface of this service.
    ready: Optional[str] = None


class Tools(NamedTuple):
    """What the measurement itself uses, the same for all variants."""

    simulator: pathlib.Path
    # The program that asks a service if it is ready.
    ctl: pathlib.Path
    bus: pathlib.Path
    # The seconds for which an idle service writes nothing.
    quiet: float


def tools(binaries, directory, quiet):
    """Compiles the client for the bus."""
    bus = directory / "bus"
    source = pathlib.Path(__file__).parent / "bus.c"
    if not bus.exists() or bus.stat().st_mtime < source.stat().st_mtime:
        subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-o", bus, source, "-lsystemd"], check=True)
    return Tools(binaries / "yunion-mps-sim", binaries / "yunion-mpsctl", bus, quiet)


def of_folder(name, binaries):
    return Variant(name, binaries / "yunion-mps-daemon", binaries / "yunion-mpsctl")


def base(revision, directory):
    """Builds a revision in a work tree of its own, unless its programs are there already."""
    git = ["git", "-C", REPOSITORY]
    commit = subprocess.run(
        [*git, "rev-parse", "--verify", f"{revision}^{{commit}}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    programs = directory / "base" / commit
    if not (programs / "yunion-mpsctl").exists():
        tree = directory / "base" / "tree"
        subprocess.run([*git, "worktree", "add", "--force", "--detach", tree, commit], check=True)
        try:
            # The build folder stays, so that the next base has little to build.
            target = directory / "base" / "target"
            environment = {**os.environ, "CARGO_TARGET_DIR": target}
            build = ["cargo", "build", "--release", "--locked", "--workspace", "--bins"]
            subprocess.run(build, cwd=tree, env=environment, check=True)
            programs.mkdir(parents=True, exist_ok=True)
            for program in ("yunion-mps-daemon", "yunion-mpsctl"):
                (target / "release" / program).rename(programs / program)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", tree], check=True)
    return of_folder("base", programs)


def peer(program, ready):
    return Variant("peer", pathlib.Path(program).resolve(), None, ready)
