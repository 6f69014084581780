"""The figures of a run as one table, in Markdown and in JSON."""

import json
import math
import statistics


def percentile(samples, part):
    """The smallest sample that is no less than this part of all."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def figures(samples):
    if not samples:
        return None
    return {
        "n": len(samples),
        "min": min(samples),
        "median": statistics.median(samples),
        "p90": percentile(samples, 0.9),
        "max": max(samples),
        "samples": samples,
    }


def ratio(figures, reference):
    """How many times as much it is as the reference. None where that says nothing."""
    if not figures or not reference or reference["median"] <= 0 or figures["median"] < 0:
        return None
    return figures["median"] / reference["median"]


def number(value):
    if value is None:
        return "-"
    if value == int(value) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def document(rows, variants, facts):
    """Everything as one JSON object. `rows` are pairs of a setting and a row, with the samples of each variant and
    the number of its failed runs."""
    entries = []
    for setting, row, samples, failures in rows:
        entry = {
            "group": row.group,
            "key": row.key,
            "what": row.what,
            "host": setting.host(),
            "unit": row.unit,
            "target": row.target,
            "failed": {variant.name: failures.get(variant.name, 0) for variant in variants},
        }
        for variant in variants:
            entry[variant.name] = figures(samples.get(variant.name, []))
        for variant in variants[1:]:
            entry[f"ratio_to_{variant.name}"] = ratio(entry["this"], entry[variant.name])
        entries.append(entry)
    return {**facts, "rows": entries}


def cell(entry, others):
    """The median, bold if there is a target for it, with the smallest figure and the 90th percentile, and the medians of
    the other variants with the ratio."""
    this = entry["this"]
    text = "-"
    if this:
        text = f"**{number(this['median'])}**" if entry["target"] else number(this["median"])
        if this["min"] != this["p90"]:
            text += f" ({number(this['min'])} to {number(this['p90'])})"
    for name in others:
        ratio = entry[f"ratio_to_{name}"]
        reference = number((entry[name] or {}).get("median"))
        text += f", {name} {reference}" + (f" ({ratio:.2f})" if ratio else "")
    return text


def markdown(document, variants):
    """One line for each thing that is measured, one column for each host."""
    others = [variant.name for variant in variants[1:]]
    hosts = list(dict.fromkeys(entry["host"] for entry in document["rows"]))
    hosts.sort(key=lambda host: (int(host.split()[0]), host))
    lines = {}
    for entry in document["rows"]:
        lines.setdefault(entry["key"], {})[entry["host"]] = entry
    table = [["", "unit", "n", "failed", *hosts, "target"]]
    table.append(["---"] * len(table[0]))
    for line in lines.values():
        first = next(iter(line.values()))
        runs = [entry["this"]["n"] for entry in line.values() if entry["this"]]
        targets = dict.fromkeys(entry["target"] for entry in line.values() if entry["target"])
        failed = sum(number for entry in line.values() for number in entry["failed"].values())
        cells = [first["what"], first["unit"], number(min(runs, default=None)), str(failed)]
        cells += [cell(line[host], others) if host in line else "" for host in hosts]
        table.append([*cells, ", ".join(targets)])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in table)


def write(document, variants, directory):
    """Writes both files, and prints the table."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "service.json").write_text(json.dumps(document, indent=1) + "\n")
    text = markdown(document, variants)
    (directory / "service.md").write_text(text)
    print(text, end="")
