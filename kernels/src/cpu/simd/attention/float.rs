//! Forward attention in f32, for pages of any dtype and heads of any size.
//!
//! ```text
//! scores  [tokens, group, positions]   round(round(q K^T) / divisor), or with ALiBi
//! weights the same in place            softmax of the positions that a query sees, rounded
//! out     [tokens, group, head_dim]    weights V
//! ```
//! Two passes read keys and values once each, as a running softmax would, and give the weights that
//! transformers rounds to the block dtype. Each page is widened to f32 once and used by all query
//! heads of all tokens of a tile. Slots above the position are not touched, nor pages before the
//! window.
//!
//! Floor: in decode the bytes of keys and values over the bandwidth of memory; in prefill
//! `4 * heads * head_dim` operations per (query, key) pair over the f32 rate.

use super::shapes::{Forward, Outputs, QueryTile, softmax};
use crate::cpu::pool::Disjoint;
use crate::cpu::simd::lanes::{LANES, dot, mul_add};
use crate::kv::{PAGE_TOKENS, StepRow};
use crate::ops::convert::with_rounding;
use crate::ops::{Alibi, convert};

/// Scratch memory of a thread: one page widened, and the scores, then weights, of every query of a
/// tile.
#[derive(Default)]
pub(super) struct Local {
    page: Vec<f32>,
    weights: Vec<f32>,
}

/// Attention of one tile and one kv head.
#[inline(always)]
pub(super) fn attend<const FMA: bool>(
    args: &Forward<'_>,
    tile: QueryTile,
    head: usize,
    local: &mut Local,
    outputs: Outputs<'_, '_>,
) {
    let layout = args.pages.layout();
    let row = &args.rows[tile.row];
    let first = row.prefix + tile.first;
    let pages = (first + tile.tokens).div_ceil(PAGE_TOKENS);
    let piece = Piece { args, row, tile, head, first, pages, dim: layout.head_dim };
    let Local { page, weights } = local;
    page.resize(PAGE_TOKENS * layout.head_dim, 0.0);
    // [tokens, group, positions]; what lies above a query's position is never read.
    weights.resize(weights.len().max(tile.tokens * args.group * piece.positions()), 0.0);
    piece.scores::<FMA>(page, weights);
    piece.normalize::<FMA>(weights, outputs);
    piece.sum_values::<FMA>(page, weights, outputs.0);
}

/// The queries of one tile and one kv head.
struct Piece<'a> {
    args: &'a Forward<'a>,
    row: &'a StepRow<'a>,
    tile: QueryTile,
    head: usize,
    /// Position of the first query.
    first: usize,
    /// Pages up to the position of the last query.
    pages: usize,
    dim: usize,
}

/// A page that a query of the tile sees.
struct SeenPage {
    id: usize,
    /// Position of its first slot.
    start: usize,
    /// Slots up to the position of the last query.
    slots: usize,
}

