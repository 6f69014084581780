#!/usr/bin/env python3
"""Runs a command in the sandbox that a systemd unit describes, on a host that has no systemd: what control daemons and
servers have to live with, tried on a real GPU.

    sandbox.py UNIT SYSTEM-CALLS COMMAND...

SYSTEM-CALLS is what `systemd-analyze syscall-filter` prints. Needs root, setpriv, and the Python module pyseccomp (or
seccomp, as distributions call it). What was applied, and what could not be, is said on stderr. Not applied: the
directives that work through control groups (DeviceAllow=, IPAddressDeny=), and directives that only restate another one.
"""

import ctypes
import errno
import os
import subprocess
import sys

try:
    import pyseccomp as seccomp
except ImportError:
    import seccomp

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_SLAVE = 0x1, 0x20, 0x1000, 0x4000, 0x80000
CLONE_NEWNS = 0x00020000
# cgroup, uts, ipc, user, pid, net, mount
CLONE_NAMESPACES = 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | CLONE_NEWNS
FAMILIES = {"AF_UNIX": 1, "AF_NETLINK": 16}

libc = ctypes.CDLL(None, use_errno=True)


def say(text):
    print(f"sandbox: {text}", file=sys.stderr)


def read_unit(path):
    settings = {}
    for line in open(path, encoding="utf-8"):
        key, found, value = line.strip().partition("=")
        if found and not key.startswith("#"):
            settings.setdefault(key, []).extend(value.split())
    return settings


def read_groups(path):
    groups, name = {}, None
    for line in open(path, encoding="utf-8"):
        word = line.split("#")[0].strip()
        if word.startswith("@") and not line.startswith(" "):
            name = word
        elif word and name:
            groups.setdefault(name, []).append(word)
    return groups


def mount(source, target, kind, flags):
    done = libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, flags, None)
    if done != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), target)


def below(path, directories):
    return any(path == one or path.startswith(one + "/") for one in directories)


def protect_files(settings):
    if libc.unshare(CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    mount("none", "/", None, MS_REC | MS_SLAVE)
    writable = settings.get("ReadWritePaths", [])
    for path in writable:
        mount(path, path, None, MS_BIND | MS_REC)
    # As ProtectSystem=strict says: everything but these.
    spared = writable + ["/dev", "/proc", "/sys"]
    points = [line.split()[4] for line in open("/proc/self/mountinfo", encoding="utf-8")]
    if settings.get("ProtectKernelTunables") == ["yes"]:
        points += ["/sys", "/proc/sys"]
        mount("/proc/sys", "/proc/sys", None, MS_BIND)
        spared = writable + ["/dev", "/proc"]
    for point in points:
        if not below(point, spared) or point == "/proc/sys":
            mount("none", point, None, MS_REMOUNT | MS_BIND | MS_RDONLY)
    if settings.get("ProtectHome") == ["yes"]:
        for path in ["/home", "/root"]:
            mount("tmpfs", path, "tmpfs", MS_RDONLY)
    say(f"files: only {' '.join(writable)} can be written; no homes")


def filter_calls(settings, groups):
    calls = seccomp.SyscallFilter(defaction=seccomp.ALLOW)
    denied = seccomp.ERRNO(errno.EPERM)
    names = []
    for word in settings.get("SystemCallFilter", []):
        word = word.lstrip("~")
        names += groups[word] if word.startswith("@") else [word]
    count = 0
    for name in names:
        try:
            calls.add_rule(denied, name)
            count += 1
        except (OSError, ValueError, RuntimeError):
            pass  # not on this architecture
    if settings.get("RestrictNamespaces") == ["yes"]:
        calls.add_rule(denied, "unshare")
        calls.add_rule(denied, "setns")
        for bit in range(32):
            if CLONE_NAMESPACES & (1 << bit):
                calls.add_rule(denied, "clone", seccomp.Arg(0, seccomp.MASKED_EQ, 1 << bit, 1 << bit))
        calls.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    families = sorted(FAMILIES[word] for word in settings.get("RestrictAddressFamilies", []))
    if families:
        refused = seccomp.ERRNO(errno.EAFNOSUPPORT)
        for family in range(families[-1]):
            if family not in families:
                calls.add_rule(refused, "socket", seccomp.Arg(0, seccomp.EQ, family))
        calls.add_rule(refused, "socket", seccomp.Arg(0, seccomp.GT, families[-1]))
    if settings.get("RestrictRealtime") == ["yes"]:
        for policy in [1, 2, 6]:
            calls.add_rule(denied, "sched_setscheduler", seccomp.Arg(1, seccomp.EQ, policy))
    if settings.get("RestrictSUIDSGID") == ["yes"]:
        for bit in [0o4000, 0o2000]:
            for name, position in [("chmod", 1), ("fchmod", 1), ("fchmodat", 2), ("mkdir", 1), ("mkdirat", 2)]:
                calls.add_rule(denied, name, seccomp.Arg(position, seccomp.MASKED_EQ, bit, bit))
    calls.load()
    say(f"system calls: {count} denied; address families {families}; namespaces, realtime, set-UID as the unit says")


def main():
    unit, system_calls, command = sys.argv[1], sys.argv[2], sys.argv[3:]
    settings = read_unit(unit)
    try:
        protect_files(settings)
    except OSError as error:
        say(f"files NOT protected: {error}")
    try:
        filter_calls(settings, read_groups(system_calls))
    except (OSError, RuntimeError) as error:
        say(f"system calls NOT filtered: {error}")
    words = ["setpriv", "--inh-caps=-all"]
    if settings.get("NoNewPrivileges") == ["yes"]:
        words.append("--no-new-privs")
    capabilities = [word.removeprefix("CAP_").lower() for word in settings.get("CapabilityBoundingSet", [])]
    if capabilities:
        words.append("--bounding-set=-all," + ",".join(f"+{word}" for word in capabilities))
    say(f"privileges: {' '.join(words[1:])}")
    os.execvp(words[0], words + command)


main()
