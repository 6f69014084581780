#!/usr/bin/env python3
"""Makes the pictures and tables of docs/performance.md from results/*.json: benches/gpu/pictures.py [--check]

A part that several files have is taken from the newest, of one day the last by name. --check changes nothing: it says
what differs, and which of the numbers that matter is missing in the texts around the tables and in the READMEs.
"""

import json
import pathlib
import re
import statistics
import sys
import textwrap
from xml.sax.saxutils import escape

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PAGE = ROOT / "docs" / "performance.md"
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
LEVELS = ROOT / "docs" / "isolation.md"

MODES = ["without MPS", "bare", "equal", "balanced", "unlimited"]
SHOWN = {"bare": "bare control daemon"}
COLOURS = dict(zip(MODES, ["#8a8f98", "#3b3f46", "#2563eb", "#059669", "#d97706"]))
PARTS = ["resnet50", "train", "jpeg", "dct", "fma", "wide", "beside", "pairs", "isolation", "nccl", "killed", "starts", "clients"]

WIDTH, LEFT, RIGHT, TOP = 720, 64, 16, 72
INK, FAINT = "#1f2328", "#d8dde3"


def figures():
    """Each part with the file's words about its hardware."""
    found = {}
    files = [json.loads(path.read_text()) for path in sorted((HERE / "results").glob("*.json"))]
    for file in sorted(files, key=lambda file: file["date"]):
        for part in PARTS:
            if part in file:
                found[part] = (file[part], file)
    return found


def runs(file):
    """How the figures of a works' table come about."""
    seconds = f"{file['seconds_each']:g} second{'' if file['seconds_each'] == 1 else 's'}"
    number = file.get("runs", 1)
    return f"median of {number} runs of {seconds}" if number > 1 else f"one run of {seconds}"


def hardware(file):
    name, driver, mode = file["gpu"].split(", ")
    gpus = file.get("gpus", 1)
    host = f"host with {gpus} GPU{'s' if gpus > 1 else ''} and {file['cpus']} CPUs"
    # The page says that the mode is Default unless another one is named.
    mode = "" if mode == "Default" else f"compute mode {mode}, "
    return f"{name}, driver {driver}, {mode}{host}, {file['date']}"


# The width of a character in the widest of the usual fonts, DejaVu Sans, as a part of the font size.
BOLD, PLAIN = 0.70, 0.62


class Picture:
    def __init__(self, title, below, height):
        for words, size, wide in ((title, 16, BOLD), (below, 10, PLAIN)):
            if 16 + len(words) * size * wide > WIDTH:
                sys.exit(f"a picture is too narrow for: {words}")
        self.height = height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'role="img" font-family="Helvetica, Arial, sans-serif" font-size="12" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        ]
        self.text(16, 24, title, "start", 'font-size="16" font-weight="bold"')
        self.text(16, height - 10, below, "start", 'font-size="10" fill="#57606a"')

    def text(self, x, y, words, anchor="middle", more=""):
        more = f" {more}" if more else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(str(words))}</text>')

    def bar(self, x, y, width, height, colour):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>')

    def line(self, x1, y1, x2, y2, more=f'stroke="{FAINT}"'):
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {more}/>')

    def dot(self, x, y, colour):
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>')

    def legend(self, names, colours):
        x = LEFT
        for name, colour in zip(names, colours):
            self.bar(x, 40, 12, 12, colour)
            self.text(x + 17, 50, name, "start")
            x += 17 + 6.6 * len(name) + 16

    def svg(self):
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def ticks(highest):
    """Round numbers from 0 to at least `highest`, 4 to 7 of them."""
    step = next(
        digit * 10.0**power for power in range(-4, 9) for digit in (1, 2, 5) if highest / (digit * 10.0**power) <= 6
    )
    number = int(highest / step) + (highest % step > 0)
    return [step * n for n in range(number + 1)]


def shown(number):
    return f"{number:g}"


