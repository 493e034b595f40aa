"""Which share of the time of memory the busiest pipe may take.

A kernel family above its limit has a ceiling in ceilings.json, which may only go down.
"""

import json
import pathlib

from . import devices

PATH = pathlib.Path(__file__).resolve().parents[1] / "ceilings.json"
# Percent, by rows; GOAL is what the kernels are built for.
GOAL = 75
LIMITS = {1: 90, 8: 90, 32: 180}


def ceilings():
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def shares(results):
    """[(family, rows, device, percent)] of the checked devices, rounded up."""
    return [
        (family, rows, name, -int(-100 * part["share"] // 1))
        for name, device in results.items()
        if name not in devices.UNCHECKED
        for family, by_rows in device["families"].items()
        for rows, part in by_rows.items()
    ]


def limit(known, family, rows, device):
    """The percent that holds: the ceiling, where there is one."""
    return max(LIMITS[int(rows)], known.get(family, {}).get(rows, {}).get(device, 0))


def violations(results, known):
    """One sentence for each share above what holds."""
    return [
        f"{family}, {rows} rows, {device}: the busiest pipe takes {percent} % of the time of"
        f" memory, at most {most} % are allowed"
        for family, rows, device, percent in shares(results)
        if percent > (most := limit(known, family, rows, device))
    ]


def lowered(results, known):
    """The ceilings after `results`: none is raised, and none is kept that is not needed.

    A family that has no ceiling at all is new: it gets those that it needs.
    """
    fresh = {}
    for family, rows, device, percent in shares(results):
        most = limit(known, family, rows, device) if family in known or not known else percent
        if not known:
            most = percent
        if min(percent, most) > LIMITS[int(rows)]:
            fresh.setdefault(family, {}).setdefault(rows, {})[device] = min(percent, most)
    return fresh


def text(known):
    """JSON with a line per family and rows."""
    lines = []
    for family, by_rows in sorted(known.items()):
        inner = [f'    "{rows}": {json.dumps(by_rows[rows])}' for rows in by_rows]
        lines.append(f'  "{family}": {{\n' + ",\n".join(inner) + "\n  }")
    return "{\n" + ",\n".join(lines) + "\n}\n"
