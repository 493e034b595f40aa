"""The tables of kernels/cuda/README.md, and budget.json, which `sepal selftest` shows."""

import json
import pathlib

from . import limits, shapes
from .devices import DEVICES, UNCHECKED

README = pathlib.Path(__file__).resolve().parents[2] / "cuda" / "README.md"
TIMES = pathlib.Path(__file__).resolve().parents[1] / "budget.json"
BEGIN = "<!-- written by kernels/prebuilt/budget.py --write -->"
END = "<!-- end of what budget.py writes -->"


def tables(results):
    """Markdown between the marks."""
    return "\n".join(
        [BEGIN, "", *times(results), "", *shares(results), "", *devices(results), "", END]
    )


def times(results):
    head = [f"{label(quant)}, {rows}" for quant in shapes.FORMATS for rows in shapes.ROWS]
    lines = [
        "Computed times of one block in us, by format and rows:",
        "",
        "| Device | " + " | ".join(head) + " |",
        "| --- |" + " --: |" * len(head),
    ]
    for name, result in results.items():
        cells = [
            f"{result['block_us'][quant][str(rows)]:.0f}"
            for quant in shapes.FORMATS
            for rows in shapes.ROWS
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "Computed shares of the reached bandwidth by decode attention of one row, its launches"
        " included:",
        "",
        "| Device | 32k tokens | 128k tokens |",
        "| --- | --: | --: |",
    ]
    for name, result in results.items():
        cells = [f"{100 * part['share']:.0f} %" for part in result["attention"].values()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def steps(results):
    """The part of a step of one row that is attention of a long context."""
    contexts = list(next(iter(results.values()))["attention"])
    heads = [(quant, context) for quant in shapes.FORMATS for context in contexts]
    names = [f"{label(quant)}, {int(context) // 1024}k tokens" for quant, context in heads]
    lines = [
        "Computed part of a step of one row that is attention, by format and context:",
        "",
        "| Device | " + " | ".join(names) + " |",
        "| --- |" + " --: |" * len(heads),
    ]
    for name, result in results.items():
        of = [result["attention"][context]["of_step"][quant] for quant, context in heads]
        lines.append(f"| {name} | " + " | ".join(f"{100 * part:.0f} %" for part in of) + " |")
    return lines


def shares(results):
    families = list(next(iter(results.values()))["families"])
    lines = [
        "Computed clocks of the busiest pipe in percent of the clocks that memory leaves, by kernel"
        " family and",
        f"rows (goal {limits.GOAL}; limits {limits.LIMITS[1]} for 1 and 8 rows,"
        f" {limits.LIMITS[32]} for 32; **bold** is above them):",
    ]
    # Two families to a table: lines of Markdown have at most 120 characters.
    for at in range(0, len(families), 2):
        lines += ["", *shares_of(results, families[at : at + 2])]
    return lines


def shares_of(results, families):
    head = [f"{family}, {rows}" for family in families for rows in shapes.ROWS]
    lines = [
        "| Device | " + " | ".join(head) + " |",
        "| --- |" + " --: |" * len(head),
    ]
    for name, result in results.items():
        cells = []
        for family in families:
            for rows in shapes.ROWS:
                part = result["families"][family][str(rows)]
                percent = limits.percent(part)
                cell = f"{percent} {part['busiest']}"
                is_above = percent > limits.LIMITS[rows] and name not in UNCHECKED
                cells.append(f"**{cell}**" if is_above else cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def devices(results):
    lines = [
        "What is taken for the devices, by compute capability (sources:"
        " `prebuilt/model/devices.py`):",
        "",
        "| Device | Capability | SMs | Clock (MHz) | Bandwidth (GB/s) | Reached"
        " | L2 (B/clock) | mma (products/clock/SM) |",
        "| --- | --- | --: | --: | --: | --: | --: | --: |",
    ]
    for name in results:
        device = DEVICES[name]
        capability = device.architecture.rstrip("a")
        capability = f"{capability[:-1]}.{capability[-1]}"
        lines.append(
            f"| {name} | {capability} | {device.multiprocessors} | {device.clock:,} |"
            f" {device.bandwidth:,} | {100 * device.share:.0f} % | {device.l2_bytes:,} |"
            f" {device.tensor_rate:,} |"
        )
    return lines


def label(quant):
    return {"nf4": "NF4", "int8": "INT8"}.get(quant, quant)


def current():
    """The tables that the README has, and the text around them."""
    text = README.read_text()
    before, rest = text.split(BEGIN, 1)
    inside, after = rest.split(END, 1)
    return before, BEGIN + inside + END, after


def write(results):
    before, _, after = current()
    README.write_text(before + tables(results) + after)
    TIMES.write_text(block_times(results))


def is_current(results):
    return current()[1] == tables(results) and TIMES.read_text() == block_times(results)


def block_times(results):
    """Microseconds of whole blocks by device, format and rows."""
    times = {
        name: {
            quant: {rows: round(us, 1) for rows, us in by_rows.items()}
            for quant, by_rows in result["block_us"].items()
        }
        for name, result in results.items()
    }
    return json.dumps(times, indent=1) + "\n"
