"""What integer instructions do to the registers of a warp.

`compiled` turns an instruction into a function of a `State`. Instructions that are not listed make
their results unknown, which is right for floats: no address depends on them.
"""

from . import lanes
from .lanes import MASK, WIDE, apply
from .operands import numbered, reader, results, width


def maker(one):
    """A function State -> results of an instruction, or None where they are unknown."""
    make = TABLE.get(one.op) or TABLE.get(one.op.removeprefix("U"))
    return make(one, one.operands[results(one)[1] :]) if make else None


def compiled(one):
    """A function State -> {name: value} of an instruction without memory."""
    names, skip = results(one)
    made = maker(one)
    targets = names if one.op == "R2P" else [operand.name for operand in one.operands[:skip]]
    if made is None:
        return lambda state: dict.fromkeys(names)

    def run(state):
        values = made(state)
        out = {}
        for target, value in zip(targets, values):
            if target.endswith(("Z", "T")):
                continue
            if type(value) is tuple:
                out.update(zip(numbered(target, len(value)), value))
            else:
                out[target] = value
        for name in names:
            out.setdefault(name, None)
        return out

    return run


def pair(value):
    """The two registers of 64 bits."""
    return apply(lambda v: v & MASK, value), apply(lambda v: v >> 32 & MASK, value)


def add(one, operands):
    """IADD3, IADD, VIADD: sums with carries out, and with .X carries in."""
    if "64" in one.mods:
        read = [reader(o, True) for o in operands if o.kind != "predicate"]
        total = lambda *v: sum(v) & WIDE  # noqa: E731
        return lambda state: [pair(apply(total, *(r(state) for r in read)))]
    carries = [reader(o) for o in operands if o.kind == "predicate"]
    # A minus sign adds the complement and one, so that a difference carries like a sum.
    values = [
        reader(o, negation=lambda a: (1 << 32) - a) for o in operands if o.kind != "predicate"
    ]
    out = results(one)[1] - 1

    def run(state):
        read = [*(r(state) for r in values), *(c(state) for c in carries)]
        # What all lanes share is added once.
        shared = sum(v for v in read if type(v) is int)
        lists = [v for v in read if type(v) is not int]
        if None in lists:
            return [None] * (out + 1)
        if len(lists) < 2:
            return summed(apply(shared.__add__, lists[0]) if lists else shared, out)
        total = map(sum, zip(*lists)) if not shared else (shared + sum(v) for v in zip(*lists))
        return summed(list(total), out)

    return run


def summed(total, carries):
    """The lower 32 bits of a sum, then so many carries."""
    if type(total) is list:
        low = [t & MASK for t in total]
        return [low, *([int(t >> 32 > n) for t in total] for n in range(carries))]
    low = apply(MASK.__and__, total)
    return [low, *(apply(lambda t, n=n: int(t >> 32 > n), total) for n in range(carries))]


def multiply(one, operands):
    """IMAD and its forms."""
    is_wide, is_high = "WIDE" in one.mods, "HI" in one.mods
    if {"MOV", "SHL", "IADD"} & set(one.mods) or not is_wide and not is_high:
        carry = [reader(o) for o in operands if o.kind == "predicate"]
        a, b, c = (reader(o) for o in operands if o.kind != "predicate")
        total = lambda x, y, z, *more: x * y + z + sum(more)  # noqa: E731
        out = results(one)[1] - 1

        def run(state):
            read = [a(state), b(state), c(state), *(p(state) for p in carry)]
            return summed(apply(total, *read), out)

        return run
    factors = [o for o in operands if o.kind != "predicate"]
    a, b = (reader(o) for o in factors[:2])
    c = reader(factors[2], True)
    is_unsigned = "U32" in one.mods

    def product(x, y, z):
        if not is_unsigned:
            x, y = lanes.signed(x), lanes.signed(y)
        return (x * y + z) & WIDE

    if is_wide:
        return lambda state: [pair(apply(product, a(state), b(state), c(state)))]
    return lambda state: [pair(apply(product, a(state), b(state), c(state)))[1]]


