//! Matrix product by dot products in register tiles.
//!
//! Every element of the output has one accumulator vector that walks the inputs from first to last, and one fixed tree
//! that sums its lanes: the same arithmetic in a tile of 8 outputs × 1 row as in one of 4 × 6. Tiles, pieces and
//! threads only choose which elements are computed side by side.
//!
//! ```text
//! piece of outputs (a thread) > rows that fit the cache > tile of 4 outputs > tile of 6 rows > inputs
//! ```

use shared::dtype::DType;

#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Isa, Scratch};
use super::{decoded, portable};
use crate::cpu::pool::{Disjoint, Pool};
use crate::ops::{Linear, convert};
use crate::tensor::{Format, WeightView};
use crate::tuning;

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

/// What all pieces share.
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
    #[cfg(target_arch = "x86_64")]
    let args = match pairs(isa, pool, scratch, args) {
        Some(args) => args,
        None => return,
    };
    if !matches!(args.weight.format(), Format::Plain) {
        return decoded::linear(isa, pool, scratch, args);
    }
    match (isa, args.weight.dtype()) {
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Bf16 | Isa::Avx512, DType::F32) => with::<x86::Avx512F32>(pool, scratch, args),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Bf16 | Isa::Avx512, DType::Bf16) => {
            with::<x86::Avx512Bf16>(pool, scratch, args)
        }
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512Bf16 | Isa::Avx512, DType::F16) => with::<x86::Avx512F16>(pool, scratch, args),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, DType::F32) => with::<x86::Avx2F32>(pool, scratch, args),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, DType::Bf16) => with::<x86::Avx2Bf16>(pool, scratch, args),
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, DType::F16) => with::<x86::Avx2F16>(pool, scratch, args),
        (_, DType::F32) => with::<portable::F32>(pool, scratch, args),
        (_, DType::Bf16) => with::<portable::Bf16>(pool, scratch, args),
        (_, DType::F16) => with::<portable::F16>(pool, scratch, args),
    }
}

/// Products of bfloat16 pairs where the machine has them, the dtype is bfloat16, and the format suits; else gives `args`
/// back.
#[cfg(target_arch = "x86_64")]
fn pairs<'a>(
    isa: Isa,
    pool: &mut Pool,
    scratch: &mut Scratch,
    args: Linear<'a, [f32], WeightView<'a>>,
) -> Option<Linear<'a, [f32], WeightView<'a>>> {
    use super::packed::{Packed, multiply};
    use super::tile512;
    let weight = args.weight;
    let (outputs, inputs) = (weight.outputs(), weight.inputs());
    if isa != Isa::Avx512Bf16 || weight.dtype() != DType::Bf16 {
        return Some(args);
    }
    macro_rules! multiply {
        ($source:expr, $scale:expr) => {{
            let packed = Packed {
                source: $source,
                outputs,
                inputs,
                row_bytes: weight.row_bytes(),
                x: args.x,
                rows: args.rows,
                bias: args.bias,
            };
            let out = &mut args.out[..args.rows * outputs];
            // SAFETY: `Isa` values come from `Isa::available`; a view holds all rows of its shape.
            unsafe { multiply(pool, &mut scratch.panels, packed, $scale, out) };
            None
        }};
    }
    match weight.format() {
        Format::Plain => {
            let bytes = weight.bytes();
            multiply!(tile512::Bf16 { bytes, inputs }, |_| 1.0)
        }
        Format::Int8(parts) => {
            let codes = parts.codes;
            multiply!(tile512::Int8 { codes, inputs }, |output| parts
                .scale(output))
        }
        Format::Nf4(parts) if inputs.is_multiple_of(tile512::STEP) => {
            multiply!(tile512::Nf4 { parts, inputs }, |_| 1.0)
        }
        Format::Nf4(_) => Some(args),
    }
}

fn with<K: Kernel>(
    pool: &mut Pool,
    scratch: &mut Scratch,
    args: Linear<'_, [f32], WeightView<'_>>,
) {
    let (outputs, inputs, rows) = (args.weight.outputs(), args.weight.inputs(), args.rows);
    prepare_inputs::<K>(
        &args.x[..rows * inputs],
        args.weight.dtype(),
        &mut scratch.inputs,
    );
    let task = Task {
        x: &scratch.inputs,
        weight: args.weight,
        bias: args.bias,
        rows,
        out: Disjoint::new(&mut args.out[..rows * outputs]),
    };
    let piece = tuning::linear_piece(outputs, args.weight.row_bytes(), rows, pool.threads());
    pool.run(outputs.div_ceil(piece), |index| {
        task.piece::<K>(index * piece, outputs.min((index + 1) * piece));
    });
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