def columns(title, axis, below, groups, heads, names, colours):
    """Bars in groups: `heads` below the groups, `names` in the legend. A group has a number or None for each name."""
    picture = Picture(title, below, 360)
    bottom = 360 - 62
    marks = ticks(max(value for group in groups for value in group if value is not None))
    high = lambda value: bottom - (bottom - TOP) * value / marks[-1]
    for mark in marks:
        picture.line(LEFT, high(mark), WIDTH - RIGHT, high(mark))
        picture.text(LEFT - 6, high(mark) + 4, shown(mark), "end")
    wide = (WIDTH - LEFT - RIGHT) / len(groups)
    each = min(wide * 0.8 / len(names), 48)
    for number, (group, head) in enumerate(zip(groups, heads)):
        middle = LEFT + wide * (number + 0.5)
        present = [(value, colour) for value, colour in zip(group, colours) if value is not None]
        start = middle - each * len(present) / 2
        for place, (value, colour) in enumerate(present):
            picture.bar(start + place * each, high(value), each - 2, bottom - high(value), colour)
        picture.text(middle, bottom + 17, head)
    picture.line(LEFT, bottom, WIDTH - RIGHT, bottom, f'stroke="{INK}"')
    picture.text(LEFT + (WIDTH - LEFT - RIGHT) / 2, bottom + 36, axis[0])
    middle = (TOP + bottom) / 2
    picture.text(14, middle, axis[1], "middle", f'transform="rotate(-90 14 {middle:.1f})"')
    picture.legend(names, colours)
    return picture.svg()


def rows_of_bars(title, below, panels, names, colours):
    """Bars from left to right with their values. A panel has an axis of its own: its words, the digits of its values, and rows, which
    are a name and a number for each of `names`."""
    left, right, each, under = 150, 80, 15, 62
    high = each * len(names) + 14
    height = TOP + sum(high * len(rows) + under for _, _, rows in panels)
    picture, start = Picture(title, below, height), TOP
    for axis, digits, rows in panels:
        marks = ticks(max(value for _, values in rows for value in values))
        far = lambda value: left + (WIDTH - left - right) * value / marks[-1]
        bottom = start + high * len(rows)
        for mark in marks:
            picture.line(far(mark), start, far(mark), bottom)
            picture.text(far(mark), bottom + 17, shown(mark))
        for number, (name, values) in enumerate(rows):
            top = start + high * number + 7
            picture.text(left - 8, top + each * len(values) / 2 + 4, name, "end")
            for place, (value, colour) in enumerate(zip(values, colours)):
                picture.bar(left, top + each * place, max(far(value) - left, 1), each - 2, colour)
                picture.text(far(value) + 5, top + each * place + 10, f"{value:.{digits}f}", "start", 'font-size="11"')
        picture.line(left, start, left, bottom, f'stroke="{INK}"')
        picture.text((left + WIDTH - right) / 2, bottom + 36, axis)
        start = bottom + under
    picture.legend(names, colours)
    return picture.svg()


def dots(title, axis, below, rows, low, high):
    """A row is a name, numbers between `low` and `high`, and a colour."""
    left, right, tall = 150, 30, 44
    bottom = 56 + tall * len(rows)
    picture = Picture(title, below, bottom + 62)
    far = lambda value: left + (WIDTH - left - right) * (value - low) / (high - low)
    for hundredth in range(round(100 * low), round(100 * high) + 1):
        mark = hundredth / 100
        picture.line(far(mark), 44, far(mark), bottom, f'stroke="{INK if hundredth == 100 else FAINT}"')
        picture.text(far(mark), bottom + 17, f"{mark:.2f}")
    for number, (name, values, colour) in enumerate(rows):
        y = 56 + tall * (number + 0.5) - 6
        picture.text(left - 8, y + 4, name, "end")
        for value in values:
            picture.dot(far(value), y, colour)
    picture.text((left + WIDTH - right) / 2, bottom + 36, axis)
    return picture.svg()


def table(heads, rows):
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


