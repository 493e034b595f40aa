//! Gradients of matrix products, norms and activations.
//!
//! A product with a transposed matrix of bfloat16 is in [`super::transposed_pairs`] where the machine has
//! products of pairs. Other products are summed over the rows of the matrix from first to last: by
//! tiles of outer products ([`super::transposed_panels`]), or for few rows with the same bits here:
//! every thread adds multiples of some rows, widened to f32, to its own columns. Of a plain matrix
//! each thread widens its own columns; rows of a quantized matrix are decoded by all threads
//! together.
//!
//! Shapes: gradients `[rows, outputs]`, matrix `[outputs, inputs]`, result `[rows, inputs]`, all f32.
//! Floors: `2 * rows * outputs * inputs` operations over the f32 rate for products; the bytes read
//! and written over the bandwidth of memory for norms and activations.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{__m256, __m512};
use std::cell::RefCell;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use shared::dtype::DType;

use super::elementwise::{moments, normal, tanh_weight};
use super::lanes::{LANES, dot, exp, mul_add, tree_sum};
#[cfg(target_arch = "aarch64")]
use super::neon::Neon;
#[cfg(target_arch = "x86_64")]
use super::transposed_pairs::multiply;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::transposed_panels;
use super::{Isa, Scratch, Vectors, per_isa};
use crate::cpu::pool::{Disjoint, ThreadPool};
use crate::ops::{GeluGrad, GeluKind, LinearGrad, NormGrad, SiluMulGrad, convert};
use crate::tensor::{Format, WeightView};
use crate::tuning;

/// Rows of a matrix that are widened at a time.
const STRIP: usize = 64;
/// Columns of a tile.
const COLUMNS: usize = 64;
/// Columns of a piece of a plain matrix: a strip of them fits the second-level cache.
const WIDE: usize = 256;

thread_local! {
    /// A strip of the columns of this thread.
    static WIDENED: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Arguments that all pieces of one strip share.
struct Strip<'a> {
    /// `[outputs of the strip, stride]`, from column `first` of the matrix.
    weight: &'a [f32],
    stride: usize,
    first: usize,
    inputs: usize,
    /// `[rows, outputs]`, from the first output of the strip.
    grad: &'a [f32],
    outputs: usize,
    rows: usize,
}

pub(in crate::cpu) fn linear_grad(
    isa: Isa,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    args: LinearGrad<'_, [f32], WeightView<'_>>,
) {
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = scratch;
    #[cfg(target_arch = "x86_64")]
    let args = if isa.has_pairs() && args.weight.dtype() == DType::Bf16 {
        // SAFETY: `Isa` values come from `Isa::available`, which saw these features.
        match unsafe { multiply(isa, pool, scratch, args) } {
            Some(args) => args,
            None => return,
        }
    } else {
        args
    };
    if tuning::gradient_takes_panels(args.rows) {
        match isa.vectors() {
            // SAFETY: `Isa` values come from `Isa::available`, which saw these features.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx512 => unsafe {
                return transposed_panels::multiply::<__m512>(pool, scratch, args);
            },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Vectors::Avx2 => unsafe {
                return transposed_panels::multiply::<__m256>(pool, scratch, args);
            },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Vectors::Neon => unsafe {
                return transposed_panels::multiply::<Neon>(pool, scratch, args);
            },
            Vectors::Plain => {}
        }
    }
    args.out[..args.rows * args.weight.inputs()].fill(0.0);
    match args.weight.format() {
        Format::Plain => plain_grad(isa, pool, args),
        _ => quantized_grad(isa, pool, args),
    }
}

