//! Gradients of matrix products, norms, activations and attention.
//!
//! A product with a transposed matrix of bfloat16 is in [`super::transposed`] where the machine has products of pairs. Else it is summed over its rows from first to last: a few rows are widened to f32 at a time, and
//! every thread adds their multiples to its own columns. Of a plain matrix each thread widens its own columns; a few rows of a quantized
//! one are decoded by all threads together.

use std::cell::RefCell;
use std::ops::Range;

use shared::dtype::DType;

use super::elementwise::{moments, normal, tanh_weight};
use super::lanes::{LANES, dot, exp, mul_add, tree_sum};
#[cfg(target_arch = "x86_64")]
use super::transposed::multiply;
use super::{Isa, Scratch, attention::softmax, per_isa};
#[cfg(target_arch = "x86_64")]
use super::{attention_grad512, attention512};
use crate::cpu::pool::{Disjoint, Pool};
use crate::kv::{KvPages, StepRow};
use crate::ops::{
    Alibi, AttentionGrad, GeluGrad, GeluKind, LinearGrad, NormGrad, SiluMulGrad, convert,
};
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

/// What all pieces of one strip share.
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
    pool: &mut Pool,
    scratch: &mut Scratch,
    args: LinearGrad<'_, [f32], WeightView<'_>>,
) {
    #[cfg(target_arch = "x86_64")]
    let args = match (isa, args.weight.dtype()) {
        // SAFETY: `Isa` values come from `Isa::available`, which saw these features.
        (Isa::Avx512Bf16, DType::Bf16) => match unsafe { multiply(pool, scratch, args) } {
            Some(args) => args,
            None => return,
        },
        _ => args,
    };
    let (inputs, outputs, rows) = (args.weight.inputs(), args.weight.outputs(), args.rows);
    args.out[..rows * inputs].fill(0.0);
    if let Format::Plain = args.weight.format() {
        return plain_grad(isa, pool, args);
    }
    let out = Disjoint::new(&mut args.out[..rows * inputs]);
    let mut widened = vec![0.0; STRIP.min(outputs) * inputs];
    let weight = args.weight;
    for first in (0..outputs).step_by(STRIP) {
        let count = STRIP.min(outputs - first);
        let widened = &mut widened[..count * inputs];
        pool.chunks(widened, inputs * count.div_ceil(4), |index, part| {
            let start = first + index * count.div_ceil(4);
            let weight = &weight;
            per_isa!(isa, widen_rows(weight: &WeightView<'_>, start: usize, part: &mut [f32]))
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

/// A matrix of plain numbers: every piece widens the columns it needs, and no thread waits for another.
fn plain_grad(isa: Isa, pool: &mut Pool, args: LinearGrad<'_, [f32], WeightView<'_>>) {
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
        for (row, part) in (first..first + count).zip(widened.chunks_exact_mut(columns.len())) {
            let (start, end) = (row * inputs + columns.start, row * inputs + columns.end);
            convert::widen(
                weight.dtype(),
                &weight.bytes()[start * size..end * size],
                part,
            );
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
struct Form<'a> {
    weight: &'a [f32],
    eps: f32,
    centered: bool,
}

pub(in crate::cpu) fn norm_grad(isa: Isa, pool: &mut Pool, args: NormGrad<'_, [f32]>) {
    let width = args.width;
    let total = args.rows * width;
    let rows = tuning::elementwise_piece(total, pool.threads())
        .div_ceil(width.max(1))
        .max(1);
    let form = Form {
        weight: &args.weight[..width],
        eps: args.eps,
        centered: args.centered,
    };
    let x = args.x;
    pool.chunks(&mut args.grad[..total], rows * width, |index, grad| {
        let start = index * rows * width;
        let (x, form) = (&x[start..start + grad.len()], &form);
        per_isa!(isa, norm_rows(x: &[f32], form: &Form<'_>, grad: &mut [f32]))
    });
}

#[inline(always)]
fn norm_rows<const FMA: bool>(x: &[f32], form: &Form<'_>, grad: &mut [f32]) {
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
        let level = if form.centered {
            tree_sum(level) / width as f32
        } else {
            0.0
        };
        let along = tree_sum(along) / width as f32;
        for (x, grad) in x.iter().zip(grad) {
            *grad = scale * (*grad - level - (x - mean) * scale * along);
        }
    }
}

pub(in crate::cpu) fn silu_mul_grad(isa: Isa, args: SiluMulGrad<'_, [f32]>) {
    let len = args.len;
    let (gate, up, grad) = (
        &mut args.gate[..len],
        &mut args.up[..len],
        &args.grad[..len],
    );
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

pub(in crate::cpu) fn gelu_grad(isa: Isa, pool: &mut Pool, args: GeluGrad<'_, [f32]>) {
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
                // Beyond this the slope is 0 or 1, and its parts are infinite times 0.
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

/// Per thread: keys, values and their gradients of one head of a row, and the weights of one query.
#[derive(Default)]
struct Local {
    keys: Vec<f32>,
    values: Vec<f32>,
    k_grad: Vec<f32>,
    v_grad: Vec<f32>,
    weights: Vec<f32>,
    slopes: Vec<f32>,
    #[cfg(target_arch = "x86_64")]
    pairs: attention_grad512::Local,
}

thread_local! {
    static LOCAL: RefCell<Local> = RefCell::default();
}

/// What all pieces of an attention share.
pub(super) struct Task<'a> {
    pub(super) q: &'a [f32],
    pub(super) grad: &'a [f32],
    pub(super) pages: &'a KvPages<'a>,
    pub(super) rows: &'a [StepRow<'a>],
    pub(super) starts: &'a [usize],
    pub(super) group: usize,
    pub(super) divisor: f32,
    pub(super) alibi: Option<Alibi<'a>>,
    pub(super) window: usize,
    pub(super) q_grad: Disjoint<'a, f32>,
    pub(super) k_grad: Disjoint<'a, f32>,
    pub(super) v_grad: Disjoint<'a, f32>,
}

/// A piece is one kv head of one row.
pub(in crate::cpu) fn attention_grad(
    isa: Isa,
    pool: &mut Pool,
    args: AttentionGrad<'_, [f32], KvPages<'_>>,
) {
    let kv_heads = args.pages.layout().kv_heads;
    let task = Task {
        q: args.q,
        grad: args.grad,
        pages: args.pages,
        rows: args.rows,
        starts: args.starts,
        group: args.group,
        divisor: args.divisor,
        alibi: args.alibi,
        window: args.window,
        q_grad: Disjoint::new(args.q_grad),
        k_grad: Disjoint::new(args.k_grad),
        v_grad: Disjoint::new(args.v_grad),
    };
    #[cfg(target_arch = "x86_64")]
    let has_pairs = {
        let layout = args.pages.layout();
        isa == Isa::Avx512Bf16
            && layout.dtype == DType::Bf16
            && attention512::takes(layout.head_dim)
    };
    pool.run(args.rows.len() * kv_heads, |index| {
        let (row, head) = (index / kv_heads, index % kv_heads);
        LOCAL.with_borrow_mut(|local| {
            let task = &task;
            #[cfg(target_arch = "x86_64")]
            if has_pairs {
                // SAFETY: `Isa` values come from `Isa::available`; the pages are such that `has_pairs` is set.
                unsafe { attention_grad512::attend(task, row, head, &mut local.pairs) };
                return;
            }
            per_isa!(isa, attend(task: &Task<'_>, row: usize, head: usize, local: &mut Local))
        });
    });
}

#[inline(always)]
fn attend<const FMA: bool>(task: &Task<'_>, number: usize, head: usize, local: &mut Local) {
    let layout = task.pages.layout();
    let (dim, heads) = (layout.head_dim, layout.kv_heads * task.group);
    let row = &task.rows[number];
    let index: usize = task.rows[..number].iter().map(|r| r.tokens).sum();
    let first = (row.prefix + 1).saturating_sub(task.window);
    let end = row.prefix + row.tokens;
    let at = |p: usize| ((task.starts[number] + p) * layout.kv_heads + head) * dim;
    local.load(task, row, head, first..end);
    for p in first..end {
        let own = (p - first) * dim..(p - first + 1) * dim;
        // SAFETY: pieces differ in row or kv head, so their parts do not overlap; the borrow ends here.
        local.k_grad[own.clone()].copy_from_slice(unsafe { task.k_grad.range(at(p), dim) });
        // SAFETY: as above.
        local.v_grad[own].copy_from_slice(unsafe { task.v_grad.range(at(p), dim) });
    }
    for token in (0..row.tokens).rev() {
        for h in 0..task.group {
            let place = ((index + token) * heads + head * task.group + h) * dim;
            let (q, grad) = (&task.q[place..place + dim], &task.grad[place..place + dim]);
            let position = row.prefix + token;
            let seen = (position + 1).saturating_sub(task.window)..position + 1;
            // SAFETY: as above.
            let q_grad = unsafe { task.q_grad.range(place, dim) };
            let slope = task
                .alibi
                .map(|a| (a.slopes[head * task.group + h], a.scale));
            let bias = |p: usize| {
                slope.map_or(0.0, |(slope, scale)| {
                    scale * convert::round(layout.dtype, slope * p as f32)
                })
            };
            local.query::<FMA>(q, grad, first, seen, task.divisor, bias, q_grad);
        }
    }
    for p in first..end {
        let own = (p - first) * dim..(p - first + 1) * dim;
        // SAFETY: as above.
        unsafe { task.k_grad.range(at(p), dim) }.copy_from_slice(&local.k_grad[own.clone()]);
        // SAFETY: as above.
        unsafe { task.v_grad.range(at(p), dim) }.copy_from_slice(&local.v_grad[own]);
    }
}

impl Local {
    /// Widens keys and values of some positions.
    #[inline(always)]
    fn load(&mut self, task: &Task<'_>, row: &StepRow<'_>, head: usize, range: Range<usize>) {
        let layout = task.pages.layout();
        let (dim, bytes) = (layout.head_dim, layout.vector_bytes());
        for buffer in [
            &mut self.keys,
            &mut self.values,
            &mut self.k_grad,
            &mut self.v_grad,
        ] {
            buffer.resize(range.len() * dim, 0.0);
        }
        for (number, p) in range.enumerate() {
            let (page, slot) = row.locate(p);
            let from = slot * bytes..(slot + 1) * bytes;
            let to = number * dim..(number + 1) * dim;
            let (keys, values) = (task.pages.keys(page, head), task.pages.values(page, head));
            convert::widen(
                layout.dtype,
                &keys[from.clone()],
                &mut self.keys[to.clone()],
            );
            convert::widen(layout.dtype, &values[from], &mut self.values[to]);
        }
    }

    /// One query: its gradient, and its part of those of the keys and values it sees.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "the loop variables of one place")]
    fn query<const FMA: bool>(
        &mut self,
        q: &[f32],
        grad: &[f32],
        first: usize,
        seen: Range<usize>,
        divisor: f32,
        bias: impl Fn(usize) -> f32,
        q_grad: &mut [f32],
    ) {
        let dim = q.len();
        let part = (seen.start - first) * dim..(seen.end - first) * dim;
        let (keys, values) = (&self.keys[part.clone()], &self.values[part.clone()]);
        self.weights.clear();
        self.slopes.clear();
        let pairs = keys.chunks_exact(dim).zip(values.chunks_exact(dim));
        for (p, (key, value)) in seen.zip(pairs) {
            self.weights.push(dot::<FMA>(q, key) / divisor + bias(p));
            self.slopes.push(dot::<FMA>(grad, value));
        }
        softmax::<FMA>(&mut self.weights, |v| v);
        let mean = dot::<FMA>(&self.weights, &self.slopes);
        q_grad.fill(0.0);
        let grads = self.k_grad[part.clone()]
            .chunks_exact_mut(dim)
            .zip(self.v_grad[part].chunks_exact_mut(dim));
        let scalars = self.weights.iter().zip(&self.slopes);
        for (((k_grad, v_grad), key), (weight, slope)) in
            grads.zip(keys.chunks_exact(dim)).zip(scalars)
        {
            let change = weight * (slope - mean) / divisor;
            for i in 0..dim {
                q_grad[i] = mul_add::<FMA>(change, key[i], q_grad[i]);
                k_grad[i] = mul_add::<FMA>(change, q[i], k_grad[i]);
                v_grad[i] = mul_add::<FMA>(*weight, grad[i], v_grad[i]);
            }
        }
    }
}