HEADS = {
    "resnet50": ("ResNet-50", "images a second", "an image"),
    "train": ("Training a small network", "steps a second", "a step"),
    "jpeg": ("Decoding JPEG", "images a second", "an image"),
    "dct": ("The parts of decoding JPEG", "images a second", "an image"),
    "fma": ("A program that leaves the GPU idle", "kernels a second", "a kernel"),
    "wide": ("A kernel that fills the GPU", "kernels a second", "a kernel"),
}
TEXTS = {
    "resnet50": "One image at a time, fp16, as a CUDA graph. The bare control daemon has no limit, so its column is to "
    "be compared with `unlimited`.",
    "train": "A convolutional network with three layers, batches of 64 images of 64x64. A step is many short kernels, "
    "each launched by the CPU.",
    "jpeg": "An image of 1920x1080 is decoded by nvJPEG, made 480x270 and copied to the host.",
    "dct": "The parts of the work that follow the Huffman code, in PyTorch: copies, inverse DCT, colours, and an image "
    "of 1920x1080 is made 480x270.",
    "fma": "One thread of fused multiply-adds. Without MPS the processes take turns, and a GPU with 132 SMs does the "
    "work of one thread at a time.",
    "wide": "Each kernel has more threads than the GPU holds at once, so one process alone leaves nearly nothing idle.",
}


def work(name, found, file):
    title, unit, one = HEADS[name]
    counts = sorted(found, key=int)
    modes = [mode for mode in MODES if any(mode in found[count] for count in counts)]
    names = [SHOWN.get(mode, mode) for mode in modes]

    def cell(count, mode):
        of_mode = found[count].get(mode)
        return f"{of_mode['per_second']:.0f} ({of_mode['median_ms']:.2f} ms)" if of_mode else "-"

    value = lambda count, mode: found[count][mode]["per_second"] if mode in found[count] else None
    groups = [[value(count, mode) for mode in modes] for count in counts]
    below = f"{hardware(file)}; {runs(file)}"
    picture = columns(
        f"{title}: {unit}", ("processes", f"{unit}, all processes"), below, groups, counts, names,
        [COLOURS[mode] for mode in modes],
    )
    rows = [[count, *(cell(count, mode) for mode in modes)] for count in counts]
    said = f"{unit.capitalize()} of all processes together; in parentheses, the median time of {one}."
    section = [f"## {title}", f"{TEXTS[name]} {said}", f"![{title}: {unit}](performance-{name}.svg)"]
    return [*section, table(["processes", *names], rows), f"*{below}.*"], picture


def beside(found, file):
    title = "A small client beside greedy ones"
    modes = [mode for mode in MODES if mode in found]
    names = [SHOWN.get(mode, mode) for mode in modes]
    kinds = ["median", "99th percentile"]
    below = f"{hardware(file)}; {runs(file)}"
    values = [(found[mode]["median_ms"], found[mode]["p99_ms"]) for mode in modes]
    picture = rows_of_bars(
        "A short kernel beside three clients that fill the GPU", below,
        [("milliseconds", 2, list(zip(names, values)))], kinds, ["#93b4f5", "#2563eb"],
    )
    rows = [[name, *(f"{value:.2f} ms" for value in of_mode)] for name, of_mode in zip(names, values)]
    text = (
        "The time of a short kernel, launched each 10 ms, beside three clients with kernels that fill the GPU; four "
        "slices."
    )
    heads = ["small client", *kinds]
    if all("greedy" in found[mode] for mode in modes):
        heads.append("kernels a second of the greedy ones")
        most = max(found[mode]["greedy"]["per_second"] for mode in modes)
        for row, mode in zip(rows, modes):
            rate = found[mode]["greedy"]["per_second"]
            row.append(f"{rate:.0f} ({100 * rate / most:.0f} %)")
        text += " The last column has what the greedy ones get done together, and how much of the most that is."
    return [f"## {title}", text, f"![{title}](performance-beside.svg)", table(heads, rows), f"*{below}.*"], picture


