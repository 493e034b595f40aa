//! What the kernels of attention share: tiles of queries, arguments, and the softmax.

use crate::cpu::pool::Disjoint;
use crate::cpu::simd::lanes::{LANES, exp, tree_sum};
use crate::kv::{KvPages, StepRow};
use crate::ops::Alibi;

/// Query tokens `first..first + tokens` of a batch row; `index` is the index of the first one
/// among all tokens of the step.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu::simd) struct QueryTile {
    pub(super) row: usize,
    pub(super) first: usize,
    pub(super) tokens: usize,
    pub(super) index: usize,
}

/// Arguments of attention, which all pieces share.
pub(super) struct Forward<'a> {
    pub(super) q: &'a [f32],
    pub(super) pages: &'a KvPages<'a>,
    pub(super) rows: &'a [StepRow<'a>],
    pub(super) group: usize,
    pub(super) divisor: f32,
    pub(super) alibi: Option<Alibi<'a>>,
    pub(super) window: usize,
}

/// What attention writes.
#[derive(Clone, Copy)]
pub(super) struct Outputs<'a, 'o> {
    pub(super) out: &'a Disjoint<'o, f32>,
    /// Logarithms of sums, where a gradient will want them.
    pub(super) logsum: Option<&'a Disjoint<'o, f32>>,
}

/// Arguments of the gradient of attention, which all pieces share.
pub(super) struct Backward<'a> {
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

/// Turns scores into weights that sum to 1, each rounded; returns the logarithm of the sum of the
/// scores' exponentials.
#[inline(always)]
pub(super) fn softmax<const FMA: bool>(scores: &mut [f32], round: impl Fn(f32) -> f32) -> f32 {
    let mut tops = [f32::NEG_INFINITY; LANES];
    for group in scores.chunks(LANES) {
        for (top, score) in tops.iter_mut().zip(group) {
            *top = if *score > *top { *score } else { *top };
        }
    }
    let top = tops.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let mut sums = [0.0; LANES];
    for group in scores.chunks_mut(LANES) {
        for (sum, score) in sums.iter_mut().zip(group) {
            *score = exp::<FMA>(*score - top);
            *sum += *score;
        }
    }
    let total = tree_sum(sums);
    for weight in scores {
        *weight = round(*weight / total);
    }
    top + total.ln()
}
