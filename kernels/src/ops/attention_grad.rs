//! Gradient of [`Attention`](super::Attention): that of the queries, and what the queries add to
//! the gradients of keys and values.
//!
//! ```text
//! P = softmax of the scores; dP = dO V^T; dS = P (dP - sum of dP P)
//! dq = dS K / divisor; dk += dS^T q / divisor; dv += P^T dO          summed over the query heads of a kv head
//! ```
//! The queries of a row are taken from the last to the first, so that the sums do not depend on
//! where a sequence is cut when its pieces come from the last to the first too. After that the
//! gradients at a position are whole as soon as the query of that position was taken.
//!
//! Over bfloat16 pages a backend may round what is multiplied to bfloat16, and scores as
//! [`Attention`](super::Attention) does, as PyTorch does, and sum the queries of a page by
//! themselves: then sequences are cut at multiples of a page. Over float16 pages it may round to
//! bfloat16 too, all but what scores are made of, since gradients have a range that float16 has
//! not.

use super::{Alibi, Elements, OpError, PagePool, check_len, convert};
use crate::kv::{KvPages, StepRow, total_tokens};

/// Arguments of the gradient; `P` is the backend's pages of one block.
#[derive(Debug)]
pub struct AttentionGrad<'a, F: ?Sized, P> {
    /// Queries (rotated) `[tokens, kv_heads * group, head_dim]`.
    pub q: &'a F,
    /// Gradient of the output, shaped as `q`.
    pub grad: &'a F,
    /// Keys and values.
    pub pages: &'a P,
    pub rows: &'a [StepRow<'a>],
    /// Where position 0 of each row lies in the gradients of keys and values.
    pub starts: &'a [usize],
    /// Query heads per kv head.
    pub group: usize,
    /// Divides the scores.
    pub divisor: f32,
    /// Bias of the scores.
    pub alibi: Option<Alibi<'a>>,
    /// Positions that a query sees.
    pub window: usize,
    /// What attention gave, if it is at hand; a backend may make it again.
    pub known: Option<Known<'a, F>>,
    /// Gradient of the queries, shaped as `q`.
    pub q_grad: &'a mut F,
    /// Gradient of the keys (rotated) `[positions, kv_heads, head_dim]`, added to.
    pub k_grad: &'a mut F,
    /// Gradient of the values, shaped as that of the keys, added to.
    pub v_grad: &'a mut F,
}

/// Results of [`Attention`](super::Attention) for the same queries.
#[derive(Debug)]
pub struct Known<'a, F: ?Sized> {
    /// Its output, shaped as the queries.
    pub out: &'a F,
    /// Its logarithms `[tokens, heads]`.
    pub logsum: &'a F,
}

impl<F: Elements + ?Sized, P: PagePool> AttentionGrad<'_, F, P> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        let (op, layout) = ("attention grad", self.pages.layout());
        let kv = layout.kv_heads * layout.head_dim;
        let tokens = total_tokens(self.rows);
        for (what, has) in
            [("q", self.q.len()), ("grad", self.grad.len()), ("q_grad", self.q_grad.len())]
        {
            check_len(op, what, has, tokens, kv * self.group)?;
        }
        if let Some(known) = &self.known {
            check_len(op, "out", known.out.len(), tokens, kv * self.group)?;
            let heads = layout.kv_heads * self.group;
            check_len(op, "logsum", known.logsum.len(), tokens, heads)?;
        }
        check_len(op, "starts", self.starts.len(), 1, self.rows.len())?;
        self.pages.check_rows(self.rows)?;
        for (row, start) in self.rows.iter().zip(self.starts) {
            let end = start.saturating_add(row.prefix + row.tokens);
            check_len(op, "k_grad", self.k_grad.len(), end, kv)?;
            check_len(op, "v_grad", self.v_grad.len(), end, kv)?;
        }
        if self.window == 0 {
            return Err(OpError::Shape { op, what: "a window of no positions" });
        }
        Alibi::check(self.alibi, layout.kv_heads * self.group)
    }
}

/// The definition.
pub fn reference(args: AttentionGrad<'_, [f32], KvPages<'_>>) -> Result<(), OpError> {
    args.check()?;
    let layout = args.pages.layout();
    let (dim, heads) = (layout.head_dim, layout.kv_heads * args.group);
    let mut index = 0;
    for (row, &start) in args.rows.iter().zip(args.starts) {
        for token in (0..row.tokens).rev() {
            for head in 0..heads {
                let range = ((index + token) * heads + head) * dim
                    ..((index + token) * heads + head + 1) * dim;
                let kv_head = head / args.group;
                let vector = |half: usize, p: usize| {
                    let (page, slot) = row.locate(p);
                    let bytes = match half {
                        0 => args.pages.keys(page, kv_head),
                        _ => args.pages.values(page, kv_head),
                    };
                    let vector = layout.vector_bytes();
                    convert::to_vec(layout.dtype, &bytes[slot * vector..(slot + 1) * vector])
                };
                let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
                let (q, grad) = (&args.q[range.clone()], &args.grad[range.clone()]);
                let position = row.prefix + token;
                let first = (position + 1).saturating_sub(args.window);
                let score = |p: usize| {
                    let bias = args.alibi.map_or(0.0, |alibi| {
                        alibi.scale * convert::round(layout.dtype, alibi.slopes[head] * p as f32)
                    });
                    dot(q, &vector(0, p)) / args.divisor + bias
                };
                let scores: Vec<f32> = (first..=position).map(score).collect();
                let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let weights: Vec<f32> = scores.iter().map(|s| (s - top).exp()).collect();
                let total: f32 = weights.iter().sum();
                let weights: Vec<f32> = weights.iter().map(|w| w / total).collect();
                let slopes: Vec<f32> =
                    (first..=position).map(|p| dot(grad, &vector(1, p))).collect();
                let mean = dot(&weights, &slopes);
                let q_grad = &mut args.q_grad[range];
                q_grad.fill(0.0);
                for (p, (weight, slope)) in (first..).zip(weights.iter().zip(&slopes)) {
                    let change = weight * (slope - mean) / args.divisor;
                    let at = ((start + p) * layout.kv_heads + kv_head) * dim;
                    let key = vector(0, p);
                    for i in 0..dim {
                        q_grad[i] += change * key[i];
                        args.k_grad[at + i] += change * q[i];
                        args.v_grad[at + i] += weight * grad[i];
                    }
                }
            }
        }
        index += row.tokens;
    }
    Ok(())
}