def pairs(found, file):
    title = "This service beside a bare control daemon"
    policies = [policy for policy in MODES if policy in found]
    ratios = [found[policy]["ratios"] for policy in policies]
    below = f"{hardware(file)}; {max(map(len, ratios))} pairs of runs for each policy"
    low, high = min(map(min, ratios)), max(map(max, ratios))
    picture = dots(
        "This service beside a bare control daemon: throughput", "this service / a bare control daemon",
        below, [(policy, found[policy]["ratios"], COLOURS[policy]) for policy in policies],
        min(0.95, int(100 * low) / 100), max(1.05, -int(-100 * high) / 100 + 0.01),
    )
    rows = [[policy, *(f"{ratio:.3f}" for ratio in of_policy)] for policy, of_policy in zip(policies, ratios)]
    text = (
        "ResNet-50 in 8 processes: the throughput under this service divided by the throughput under a bare control "
        "daemon with the same limits, in turn."
    )
    heads = ["policy", *(str(number + 1) for number in range(max(map(len, ratios))))]
    return [f"## {title}", text, f"![{title}](performance-pairs.svg)", table(heads, rows), f"*{below}.*"], picture


def killed(found, file):
    calm, hit = (round(found[name]["per_second"]) for name in ("calm", "killed"))
    failed = found["killed"]["failed"]
    text = (
        f"ResNet-50 in 8 processes, while the service was killed three times and reloaded: {hit} images a second. "
        f"In a calm run: {calm}. Processes that failed: {failed}."
    )
    return ["## The service is killed", text, f"*{hardware(file)}; one run.*"], None


def clients(found, file):
    counts = sorted(found, key=int)
    several = [count for count in counts if count != "0"]
    row = lambda words, cell: [words, *(cell(found[count]) for count in counts)]
    plain = lambda key, digits=1: lambda one: f"{one[key]:.{digits}f}" if key in one else "-"
    rows = [
        row("wake-ups in a minute", plain("wakeups_a_minute", 0)),
        row("CPU time in a minute, ms", plain("cpu_ms_a_minute")),
        row("CPU time of NVIDIA's front ends in a minute, ms", plain("front_ends_cpu_ms_a_minute")),
        row("resident memory, MiB", lambda one: f"{one['resident_kib'] / 1024:.1f}"),
        row("`ListClients`, ms", plain("ListClients_ms", 2)),
        row("`ListClients`: the service's CPU time, ms", plain("ListClients_cpu_ms", 2)),
        row("`yunion-mpsctl list`, ms", plain("list_ms")),
        row("`yunion-mpsctl clients`, ms", plain("clients_ms")),
    ]
    text = (
        "The service with one GPU and four slices, without a call, and the time of calls; the clients launch a short kernel each "
        "10 ms. For its health check the service starts NVIDIA's front end for each control daemon, every 30 seconds. Of its "
        f"resident memory NVIDIA's libnvidia-ml takes {file['service']['library_alone_kib'] / 1024:.1f} MiB, as in any process."
    )
    each = (
        "A client's memory in MiB: what all of them take on the GPU and on the host, by the number of clients. Without "
        "MPS each process has a context of its own on the GPU."
    )
    costs = [
        [f"{count}, {words}", *(f"{one['each_mib'][where]:.0f}" for where in ("gpu", "host"))]
        for words, part in (("under the service", found), ("without MPS", file["without_mps"]))
        for count in several
        if count in part
        for one in (part[count],)
    ]
    return [
        "## The cost of the service and its clients", text, table(["clients", *counts], rows), each,
        table(["clients", "GPU, each", "host, each"], costs), f"*{hardware(file)}; one run.*",
    ], None


