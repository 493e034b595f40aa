"""What a launch costs on a device: clocks of every pipe, bytes, and its time."""

import collections
import dataclasses
import hashlib
import heapq
import pathlib
import pickle

from . import launch, latency, pipes, warp
from .devices import L2_PORT
from .images import store

# Between the end of a kernel and the start of the next one in a graph. Source: Spector et al.,
# "Look Ma, No Bubbles" (Hazy Research, 2025): 1.3 us on an H100, kernels that do nothing.
GAP_US = 1.3
# The same where the kernel waits for the one before it by itself (griddepcontrol.wait) and that
# one lets it start (griddepcontrol.launch_dependents): 0.96 us less. Source:
# pegainfer-project/pegainfer, issue 569, comment of 2026-07-06: empty kernels in a CUDA graph at
# 1,755 MHz.
EARLY_GAP_US = 0.34
REGISTERS = 65536
BULK = {"UBLKCP", "UTMALDG"}


@dataclasses.dataclass
class Cost:
    """Clocks are means over the multiprocessors of a device."""

    spec: object
    clocks: dict
    l2_bytes: float
    memory_clocks: float
    time_us: float
    # Clocks of one warp that runs alone, and how many CTAs follow each other.
    alone: float
    waves: float
    # {pipe or what is counted: per CTA} of the hottest loop, and its share of the instructions.
    loop: dict
    # {instruction: executions} of that loop.
    mix: dict
    assumed: int

    @property
    def busiest(self):
        return max(pipes.PIPES, key=lambda pipe: self.clocks[pipe])


