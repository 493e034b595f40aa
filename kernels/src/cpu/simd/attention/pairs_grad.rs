//! Gradient of attention over bfloat16 pages by products of bfloat16 pairs (`vdpbf16ps`), where the
//! machine has them and heads are multiples of 32.
//!
//! ```text
//! block: the queries of up to 16 tokens at the positions of one page, of one kv head
//!   scores  S = Q K^T, dP = dO V^T        pages transposed, as in forward
//!   P, dS   softmax, dS = P (dP - sum of dP P) / divisor: f32, then rounded
//!   dQ = dS K                             pairs of slots of the interleaved keys
//!   dK += dS^T Q, dV += P^T dO            pairs of the interleaved queries
//! ```
//!
//! What is multiplied is bfloat16, as in PyTorch; sums are f32. What a block adds to the gradients
//! of keys and values is summed by itself over its queries, and the blocks follow each other from the
//! last to the first. So a sequence that is cut at multiples of a page gives the same bits as a
//! whole one.
//!
//! Floor: five products, `10 * heads * head_dim` operations per (query, key) pair over the rate of
//! bfloat16 pairs.

use std::ops::Range;

use shared::dtype::DType;

use super::pairs::{Area, OUT_ROWS, dots, grow, in_order, interleave, rounded, transpose};
use super::shapes::{Backward, softmax};
use crate::cpu::pool::Disjoint;
use crate::cpu::simd::lanes::dot;
use crate::cpu::simd::line::{CacheLine, resize};
use crate::kv::{PAGE_TOKENS, StepRow};
use crate::ops::convert::{bf16_bits, round};

/// Queries whose scores are computed side by side.
const SCORE_ROWS: usize = 4;

/// Per thread; sizes are those of a block.
#[derive(Default)]
pub(super) struct PairGradScratch {
    /// Queries and gradients of outputs, bfloat16 `[queries, dim]`; the last of an odd number has
    /// zeros beside it.
    queries: Vec<u16>,
    grads: Vec<u16>,
    /// The same, interleaved `[pairs of queries, dim / 16]`.
    query_lines: Vec<CacheLine>,
    grad_lines: Vec<CacheLine>,
    /// Scores, then weights; products of gradients and values, then gradients of scores `[queries,
    /// stride]`.
    weights: Vec<f32>,
    slopes: Vec<f32>,
    /// Gradients of scores `[queries, stride]`.
    changes: Vec<u16>,
    /// The same, and weights, of two queries side by side `[pairs of queries, stride, 2]`.
    change_pairs: Vec<u16>,
    weight_pairs: Vec<u16>,
    /// A page of keys or values.
    page: Vec<CacheLine>,
    /// Sums in the order of what was interleaved.
    sums: Vec<f32>,
}

/// What a block of queries sees.
#[derive(Clone, Copy)]
struct BlockView<'a> {
    row: &'a StepRow<'a>,
    head: usize,
    dim: usize,
    group: usize,
    queries: usize,
    /// Position of the first token, and the one after the last.
    first: usize,
    end: usize,
    /// First page that any query sees, and the page after the last.
    pages: (usize, usize),
    /// Positions of the pages.
    stride: usize,
}