def lea(one, operands):
    """LEA: (a << n) + b; with .HI the upper half of (c:a) << n, plus b."""
    carry = [reader(o) for o in operands if o.kind == "predicate"]
    rest = [o for o in operands if o.kind != "predicate"]
    amount, out = rest[-1].value, results(one)[1] - 1
    if "HI" in one.mods:
        a, b = reader(rest[0]), reader(rest[1])
        if len(rest) == 4:
            c = reader(rest[2])
        elif "SX32" in one.mods:
            c = lambda state: apply(lambda v: MASK * (v >> 31), a(state))  # noqa: E731
        else:
            c = lambda state: 0  # noqa: E731

        def high(x, y, z, *more):
            return (((z << 32 | x) << amount) >> 32 & MASK) + y + sum(more)

        return lambda state: summed(
            apply(high, a(state), b(state), c(state), *(p(state) for p in carry)), out
        )
    a = reader(rest[0])
    b = reader(rest[1], negation=lambda v: (1 << 32) - v)
    total = lambda x, y: (x << amount & MASK) + y  # noqa: E731
    return lambda state: summed(apply(total, a(state), b(state)), out)


def lop3(one, operands):
    function = lanes.logic_of(operands[3].value)
    a, b, c = (reader(o) for o in operands[:3])
    # A predicate as the first result: whether the other one is not zero.
    has_predicate = one.operands[0].kind == "predicate"

    def run(state):
        value = apply(function, a(state), b(state), c(state))
        return [apply(lambda v: int(v != 0), value), value] if has_predicate else [value]

    return run


def plop3(one, operands):
    tables = [o.value for o in operands if o.kind == "immediate"]
    a, b, c = (reader(o) for o in operands[:3])

    def run(state):
        values = a(state), b(state), c(state)
        # Constants decide although other operands are unknown.
        known = [v if v is not None else 0 for v in values]
        flipped = [v if v is not None else 1 for v in values]
        out = []
        for table in tables:
            bit = lambda x, y, z, t=table: t >> (x * 4 + y * 2 + z) & 1  # noqa: E731
            first, second = apply(bit, *known), apply(bit, *flipped)
            out.append(first if first == second else None)
        return out

    return run


def compare(one, operands):
    relation = lanes.COMPARE.get(one.mods[0])
    combine = next((lanes.COMBINE[m] for m in one.mods if m in lanes.COMBINE), None)
    if relation is None or combine is None:
        return None
    is_wide = bool({"U64", "S64"} & set(one.mods))
    bits = 64 if is_wide else 32
    is_unsigned = bool({"U32", "U64"} & set(one.mods))
    a, b = (reader(o, is_wide) for o in operands[:2])
    also = reader(operands[2])
    # .EX: the lower halves were compared before, and decide when the upper ones are equal.
    lower = reader(operands[3]) if "EX" in one.mods else None

    def run(state):
        x, y = a(state), b(state)
        if not is_unsigned:
            x, y = (apply(lambda v: lanes.signed(v, bits), v) for v in (x, y))
        is_true = apply(lambda p, q: int(relation(p, q)), x, y)
        if lower:
            is_true = apply(lambda p, q, t, low: low if p == q else t, x, y, is_true, lower(state))
        other = also(state)
        both = apply(combine, is_true, other)
        inverse = apply(lambda t, o: combine(1 - t, o), is_true, other)
        return [both, inverse]

    return run


def select(one, operands):
    is_wide = "64" in one.mods
    a, b = (reader(o, is_wide) for o in operands[:2])
    which = reader(operands[2])

    def run(state):
        value = apply(lambda x, y, p: x if p else y, a(state), b(state), which(state))
        return [pair(value) if is_wide else value]

    return run


def least(one, operands):
    """VIMNMX, IMNMX; VIADDMNMX adds first."""
    is_signed = "U32" not in one.mods
    rest = [reader(o) for o in operands if o.kind != "predicate"]
    which = next(reader(o) for o in operands if o.kind == "predicate")
    adds = "ADD" in one.op

    def run(state):
        values = [r(state) for r in rest]
        if adds:
            values = [apply(lambda x, y: x + y & MASK, *values[:2]), values[2]]
        key = (lambda v: lanes.signed(v)) if is_signed else (lambda v: v)
        choose = lambda x, y, p: (min if p else max)(x, y, key=key)  # noqa: E731
        return [apply(choose, *values[:2], which(state))]

    return run


def move(one, operands):
    is_wide = "64" in one.mods
    read = reader(operands[0], is_wide)
    return lambda state: [pair(read(state)) if is_wide else read(state)]


