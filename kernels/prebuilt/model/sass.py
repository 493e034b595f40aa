"""Reads the text of nvdisasm: instructions with their operands, basic blocks, loops.

Source of the syntax: NVIDIA, "CUDA Binary Utilities", and the disassembly itself.
"""

import dataclasses
import functools
import re

LINE = re.compile(r"\s+/\*([0-9a-f]+)\*/\s+(?:@(!?)(U?P\w+)\s+)?([A-Z][A-Z0-9_.x]*)\s*([^;]*)")
NAME = re.compile(r"([-~!|]*)(U?[RP](?:\d+|Z|T)|B\d+|PR)((?:\.\w+)*)\|?$")
CONSTANT = re.compile(r"([-~|]*)c\[(0x[0-9a-f]+)\]\[(?:(U?R\d+)\+?)?(0x[0-9a-f]+)?\]\|?(?:\.\w+)*$")
SCALES = {"X4": 4, "X8": 8, "X16": 16}
JUMPS = {"BRA", "BRX", "JMP", "EXIT", "RET", "CALL"}


@dataclasses.dataclass(frozen=True)
class Operand:
    """One operand. `kind` is register, predicate, immediate, constant, memory, label or other."""

    kind: str
    text: str
    name: str = ""
    value: int = 0
    # Signs before a name: "-", "~", "!".
    sign: str = ""
    is_wide: bool = False
    # memory: [(register, factor, is_wide)]; constant: the bank is `value`, this the offset.
    terms: tuple = ()
    offset: int = 0


@dataclasses.dataclass
class Instruction:
    """One instruction; `op` is its name without the modifiers `mods`."""

    address: int
    op: str
    mods: tuple
    operands: list
    guard: str = ""
    is_negated: bool = False
    text: str = ""

    def label(self):
        return next((o.name for o in self.operands if o.kind == "label"), None)


@dataclasses.dataclass
class Kernel:
    """A kernel: its instructions and the basic blocks between them."""

    name: str
    code: list
    labels: dict
    # {bank: bytes} of the compiler's constants.
    constants: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.blocks = self._blocks()
        self.loops = self._loops()

    def _blocks(self):
        """{first instruction: one past the last}."""
        starts = {0, *(at for at in self.labels.values() if at < len(self.code))}
        starts |= {at + 1 for at, one in enumerate(self.code) if one.op in JUMPS}
        starts = sorted(at for at in starts if at < len(self.code))
        return dict(zip(starts, [*starts[1:], len(self.code)]))

    def successors(self, start):
        """Blocks that may run after the block at `start`; calls return behind themselves."""
        end = self.blocks[start]
        last = self.code[end - 1]
        target = last.label()
        to = [self.labels[target]] if last.op in JUMPS and target in self.labels else []
        if last.op in ("BRA", "BRX", "JMP") and not is_conditional(last) or ends(last):
            return to if not ends(last) else []
        return to + ([end] if end < len(self.code) else [])

    def _loops(self):
        """The strongly connected blocks with a cycle, as sets of block starts."""
        return [
            group
            for group in components({at: self.successors(at) for at in self.blocks})
            if len(group) > 1 or next(iter(group)) in self.successors(next(iter(group)))
        ]


def is_conditional(one):
    """Whether a branch may fall through."""
    if one.guard:
        return True
    kinds = [o for o in one.operands if o.kind in ("predicate", "register")]
    return bool(kinds) or bool({"DIV", "CONV"} & set(one.mods))


def ends(one):
    return one.op in ("EXIT", "RET") and not one.guard


def components(edges):
    """Tarjan's strongly connected components, without recursion."""
    order, low, stack, on_stack, found = {}, {}, [], set(), []
    for root in edges:
        if root in order:
            continue
        work = [(root, iter(edges[root]))]
        order[root] = low[root] = len(order)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for to in rest:
                if to not in order:
                    order[to] = low[to] = len(order)
                    stack.append(to)
                    on_stack.add(to)
                    work.append((to, iter(edges[to])))
                    break
                if to in on_stack:
                    low[node] = min(low[node], order[to])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    group = set()
                    while node not in group:
                        group.add(stack.pop())
                    on_stack -= group
                    found.append(group)
    return found


def parts(text):
    """The text of each kernel of a disassembly."""
    found = re.split(r"^\.text\.(?=\w+:)", text, flags=re.M)[1:]
    return {part[: part.index(":")]: part for part in found}


def read(text):
    """Instructions and labels of one kernel."""
    code, labels = [], {}
    for line in text.splitlines():
        if label := re.match(r"([.$\w]+):", line):
            labels[label[1]] = len(code)
        elif found := LINE.match(line):
            address, negated, guard, op, rest = found.groups()
            op, *mods = op.split(".")
            operands = [operand(word) for word in split(rest)]
            code.append(
                Instruction(
                    int(address, 16), op, tuple(mods), operands, guard or "", bool(negated), line
                )
            )
    return code, labels


def split(text):
    """The operands between commas and blanks that are outside of brackets."""
    words, depth, word = [], 0, ""
    for letter in text.strip():
        depth += (letter in "[(") - (letter in "])")
        if depth == 0 and letter in ", ":
            words.append(word)
            word = ""
        else:
            word += letter
    return [word for word in [*words, word] if word]


@functools.lru_cache(maxsize=None)
def operand(text):
    """Reads one operand."""
    if text.startswith("`("):
        return Operand("label", text, text[2:-1])
    if text.startswith(("[", "desc[")):
        return memory(text)
    if found := NAME.match(text):
        sign, name, suffix = found.groups()
        kind = "predicate" if "P" in name and name != "PR" else "register"
        parts = [part for part in suffix.split(".") if part not in ("", "reuse", "64")]
        if name.startswith("B") or name == "PR" or parts or "|" in sign:
            # Part of a register or an absolute value: nothing that addresses are made of.
            return Operand("other", text, name)
        return Operand(kind, text, name, sign=sign, is_wide=".64" in suffix)
    if found := CONSTANT.match(text):
        sign, bank, index, offset = found.groups()
        terms = ((index, 1, False),) if index else ()
        return Operand(
            "constant", text, "", int(bank, 16), sign, False, terms, int(offset or "0", 16)
        )
    try:
        return Operand("immediate", text, value=int(text, 0) & 0xFFFFFFFFFFFFFFFF)
    except ValueError:
        return Operand("other", text, text)


def memory(text):
    """An address: `[R2.64+UR4+0x10]`, `desc[UR4][R2.64]`, `[R5.X4+0x20]`."""
    inside = text[text.rindex("[") + 1 : -1]
    terms, offset = [], 0
    for sign, word in re.findall(r"([-+]?)([^-+]+)", inside):
        base, *suffixes = word.split(".")
        if re.fullmatch(r"U?R(\d+|Z)", base):
            scale = next((SCALES[part] for part in suffixes if part in SCALES), 1)
            terms.append((base, scale, "64" in suffixes))
        else:
            offset += -int(base, 0) if sign == "-" else int(base, 0)
    return Operand("memory", text, terms=tuple(terms), offset=offset)
