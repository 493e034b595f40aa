"""Which pipe executes an instruction, and for how many clocks of a multiprocessor.

Rates are results per clock and multiprocessor; a warp instruction has 32. Sources:

- [throughput] NVIDIA, "CUDA C++ Best Practices Guide", 12.1.1 Throughput of Native Arithmetic
  Instructions (before CUDA 13: "CUDA C++ Programming Guide", 8.4.1)
- [pipes] NVIDIA, "Nsight Compute Profiling Guide", Pipelines: IMAD and packed 16-bit products on
  the heavy half of FMA; conversions of f32 to packed 16-bit numbers (F2FP) on ALU; MUFU, I2F, F2I
  and F2F on XU
- [tensor] devices.py

A multiprocessor has 4 schedulers, each of which issues one warp instruction per clock. Pipes are
taken as shared evenly by them.

Assumptions that no document states: F2FP has the rate of other ALU instructions; instructions of
the uniform datapath take half a clock; branches, barriers and special registers cost their issue.
"""

import collections

PIPES = ["issue", "alu", "fma", "fma heavy", "xu", "lsu", "tensor", "uniform", "l2"]
SCHEDULERS = 4

ALU = set(
    "IADD3 IADD VIADD LOP3 PLOP3 ISETP FSETP SEL FSEL SHF PRMT LEA MOV VIMNMX VIMNMX3 IMNMX FMNMX"
    " FMNMX3 VIADDMNMX SGXT BMSK P2R R2P IABS VOTE VOTEU FCHK F2FP I2FP CS2R R2UR ICMP LOP"
    " HMNMX2 HSETP2 VABSDIFF FSWZADD UP2UR".split()
)
FP32 = {"FFMA", "FADD", "FMUL", "FFMA2", "FADD2", "FMUL2"}
HEAVY = {"IMAD", "IDP", "HFMA2", "HADD2", "HMUL2", "IMUL", "HFMA2_32I"}
XU = set("MUFU I2F F2I F2F FRND POPC FLO BREV DADD DMUL DFMA DSETP".split())
LSU = set("LDG LDS STG STS LDGSTS LDSM STSM LD ST RED REDG ATOMG ATOMS LDL STL SHFL".split())
UNIFORM_ALONE = {"S2UR", "ULDC", "LDCU"}
# Instructions that cost their issue alone.
CONTROL = set(
    "BRA BRX JMP EXIT RET CALL BSSY BSYNC BAR WARPSYNC NOP DEPBAR LDGDEPBAR YIELD MEMBAR ERRBAR"
    " CCTL FENCE ENDCOLLECTIVE NANOSLEEP SYNCS S2R LDC UBLKCP UTMALDG BREAK BMOV ELECT"
    " UCGABAR_ARV UCGABAR_WAIT WARPGROUP ARRIVES ACQBULK PREEXIT KILL DEPBAR B2R R2B".split()
)

# Products per matrix instruction of a warp: HMMA.16816 is 16 x 8 x 16.
TENSOR = {"16816": 2048, "1688": 1024, "16832": 4096}


def results_per_clock(one, architecture):
    """[(pipe, results per clock and multiprocessor)] of an instruction that is not memory's."""
    is_first = architecture == "80"
    if one.op in ALU:
        # 12.0 has unified cores for sums of integers.
        is_sum = architecture == "120" and one.op in ("IADD3", "IADD", "VIADD")
        return [("alu", 128 if is_sum else 64)]
    if one.op in FP32:
        return [("fma", 64 if is_first else 128)]
    if one.op in HEAVY:
        return [("fma", 64 if is_first else 128), ("fma heavy", 64)]
    if one.op in XU:
        return [("xu", 16)]
    if one.op in UNIFORM_ALONE or one.op[0] == "U":
        return [("uniform", 64)]
    return []


def clocks(one, architecture):
    """{pipe: clocks of a multiprocessor} of one warp instruction, without memory and tensor."""
    cost = {"issue": 1 / SCHEDULERS}
    for pipe, rate in results_per_clock(one, architecture):
        cost[pipe] = 32 / rate
    return cost


def products(one):
    """Multiplications of a tensor-core instruction of one warp."""
    if one.op == "HGMMA":
        # A warpgroup of 4 warps issues it together.
        rows, columns, inputs = next(m for m in one.mods if m.count("x") == 2).split("x")
        return int(rows) * int(columns) * int(inputs) // 4
    if one.op.endswith("MMA"):
        return next((TENSOR[m] for m in one.mods if m in TENSOR), 2048)
    return 0


def is_known(one):
    """Whether the tables have this instruction."""
    known = ALU | FP32 | HEAVY | XU | LSU | CONTROL | UNIFORM_ALONE
    return one.op in known or one.op.endswith("MMA") or one.op[0] == "U"


class Costs:
    """Clocks of the basic blocks of a kernel on an architecture."""

    def __init__(self, kernel, architecture):
        self.kernel, self.blocks = kernel, {}
        for start, end in kernel.blocks.items():
            total = collections.Counter()
            for one in kernel.code[start:end]:
                for pipe, cost in clocks(one, architecture).items():
                    total[pipe] += cost
                total["products"] += products(one)
                total["instructions"] += 1
                total["shuffles"] += one.op == "SHFL"
            self.blocks[start] = total

    def of(self, trace, device, only=None):
        """{pipe: clocks of a multiprocessor} of a trace, or of its blocks `only`."""
        total = collections.Counter()
        for start, times in trace.blocks.items():
            if only is None or start in only:
                for pipe, cost in self.blocks[start].items():
                    total[pipe] += times * cost
        # A load/store unit takes an address per clock; data move in wavefronts.
        addresses = 32 / device.load_store_units
        total["lsu"] = total.pop("shuffles", 0) * addresses
        for at, times in trace.requests.issued.items():
            if only is None or self.block_of(at) in only:
                total["lsu"] += max(times * addresses, trace.requests.wavefronts[at])
        total["tensor"] = total.pop("products", 0) / device.tensor_rate
        return total

    def block_of(self, at):
        return max(start for start in self.kernel.blocks if start <= at)