def nccl(found, file):
    title = "An all-reduce over slices"
    names = {"without MPS": "without MPS", "1 to a GPU": "1 slice of each GPU", "4 to a GPU": "4 slices of each GPU"}
    below = f"{hardware(file)}; median of {file['runs']} runs"
    rates = {name: statistics.median(found[way]["gb_per_second"]) for way, name in names.items()}
    picture = rows_of_bars(
        title, below, [("GB/s between the GPUs", 0, [(name, [rate]) for name, rate in rates.items()])],
        ["bus bandwidth of NCCL"], [COLOURS["equal"]],
    )
    spread = lambda rates: f"{statistics.median(rates):.0f} GB/s ({min(rates):.0f} to {max(rates):.0f})"
    rows = [[name, found[way]["sms"], spread(found[way]["gb_per_second"])] for way, name in names.items()]
    text = (
        f"A rank on each of {file['gpus']} GPUs adds up 1 GiB with the others by NCCL, without NVLink's multicast. With four slices "
        "a rank has a quarter of the SMs, and the other slices are idle. The bus bandwidth counts the bytes that a GPU sends."
    )
    return [f"## {title}", text, f"![{title}](performance-nccl.svg)", table(["", "SMs", "bus bandwidth"], rows), f"*{below}.*"], picture


def starts(found, file):
    title = "Starts and stops beside bare control daemons"
    below = f"{hardware(file)}; median of {file['runs']} runs"
    middle = lambda one, key: statistics.median(one[key])
    ways = sorted(found.items(), key=lambda way: middle(way[1], "bare_start"))
    panel = lambda own: [(name, [middle(one, f"bare_{own}"), middle(one, own)]) for name, one in ways]
    picture = rows_of_bars(
        title, below,
        [("milliseconds until every server is ready", 0, panel("start")), ("milliseconds until all have ended", 0, panel("stop"))],
        ["bare control daemons", "this service"], [COLOURS["bare"], COLOURS["equal"]],
    )
    cell = lambda one, key: f"{middle(one, key):.0f} ms ({min(one[key]):.0f} to {max(one[key]):.0f})"
    rows = [[name, *(cell(one, key) for key in ("bare_start", "start", "bare_stop", "stop"))] for name, one in ways]
    text = (
        "As many bare control daemons as the service starts are started all at once, each with a server, and are told `quit` all "
        "at once. The service is started, is ready (READY=1) and gets SIGTERM. Nothing has a client. Bare control daemons and the "
        "service take turns."
    )
    heads = ["", "bare, start", "service, start", "bare, stop", "service, stop"]
    return [f"## {title}", text, f"![{title}](performance-starts.svg)", table(heads, rows), f"*{below}.*"], picture


ISOLATION = {
    "without MPS": ("without MPS", "#8a8f98"),
    "one for all": ("one for all, equal", "#2563eb"),
    "one for all, unlimited": ("one for all, unlimited", "#d97706"),
    "one for each": ("one for each slice", "#059669"),
}


def isolation(found, file):
    title = "A control daemon for each slice"
    ways = [way for way in ISOLATION if way in found]
    names, colours = [ISOLATION[way][0] for way in ways], [ISOLATION[way][1] for way in ways]
    below = f"{hardware(file)}; {runs(file)}"
    rate = lambda way, part: found[way][part]["per_second"]
    gains = lambda part: [rate(way, part) / rate("without MPS", part) for way in ways]
    picture = rows_of_bars(
        "Four slices: ResNet-50, and a fault in one slice", below,
        [
            ("times the work without MPS", 1, [("8 processes", gains("resnet50")), ("1 beside 7 idle", gains("alone"))]),
            ("processes that the fault ends", 0, [("of 8 processes", [found[way]["fault"]["failed"] for way in ways])]),
        ],
        names, colours,
    )

    def row(words, cell):
        return [words, *(cell(found[way]) if found[way] else "-" for way in ways)]

    figure = lambda part, key, digits, unit="": lambda one: f"{one[part][key]:.{digits}f}{unit}" if part in one else "-"
    plain = lambda key, digits: lambda one: f"{one[key]:.{digits}f} s" if key in one else "-"
    rows = [
        row("ResNet-50 in 8 processes, images a second", figure("resnet50", "per_second", 0)),
        row("ResNet-50 in 1 process beside 7 idle ones", figure("alone", "per_second", 0)),
        row("a fault in one slice ends, of these 8", lambda one: str(one["fault"]["failed"])),
        row("a short kernel beside 3 clients that fill the GPU, median", figure("small", "median_ms", 2, " ms")),
        row("the same, 99th percentile", figure("small", "p99_ms", 2, " ms")),
        row("kernels of these 3 clients a second", figure("greedy", "per_second", 0)),
        row("a short kernel beside one kernel of seconds that fills the GPU, median", figure("flood", "median_ms", 2, " ms")),
        row("the same, 99th percentile", figure("flood", "p99_ms", 2, " ms")),
        row("exec to READY=1 with 4 slices", plain("ready_4", 2)),
        row("exec to READY=1 with 10 slices", plain("ready_10", 2)),
        row("servers of 4 slices, on the GPU", figure("memory_4", "gpu_mib", 0, " MiB")),
        row("servers and control daemons of 4 slices, on the host", figure("memory_4", "host_mib", 0, " MiB")),
    ]
    text = (
        "Two processes in each of four slices, with one control daemon for all slices, and with one for each slice "
        "(`per_slice`). In turns the slices do less together, and a fault stays in its slice: "
        "[isolation levels](isolation.md#isolation-levels)."
    )
    return [f"## {title}", text, f"![{title}](performance-isolation.svg)", table(["", *names], rows), f"*{below}.*"], picture


