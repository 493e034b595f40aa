#!/usr/bin/env python3
"""The parser, the lanes, the counts and the limits of budget.py, on small kernels."""

import hashlib
import re
import unittest

from model import blocks, cost, lanes, latency, launch, limits, memory, operands, pipes, report
from model import sass, semantics, shapes, warp
from model.devices import DEVICES

# Each thread sums c[0x0][0x168] vectors of 4 floats, 8 KiB apart, into shared memory. The guard
# lets the lower 8 lanes alone load.
LOOP = """
.text.sum_rows:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   MOV R9, 0x10 ;
        /*0020*/                   IMAD.WIDE.U32 R2, R0, R9, c[0x0][0x160] ;
        /*0030*/                   MOV R8, RZ ;
        /*0040*/                   ISETP.GE.U32.AND P1, PT, R0, 0x8, PT ;
.L_x_0:
        /*0050*/              @!P1 LDG.E.128 R4, [R2.64] ;
        /*0060*/                   IADD3 R8, R8, 0x1, RZ ;
        /*0070*/                   IADD3 R2, P2, R2, 0x2000, RZ ;
        /*0080*/                   ISETP.GE.U32.AND P0, PT, R8, c[0x0][0x168], PT ;
        /*0090*/                   IADD3.X R3, RZ, R3, RZ, P2, !PT ;
        /*00a0*/                   FADD R10, R10, R4 ;
        /*00b0*/                   FFMA R11, R5, R6, R11 ;
        /*00c0*/                   MUFU.EX2 R12, R7 ;
        /*00d0*/                   STS.128 [R9+UR4], R4 ;
        /*00e0*/              @!P0 BRA `(.L_x_0) ;
        /*00f0*/                   FSETP.GT.AND P3, PT, R10, RZ, PT ;
        /*0100*/               @P3 BRA `(.L_x_1) ;
        /*0110*/                   EXIT ;
.L_x_1:
        /*0120*/                   HMMA.16816.F32.BF16 R4, R4, R8, RZ ;
        /*0130*/                   EXIT ;
.L_x_2:
        /*0140*/                   BRA `(.L_x_2) ;
"""


def kernel(text, name="sum_rows"):
    return sass.Kernel(name, *sass.read(sass.parts(text)[name]))


def traced(text, parameters, name="sum_rows", architecture="80", warp_number=0):
    made = launch.Launch(architecture, (4, 1, 1), (64, 1, 1), parameters, {})
    trace = warp.Trace()
    warp.Program(kernel(text, name)).run(made, (0, 0, 0), warp_number, trace)
    return trace


def one(text):
    """An instruction."""
    return sass.read(f"        /*0000*/                   {text} ;")[0][0]


def computed(text, **registers):
    """What an instruction makes of registers."""
    state = operands.State(launch.Launch("80", (1, 1, 1), (32, 1, 1), [], {}), (0, 0, 0), 0)
    state.registers |= registers
    return semantics.compiled(one(text))(state)


class Special(unittest.TestCase):
    def test_threads_of_a_cta_in_two_dimensions_are_numbered_by_rows(self):
        made = launch.Launch("80", (1, 1, 1), (20, 8, 1), [], {})
        special = operands.State(made, (0, 0, 0), 1).special
        self.assertEqual(special["SR_TID.X"][:10], [12, 13, 14, 15, 16, 17, 18, 19, 0, 1])
        self.assertEqual(special["SR_TID.Y"][7:9], [1, 2])
        made = launch.Launch("80", (1, 1, 1), (32, 8, 1), [], {})
        self.assertEqual(operands.State(made, (0, 0, 0), 3).special["SR_TID.Y"], 3)

    def test_a_shuffle_by_index_gives_the_value_of_a_lane(self):
        made = computed("SHFL.IDX PT, R1, R2, 0x3, 0x1f", R2=list(range(32)))
        self.assertEqual(made, {"R1": 3})
        self.assertEqual(computed("SHFL.BFLY PT, R1, R2, 0x1, 0x1f", R2=5), {"R1": None})


