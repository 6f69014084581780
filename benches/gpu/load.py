#!/usr/bin/env python3
"""The processes of a benchmark that need PyTorch. run.py starts this program once, and tells it on standard input, one
JSON object a line, to fork a process with these variables, this directory and this name; the answer is its PID. So
PyTorch is loaded only once, and CUDA in each process for itself.

A process follows the orders in the files DIRECTORY/NAME.order.0, NAME.order.1 and so on:
  prepare WORK  makes a unit of the work ready, and warms up
  go SECONDS    repeats the unit for so long
  end           ends the process
It answers in DIRECTORY/NAME.done.NUMBER with a JSON object: after `go`, how many units, how long, and the latency of a
unit (median and 99th percentile, in milliseconds). load.cu has the same orders with other works.

WORK is one of
  resnet50  inference of ResNet-50, one image at a time, fp16, as a CUDA graph
  train     a step of training a small convolutional network, a batch of 64
  jpeg      an image of 1920x1080 is decoded by nvJPEG, which torchvision must have, and made 480x270
  dct       PyTorch does the parts of that work that follow the Huffman code: copies, inverse DCT, colours, resizing

DEVICE=cpu is for trying this program on a machine without a GPU.
"""

import json
import math
import os
import pathlib
import signal
import sys
import time
import traceback

import torch
from torch import nn

try:
    import torchvision
except Exception:  # It also fails with other errors if it doesn't fit this PyTorch.
    torchvision = None

DEVICE = os.environ.get("DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
REAL = torch.half if ON_GPU else torch.float
HEIGHT, WIDTH, SMALL = 1080, 1920, (270, 480)


def finish():
    if ON_GPU:
        torch.cuda.synchronize()


class Block(nn.Module):
    def __init__(self, inside, width, stride):
        super().__init__()
        outside = 4 * width
        layers = []
        for size, kernel, step, into in ((inside, 1, 1, width), (width, 3, stride, width), (width, 1, 1, outside)):
            layers += [nn.Conv2d(size, into, kernel, step, kernel // 2, bias=False), nn.BatchNorm2d(into), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        self.short = nn.Identity()
        if stride != 1 or inside != outside:
            self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        return torch.relu(self.body(x) + self.short(x))


def resnet50():
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for blocks, width, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for number in range(blocks):
            layers.append(Block(inside, width, stride if number == 0 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def inference():
    model = resnet50().eval().to(DEVICE, REAL)
    image = torch.randn(1, 3, 224, 224, device=DEVICE, dtype=REAL)
    if not ON_GPU:
        return lambda: model(image)

    # Like an inference engine: if its 160 kernels were launched one by one, the CPU would be measured.
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                model(image)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            model(image)

    def unit():
        graph.replay()
        finish()

    return unit


def training():
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    ).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(64, 3, 64, 64, device=DEVICE)
    labels = torch.randint(10, (64,), device=DEVICE)

    def unit():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        finish()

    return unit


def made_small(image):
    """On the host, as the next stage of a pipeline wants it."""
    small = nn.functional.interpolate(image[None].to(torch.float), SMALL, mode="bilinear")
    return small.to(torch.uint8).cpu()


def jpeg():
    if torchvision is None:
        raise RuntimeError("there is no torchvision")
    down, across = torch.linspace(0, 9, HEIGHT)[:, None], torch.linspace(0, 16, WIDTH)
    picture = 128 + 100 * torch.sin(down * across) + 8 * torch.randn(3, HEIGHT, WIDTH)
    data = torchvision.io.encode_jpeg(picture.clamp(0, 255).to(torch.uint8))
    return lambda: made_small(torchvision.io.decode_jpeg(data, device=DEVICE))


def dct():
    file = torch.zeros(500_000, dtype=torch.uint8)
    if ON_GPU:
        file = file.pin_memory()
    coefficients = 16 * torch.randn(3, HEIGHT // 8, WIDTH // 8, 8, 8, device=DEVICE, dtype=REAL)
    weights = torch.rand(8, 8, device=DEVICE, dtype=REAL)
    row = lambda i: [math.sqrt((2 if i else 1) / 8) * math.cos(math.pi * i * (2 * j + 1) / 16) for j in range(8)]
    cosines = torch.tensor([row(i) for i in range(8)], device=DEVICE, dtype=REAL)
    colours = torch.tensor(
        [[1, 0, 1.402], [1, -0.344, -0.714], [1, 1.772, 0]], device=DEVICE, dtype=REAL
    )

    def unit():
        file.to(DEVICE, non_blocking=True)
        blocks = ((coefficients * weights) @ cosines).mT @ cosines
        planes = blocks.permute(0, 1, 4, 2, 3).reshape(3, HEIGHT * WIDTH)
        image = (colours @ planes + 128).clamp(0, 255).reshape(3, HEIGHT, WIDTH)
        return made_small(image)

    return unit


WORK = {"resnet50": inference, "train": training, "jpeg": jpeg, "dct": dct}


def prepared(work):
    unit = WORK[work]()
    for _ in range(20 if ON_GPU else 1):
        unit()
    return unit


def repeated(unit, seconds):
    began = time.perf_counter()
    times = []
    while time.perf_counter() - began < seconds:
        start = time.perf_counter()
        unit()
        times.append(time.perf_counter() - start)
    whole = time.perf_counter() - began
    times.sort()
    return {
        "units": len(times), "seconds": whole, "median_ms": 1000 * times[len(times) // 2],
        "p99_ms": 1000 * times[len(times) * 99 // 100],
    }


def follow(directory, name, parent):
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(1)
    unit, number = None, 0
    while True:
        order = directory / f"{name}.order.{number}"
        while not order.exists():
            if os.getppid() != parent:
                return  # Nobody is left who could give an order.
            time.sleep(0.001)
        word, *rest = order.read_text().split()
        if word == "end":
            return
        if word == "prepare":
            unit = None  # Its memory first.
            unit = prepared(rest[0])
            sms = torch.cuda.get_device_properties(0).multi_processor_count if ON_GPU else 0
            answer = {"sms": sms}
        else:
            answer = repeated(unit, float(rest[0]))
        written = directory / f"{name}.new"
        written.write_text(json.dumps(answer))
        written.rename(directory / f"{name}.done.{number}")
        number += 1


def main():
    # No process waits for the child processes.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.getpid()
    for line in sys.stdin:
        wanted = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            os.dup2(nothing, 1)
            os.environ.update(wanted["variables"])
            try:
                follow(pathlib.Path(wanted["directory"]), wanted["name"], parent)
            except Exception:
                traceback.print_exc()
                sys.exit(1)
            return
        print(pid, flush=True)


main()
