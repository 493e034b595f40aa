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

use std::ops::Range;

use super::shapes::{Forward, Outputs, QueryTile, softmax};
use super::tiles::{add_weighted, dots};
use crate::cpu::pool::Disjoint;
use crate::cpu::simd::vector::Vector;
use crate::kv::{PAGE_TOKENS, StepRow};
use crate::ops::convert::with_rounding;
use crate::ops::{Alibi, convert};

/// Scratch memory of a thread: one page widened, and the scores, then weights, of every query of a
/// tile.
#[derive(Default)]
pub(super) struct FloatScratch {
    page: Vec<f32>,
    weights: Vec<f32>,
}

/// Attention of one tile and one kv head.
///
/// # Safety
/// The machine has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn attend<V: Vector, const FMA: bool>(
    args: &Forward<'_>,
    tile: QueryTile,
    head: usize,
    local: &mut FloatScratch,
    outputs: Outputs<'_, '_>,
) {
    let layout = args.pages.layout();
    let row = &args.rows[tile.row];
    let first = row.prefix + tile.first;
    let pages = (first + tile.tokens).div_ceil(PAGE_TOKENS);
    let piece = QueryPiece { args, row, tile, head, first, pages, dim: layout.head_dim };
    let FloatScratch { page, weights } = local;
    page.resize(PAGE_TOKENS * layout.head_dim, 0.0);
    // [tokens, group, positions]; what lies above a query's position is never read.
    weights.resize(weights.len().max(tile.tokens * args.group * piece.positions()), 0.0);
    // SAFETY: as the caller says.
    unsafe { piece.scores::<V, FMA>(page, weights) };
    piece.normalize::<FMA>(weights, outputs);
    // SAFETY: as the caller says.
    unsafe { piece.sum_values::<V, FMA>(page, weights, outputs.out) };
}

/// The queries of one tile and one kv head.
struct QueryPiece<'a> {
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

