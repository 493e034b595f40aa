//! Causal attention of new tokens over the pages of their row; query head `h` reads kv head `h /
//! group`. `out = round(softmax(round(round(q K^T) / divisor))) V` over the positions `0..=own
//! position`, or the last `window` of them; sums and the softmax are f32, the roundings to the
//! cache's dtype are those of transformers (`eager_attention_forward`). With [`Alibi`] the scores
//! are `round(q K^T / divisor + scale * round(slope * position of the key))`.

use super::{Elements, OpError, PagePool, check_len, convert};
use crate::kv::{KvPages, StepRow, total_tokens};

/// Arguments of attention; `P` is the backend's pages of one block, which hold the new tokens
/// already.
#[derive(Debug)]
pub struct Attention<'a, F: ?Sized, P> {
    /// Queries (rotated) `[tokens, kv_heads * group, head_dim]`.
    pub q: &'a F,
    /// Keys and values.
    pub pages: &'a P,
    pub rows: &'a [StepRow<'a>],
    /// Query heads per kv head.
    pub group: usize,
    /// Divides the scores: `head_dim^1/2`.
    pub divisor: f32,
    /// Bias of the scores by position.
    pub alibi: Option<Alibi<'a>>,
    /// Positions that a query sees, its own included; `usize::MAX` for all before it.
    pub window: usize,
    /// Output, shaped as `q`.
    pub out: &'a mut F,
    /// Where a gradient will want it, the logarithm of the sum of the exponentials of the scores
    /// `[tokens, heads]`.
    pub logsum: Option<&'a mut F>,
}

/// Bias of the scores that grows with the position of the key.
#[derive(Clone, Copy, Debug)]
pub struct Alibi<'a> {
    /// Of each query head, in host memory.
    pub slopes: &'a [f32],
    /// Multiplies the rounded bias.
    pub scale: f32,
}

impl Alibi<'_> {
    /// Refuses another number of slopes than of heads.
    pub(crate) fn check(this: Option<Alibi<'_>>, heads: usize) -> Result<(), OpError> {
        this.map_or(Ok(()), |alibi| check_len("attention", "slopes", alibi.slopes.len(), 1, heads))
    }
}

impl<F: Elements + ?Sized, P: PagePool> Attention<'_, F, P> {
    pub(crate) fn check(&self) -> Result<(), OpError> {
        let layout = self.pages.layout();
        let (tokens, width) =
            (total_tokens(self.rows), layout.kv_heads * layout.head_dim * self.group);
        check_len("attention", "q", self.q.len(), tokens, width)?;
        check_len("attention", "out", self.out.len(), tokens, width)?;
        let heads = layout.kv_heads * self.group;
        if let Some(logsum) = &self.logsum {
            check_len("attention", "logsum", logsum.len(), tokens, heads)?;
        }
        Alibi::check(self.alibi, heads)?;
        if self.window == 0 {
            return Err(OpError::Shape { op: "attention", what: "a window of no positions" });
        }
        self.pages.check_rows(self.rows)
    }
}

/// The definition.
pub fn reference(mut args: Attention<'_, [f32], KvPages<'_>>) -> Result<(), OpError> {
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
            let score = |p: usize| {
                let dot: f32 = q.iter().zip(vector(0, p)).map(|(q, k)| q * k).sum();
                match args.alibi {
                    None => round(round(dot) / args.divisor),
                    Some(alibi) => {
                        let bias = alibi.scale * round(alibi.slopes[head] * p as f32);
                        round(dot / args.divisor + bias)
                    }
                }
            };
            let first = (position + 1).saturating_sub(args.window);
            let scores: Vec<f32> = (first..=position).map(score).collect();
            let top = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weights: Vec<f32> = scores.iter().map(|s| (s - top).exp()).collect();
            let total: f32 = weights.iter().sum();
            if let Some(logsum) = &mut args.logsum {
                logsum[token * heads + head] = top + total.ln();
            }
            let out = &mut args.out[range];
            out.fill(0.0);
            for (p, weight) in (first..).zip(&weights) {
                for (out, v) in out.iter_mut().zip(vector(1, p)) {
                    *out += round(weight / total) * v;
                }
            }
        }
    }
    Ok(())
}
