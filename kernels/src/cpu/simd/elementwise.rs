//! Norm and gate.

use super::lanes::{LANES, dot, exp};
use super::{Isa, per_isa};
use crate::cpu::pool::Pool;
use crate::ops::convert::with_rounding;
use crate::ops::{Rmsnorm, SiluMul};
use crate::tuning;
use shared::dtype::DType;

/// Rows in pieces; the mean is a [`dot`] of the row with itself.
pub(in crate::cpu) fn rmsnorm(isa: Isa, pool: &mut Pool, args: Rmsnorm<'_, [f32]>) {
    let width = args.width;
    let total = args.rows * width;
    let rows = tuning::elementwise_piece(total, pool.threads())
        .div_ceil(width.max(1))
        .max(1);
    let (x, weight, eps, round) = (args.x, &args.weight[..width], args.eps, args.round);
    pool.chunks(&mut args.out[..total], rows * width, |index, out| {
        let start = index * rows * width;
        let x = &x[start..start + out.len()];
        per_isa!(isa, norm_rows(x: &[f32], weight: &[f32], eps: f32, round: DType, out: &mut [f32]))
    });
}

#[inline(always)]
fn norm_rows<const FMA: bool>(x: &[f32], weight: &[f32], eps: f32, round: DType, out: &mut [f32]) {
    for (x, out) in x
        .chunks_exact(weight.len())
        .zip(out.chunks_exact_mut(weight.len()))
    {
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

/// Elements in pieces.
pub(in crate::cpu) fn silu_mul(isa: Isa, pool: &mut Pool, args: SiluMul<'_, [f32]>) {
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
