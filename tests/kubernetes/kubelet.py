#!/usr/bin/python3
"""Plays the kubelet for a device plugin: kubelet.py MESSAGES DIRECTORY [--leave] [--hang] [--deaf] [--period SECONDS]

With gRPC's own C library and Google's protobuf, which share no code with the plugin's. MESSAGES is the folder with what protoc
has made of Kubernetes' own descriptions, DIRECTORY stands for /var/lib/kubelet. A kubelet that starts removes all sockets of
plugins, and then listens.
  --leave   it removes no socket of a plugin
  --hang    it takes registrations and never answers, and removes the socket of the plugin at the first one
  --deaf    it answers registrations, and never asks for the list of devices, as a kubelet before 1.26
  --period  the time from one publication of the node's numbers to the next (10)

Each line on standard output is a JSON object about something that has happened, or the answer to a line on standard input:
  {"call": "admit", "pod": P, "containers": [{"name": N, "init": false, "resource": R, "number": N}, ...]}
                                  a new pod: the devices of its containers, and their settings
  {"call": "admit again", "running": {P: [NAME, ...]}}
                                  as after a start of the kubelet, with the containers that run: why pods are rejected, by pod
  {"call": "ended", "pod": P}     the containers of the pod are gone, or it was deleted by force: its devices are free
  {"call": "given"}               the pod and the containers that have each device, by resource
  {"call": "allocate", "resource": R, "containers": [[NAME, ...], ...]}
  {"call": "preferred", "resource": R, "available": [...], "must": [...], "size": N}
  {"call": "path", "resource": R, "path": P}    a call with an empty message
It ends with its standard input. What it has given to pods outlasts it.
"""

import argparse
import json
import os
import pathlib
import sys
import threading
import time
from concurrent import futures

from device_manager import DeviceManager, Rejected

parser = argparse.ArgumentParser()
parser.add_argument("messages", type=pathlib.Path)
parser.add_argument("directory", type=pathlib.Path)
parser.add_argument("--leave", action="store_true")
parser.add_argument("--hang", action="store_true")
parser.add_argument("--deaf", action="store_true")
parser.add_argument("--period", type=float, default=10)
choices = parser.parse_args()
sys.path.insert(0, str(choices.messages))

import grpc  # noqa: E402
import deviceplugin_pb2 as message  # noqa: E402

PLUGINS = choices.directory / "device-plugins"
PLUGIN = "/v1beta1.DevicePlugin/"
DEADLINE = 30

lock = threading.Lock()
channels = {}
hanging = []


def say(**what):
    with lock:
        print(json.dumps(what), flush=True)


def handler(kind, called):
    return grpc.unary_unary_rpc_method_handler(
        called, request_deserializer=kind.FromString, response_serializer=lambda answer: answer.SerializeToString()
    )


def serve(socket, name, handlers):
    server = grpc.server(futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    return server


def unary(channel, path, question, answer):
    call = channel.unary_unary(
        path, request_serializer=lambda sent: sent.SerializeToString(), response_deserializer=answer.FromString
    )
    return call(question, timeout=DEADLINE)


def in_words(options):
    return {"preferred": options.get_preferred_allocation_available, "pre_start": options.pre_start_required}


def register(request, context):
    """As the kubelet does: it connects before it answers."""
    if request.version != "v1beta1":
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"version {request.version!r}")
    socket = PLUGINS / request.endpoint
    if choices.hang:
        if not hanging:
            socket.unlink()
        hanging.append(context)
        say(event="hangs", resource=request.resource_name)
        threading.Event().wait()
    # The kubelet gives this authority since 1.26.
    channel = grpc.insecure_channel(f"unix:{socket}", options=[("grpc.default_authority", "localhost")])
    grpc.channel_ready_future(channel).result(DEADLINE)
    options = unary(channel, PLUGIN + "GetDevicePluginOptions", message.Empty(), message.DevicePluginOptions)
    say(
        event="registered",
        resource=request.resource_name,
        endpoint=request.endpoint,
        told=in_words(request.options),
        options=in_words(options),
    )
    channels[request.resource_name] = channel
    if not choices.deaf:
        threading.Thread(target=watch, args=(request.resource_name, channel), daemon=True).start()
    return message.Empty()


