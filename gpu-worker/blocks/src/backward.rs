//! The gradient of one block with respect to its input, written once over a spec and a backend.
//! Weights are frozen.
//!
//! A sequence is taken in pieces from its last to its first. What forward did not leave of a piece
//! ([`SavedActivations`]) is computed again from the block's input, over pages that hold the keys and values of
//! the whole sequence; what a piece adds to the gradients of earlier keys and values is summed in
//! [`Sums`], and is whole for the positions of a piece once that piece is taken. Memory is thus
//! bounded by the piece, the sums and the pages, whatever the length. Gradients are f32 throughout.
//!
//! A rank of a group takes the gradient through its shard. What it has of a gradient that enters
//! q/k/v, or gate and up, and their adapters, is a summand: the ranks sum each half at its end, and both halves
//! of a parallel block at once.
//!
//! ```text
//! Sequential  h = x + A(n(x)), y = h + M(m(h))          dh = g + m'(M'(g)),             dx = dh + n'(A'(dh))
//! Normed      a = n(x), h = a + A(a), b = m(h), y = b + M(b)   dh = m'(g + M'(g)),      dx = n'(dh + A'(dh))
//! Parallel    y = x + A(n(x)) + M(m(x))                 dx = g + n'(A'(g)) + m'(M'(g))
//! ```

use kernels::kv::total_tokens;
use kernels::ops::{
    AdaptGrad, Add, AttentionGrad, Gather, GeluGrad, JoinQkv, Known, LinearGrad, MixtureGrad,
    MixtureGradWorkspace, NormGrad, OpError, Rope, SiluMulGrad,
};
use kernels::{Backend, DType, StepRow};
use model::{BlockSpec, Norm, Position, Residual};

use super::activations::SavedActivations;
use super::forward::{
    Heads, Middle as Forward, Pass, PromptPart, adapters_of, add_prompts, prepare,
};
use super::weights::{BlockWeights, GatedWeights, Linear, MlpWeights, NormWeights, QkvWeights};

mod attention;
mod mlp;
mod residual;
mod workspace;

use residual::PieceBuffers;
pub use workspace::GradientWork;
use workspace::{HeadGradients, Middle};

/// Gradients of the keys (rotated) and values of whole sequences, `[positions, kv_heads, head_dim]`
/// each. Zero before the last piece of a block is taken.
pub struct Sums<'a, B: Backend> {
    /// Of the keys.
    pub keys: &'a mut B::Floats,
    /// Of the values.
    pub values: &'a mut B::Floats,
    /// Where position 0 of each row lies.
    pub starts: &'a [usize],
}

