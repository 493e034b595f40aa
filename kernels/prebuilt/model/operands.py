"""Which registers an instruction writes and reads, and the values of its operands."""

from . import lanes
from .lanes import MASK, WIDE, apply

# Results of instructions in 32-bit registers, where they are not one.
WIDTHS = {"64": 2, "128": 4, "256": 8}
STORES = {"ST", "STG", "STS", "STL", "RED", "REDG", "ATOMS", "LDGSTS"}
NO_RESULT = STORES | {
    *("BRA BRX JMP EXIT RET CALL BSSY BSYNC BAR WARPSYNC NOP DEPBAR LDGDEPBAR YIELD").split(),
    *("MEMBAR ERRBAR CCTL FENCE ENDCOLLECTIVE NANOSLEEP ACQBULK UBLKCP UTMALDG").split(),
    *("BREAK BMOV UCGABAR_ARV UCGABAR_WAIT WARPGROUP ARRIVES PREEXIT KILL").split(),
}
LOADS = {"LDG", "LDS", "LDC", "LDCU", "ULDC", "LDL", "LD", "LDSM"}


def width(one):
    """Registers of the first result."""
    if one.op in ("LDSM",):
        return 4 if any(m.endswith(".4") or m == "4" for m in one.mods) else 2
    if one.op.endswith("MMA"):
        return 4
    if one.op == "CS2R":
        return 1 if "32" in one.mods else 2
    if "WIDE" in one.mods:
        return 2
    return next((WIDTHS[m] for m in one.mods if m in WIDTHS), 1)


def numbered(name, count):
    """The registers `name`, the next one, ..."""
    if name.endswith("Z"):
        return []
    prefix = name.rstrip("0123456789")
    first = int(name[len(prefix) :])
    return [f"{prefix}{first + index}" for index in range(count)]


def results(one):
    """The leading operands that are written: (registers and predicates, number of operands)."""
    if one.op in NO_RESULT:
        return [], 0
    if one.op == "R2P":
        return [f"P{bit}" for bit in range(7) if one.operands[2].value >> bit & 1], 1
    names, count, had_register = [], 0, False
    # Comparisons and votes write two predicates; sums write carries behind their register.
    most = PREDICATES.get(one.op)
    if one.op.startswith("VOTE") and one.operands[0].kind == "register":
        most = None
    for operand in one.operands:
        if operand.kind == "predicate" and not operand.sign:
            if most is not None and count >= most:
                break
            names.append(operand.name)
        elif operand.kind == "register" and not had_register and most is None:
            had_register = True
            names += numbered(operand.name, width(one))
        else:
            break
        count += 1
        if had_register and one.op not in CARRIES:
            break
    return [name for name in names if not name.endswith("T")], count


PREDICATES = {"ISETP": 2, "UISETP": 2, "FSETP": 2, "PLOP3": 2, "UPLOP3": 2, "FCHK": 1, "VOTE": 1}
# SYNCS: a try_wait of a barrier in shared memory says whether it has waited.
PREDICATES |= {"VOTEU": 1, "HSETP2": 2, "DSETP": 2, "SYNCS": 1}
CARRIES = {"IADD3", "UIADD3", "LEA", "ULEA", "IMAD", "UIMAD", "VIMNMX", "VIADDMNMX"}


def uses(one):
    """Registers and predicates that an instruction reads, but for its guard."""
    _, skip = results(one)
    names = [f"P{bit}" for bit in range(7)] if one.op == "P2R" else []
    for operand in one.operands[skip:]:
        if operand.kind == "memory" or operand.terms:
            for name, _, is_wide in operand.terms:
                names += numbered(name, 2 if is_wide else 1)
        elif operand.kind == "register":
            # The summand of IMAD.HI has 64 bits, too.
            wide = {"64", "WIDE"} & set(one.mods) or one.op == "IMAD" and "HI" in one.mods
            count = 2 if operand.is_wide or wide else 1
            if one.op in STORES:
                count = width(one)
            if one.op.endswith("MMA"):
                count = 4
            names += numbered(operand.name, count)
        elif operand.kind == "predicate" and not operand.name.endswith("T"):
            names.append(operand.name)
    return names


class State:
    """Registers of a warp; constants and special registers of its launch."""

    def __init__(self, launch, cta, warp):
        # What nobody has written may have any value: compilers keep predicates in the bits of a
        # register that they never set as a whole.
        self.registers = {f"R{number}": 0 for number in range(255)}
        self.registers |= {"RZ": 0, "URZ": 0, "PT": 1, "UPT": 1}
        self.launch = launch
        tid = [warp * 32 + index for index in range(lanes.LANES)]
        x, y = launch.cta[:2]
        self.special = {
            "SR_TID.X": [at % x for at in tid],
            "SR_TID.Y": tid[0] // x if x % lanes.LANES == 0 else [at // x % y for at in tid],
            "SR_TID.Z": 0,
            "SR_LANEID": list(range(lanes.LANES)),
            "SR_CgaCtaId": 0,
            **{f"SR_CTAID.{axis}": cta[at] for at, axis in enumerate("XYZ")},
        }

    def get(self, name):
        return self.registers.get(name)


def reader(operand, is_wide=False, negation=None):
    """A function State -> value. `negation` replaces a minus sign's meaning."""
    kind, name = operand.kind, operand.name
    if kind == "immediate":
        value = operand.value & (WIDE if is_wide else MASK)
        return lambda state: value
    if kind == "constant":
        if operand.terms:
            return lambda state: None
        bank, offset = operand.value, operand.offset

        def read(state):
            low = state.launch.constant(bank, offset)
            if not is_wide:
                return low
            return apply(lambda a, b: b << 32 | a, low, state.launch.constant(bank, offset + 4))

    elif kind == "register":
        pair = numbered(name, 2)
        if is_wide and pair:

            def read(state):
                low, high = state.registers.get(pair[0]), state.registers.get(pair[1])
                return apply(lambda a, b: b << 32 | a, low, high)

        else:

            def read(state):
                return state.registers.get(name)

    elif kind == "predicate":
        if "!" in operand.sign:
            return lambda state: apply(lambda p: 1 - p, state.registers.get(name))
        return lambda state: state.registers.get(name)
    else:
        return lambda state: None
    most = WIDE if is_wide else MASK
    if "-" in operand.sign:
        minus = negation or (lambda a: -a & most)
        return lambda state: apply(minus, read(state))
    if "~" in operand.sign:
        return lambda state: apply(lambda a: a ^ most, read(state))
    return read
