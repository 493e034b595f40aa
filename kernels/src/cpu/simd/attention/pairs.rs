//! Attention over bfloat16 pages by products of bfloat16 pairs (`vdpbf16ps`): the arithmetic of
//! [`super::float`] where the machine has them and heads are multiples of 32.
//!
//! ```text
//! keys of a page     transposed: for each two neighbours of the head dimension, 16 slots      scores: one vector per query
//! values of a page   interleaved: for each two neighbouring slots, the head dimension         weights: one pair per two slots
//! ```
//!
//! Queries, keys, values and rounded weights are bfloat16, so every product is exact. A score is
//! the sum of two chains over the even and the odd pairs of the dimension; an output walks the
//! pairs of slots from first to last. Slots that a query does not see have the weight zero; slots
//! that nobody wrote are zeros.
//!
//! Shapes: queries and outputs `[tokens, heads, head_dim]` f32, pages as in [`crate::kv`]. Floor: in
//! decode the bytes of keys and values over the bandwidth of memory; in prefill
//! `4 * heads * head_dim` operations per (query, key) pair over the rate of bfloat16 pairs.

use std::arch::x86_64::*;

use super::shapes::{Forward, Outputs, QueryTile, softmax};
use crate::cpu::simd::bf16::dot_pairs;
use crate::cpu::simd::line::{CacheLine, LINE, ZEROS, resize};
use crate::kv::PAGE_TOKENS;
use crate::ops::Alibi;
use crate::ops::convert::{bf16_bits, round};
use shared::dtype::DType;

/// Queries whose scores are computed side by side.
const SCORE_ROWS: usize = 4;
/// Queries whose outputs are computed side by side, in 64 of the head's dimensions.
pub(super) const OUT_ROWS: usize = 6;
/// Pages of values that are interleaved at a time: they stay in the first-level cache.
const PAGES: usize = 4;

/// Whether heads of this dimension are taken.
pub(super) fn takes(head_dim: usize) -> bool {
    head_dim.is_multiple_of(32) && head_dim <= 256
}

/// Per thread.
#[derive(Default)]
pub(super) struct PairScratch {
    /// Queries of the tile, bfloat16 `[queries, dim]`.
    queries: Vec<u16>,
    /// `[queries, stride]`.
    scores: Vec<f32>,
    /// The same as bfloat16, zero where a query does not see.
    weights: Vec<u16>,
    /// A page of keys, or some of values.
    page: Vec<CacheLine>,
    /// Outputs in the order of the interleaved values `[queries, dim]`.
    sums: Vec<f32>,
}

/// What a tile of queries sees.
#[derive(Clone, Copy)]
struct TileView {
    dim: usize,
    /// Queries of the tile: tokens times group.
    queries: usize,
    group: usize,
    head: usize,
    /// Position of the first token.
    first: usize,
    /// First page that any query sees, and the page after the last.
    pages: (usize, usize),
    /// Positions that exist.
    end: usize,
    /// Elements between the scores of two queries.
    stride: usize,
}

/// Attention of one tile and one kv head.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ, VL and BF16; pages are bfloat16 and [`takes`] their heads.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) unsafe fn attend(
    args: &Forward<'_>,
    tile: QueryTile,
    head: usize,
    local: &mut PairScratch,
    outputs: Outputs<'_, '_>,
) {
    let Outputs { out, logsum } = outputs;
    let (layout, group) = (args.pages.layout(), args.group);
    let dim = layout.head_dim;
    let first = args.rows[tile.row].prefix + tile.first;
    let end = first + tile.tokens;
    let begin = (first + 1).saturating_sub(args.window) / PAGE_TOKENS;
    let view = TileView {
        dim,
        queries: tile.tokens * group,
        group,
        head,
        first,
        pages: (begin, end.div_ceil(PAGE_TOKENS)),
        end,
        stride: (end.div_ceil(PAGE_TOKENS) - begin) * PAGE_TOKENS,
    };
    // Queries of one token and kv head are neighbours.
    let start = |query: usize| {
        let token = tile.index + query / group;
        (token * layout.kv_heads * group + head * group + query % group) * dim
    };
    grow(&mut local.queries, view.queries * dim);
    grow(&mut local.scores, view.queries * view.stride);
    grow(&mut local.weights, view.queries * view.stride);
    grow(&mut local.sums, view.queries * dim);
    for (query, to) in local.queries.chunks_exact_mut(dim).take(view.queries).enumerate() {
        let from = &args.q[start(query)..start(query) + dim];
        rounded(from, to);
    }
    score(args, tile, view, local);
    softmax_rows(args, view, local, |query, sum| {
        if let Some(logsum) = logsum {
            // SAFETY: pieces differ in token or kv head, so their outputs do not overlap; the
            // borrow ends here.
            let out = unsafe { logsum.range(start(query) / dim, 1) };
            out[0] = sum;
        }
    });
    local.sums[..view.queries * dim].fill(0.0);
    add_values(args, tile, view, local);
    for (query, sums) in local.sums.chunks_exact(dim).take(view.queries).enumerate() {
        // SAFETY: pieces differ in token or kv head, so their outputs do not overlap; the borrow
        // ends here.
        let out = unsafe { out.range(start(query), dim) };
        for (sums, out) in sums.as_chunks::<32>().0.iter().zip(out.as_chunks_mut::<32>().0) {
            in_order(sums, out);
        }
    }
}