impl QueryPiece<'_> {
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

    /// Queries of the tile: those of a token lie together.
    #[inline(always)]
    fn count(&self) -> usize {
        self.tile.tokens * self.args.group
    }

    /// Token and head of a query within the group.
    #[inline(always)]
    fn query(&self, number: usize) -> (usize, usize) {
        (number / self.args.group, number % self.args.group)
    }

    /// Where a query lies among the inputs and outputs.
    #[inline(always)]
    fn place(&self, number: usize) -> usize {
        let (token, h) = self.query(number);
        self.queries(token) + h * self.dim
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
    unsafe fn scores<V: Vector, const FMA: bool>(&self, page: &mut [f32], scores: &mut [f32]) {
        let (dim, layout) = (self.dim, self.args.pages.layout());
        let positions = self.positions();
        for SeenPage { id, start, slots } in self.seen_pages() {
            let keys = &mut page[..slots * dim];
            let stored = &self.args.pages.keys(id, self.head)[..slots * layout.vector_bytes()];
            convert::widen(layout.dtype, stored, keys);
            let mut number = 0;
            while number < self.count() {
                let rest = &mut scores[number * positions..];
                number += if number + 2 <= self.count() {
                    let (one, two) = rest.split_at_mut(positions);
                    // SAFETY: as the caller says.
                    unsafe { self.page_scores::<V, FMA, 2>(number, keys, start, &mut [one, two]) }
                } else {
                    // SAFETY: as above.
                    unsafe { self.page_scores::<V, FMA, 1>(number, keys, start, &mut [rest]) }
                };
            }
        }
    }

    /// Scores of `R` queries from `number` on with the keys of the page at `start`; `R`.
    #[inline(always)]
    unsafe fn page_scores<V: Vector, const FMA: bool, const R: usize>(
        &self,
        number: usize,
        keys: &[f32],
        start: usize,
        scores: &mut [&mut [f32]; R],
    ) -> usize {
        let mut q = [&self.args.q[..0]; R];
        let mut visible = 0;
        for (r, q) in q.iter_mut().enumerate() {
            *q = &self.args.q[self.place(number + r)..][..self.dim];
            visible = visible.max(self.visible(self.query(number + r).0, start));
        }
        // What one of them does not see is written and not read.
        let mut scores = scores.each_mut().map(|scores| &mut scores[start..][..PAGE_TOKENS]);
        // SAFETY: as the caller says.
        unsafe { dots::<V, FMA, R>(q, &keys[..visible * self.dim], &mut scores) };
        for (r, scores) in scores.into_iter().enumerate() {
            let (token, h) = self.query(number + r);
            self.scale(&mut scores[..self.visible(token, start)], h, start);
        }
        R
    }

    /// Makes products of query `h` with the keys from `start` on its scores.
    #[inline(always)]
    fn scale(&self, scores: &mut [f32], h: usize, start: usize) {
        let (divisor, dtype) = (self.args.divisor, self.args.pages.layout().dtype);
        match self.args.alibi {
            None => with_rounding!(dtype, round => for score in scores {
                *score = round(round(*score) / divisor);
            }),
            Some(Alibi { slopes, scale }) => {
                let slope = slopes[self.head * self.args.group + h];
                with_rounding!(dtype, round => for (p, score) in (start..).zip(scores) {
                    *score = round(*score / divisor + scale * round(slope * p as f32));
                })
            }
        }
    }

    /// Turns the scores of each query into weights, and clears its output.
    #[inline(always)]
    fn normalize<const FMA: bool>(&self, weights: &mut [f32], outputs: Outputs<'_, '_>) {
        let Outputs { out, logsum } = outputs;
        let dtype = self.args.pages.layout().dtype;
        for token in 0..self.tile.tokens {
            for h in 0..self.args.group {
                let seen = self.unseen(token)..self.first + token + 1;
                let scores = &mut weights[(token * self.args.group + h) * self.positions()..][seen];
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
    unsafe fn sum_values<V: Vector, const FMA: bool>(
        &self,
        page: &mut [f32],
        weights: &[f32],
        out: &Disjoint<'_, f32>,
    ) {
        let (dim, layout) = (self.dim, self.args.pages.layout());
        for SeenPage { id, start, slots } in self.seen_pages() {
            let values = &mut page[..slots * dim];
            let stored = &self.args.pages.values(id, self.head)[..slots * layout.vector_bytes()];
            convert::widen(layout.dtype, stored, values);
            let values = &*values;
            let mut number = 0;
            while number < self.count() {
                let of = |number| self.seen_slots(number, start);
                // Queries of one token see the same.
                number += if number + 2 <= self.count() && of(number) == of(number + 1) {
                    // SAFETY: as the caller says.
                    unsafe { self.page_values::<V, FMA, 2>(number, start, values, weights, out) }
                } else {
                    // SAFETY: as above.
                    unsafe { self.page_values::<V, FMA, 1>(number, start, values, weights, out) }
                };
            }
        }
    }

    /// Slots of the page at `start` that a query sees.
    #[inline(always)]
    fn seen_slots(&self, number: usize, start: usize) -> Range<usize> {
        let token = self.query(number).0;
        let visible = self.visible(token, start);
        self.unseen(token).saturating_sub(start).min(visible)..visible
    }

    /// Adds the values of the page at `start` to `R` queries from `number` on, which see the same; `R`.
    #[inline(always)]
    unsafe fn page_values<V: Vector, const FMA: bool, const R: usize>(
        &self,
        number: usize,
        start: usize,
        values: &[f32],
        weights: &[f32],
        out: &Disjoint<'_, f32>,
    ) -> usize {
        let seen = self.seen_slots(number, start);
        let mut own = [weights; R];
        for (r, own) in own.iter_mut().enumerate() {
            *own = &weights[(number + r) * self.positions() + start..][seen.clone()];
        }
        // SAFETY: pieces differ in token or kv head, and queries of a piece in token or head, so their outputs
        // do not overlap; the borrows end here.
        let mut out =
            std::array::from_fn(|r| unsafe { out.range(self.place(number + r), self.dim) });
        let values = &values[seen.start * self.dim..seen.end * self.dim];
        // SAFETY: as the caller says.
        unsafe { add_weighted::<V, FMA, R>(own, values, &mut out) };
        R
    }
}
