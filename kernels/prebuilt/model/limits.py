"""Which share of the time of memory the busiest pipe may take."""

import math

from . import devices

# Percent, by rows; GOAL is what the kernels are built for.
GOAL = 75
LIMITS = {1: 90, 8: 90, 32: 180}


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


def violations(results):
    """One sentence for each share above its limit."""
    return [
        f"{family}, {rows} rows, {device}: the busiest pipe takes {found} % of the time of memory,"
        f" at most {most} % are allowed"
        for family, rows, device, found in shares(results)
        if found > (most := LIMITS[int(rows)])
    ]