class Parser(unittest.TestCase):
    def test_blocks_end_at_branches_and_begin_at_labels(self):
        found = kernel(LOOP)
        self.assertEqual(found.blocks, {0: 5, 5: 15, 15: 17, 17: 18, 18: 20, 20: 21})
        self.assertEqual(found.successors(5), [5, 15])
        self.assertEqual(found.successors(15), [18, 17])
        self.assertEqual(found.successors(17), [])

    def test_loops_are_blocks_that_lead_to_themselves(self):
        self.assertEqual(sorted(map(sorted, kernel(LOOP).loops)), [[5], [20]])

    def test_operands_are_read(self):
        load = one("LDG.E.128.CONSTANT R4, desc[UR12][R2.64+UR6+-0x10]")
        terms = [("R2", 1, True), ("UR6", 1, False)]
        self.assertEqual(list(load.operands[1].terms), terms)
        self.assertEqual(load.operands[1].offset, -16)
        scaled = one("LDS R0, [R5.X4+0x8000]").operands[1]
        self.assertEqual((scaled.terms, scaled.offset), ((("R5", 4, False),), 0x8000))
        self.assertEqual(one("IADD3 R1, -R2, ~UR4, c[0x2][0x18]").operands[3].offset, 0x18)
        self.assertEqual(one("IADD3 R1, -R2, ~UR4, RZ").operands[2].sign, "~")

    def test_results_and_uses_are_told_apart(self):
        for text, results, uses in [
            ("IADD3 R22, P4, P5, R112, UR18, R35", ["R22", "P4", "P5"], ["R112", "UR18", "R35"]),
            ("IADD3.X R5, R19, UR11, R41, P4, P5", ["R5"], ["R19", "UR11", "R41", "P4", "P5"]),
            ("ISETP.GE.U32.AND P1, PT, R2, R87, !P0", ["P1"], ["R2", "R87", "P0"]),
            ("SHFL.IDX PT, R92, R89, R91, 0x1f", ["R92"], ["R89", "R91"]),
            ("LDS.64 R38, [R39+UR7]", ["R38", "R39"], ["R39", "UR7"]),
            ("LOP3.LUT P0, RZ, R3, 0x1, RZ, 0xc0, !PT", ["P0"], ["R3"]),
            ("STG.E.64 desc[UR14][R12.64], R20", [], ["R12", "R13", "R20", "R21"]),
            ("FCHK P1, R33, R0", ["P1"], ["R33", "R0"]),
            ("VOTE.ANY R1, PT, P0", ["R1"], ["P0"]),
            ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR18], R4", ["P0"], ["UR18", "R4"]),
        ]:
            with self.subTest(text):
                self.assertEqual(operands.results(one(text))[0], results)
                self.assertEqual(operands.uses(one(text)), uses)