pub(super) fn grow<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}

/// Rounds to bfloat16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) fn rounded(from: &[f32], to: &mut [u16]) {
    to.iter_mut().zip(from).for_each(|(to, x)| *to = bf16_bits(*x));
}

/// The scores of all queries and all positions of the pages, garbage where there is none.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn score(args: &Forward<'_>, tile: QueryTile, view: TileView, local: &mut PairScratch) {
    let row = &args.rows[tile.row];
    let half = view.dim / 2;
    resize(&mut local.page, half);
    for (index, number) in (view.pages.0..view.pages.1).enumerate() {
        let keys = args.pages.keys(row.pages[number].0 as usize, view.head);
        transpose(keys, view.dim, &mut local.page);
        let mut query = 0;
        while query < view.queries {
            let count = SCORE_ROWS.min(view.queries - query);
            let q = &local.queries[query * view.dim..(query + count) * view.dim];
            let dots = match count {
                1 => dots::<1>(&local.page, q),
                2 => dots::<2>(&local.page, q),
                3 => dots::<3>(&local.page, q),
                _ => dots::<4>(&local.page, q),
            };
            for (r, dots) in dots.iter().take(count).enumerate() {
                let start = (query + r) * view.stride + index * PAGE_TOKENS;
                let scores = &mut local.scores[start..start + PAGE_TOKENS];
                let bias = args.alibi.map(|Alibi { slopes, scale }| {
                    (slopes[view.head * view.group + (query + r) % view.group], scale)
                });
                finish(dots, number * PAGE_TOKENS, args.divisor, bias, scores);
            }
            query += count;
        }
    }
}

/// Dot products to scores.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn finish(
    dots: &[f32; PAGE_TOKENS],
    start: usize,
    divisor: f32,
    bias: Option<(f32, f32)>,
    scores: &mut [f32],
) {
    let round = |v| round(DType::Bf16, v);
    match bias {
        None => {
            for (score, dot) in scores.iter_mut().zip(dots) {
                *score = round(round(*dot) / divisor);
            }
        }
        Some((slope, scale)) => {
            for (p, (score, dot)) in (start..).zip(scores.iter_mut().zip(dots)) {
                *score = round(dot / divisor + scale * round(slope * p as f32));
            }
        }
    }
}

/// Products of `R` queries with the keys of 16 slots.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
pub(super) fn dots<const R: usize>(
    page: &[CacheLine],
    queries: &[u16],
) -> [[f32; PAGE_TOKENS]; SCORE_ROWS] {
    let dim = queries.len() / R;
    let start = queries.as_ptr();
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    for (two, lines) in page.as_chunks::<2>().0.iter().enumerate() {
        for (half, line) in lines.iter().enumerate() {
            let keys = line.get();
            for (r, sums) in sums.iter_mut().enumerate() {
                let p = start.wrapping_add(r * dim + 2 * (2 * two + half));
                // SAFETY: two elements of row `r`, as `page` has a line for each two of them.
                let q = _mm512_set1_epi32(unsafe { p.cast::<i32>().read_unaligned() });
                sums[half] = dot_pairs(keys, q, sums[half]);
            }
        }
    }
    let mut out = [[0.0; PAGE_TOKENS]; SCORE_ROWS];
    for (out, [even, odd]) in out.iter_mut().zip(sums) {
        let sum = _mm512_add_ps(even, odd);
        // SAFETY: sixteen f32.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sum) };
    }
    out
}

