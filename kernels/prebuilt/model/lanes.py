"""Integer arithmetic of the 32 lanes of a warp, as far as addresses and branches need it.

A value is an int that all lanes share, a list of 32 ints, or None when it is unknown: what memory
holds, and what is computed from floats. Registers hold 32 bits, predicates 0 or 1.
"""

import functools
import math
import struct

LANES = 32
ALL = (1 << LANES) - 1
MASK = 0xFFFFFFFF
WIDE = 0xFFFFFFFFFFFFFFFF


def apply(function, *values):
    """`function` of each lane."""
    lists = 0
    for value in values:
        if value is None:
            return None
        lists += type(value) is list
    if not lists:
        return function(*values)
    # One or two values, the most frequent, without a tuple per lane.
    if len(values) == 1:
        return [function(a) for a in values[0]]
    if len(values) == 2:
        first, second = values
        if lists == 2:
            return [function(a, b) for a, b in zip(first, second)]
        if type(first) is list:
            return [function(a, second) for a in first]
        return [function(first, b) for b in second]
    columns = [value if type(value) is list else (value,) * LANES for value in values]
    return list(map(function, *columns))


def lane(value, index):
    return value[index] if type(value) is list else value


def bits_of(value):
    """A predicate as a mask of lanes, or None."""
    if value is None:
        return None
    if type(value) is list:
        return sum(1 << index for index, bit in enumerate(value) if bit)
    return ALL if value else 0


def merge(mask, new, old):
    """`new` in the lanes of `mask`, `old` in the others; lanes that had nothing get `new`, too."""
    if new is None or old is None:
        return new
    if type(new) is not list and type(old) is not list and new == old:
        return new
    return [lane(new if mask >> at & 1 else old, at) for at in range(LANES)]


def signed(value, bits=32):
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def logic(table, a, b, c):
    """LOP3: bit i of `table` is the result where a, b, c have the bits of i, a the highest."""
    out = 0
    for index in range(8):
        if table >> index & 1:
            out |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return out & MASK


LOGIC = {
    0xC0: lambda a, b, c: a & b,
    0xFC: lambda a, b, c: a | b,
    0x3C: lambda a, b, c: a ^ b,
    0xE2: lambda a, b, c: (a & b) | (c & ~b) & MASK,
    0xF8: lambda a, b, c: a | (b & c),
    0x78: lambda a, b, c: a ^ (b & c),
    0xFE: lambda a, b, c: a | b | c,
    0x96: lambda a, b, c: a ^ b ^ c,
}


def logic_of(table):
    return LOGIC.get(table) or functools.partial(logic, table)


def shift(mods):
    """SHF.L and SHF.R: (low, amount, high) -> one register."""
    is_right, is_high = "R" in mods, "HI" in mods
    kind = next((m for m in mods if m[0] in "US" and m[1:].isdigit()), "U32")
    is_signed, is_wide = kind[0] == "S", kind.endswith("64")

    def run(low, amount, high):
        amount = amount & 63 if "W" not in mods else amount & 31
        if not is_wide:
            amount = min(amount, 32)
            if is_right:
                value = high if is_high else low
                return ((signed(value) if is_signed else value) >> amount) & MASK
            if is_high:
                return ((high << 32 | low) << amount) >> 32 & MASK
            return low << amount & MASK
        value = high << 32 | low
        if is_right:
            value = (signed(value, 64) if is_signed else value) >> amount
        else:
            value <<= amount
        return (value >> 32 if is_high else value) & MASK

    return run


def permute(a, selector, b):
    """PRMT: four bytes of b:a."""
    data, out = b << 32 | a, 0
    for at in range(4):
        pick = selector >> (4 * at) & 15
        byte = data >> (8 * (pick & 7)) & 255
        if pick & 8:
            byte = 255 if byte & 128 else 0
        out |= byte << (8 * at)
    return out


COMPARE = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "EQ": lambda a, b: a == b,
    "NE": lambda a, b: a != b,
}
COMBINE = {"AND": lambda a, b: a & b, "OR": lambda a, b: a | b, "XOR": lambda a, b: a ^ b}


def float_of(bits):
    return struct.unpack("<f", struct.pack("<I", bits & MASK))[0]


def float_bits(value):
    try:
        return struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:
        return 0x7F800000 | (value < 0) << 31


def float_of_int(mods):
    """I2F of unsigned or signed integers, rounded to nearest or, with RP, up."""

    def run(value):
        exact = signed(value) if "S32" in mods else value
        bits = float_bits(float(exact))
        if "RP" in mods and float_of(bits) < exact:
            bits += 1
        return bits

    return run


def reciprocal(bits):
    value = float_of(bits)
    return float_bits(1.0 / value) if value else float_bits(math.inf)


def int_of_float(bits):
    """F2I.U32.TRUNC; out of range values saturate."""
    value = float_of(bits)
    if not math.isfinite(value):
        return MASK if value > 0 else 0
    return min(max(int(value), 0), MASK)


def half_bits(value):
    return struct.unpack("<H", struct.pack("<e", value))[0]
