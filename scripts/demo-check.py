"""What the demo must have shown: demo-check.py settled|serving|stopped BOARD DIRECTORY.

Reads what demo.sh left in the directory. Prints one line and exits with status 1 at the first thing that is wrong.
"""

import csv
import json
import os
import sys

EXCLUSIVE = "Exclusive_Process"

# The host of the platform's own manual, as its users see it.
P40_UUID = "GPU-76aef7ff-372d-2432-b4b4-beca4d8d3400"
P40_PCIE = {"lane_width": 16, "throughput": "15.76 GB/s", "transfer_rate_per_lane": "8GT/s", "version": "3.0"}
P40_SMI = [P40_UUID, "Tesla P40", "00000000:00:06.0", "23040 MiB"]


def expect(what, found, wanted):
    if isinstance(found, dict) and isinstance(wanted, dict) and found.keys() == wanted.keys():
        for key in wanted:
            expect(f"{what}, {key}", found[key], wanted[key])
    elif found != wanted:
        sys.exit(f"demo: {what}: found {found!r}, not {wanted!r}")


def unwrap(value):
    """busctl's JSON without the types."""
    if isinstance(value, list):
        return [unwrap(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"type", "data"}:
            return unwrap(value["data"])
        return {key: unwrap(item) for key, item in value.items()}
    return value


class Host:
    """The files of one demo."""

    def __init__(self, directory):
        self.directory = directory

    def text(self, name):
        with open(os.path.join(self.directory, name), encoding="utf-8") as file:
            return file.read()

    def reply(self, name):
        """The only argument of a reply that busctl wrote as JSON."""
        return unwrap(json.loads(self.text(name))["data"])[0]

    def smi(self, name):
        """nvidia-smi's rows without their heading, by UUID."""
        rows = list(csv.reader(self.text(name).splitlines(), skipinitialspace=True))
        expect("nvidia-smi's heading", rows[:1], [["uuid", "name", "pci.bus_id", "memory.total [MiB]", "compute_mode"]])
        return {row[0]: row for row in rows[1:]}

    def table(self):
        """The rows of yunion-mpsctl list, each by heading."""
        lines = [line for line in self.text("table.txt").splitlines() if line.startswith("|")]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return [dict(zip(rows[0], row)) for row in rows[1:]]


def may_be_out(board, gpu):
    """A GPU that this board has on purpose and that MPS can't serve."""
    return board == "mixed" and "MIG" in gpu["reason"]


def settled(board, host):
    state = json.loads(host.text("status.json"))["service"]["state"]
    if state not in (("ready", "degraded") if board == "mixed" else ("ready",)):
        sys.exit(f"demo: state {state}")
    for item in host.reply("gpus.json") + host.reply("devices.json"):
        if not item["healthy"] and not may_be_out(board, item):
            sys.exit(f"demo: {item['addr']} is not healthy: {item['reason']}")


def serving(board, host):
    gpus, devices, table = host.reply("gpus.json"), host.reply("devices.json"), host.table()
    before, now = host.smi("before.csv"), host.smi("serving.csv")
    settled(board, host)
    expect("GPUs published", sorted(gpu["device_path"] for gpu in gpus), sorted(before))
    if not any(gpu["healthy"] for gpu in gpus):
        sys.exit("demo: no GPU is healthy")
    if board == "mixed" and all(gpu["healthy"] for gpu in gpus):
        sys.exit("demo: the MIG GPU is published as healthy")

    wanted = [f"{gpu['addr']}-{ordinal}" for gpu in gpus for ordinal in range(gpu["virtual_num"])]
    expect("addresses of ListDevices", [device["addr"] for device in devices], wanted)
    expect("addresses of yunion-mpsctl list", [row["Addr"] for row in table], wanted)
    for gpu in gpus:
        slices = [device for device in devices if device["device_path"] == gpu["device_path"]]
        expect(f"slices of {gpu['addr']}", len(slices), gpu["virtual_num"])
        expect(f"health of {gpu['addr']}'s slices", {device["healthy"] for device in slices}, {gpu["healthy"]})
        mode = EXCLUSIVE if gpu["healthy"] else before[gpu["device_path"]][4]
        expect(f"compute mode of {gpu['addr']} while serving", now[gpu["device_path"]][4], mode)
    if board == "tesla-p40":
        serving_p40(devices, table, now)


def serving_p40(devices, table, now):
    expect("nvidia-smi while serving", now, {P40_UUID: [*P40_SMI, EXCLUSIVE]})
    expect("number of slices", len(devices), 4)
    for ordinal, (device, row) in enumerate(zip(devices, table, strict=True)):
        name = f"00:06.0-{ordinal}"
        fields = {
            "addr": name,
            "dev_type": "NVIDIA_MPS",
            "model": "Tesla P40",
            "vendor_device_id": "10de:1b38",
            "numa_node": -1,
            "device_path": P40_UUID,
            "pcie_info": P40_PCIE,
            "index": -1,
            "device_minor": -1,
            "mps_memory_total": 23040,
            "mps_memory_limit": 5760,
            "mps_thread_percentage": 25,
            "healthy": True,
        }
        expect(f"{name} on D-Bus", {key: device.get(key) for key in fields}, fields)
        cells = {
            "Addr": name,
            "Dev_type": "NVIDIA_MPS",
            "Model": "Tesla P40",
            "Vendor_device_id": "10de:1b38",
            "numa_node": "-1",
            "Device_path": P40_UUID,
            "PCIE_Info": json.dumps(P40_PCIE, separators=(",", ":")),
            "Index": "-1",
            "Device_minor": "-1",
        }
        expect(f"{name} in the table", {key: row.get(key) for key in cells}, cells)


def stopped(board, host):
    after = host.smi("stopped.csv")
    expect("nvidia-smi after the stop", after, host.smi("before.csv"))
    if board == "tesla-p40":
        expect("nvidia-smi after the stop", after, {P40_UUID: [*P40_SMI, "Default"]})


def main():
    step, board, directory = sys.argv[1:]
    {"settled": settled, "serving": serving, "stopped": stopped}[step](board, Host(directory))


main()