/// Scores to weights, rounded; `store` is given each query and the logarithm of its sum.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
fn softmax_rows(
    args: &Forward<'_>,
    view: TileView,
    local: &mut PairScratch,
    store: impl Fn(usize, f32),
) {
    let begin = view.pages.0 * PAGE_TOKENS;
    for query in 0..view.queries {
        let own = query * view.stride..(query + 1) * view.stride;
        let (scores, weights) = (&mut local.scores[own.clone()], &mut local.weights[own]);
        let position = view.first + query / view.group;
        let seen = (position + 1).saturating_sub(args.window).max(begin) - begin;
        let until = position + 1 - begin;
        store(query, softmax::<true>(&mut scores[seen..until], |v| v));
        weights[..seen].fill(0);
        weights[until..].fill(0);
        for (to, weight) in weights[seen..until].iter_mut().zip(&scores[seen..until]) {
            *to = bf16_bits(*weight);
        }
    }
}

/// Adds the weighted values of all pages to the sums.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn add_values(args: &Forward<'_>, tile: QueryTile, view: TileView, local: &mut PairScratch) {
    let row = &args.rows[tile.row];
    let PairScratch { weights, page, sums, .. } = local;
    let vectors = view.dim / 16;
    resize(page, PAGES * PAGE_TOKENS / 2 * vectors);
    for group in (view.pages.0..view.pages.1).step_by(PAGES) {
        let numbers = group..view.pages.1.min(group + PAGES);
        let lines = PAGE_TOKENS / 2 * vectors;
        for (number, lines) in numbers.clone().zip(page.chunks_exact_mut(lines)) {
            let values = args.pages.values(row.pages[number].0 as usize, view.head);
            let used = PAGE_TOKENS.min(view.end - number * PAGE_TOKENS);
            interleave(&values[..used * 2 * view.dim], view.dim, lines);
        }
        let slots = numbers.len() * PAGE_TOKENS;
        let page = &page[..slots / 2 * vectors];
        let start = (group - view.pages.0) * PAGE_TOKENS;
        let mut query = 0;
        while query < view.queries {
            let count = OUT_ROWS.min(view.queries - query);
            let area = Area {
                page,
                vectors,
                weights: &weights[query * view.stride + start..],
                stride: view.stride,
                pair_stride: 2,
            };
            let sums = &mut sums[query * view.dim..(query + count) * view.dim];
            area.add_rows(count, sums);
            query += count;
        }
    }
}

/// Interleaved values of some slots and the weights of some queries.
#[derive(Clone, Copy)]
pub(super) struct Area<'a> {
    /// `[pairs of slots, vectors]`.
    pub(super) page: &'a [CacheLine],
    pub(super) vectors: usize,
    /// Two weights of a query for each pair of slots, from the first slot.
    pub(super) weights: &'a [u16],
    /// Elements from one query to the next.
    pub(super) stride: usize,
    /// Elements from one pair of slots to the next.
    pub(super) pair_stride: usize,
}

impl Area<'_> {
    /// Adds to the sums of `count` queries, 1 to [`OUT_ROWS`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(super) fn add_rows(self, count: usize, sums: &mut [f32]) {
        match count {
            1 => self.add::<1>(sums),
            2 => self.add::<2>(sums),
            3 => self.add::<3>(sums),
            4 => self.add::<4>(sums),
            5 => self.add::<5>(sums),
            _ => self.add::<6>(sums),
        }
    }

    /// Adds to the sums of `R` queries.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    fn add<const R: usize>(self, sums: &mut [f32]) {
        let mut vector = 0;
        while vector + 4 <= self.vectors {
            self.add_vectors::<R, 4>(vector, sums);
            vector += 4;
        }
        if vector < self.vectors {
            self.add_vectors::<R, 2>(vector, sums);
        }
    }

    /// The same for `V` vectors of the head's dimension.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    #[allow(
        clippy::needless_range_loop,
        reason = "indexes that are constants keep the sums in registers"
    )]
    fn add_vectors<const R: usize, const V: usize>(self, first: usize, all: &mut [f32]) {
        let dim = 16 * self.vectors;
        let mut sums = [[_mm512_setzero_ps(); V]; R];
        for r in 0..R {
            let own = &all[r * dim + 16 * first..][..16 * V];
            for v in 0..V {
                // SAFETY: sixteen of the `16 V` f32.
                sums[r][v] = unsafe { _mm512_loadu_ps(own.as_ptr().wrapping_add(16 * v)) };
            }
        }
        let count = self.page.len() / self.vectors;
        let Some(last) = count.checked_sub(1) else {
            return;
        };
        let weights = &self.weights[..(R - 1) * self.stride + last * self.pair_stride + 2];
        for pair in 0..count {
            let lines = &self.page[pair * self.vectors + first..][..V];
            for r in 0..R {
                let p = weights.as_ptr().wrapping_add(r * self.stride + pair * self.pair_stride);
                // SAFETY: a pair of row `r`, inside the slice.
                let weight = _mm512_set1_epi32(unsafe { p.cast::<i32>().read_unaligned() });
                for v in 0..V {
                    sums[r][v] = dot_pairs(lines[v].get(), weight, sums[r][v]);
                }
            }
        }
        for r in 0..R {
            let own = &mut all[r * dim + 16 * first..][..16 * V];
            for v in 0..V {
                let p = own.as_mut_ptr().wrapping_add(16 * v);
                // SAFETY: sixteen of the `16 V` f32.
                unsafe { _mm512_storeu_ps(p, sums[r][v]) };
            }
        }
    }
}