def half_constants(one, operands):
    """HFMA2 of zeros moves two 16-bit constants."""
    if [o.name for o in operands[:2]] != ["RZ", "RZ"] or len(operands) != 4:
        return None
    try:
        high, low = (float(o.value if o.kind == "immediate" else o.text) for o in operands[2:])
    except ValueError:
        return None
    value = lanes.half_bits(high) << 16 | lanes.half_bits(low)
    return lambda state: [value]


def predicates_to_register(one, operands):
    """P2R: the predicates of a mask as bits of a register."""
    read, mask = reader(operands[1]), operands[2].value

    def run(state):
        values = [state.registers.get(f"P{bit}", 0) for bit in range(7) if mask >> bit & 1]
        bits = [bit for bit in range(7) if mask >> bit & 1]
        if None in values:
            return [None]
        pack = lambda old, *p: old & ~mask | sum(b << at for b, at in zip(p, bits))  # noqa: E731
        return [apply(pack, read(state), *values)]

    return run


def register_to_predicates(one, operands):
    read, mask = reader(operands[0]), operands[1].value
    bits = [bit for bit in range(7) if mask >> bit & 1]
    return lambda state: [apply(lambda v, at=at: v >> at & 1, read(state)) for at in bits]


def first_lane(one, operands):
    """R2UR: a uniform register from the first lane, before it the lanes that differ: none."""
    read = reader(operands[0])
    differ = [0] * (results(one)[1] - 1)
    return lambda state: [*differ, lanes.lane(read(state), 0)]


def of_lane(function):
    return lambda one, operands: (
        lambda state, read=reader(operands[0]): [apply(function, read(state))]
    )


def three(make):
    def build(one, operands):
        read = [reader(o) for o in operands[:3]]
        function = make(one)
        return lambda state: [apply(function, *(r(state) for r in read))]

    return build


def special(one, operands):
    if one.op == "CS2R":
        return lambda state: [(0, 0)] if operands[0].text == "SRZ" else [(None, None)]
    return lambda state: [state.special.get(operands[0].text)]


def shuffle(one, operands):
    """SHFL.IDX: the value of the lane that each lane names."""
    if "IDX" not in one.mods:
        return None
    read, of = reader(operands[0]), reader(operands[1])

    def run(state):
        values = read(state)
        if values is None:
            return [None, None]
        return [None, apply(lambda at: lanes.lane(values, at % lanes.LANES), of(state))]

    return run


def vote(one, operands):
    read = reader(operands[-1])

    def run(state):
        bits = lanes.bits_of(read(state))
        if bits is None or "ALL" not in one.mods and "ANY" not in one.mods:
            return [None]
        return [int(bits == lanes.ALL if "ALL" in one.mods else bits != 0)]

    return run


def constant(one, operands):
    count = width(one)
    where = operands[0]
    if where.terms:
        return None

    def run(state):
        offsets = range(where.offset, where.offset + 4 * count, 4)
        return [tuple(state.launch.constant(where.value, offset) for offset in offsets)]

    return run


TABLE = {
    "IADD3": add,
    "IADD": add,
    "VIADD": add,
    "IMAD": multiply,
    "LEA": lea,
    "LDC": constant,
    "ULDC": constant,
    "LDCU": constant,
    "LOP3": lop3,
    "PLOP3": plop3,
    "ISETP": compare,
    "SEL": select,
    "VIMNMX": least,
    "IMNMX": least,
    "VIADDMNMX": least,
    "HFMA2": half_constants,
    "P2R": predicates_to_register,
    "R2P": register_to_predicates,
    "MOV": move,
    "R2UR": first_lane,
    "SHF": three(lambda one: lanes.shift(one.mods)),
    "PRMT": three(lambda one: lanes.permute),
    "S2R": special,
    "S2UR": special,
    "CS2R": special,
    "VOTE": vote,
    "SHFL": shuffle,
    "I2F": lambda one, operands: of_lane(lanes.float_of_int(one.mods))(one, operands),
    "F2I": of_lane(lanes.int_of_float),
    "POPC": of_lane(lambda value: value.bit_count()),
    "FLO": of_lane(lambda value: (value.bit_length() - 1) & MASK),
    "IABS": of_lane(lambda value: abs(lanes.signed(value))),
    "MUFU": lambda one, operands: (
        of_lane(lanes.reciprocal)(one, operands) if "RCP" in one.mods else None
    ),
}