impl Piece<'_> {
    /// Positions from one query's scores to the next.
    #[inline(always)]
    fn positions(&self) -> usize {
        self.pages * PAGE_TOKENS
    }

    /// Where the queries of a token lie: `group` neighbours of `dim` elements.
    #[inline(always)]
    fn queries(&self, token: usize) -> usize {
        let heads = self.args.pages.layout().kv_heads * self.args.group;
        ((self.tile.index + token) * heads + self.head * self.args.group) * self.dim
    }

    /// Where the scores of query `h` of a token lie.
    #[inline(always)]
    fn score_row(&self, token: usize, h: usize) -> usize {
        (token * self.args.group + h) * self.positions()
    }

    /// Positions that lie before the window of a token.
    #[inline(always)]
    fn unseen(&self, token: usize) -> usize {
        (self.first + token + 1).saturating_sub(self.args.window)
    }

    /// Slots of the page at `start` up to the position of a token.
    #[inline(always)]
    fn visible(&self, token: usize, start: usize) -> usize {
        (self.first + token + 1).saturating_sub(start).min(PAGE_TOKENS)
    }

    #[inline(always)]
    fn seen_pages(&self) -> impl Iterator<Item = SeenPage> {
        let end = self.first + self.tile.tokens;
        let pages = self.row.pages.iter().take(self.pages).enumerate();
        pages.skip(self.unseen(0) / PAGE_TOKENS).map(move |(number, id)| {
            let start = number * PAGE_TOKENS;
            SeenPage { id: id.0 as usize, start, slots: PAGE_TOKENS.min(end - start) }
        })
    }

    /// Writes the scores of all queries. `page` is room for one page in f32.
    #[inline(always)]
    fn scores<const FMA: bool>(&self, page: &mut [f32], scores: &mut [f32]) {
        let (args, dim, layout) = (self.args, self.dim, self.args.pages.layout());
        for SeenPage { id, start, slots } in self.seen_pages() {
            let keys = &mut page[..slots * dim];
            let stored = &args.pages.keys(id, self.head)[..slots * layout.vector_bytes()];
            convert::widen(layout.dtype, stored, keys);
            for token in 0..self.tile.tokens {
                let keys = &keys[..self.visible(token, start) * dim];
                let q = &args.q[self.queries(token)..][..args.group * dim];
                for (h, q) in q.chunks_exact(dim).enumerate() {
                    let scores = &mut scores[self.score_row(token, h) + start..][..PAGE_TOKENS];
                    self.page_scores::<FMA>(q, keys, (h, start), scores);
                }
            }
        }
    }

    /// Scores of query `h` with the keys of the page at `start`.
    #[inline(always)]
    fn page_scores<const FMA: bool>(
        &self,
        q: &[f32],
        keys: &[f32],
        (h, start): (usize, usize),
        scores: &mut [f32],
    ) {
        let (divisor, dtype) = (self.args.divisor, self.args.pages.layout().dtype);
        let scores = scores.iter_mut().zip(keys.chunks_exact(self.dim));
        match self.args.alibi {
            None => with_rounding!(dtype, round => for (score, key) in scores {
                *score = round(round(dot::<FMA>(q, key)) / divisor);
            }),
            Some(Alibi { slopes, scale }) => {
                let slope = slopes[self.head * self.args.group + h];
                with_rounding!(dtype, round => for (p, (score, key)) in (start..).zip(scores) {
                    *score = round(dot::<FMA>(q, key) / divisor + scale * round(slope * p as f32));
                })
            }
        }
    }

    /// Turns the scores of each query into weights, and clears its output.
    #[inline(always)]
    fn normalize<const FMA: bool>(&self, weights: &mut [f32], (out, logsum): Outputs<'_, '_>) {
        let dtype = self.args.pages.layout().dtype;
        for token in 0..self.tile.tokens {
            for h in 0..self.args.group {
                let seen = self.unseen(token)..self.first + token + 1;
                let scores = &mut weights[self.score_row(token, h)..][seen];
                let sum = with_rounding!(dtype, round => softmax::<FMA>(scores, round));
                if let Some(logsum) = logsum {
                    let at = self.queries(token) / self.dim + h;
                    // SAFETY: pieces differ in token or kv head, so their outputs do not overlap;
                    // the borrow ends here.
                    let out = unsafe { logsum.range(at, 1) };
                    out[0] = sum;
                }
            }
            // SAFETY: pieces differ in token or kv head, so their outputs do not overlap; the
            // borrow ends here.
            unsafe { out.range(self.queries(token), self.args.group * self.dim) }.fill(0.0);
        }
    }

    /// Adds the weighted values to the outputs. `page` is room for one page in f32.
    #[inline(always)]
    fn sum_values<const FMA: bool>(
        &self,
        page: &mut [f32],
        weights: &[f32],
        out: &Disjoint<'_, f32>,
    ) {
        let (args, dim, layout) = (self.args, self.dim, self.args.pages.layout());
        for SeenPage { id, start, slots } in self.seen_pages() {
            let values = &mut page[..slots * dim];
            let stored = &args.pages.values(id, self.head)[..slots * layout.vector_bytes()];
            convert::widen(layout.dtype, stored, values);
            for token in 0..self.tile.tokens {
                let visible = self.visible(token, start);
                let before = self.unseen(token).saturating_sub(start).min(visible);
                // SAFETY: pieces differ in token or kv head, so their outputs do not overlap; the
                // borrow ends with the token.
                let out = unsafe { out.range(self.queries(token), args.group * dim) };
                for (h, out) in out.chunks_exact_mut(dim).enumerate() {
                    let weights = &weights[self.score_row(token, h) + start..][before..visible];
                    add_values::<FMA>(weights, &values[before * dim..], out);
                }
            }
        }
    }
}

/// Adds the weighted values of some slots to `out`. Whole groups of lanes stay in registers over
/// all slots.
#[inline(always)]
fn add_values<const FMA: bool>(weights: &[f32], values: &[f32], out: &mut [f32]) {
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