/// Replaces `gradient` `[tokens, hidden]`, that of the output of the tokens of `rows`, by
/// that of their input, which is also that of the deep prompts where there are any. `x` is the
/// input before prompts, `pages` hold keys and values of the whole rows, as
/// [`forward`](super::forward) or [`keys`](super::keys) put them there. The `saved`
/// activations are consumed.
///
/// # Errors
/// [`OpError`] when sizes do not fit; `gradient` and `sums` are then unspecified.
#[allow(clippy::too_many_arguments, reason = "forward's, what it left, and what is summed")]
pub fn backward<B: Backend>(
    backend: &mut B,
    spec: &BlockSpec,
    weights: &BlockWeights<'_, B>,
    work: &mut GradientWork<B>,
    rows: &[StepRow<'_>],
    prompts: &[PromptPart<'_>],
    x: &B::Floats,
    gradient: &mut B::Floats,
    sums: Sums<'_, B>,
    saved: SavedActivations<'_, B::Floats>,
    pages: &mut B::Pages<'_>,
) -> Result<(), OpError> {
    let tokens = total_tokens(rows);
    work.grow(backend, spec, tokens, weights.largest_rank);
    prepare(backend, spec, weights.dtype, &mut work.forward, rows, rows)?;
    let GradientWork { forward, x: before, h, fed, branch, aside, heads, middle } = work;
    let pass = Pass::new(backend, spec, weights, rows, &mut forward.rank);
    let mut back = Backward { pass, sums };
    back.pass.backend.copy(x, before, tokens * spec.hidden)?;
    add_prompts(back.pass.backend, prompts, before, weights.dtype)?;
    back.pass.norm(before, &weights.attention_norm, &mut forward.normed)?;
    if saved.queries.is_none() {
        back.queries(&forward.normed, &mut forward.heads)?;
    }
    let piece = PieceBuffers {
        before: &**before,
        normed: &*forward.normed,
        attended: &mut *forward.branch,
        forward_heads: &mut forward.heads,
        forward_middle: &mut forward.middle,
        h: &mut **h,
        fed: &mut **fed,
        branch: &mut **branch,
        aside: &mut **aside,
        heads,
        middle,
        saved,
    };
    match spec.residual {
        Residual::Sequential => back.sequential(piece, gradient, pages),
        Residual::Normed => back.normed(piece, gradient, pages),
        Residual::Parallel => back.parallel(piece, gradient, pages),
    }
}

/// A backward pass over one piece of a sequence.
struct Backward<'a, 'w, 's, B: Backend> {
    pass: Pass<'a, 'w, B>,
    sums: Sums<'s, B>,
}

impl<B: Backend> Backward<'_, '_, '_, B> {
    /// The queries of `x`, once more. Keys and values are in their pages.
    fn queries(&mut self, x: &B::Floats, heads: &mut Heads<B>) -> Result<(), OpError> {
        let (spec, tokens) = (self.pass.spec, self.pass.tokens);
        match &self.pass.weights.qkv {
            QkvWeights::Separate([q, _, _]) => self.pass.linear(x, q, tokens, &mut heads.q)?,
            QkvWeights::Fused(_) => self.pass.project(x, heads)?,
        }
        self.pass.norm_queries(heads)?;
        let Position::Rope { .. } = spec.position else {
            return Ok(());
        };
        self.pass.backend.rope(Rope {
            x: &mut *heads.q,
            table: &*heads.table,
            tokens,
            heads: spec.heads,
            head_dim: spec.head_dim,
            round: self.pass.weights.dtype,
            inverse: false,
        })
    }

    fn linear(
        &mut self,
        grad: &B::Floats,
        linear: &Linear<'_, B>,
        rows: usize,
        out: &mut B::Floats,
    ) -> Result<(), OpError> {
        self.pass.backend.linear_grad(LinearGrad {
            grad,
            weight: linear.weight.clone(),
            out: &mut *out,
            rows,
        })?;
        let Some(adapters) = linear.adapters_for(&self.pass.adapted) else {
            return Ok(());
        };
        self.pass.backend.adapt_grad(AdaptGrad {
            grad,
            adapters,
            of_rows: &self.pass.adapted,
            middle: &mut *self.pass.rank,
            out,
        })
    }

    fn norm(
        &mut self,
        x: &B::Floats,
        weights: &NormWeights<B>,
        grad: &mut B::Floats,
    ) -> Result<(), OpError> {
        let spec = self.pass.spec;
        self.pass.backend.norm_grad(NormGrad {
            x,
            weight: &weights.scale,
            grad,
            rows: self.pass.tokens,
            width: spec.hidden,
            eps: spec.norm.eps(),
            centered: matches!(spec.norm, Norm::Layer { .. }),
        })
    }

    /// Sums what the ranks have of gradients of the hidden states, in one exchange.
    fn sum(&mut self, parts: &mut [&mut B::Floats]) -> Result<(), OpError> {
        self.pass.backend.all_reduce(parts, self.pass.tokens * self.pass.spec.hidden)
    }

    fn add(&mut self, x: &mut B::Floats, y: &B::Floats) -> Result<(), OpError> {
        self.pass.backend.add(Add {
            x,
            y,
            len: self.pass.tokens * self.pass.spec.hidden,
            round: DType::F32,
        })
    }
}
