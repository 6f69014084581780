"""PyTorch in a slice, as docs/recipes.md has it: takes memory until there is none, and computes with what it has.

    recipes.py PART [FILE]   PART of the slice for this process, 0 for no bound of PyTorch's own. With FILE it holds all
                             memory until that file is there.
"""

import os
import pathlib
import sys
import time

import torch

BLOCK_MIB = 64
MIB = 1 << 20

part = float(sys.argv[1])
fraction = float(os.environ["YUNION_MPS_MEMORY_FRACTION"])
if part:
    torch.cuda.set_per_process_memory_fraction(fraction * part)
torch.cuda.init()
torch.empty(1, device="cuda")
free, total = torch.cuda.mem_get_info()
print(f"total {total // MIB} free {free // MIB} fraction-fits {free + 2 * MIB >= total * fraction}")

blocks = []
try:
    while True:
        blocks.append(torch.empty(BLOCK_MIB * MIB, dtype=torch.uint8, device="cuda"))
except torch.OutOfMemoryError as error:
    print("error", str(error).replace("\n", " "))
print(f"taken {len(blocks) * BLOCK_MIB}", flush=True)
del blocks[-20:]
if len(sys.argv) > 2:
    while not pathlib.Path(sys.argv[2]).exists():
        time.sleep(0.05)
square = torch.rand(1024, 1024, device="cuda")
print("computed", bool(torch.isfinite((square @ square).sum())))
