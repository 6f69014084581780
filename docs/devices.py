#!/usr/bin/python3
"""Prints the slices of this host, and prints them again whenever they change. Waits for the service where it is not there."""
import sys

import dbus
import dbus.mainloop.glib
from gi.repository import GLib

NAME, PATH, MANAGER = "io.yunion.Mps1", "/io/yunion/Mps1/Manager", "io.yunion.Mps1.Manager"
# Both end by themselves, and a signal tells of it: State changes, or the name gets an owner.
WAIT = ("io.yunion.Mps1.Error.NotReady", "org.freedesktop.DBus.Error.ServiceUnknown")

dbus.mainloop.glib.DBusGMainLoop(set_as_default=True)
bus = dbus.SystemBus()

shown = None

def line(device):
    # An unknown value has no key, so such keys are read with get.
    health = "healthy" if device["healthy"] else "not healthy: " + device["reason"]
    return f"{device['addr']} {device.get('device_path', '-')} {device.get('mps_memory_limit', '-')} MiB {health}\n"

def show(devices):
    global shown
    lines = "".join(map(line, devices))
    if lines != shown:
        print(lines, flush=True)
    shown = lines

def failed(error):
    print(error.get_dbus_message(), file=sys.stderr, flush=True)
    # For example NoReply: the service has other things to do. An error never means that there is no slice.
    if error.get_dbus_name() not in WAIT:
        GLib.timeout_add_seconds(1, ask)

def ask(*_):
    bus.call_async(NAME, PATH, MANAGER, "ListDevices", "", (), show, failed, timeout=5)

# The sender is named: any user can send a signal, but not as the owner of this name.
bus.add_signal_receiver(ask, "DevicesChanged", MANAGER, NAME, PATH)
bus.add_signal_receiver(ask, "PropertiesChanged", "org.freedesktop.DBus.Properties", NAME, PATH)
# Calls ask at once, and again whenever the service starts or ends.
bus.watch_name_owner(NAME, ask)
GLib.MainLoop().run()