def watch(resource, channel):
    listed = channel.unary_stream(
        PLUGIN + "ListAndWatch",
        request_serializer=lambda sent: sent.SerializeToString(),
        response_deserializer=message.ListAndWatchResponse.FromString,
    )
    try:
        for devices in listed(message.Empty()):
            rows = [
                {"id": one.ID, "health": one.health, "numa": [node.ID for node in one.topology.nodes]}
                for one in devices.devices
            ]
            manager.listed(resource, {row["id"]: row["health"] == "Healthy" for row in rows})
            say(event="devices", resource=resource, devices=rows)
        code = "OK"
    except grpc.RpcError as error:
        code = error.code().name
    # Otherwise the plugin has registered again, and that list counts.
    if channels[resource] is channel:
        manager.gone(resource)
    say(event="gone", resource=resource, code=code)


def publish():
    """Tells the scheduler of the node's numbers, where they have changed."""
    published = None
    while True:
        numbers = manager.numbers()
        if numbers != published:
            say(event="node", **numbers)
            published = numbers
        time.sleep(choices.period)


def settings(resource, containers):
    """The settings that the plugin gives to containers with these devices."""
    wanted = [message.ContainerAllocateRequest(devices_ids=names) for names in containers]
    question = message.AllocateRequest(container_requests=wanted)
    answer = unary(channels[resource], PLUGIN + "Allocate", question, message.AllocateResponse)
    return [
        {
            "environment": dict(one.envs),
            "mounts": [{"container": m.container_path, "host": m.host_path, "read_only": m.read_only} for m in one.mounts],
            "nodes": [
                {"container": n.container_path, "host": n.host_path, "permissions": n.permissions} for n in one.devices
            ],
            "cdi": [device.name for device in one.cdi_devices],
        }
        for one in answer.container_responses
    ]


def prefer(resource, available, must, number):
    wish = message.ContainerPreferredAllocationRequest(
        available_deviceIDs=available, must_include_deviceIDs=must, allocation_size=number
    )
    question = message.PreferredAllocationRequest(container_requests=[wish])
    answer = unary(
        channels[resource], PLUGIN + "GetPreferredAllocation", question, message.PreferredAllocationResponse
    )
    return list(answer.container_responses[0].deviceIDs)


def allocate(resource, names):
    try:
        return settings(resource, [names])[0]
    except grpc.RpcError as error:
        code = "".join(word.title() for word in error.code().name.split("_"))
        raise Rejected(f"rpc error: code = {code} desc = {error.details()}") from error


def in_kubelets_words(why):
    return f"Allocate failed due to {why}, which is unexpected"


def admit(line):
    given, answers = manager.admit(line["pod"], line["containers"])
    return {
        container: {"devices": names, "settings": answers[container]}
        for container, devices in given.items()
        for names in devices.values()
    }


def admit_again(line):
    rejected = manager.admit_again(line["running"])
    return {pod: f"Pod was rejected: {in_kubelets_words(why)}" for pod, why in rejected.items()}


def path(line):
    unary(channels[line["resource"]], line["path"], message.Empty(), message.Empty)


CALLS = {
    "admit": admit,
    "admit again": admit_again,
    "ended": lambda line: manager.ended(line["pod"]),
    "given": lambda line: manager.given(),
    "allocate": lambda line: settings(line["resource"], line["containers"]),
    "preferred": lambda line: prefer(line["resource"], line["available"], line["must"], line["size"]),
    "path": path,
}


def obey(line):
    try:
        say(answer=CALLS[line["call"]](line))
    except Rejected as why:
        say(error={"code": "UnexpectedAdmissionError", "text": in_kubelets_words(why)})
    except grpc.RpcError as error:
        say(error={"code": error.code().name, "text": error.details()})


def main():
    PLUGINS.mkdir(parents=True, exist_ok=True)
    # Its own first: a plugin may look before those of the plugins have gone.
    for left in sorted(PLUGINS.iterdir(), key=lambda one: one.name != "kubelet.sock"):
        if not choices.leave or left.name == "kubelet.sock":
            left.unlink()
    handlers = {"Register": handler(message.RegisterRequest, register)}
    server = serve(PLUGINS / "kubelet.sock", "v1beta1.Registration", handlers)
    threading.Thread(target=publish, daemon=True).start()
    say(event="started")
    for line in sys.stdin:
        obey(json.loads(line))
    del server
    # As a kubelet that is killed: nothing is closed, and nothing removed.
    os._exit(0)


manager = DeviceManager(choices.directory / "checkpoint", prefer, allocate)
main()
