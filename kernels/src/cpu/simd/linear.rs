//! Matrix product by dot products in register tiles.
//!
//! Every element of the output has one accumulator vector that walks the inputs from first to last, and one fixed tree
//! that sums its lanes: the same arithmetic in a tile of 8 outputs × 1 row as in one of 4 × 6. Tiles, pieces and
//! threads only choose which elements are computed side by side.
//!
//! ```text
//! piece of outputs (a thread) > rows that fit the cache > tile of 4 outputs > tile of 6 rows > inputs
//! ```

use std::mem::discriminant;
use std::ops::Range;

use shared::dtype::DType;

#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Isa, Scratch};
use super::{decoded, portable};
use crate::cpu::pool::{Disjoint, Pool};
use crate::ops::{Linear, Product, Products, convert};
#[cfg(target_arch = "x86_64")]
use crate::quant::nf4;
use crate::tensor::{Format, WeightView};
use crate::tuning::{self, Split};

/// A register tile for one dtype of weights and one instruction set.
pub(super) trait Kernel {
    /// How the kernel reads the inputs: f32, or the weight's own dtype.
    const INPUT: DType;
    /// Bytes of one weight.
    const WEIGHT_BYTES: usize;

    /// `sums[r][o]` = dot product of input row `r` and weight row `o`, each of `inputs` elements.
    ///
    /// # Safety
    /// `weight` holds `O` rows and `x` holds `R` rows; the instruction set is that of this machine.
    unsafe fn tile<const O: usize, const R: usize>(
        weight: &[u8],
        x: &[u8],
        inputs: usize,
    ) -> [[f32; O]; R];
}

/// One of several matrix products of the same inputs.
#[cfg(target_arch = "x86_64")]
pub(super) struct Part<'a, S> {
    pub(super) source: S,
    pub(super) outputs: usize,
    /// Bytes of a row of the matrix that a tile walks.
    pub(super) row_bytes: usize,
    pub(super) bias: Option<&'a [f32]>,
    /// `[rows, outputs]`.
    pub(super) out: Disjoint<'a, f32>,
}

/// What all pieces of a matrix share.
struct Task<'a> {
    /// Inputs as the kernel reads them, `[rows, inputs]`.
    x: &'a [u8],
    weight: WeightView<'a>,
    bias: Option<&'a [f32]>,
    rows: usize,
    out: Disjoint<'a, f32>,
}

pub(in crate::cpu) fn linear(
    isa: Isa,
    pool: &mut Pool,
    scratch: &mut Scratch,
    args: Linear<'_, [f32], WeightView<'_>>,
) {
    let mut part = [Product {
        weight: args.weight,
        bias: args.bias,
        out: args.out,
    }];
    let (x, rows, parts) = (args.x, args.rows, &mut part);
    products(isa, pool, scratch, Products { x, rows, parts });
}

/// Several products of the same inputs: neighbours of one kind are one heap of work, whose inputs are prepared once.
pub(in crate::cpu) fn products(
    isa: Isa,
    pool: &mut Pool,
    scratch: &mut Scratch,
    args: Products<'_, '_, [f32], WeightView<'_>>,
) {
    let mut rest = args.parts;
    while let Some(first) = rest.first().map(|part| part.weight) {
        let is_like = |part: &&Product<'_, [f32], WeightView<'_>>| {
            let weight = part.weight;
            (weight.dtype(), weight.inputs()) == (first.dtype(), first.inputs())
                && discriminant(&weight.format()) == discriminant(&first.format())
        };
        let count = rest.iter().take_while(is_like).count();
        let (parts, others) = rest.split_at_mut(count);
        rest = others;
        let (x, rows) = (args.x, args.rows);
        like_products(isa, pool, scratch, Products { x, rows, parts });
    }
}

/// Products with matrices of one dtype, format and width.
fn like_products(
    isa: Isa,
    pool: &mut Pool,
    scratch: &mut Scratch,
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut))] mut args: Products<
        '_,
        '_,
        [f32],
        WeightView<'_>,
    >,
) {
    let Some(weight) = args.parts.first().map(|part| part.weight) else {
        return;
    };
    #[cfg(target_arch = "x86_64")]
    if pairs(isa, pool, scratch, &mut args) || wide(isa, pool, scratch, &mut args) {
        return;
    }
    if !matches!(weight.format(), Format::Plain) {
        return decoded::linear(isa, pool, scratch, args);
    }
    match (isa, weight.dtype()) {
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Bf16 | Isa::Avx512, DType::F32) => with::<x86::Avx512F32>(pool, scratch, args),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Bf16 | Isa::Avx512, DType::Bf16) => {
            with::<x86::Avx512Bf16>(pool, scratch, args)
        }
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Bf16 | Isa::Avx512, DType::F16) => with::<x86::Avx512F16>(pool, scratch, args),
        (_, DType::F32) => with::<portable::F32>(pool, scratch, args),
        (_, DType::Bf16) => with::<portable::Bf16>(pool, scratch, args),
        (_, DType::F16) => with::<portable::F16>(pool, scratch, args),
    }
}

