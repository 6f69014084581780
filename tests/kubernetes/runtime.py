#!/usr/bin/python3
"""Asks a container runtime for pods as the kubelet does (CRI): runtime.py MESSAGES SOCKET CGROUP-PARENT

MESSAGES is the folder with what protoc has made of Kubernetes' own descriptions. Each line on standard input is a JSON object:
  {"call": "start", "pod": NAME, "handler": RUNTIME, "cdi": [NAME, ...], "mounts": [{"host": PATH, "container": PATH, "read_only": false}, ...],
   "environment": {NAME: VALUE}, "command": [WORD, ...]}
  {"call": "runs", "container": ID}
  {"call": "stop", "container": ID, "seconds": NUMBER}
  {"call": "end", "sandbox": ID}
and has its answer on standard output. Pods are of the namespace ml, with one container main, and the network of the host.
"""

import json
import pathlib
import sys

messages, socket, parent = sys.argv[1:]
sys.path.insert(0, str(pathlib.Path(messages)))

import grpc  # noqa: E402
import runtime_pb2 as message  # noqa: E402

DEADLINE = 60
IMAGE = "docker.io/library/job:1"


def ask(method, question, answer):
    # A runtime that was killed is there again in a moment.
    channel = grpc.insecure_channel(f"unix:{socket}")
    with channel:
        grpc.channel_ready_future(channel).result(DEADLINE)
        call = channel.unary_unary(
            f"/runtime.v1.RuntimeService/{method}",
            request_serializer=lambda sent: sent.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        return call(question, timeout=DEADLINE)


def start(line):
    namespaces = message.NamespaceOption(network=message.NODE, pid=message.CONTAINER, ipc=message.POD)
    sandbox = message.PodSandboxConfig(
        metadata=message.PodSandboxMetadata(name=line["pod"], uid=line["pod"], namespace="ml"),
        linux=message.LinuxPodSandboxConfig(
            cgroup_parent=f"{parent}/{line['pod']}",
            security_context=message.LinuxSandboxSecurityContext(namespace_options=namespaces),
        ),
    )
    pod = ask(
        "RunPodSandbox",
        message.RunPodSandboxRequest(config=sandbox, runtime_handler=line["handler"]),
        message.RunPodSandboxResponse,
    ).pod_sandbox_id
    mounts = [
        message.Mount(container_path=one["container"], host_path=one["host"], readonly=one["read_only"])
        for one in line["mounts"]
    ]
    container = message.ContainerConfig(
        metadata=message.ContainerMetadata(name="main"),
        image=message.ImageSpec(image=IMAGE),
        command=line["command"],
        envs=[message.KeyValue(key=key, value=value.encode()) for key, value in line["environment"].items()],
        mounts=mounts,
        CDI_devices=[message.CDIDevice(name=name) for name in line["cdi"]],
        linux=message.LinuxContainerConfig(),
    )
    wanted = message.CreateContainerRequest(pod_sandbox_id=pod, sandbox_config=sandbox, config=container)
    try:
        made = ask("CreateContainer", wanted, message.CreateContainerResponse).container_id
        ask("StartContainer", message.StartContainerRequest(container_id=made), message.StartContainerResponse)
    except grpc.RpcError:
        end({"sandbox": pod})
        raise
    return {"sandbox": pod, "container": made}


def runs(line):
    wanted = message.ContainerStatusRequest(container_id=line["container"])
    return ask("ContainerStatus", wanted, message.ContainerStatusResponse).status.state == message.CONTAINER_RUNNING


def stop(line):
    wanted = message.StopContainerRequest(container_id=line["container"], timeout=line["seconds"])
    ask("StopContainer", wanted, message.StopContainerResponse)


def end(line):
    pod = line["sandbox"]
    ask("StopPodSandbox", message.StopPodSandboxRequest(pod_sandbox_id=pod), message.StopPodSandboxResponse)
    ask("RemovePodSandbox", message.RemovePodSandboxRequest(pod_sandbox_id=pod), message.RemovePodSandboxResponse)


CALLS = {"start": start, "runs": runs, "stop": stop, "end": end}

for text in sys.stdin:
    wanted = json.loads(text)
    try:
        said = {"answer": CALLS[wanted["call"]](wanted)}
    except grpc.RpcError as error:
        said = {"error": error.details()}
    print(json.dumps(said), flush=True)
