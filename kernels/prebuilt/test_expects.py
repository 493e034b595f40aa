#!/usr/bin/env python3
"""What expects.py reads, and that it refuses planted code."""

import unittest

from expects import disassembled, expectations, violations

SOURCE = """// Products.
// expects product_*: HMMA; only LDGSTS.128; loop only LDG.128; loop no STG
// expects slow: may LDL STL; LDG
"""

GOOD = """
.text.product_bf16:
        /*0000*/                   LDG.E.U8 R2, [R2.64] ;
.L_x_1:
        /*0010*/                   LDGSTS.E.BYPASS.128 [R1], [R4.64], P0 ;
        /*0020*/              @!P2 LDG.E.128.CONSTANT R4, [R4.64] ;
        /*0030*/                   HMMA.16816.F32.BF16 R4, R4, R8, R4 ;
        /*0040*/                   BRA.DIV UR4, `(.L_x_3) ;
.L_x_4:
        /*0048*/               @P0 BRA `(.L_x_1) ;
.L_x_2:
        /*0050*/                   STG.E [R2.64], R4 ;
        /*0060*/               @P1 BRA `(.L_x_2) ;
        /*0070*/                   EXIT ;
.L_x_3:
        /*0080*/                   WARPSYNC R3 ;
        /*0090*/                   BRA `(.L_x_4) ;
.text.slow:
        /*0000*/                   STL [R1], R2 ;
        /*0010*/                   LDG.E R2, [R2.64] ;
        /*0020*/                   LDL R2, [R1] ;
"""
STACKS = {"product_bf16": 0, "slow": 48}


class Expects(unittest.TestCase):
    def test_code_that_is_as_expected_passes(self):
        self.assertEqual(violations(SOURCE, GOOD, STACKS), [])

    def test_loops_are_those_around_tensor_core_products(self):
        _, loops = disassembled(GOOD)["product_bf16"]
        self.assertEqual(
            [op.split(".")[0] for op in loops],
            ["LDGSTS", "LDG", "HMMA", "BRA", "BRA", "WARPSYNC", "BRA"],
        )

    def test_planted_code_is_refused(self):
        planted = {
            "product_bf16 has no HMMA": ("HMMA.16816", "FFMA"),
            "product_bf16 has 1 LDGSTS.E.64 beside LDGSTS.128": (
                " HMMA",
                " LDGSTS.E.64 [R1], [R4.64] ;\n    /*0*/ HMMA",
            ),
            "product_bf16 has 1 LDG.E.U8 in its loops beside LDG.128": (
                " HMMA",
                " LDG.E.U8 R1, [R4.64] ;\n    /*0*/ HMMA",
            ),
            "product_bf16 has 1 STG.E in its loops": (
                " HMMA",
                " STG.E [R4.64], R1 ;\n    /*0*/ HMMA",
            ),
            "product_bf16 has 1 STL.64": ("STG.E [R2.64]", "STL.64 [R1]"),
            "slow has no LDG": ("LDG.E R2, [R2.64]", "LD.E R2, [R2.64]"),
        }
        for sentence, (old, new) in planted.items():
            self.assertIn(old, GOOD)
            self.assertIn(sentence, violations(SOURCE, GOOD.replace(old, new, 1), STACKS))

    def test_a_stack_is_refused_unless_local_memory_is_allowed(self):
        self.assertEqual(
            violations(SOURCE, GOOD, {"product_bf16": 8, "slow": 48}),
            ["product_bf16 has a stack of 8 bytes"],
        )

    def test_kernels_without_a_line_and_lines_without_a_kernel_are_refused(self):
        wrong = violations(SOURCE.replace("slow", "quick"), GOOD, STACKS)
        self.assertIn("no kernel is called quick", wrong)
        self.assertTrue(
            any(sentence.startswith("slow: the source does not say") for sentence in wrong)
        )
        self.assertEqual(
            violations(SOURCE, GOOD, {**STACKS, "lost": 0}), ["lost is not in the disassembly"]
        )

    def test_clauses_that_cannot_be_read_are_refused(self):
        for clause in ["", "loop", "no", "ldg", "HMMA, LDG", "loop may LDL"]:
            with self.assertRaises(ValueError):
                expectations(f"// expects x: HMMA; {clause}\n")


if __name__ == "__main__":
    unittest.main()