/// Calls `work` with the outputs of all parts, which `split` has cut as if they were those of one matrix, on all threads.
pub(super) fn run_pieces<P: Sync>(
    pool: &mut Pool,
    parts: &[P],
    outputs: impl Fn(&P) -> usize + Sync,
    split: &Split,
    work: impl Fn(&P, Range<usize>) + Sync,
) {
    pool.share(split.ends.len(), split.wakes, |index| {
        let before = index.checked_sub(1).and_then(|i| split.ends.get(i));
        let piece = before.copied().unwrap_or(0)..split.ends[index];
        let mut first = 0;
        for part in parts {
            let end = first + outputs(part);
            let own = piece.start.max(first)..piece.end.min(end);
            if !own.is_empty() {
                work(part, own.start - first..own.end - first);
            }
            first = end;
        }
    });
}

/// The parts of `$args` whose format and bytes are `$format`, with `$source` made of those.
#[cfg(target_arch = "x86_64")]
macro_rules! parts_of {
    ($args:expr, $format:pat => $source:expr) => {{
        let rows = $args.rows;
        let parts = $args.parts.iter_mut().filter_map(|part| {
            let weight = part.weight;
            let $format = (weight.format(), weight.bytes()) else {
                return None;
            };
            let outputs = weight.outputs();
            Some(Part {
                source: $source,
                outputs,
                row_bytes: weight.row_bytes(),
                bias: part.bias,
                out: Disjoint::new(&mut part.out[..rows * outputs]),
            })
        });
        parts.collect::<Vec<_>>()
    }};
}

/// Products of bfloat16 pairs where the machine has them, the dtype is bfloat16, and the format suits; else does
/// nothing and says so.
#[cfg(target_arch = "x86_64")]
fn pairs(
    isa: Isa,
    pool: &mut Pool,
    scratch: &mut Scratch,
    args: &mut Products<'_, '_, [f32], WeightView<'_>>,
) -> bool {
    use super::packed::multiply;
    use super::tile512;
    let Some(weight) = args.parts.first().map(|part| part.weight) else {
        return true;
    };
    let inputs = weight.inputs();
    if isa != Isa::Avx512Bf16 || weight.dtype() != DType::Bf16 {
        return false;
    }
    let x = (args.x, args.rows, inputs);
    macro_rules! multiply {
        ($format:pat => $source:expr) => {{
            let parts = parts_of!(args, $format => $source);
            // SAFETY: `Isa` values come from `Isa::available`; a view holds all rows of its shape.
            unsafe { multiply(pool, &mut scratch.panels, x, &parts) };
            true
        }};
    }
    match weight.format() {
        Format::Plain => multiply!((Format::Plain, bytes) => tile512::Bf16 { bytes, inputs }),
        Format::Int8(_) => multiply!((Format::Int8(parts), _) => tile512::Int8 { parts, inputs }),
        Format::Nf4(_) if inputs.is_multiple_of(tile512::STEP) => {
            multiply!((Format::Nf4(parts), _) => tile512::Nf4 { parts, inputs })
        }
        Format::Nf4(_) => false,
    }
}

/// f32 products of 8 lanes: of all formats where the machine has no AVX-512, of quantized matrices where it has; else does nothing and
/// says so.
#[cfg(target_arch = "x86_64")]
fn wide(
    isa: Isa,
    pool: &mut Pool,
    scratch: &mut Scratch,
    args: &mut Products<'_, '_, [f32], WeightView<'_>>,
) -> bool {
    use super::tile256;
    use super::wide::multiply;
    let Some(weight) = args.parts.first().map(|part| part.weight) else {
        return true;
    };
    let (inputs, dtype) = (weight.inputs(), weight.dtype());
    let x = (args.x, args.rows, inputs);
    macro_rules! multiply {
        ($format:pat => $source:expr) => {{
            let parts = parts_of!(args, $format => $source);
            // SAFETY: `Isa` values come from `Isa::available`; a view holds all rows of its shape.
            unsafe { multiply(pool, &mut scratch.floats, dtype, x, &parts) };
            true
        }};
    }
    match (isa, weight.format(), dtype) {
        (Isa::Portable, ..) => false,
        (_, Format::Int8(_), _) => {
            multiply!((Format::Int8(parts), _) => tile256::Int8 { parts, inputs })
        }
        (_, Format::Nf4(_), DType::Bf16) if inputs.is_multiple_of(nf4::GROUP) => {
            multiply!((Format::Nf4(parts), _) => tile256::Nf4Bf16 { parts, inputs })
        }
        (_, Format::Nf4(_), _) if inputs.is_multiple_of(nf4::GROUP) => {
            multiply!((Format::Nf4(parts), _) => tile256::Nf4 { parts, inputs, dtype })
        }
        (Isa::Avx2, Format::Plain, DType::F32) => {
            multiply!((Format::Plain, bytes) => tile256::F32 { bytes, inputs })
        }
        (Isa::Avx2, Format::Plain, DType::Bf16) => {
            multiply!((Format::Plain, bytes) => tile256::Bf16 { bytes, inputs })
        }
        (Isa::Avx2, Format::Plain, DType::F16) => {
            multiply!((Format::Plain, bytes) => tile256::F16 { bytes, inputs })
        }
        _ => false,
    }
}

