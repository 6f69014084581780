#!/usr/bin/env python3
"""One process of a benchmark: load.py WORK SECONDS DIRECTORY

WORK is one of
  resnet50  inference of ResNet-50, one image at a time, fp16, as a CUDA graph
  train     steps of training a small convolutional network, batches of 64

It warms up, writes DIRECTORY/ready.PID, waits for DIRECTORY/go, works for SECONDS, and prints one line of JSON: how
many units, how long, and the latency of a unit (median and 99th percentile, in milliseconds).
"""

import json
import os
import pathlib
import sys
import time

import torch
from torch import nn


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
    model = resnet50().eval().half().cuda()
    image = torch.randn(1, 3, 224, 224, device="cuda", dtype=torch.half)

    # As an inference engine does: launched one by one, its 160 kernels would measure the CPU.
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
        torch.cuda.synchronize()

    return unit


def training():
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(64, 3, 64, 64, device="cuda"), torch.randint(10, (64,), device="cuda")

    def unit():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        torch.cuda.synchronize()

    return unit


WORK = {"resnet50": inference, "train": training}


def main():
    work, seconds, directory = sys.argv[1], float(sys.argv[2]), pathlib.Path(sys.argv[3])
    torch.backends.cudnn.benchmark = False
    unit = WORK[work]()
    for _ in range(20):
        unit()
    (directory / f"ready.{os.getpid()}").touch()
    while not (directory / "go").exists():
        time.sleep(0.002)
    began = time.perf_counter()
    times = []
    while time.perf_counter() - began < seconds:
        start = time.perf_counter()
        unit()
        times.append(time.perf_counter() - start)
    whole = time.perf_counter() - began
    times.sort()
    print(json.dumps({
        "units": len(times), "seconds": whole, "median_ms": 1000 * times[len(times) // 2],
        "p99_ms": 1000 * times[len(times) * 99 // 100],
    }))


main()
