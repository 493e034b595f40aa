//! Attention over pages in the order of positions, in two passes: all scores of a query, then all values.
//!
//! A piece is a tile of query tokens of one batch row and one kv head: each page is widened to f32 once and used by all
//! query heads of all tokens of the tile. What one query computes depends on its own position alone. Slots above the
//! position are not touched, nor pages before the window. Two passes read keys and values once each, as a running softmax would, and give the weights
//! that transformers rounds to the block dtype; a thread keeps the weights of one tile.

use std::cell::RefCell;

use shared::dtype::DType;

#[cfg(target_arch = "x86_64")]
use super::attention512;
use super::lanes::{LANES, dot, exp, mul_add, tree_sum};
use super::{Isa, Scratch, per_isa};
use crate::cpu::pool::{Disjoint, Pool};
use crate::kv::{KvPages, PAGE_TOKENS, StepRow};
use crate::ops::convert::with_rounding;
use crate::ops::{Alibi, Attention, convert};
use crate::tuning;

/// Query tokens `first..first + tokens` of a batch row; `index` is the first one's place among all tokens of the step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    pub(super) row: usize,
    pub(super) first: usize,
    pub(super) tokens: usize,
    pub(super) index: usize,
}

/// Per thread: one page widened, and the scores, then weights, of every query of a tile.
#[derive(Default)]
struct Local {
    page: Vec<f32>,
    weights: Vec<f32>,
    #[cfg(target_arch = "x86_64")]
    pairs: attention512::Local,
}

thread_local! {
    static LOCAL: RefCell<Local> = RefCell::default();
}

/// What all pieces share.
pub(super) struct Task<'a> {
    pub(super) q: &'a [f32],
    pub(super) pages: &'a KvPages<'a>,
    pub(super) rows: &'a [StepRow<'a>],
    pub(super) group: usize,
    pub(super) divisor: f32,
    pub(super) alibi: Option<Alibi<'a>>,
    pub(super) window: usize,
}

/// Outputs and, where they are wanted, logarithms of sums.
pub(super) type Outputs<'a, 'o> = (&'a Disjoint<'o, f32>, Option<&'a Disjoint<'o, f32>>);

