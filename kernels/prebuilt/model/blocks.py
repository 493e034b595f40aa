"""Times and shares of a block for all devices, formats and numbers of rows."""

import collections
import concurrent.futures
import os

from . import cost, images, pipes, shapes
from .devices import DEVICES

LONG_CONTEXTS = [32768, 131072]


def compute(names, tools=None):
    """{device: {block_us, families, attention, launches}} of the devices `names`."""
    by_architecture = collections.defaultdict(list)
    for name in names:
        by_architecture[DEVICES[name].architecture].append(name)
    images.install(tools or images.tools_folder())
    # Those with the most devices take longest.
    groups = sorted(by_architecture.values(), key=len, reverse=True)
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        found = {}
        for part in pool.map(of_devices, groups, [tools] * len(groups)):
            found |= part
    return {name: found[name] for name in names}


def of_devices(names, tools):
    """The results of devices of one architecture."""
    held = images.Images(tools)
    meter = cost.Meter(held, images.manifest(), held.tools / "traces")
    return {name: of_device(meter, DEVICES[name]) for name in names}


def of_device(meter, device):
    result = {
        "block_us": {quant: {} for quant in shapes.FORMATS},
        "families": collections.defaultdict(dict),
        "launches": {quant: {} for quant in shapes.FORMATS},
        "attention": {},
    }
    for quant in shapes.FORMATS:
        for rows in shapes.ROWS:
            specs = shapes.block(meter.manifest, device, quant, rows)
            # The last launch of the block before is like that of this one.
            costs = meter.costs_of([specs[-1], *specs], device)[1:]
            result["block_us"][quant][str(rows)] = round(sum(c.time_us for c in costs), 1)
            result["launches"][quant][str(rows)] = [launch(c) for c in costs]
            for family in {c.spec.family for c in costs} - {"other"}:
                own = [c for c in costs if c.spec.family == family]
                result["families"][family][str(rows)] = share(own)
    for context in LONG_CONTEXTS:
        found = attention(meter, device, context)
        found["of_step"] = {
            quant: round(of_step(result["launches"][quant]["1"], found["us"]), 3)
            for quant in shapes.FORMATS
        }
        result["attention"][str(context)] = found
    result["families"] = dict(sorted(result["families"].items()))
    return result


def launch(found):
    """One launch for the JSON."""
    return {
        "name": found.spec.name,
        "kernel": found.spec.kernel,
        "us": round(found.time_us, 2),
        "memory_clocks": round(found.memory_clocks),
        "busiest": found.busiest,
        "clocks": {pipe: round(found.clocks[pipe], 1) for pipe in pipes.PIPES},
        "l2_bytes": round(found.l2_bytes),
        "alone_clocks": round(found.alone),
        "waves": round(found.waves, 2),
    }


def share(costs):
    """Clocks of the busiest pipe over those of memory, of several launches together."""
    total = collections.Counter()
    for found in costs:
        total.update({pipe: found.clocks[pipe] for pipe in pipes.PIPES})
    busiest = max(pipes.PIPES, key=lambda pipe: total[pipe])
    memory = sum(found.memory_clocks for found in costs)
    return {"busiest": busiest, "share": total[busiest] / memory, "memory_clocks": round(memory)}


def attention(meter, device, context):
    """Time of attention of one row and its share of the bandwidth that is reached."""
    specs = shapes.attention(meter.manifest, device, 1, context)
    costs = meter.costs_of(specs, device)
    time = sum(found.time_us for found in costs)
    ideal = sum(found.spec.memory_bytes for found in costs) / device.reached * 1e6
    names = {found.spec.name: round(found.time_us, 1) for found in costs}
    return {"us": round(time, 1), "launches": names, "share": round(ideal / time, 3)}


def of_step(launches, attention_us):
    """The part of a step of one row that is attention, if that takes `attention_us`.

    `launches` are those of a block at another context, which changes attention alone.
    """
    others = sum(one["us"] for one in launches if not one["name"].startswith("attention"))
    return attention_us / (others + attention_us)


def loops(meter, device, quant, rows):
    """Text: what the hottest loop of each kernel executes, per 8,192 weights."""
    lines, seen = [], set()
    for spec in shapes.block(meter.manifest, device, quant, rows):
        key = (spec.kernel, spec.alike)
        if key in seen:
            continue
        seen.add(key)
        found = meter.cost(spec, device)
        unit = spec.weights / 8192 if spec.weights else 1.0
        lines.append(f"{spec.name}: {spec.kernel}" + ("" if spec.weights else " (in all)"))
        clocks = {pipe: found.clocks[pipe] * device.multiprocessors / unit for pipe in pipes.PIPES}
        lines.append("  whole  " + words(clocks, found.memory_clocks, device, unit))
        if found.loop:
            loop = {pipe: found.loop.get(pipe, 0.0) / unit for pipe in pipes.PIPES}
            lines.append("  loop   " + words(loop, found.memory_clocks, device, unit))
            instructions = sorted(found.mix.items(), key=lambda item: -item[1])
            for op, count in instructions[:24]:
                lines.append(f"    {count / unit:9.1f}  {op}")
    return "\n".join(lines)


def words(clocks, memory, device, unit):
    parts = [f"{pipe} {clocks[pipe]:.0f}" for pipe in pipes.PIPES if clocks[pipe] >= 0.5]
    return f"memory {memory * device.multiprocessors / unit:.0f} | " + ", ".join(parts)
