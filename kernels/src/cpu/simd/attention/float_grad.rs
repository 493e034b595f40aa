//! Gradient of attention in f32, for pages of any dtype and heads of any size.
//!
//! ```text
//! P = softmax(q K^T / divisor + bias), dP = dO V^T, dS = P (dP - sum of dP P) / divisor
//! dq = dS K [tokens, heads, head_dim]; dk += dS^T q, dv += P^T dO [positions, kv_heads, head_dim]
//! ```
//! Queries go from the last to the first, so that a sequence that is cut gives the bits of a whole
//! one. Keys, values and their gradients of a row and head stay in scratch memory as f32.
//!
//! Floor: five products, `10 * heads * head_dim` operations per (query, key) pair over the f32 rate.

use std::ops::Range;

use super::shapes::{Backward, softmax};
use super::tiles::{TileGradients, add_gradients, dots};
use crate::cpu::simd::lanes::dot;
use crate::cpu::simd::vector::Vector;
use crate::kv::StepRow;
use crate::ops::convert;

/// Scratch memory of a thread: keys, values and their gradients of one head of a row, and the weights of some queries.
#[derive(Default)]
pub(super) struct FloatGradScratch {
    keys: Vec<f32>,
    values: Vec<f32>,
    k_grad: Vec<f32>,
    v_grad: Vec<f32>,
    weights: Vec<f32>,
    slopes: Vec<f32>,
}

/// One query of a row and head.
struct Query<'a> {
    q: &'a [f32],
    /// Gradient of what it computed.
    grad: &'a [f32],
    /// Positions that it sees, from the first that is loaded.
    seen: Range<usize>,
    /// Slope and scale of ALiBi.
    slope: Option<(f32, f32)>,
    q_grad: &'a mut [f32],
}

/// The gradients of one kv head of one row.
///
/// # Safety
/// The machine has the instruction set of `V`.
#[inline(always)]
pub(super) unsafe fn attend<V: Vector, const FMA: bool>(
    args: &Backward<'_>,
    number: usize,
    head: usize,
    local: &mut FloatGradScratch,
) {
    let layout = args.pages.layout();
    let (dim, heads) = (layout.head_dim, layout.kv_heads * args.group);
    let row = &args.rows[number];
    let index: usize = args.rows[..number].iter().map(|r| r.tokens).sum();
    let first = (row.prefix + 1).saturating_sub(args.window);
    let end = row.prefix + row.tokens;
    let at = |p: usize| ((args.starts[number] + p) * layout.kv_heads + head) * dim;
    local.load(args, row, head, first..end);
    for p in first..end {
        let own = (p - first) * dim..(p - first + 1) * dim;
        // SAFETY: pieces differ in row or kv head, so their ranges do not overlap; the borrow ends
        // here.
        local.k_grad[own.clone()].copy_from_slice(unsafe { args.k_grad.range(at(p), dim) });
        // SAFETY: as above.
        local.v_grad[own].copy_from_slice(unsafe { args.v_grad.range(at(p), dim) });
    }
    // From the last token to the first, and the heads of each in their order.
    let queries = row.tokens * args.group;
    let query = |number: usize| {
        let (token, h) = (row.tokens - 1 - number / args.group, number % args.group);
        let start = ((index + token) * heads + head * args.group + h) * dim;
        let position = row.prefix + token;
        Query {
            q: &args.q[start..start + dim],
            grad: &args.grad[start..start + dim],
            seen: (position + 1).saturating_sub(args.window) - first..position + 1 - first,
            slope: args.alibi.map(|a| (a.slopes[head * args.group + h], a.scale)),
            // SAFETY: pieces differ in row or kv head, and queries of a piece in token or head, so their
            // ranges do not overlap.
            q_grad: unsafe { args.q_grad.range(start, dim) },
        }
    };
    let mut number = 0;
    while number < queries {
        let of = |r: usize| query(number + r);
        number += match queries - number {
            // SAFETY: as the caller says.
            0 | 1 => unsafe { local.queries::<V, FMA, 1>(args, first, [of(0)]) },
            // SAFETY: as above.
            2 | 3 => unsafe { local.queries::<V, FMA, 2>(args, first, [of(0), of(1)]) },
            // SAFETY: as above.
            _ => unsafe { local.queries::<V, FMA, 4>(args, first, [of(0), of(1), of(2), of(3)]) },
        };
    }
    for p in first..end {
        let own = (p - first) * dim..(p - first + 1) * dim;
        // SAFETY: as above.
        unsafe { args.k_grad.range(at(p), dim) }.copy_from_slice(&local.k_grad[own.clone()]);
        // SAFETY: as above.
        unsafe { args.v_grad.range(at(p), dim) }.copy_from_slice(&local.v_grad[own]);
    }
}

