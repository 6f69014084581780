#!/usr/bin/python3
"""Plays the kubelet for a device plugin: kubelet.py MESSAGES DIRECTORY [leave]

With gRPC's own C library and Google's protobuf, which share no code with the plugin's. MESSAGES is the folder with what protoc
has made of Kubernetes' own descriptions, DIRECTORY stands for /var/lib/kubelet. With "leave" it removes no
socket of a plugin when it starts.

Each line on standard output is a JSON object about something that has happened, or the answer to a line on standard input:
  {"call": "allocate", "resource": R, "containers": [[NAME, ...], ...]}
  {"call": "preferred", "resource": R, "available": [...], "must": [...], "size": N}
  {"call": "pods", "given": {R: [NAME, ...]}}   from now on pods have these devices
  {"call": "path", "resource": R, "path": P}    a call with an empty message
It ends with its standard input.
"""

import json
import os
import pathlib
import sys
import threading
from concurrent import futures

messages, directory = (pathlib.Path(word) for word in sys.argv[1:3])
leave = sys.argv[3:] == ["leave"]
sys.path.insert(0, str(messages))

import grpc  # noqa: E402
import deviceplugin_pb2 as message  # noqa: E402
import podresources_pb2 as pods_message  # noqa: E402

PLUGINS = directory / "device-plugins"
PODS = directory / "pod-resources"
PLUGIN = "/v1beta1.DevicePlugin/"
DEADLINE = 30

lock = threading.Lock()
channels = {}
given = {}


def say(**what):
    with lock:
        print(json.dumps(what), flush=True)


def handler(kind, called):
    return grpc.unary_unary_rpc_method_handler(
        called, request_deserializer=kind.FromString, response_serializer=lambda answer: answer.SerializeToString()
    )


def serve(socket, name, handlers):
    socket.parent.mkdir(parents=True, exist_ok=True)
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
            say(event="devices", resource=resource, devices=rows)
        say(event="gone", resource=resource, code="OK")
    except grpc.RpcError as error:
        say(event="gone", resource=resource, code=error.code().name)


def pods(_request, _context):
    containers = [
        pods_message.ContainerResources(
            name="main", devices=[pods_message.ContainerDevices(resource_name=resource, device_ids=names)]
        )
        for resource, names in given.items()
    ]
    say(event="asked for pods")
    pod = pods_message.PodResources(name="job", namespace="default", containers=containers)
    return pods_message.ListPodResourcesResponse(pod_resources=[pod])


def allocate(channel, line):
    wanted = [message.ContainerAllocateRequest(devices_ids=names) for names in line["containers"]]
    question = message.AllocateRequest(container_requests=wanted)
    answer = unary(channel, PLUGIN + "Allocate", question, message.AllocateResponse)
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


def preferred(channel, line):
    wish = message.ContainerPreferredAllocationRequest(
        available_deviceIDs=line["available"], must_include_deviceIDs=line["must"], allocation_size=line["size"]
    )
    question = message.PreferredAllocationRequest(container_requests=[wish])
    answer = unary(
        channel, PLUGIN + "GetPreferredAllocation", question, message.PreferredAllocationResponse
    )
    return [list(one.deviceIDs) for one in answer.container_responses]


def path(channel, line):
    unary(channel, line["path"], message.Empty(), message.Empty)
    return None


CALLS = {"allocate": allocate, "preferred": preferred, "path": path}


def obey(line):
    if line["call"] == "pods":
        given.clear()
        given.update(line["given"])
        return say(answer=None)
    try:
        say(answer=CALLS[line["call"]](channels[line["resource"]], line))
    except grpc.RpcError as error:
        say(error={"code": error.code().name, "text": error.details()})


def main():
    PLUGINS.mkdir(parents=True, exist_ok=True)
    # A kubelet that starts removes the sockets of all plugins.
    for left in PLUGINS.iterdir():
        if not leave or left.name == "kubelet.sock":
            left.unlink()
    (PODS / "kubelet.sock").unlink(missing_ok=True)
    servers = [
        serve(PODS / "kubelet.sock", "v1.PodResourcesLister", {"List": handler(pods_message.ListPodResourcesRequest, pods)}),
        serve(PLUGINS / "kubelet.sock", "v1beta1.Registration", {"Register": handler(message.RegisterRequest, register)}),
    ]
    say(event="started")
    for line in sys.stdin:
        obey(json.loads(line))
    del servers
    # As a kubelet that is killed: nothing is closed, and nothing removed.
    os._exit(0)


main()
