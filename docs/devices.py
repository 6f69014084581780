#!/usr/bin/python3
"""Prints the virtual devices of this host, and prints them again whenever they change."""
import dbus
import dbus.mainloop.glib
from gi.repository import GLib

dbus.mainloop.glib.DBusGMainLoop(set_as_default=True)
bus = dbus.SystemBus()

def show(generation=None):
    proxy = bus.get_object("io.yunion.Mps1", "/io/yunion/Mps1/Manager", follow_name_owner_changes=True)
    for device in dbus.Interface(proxy, "io.yunion.Mps1.Manager").ListDevices():
        # An unknown value has no key, so such keys are read with get.
        health = "healthy" if device["healthy"] else "not healthy: " + device["reason"]
        print(device["addr"], device.get("device_path", "-"), device.get("mps_memory_limit", "-"), "MiB", health)
    print(flush=True)

bus.add_signal_receiver(show, "DevicesChanged", "io.yunion.Mps1.Manager", path="/io/yunion/Mps1/Manager")
show()
GLib.MainLoop().run()