pub(in crate::cpu) fn attention(
    isa: Isa,
    pool: &mut Pool,
    scratch: &mut Scratch,
    args: Attention<'_, [f32], KvPages<'_>>,
) {
    let layout = args.pages.layout();
    let tiles = &mut scratch.tiles;
    let multiplications = cut(args.rows, args.group, tiles)
        .saturating_mul(2 * layout.head_dim * layout.kv_heads * args.group);
    let task = Task {
        q: args.q,
        pages: args.pages,
        rows: args.rows,
        group: args.group,
        divisor: args.divisor,
        alibi: args.alibi,
        window: args.window,
    };
    let out = Disjoint::new(args.out);
    let logsum = args.logsum.map(Disjoint::new);
    #[cfg(target_arch = "x86_64")]
    let has_pairs = isa == Isa::Avx512Bf16
        && layout.dtype == DType::Bf16
        && attention512::takes(layout.head_dim);
    let piece = |index: usize| {
        let (tile, head) = (tiles[index / layout.kv_heads], index % layout.kv_heads);
        LOCAL.with_borrow_mut(|local| {
            let (task, out) = (&task, (&out, logsum.as_ref()));
            #[cfg(target_arch = "x86_64")]
            if has_pairs {
                // SAFETY: `Isa` values come from `Isa::available`; the pages are such that `has_pairs` is set.
                unsafe { attention512::attend(task, tile, head, &mut local.pairs, out) };
                return;
            }
            per_isa!(isa, attend(task: &Task<'_>, tile: Tile, head: usize, local: &mut Local, out: Outputs<'_, '_>))
        });
    };
    let pieces = tiles.len() * layout.kv_heads;
    if tuning::attention_is_parallel(multiplications) {
        pool.run(pieces, piece)
    } else {
        (0..pieces).for_each(piece)
    }
}

/// Cuts the rows into tiles; the number of (query, key) pairs.
fn cut(rows: &[StepRow<'_>], group: usize, tiles: &mut Vec<Tile>) -> usize {
    tiles.clear();
    let (mut index, mut pairs) = (0, 0usize);
    let most = tuning::attention_tokens(group);
    for (row, step) in rows.iter().enumerate() {
        for first in (0..step.tokens).step_by(most) {
            let tokens = most.min(step.tokens - first);
            tiles.push(Tile {
                row,
                first,
                tokens,
                index: index + first,
            });
            pairs = pairs.saturating_add(tokens.saturating_mul(step.prefix + first + tokens));
        }
        index += step.tokens;
    }
    pairs
}

#[inline(always)]
fn attend<const FMA: bool>(
    task: &Task<'_>,
    tile: Tile,
    head: usize,
    local: &mut Local,
    (out, logsum): Outputs<'_, '_>,
) {
    let layout = task.pages.layout();
    let (dim, group) = (layout.head_dim, task.group);
    let heads = layout.kv_heads * group;
    let row = &task.rows[tile.row];
    let first = row.prefix + tile.first;
    let pages = (first + tile.tokens).div_ceil(PAGE_TOKENS);
    let Local { page, weights, .. } = local;
    page.resize(PAGE_TOKENS * dim, 0.0);
    // [tokens, group, positions]; what lies above a query's position is never read.
    let stride = pages * PAGE_TOKENS;
    weights.resize(weights.len().max(tile.tokens * group * stride), 0.0);
    // Queries of one token and kv head are neighbours: `group` vectors of `dim`.
    let queries = |token: usize| ((tile.index + token) * heads + head * group) * dim;
    // Positions that lie before the window of a token.
    let unseen = |token: usize| (first + token + 1).saturating_sub(task.window);
    // (start, slots that exist, id) of each page that is seen; slots of it up to the position of a token.
    let spans = || {
        row.pages
            .iter()
            .take(pages)
            .enumerate()
            .skip(unseen(0) / PAGE_TOKENS)
            .map(|(number, id)| {
                let start = number * PAGE_TOKENS;
                (
                    start,
                    PAGE_TOKENS.min(first + tile.tokens - start),
                    id.0 as usize,
                )
            })
    };
    let visible =
        |token: usize, start: usize| (first + token + 1).saturating_sub(start).min(PAGE_TOKENS);

    for (start, used, id) in spans() {
        let keys = &mut page[..used * dim];
        convert::widen(
            layout.dtype,
            &task.pages.keys(id, head)[..used * layout.vector_bytes()],
            keys,
        );
        for token in 0..tile.tokens {
            let keys = &keys[..visible(token, start) * dim];
            let q = &task.q[queries(token)..queries(token) + group * dim];
            for (h, q) in q.chunks_exact(dim).enumerate() {
                let scores = &mut weights[(token * group + h) * stride + start..][..PAGE_TOKENS];
                let divisor = task.divisor;
                match task.alibi {
                    None => {
                        with_rounding!(layout.dtype, round => for (score, key) in scores.iter_mut().zip(keys.chunks_exact(dim)) {
                            *score = round(round(dot::<FMA>(q, key)) / divisor);
                        })
                    }
                    Some(Alibi { slopes, scale }) => {
                        let slope = slopes[head * group + h];
                        with_rounding!(layout.dtype, round => for (p, (score, key)) in (start..).zip(scores.iter_mut().zip(keys.chunks_exact(dim))) {
                            *score = round(dot::<FMA>(q, key) / divisor + scale * round(slope * p as f32));
                        })
                    }
                }
            }
        }
    }
    for token in 0..tile.tokens {
        for h in 0..group {
            let scores =
                &mut weights[(token * group + h) * stride..][unseen(token)..first + token + 1];
            let sum = with_rounding!(layout.dtype, round => softmax::<FMA>(scores, round));
            if let Some(logsum) = logsum {
                let at = queries(token) / dim + h;
                // SAFETY: pieces differ in token or kv head, so their outputs do not overlap; the borrow ends here.
                let place = unsafe { logsum.range(at, 1) };
                place[0] = sum;
            }
        }
        // SAFETY: pieces differ in token or kv head, so their outputs do not overlap; the borrow ends here.
        unsafe { out.range(queries(token), group * dim) }.fill(0.0);
    }
    for (start, used, id) in spans() {
        let values = &mut page[..used * dim];
        convert::widen(
            layout.dtype,
            &task.pages.values(id, head)[..used * layout.vector_bytes()],
            values,
        );
        for token in 0..tile.tokens {
            let visible = visible(token, start);
            let before = unseen(token).saturating_sub(start).min(visible);
            // SAFETY: as above.
            let out = unsafe { out.range(queries(token), group * dim) };
            for (h, out) in out.chunks_exact_mut(dim).enumerate() {
                let weights = &weights[(token * group + h) * stride + start..][before..visible];
                weigh::<FMA>(weights, &values[before * dim..], out);
            }
        }
    }
}

/// Scores to weights that sum to 1, each rounded; the logarithm of the sum of the scores' exponentials.
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

/// Adds the weighted values of some slots to `out`. Whole groups of lanes stay in registers over all slots.
#[inline(always)]
fn weigh<const FMA: bool>(weights: &[f32], values: &[f32], out: &mut [f32]) {
    let dim = out.len();
    let mut start = 0;
    while start + LANES <= dim {
        accumulate::<FMA, LANES>(weights, values, dim, start, out);
        start += LANES;
    }
    while start < dim {
        accumulate::<FMA, 1>(weights, values, dim, start, out);
        start += 1;
    }
}

#[inline(always)]
fn accumulate<const FMA: bool, const WIDTH: usize>(
    weights: &[f32],
    values: &[f32],
    dim: usize,
    start: usize,
    out: &mut [f32],
) {
    let out = &mut out[start..start + WIDTH];
    let mut sums = [0.0; WIDTH];
    sums.copy_from_slice(out);
    for (value, weight) in values.chunks_exact(dim).zip(weights) {
        for (sum, value) in sums.iter_mut().zip(&value[start..start + WIDTH]) {
            *sum = mul_add::<FMA>(*weight, *value, *sum);
        }
    }
    out.copy_from_slice(&sums);
}
