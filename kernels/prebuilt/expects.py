"""Checks that compiled kernels have the instructions that their sources expect.

The head of each .cu has lines such as

    // expects linear_gemv_nf4_*: HMMA; only LDGSTS.128; loop LDG.128; loop no LDG.64

A line names kernels by a pattern (*, ?) and lists, in clauses, the instructions that they have on
every architecture of the image. Several lines may name the same kernel.

    OP ...         at least one of each
    only OP ...    at least one of each, and none of the same instruction without these modifiers
    no OP ...      none
    may OP ...     allows LDL and STL (local memory) and a stack, which are refused by default

OP is an instruction and modifiers in any order: LDG.128 matches LDG.E.128.CONSTANT. A clause that
begins with `loop` concerns the loops around tensor-core products (HMMA, HGMMA). Every kernel needs
a line, and every line a kernel.
Source of the instructions' names: NVIDIA, "CUDA Binary Utilities", instruction set reference.
"""

import fnmatch
import re

REFUSED = ["LDL", "STL"]
WORDS = {"only", "no", "may"}


def expectations(source):
    """The lines of a source: [(pattern, [(in a loop, word or "", [OP])])]."""
    lines = []
    for pattern, rest in re.findall(r"^// expects ([^\s:]+): (.+)$", source, re.M):
        clauses = []
        for clause in rest.split(";"):
            words = clause.split()
            loop = words[:1] == ["loop"]
            words = words[loop:]
            word = words.pop(0) if words and words[0] in WORDS else ""
            if (
                not words
                or not all(re.fullmatch(r"[A-Z][A-Z0-9_]*(\.[A-Z0-9_]+)*", op) for op in words)
                or loop
                and word == "may"
            ):
                raise ValueError(f"cannot read the clause '{clause.strip()}' of {pattern}")
            clauses.append((loop, word, words))
        lines.append((pattern, clauses))
    return lines


def disassembled(text):
    """The kernels of a disassembly: {name: (instructions, instructions in tensor-core loops)}."""
    kernels, code, labels = {}, [], {}
    for line in text.splitlines():
        if begin := re.match(r"\.text\.(\w+):", line):
            code, labels = [], {}
            kernels[begin[1]] = (code, labels)
        elif label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(code)
        elif found := re.match(
            r"\s+/\*[0-9a-f]+\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*)", line
        ):
            code.append((found[2], found[1], found[3].strip()))
    return {
        name: ([op for op, _, _ in code], in_loops(code, labels))
        for name, (code, labels) in kernels.items()
    }


def waiting(text):
    """The kernels of a disassembly that wait for earlier launches (griddepcontrol.wait)."""
    return [name for name, (code, _) in disassembled(text).items() if "ACQBULK" in code]


def in_loops(code, labels):
    """Instructions from which a tensor-core product is reached that leads to them again."""
    after, before = [[] for _ in code], [[] for _ in code]
    for at, (op, predicate, operands) in enumerate(code):
        target = re.search(r"`\((\.L\w+)\)", operands)
        ends = not predicate and (
            op in ("EXIT", "RET") or op == "BRA" and operands.startswith("`(")
        )
        nexts = ([] if ends else [at + 1]) + (
            [labels[target[1]]] if target and target[1] in labels else []
        )
        for to in nexts:
            if to < len(code):
                after[at].append(to)
                before[to].append(at)

    def reached(at, edges):
        seen, left = set(), [at]
        while left:
            new = set(edges[left.pop()]) - seen
            seen |= new
            left += new
        return seen

    inside, products = (
        set(),
        {at for at, (op, _, _) in enumerate(code) if op.startswith(("HMMA", "HGMMA"))},
    )
    while products:
        at = products.pop()
        loop = reached(at, after) & reached(at, before)
        inside |= loop
        products -= loop
    return [code[at][0] for at in sorted(inside)]


def is_a(op, wanted):
    """Whether an instruction is the one that is wanted, with its modifiers at least."""
    (name, *have), (wanted_name, *modifiers) = op.split("."), wanted.split(".")
    return name == wanted_name and all(modifier in have for modifier in modifiers)


def violations(source, text, stacks):
    """One sentence per difference between the disassembly `text` and what `source` expects.

    `stacks` has the bytes of stack of each kernel.
    """
    lines, kernels, wrong = expectations(source), disassembled(text), []
    for name in stacks.keys() - kernels.keys():
        wrong.append(f"{name} is not in the disassembly")
    for pattern, _ in lines:
        if not fnmatch.filter(kernels, pattern):
            wrong.append(f"no kernel is called {pattern}")
    for name, (code, loops) in kernels.items():
        clauses = [
            clause for pattern, own in lines if fnmatch.fnmatchcase(name, pattern) for clause in own
        ]
        if not clauses:
            wrong.append(
                f"{name}: the source does not say what it expects (// expects {name}: ...)"
            )
        may = [op for _, word, ops in clauses if word == "may" for op in ops]
        for loop, word, ops in [*clauses, (False, "no", [op for op in REFUSED if op not in may])]:
            where = " in its loops" if loop else ""
            for wanted in ops:
                here = loops if loop else code
                found = [op for op in here if is_a(op, wanted)]
                others = [op for op in here if is_a(op, wanted.split(".")[0]) and op not in found]
                if word == "no" and found:
                    wrong.append(f"{name} has {len(found)} {found[0]}{where}")
                if word in ("", "only") and not found:
                    wrong.append(f"{name} has no {wanted}{where}")
                if word == "only" and others:
                    wrong.append(f"{name} has {len(others)} {others[0]}{where} beside {wanted}")
        if stacks.get(name, 0) and "STL" not in may:
            wrong.append(f"{name} has a stack of {stacks[name]} bytes")
    return wrong
