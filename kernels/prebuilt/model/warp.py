"""Runs the branches and addresses of a kernel, warp by warp, and counts what is executed.

Only instructions on which a branch or an address depends are computed (`relevant`). Lanes that
take different paths are groups; the group with the smallest address runs first, so that groups
meet again where the compiler joins them. A branch on a value from memory or floats is assumed to
fall through, unless it goes around the call of a subroutine; `Trace.assumed` lists them.
"""

import collections
import dataclasses

from . import lanes, memory, operands, semantics

# Visits of a branch that depends on unknown values, after which it is taken: a spin loop.
MOST_UNKNOWN = 64
MEMORY = {"LDG", "LDS", "STG", "STS", "LDGSTS", "LDSM", "LD", "ST", "RED", "REDG", "ATOMG", "LDL"}


@dataclasses.dataclass
class Trace:
    """What a warp executed."""

    blocks: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    requests: memory.Requests = dataclasses.field(default_factory=memory.Requests)
    # The blocks in their order, for latencies.
    path: list = dataclasses.field(default_factory=list)
    assumed: set = dataclasses.field(default_factory=set)
    # Buffers of the launch that come from the device's memory.
    streamed: set = dataclasses.field(default_factory=set)


def relevant(kernel):
    """Indices of the instructions that decide branches and addresses (a backward slice)."""
    code = kernel.code
    needed_in, chosen = {at: set() for at in kernel.blocks}, set()
    before = collections.defaultdict(list)
    for at in kernel.blocks:
        for to in kernel.successors(at):
            before[to].append(at)
    facts = [facts_of(one) for one in code]
    work = list(kernel.blocks)
    while work:
        start = work.pop()
        needed = set().union(*(needed_in[to] for to in kernel.successors(start)))
        for at in range(kernel.blocks[start] - 1, start - 1, -1):
            written, read, always = facts[at]
            if written & needed:
                chosen.add(at)
                if not code[at].guard:
                    needed -= written
                needed |= read
            needed |= always
        if needed != needed_in[start]:
            needed_in[start] = needed
            work += before[start]
    return chosen


def facts_of(one):
    """Registers written; read to compute them; read whether or not the results matter."""
    guard = {one.guard} if one.guard else set()
    written = set(operands.results(one)[0])
    if one.op in MEMORY:
        addresses = {
            name
            for operand in one.operands
            if operand.kind == "memory"
            for term, _, is_wide in operand.terms
            for name in operands.numbered(term, 2 if is_wide else 1)
        }
        # Copies have a predicate behind their addresses.
        last = one.operands[-1]
        if one.op == "LDGSTS" and last.kind == "predicate":
            guard = guard | {last.name}
        return written, set(), addresses | guard
    if one.op in ("BRA", "BRX", "EXIT", "RET", "CALL"):
        return written, set(), guard | {o.name for o in one.operands if o.kind == "predicate"}
    if semantics.maker(one) is None:
        return written, guard, set()
    return written, set(operands.uses(one)) | guard, set()


class Program:
    """A kernel prepared for running: one list of steps per basic block."""

    def __init__(self, kernel):
        self.kernel = kernel
        chosen = relevant(kernel)
        self.steps = {}
        for start, end in kernel.blocks.items():
            steps = []
            for at in range(start, end):
                one = kernel.code[at]
                if one.op in MEMORY:
                    steps.append(access(at, one, at in chosen))
                elif at in chosen:
                    steps.append(assign(one))
            self.steps[start] = steps

    def run(self, launch, cta, warp, trace):
        """Runs a warp of a CTA and adds to `trace`."""
        Run(self, operands.State(launch, cta, warp), trace).go()
        trace.requests.end()


