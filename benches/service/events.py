"""What several programs say, with the time at which each line arrived. Nothing here looks again and again."""

import os
import select
import time
from typing import NamedTuple

from process import Unable


class Event(NamedTuple):
    time: int  # time.monotonic_ns
    source: str
    text: str


# The text of the last event of a source.
END = "(end)"


class Events:
    """All lines of all sources, in the order of their arrival."""

    def __init__(self):
        self.all = []
        self.poll = select.poll()
        self.sources = {}

    def add(self, source, descriptor, stamped=False):
        """Reads this pipe or datagram socket too. In a stamped source each line begins with its own time."""
        os.set_blocking(descriptor, False)
        self.poll.register(descriptor, select.POLLIN)
        self.sources[descriptor] = (source, stamped, b"")

    def first(self, start, wanted, seconds=60):
        """The first event for which `wanted` is true, of all events from number `start` on. Waits for it."""
        deadline = time.monotonic() + seconds
        while True:
            for event in self.all[start:]:
                start += 1
                if wanted(event):
                    return event
            left = deadline - time.monotonic()
            if left <= 0 or not self.sources:
                said = " | ".join(event.text for event in self.all[-3:])
                raise Unable(f"waited in vain for {seconds} s; the last lines are: {said}")
            self.take(left)

    def take(self, seconds):
        """Waits for the next lines. False if none came."""
        ready = self.poll.poll(seconds * 1000)
        now = time.monotonic_ns()
        for descriptor, _ in ready:
            self.read(descriptor, now)
        return bool(ready)

    def read(self, descriptor, now):
        source, stamped, rest = self.sources[descriptor]
        got = os.read(descriptor, 1 << 20)
        if not got:
            self.poll.unregister(descriptor)
            del self.sources[descriptor]
            self.all.append(Event(now, source, END))
            return
        # A datagram is complete without a newline.
        lines = (rest + got + (b"\n" if source == "notify" else b"")).split(b"\n")
        self.sources[descriptor] = (source, stamped, lines.pop())
        for line in lines:
            text = line.decode(errors="replace")
            at = now
            if stamped:
                at, _, text = text.partition(" ")
            self.all.append(Event(int(at), source, text))
