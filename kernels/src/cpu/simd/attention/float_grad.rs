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
use crate::cpu::simd::lanes::{dot, mul_add};
use crate::kv::StepRow;
use crate::ops::convert;

/// Scratch memory of a thread: keys, values and their gradients of one head of a row, and the weights of one query.
#[derive(Default)]
pub(super) struct Local {
    keys: Vec<f32>,
    values: Vec<f32>,
    k_grad: Vec<f32>,
    v_grad: Vec<f32>,
    weights: Vec<f32>,
    slopes: Vec<f32>,
}

/// The gradients of one kv head of one row.
#[inline(always)]
pub(super) fn attend<const FMA: bool>(
    args: &Backward<'_>,
    number: usize,
    head: usize,
    local: &mut Local,
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
    for token in (0..row.tokens).rev() {
        for h in 0..args.group {
            let start = ((index + token) * heads + head * args.group + h) * dim;
            let (q, grad) = (&args.q[start..start + dim], &args.grad[start..start + dim]);
            let position = row.prefix + token;
            let seen = (position + 1).saturating_sub(args.window)..position + 1;
            // SAFETY: as above.
            let q_grad = unsafe { args.q_grad.range(start, dim) };
            let slope = args.alibi.map(|a| (a.slopes[head * args.group + h], a.scale));
            let bias = |p: usize| {
                slope.map_or(0.0, |(slope, scale)| {
                    scale * convert::round(layout.dtype, slope * p as f32)
                })
            };
            local.query::<FMA>(q, grad, first, seen, args.divisor, bias, q_grad);
        }
    }
    for p in first..end {
        let own = (p - first) * dim..(p - first + 1) * dim;
        // SAFETY: as above.
        unsafe { args.k_grad.range(at(p), dim) }.copy_from_slice(&local.k_grad[own.clone()]);
        // SAFETY: as above.
        unsafe { args.v_grad.range(at(p), dim) }.copy_from_slice(&local.v_grad[own]);
    }
}

impl Local {
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

    /// One query: its gradient, and what it adds to those of the keys and values it sees.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "the loop variables of one query")]
    fn query<const FMA: bool>(
        &mut self,
        q: &[f32],
        grad: &[f32],
        first: usize,
        seen: Range<usize>,
        divisor: f32,
        bias: impl Fn(usize) -> f32,
        q_grad: &mut [f32],
    ) {
        let dim = q.len();
        let range = (seen.start - first) * dim..(seen.end - first) * dim;
        let (keys, values) = (&self.keys[range.clone()], &self.values[range.clone()]);
        self.weights.clear();
        self.slopes.clear();
        let pairs = keys.chunks_exact(dim).zip(values.chunks_exact(dim));
        for (p, (key, value)) in seen.zip(pairs) {
            self.weights.push(dot::<FMA>(q, key) / divisor + bias(p));
            self.slopes.push(dot::<FMA>(grad, value));
        }
        softmax::<FMA>(&mut self.weights, |v| v);
        let mean = dot::<FMA>(&self.weights, &self.slopes);
        q_grad.fill(0.0);
        let grads = self.k_grad[range.clone()]
            .chunks_exact_mut(dim)
            .zip(self.v_grad[range].chunks_exact_mut(dim));
        let scalars = self.weights.iter().zip(&self.slopes);
        for (((k_grad, v_grad), key), (weight, slope)) in
            grads.zip(keys.chunks_exact(dim)).zip(scalars)
        {
            let change = weight * (slope - mean) / divisor;
            for i in 0..dim {
                q_grad[i] = mul_add::<FMA>(change, key[i], q_grad[i]);
                k_grad[i] = mul_add::<FMA>(change, q[i], k_grad[i]);
                v_grad[i] = mul_add::<FMA>(*weight, grad[i], v_grad[i]);
            }
        }
    }
}