/// The gradients of one kv head of one row.
///
/// # Safety
/// The machine has AVX-512 F, BW, DQ, VL and BF16; pages are bfloat16 and `super::pairs::takes`
/// their heads.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
pub(super) unsafe fn attend(
    args: &Backward<'_>,
    number: usize,
    head: usize,
    local: &mut PairGradScratch,
) {
    let row = &args.rows[number];
    let end = row.prefix + row.tokens;
    let blocks = row.prefix / PAGE_TOKENS..end.div_ceil(PAGE_TOKENS);
    for block in blocks.rev() {
        let tokens = row.prefix.max(block * PAGE_TOKENS)..end.min((block + 1) * PAGE_TOKENS);
        attend_block(args, number, head, tokens, local);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
fn attend_block(
    args: &Backward<'_>,
    number: usize,
    head: usize,
    tokens: Range<usize>,
    local: &mut PairGradScratch,
) {
    let (layout, group, row) = (args.pages.layout(), args.group, &args.rows[number]);
    let dim = layout.head_dim;
    let begin = (tokens.start + 1).saturating_sub(args.window) / PAGE_TOKENS;
    let view = BlockView {
        row,
        head,
        dim,
        group,
        queries: tokens.len() * group,
        first: tokens.start,
        end: tokens.end,
        pages: (begin, tokens.end.div_ceil(PAGE_TOKENS)),
        stride: (tokens.end.div_ceil(PAGE_TOKENS) - begin) * PAGE_TOKENS,
    };
    let before: usize = args.rows[..number].iter().map(|r| r.tokens).sum();
    let index = before + tokens.start - row.prefix;
    // Queries of one token and kv head are neighbours.
    let start_of = |query: usize| {
        let token = index + query / group;
        (token * layout.kv_heads * group + head * group + query % group) * dim
    };
    local.take_queries(args, view, start_of);
    let PairGradScratch { queries, grads, weights, slopes, page, .. } = local;
    for number in view.pages.0..view.pages.1 {
        let id = row.pages[number].0 as usize;
        let at = (number - view.pages.0) * PAGE_TOKENS;
        resize(page, dim / 2);
        transpose(args.pages.keys(id, head), dim, page);
        multiply(page, queries, view, &mut weights[at..]);
        transpose(args.pages.values(id, head), dim, page);
        multiply(page, grads, view, &mut slopes[at..]);
    }
    local.change(args, view);
    local.query_gradients(args, view, start_of);
    let heads = layout.kv_heads;
    let at = |p: usize| ((args.starts[number] + p) * heads + head) * dim;
    let PairGradScratch { query_lines, grad_lines, change_pairs, weight_pairs, sums, .. } = local;
    for (lines, pairs, out) in [
        (&query_lines[..], &change_pairs[..], &args.k_grad),
        (&grad_lines[..], &weight_pairs[..], &args.v_grad),
    ] {
        let area = Area {
            page: &lines[..view.queries.div_ceil(2) * dim / 16],
            vectors: dim / 16,
            weights: pairs,
            stride: 2,
            pair_stride: 2 * view.stride,
        };
        add_positions(area, view, sums, at, out);
    }
}

/// Products of all queries with one transposed page.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn multiply(page: &[CacheLine], queries: &[u16], view: BlockView<'_>, out: &mut [f32]) {
    for query in (0..view.queries).step_by(SCORE_ROWS) {
        let count = SCORE_ROWS.min(view.queries - query);
        let q = &queries[query * view.dim..(query + count) * view.dim];
        let dots = match count {
            1 => dots::<1>(page, q),
            2 => dots::<2>(page, q),
            3 => dots::<3>(page, q),
            _ => dots::<4>(page, q),
        };
        for (r, dots) in dots.iter().take(count).enumerate() {
            out[(query + r) * view.stride..][..PAGE_TOKENS].copy_from_slice(dots);
        }
    }
}

/// Adds what a block contributes to the gradients of the keys or values it sees.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn add_positions(
    area: Area<'_>,
    view: BlockView<'_>,
    sums: &mut Vec<f32>,
    at: impl Fn(usize) -> usize,
    out: &Disjoint<'_, f32>,
) {
    let dim = view.dim;
    let start = view.pages.0 * PAGE_TOKENS;
    grow(sums, OUT_ROWS * dim);
    for first in (start..view.end).step_by(OUT_ROWS) {
        let count = OUT_ROWS.min(view.end - first);
        let sums = &mut sums[..count * dim];
        sums.fill(0.0);
        let area = Area { weights: &area.weights[2 * (first - start)..], ..area };
        area.add_rows(count, sums);
        for (p, sums) in (first..).zip(sums.chunks_exact(dim)) {
            // SAFETY: pieces differ in row or kv head, so their ranges do not overlap; the borrow
            // ends here.
            let out = unsafe { out.range(at(p), dim) };
            let chunks = sums.as_chunks::<32>().0.iter();
            for (sums, out) in chunks.zip(out.as_chunks_mut::<32>().0) {
                let mut ordered = [0.0; 32];
                in_order(sums, &mut ordered);
                out.iter_mut().zip(&ordered).for_each(|(out, sum)| *out += sum);
            }
        }
    }
}

