//! Matrix product of quantized matrices without products of bfloat16 pairs: a few rows of the matrix are decoded to f32
//! into a strip that stays in the cache, and multiplied with all rows of the inputs by the f32 tiles. The whole matrix
//! is never decoded.

use std::cell::RefCell;

use shared::dtype::DType;

use super::linear::{Kernel, run_pieces};
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Isa, Scratch, per_isa, portable};
use crate::cpu::pool::{Disjoint, Pool};
use crate::ops::{Products, convert};
use crate::tensor::WeightView;
use crate::tuning;

/// Rows of the matrix that are decoded at a time.
const STRIP: usize = 4;

thread_local! {
    /// The strip of this thread.
    static DECODED: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

pub(super) fn linear(
    isa: Isa,
    pool: &mut Pool,
    scratch: &mut Scratch,
    args: Products<'_, '_, [f32], WeightView<'_>>,
) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512Bf16 | Isa::Avx512 => with::<x86::Avx512F32>(isa, pool, scratch, args),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => with::<x86::Avx2F32>(isa, pool, scratch, args),
        _ => with::<portable::F32>(isa, pool, scratch, args),
    }
}

/// What all pieces share.
struct Task<'a> {
    isa: Isa,
    /// Rounded inputs, f32 `[rows, inputs]`.
    x: &'a [u8],
    weight: WeightView<'a>,
    bias: Option<&'a [f32]>,
    rows: usize,
    out: Disjoint<'a, f32>,
}

fn with<K: Kernel>(
    isa: Isa,
    pool: &mut Pool,
    scratch: &mut Scratch,
    args: Products<'_, '_, [f32], WeightView<'_>>,
) {
    let Some(weight) = args.parts.first().map(|part| part.weight) else {
        return;
    };
    let (inputs, rows) = (weight.inputs(), args.rows);
    scratch.inputs.resize(4 * rows * inputs, 0);
    for (x, b) in args.x[..rows * inputs]
        .iter()
        .zip(scratch.inputs.chunks_exact_mut(4))
    {
        b.copy_from_slice(&convert::round(weight.dtype(), *x).to_le_bytes());
    }
    let tasks: Vec<Task<'_>> = args
        .parts
        .iter_mut()
        .map(|part| Task {
            isa,
            x: &scratch.inputs,
            weight: part.weight,
            bias: part.bias,
            rows,
            out: Disjoint::new(&mut part.out[..rows * part.weight.outputs()]),
        })
        .collect();
    let outputs = tasks.iter().map(|task| task.weight.outputs()).sum();
    let split = tuning::linear_split(outputs, inputs * 4, rows, pool.threads());
    run_pieces(
        pool,
        &tasks,
        |task| task.weight.outputs(),
        &split,
        |task, outputs| {
            DECODED.with_borrow_mut(|strip| task.piece::<K>(outputs.start, outputs.end, strip));
        },
    );
}

impl Task<'_> {
    fn piece<K: Kernel>(&self, start: usize, end: usize, strip: &mut Vec<u8>) {
        for first in (start..end).step_by(STRIP) {
            let count = STRIP.min(end - first);
            decode(self.isa, &self.weight, first, count, strip);
            for o in 0..if count == STRIP { 1 } else { count } {
                let mut row = 0;
                while row < self.rows {
                    row += match (count == STRIP, self.rows - row) {
                        (true, 1) => self.tile::<K, STRIP, 1>(strip, 0, first, row),
                        (true, 2 | 3) => self.tile::<K, STRIP, 2>(strip, 0, first, row),
                        (true, _) => self.tile::<K, STRIP, 4>(strip, 0, first, row),
                        (false, _) => self.tile::<K, 1, 1>(strip, o, first, row),
                    };
                }
            }
        }
    }

    /// `O` outputs of `R` rows: those of the strip from its row `at` on. Returns `R`.
    fn tile<K: Kernel, const O: usize, const R: usize>(
        &self,
        strip: &[u8],
        at: usize,
        first: usize,
        row: usize,
    ) -> usize {
        let width = self.weight.inputs() * 4;
        let weight = &strip[at * width..(at + O) * width];
        let x = &self.x[row * width..(row + R) * width];
        // SAFETY: the slices hold O and R rows of f32; `linear` picked the kernel by the detected instruction set.
        let sums = unsafe { K::tile::<O, R>(weight, x, self.weight.inputs()) };
        let output = first + at;
        for (r, sums) in sums.iter().enumerate() {
            // SAFETY: pieces differ in their outputs, so these parts of a row do not overlap.
            let out = unsafe {
                self.out
                    .range((row + r) * self.weight.outputs() + output, O)
            };
            for (o, (out, sum)) in out.iter_mut().zip(sums).enumerate() {
                *out = sum + self.bias.map_or(0.0, |bias| bias[output + o]);
            }
        }
        R
    }
}

/// Rows `first..first + count` of the matrix as f32 bytes.
fn decode(isa: Isa, weight: &WeightView<'_>, first: usize, count: usize, strip: &mut Vec<u8>) {
    let inputs = weight.inputs();
    strip.resize(STRIP * inputs * 4, 0);
    let mut row = vec![0.0f32; inputs];
    for (index, bytes) in strip.chunks_exact_mut(inputs * 4).take(count).enumerate() {
        let index = first + index;
        let values = &mut row[..];
        per_isa!(isa, decode_row(weight: &WeightView<'_>, index: usize, values: &mut [f32]));
        convert::from_f32(DType::F32, values, bytes);
    }
}

#[inline(always)]
fn decode_row<const FMA: bool>(weight: &WeightView<'_>, index: usize, values: &mut [f32]) {
    weight.widen_row(index, values);
}
