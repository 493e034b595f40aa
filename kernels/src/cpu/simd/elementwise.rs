//! Norms, activations, sums, rotations and appends: plain loops over lanes, compiled per instruction
//! set.
//!
//! Shapes: norms `[rows, width]`, rotations `[tokens, heads, head_dim]`, others `[len]`; all f32 in
//! memory. Floor: the bytes read and written over the bandwidth of memory; activations add about 20
//! operations for an exponential.

use super::lanes::{LANES, dot, erfc, exp, mul_add, tree_sum};
use super::{Isa, per_isa};
use crate::cpu::pool::ThreadPool;
use crate::kv::KvPages;
use crate::ops::convert::with_rounding;
use crate::ops::{
    Add, Gelu, GeluKind, KvAppend, Layernorm, Rmsnorm, Rope, SiluMul, add, kv_append, rope,
};
use crate::tuning;
use shared::dtype::DType;

/// Sums in pieces.
pub(in crate::cpu) fn add(isa: Isa, pool: &mut ThreadPool, args: Add<'_, [f32]>) {
    let piece = tuning::elementwise_piece(args.len, pool.threads()).next_multiple_of(LANES);
    let (y, round) = (&args.y[..args.len], args.round);
    pool.chunks(&mut args.x[..args.len], piece, |index, x| {
        let y = &y[index * piece..index * piece + x.len()];
        per_isa!(isa, add_piece(x: &mut [f32], y: &[f32], round: DType))
    });
}

#[inline(always)]
fn add_piece<const FMA: bool>(x: &mut [f32], y: &[f32], round: DType) {
    with_rounding!(round, round => add::sum(round, x, y));
}

/// Tokens in pieces.
pub(in crate::cpu) fn rope(isa: Isa, pool: &mut ThreadPool, args: Rope<'_, [f32]>) {
    let width = args.heads * args.head_dim;
    let total = args.tokens * width;
    let tokens = tuning::elementwise_piece(total, pool.threads()).div_ceil(width.max(1)).max(1);
    let (table, dim, round) = (args.table, args.head_dim, args.round);
    let sign = if args.inverse { -1.0 } else { 1.0 };
    pool.chunks(&mut args.x[..total], (tokens * width).max(1), |index, x| {
        let table = &table[index * tokens * dim..];
        per_isa!(isa, rope_tokens(x: &mut [f32], width: usize, table: &[f32], dim: usize, sign: f32, round: DType))
    });
}

#[inline(always)]
fn rope_tokens<const FMA: bool>(
    x: &mut [f32],
    width: usize,
    table: &[f32],
    dim: usize,
    sign: f32,
    round: DType,
) {
    with_rounding!(round, round => for (token, table) in x.chunks_exact_mut(width.max(1)).zip(table.chunks_exact(dim)) {
        for head in token.chunks_exact_mut(dim) {
            rope::rotate(head, table, sign, round);
        }
    });
}

/// Keys and values of the new tokens into their pages.
pub(in crate::cpu) fn kv_append(isa: Isa, args: KvAppend<'_, [f32], KvPages<'_>>) {
    per_isa!(isa, append(args: KvAppend<'_, [f32], KvPages<'_>>))
}

#[inline(always)]
fn append<const FMA: bool>(args: KvAppend<'_, [f32], KvPages<'_>>) {
    kv_append::write(args);
}

/// Rows in pieces; the mean is a [`dot`] of the row with itself.
pub(in crate::cpu) fn rmsnorm(isa: Isa, pool: &mut ThreadPool, args: Rmsnorm<'_, [f32]>) {
    let width = args.width;
    let total = args.rows * width;
    let rows = tuning::elementwise_piece(total, pool.threads()).div_ceil(width.max(1)).max(1);
    let (x, weight, eps, round) = (args.x, &args.weight[..width], args.eps, args.round);
    pool.chunks(&mut args.out[..total], rows * width, |index, out| {
        let start = index * rows * width;
        let x = &x[start..start + out.len()];
        per_isa!(isa, norm_rows(x: &[f32], weight: &[f32], eps: f32, round: DType, out: &mut [f32]))
    });
}

#[inline(always)]
fn norm_rows<const FMA: bool>(x: &[f32], weight: &[f32], eps: f32, round: DType, out: &mut [f32]) {
    for (x, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
        let scale = 1.0 / (dot::<FMA>(x, x) / weight.len() as f32 + eps).sqrt();
        with_rounding!(round, round => scale_row(x, weight, out, |v| round(v * scale)));
    }
}

#[inline(always)]
fn scale_row(x: &[f32], weight: &[f32], out: &mut [f32], normalise: impl Fn(f32) -> f32) {
    for ((out, v), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = weight * normalise(*v);
    }
}