/// Keys `[16 slots, dim]` to `[dim / 2]` lines of 16 slots, two neighbours each.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn transpose(keys: &[u8], dim: usize, page: &mut [CacheLine]) {
    let keys = &keys[..PAGE_TOKENS * dim * 2];
    for (column, lines) in page.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let mut rows = [_mm512_setzero_si512(); 16];
        for (slot, row) in rows.iter_mut().enumerate() {
            let p = keys.as_ptr().wrapping_add(slot * dim * 2 + column * LINE);
            // SAFETY: 32 elements of a slot: there is a line for each two of its elements.
            *row = unsafe { _mm512_loadu_si512(p.cast()) };
        }
        for (line, column) in lines.iter_mut().zip(transposed(rows)) {
            line.set(column);
        }
    }
}

/// 16 x 16 numbers of 32 bits, rows and columns exchanged.
#[inline]
#[target_feature(enable = "avx512f")]
fn transposed(r: [__m512i; 16]) -> [__m512i; 16] {
    let (mut t, mut u, mut out) = (r, r, r);
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    // In lane L of u[4 i + j]: column 4 L + j of rows 4 i to 4 i + 3.
    for i in 0..4 {
        u[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for j in 0..4 {
        let even = _mm512_shuffle_i32x4::<0x88>(u[j], u[4 + j]);
        let odd = _mm512_shuffle_i32x4::<0xdd>(u[j], u[4 + j]);
        let later_even = _mm512_shuffle_i32x4::<0x88>(u[8 + j], u[12 + j]);
        let later_odd = _mm512_shuffle_i32x4::<0xdd>(u[8 + j], u[12 + j]);
        out[j] = _mm512_shuffle_i32x4::<0x88>(even, later_even);
        out[8 + j] = _mm512_shuffle_i32x4::<0xdd>(even, later_even);
        out[4 + j] = _mm512_shuffle_i32x4::<0x88>(odd, later_odd);
        out[12 + j] = _mm512_shuffle_i32x4::<0xdd>(odd, later_odd);
    }
    out
}

/// Values `[slots, dim]` to `[8 pairs of slots, dim / 16]` lines; slots that are not there are
/// zeros.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn interleave(values: &[u8], dim: usize, lines: &mut [CacheLine]) {
    let rows = values.chunks_exact(2 * dim);
    let slots = rows.len();
    for (pair, lines) in lines.chunks_exact_mut(dim / 16).enumerate() {
        for (column, lines) in lines.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let mut two = [ZEROS.get(); 2];
            for (i, vector) in two.iter_mut().enumerate() {
                if 2 * pair + i < slots {
                    let at = (2 * pair + i) * 2 * dim + column * LINE;
                    let bytes = &values[at..at + LINE];
                    // SAFETY: 64 bytes.
                    *vector = unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) };
                }
            }
            lines[0].set(_mm512_unpacklo_epi16(two[0], two[1]));
            lines[1].set(_mm512_unpackhi_epi16(two[0], two[1]));
        }
    }
}

/// 32 sums from the order in which unpacking left them.
#[inline]
pub(super) fn in_order(sums: &[f32; 32], out: &mut [f32; 32]) {
    for (eight, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        out[..4].copy_from_slice(&sums[4 * eight..4 * eight + 4]);
        out[4..].copy_from_slice(&sums[16 + 4 * eight..16 + 4 * eight + 4]);
    }
}