class Meter:
    """Runs launches once per architecture and keeps what they executed."""

    def __init__(self, images, manifest, folder=None):
        self.images, self.manifest, self.folder = images, manifest, folder
        self.programs, self.traces, self.costs, self.timers, self.lone = {}, {}, {}, {}, {}

    def kernel(self, spec, architecture):
        return self.images.kernel(spec.image, architecture, spec.kernel)

    def program(self, spec, architecture):
        key = (spec.kernel, architecture)
        if key not in self.programs:
            self.programs[key] = warp.Program(self.kernel(spec, architecture))
        return self.programs[key]

    def trace(self, spec, architecture):
        """[(CTAs that it stands for, warps of a CTA that it stands for, Trace)]."""
        counts = [(ctas, warps) for _, ctas in spec.ctas for _, warps in spec.warps]
        return [(*count, trace) for count, trace in zip(counts, self.ran(spec, architecture))]

    def ran(self, spec, architecture):
        """The traces of the CTAs and warps that are run, in their order."""
        identity = spec.alike or (spec.grid, spec.parameters)
        which = [cta for cta, _ in spec.ctas], [number for number, _ in spec.warps]
        key = (spec.kernel, architecture, repr((identity, which)))
        if key not in self.traces:
            self.traces[key] = self.kept(key, lambda: self.run(spec, architecture))
        return self.traces[key]

    def kept(self, key, make):
        """The result of `make` for these programs and this kernel, from the folder if it has it."""
        if self.folder is None:
            return make()
        source = self.manifest_entry(key[0])
        digest = hashlib.sha256((SOURCES + repr((key, source))).encode()).hexdigest()[:24]
        path = self.folder / digest
        if path.exists():
            return pickle.loads(path.read_bytes())
        made = make()
        store(path, made)
        return made

    def manifest_entry(self, kernel):
        return next(
            image["source"] for image in self.manifest.values() if kernel in image["kernels"]
        )

    def run(self, spec, architecture):
        program = self.program(spec, architecture)
        constants = program.kernel.constants
        made = launch.Launch(architecture, spec.grid, spec.cta, spec.parameters, constants)
        traces = []
        for cta, _ in spec.ctas:
            for number, _ in spec.warps:
                trace = warp.Trace(streamed=made.streamed())
                program.run(made, cta, number, trace)
                traces.append(trace)
        return traces

    def has(self, spec, device, op):
        """Whether the kernel of a launch has an instruction."""
        return any(one.op == op for one in self.kernel(spec, device.architecture).code)

    def costs_of(self, specs, device):
        """The `Cost` of each of several launches that follow each other in a graph."""
        found, before = [], None
        for spec in specs:
            overlaps = (
                before is not None
                and self.has(before, device, "PREEXIT")
                and self.has(spec, device, "ACQBULK")
            )
            found.append(self.cost(spec, device, overlaps))
            before = spec
        return found

    def cost(self, spec, device, overlaps=False):
        """The `Cost` of a launch, which may overlap the one before it."""
        traces = self.trace(spec, device.architecture)
        kernel = self.kernel(spec, device.architecture)
        key = (spec.kernel, device.architecture)
        if key not in self.costs:
            self.costs[key] = pipes.Costs(kernel, device.architecture)
            self.timers[key] = latency.Timer(kernel)
        costs = self.costs[key]
        total, bytes_all, streamed = collections.Counter(), 0, 0
        for ctas, warps, trace in traces:
            for pipe, clocks in costs.of(trace, device).items():
                total[pipe] += ctas * warps * clocks
            for (number, _), sectors in trace.requests.sectors.items():
                bytes_all += ctas * warps * 32 * sectors
                streamed += ctas * warps * 32 * sectors * (number in trace.streamed)
        # Bulk copies, which have no lanes, bring the rest: 128 bytes of shared memory per clock.
        in_bulk = max(0, spec.memory_bytes - streamed)
        if spec.family == "other" or not BULK & {one.op for one in kernel.code}:
            in_bulk = 0
        if spec.family != "other" and not in_bulk:
            expect_bytes(spec, device, streamed)
        bytes_all += in_bulk
        total["lsu"] += in_bulk / 128
        total["l2"] = bytes_all / device.l2_bytes_per_clock
        mean = collections.Counter({p: c / device.multiprocessors for p, c in total.items()})
        memory = spec.memory_bytes / device.bytes_per_clock / device.multiprocessors
        alone = self.of_ctas(spec, device, traces, self.timers[key], overlaps)
        time, waves = self.time(spec, device, mean, working(costs, traces), alone, overlaps)
        loop, mix = hottest(kernel, costs, traces, device)
        assumed = len(set().union(*(trace.assumed for _, _, trace in traces)))
        most = max(clocks for clocks, _ in alone)
        return Cost(spec, mean, bytes_all, memory, time, most, waves, loop, mix, assumed)

    def of_ctas(self, spec, device, traces, timer, overlaps):
        """[(clocks of the slowest warp of a CTA when nothing else runs, such CTAs)]."""
        run = len(spec.warps)
        ctas = [traces[at : at + run] for at in range(0, len(traces), run)]
        return [
            (max(self.alone(device, trace, timer, overlaps) for _, _, trace in cta), cta[0][0])
            for cta in ctas
        ]

    def alone(self, device, trace, timer, overlaps):
        """Clocks of the warp of a trace when nothing else runs."""
        key = (id(trace), device.memory_latency * device.clock, device.l2_latency, overlaps)
        if key not in self.lone:
            self.lone[key] = self.lone_clocks(device, trace, timer, overlaps)
        return self.lone[key]

    @staticmethod
    def lone_clocks(device, trace, timer, overlaps):
        far = device.memory_latency * device.clock

        def latency_of(number):
            if number < 0:
                return latency.CACHED
            if number == 0:
                return 0.0
            return far if number in trace.streamed else device.l2_latency

        waits = {at: [latency_of(n) for n in list_] for at, list_ in trace.requests.waits.items()}
        return timer.clocks(trace.path, waits, overlaps)

    def time(self, spec, device, mean, working, alone, overlaps):
        """Microseconds of a launch, with the gap before it, and its waves of CTAs with work.

        CTAs run in waves of as many as the device holds. A wave takes the time of the busiest pipe
        of the multiprocessors with the most CTAs, or of memory. All waves take at least as long as
        the CTAs of `alone` would if each ran at the speed of a warp that runs alone.
        """
        slots = self.held(spec, device) * device.multiprocessors
        clocks, left = 0.0, working
        while left > 0:
            now = min(left, slots)
            share = now / working
            on_one = -(-now // device.multiprocessors)
            evenly = now / device.multiprocessors
            busiest = max(of_one(mean, on_one / evenly, device).values()) * share
            rate = device.reached
            if spec.in_flight:
                rate = min(rate, now * spec.in_flight / (device.memory_latency * 1e-6))
            transfer = spec.memory_bytes * share / rate * device.hertz
            clocks += max(busiest, transfer)
            left -= now
        # Loads of the memory that streams come before the wait only if the launch overlaps.
        is_late = spec.memory_bytes and not (overlaps and spec.loads_early)
        fill = device.memory_latency if is_late else 0.0
        gap = EARLY_GAP_US if overlaps else GAP_US
        time = max(clocks, makespan(alone, slots)) / device.clock + fill + gap
        return time, working / slots

    def held(self, spec, device):
        """CTAs that a multiprocessor holds at a time."""
        use = self.manifest[spec.image]["kernels"][spec.kernel][device.architecture]
        warps = -(-(spec.cta[0] * spec.cta[1] * spec.cta[2]) // 32)
        of_warp = -(-use["registers"] * 32 // 256) * 256
        by_registers = (
            REGISTERS // of_warp // 4 * 4 // warps if warps >= 4 else REGISTERS // of_warp
        )
        # The system takes 1 KiB of shared memory per CTA.
        by_shared = (device.shared << 10) // (spec.shared + use["shared"] + 1024)
        return max(1, min(by_registers, by_shared, device.warps // warps, device.ctas))


def of_one(mean, factor, device):
    """Clocks of the multiprocessor that has `factor` times as much work as the `mean` one, by pipe.

    The second-level cache serves few as fast as their ports take it, and all together no faster.
    """
    port = device.l2_bytes_per_clock / L2_PORT
    return {
        pipe: clocks * (max(1.0, factor * port) if pipe == "l2" else factor)
        for pipe, clocks in mean.items()
        if pipe in pipes.PIPES
    }


def makespan(jobs, slots):
    """The time of jobs [(time, count)] on so many slots, the longest first."""
    ends = [0.0] * slots
    for time, count in sorted(jobs, reverse=True):
        for _ in range(count):
            heapq.heapreplace(ends, ends[0] + time)
    return max(ends)


def expect_bytes(spec, device, streamed):
    """Refuses a launch that does not read what its shape says: then it was not run right."""
    if not 0.99 * spec.memory_bytes <= streamed <= 1.1 * spec.memory_bytes:
        raise ValueError(
            f"{spec.kernel} for sm_{device.architecture}, {spec.name}: its addresses reach"
            f" {streamed} bytes of weights, keys and values, expected {spec.memory_bytes}: an"
            " instruction is missing or wrong in model/semantics.py, or model/shapes.py is wrong"
        )


def hottest(kernel, costs, traces, device):
    """The loop with the most instructions: its clocks and instructions over all CTAs."""
    best, mix = {}, {}
    for loop in kernel.loops:
        total, ops = collections.Counter(), collections.Counter()
        for ctas, warps, trace in traces:
            ran = loop & trace.blocks.keys()
            if not ran:
                continue
            for pipe, clocks in costs.of(trace, device, loop).items():
                total[pipe] += ctas * warps * clocks
            for start in ran:
                for one in kernel.code[start : kernel.blocks[start]]:
                    name = ".".join([one.op, *one.mods])
                    ops[name] += ctas * warps * trace.blocks[start]
        if total["instructions"] > best.get("instructions", 0):
            best, mix = dict(total), dict(ops)
    return best, mix


def working(costs, traces):
    """CTAs with work; others end at once."""
    sizes = collections.Counter()
    for ctas, warps, trace in traces:
        instructions = sum(costs.blocks[at]["instructions"] * n for at, n in trace.blocks.items())
        sizes[instructions] += ctas / len([t for t in traces if t[0] == ctas])
    most = max(sizes)
    return round(sum(count for size, count in sizes.items() if size * 20 > most))


SOURCES = "".join(
    path.read_text()
    for path in sorted(pathlib.Path(__file__).parent.glob("*.py"))
    if path.name
    in ("sass.py", "lanes.py", "semantics.py", "operands.py", "warp.py", "memory.py", "launch.py")
)