/// The gradient of a quantized matrix, [`STRIP`] outputs of which are widened at a time.
fn quantized_grad(isa: Isa, pool: &mut ThreadPool, args: LinearGrad<'_, [f32], WeightView<'_>>) {
    let (inputs, outputs, rows) = (args.weight.inputs(), args.weight.outputs(), args.rows);
    let out = Disjoint::new(&mut args.out[..rows * inputs]);
    let mut widened = vec![0.0; STRIP.min(outputs) * inputs];
    let weight = args.weight;
    for first in (0..outputs).step_by(STRIP) {
        let count = STRIP.min(outputs - first);
        let widened = &mut widened[..count * inputs];
        pool.chunks(widened, inputs * count.div_ceil(4), |index, rows| {
            let start = first + index * count.div_ceil(4);
            let weight = &weight;
            per_isa!(isa, widen_rows(weight: &WeightView<'_>, start: usize, rows: &mut [f32]))
        });
        let strip = Strip {
            weight: widened,
            stride: inputs,
            first: 0,
            inputs,
            grad: &args.grad[first..],
            outputs,
            rows,
        };
        pool.run(inputs.div_ceil(COLUMNS), |index| {
            let (strip, out) = (&strip, &out);
            let columns = index * COLUMNS..inputs.min((index + 1) * COLUMNS);
            per_isa!(isa, add_strip(strip: &Strip<'_>, count: usize, columns: Range<usize>, out: &Disjoint<'_, f32>))
        });
    }
}

/// A matrix of plain numbers: every piece widens the columns it needs, and no thread waits for
/// another.
fn plain_grad(isa: Isa, pool: &mut ThreadPool, args: LinearGrad<'_, [f32], WeightView<'_>>) {
    let (inputs, rows, weight) = (args.weight.inputs(), args.rows, args.weight);
    let (grad, out) = (args.grad, Disjoint::new(&mut args.out[..rows * inputs]));
    pool.run(inputs.div_ceil(WIDE), |index| {
        let columns = index * WIDE..inputs.min((index + 1) * WIDE);
        WIDENED.with_borrow_mut(|widened| {
            let (weight, out) = (&weight, &out);
            per_isa!(isa, add_columns(weight: &WeightView<'_>, grad: &[f32], rows: usize, columns: Range<usize>, widened: &mut Vec<f32>, out: &Disjoint<'_, f32>))
        });
    });
}

#[inline(always)]
fn add_columns<const FMA: bool>(
    weight: &WeightView<'_>,
    grad: &[f32],
    rows: usize,
    columns: Range<usize>,
    widened: &mut Vec<f32>,
    out: &Disjoint<'_, f32>,
) {
    let (inputs, outputs) = (weight.inputs(), weight.outputs());
    let size = weight.dtype().size_bytes();
    widened.resize(STRIP * columns.len(), 0.0);
    for first in (0..outputs).step_by(STRIP) {
        let count = STRIP.min(outputs - first);
        for (row, to) in (first..first + count).zip(widened.chunks_exact_mut(columns.len())) {
            let (start, end) = (row * inputs + columns.start, row * inputs + columns.end);
            convert::widen(weight.dtype(), &weight.bytes()[start * size..end * size], to);
        }
        let strip = Strip {
            weight: widened,
            stride: columns.len(),
            first: columns.start,
            inputs,
            grad: &grad[first..],
            outputs,
            rows,
        };
        for start in columns.clone().step_by(COLUMNS) {
            let columns = start..columns.end.min(start + COLUMNS);
            add_strip::<FMA>(&strip, count, columns, out);
        }
    }
}

#[inline(always)]
fn widen_rows<const FMA: bool>(weight: &WeightView<'_>, start: usize, out: &mut [f32]) {
    for (row, out) in (start..).zip(out.chunks_exact_mut(weight.inputs())) {
        weight.widen_row(row, out);
    }
}

#[inline(always)]
fn add_strip<const FMA: bool>(
    strip: &Strip<'_>,
    count: usize,
    columns: Range<usize>,
    out: &Disjoint<'_, f32>,
) {
    let (start, end) = (columns.start, columns.end);
    let mut row = 0;
    while row < strip.rows {
        let height = if strip.rows - row >= 4 { 4 } else { 1 };
        let mut column = start;
        while column < end {
            column += match (height, end - column) {
                (4, COLUMNS..) => add_tile::<FMA, 4, COLUMNS>(strip, count, row, column, out),
                (4, LANES..) => add_tile::<FMA, 4, LANES>(strip, count, row, column, out),
                (4, _) => add_tile::<FMA, 4, 1>(strip, count, row, column, out),
                (_, COLUMNS..) => add_tile::<FMA, 1, COLUMNS>(strip, count, row, column, out),
                (_, LANES..) => add_tile::<FMA, 1, LANES>(strip, count, row, column, out),
                _ => add_tile::<FMA, 1, 1>(strip, count, row, column, out),
            };
        }
        row += height;
    }
}

/// `R` rows and `W` columns; returns `W`.
#[inline(always)]
fn add_tile<const FMA: bool, const R: usize, const W: usize>(
    strip: &Strip<'_>,
    count: usize,
    row: usize,
    column: usize,
    out: &Disjoint<'_, f32>,
) -> usize {
    let mut sums = [[0.0f32; W]; R];
    for (r, sums) in sums.iter_mut().enumerate() {
        // SAFETY: pieces differ in their columns; the borrow ends here.
        sums.copy_from_slice(unsafe { out.range((row + r) * strip.inputs + column, W) });
    }
    for o in 0..count {
        let weight = &strip.weight[o * strip.stride + column - strip.first..][..W];
        for (r, sums) in sums.iter_mut().enumerate() {
            let grad = strip.grad[(row + r) * strip.outputs + o];
            for (sum, weight) in sums.iter_mut().zip(weight) {
                *sum = mul_add::<FMA>(grad, *weight, *sum);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        // SAFETY: as above.
        unsafe { out.range((row + r) * strip.inputs + column, W) }.copy_from_slice(sums);
    }
    W
}

/// What all rows of a norm share.
struct NormForm<'a> {
    weight: &'a [f32],
    eps: f32,
    centered: bool,
}

pub(in crate::cpu) fn norm_grad(isa: Isa, pool: &mut ThreadPool, args: NormGrad<'_, [f32]>) {
    let width = args.width;
    let total = args.rows * width;
    let rows = tuning::elementwise_piece(total, pool.threads()).div_ceil(width.max(1)).max(1);
    let form = NormForm { weight: &args.weight[..width], eps: args.eps, centered: args.centered };
    let x = args.x;
    pool.chunks(&mut args.grad[..total], rows * width, |index, grad| {
        let start = index * rows * width;
        let (x, form) = (&x[start..start + grad.len()], &form);
        per_isa!(isa, norm_rows(x: &[f32], form: &NormForm<'_>, grad: &mut [f32]))
    });
}

#[inline(always)]
fn norm_rows<const FMA: bool>(x: &[f32], form: &NormForm<'_>, grad: &mut [f32]) {
    let width = form.weight.len();
    for (x, grad) in x.chunks_exact(width).zip(grad.chunks_exact_mut(width)) {
        let (mean, scale) = if form.centered {
            moments::<FMA>(x, form.eps)
        } else {
            let square = dot::<FMA>(x, x) / width as f32;
            (0.0, 1.0 / (square + form.eps).sqrt())
        };
        let (mut level, mut along) = ([0.0; LANES], [0.0; LANES]);
        let groups = x.chunks(LANES).zip(grad.chunks_mut(LANES));
        for ((x, grad), weight) in groups.zip(form.weight.chunks(LANES)) {
            for (i, ((x, grad), weight)) in x.iter().zip(grad).zip(weight).enumerate() {
                *grad *= weight;
                level[i] += *grad;
                along[i] = mul_add::<FMA>(*grad, (x - mean) * scale, along[i]);
            }
        }
        let level = if form.centered { tree_sum(level) / width as f32 } else { 0.0 };
        let along = tree_sum(along) / width as f32;
        for (x, grad) in x.iter().zip(grad) {
            *grad = scale * (*grad - level - (x - mean) * scale * along);
        }
    }
}

pub(in crate::cpu) fn silu_mul_grad(isa: Isa, args: SiluMulGrad<'_, [f32]>) {
    let len = args.len;
    let (gate, up, grad) = (&mut args.gate[..len], &mut args.up[..len], &args.grad[..len]);
    per_isa!(isa, silu_piece(gate: &mut [f32], up: &mut [f32], grad: &[f32]))
}

#[inline(always)]
fn silu_piece<const FMA: bool>(gate: &mut [f32], up: &mut [f32], grad: &[f32]) {
    for ((gate, up), grad) in gate.iter_mut().zip(up).zip(grad) {
        let (x, sigmoid) = (*gate, 1.0 / (1.0 + exp::<FMA>(-*gate)));
        *gate = grad * *up * sigmoid * (1.0 + x * (1.0 - sigmoid));
        *up = grad * x * sigmoid;
    }
}

pub(in crate::cpu) fn gelu_grad(isa: Isa, pool: &mut ThreadPool, args: GeluGrad<'_, [f32]>) {
    let piece = tuning::elementwise_piece(args.len, pool.threads()).next_multiple_of(LANES);
    let (kind, x) = (args.kind, &args.x[..args.len]);
    pool.chunks(&mut args.grad[..args.len], piece, |index, grad| {
        let x = &x[index * piece..index * piece + grad.len()];
        per_isa!(isa, gelu_piece(x: &[f32], grad: &mut [f32], kind: GeluKind))
    });
}

#[inline(always)]
fn gelu_piece<const FMA: bool>(x: &[f32], grad: &mut [f32], kind: GeluKind) {
    match kind {
        GeluKind::Tanh => {
            for (x, grad) in x.iter().zip(grad) {
                let weight = tanh_weight::<FMA>(*x);
                // Beyond this the slope is 0 or 1, and its factors are infinite times 0.
                let near = x.clamp(-1e4, 1e4);
                let inner = 2.0 * 0.797_884_6 * mul_add::<FMA>(0.134_145 * near, near, 1.0);
                *grad *= weight + near * weight * (1.0 - weight) * inner;
            }
        }
        GeluKind::Erf => {
            for (x, grad) in x.iter().zip(grad) {
                let density = 0.398_942_3 * exp::<FMA>(-0.5 * x * x);
                *grad *= normal::<FMA>(*x) + x * density;
            }
        }
    }
}
