"""The time of one warp that runs alone: what no number of multiprocessors shortens.

Instructions issue in order, one per clock, when their operands are there. Latencies in clocks are
those of arXiv 2208.11174 (A100) and 2402.13499 (Hopper), rounded; other devices are taken as
alike. Copies to shared memory end with the group that LDGDEPBAR closes; DEPBAR waits for groups.
"""

from . import operands
from .pipes import ALU, FP32, HEAVY, XU

FIXED = {"LDS": 30, "LDSM": 33, "SHFL": 25, "S2R": 20, "S2UR": 20, "LDC": 40, "BAR": 30}
FIXED |= {"ULDC": 12, "LDCU": 12}
# A load that the first-level cache has.
CACHED = 35


def latency_of(one):
    if one.op in FIXED:
        return FIXED[one.op]
    if one.op in XU:
        return 23
    if one.op.endswith("MMA"):
        return 33
    if one.op in ALU or one.op in FP32 or one.op in HEAVY:
        return 5
    return 12 if one.op[0] == "U" else 2


class Timer:
    """Prepared facts of a kernel's instructions."""

    def __init__(self, kernel):
        self.blocks = {
            start: [self.facts(at, kernel.code[at]) for at in range(start, end)]
            for start, end in kernel.blocks.items()
        }

    @staticmethod
    def facts(at, one):
        read = [*operands.uses(one), *([one.guard] if one.guard else [])]
        left = None
        if one.op == "DEPBAR" and one.operands[-1].kind == "immediate":
            left = one.operands[-1].value
        return at, one.op, read, operands.results(one)[0], latency_of(one), left

    def clocks(self, path, waits, overlaps=False):
        """Clocks of a path of blocks; `waits` has the latencies of each load's executions.

        Where a launch `overlaps` the one before it, its clocks begin at its wait (ACQBULK): what
        comes before runs beside the last launch, and loads from there have arrived.
        """
        begin = 0.0
        ready, now, last, groups, copies = {}, 0.0, 0.0, [], 0.0
        waits = {at: iter(latencies) for at, latencies in waits.items()}
        for start in path:
            for at, op, read, written, latency, left in self.blocks[start]:
                if op == "ACQBULK" and overlaps:
                    now = max([now, copies, *ready.values()])
                    begin, last = now, now
                for name in read:
                    if ready.get(name, 0.0) > now:
                        now = ready[name]
                if op == "LDGSTS":
                    copies = max(copies, now + next(waits[at], 0.0) if at in waits else 0.0)
                elif op == "LDGDEPBAR":
                    groups.append(copies)
                elif op == "DEPBAR" and left is not None:
                    for done in groups[: len(groups) - left]:
                        now = max(now, done)
                else:
                    if op == "LDG" and at in waits:
                        latency = next(waits[at], latency)
                    done = now + latency
                    for name in written:
                        ready[name] = done
                    last = max(last, done)
                now += 1.0
        return max(now, last, copies) - begin