impl FloatGradScratch {
    /// Widens keys and values of some positions.
    #[inline(always)]
    fn load(&mut self, args: &Backward<'_>, row: &StepRow<'_>, head: usize, range: Range<usize>) {
        let layout = args.pages.layout();
        let (dim, bytes) = (layout.head_dim, layout.vector_bytes());
        for buffer in [&mut self.keys, &mut self.values, &mut self.k_grad, &mut self.v_grad] {
            buffer.resize(range.len() * dim, 0.0);
        }
        for (number, p) in range.enumerate() {
            let (page, slot) = row.locate(p);
            let from = slot * bytes..(slot + 1) * bytes;
            let to = number * dim..(number + 1) * dim;
            let (keys, values) = (args.pages.keys(page, head), args.pages.values(page, head));
            convert::widen(layout.dtype, &keys[from.clone()], &mut self.keys[to.clone()]);
            convert::widen(layout.dtype, &values[from], &mut self.values[to]);
        }
    }

    /// `R` queries: their gradients, and what they add to those of the keys and values that they see; `R`.
    #[inline(always)]
    unsafe fn queries<V: Vector, const FMA: bool, const R: usize>(
        &mut self,
        args: &Backward<'_>,
        first: usize,
        mut queries: [Query<'_>; R],
    ) -> usize {
        let dim = queries[0].q.len();
        let (mut all, mut common) = (queries[0].seen.clone(), queries[0].seen.clone());
        for query in &queries[1..] {
            let Range { start, end } = query.seen;
            all = all.start.min(start)..all.end.max(end);
            common = common.start.max(start)..common.end.min(end);
        }
        // What some see alone is computed for all and not read.
        let (length, range) = (all.len(), all.start * dim..all.end * dim);
        for buffer in [&mut self.weights, &mut self.slopes] {
            buffer.resize(buffer.len().max(R * length), 0.0);
        }
        let mut weights = parts::<R>(&mut self.weights, length);
        let mut slopes = parts::<R>(&mut self.slopes, length);
        let (mut q, mut grad) = ([queries[0].q; R], [queries[0].grad; R]);
        for (r, query) in queries.iter().enumerate() {
            (q[r], grad[r]) = (query.q, query.grad);
        }
        // SAFETY: as the caller says.
        unsafe { dots::<V, FMA, R>(q, &self.keys[range.clone()], &mut weights) };
        // SAFETY: as above.
        unsafe { dots::<V, FMA, R>(grad, &self.values[range], &mut slopes) };
        let dtype = args.pages.layout().dtype;
        for (r, query) in queries.iter_mut().enumerate() {
            let seen = query.seen.start - all.start..query.seen.end - all.start;
            let (weights, slopes) = (&mut weights[r][seen.clone()], &mut slopes[r][seen]);
            for (weight, p) in weights.iter_mut().zip(first + query.seen.start..) {
                *weight = *weight / args.divisor
                    + query.slope.map_or(0.0, |(slope, scale)| {
                        scale * convert::round(dtype, slope * p as f32)
                    });
            }
            softmax::<FMA>(weights, |v| v);
            let mean = dot::<FMA>(weights, slopes);
            for (slope, weight) in slopes.iter_mut().zip(&*weights) {
                *slope = weight * (*slope - mean) / args.divisor;
            }
            query.q_grad.fill(0.0);
        }
        let (weights, changes) = (weights.map(|w| &*w), slopes.map(|s| &*s));
        let grads = (&mut self.k_grad[..], &mut self.v_grad[..]);
        let mut spread = Spread { start: all.start, changes, weights, keys: &self.keys, grads };
        // Without common positions each has all of its own to itself.
        let (from, to) = match common.is_empty() {
            true => (usize::MAX, usize::MAX),
            false => (common.start, common.end),
        };
        for (r, query) in queries.iter_mut().enumerate() {
            let alone = query.seen.start..query.seen.end.min(from);
            // SAFETY: as the caller says.
            unsafe { spread.one::<V, FMA>(r, query, alone) };
        }
        if !common.is_empty() {
            // SAFETY: as the caller says.
            unsafe { spread.together::<V, FMA>(&mut queries, common) };
        }
        for (r, query) in queries.iter_mut().enumerate() {
            let alone = query.seen.start.max(to)..query.seen.end;
            // SAFETY: as the caller says.
            unsafe { spread.one::<V, FMA>(r, query, alone) };
        }
        R
    }
}

/// `R` neighbouring parts of a buffer.
#[inline(always)]
fn parts<const R: usize>(buffer: &mut [f32], length: usize) -> [&mut [f32]; R] {
    let mut rest = buffer;
    std::array::from_fn(|_| {
        let (part, others) = std::mem::take(&mut rest).split_at_mut(length);
        rest = others;
        part
    })
}

/// What queries add to gradients, position by position.
struct Spread<'a, const R: usize> {
    /// Position of the first of `changes` and `weights`.
    start: usize,
    changes: [&'a [f32]; R],
    weights: [&'a [f32]; R],
    keys: &'a [f32],
    /// Those of the keys and of the values.
    grads: (&'a mut [f32], &'a mut [f32]),
}

impl<const R: usize> Spread<'_, R> {
    /// All queries, at positions that all of them see.
    #[inline(always)]
    unsafe fn together<V: Vector, const FMA: bool>(
        &mut self,
        queries: &mut [Query<'_>; R],
        positions: Range<usize>,
    ) {
        let dim = queries[0].q.len();
        let own = positions.start - self.start..positions.end - self.start;
        let range = positions.start * dim..positions.end * dim;
        let (k_grad, v_grad) = (&mut self.grads.0[range.clone()], &mut self.grads.1[range.clone()]);
        let mut from = TileGradients {
            changes: self.changes,
            weights: self.weights,
            q: [queries[0].q; R],
            grad: [queries[0].grad; R],
            keys: &self.keys[range],
        };
        for (r, query) in queries.iter().enumerate() {
            from.changes[r] = &self.changes[r][own.clone()];
            from.weights[r] = &self.weights[r][own.clone()];
            (from.q[r], from.grad[r]) = (query.q, query.grad);
        }
        let mut q_grad = queries.each_mut().map(|query| &mut *query.q_grad);
        // SAFETY: as the caller says.
        unsafe { add_gradients::<V, FMA, R>(&from, &mut q_grad, k_grad, v_grad) };
    }

    /// One query, at positions that it sees.
    #[inline(always)]
    unsafe fn one<V: Vector, const FMA: bool>(
        &mut self,
        r: usize,
        query: &mut Query<'_>,
        positions: Range<usize>,
    ) {
        if positions.is_empty() {
            return;
        }
        let dim = query.q.len();
        let own = positions.start - self.start..positions.end - self.start;
        let range = positions.start * dim..positions.end * dim;
        let (k_grad, v_grad) = (&mut self.grads.0[range.clone()], &mut self.grads.1[range.clone()]);
        let from = TileGradients {
            changes: [&self.changes[r][own.clone()]],
            weights: [&self.weights[r][own]],
            q: [query.q],
            grad: [query.grad],
            keys: &self.keys[range],
        };
        // SAFETY: as the caller says.
        unsafe { add_gradients::<V, FMA, 1>(&from, &mut [&mut *query.q_grad], k_grad, v_grad) };
    }
}