impl PairGradScratch {
    /// Rounds and interleaves the queries and the gradients of their outputs.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    fn take_queries(
        &mut self,
        args: &Backward<'_>,
        view: BlockView<'_>,
        start_of: impl Fn(usize) -> usize,
    ) {
        let (dim, pairs) = (view.dim, view.queries.div_ceil(2));
        for (from, to, lines) in [
            (args.q, &mut self.queries, &mut self.query_lines),
            (args.grad, &mut self.grads, &mut self.grad_lines),
        ] {
            grow(to, 2 * pairs * dim);
            for (query, to) in to.chunks_exact_mut(dim).take(view.queries).enumerate() {
                rounded(&from[start_of(query)..start_of(query) + dim], to);
            }
            to[view.queries * dim..2 * pairs * dim].fill(0);
            if lines.len() < pairs * dim / 16 {
                resize(lines, pairs * dim / 16);
            }
            let bytes = bytes(&to[..view.queries * dim]);
            interleave(bytes, dim, &mut lines[..pairs * dim / 16]);
        }
        let all = view.queries * view.stride;
        grow(&mut self.weights, all);
        grow(&mut self.slopes, all);
        grow(&mut self.changes, all);
        grow(&mut self.change_pairs, 2 * pairs * view.stride);
        grow(&mut self.weight_pairs, 2 * pairs * view.stride);
    }

    /// Scores to weights, and to their gradients, rounded; zeros where a query does not see.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")]
    fn change(&mut self, args: &Backward<'_>, view: BlockView<'_>) {
        let start = view.pages.0 * PAGE_TOKENS;
        let rows = self
            .weights
            .chunks_exact_mut(view.stride)
            .zip(self.slopes.chunks_exact_mut(view.stride))
            .zip(self.changes.chunks_exact_mut(view.stride));
        for (query, ((weights, slopes), changes)) in rows.take(view.queries).enumerate() {
            let position = view.first + query / view.group;
            let seen = (position + 1).saturating_sub(args.window).max(start) - start;
            let until = position + 1 - start;
            for row in [&mut *weights, &mut *slopes] {
                row[..seen].fill(0.0);
                row[until..].fill(0.0);
            }
            let (scores, slopes) = (&mut weights[seen..until], &mut slopes[seen..until]);
            match args.alibi {
                None => scores.iter_mut().for_each(|s| *s /= args.divisor),
                Some(alibi) => {
                    let slope = alibi.slopes[view.head * view.group + query % view.group];
                    for (p, score) in (start + seen..).zip(scores.iter_mut()) {
                        let bias = round(DType::Bf16, slope * p as f32);
                        *score = *score / args.divisor + alibi.scale * bias;
                    }
                }
            }
            softmax::<true>(scores, |v| v);
            let mean = dot::<true>(scores, slopes);
            for (weight, slope) in scores.iter().zip(slopes.iter_mut()) {
                *slope = weight * (*slope - mean) / args.divisor;
            }
            changes[..seen].fill(0);
            changes[until..].fill(0);
            rounded(slopes, &mut changes[seen..until]);
        }
        for (from, to) in
            [(&self.weights, &mut self.weight_pairs), (&self.slopes, &mut self.change_pairs)]
        {
            let from = &from[..view.queries * view.stride];
            let rows = from.chunks(2 * view.stride);
            for (two, to) in rows.zip(to.chunks_exact_mut(2 * view.stride)) {
                let (first, second) = two.split_at(view.stride);
                side_by_side(first, second, to);
            }
        }
    }

    /// The gradients of the queries.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    fn query_gradients(
        &mut self,
        args: &Backward<'_>,
        view: BlockView<'_>,
        start_of: impl Fn(usize) -> usize,
    ) {
        let (dim, vectors) = (view.dim, view.dim / 16);
        grow(&mut self.sums, view.queries * dim);
        let sums = &mut self.sums[..view.queries * dim];
        sums.fill(0.0);
        resize(&mut self.page, PAGE_TOKENS / 2 * vectors);
        for number in view.pages.0..view.pages.1 {
            let keys = args.pages.keys(view.row.pages[number].0 as usize, view.head);
            let used = PAGE_TOKENS.min(view.end - number * PAGE_TOKENS);
            interleave(&keys[..used * 2 * dim], dim, &mut self.page);
            let at = (number - view.pages.0) * PAGE_TOKENS;
            for (rows, sums) in (0..).step_by(OUT_ROWS).zip(sums.chunks_mut(OUT_ROWS * dim)) {
                let area = Area {
                    page: &self.page,
                    vectors,
                    weights: &self.changes[rows * view.stride + at..],
                    stride: view.stride,
                    pair_stride: 2,
                };
                area.add_rows(sums.len() / dim, sums);
            }
        }
        for (query, sums) in sums.chunks_exact(dim).enumerate() {
            // SAFETY: pieces differ in row or kv head, so their ranges do not overlap; the borrow
            // ends here.
            let out = unsafe { args.q_grad.range(start_of(query), dim) };
            let chunks = sums.as_chunks::<32>().0.iter();
            for (sums, out) in chunks.zip(out.as_chunks_mut::<32>().0) {
                in_order(sums, out);
            }
        }
    }
}

fn bytes(words: &[u16]) -> &[u8] {
    // SAFETY: the same memory, in which every byte is initialised.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), 2 * words.len()) }
}

/// Two rows rounded, element by element; without a second row there are zeros.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
fn side_by_side(first: &[f32], second: &[f32], to: &mut [u16]) {
    let pairs = to.as_chunks_mut::<2>().0.iter_mut().zip(first);
    if second.is_empty() {
        pairs.for_each(|(to, a)| *to = [bf16_bits(*a), 0]);
    } else {
        pairs.zip(second).for_each(|((to, a), b)| *to = [bf16_bits(*a), bf16_bits(*b)]);
    }
}
