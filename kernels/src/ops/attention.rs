//! Causal attention of new tokens over the pages of their row; query head `h` reads kv head `h / group`.
//! `out = round(softmax(round(round(q K^T) / divisor))) V` over the positions `0..=own position`; sums and the softmax are f32, the
//! roundings to the cache's dtype are those of transformers (`eager_attention_forward`).

use super::{OpError, check_len, convert};
use crate::kv::{KvPages, StepRow, total_tokens};

/// Arguments of attention; `P` is the backend's pages of one block, which hold the new tokens already.
#[derive(Debug)]
pub struct Attention<'a, F: ?Sized, P> {
    /// Queries (rotated) `[tokens, kv_heads * group, head_dim]`.
    pub q: &'a F,
    /// Keys and values.
    pub pages: &'a P,
    /// The batch.
    pub rows: &'a [StepRow<'a>],
    /// Query heads per kv head.
    pub group: usize,
    /// Divides the scores: `head_dim^1/2`.
    pub divisor: f32,
    /// Output, shaped as `q`.
    pub out: &'a mut F,
}

impl Attention<'_, [f32], KvPages<'_>> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        let layout = self.pages.layout();
        let (tokens, width) = (
            total_tokens(self.rows),
            layout.kv_heads * layout.head_dim * self.group,
        );
        check_len("attention", "q", self.q.len(), tokens, width)?;
        check_len("attention", "out", self.out.len(), tokens, width)?;
        self.pages.check_rows(self.rows)
    }
}

/// The definition.
pub fn reference(args: Attention<'_, [f32], KvPages<'_>>) -> Result<(), OpError> {
    args.check()?;
    let layout = args.pages.layout();
    let (dim, heads) = (layout.head_dim, layout.kv_heads * args.group);
    let positions = args
        .rows
        .iter()
        .flat_map(|row| (row.prefix..row.prefix + row.tokens).map(move |p| (row, p)));
    for (token, (row, position)) in positions.enumerate() {
        for head in 0..heads {
            let range = (token * heads + head) * dim..(token * heads + head + 1) * dim;
            let vector = |half: usize, p: usize| {
                let (page, slot) = row.locate(p);
                let bytes = match half {
                    0 => args.pages.keys(page, head / args.group),
                    _ => args.pages.values(page, head / args.group),
                };
                convert::to_vec(
                    layout.dtype,
                    &bytes[slot * layout.vector_bytes()..(slot + 1) * layout.vector_bytes()],
                )
            };
            let q = &args.q[range.clone()];
            let round = |v| convert::round(layout.dtype, v);
            let score = |key: Vec<f32>| {
                round(round(q.iter().zip(key).map(|(q, k)| q * k).sum()) / args.divisor)
            };
            let scores: Vec<f32> = (0..=position).map(|p| score(vector(0, p))).collect();
            let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weights: Vec<f32> = scores.iter().map(|s| (s - top).exp()).collect();
            let total: f32 = weights.iter().sum();
            let out = &mut args.out[range];
            out.fill(0.0);
            for (p, weight) in weights.iter().enumerate() {
                for (out, v) in out.iter_mut().zip(vector(1, p)) {
                    *out += round(weight / total) * v;
                }
            }
        }
    }
    Ok(())
}
