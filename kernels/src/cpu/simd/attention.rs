//! Attention with a running softmax over pages, in the order of positions.
//!
//! A piece is a tile of query tokens of one batch row and one kv head: each page is widened to f32 once and used by all
//! query heads of all tokens of the tile. What one query computes depends on its own position alone: per page, scores
//! of the visible slots, new maximum, rescaled sums, then values slot by slot. Slots above the position are not touched.

use std::cell::RefCell;

use super::lanes::{LANES, dot, exp, mul_add};
use super::{Isa, Scratch, per_isa};
use crate::cpu::pool::{Disjoint, Pool};
use crate::kv::{KvPages, PAGE_TOKENS, StepRow};
use crate::ops::{Attention, convert};
use crate::tuning;

/// Query tokens `first..first + tokens` of a batch row; `index` is the first one's place among all tokens of the step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    row: usize,
    first: usize,
    tokens: usize,
    index: usize,
}

/// Per thread: widened keys and values of a page, and (maximum, sum) of every query of a tile.
#[derive(Default)]
struct Local {
    keys: Vec<f32>,
    values: Vec<f32>,
    softmax: Vec<(f32, f32)>,
}

thread_local! {
    static LOCAL: RefCell<Local> = RefCell::default();
}

/// What all pieces share.
struct Task<'a> {
    q: &'a [f32],
    pages: &'a KvPages<'a>,
    rows: &'a [StepRow<'a>],
    group: usize,
    scale: f32,
}

pub(in crate::cpu) fn attention(
    isa: Isa,
    pool: &mut Pool,
    scratch: &mut Scratch,
    args: Attention<'_, [f32], KvPages<'_>>,
) {
    let layout = args.pages.layout();
    let tiles = &mut scratch.tiles;
    let multiplications =
        cut(args.rows, tiles).saturating_mul(2 * layout.head_dim * layout.kv_heads * args.group);
    let task = Task {
        q: args.q,
        pages: args.pages,
        rows: args.rows,
        group: args.group,
        scale: args.scale,
    };
    let out = Disjoint::new(args.out);
    let piece = |index: usize| {
        let (tile, head) = (tiles[index / layout.kv_heads], index % layout.kv_heads);
        LOCAL.with_borrow_mut(|local| {
            let (task, out) = (&task, &out);
            per_isa!(isa, attend(task: &Task<'_>, tile: Tile, head: usize, local: &mut Local, out: &Disjoint<'_, f32>))
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
fn cut(rows: &[StepRow<'_>], tiles: &mut Vec<Tile>) -> usize {
    tiles.clear();
    let (mut index, mut pairs) = (0, 0usize);
    for (row, step) in rows.iter().enumerate() {
        for first in (0..step.tokens).step_by(tuning::ATTENTION_TOKENS) {
            let tokens = tuning::ATTENTION_TOKENS.min(step.tokens - first);
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
    out: &Disjoint<'_, f32>,
) {
    let layout = task.pages.layout();
    let (dim, group) = (layout.head_dim, task.group);
    let heads = layout.kv_heads * group;
    let row = &task.rows[tile.row];
    let first = row.prefix + tile.first;
    local.keys.resize(PAGE_TOKENS * dim, 0.0);
    local.values.resize(PAGE_TOKENS * dim, 0.0);
    local.softmax.clear();
    local
        .softmax
        .resize(tile.tokens * group, (f32::NEG_INFINITY, 0.0));
    // Queries of one token and kv head are neighbours: `group` vectors of `dim`.
    let queries = |token: usize| ((tile.index + token) * heads + head * group) * dim;
    for token in 0..tile.tokens {
        // SAFETY: pieces differ in token or kv head, so their outputs do not overlap; the borrow ends here.
        unsafe { out.range(queries(token), group * dim) }.fill(0.0);
    }
    for (number, &page) in row
        .pages
        .iter()
        .enumerate()
        .take((first + tile.tokens).div_ceil(PAGE_TOKENS))
    {
        let start = number * PAGE_TOKENS;
        let used = PAGE_TOKENS.min(first + tile.tokens - start);
        let bytes = used * layout.vector_bytes();
        let (keys, values) = (
            &mut local.keys[..used * dim],
            &mut local.values[..used * dim],
        );
        convert::to_f32(
            layout.dtype,
            &task.pages.keys(page.0 as usize, head)[..bytes],
            keys,
        );
        convert::to_f32(
            layout.dtype,
            &task.pages.values(page.0 as usize, head)[..bytes],
            values,
        );
        for token in 0..tile.tokens {
            let visible = (first + token + 1).saturating_sub(start).min(PAGE_TOKENS);
            if visible == 0 {
                continue;
            }
            let at = queries(token);
            // SAFETY: as above.
            let out = unsafe { out.range(at, group * dim) };
            let softmax = &mut local.softmax[token * group..(token + 1) * group];
            let heads = task.q[at..at + group * dim]
                .chunks_exact(dim)
                .zip(out.chunks_exact_mut(dim))
                .zip(softmax);
            for ((q, out), state) in heads {
                page_step::<FMA>(
                    q,
                    task.scale,
                    &keys[..visible * dim],
                    &values[..visible * dim],
                    state,
                    out,
                );
            }
        }
    }
    for token in 0..tile.tokens {
        // SAFETY: as above.
        let out = unsafe { out.range(queries(token), group * dim) };
        for (out, (_, sum)) in out
            .chunks_exact_mut(dim)
            .zip(&local.softmax[token * group..])
        {
            let inverse = 1.0 / sum;
            out.iter_mut().for_each(|v| *v *= inverse);
        }
    }
}

/// One query over the visible slots of one page.
#[inline(always)]
fn page_step<const FMA: bool>(
    q: &[f32],
    scale: f32,
    keys: &[f32],
    values: &[f32],
    state: &mut (f32, f32),
    out: &mut [f32],
) {
    let dim = q.len();
    let mut weights = [f32::NEG_INFINITY; PAGE_TOKENS];
    for (weight, key) in weights.iter_mut().zip(keys.chunks_exact(dim)) {
        *weight = dot::<FMA>(q, key) * scale;
    }
    let top = weights.iter().copied().fold(state.0, f32::max);
    let rescale = exp::<FMA>(state.0 - top);
    let mut sum = state.1 * rescale;
    for weight in &mut weights {
        *weight = exp::<FMA>(*weight - top);
        sum += *weight;
    }
    *state = (top, sum);
    // Whole groups of lanes stay in registers over all slots.
    let mut start = 0;
    while start + LANES <= dim {
        accumulate::<FMA, LANES>(&weights, values, dim, start, rescale, out);
        start += LANES;
    }
    while start < dim {
        accumulate::<FMA, 1>(&weights, values, dim, start, rescale, out);
        start += 1;
    }
}

/// `out = out * rescale + sum of weight * value` for `WIDTH` elements from `start`.
#[inline(always)]
fn accumulate<const FMA: bool, const WIDTH: usize>(
    weights: &[f32; PAGE_TOKENS],
    values: &[f32],
    dim: usize,
    start: usize,
    rescale: f32,
    out: &mut [f32],
) {
    let out = &mut out[start..start + WIDTH];
    let mut sums = [0.0; WIDTH];
    for (sum, out) in sums.iter_mut().zip(out.iter()) {
        *sum = out * rescale;
    }
    for (value, weight) in values.chunks_exact(dim).zip(weights) {
        let value = &value[start..start + WIDTH];
        for (sum, value) in sums.iter_mut().zip(value) {
            *sum = mul_add::<FMA>(*weight, *value, *sum);
        }
    }
    out.copy_from_slice(&sums);
}
