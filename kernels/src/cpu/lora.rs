//! Adapters on the fast paths of the matrix product and of its gradient: per part two thin
//! products, and one pass that adds them to the rows. A row has the same bits in any part, as it
//! has in any product.

use super::group::CpuGroup;
use super::pool::ThreadPool;
use super::simd::{self, Isa, Scratch};
use crate::ops::convert::with_rounding;
use crate::ops::{Linear, LinearGrad, Lora, LoraGrad, OpError, RankInputs};
use crate::tensor::WeightView;
use crate::tuning;

pub(super) fn lora(
    isa: Isa,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    delta: &mut Vec<f32>,
    group: &mut CpuGroup,
    args: Lora<'_, [f32], WeightView<'_>>,
) -> Result<(), OpError> {
    let mut product = |pool: &mut ThreadPool, x: &[f32], weight, out: &mut [f32], rows| {
        simd::linear(isa, pool, scratch, Linear { x, weight, bias: None, out, rows });
    };
    // Behind one another, so that all of them cross at once.
    let mut end = 0;
    for part in args.parts {
        let (inputs, rank) = (part.a.inputs(), part.a.outputs());
        let x = &args.x[part.first * inputs..(part.first + part.rows) * inputs];
        let start = end;
        end += part.rows * rank;
        product(pool, x, part.a, &mut args.middle[start..end], part.rows);
    }
    if args.inputs == RankInputs::Cut && end > 0 {
        group.all_reduce(&mut [&mut *args.middle], end)?;
    }
    let mut start = 0;
    for part in args.parts {
        let (rank, outputs) = (part.a.outputs(), part.b.outputs());
        let wide = part.first * outputs..(part.first + part.rows) * outputs;
        grow(delta, wide.len());
        let middle = &args.middle[start..start + part.rows * rank];
        start += middle.len();
        product(pool, middle, part.b, &mut delta[..wide.len()], part.rows);
        let (base, dtype, scale) = (args.round, part.a.dtype(), part.scale);
        let delta = &delta[..wide.len()];
        add(pool, &mut args.out[wide], delta, |out, delta| {
            with_rounding!(base, round => with_rounding!(dtype, round_a => {
                for (out, d) in out.iter_mut().zip(delta) {
                    *out = round(*out) + round_a(scale * round_a(*d));
                }
            }));
        });
    }
    Ok(())
}

pub(super) fn lora_grad(
    isa: Isa,
    pool: &mut ThreadPool,
    scratch: &mut Scratch,
    delta: &mut Vec<f32>,
    args: LoraGrad<'_, [f32], WeightView<'_>>,
) {
    for part in args.parts {
        let (inputs, rank, outputs) = (part.a.inputs(), part.a.outputs(), part.b.outputs());
        let wide = part.first * inputs..(part.first + part.rows) * inputs;
        grow(delta, wide.len());
        let rows = part.rows;
        let grad = &args.grad[part.first * outputs..(part.first + rows) * outputs];
        let out = &mut args.middle[..rows * rank];
        simd::linear_grad(isa, pool, scratch, LinearGrad { grad, weight: part.b, out, rows });
        let (grad, out) = (&args.middle[..rows * rank], &mut delta[..wide.len()]);
        simd::linear_grad(isa, pool, scratch, LinearGrad { grad, weight: part.a, out, rows });
        let scale = part.scale;
        add(pool, &mut args.out[wide.clone()], &delta[..wide.len()], |out, delta| {
            for (out, d) in out.iter_mut().zip(delta) {
                *out += scale * d;
            }
        });
    }
}

fn grow(buffer: &mut Vec<f32>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
}

fn add(
    pool: &mut ThreadPool,
    out: &mut [f32],
    delta: &[f32],
    sum: impl Fn(&mut [f32], &[f32]) + Sync,
) {
    let piece = tuning::elementwise_piece(out.len(), pool.threads());
    pool.chunks(out, piece, |index, out| {
        let start = index * piece;
        sum(out, &delta[start..start + out.len()]);
    });
}
