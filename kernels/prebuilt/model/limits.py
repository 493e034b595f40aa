"""Which share of the time of memory the busiest pipe may take.

A kernel family that was above its limit when the limits came has a ceiling in ceilings.json. Tools
only lower ceilings. Raising one is an edit by hand, with its reason in the commit.
"""

import json
import math
import pathlib

from . import devices

PATH = pathlib.Path(__file__).resolve().parents[1] / "ceilings.json"
# Percent, by rows; GOAL is what the kernels are built for.
GOAL = 75
LIMITS = {1: 90, 8: 90, 32: 180}


def ceilings():
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def shares(results):
    """[(family, rows, device, percent)] of the checked devices."""
    return [
        (family, rows, name, percent(part))
        for name, device in results.items()
        if name not in devices.UNCHECKED
        for family, by_rows in device["families"].items()
        for rows, part in by_rows.items()
    ]


def percent(part):
    """A share in whole percent, rounded up."""
    return math.ceil(round(100 * part["share"], 6))


def limit(known, family, rows, device):
    """The percent that holds: the ceiling, where there is one."""
    return max(LIMITS[int(rows)], known.get(family, {}).get(rows, {}).get(device, 0))


def violations(results, known):
    """One sentence for each share above what holds."""
    return [
        f"{family}, {rows} rows, {device}: the busiest pipe takes {found} % of the time of memory,"
        f" at most {most} % are allowed"
        for family, rows, device, found in shares(results)
        if found > (most := limit(known, family, rows, device))
    ]


def lowered(results, known):
    """The ceilings after `results`: none is raised or added, none is kept that is not needed."""
    fresh = {}
    for family, rows, device, found in shares(results):
        most = min(found, limit(known, family, rows, device))
        if most > LIMITS[int(rows)]:
            fresh.setdefault(family, {}).setdefault(rows, {})[device] = most
    return fresh


def text(known):
    """JSON with a line per family and rows."""
    lines = []
    for family, by_rows in sorted(known.items()):
        inner = [f'    "{rows}": {json.dumps(by_rows[rows])}' for rows in sorted(by_rows, key=int)]
        lines.append(f'  "{family}": {{\n' + ",\n".join(inner) + "\n  }")
    return "{\n" + ",\n".join(lines) + "\n}\n"
