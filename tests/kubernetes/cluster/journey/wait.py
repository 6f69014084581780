"""How a trial fails, and how it waits: for a condition with a deadline, never for a guessed time."""

import time

# A busy machine starts a pod in seconds, and the kubelet reports its node's numbers every 10 seconds.
SECONDS = 120
PAUSE = 0.1


class Failed(Exception):
    """Something that has to hold does not."""


def wait_for(what, condition, why=lambda: "", times=1):
    """Returns the first true value of the condition. `why` explains where there is none in so many times the usual time."""
    seconds = SECONDS * times
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise Failed(f"{what}: not within {seconds} s. {why()}".rstrip())
        time.sleep(PAUSE)


def same(what, found, expected):
    """Holds that a value is the expected one, and says so."""
    if found != expected:
        raise Failed(f"{what}: {found!r}, not {expected!r}")
    print(f"  {what}: {found!r}", flush=True)


def holds(what, fact, otherwise):
    """Holds a fact, and says so; `otherwise` is what was found instead."""
    if not fact:
        raise Failed(f"{what} does not hold: {otherwise}")
    print(f"  {what}", flush=True)
