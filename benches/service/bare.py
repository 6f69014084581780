"""NVIDIA's part of a start: bare control daemons, each with a server, as an administrator would start them."""

import os
import time

import process
from events import Events


def start(host, setting):
    """Starts the control daemons that the service would start with this setting, all at once, each with a server, and ends them again.

    Returns the nanoseconds until the last server was ready, the nanoseconds that the slowest server took from the order to
    start, and the nanoseconds from the orders to quit until the last control daemon had ended."""
    uuids = setting.uuids()
    each = setting.planned() // setting.gpus
    visible = [[uuid] for uuid in uuids for _ in range(each)] if setting.topology != "shared" else [uuids]
    events, daemons, environments, began = Events(), {}, {}, {}
    begin = time.monotonic_ns()
    for number, gpus in enumerate(visible):
        directory = host.directory / "bare" / str(number)
        # A control daemon makes a FIFO called log in its pipe directory.
        pipes, log = directory / "pipes", directory / "log"
        pipes.mkdir(parents=True)
        log.mkdir()
        environments[number] = {
            **host.environment,
            "CUDA_VISIBLE_DEVICES": ",".join(gpus),
            "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
            "CUDA_MPS_LOG_DIRECTORY": str(log),
        }
        output, writer = os.pipe()
        command = ["nvidia-cuda-mps-control", "-f", "-multiuser-server"]
        daemons[number] = process.spawn(command, environments[number], stdout=writer), output
        os.close(writer)
        events.add(number, output)
    front_ends, served, seen = [], {}, 0
    try:
        while len(served) < len(visible):
            event = events.first(seen, lambda event: True)
            seen += 1
            if "Starting control daemon using socket" in event.text:
                began[event.source] = event.time
                front_ends.append(order(f"start_server -uid {os.getuid()}", environments[event.source]))
            elif event.text.endswith(": Ready"):
                served[event.source] = event.time
        quit_ordered = time.monotonic_ns()
        for environment in environments.values():
            front_ends.append(order("quit", environment))
        ended = max(daemon.wait() for daemon, _ in daemons.values())
    finally:
        for child in [*front_ends, *(daemon for daemon, _ in daemons.values())]:
            child.end()
        for _, output in daemons.values():
            os.close(output)
    slowest_server = max(served[number] - began[number] for number in served)
    return max(served.values()) - begin, slowest_server, ended - quit_ordered


def order(text, environment):
    """A front end that gives one command."""
    reader, writer = os.pipe()
    front_end = process.spawn(["nvidia-cuda-mps-control"], environment, stdin=reader)
    os.close(reader)
    os.write(writer, text.encode() + b"\n")
    os.close(writer)
    return front_end