/// Rows in pieces, each in three passes: mean, variance, result.
pub(in crate::cpu) fn layernorm(isa: Isa, pool: &mut ThreadPool, args: Layernorm<'_, [f32]>) {
    let width = args.width;
    let total = args.rows * width;
    let rows = tuning::elementwise_piece(total, pool.threads()).div_ceil(width.max(1)).max(1);
    let form = Form {
        weight: &args.weight[..width],
        bias: &args.bias[..width],
        eps: args.eps,
        round: args.round,
    };
    let x = args.x;
    pool.chunks(&mut args.out[..total], rows * width, |index, out| {
        let start = index * rows * width;
        let (x, form) = (&x[start..start + out.len()], &form);
        per_isa!(isa, layer_rows(x: &[f32], form: &Form<'_>, out: &mut [f32]))
    });
}

/// What all rows of a layer norm share.
struct Form<'a> {
    weight: &'a [f32],
    bias: &'a [f32],
    eps: f32,
    round: DType,
}

#[inline(always)]
fn layer_rows<const FMA: bool>(x: &[f32], form: &Form<'_>, out: &mut [f32]) {
    let width = form.weight.len();
    for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        let (mean, scale) = moments::<FMA>(x, form.eps);
        with_rounding!(form.round, round => for (((out, v), weight), bias) in out.iter_mut().zip(x).zip(form.weight).zip(form.bias) {
            *out = round(mul_add::<FMA>(*weight, (v - mean) * scale, *bias));
        });
    }
}

/// Mean of a row, and the inverse of its deviation.
#[inline(always)]
pub(super) fn moments<const FMA: bool>(x: &[f32], eps: f32) -> (f32, f32) {
    let width = x.len() as f32;
    let mut sums = [0.0; LANES];
    for group in x.chunks(LANES) {
        for (sum, v) in sums.iter_mut().zip(group) {
            *sum += v;
        }
    }
    let mean = tree_sum(sums) / width;
    let mut squares = [0.0; LANES];
    for group in x.chunks(LANES) {
        for (sum, v) in squares.iter_mut().zip(group) {
            *sum = mul_add::<FMA>(v - mean, v - mean, *sum);
        }
    }
    (mean, 1.0 / (tree_sum(squares) / width + eps).sqrt())
}

/// Elements in pieces.
pub(in crate::cpu) fn gelu(isa: Isa, pool: &mut ThreadPool, args: Gelu<'_, [f32]>) {
    let piece = tuning::elementwise_piece(args.len, pool.threads()).next_multiple_of(LANES);
    let (kind, round) = (args.kind, args.round);
    pool.chunks(
        &mut args.x[..args.len],
        piece,
        |_, x| per_isa!(isa, gelu_piece(x: &mut [f32], kind: GeluKind, round: DType)),
    );
}

#[inline(always)]
fn gelu_piece<const FMA: bool>(x: &mut [f32], kind: GeluKind, round: DType) {
    match kind {
        GeluKind::Tanh => with_rounding!(round, round => for v in x.iter_mut() {
            let x = round(*v);
            *v = x * tanh_weight::<FMA>(x);
        }),
        GeluKind::Erf => with_rounding!(round, round => for v in x.iter_mut() {
            let x = round(*v);
            *v = x * normal::<FMA>(x);
        }),
    }
}

/// `(1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))` with `u = 0.79788456 x (1 + 0.044715 x^2)`.
#[inline(always)]
pub(super) fn tanh_weight<const FMA: bool>(x: f32) -> f32 {
    let u = 0.797_884_6 * x * mul_add::<FMA>(0.044_715 * x, x, 1.0);
    1.0 / (1.0 + exp::<FMA>(-2.0 * u))
}

/// The normal distribution function, `(1 + erf(x / 2^1/2)) / 2`.
#[inline(always)]
pub(super) fn normal<const FMA: bool>(x: f32) -> f32 {
    let tail = 0.5 * erfc::<FMA>(x.abs() * std::f32::consts::FRAC_1_SQRT_2);
    if x < 0.0 { tail } else { 1.0 - tail }
}

/// Elements in pieces.
pub(in crate::cpu) fn silu_mul(isa: Isa, pool: &mut ThreadPool, args: SiluMul<'_, [f32]>) {
    let piece = tuning::elementwise_piece(args.len, pool.threads()).next_multiple_of(LANES);
    let (up, round) = (&args.up[..args.len], args.round);
    pool.chunks(&mut args.gate[..args.len], piece, |index, gate| {
        let up = &up[index * piece..index * piece + gate.len()];
        per_isa!(isa, gate_mul(gate: &mut [f32], up: &[f32], round: DType))
    });
}

#[inline(always)]
fn gate_mul<const FMA: bool>(gate: &mut [f32], up: &[f32], round: DType) {
    with_rounding!(round, round => for (gate, up) in gate.iter_mut().zip(up) {
        let x = round(*gate);
        *gate = round(x / (1.0 + exp::<FMA>(-x))) * round(*up);
    });
}
