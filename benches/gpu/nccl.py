#!/usr/bin/env python3
"""One rank of an all-reduce over NCCL: benches/gpu/nccl.py RANK RANKS PORT RUNS

Each rank sees one GPU. The first one prints the bus bandwidth of each run in GB/s: 2 (RANKS - 1) / RANKS of the bytes, a second."""

import json
import sys
import time

import torch
import torch.distributed

BYTES = 1 << 30
REDUCTIONS = 20


def main():
    rank, ranks, port, runs = map(int, sys.argv[1:])
    torch.distributed.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    numbers = torch.ones(BYTES // 4, device="cuda")
    found = []
    # The first run builds up NCCL's channels.
    for _ in range(runs + 1):
        torch.cuda.synchronize()
        torch.distributed.barrier()
        begin = time.monotonic()
        for _ in range(REDUCTIONS):
            torch.distributed.all_reduce(numbers)
        torch.cuda.synchronize()
        took = time.monotonic() - begin
        found.append(REDUCTIONS * BYTES * 2 * (ranks - 1) / ranks / took / 1e9)
    if rank == 0:
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        print(json.dumps({"gb_per_second": found[1:], "sms": sms}), flush=True)
    torch.distributed.destroy_process_group()


main()