fn with<K: Kernel>(
    pool: &mut Pool,
    scratch: &mut Scratch,
    args: Products<'_, '_, [f32], WeightView<'_>>,
) {
    let Some(weight) = args.parts.first().map(|part| part.weight) else {
        return;
    };
    let (inputs, rows) = (weight.inputs(), args.rows);
    prepare_inputs::<K>(
        &args.x[..rows * inputs],
        weight.dtype(),
        &mut scratch.inputs,
    );
    let tasks: Vec<Task<'_>> = args
        .parts
        .iter_mut()
        .map(|part| Task {
            x: &scratch.inputs,
            weight: part.weight,
            bias: part.bias,
            rows,
            out: Disjoint::new(&mut part.out[..rows * part.weight.outputs()]),
        })
        .collect();
    let outputs = tasks.iter().map(|task| task.weight.outputs()).sum();
    let split = tuning::linear_split(outputs, weight.row_bytes(), rows, pool.threads());
    run_pieces(
        pool,
        &tasks,
        |task| task.weight.outputs(),
        &split,
        |task, outputs| {
            task.piece::<K>(outputs.start, outputs.end);
        },
    );
}

/// The inputs, rounded to the dtype of the weight, in the form that the kernel reads.
fn prepare_inputs<K: Kernel>(x: &[f32], weight: DType, bytes: &mut Vec<u8>) {
    bytes.resize(x.len() * K::INPUT.size_bytes(), 0);
    if K::INPUT == weight || weight == DType::F32 {
        convert::from_f32(K::INPUT, x, bytes);
    } else {
        for (x, b) in x.iter().zip(bytes.chunks_exact_mut(4)) {
            b.copy_from_slice(&convert::round(weight, *x).to_le_bytes());
        }
    }
}

impl Task<'_> {
    fn piece<K: Kernel>(&self, start: usize, end: usize) {
        let group = tuning::linear_rows(self.weight.inputs() * K::INPUT.size_bytes());
        for first in (0..self.rows).step_by(group) {
            let last = self.rows.min(first + group);
            let mut output = start;
            while output < end {
                output += match end - output {
                    left if left >= 8 && last - first == 1 => {
                        self.strip::<K, 8>(output, first, last)
                    }
                    left if left >= 4 => self.strip::<K, 4>(output, first, last),
                    _ => self.strip::<K, 1>(output, first, last),
                };
            }
        }
    }

    /// `O` outputs of rows `first..last`; returns `O`.
    fn strip<K: Kernel, const O: usize>(&self, output: usize, first: usize, last: usize) -> usize {
        let mut row = first;
        while row < last {
            row += match last - row {
                1 => self.tile::<K, O, 1>(output, row),
                2 => self.tile::<K, O, 2>(output, row),
                3 => self.tile::<K, O, 3>(output, row),
                4 => self.tile::<K, O, 4>(output, row),
                5 => self.tile::<K, O, 5>(output, row),
                _ => self.tile::<K, O, 6>(output, row),
            };
        }
        O
    }

    /// `O` outputs of `R` rows; returns `R`.
    #[inline(always)]
    fn tile<K: Kernel, const O: usize, const R: usize>(&self, output: usize, row: usize) -> usize {
        let inputs = self.weight.inputs();
        let (weight_row, x_row) = (inputs * K::WEIGHT_BYTES, inputs * K::INPUT.size_bytes());
        let weight = &self.weight.bytes()[output * weight_row..(output + O) * weight_row];
        let x = &self.x[row * x_row..(row + R) * x_row];
        // SAFETY: the slices hold O and R rows; `linear` picked the kernel by the detected instruction set.
        let sums = unsafe { K::tile::<O, R>(weight, x, inputs) };
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
