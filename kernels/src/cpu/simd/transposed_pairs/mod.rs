//! Product with a transposed matrix by products of bfloat16 pairs: the gradient of a matrix
//! product, `out = round(grad) W`.
//!
//! ```text
//! chunk   how a piece walks the matrix, and the interleaving of its rows
//! pairs   by `vdpbf16ps`
//! tiles   by AMX tiles
//! ```
//!
//! Shapes: grad `[rows, outputs]` f32, rounded to bfloat16; matrix `[outputs, inputs]`; out
//! `[rows, inputs]` f32. Floor: `2 * rows * outputs * inputs` operations over the rate of bfloat16
//! pairs, and for few rows the stored bytes of the matrix over the bandwidth of memory.

mod chunk;
mod pairs;
mod tiles;

use chunk::TransposedProduct;

use super::amx::{Hardware, Model};
use super::bf16::round_row;
use super::gemm::MatrixSource;
use super::gemm::pairs::Pairs;
use super::gemm::sources::{Bf16, Int8, Nf4};
use super::line::LINE;
use super::{Isa, Scratch};
use crate::cpu::pool::{Disjoint, ThreadPool};
use crate::ops::LinearGrad;
use crate::tensor::{Format, WeightView};
use crate::tuning;

/// Computes the gradient if the matrix is one that this path takes; else gives `args` back.
///
/// # Safety
/// The machine has `isa`, which has products of pairs.
pub(super) unsafe fn multiply<'a>(
    isa: Isa,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    args: LinearGrad<'a, [f32], WeightView<'a>>,
) -> Option<LinearGrad<'a, [f32], WeightView<'a>>> {
    let (weight, inputs) = (args.weight, args.weight.inputs());
    match weight.format() {
        Format::Plain => {
            let bytes = weight.bytes();
            run(isa, pool, scratch, args, Bf16 { bytes, inputs }, None::<fn(usize) -> f32>);
        }
        Format::Int8(parts) => {
            // The codes are exact in bfloat16; the scale of a row goes to what the row is
            // multiplied with.
            let scale = Some(|output| parts.scale(output));
            run(isa, pool, scratch, args, Int8 { parts, inputs }, scale);
        }
        Format::Nf4(parts) if parts.is_grouped() => {
            run(isa, pool, scratch, args, Nf4 { parts, inputs }, None::<fn(usize) -> f32>);
        }
        Format::Nf4(_) => return Some(args),
    }
    None
}

fn run<S: MatrixSource<Pairs>>(
    isa: Isa,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    args: LinearGrad<'_, [f32], WeightView<'_>>,
    source: S,
    scale: Option<impl Fn(usize) -> f32 + Sync>,
) {
    let (inputs, outputs, rows) = (args.weight.inputs(), args.weight.outputs(), args.rows);
    // One line more than needed: rows of a power of two would share their sets of the first-level
    // cache.
    let stride = (2 * outputs).next_multiple_of(LINE) + LINE;
    scratch.grads.resize(rows * stride, 0);
    let scales: Option<Vec<f32>> = scale.map(|scale| (0..outputs).map(scale).collect());
    let grad = args.grad;
    let prepare = |row: usize, bytes: &mut [u8]| {
        let grad = &grad[row * outputs..(row + 1) * outputs];
        // SAFETY: the caller of `multiply` has the instruction set.
        unsafe { round_row(grad, scales.as_deref(), bytes) };
    };
    if tuning::packing_is_parallel(rows * outputs) {
        pool.chunks(&mut scratch.grads, stride, prepare);
    } else {
        let rows = scratch.grads.chunks_exact_mut(stride);
        rows.enumerate().for_each(|(row, bytes)| prepare(row, bytes));
    }
    let product = TransposedProduct {
        source,
        inputs,
        outputs,
        grad: &scratch.grads,
        stride,
        rows,
        out: Disjoint::new(&mut args.out[..rows * inputs]),
    };
    let piece = tuning::transposed_piece(inputs, pool.threads());
    pool.run(inputs.div_ceil(piece), |index| {
        let columns = index * piece..inputs.min((index + 1) * piece);
        match isa {
            Isa::Amx => product.piece_in_tiles::<Hardware>(columns),
            Isa::AmxModel => product.piece_in_tiles::<Model>(columns),
            _ => product.piece(columns),
        }
    });
}