class Run:
    """One warp."""

    def __init__(self, program, state, trace):
        self.program, self.state, self.trace = program, state, trace
        self.groups = {0: lanes.ALL}
        self.unknown = collections.Counter()
        self.calls = []

    def go(self):
        kernel, groups, blocks = self.program.kernel, self.groups, self.trace.blocks
        steps = 0
        while groups:
            start = min(groups)
            mask = groups.pop(start)
            blocks[start] += 1
            self.trace.path.append(start)
            for step in self.program.steps[start]:
                step(self.state, mask, not groups, self.trace)
            self.leave(kernel.code[kernel.blocks[start] - 1], start, mask)
            steps += 1
            if steps > 1_000_000:
                raise RuntimeError(f"{kernel.name} does not end")

    def leave(self, last, start, mask):
        """Sends the lanes of `mask` to the blocks that follow."""
        kernel = self.program.kernel
        after = kernel.blocks[start]
        if last.op not in ("BRA", "EXIT", "RET", "CALL"):
            return self.enter(after, mask)
        taken = self.taken(last, mask)
        self.enter(after, mask & ~taken)
        if last.op == "BRA":
            self.enter(kernel.labels[last.label()], taken)
        elif last.op == "CALL":
            self.calls.append(after)
            self.enter(kernel.labels[last.label()], taken)
        elif last.op == "RET" and self.calls:
            self.enter(self.calls.pop(), taken)

    def falls_into_call(self, one):
        """Whether a branch goes around a call: the rare cases of a division are subroutines."""
        kernel = self.program.kernel
        after = next(at for at in sorted(kernel.blocks) if kernel.code[at].address > one.address)
        return one.op == "BRA" and kernel.code[kernel.blocks[after] - 1].op == "CALL"

    def enter(self, at, mask):
        if mask and at < len(self.program.kernel.code):
            self.groups[at] = self.groups.get(at, 0) | mask

    def taken(self, one, mask):
        """The lanes of `mask` that branch."""
        if "DIV" in one.mods:
            # Out of line: what divergent warps do before they meet.
            return 0
        value = 1
        for operand in one.operands:
            if operand.kind == "predicate":
                value = operands.reader(operand)(self.state)
        bits = both(lanes.bits_of(value), guard_of(one, self.state))
        if bits is None:
            self.trace.assumed.add(one.address)
            self.unknown[one.address] += 1
            is_stuck = self.unknown[one.address] % MOST_UNKNOWN == 0
            return mask if is_stuck or self.falls_into_call(one) else 0
        return mask & bits


def both(a, b):
    """The conjunction of two masks, of which None is unknown."""
    if a == 0 or b == 0:
        return 0
    return None if a is None or b is None else a & b


def guard_of(one, state):
    """The lanes for which the guard holds."""
    if not one.guard:
        return lanes.ALL
    bits = lanes.bits_of(state.registers.get(one.guard))
    return bits if bits is None or not one.is_negated else bits ^ lanes.ALL


def assign(one):
    """A step that computes registers."""
    compute = semantics.compiled(one)

    def step(state, mask, is_whole, trace):
        bits = guard_of(one, state)
        if bits is not None:
            mask &= bits
        if not mask:
            return
        values = compute(state)
        registers = state.registers
        if bits is None:
            registers.update(dict.fromkeys(values))
        elif is_whole and bits == lanes.ALL or one.op[0] == "U":
            registers.update(values)
        else:
            for name, value in values.items():
                registers[name] = lanes.merge(mask, value, registers.get(name))

    return step


def access(at, one, is_chosen):
    """A step that records an access to memory and, where it matters, loads a value."""
    where = [o for o in one.operands if o.kind == "memory"]
    reads = [address_of(operand) for operand in where]
    extra = one.operands[-1] if one.op == "LDGSTS" else None
    extra = operands.reader(extra) if extra is not None and extra.kind == "predicate" else None
    names = operands.results(one)[0]

    def step(state, mask, is_whole, trace):
        bits = guard_of(one, state)
        if extra:
            bits = both(bits, lanes.bits_of(extra(state)))
        active = mask if bits is None else mask & bits
        addresses = [read(state) for read in reads]
        trace.requests.add(at, one, addresses, active)
        if not is_chosen or not active:
            return
        words = [None] * len(names)
        if one.op == "LDG" and addresses[0] is not None and bits is not None:
            words = [
                lanes.apply(lambda a, n=n: state.launch.word(a + 4 * n), addresses[0])
                for n in range(len(names))
            ]
            words = [None if type(w) is list and None in w else w for w in words]
        for name, word in zip(names, words):
            whole = is_whole and bits == lanes.ALL
            state.registers[name] = (
                word if whole else lanes.merge(active, word, state.registers.get(name))
            )

    return step


def address_of(operand):
    """A function State -> byte address."""

    def term(name, factor, is_wide):
        pair = operands.numbered(name, 2)
        if is_wide and pair:
            low, high = pair
            return lambda state: lanes.apply(
                lambda a, b: b << 32 | a, state.registers.get(low), state.registers.get(high)
            )
        return lambda state: lanes.apply(lambda a: a * factor, state.registers.get(name))

    terms = [term(*one) for one in operand.terms]
    offset = operand.offset
    wraps = not any(is_wide for _, _, is_wide in operand.terms)

    def read(state):
        total = lanes.apply(lambda *v: sum(v) + offset, *(t(state) for t in terms))
        if total is None or not wraps:
            return total
        return lanes.apply(lambda v: v & lanes.MASK, total)

    return read
