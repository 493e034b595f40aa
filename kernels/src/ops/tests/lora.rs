//! Adapters: the fast path against the definition, and rows that do not see each other's adapters.

use super::*;

/// (inputs, rank, outputs): one, odd, a common rank, and enough for several pieces.
const SHAPES: [(usize, usize, usize); 5] = [
    (1, 1, 1),
    (31, 3, 9),
    (64, 8, 16),
    (352, 16, 129),
    (700, 64, 1000),
];

/// Adapters over the rows of a batch of ten; two rows have none.
const PARTS: [(usize, usize, usize); 3] = [(0, 3, 0), (4, 1, 1), (6, 4, 0)];
const ROWS: usize = 10;

struct Case {
    dtype: DType,
    inputs: usize,
    rank: usize,
    outputs: usize,
    matrices: [[Vec<u8>; 2]; 2],
}

impl Case {
    fn new((inputs, rank, outputs): (usize, usize, usize), dtype: DType) -> Case {
        let adapter = |seed| {
            let a = stored(dtype, &noise(seed, rank * inputs));
            [a, stored(dtype, &noise(seed + 1, outputs * rank))]
        };
        Case {
            dtype,
            inputs,
            rank,
            outputs,
            matrices: [adapter(11), adapter(21)],
        }
    }

    fn part(&self, (first, rows, adapter): (usize, usize, usize)) -> LoraPart<WeightView<'_>> {
        let [a, b] = &self.matrices[adapter];
        LoraPart {
            first,
            rows,
            a: WeightView::new(self.dtype, self.rank, self.inputs, a).unwrap(),
            b: WeightView::new(self.dtype, self.outputs, self.rank, b).unwrap(),
            scale: 0.25 + adapter as f32,
        }
    }

    fn parts(&self) -> Vec<LoraPart<WeightView<'_>>> {
        PARTS.into_iter().map(|part| self.part(part)).collect()
    }
}