OTHERS = {
    "beside": beside, "pairs": pairs, "isolation": isolation, "nccl": nccl, "killed": killed, "starts": starts,
    "clients": clients,
}


def numbers(found):
    """The ones that matter: each is one policy's."""
    sixteen = found["resnet50"][0]["16"]
    gains = [sixteen[mode]["per_second"] / sixteen["without MPS"]["per_second"] for mode in ("equal", "balanced")]
    ratios = [ratio for one in found["pairs"][0].values() for ratio in one["ratios"]]
    small = found["beside"][0]
    latencies = [f"{small[mode]['p99_ms']:.2f} ms" for mode in ("equal", "balanced", "without MPS")]
    return [*(f"{gain:.1f}" for gain in gains), f"{min(ratios):.3f}", f"{max(ratios):.3f}", *latencies]


def prices(found):
    """What isolation costs, which stands where somebody chooses a level."""
    rates = {way: one["resnet50"]["per_second"] for way, one in found["isolation"][0].items() if "resnet50" in one}
    return [f"{rates[way] / rates['without MPS']:.1f}" for way in ("one for each", "one for all")]


def written(found):
    """Every file that is made, with its text."""
    files, page = {}, PAGE.read_text()
    for part in PARTS:
        section = []
        if part in found:
            section, picture = OTHERS[part](*found[part]) if part in OTHERS else work(part, *found[part])
            if picture:
                files[ROOT / "docs" / f"performance-{part}.svg"] = picture
        lines = [line if line.startswith(("|", "!")) else textwrap.fill(line, 128) for line in section]
        text = "\n\n".join([f"<!-- {part} -->", *lines, f"<!-- /{part} -->"])
        page, number = re.subn(rf"<!-- {part} -->.*?<!-- /{part} -->", lambda _: text, page, flags=re.DOTALL)
        if number != 1 and (number or part in found):
            sys.exit(f"{PAGE.name} has {number} places for {part}")
    return {**files, PAGE: page}


def main():
    found, faults = figures(), []
    files = written(found)
    for path, text in files.items():
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            faults.append(f"{path.relative_to(ROOT)} is not what the figures make of it: run benches/gpu/pictures.py")
    for path in set((ROOT / "docs").glob("performance-*.svg")) - set(files):
        faults.append(f"{path.relative_to(ROOT)} is made from no figures")
    around = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", files[PAGE], flags=re.DOTALL)
    texts = {PAGE: around, **{path: path.read_text() for path in [*READMES, LEVELS]}}
    wanted = {path: numbers(found) for path in [PAGE, *READMES]} | {LEVELS: prices(found)}
    for path, text in texts.items():
        missing = [number for number in wanted[path] if number not in text]
        if missing:
            faults.append(f"{path.relative_to(ROOT)} lacks {', '.join(missing)}")
    if faults:
        sys.exit("\n".join(faults))


main()
