"""Plays the kubelet for plugin.sh: plugin.py MESSAGES KUBELET-DIRECTORY. It prints a word and its value for each thing to see."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

here = pathlib.Path(__file__).resolve().parent

kubelet = subprocess.Popen(
    [sys.executable, here.parent / "kubernetes" / "kubelet.py", *sys.argv[1:]],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
)


def wait(says):
    for line in kubelet.stdout:
        event = json.loads(line)
        if says(event):
            return event
    sys.exit("the kubelet has ended")


def devices(healthy):
    """The list in which so many are healthy."""

    def says(event):
        return event.get("event") == "devices" and healthy == sum(
            one["health"] == "Healthy" for one in event["devices"]
        )

    return wait(says)


def timed(what, act, healthy):
    begun = time.monotonic()
    act()
    found = devices(healthy)
    print(f"{what}-after-ms {(time.monotonic() - begun) * 1000:.0f}", flush=True)
    return found


def mpsctl(*words):
    return subprocess.run(["yunion-mpsctl", *words], check=True, capture_output=True, text=True, timeout=60).stdout


def kill_control_daemon():
    os.kill(json.loads(mpsctl("status", "--json"))["control_daemons"][0]["pid"], signal.SIGKILL)


found = devices(4)
print("healthy", len(found["devices"]))
resource, own = found["resource"], found["devices"][1]["id"]
print("resource", resource)
print("slice", own, flush=True)
call = {"call": "allocate", "resource": resource, "containers": [[own]]}
kubelet.stdin.write(json.dumps(call) + "\n")
kubelet.stdin.flush()
settings = wait(lambda event: "answer" in event or "error" in event)["answer"][0]
print("settings", json.dumps(settings))

# Without a container the places of the mounts are the places on the host.
environment = dict(settings["environment"])
for mount in settings["mounts"]:
    for name, value in environment.items():
        if value == mount["container"] or value.startswith(mount["container"] + "/"):
            environment[name] = value.replace(mount["container"], mount["host"], 1)
# NVIDIA's runtime would act on it.
environment.pop("NVIDIA_VISIBLE_DEVICES", None)
subprocess.run([sys.executable, here / "recipes.py", "1"], env={**os.environ, **environment}, timeout=120)

drained = timed("drained", lambda: mpsctl("drain", own), 3)
print("drained", sum(one["health"] != "Healthy" for one in drained["devices"]))
timed("undrained", lambda: mpsctl("undrain", own), 4)
killed = timed("killed", kill_control_daemon, 0)
print("killed", len(killed["devices"]), flush=True)
print("served-again", len(timed("served-again", lambda: None, 4)["devices"]))
kubelet.stdin.close()
kubelet.wait(10)