/// The product and its gradient of `rows` rows that begin at row `from` of `x`, `base` and so on.
fn run(
    cpu: Option<&mut Cpu>,
    case: &Case,
    parts: &[LoraPart<WeightView<'_>>],
    rows: std::ops::Range<usize>,
    round: DType,
) -> (Vec<f32>, Vec<f32>) {
    let wide = |seed, width: usize| {
        noise(seed, ROWS * width)[rows.start * width..rows.end * width].to_vec()
    };
    let (x, mut out) = (wide(1, case.inputs), wide(2, case.outputs));
    let (grad, mut input) = (wide(3, case.outputs), wide(4, case.inputs));
    let mut middle = vec![f32::NAN; rows.len() * case.rank];
    let forward = Lora {
        x: &x[..],
        parts,
        middle: &mut middle[..],
        out: &mut out[..],
        rows: rows.len(),
        round,
    };
    match cpu {
        Some(cpu) => {
            cpu.lora(forward).unwrap();
            middle.fill(f32::NAN);
            let rows = rows.len();
            let (middle, out) = (&mut middle[..], &mut input[..]);
            cpu.lora_grad(LoraGrad {
                grad: &grad[..],
                parts,
                middle,
                out,
                rows,
            })
            .unwrap();
        }
        None => {
            super::super::lora::reference(forward).unwrap();
            let rows = rows.len();
            let (middle, out) = (&mut middle[..], &mut input[..]);
            super::super::lora::reference_grad(LoraGrad {
                grad: &grad[..],
                parts,
                middle,
                out,
                rows,
            })
            .unwrap();
        }
    }
    (out, input)
}

#[test]
fn adapters_equal_their_reference_and_rows_without_one_keep_their_bits() {
    for shape in SHAPES {
        for (dtype, round) in [
            (DType::F32, DType::F32),
            (DType::Bf16, DType::Bf16),
            (DType::F16, DType::F16),
            (DType::F32, DType::Bf16),
        ] {
            let case = Case::new(shape, dtype);
            let parts = case.parts();
            let wanted = run(None, &case, &parts, 0..ROWS, round);
            for mut cpu in backends() {
                let got = run(Some(&mut cpu), &case, &parts, 0..ROWS, round);
                let what = format!("{:?} {dtype} {shape:?}", cpu.isa());
                // Two roundings of the adapter's dtype may fall to the other side.
                let tolerance = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
                assert_close(&got.0, &wanted.0, tolerance, &what);
                // Gradients may be rounded to bfloat16 before each product.
                let tolerance = if dtype == DType::Bf16 { 1e-2 } else { 1e-4 };
                assert_close(&got.1, &wanted.1, tolerance, &what);
                for row in [3, 5] {
                    let (inputs, outputs) = (case.inputs, case.outputs);
                    let base = noise(2, ROWS * outputs);
                    let range = row * outputs..(row + 1) * outputs;
                    assert_eq!(bits(&got.0[range.clone()]), bits(&base[range]), "{what}");
                    let base = noise(4, ROWS * inputs);
                    let range = row * inputs..(row + 1) * inputs;
                    assert_eq!(bits(&got.1[range.clone()]), bits(&base[range]), "{what}");
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_as_beside_rows_of_other_adapters() {
    for shape in SHAPES {
        let case = Case::new(shape, DType::Bf16);
        let parts = case.parts();
        for mut cpu in backends() {
            let together = run(Some(&mut cpu), &case, &parts, 0..ROWS, DType::Bf16);
            for (first, rows, adapter) in PARTS {
                for row in first..first + rows {
                    let alone = run(
                        Some(&mut cpu),
                        &case,
                        &[case.part((0, 1, adapter))],
                        row..row + 1,
                        DType::Bf16,
                    );
                    let out = &together.0[row * case.outputs..(row + 1) * case.outputs];
                    assert_eq!(
                        bits(&alone.0),
                        bits(out),
                        "{:?} {shape:?} row {row}",
                        cpu.isa()
                    );
                    let input = &together.1[row * case.inputs..(row + 1) * case.inputs];
                    assert_eq!(
                        bits(&alone.1),
                        bits(input),
                        "{:?} {shape:?} row {row}",
                        cpu.isa()
                    );
                }
            }
        }
    }
}

#[test]
fn parts_that_overlap_or_do_not_fit_are_refused() {
    let case = Case::new((8, 2, 4), DType::F32);
    let other = Case::new((8, 3, 5), DType::F32);
    let half = Case::new((8, 2, 4), DType::Bf16);
    let mut mixed = case.part((0, 1, 0));
    mixed.b = half.part((0, 1, 0)).b;
    let mut broken = case.part((0, 1, 0));
    broken.a = other.part((0, 1, 0)).a;
    for parts in [
        vec![case.part((0, 2, 0)), case.part((1, 1, 1))],
        vec![case.part((2, 1, 0)), case.part((0, 1, 1))],
        vec![case.part((4, 1, 0))],
        vec![case.part((usize::MAX, 1, 0))],
        vec![case.part((0, usize::MAX, 0))],
        vec![case.part((0, 1, 0)), other.part((1, 1, 0))],
        vec![mixed],
        vec![broken],
    ] {
        let (x, mut middle, mut out) = ([0.0f32; 32], [0.0f32; 8], [0.0f32; 16]);
        let args = Lora {
            x: &x[..],
            parts: &parts,
            middle: &mut middle[..],
            out: &mut out[..],
            rows: 4,
            round: DType::F32,
        };
        assert!(Cpu::new(1).lora(args).is_err());
    }
    let (x, mut out) = ([0.0f32; 32], [0.0f32; 16]);
    let parts = [case.part((0, 4, 0))];
    let args = Lora {
        x: &x[..],
        parts: &parts,
        middle: &mut [0.0f32; 7][..],
        out: &mut out[..],
        rows: 4,
        round: DType::F32,
    };
    assert!(matches!(
        Cpu::new(1).lora(args),
        Err(OpError::Short { what: "middle", .. })
    ));
}