class Lanes(unittest.TestCase):
    def test_integer_instructions_compute(self):
        full = 0xFFFFFFFF
        for text, registers, expected in [
            ("IADD3 R0, P0, R1, 0x1, RZ", {"R1": full}, {"R0": 0, "P0": 1}),
            ("IADD3 R0, P0, R1, -R2, RZ", {"R1": 5, "R2": 5}, {"R0": 0, "P0": 1}),
            ("IADD3 R0, P0, R1, -R2, RZ", {"R1": 4, "R2": 5}, {"R0": full, "P0": 0}),
            ("IADD3 R0, P0, P1, R1, R1, R1", {"R1": full}, {"R0": full - 2, "P0": 1, "P1": 1}),
            ("IADD3.X R0, R1, RZ, RZ, P0, !PT", {"R1": 7, "P0": 1}, {"R0": 8}),
            ("IADD.64 R0, R2, R4", {"R2": full, "R3": 1, "R4": 1, "R5": 2}, {"R0": 0, "R1": 4}),
            ("IMAD.WIDE.U32 R0, R2, 0x10, R4", {"R2": full, "R4": 1, "R5": 2}, {"R1": 17}),
            ("IMAD.WIDE R0, R2, 0x1, R4", {"R2": full, "R4": 1, "R5": 0}, {"R0": 0, "R1": 0}),
            ("IMAD.HI.U32 R0, R1, 0x10, RZ", {"R1": full}, {"R0": 15}),
            ("LEA R0, P0, R1, R2, 0x2", {"R1": 3, "R2": full}, {"R0": 11, "P0": 1}),
            ("LEA.HI R0, R1, R2, RZ, 0x1a", {"R1": 1 << 31, "R2": 1}, {"R0": (1 << 25) + 1}),
            (
                "LEA.HI.X R0, R1, R2, R3, 0x2, P0",
                {"R1": 3 << 30, "R2": 1, "R3": 1, "P0": 1},
                {"R0": 9},
            ),
            ("SHF.R.U32.HI R0, RZ, 0x4, R1", {"R1": 0x123}, {"R0": 0x12}),
            ("SHF.R.S32.HI R0, RZ, 0x1f, R1", {"R1": 1 << 31}, {"R0": full}),
            ("SHF.R.U64 R0, R1, 0x8, R2", {"R1": 0x1200, "R2": 0x34}, {"R0": 0x34000012}),
            ("SHF.L.U64.HI R0, R1, 0x4, R2", {"R1": 0xF << 28, "R2": 1}, {"R0": 0x1F}),
            (
                "LOP3.LUT R0, R1, 0xff, R2, 0xe2, !PT",
                {"R1": 0x1234, "R2": 0x5600},
                {"R0": 0x1200 & 0xFF | 0x34 | 0x5600},
            ),
            ("PRMT R0, R1, 0x7632, R2", {"R1": 0x44332211, "R2": 0x88776655}, {"R0": 0x88774433}),
            ("ISETP.LT.AND P0, P1, R1, RZ, PT", {"R1": full}, {"P0": 1, "P1": 0}),
            ("ISETP.LT.U32.AND P0, PT, R1, 0x3, P2", {"R1": 2, "P2": 0}, {"P0": 0}),
            ("ISETP.GE.U32.AND.EX P0, PT, R1, R2, PT, P3", {"R1": 4, "R2": 4, "P3": 0}, {"P0": 0}),
            ("SEL R0, R1, 0x5, !P0", {"R1": 1, "P0": 1}, {"R0": 5}),
            ("VIADDMNMX.U32 R0, R1, R2, R3, PT", {"R1": 5, "R2": 6, "R3": 10}, {"R0": 10}),
            ("VIMNMX.U32 R0, PT, PT, R1, 0x3e0, !PT", {"R1": 5}, {"R0": 0x3E0}),
            ("VIMNMX R0, R1, 0x3, PT", {"R1": full}, {"R0": full}),
            ("PLOP3.LUT P0, PT, P1, P2, PT, 0x80, 0x8", {"P1": 1, "P2": 0}, {"P0": 0}),
            ("P2R R0, PR, RZ, 0x5", {"P0": 1, "P1": 1, "P2": 0}, {"R0": 1}),
            ("R2P PR, R1, 0x3", {"R1": 2}, {"P0": 0, "P1": 1}),
            ("HFMA2.MMA R0, -RZ, RZ, 1.5048828125, 33.21875", {}, {"R0": 0x3E055027}),
            ("FADD R0, R1, R2", {"R1": 1, "R2": 2}, {"R0": None}),
        ]:
            with self.subTest(text):
                found = computed(text, **registers)
                self.assertEqual({name: found[name] for name in expected}, expected)

    def test_a_division_by_reciprocal_is_exact(self):
        # The compiler's sequence for an unsigned division, up to its first estimate.
        for divisor in (3, 7, 132, 3584):
            up = lanes.float_of_int(("U32", "RP"))(divisor)
            estimate = lanes.int_of_float(lanes.reciprocal(up) + 0x0FFFFFFE)
            error = (-divisor * estimate) & lanes.MASK
            estimate = estimate + (estimate * error >> 32) & lanes.MASK
            for number in (0, 1, 8191, 1 << 20):
                quotient = number * estimate >> 32
                self.assertIn(number // divisor - quotient, (0, 1))

    def test_lanes_are_computed_one_by_one(self):
        found = computed("IADD3 R0, R1, 0x1, R2", R1=list(range(32)), R2=[10] * 32)["R0"]
        self.assertEqual(found[:3], [11, 12, 13])
        self.assertIsNone(computed("IADD3 R0, R1, R2, RZ", R1=list(range(32)), R2=None)["R0"])


class Memory(unittest.TestCase):
    def test_sixteen_bytes_per_lane_take_four_wavefronts(self):
        in_order = tuple(16 * lane for lane in range(32))
        self.assertEqual(memory.in_shared(16, lanes.ALL, in_order), 4)
        self.assertEqual(memory.in_lines(16, lanes.ALL, in_order), 4)
        self.assertEqual(memory.in_shared(16, 0xFF, in_order), 1)

    def test_bank_conflicts_take_wavefronts(self):
        self.assertEqual(memory.in_shared(4, lanes.ALL, tuple(range(0, 128, 4))), 1)
        self.assertEqual(memory.in_shared(4, lanes.ALL, tuple(128 * i for i in range(32))), 32)
        self.assertEqual(memory.in_shared(4, lanes.ALL, (64,) * 32), 1)
        self.assertEqual(memory.in_shared(8, lanes.ALL, tuple(range(0, 256, 8))), 2)

    def test_lines_of_global_memory_take_wavefronts(self):
        self.assertEqual(memory.in_lines(4, lanes.ALL, tuple(128 * i for i in range(32))), 32)
        self.assertEqual(memory.in_lines(1, lanes.ALL, (5,) * 32), 1)


class Warps(unittest.TestCase):
    def test_a_loop_runs_as_often_as_its_parameter_says(self):
        trace = traced(LOOP, [launch.Buffer("x"), 5])
        self.assertEqual(trace.blocks, {0: 1, 5: 5, 15: 1, 17: 1})
        self.assertEqual(trace.path, [0, 5, 5, 5, 5, 5, 15, 17])

    def test_a_branch_on_floats_is_assumed_to_fall_through(self):
        self.assertEqual(traced(LOOP, [launch.Buffer("x"), 1]).assumed, {0x100})

    def test_guards_leave_lanes_out(self):
        # 8 lanes of 16 bytes: one wavefront and 4 sectors each time; no lane of the second warp.
        trace = traced(LOOP, [launch.Buffer("x"), 5])
        self.assertEqual((trace.requests.issued[5], trace.requests.wavefronts[5]), (5, 5))
        self.assertEqual(trace.requests.sectors, {(1, False): 20})
        trace = traced(LOOP, [launch.Buffer("x"), 5], warp_number=1)
        self.assertEqual((trace.requests.issued[5], trace.requests.waits[5]), (0, [0] * 5))

    def test_a_value_from_memory_decides_a_branch(self):
        text = """
.text.by_memory:
        /*0000*/                   MOV R2, c[0x0][0x160] ;
        /*0010*/                   MOV R3, c[0x0][0x164] ;
        /*0020*/                   LDG.E.CONSTANT R0, [R2.64+0x8] ;
        /*0030*/                   S2R R1, SR_TID.X ;
        /*0040*/                   ISETP.GE.U32.AND P0, PT, R1, R0, PT ;
        /*0050*/               @P0 EXIT ;
        /*0060*/                   LDS R4, [R1.X4] ;
        /*0070*/                   EXIT ;
"""
        for count, active in [(3, 3), (32, 32), (0, 0)]:
            trace = traced(text, [launch.Buffer("words", (9, 9, count))], "by_memory")
            self.assertEqual(trace.requests.issued[6], 1 if active else 0)
            self.assertEqual(trace.assumed, set())

    def test_lanes_that_part_meet_again(self):
        text = """
.text.parted:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   ISETP.GE.U32.AND P0, PT, R0, 0x4, PT ;
        /*0020*/               @P0 BRA `(.L_x_0) ;
        /*0030*/                   LDS R1, [R0.X4] ;
.L_x_0:
        /*0040*/                   STS [R0.X4], R1 ;
        /*0050*/                   EXIT ;
"""
        trace = traced(text, [], "parted")
        self.assertEqual(trace.blocks, {0: 1, 3: 1, 4: 1})

    def test_calls_return_and_rare_calls_are_avoided(self):
        text = """
.text.calling:
        /*0000*/                   FCHK P0, R1, R2 ;
        /*0010*/              @!P0 BRA `(.L_x_0) ;
        /*0020*/                   CALL.REL.NOINC `($slow) ;
.L_x_0:
        /*0030*/                   CALL.REL.NOINC `($slow) ;
        /*0040*/                   EXIT ;
$slow:
        /*0050*/                   RET.REL.NODEC R2 `(calling) ;
"""
        self.assertEqual(traced(text, [], "calling").blocks, {0: 1, 3: 1, 4: 1, 5: 1})


class Counts(unittest.TestCase):
    def test_the_tool_counts_what_a_hand_counts(self):
        # LOOP with 5 trips in one warp: 5 + 5 x 10 + 2 + 1 instructions.
        # ALU: MOV, MOV, ISETP; 5 x (IADD3, IADD3, ISETP, IADD3.X); FSETP: 24, 1/2 clock each.
        # FMA: IMAD; 5 x (FADD, FFMA): 11; A100: 1/2 clock each. Heavy half: IMAD.
        # XU: 5 MUFU of 2 clocks. LSU: 5 loads of 8 lanes of 16 bytes, a wavefront each; 5 stores
        # at an unknown address (UR4), taken as free of conflicts: 4 each.
        costs = pipes.Costs(kernel(LOOP), "80")
        total = costs.of(traced(LOOP, [launch.Buffer("x"), 5]), DEVICES["A100"])
        self.assertEqual(
            {pipe: total[pipe] for pipe in ("instructions", *pipes.PIPES[:-1])},
            {
                "instructions": 58,
                "issue": 14.5,
                "alu": 12,
                "fma": 5.5,
                "fma heavy": 0.5,
                "xu": 10,
                "lsu": 25,
                "tensor": 0,
                "uniform": 0,
            },
        )

    def test_rates_differ_by_architecture(self):
        for text, architecture, expected in [
            ("FFMA R0, R1, R2, R3", "80", {"issue": 0.25, "fma": 0.5}),
            ("FFMA R0, R1, R2, R3", "90a", {"issue": 0.25, "fma": 0.25}),
            ("IMAD R0, R1, R2, R3", "86", {"issue": 0.25, "fma": 0.25, "fma heavy": 0.5}),
            ("IADD3 R0, R1, R2, R3", "100", {"issue": 0.25, "alu": 0.5}),
            ("IADD3 R0, R1, R2, R3", "120", {"issue": 0.25, "alu": 0.25}),
            ("UIADD3 UR0, UR1, UR2, UR3", "90a", {"issue": 0.25, "uniform": 0.5}),
            ("BAR.SYNC 0x0", "90a", {"issue": 0.25}),
        ]:
            self.assertEqual(pipes.clocks(one(text), architecture), expected)
        self.assertEqual(pipes.products(one("HMMA.16816.F32.BF16 R0, R4, R8, R0")), 16 * 8 * 16)
        self.assertEqual(pipes.products(one("HGMMA.64x128x16.F32 R0, gdesc[UR4], R0")), 32768)

    def test_a_lone_warp_waits_for_its_loads(self):
        # 5 dependent rounds would overlap; the FADD of each waits for its load.
        timer = latency.Timer(kernel(LOOP))
        trace = traced(LOOP, [launch.Buffer("x"), 5])
        waits = {5: [1000.0] * 5}
        slow = timer.clocks(trace.path, waits)
        self.assertTrue(5000 < slow < 5300, slow)
        self.assertTrue(timer.clocks(trace.path, {5: [30.0] * 5}) < 400)

    def test_uniform_registers_take_the_first_lane_and_none_differs(self):
        self.assertEqual(computed("R2UR P1, UR4, R1", R1=list(range(5, 37))), {"P1": 0, "UR4": 5})

    def test_a_launch_that_overlaps_the_one_before_it_begins_at_its_wait(self):
        text = LOOP.replace("FSETP.GT.AND P3, PT, R10, RZ, PT", "ACQBULK")
        timer = latency.Timer(kernel(text))
        trace = traced(text, [launch.Buffer("x"), 5])
        waits = {5: [1000.0] * 5}
        self.assertTrue(timer.clocks(trace.path, waits) > 5000)
        self.assertTrue(timer.clocks(trace.path, waits, True) < 10)

    def test_a_launch_overlaps_one_that_lets_it_start_only_if_it_waits(self):
        seen = []

        class Meter(cost.Meter):
            def has(self, spec, device, op):
                return op in spec

            def cost(self, spec, device, overlaps=False):
                seen.append(overlaps)

        both = {"ACQBULK", "PREEXIT"}
        Meter(None, None).costs_of([both, both, {"ACQBULK"}, {"ACQBULK"}, {"PREEXIT"}], None)
        self.assertEqual(seen, [False, True, True, False, False])

    def test_registers_and_shared_memory_limit_ctas(self):
        use = {"registers": 128, "shared": 0}
        manifest = {"image": {"kernels": {"kernel": {"90a": use}}}}
        meter = cost.Meter(None, manifest)
        spec = shapes.Spec("", "", "image", "kernel", (1, 1, 1), (256, 1, 1), 97 << 10, [], [], [])
        self.assertEqual(meter.held(spec, DEVICES["H200"]), 2)
        spec.shared = 0
        self.assertEqual(meter.held(spec, DEVICES["H200"]), 2)
        use["registers"] = 64
        self.assertEqual(meter.held(spec, DEVICES["H200"]), 4)
        use["registers"] = 24
        self.assertEqual(meter.held(spec, DEVICES["H200"]), 8)

    def test_ctas_fill_the_slots_that_end_first(self):
        self.assertEqual(cost.makespan([(10.0, 3)], 2), 20.0)
        self.assertEqual(cost.makespan([(5.0, 2), (10.0, 1)], 2), 10.0)

    def test_a_kernel_that_does_not_read_its_bytes_is_refused(self):
        spec = shapes.Spec("", "", "image", "kernel", (1, 1, 1), (32, 1, 1), 0, [], [], [], 1000)
        cost.expect_bytes(spec, DEVICES["H200"], 1010)
        for reached in (0, 900, 2000):
            with self.assertRaises(ValueError):
                cost.expect_bytes(spec, DEVICES["H200"], reached)

    def test_the_last_wave_of_ctas_takes_a_whole_wave(self):
        use = {"registers": 128, "shared": 0}
        meter = cost.Meter(None, {"image": {"kernels": {"kernel": {"90a": use}}}})
        device = DEVICES["H200"]

        def clocks(ctas):
            spec = shapes.Spec("", "", "image", "kernel", (ctas, 1, 1), (256, 1, 1), 0, [], [], [])
            mean = dict.fromkeys(pipes.PIPES, 0.0) | {"alu": 1000 * ctas / device.multiprocessors}
            time, waves = meter.time(spec, device, mean, ctas, [(0.0, ctas)], False)
            return round((time - cost.GAP_US) * device.clock), waves

        self.assertEqual(clocks(132), (1000, 0.5))
        self.assertEqual(clocks(264), (2000, 1.0))
        self.assertEqual(clocks(265), (3000, 265 / 264))

    def test_few_multiprocessors_read_the_second_level_cache_as_fast_as_their_ports_allow(self):
        device = DEVICES["H200"]
        mean = {"l2": 1000.0, "alu": 10.0}
        self.assertEqual(cost.of_one(mean, 1.0, device), mean)
        together = cost.of_one(mean, 2.0, device)
        self.assertEqual(together, {"l2": 1000.0, "alu": 20.0})
        alone = cost.of_one(mean, device.multiprocessors, device)
        self.assertEqual(alone["l2"], 1000.0 * device.l2_bytes / 64)


class Shapes(unittest.TestCase):
    def setUp(self):
        from model import images

        self.manifest = images.manifest()

    def test_functions_of_the_backend_are_those_that_were_copied(self):
        source = (shapes_root() / "src/tuning.rs").read_text()
        for name, known in shapes.COPIED.items():
            text = re.search(rf"pub fn {name}\(.*?\n}}\n", source, re.S)[0]
            found = hashlib.sha256(text.encode()).hexdigest()[:16]
            say = f"{name} of tuning.rs changed: change model/shapes.py, then write {found} there"
            self.assertEqual(found, known, say)

    def test_launches_name_kernels_that_exist(self):
        for device in DEVICES.values():
            for quant in shapes.FORMATS:
                for rows in shapes.ROWS:
                    for spec in shapes.block(self.manifest, device, quant, rows):
                        kernels = self.manifest[spec.image]["kernels"]
                        self.assertIn(device.architecture, kernels[spec.kernel])
                        threads = spec.cta[0] * spec.cta[1] * spec.cta[2]
                        ctas = spec.grid[0] * spec.grid[1] * spec.grid[2]
                        self.assertEqual(sum(count for _, count in spec.warps), threads // 32)
                        self.assertEqual(sum(count for _, count in spec.ctas), ctas)

    def test_clusters_norm_and_activate_in_one_launch_with_up_to_16_rows(self):
        def names(device, rows):
            specs = shapes.block(self.manifest, DEVICES[device], "nf4", rows)
            return [spec.name for spec in specs]

        attention = ["attention_decode", "attention_join"]
        few = ["norm_qkv", *attention, "o", "norm_gate_up_silu", "down"]
        for rows in [1, 16]:
            self.assertEqual(names("H100", rows), few)
        many = ["rmsnorm_add", "qkv", *attention, "o", "rmsnorm_add", "gate_up", "silu_mul", "down"]
        for device, rows in [("H100", 17), ("B200", 1), ("A100", 1)]:
            self.assertEqual(names(device, rows), many)
        packed = [name for name in names("A100", 2) if name != "pack"]
        self.assertEqual((packed, len(names("A100", 2))), (many, len(many) + 4))

    def test_parameters_lie_where_the_kernel_declares_them(self):
        parameters = [1, launch.Buffer("x"), 2.0, launch.Wide(1 << 40)]
        made = launch.Launch("80", (1, 1, 1), (32, 1, 1), parameters, {0: bytes(0x160 + 32)})
        words = [made.constant(0, 0x160 + at) for at in (0, 8, 12, 16, 24, 28)]
        self.assertEqual(words, [1, 0, 1 << memory.BUFFER_SHIFT - 32, 0x40000000, 0, 1 << 8])
        with self.assertRaises(ValueError):
            launch.Launch("80", (1, 1, 1), (32, 1, 1), parameters[:3], {0: bytes(0x160 + 32)})

    def test_a_block_of_70b_has_its_bytes(self):
        specs = shapes.block(self.manifest, DEVICES["H200"], "nf4", 1)
        self.assertEqual(sum(spec.weights for spec in specs), 855_638_016)
        nf4 = sum(spec.memory_bytes for spec in specs if spec.weights)
        self.assertEqual(nf4, 855_638_016 * 33 // 64 + 855_638_016 // 4096)
        attention = next(spec for spec in specs if spec.name == "attention_decode")
        self.assertEqual(attention.memory_bytes, 2048 * 8 * 128 * 2 * 2)

    def test_a_step_has_the_layout_of_the_backend(self):
        words = shapes.batch(2, 40).words
        rows, tokens, row_of, position, prefix, table, pages, start = words[:8]
        self.assertEqual((rows, tokens), (2, 2))
        self.assertEqual(words[row_of : row_of + 2], (0, 1))
        self.assertEqual(words[position : position + 2], (39, 39))
        self.assertEqual(words[prefix : prefix + 2], (39, 39))
        self.assertEqual(words[table : table + 2], (0, 3))
        self.assertEqual(words[pages : pages + 6], (0, 1, 2, 3, 4, 5))
        # Behind the starts of the rows lie the first tiles of the tokens.
        self.assertEqual(words[start:], (0, 1, 2, 0, 1))


class Steps(unittest.TestCase):
    def test_attention_is_the_part_of_a_step_that_a_longer_context_makes_it(self):
        names = ["qkv", "attention_decode", "attention_join", "o"]
        launches = [{"name": name, "us": 2.0} for name in names]
        self.assertEqual(blocks.of_step(launches, 12.0), 0.75)
        parts = {"nf4": 0.75, "int8": 0.5, "bf16": 0.254}
        results = {"H200": {"attention": {"32768": {"of_step": parts}}}}
        self.assertEqual(
            report.steps(results)[-3:],
            [
                "| Device | NF4, 32k tokens | INT8, 32k tokens | bf16, 32k tokens |",
                "| --- | --: | --: | --: |",
                "| H200 | 75 % | 50 % | 25 % |",
            ],
        )


class Limits(unittest.TestCase):
    def result(self, **percents):
        part = lambda percent: {"busiest": "alu", "share": percent / 100}  # noqa: E731
        return {
            name.replace("_", " "): {"families": {"products": {"1": part(percent)}}}
            for name, percent in percents.items()
        }

    def test_what_is_above_its_limit_is_refused(self):
        self.assertEqual(limits.violations(self.result(H200=90, B200=300)), [])
        self.assertEqual(len(limits.violations(self.result(H200=90.1, L4=91))), 2)


def shapes_root():
    from model import images

    return images.PREBUILT.parent


if __name__ == "__main__":
    unittest.main()
