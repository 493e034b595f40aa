//! The gradient of one block with respect to its input, written once over a spec and a backend. Weights are frozen.
//!
//! A sequence is taken in pieces from its last to its first. What forward did not leave of a piece ([`Kept`]) is computed again from
//! the block's input, over pages that hold the keys and values of the whole sequence; what a piece adds to the gradients of earlier
//! keys and values is summed in [`Sums`], and is whole for the positions of a piece once that piece is taken. Memory is thus bounded by the
//! piece, the sums and the pages, whatever the length. Gradients are f32 throughout.
//!
//! ```text
//! Sequential  h = x + A(n(x)), y = h + M(m(h))          dh = g + m'(M'(g)),             dx = dh + n'(A'(dh))
//! Normed      a = n(x), h = a + A(a), b = m(h), y = b + M(b)   dh = m'(g + M'(g)),      dx = n'(dh + A'(dh))
//! Parallel    y = x + A(n(x)) + M(m(x))                 dx = g + n'(A'(g)) + m'(M'(g))
//! ```

use kernels::kv::total_tokens;
use kernels::ops::{
    AdaptGrad, Add, AttentionGrad, ExpertsGradRoom, Gather, GeluGrad, JoinQkv, Known, LinearGrad,
    MixtureGrad, NormGrad, OpError, Rope, SiluMulGrad,
};
use kernels::{Backend, DType};

use super::forward::{BlockInput, Heads, Middle as Forward, Pass, adapters_of, prepare};
use super::kept::Kept;
use super::spec::{BlockSpec, Norm, Position, Residual};
use super::weights::{BlockWeights, GatedWeights, Linear, MlpWeights, NormWeights, QkvWeights};

mod attention;
mod mlp;
mod workspace;

pub use workspace::GradientWork;
use workspace::{HeadGradients, Middle};

/// Gradients of the keys (rotated) and values of whole sequences, `[positions, kv_heads, head_dim]` each. Zero before the last
/// piece of a block is taken.
pub struct Sums<'a, B: Backend> {
    /// Of the keys.
    pub keys: &'a mut B::Floats,
    /// Of the values.
    pub values: &'a mut B::Floats,
    /// Where position 0 of each row lies.
    pub starts: &'a [usize],
}

/// Replaces `gradient` `[tokens, hidden]`, that of the output of the tokens of `input.rows`, by that of their input, which is also
/// that of the deep prompts where there are any. `x` is the input before prompts, `pages` hold keys and values of the whole rows, as
/// [`forward`](super::forward) or [`keys`](super::keys) put them there; what was `kept` is used up.
///
/// # Errors
/// [`OpError`] when sizes do not fit; `gradient` and `sums` are then unspecified.
#[allow(
    clippy::too_many_arguments,
    reason = "forward's, what it left, and what is summed"
)]
pub fn backward<B: Backend>(
    backend: &mut B,
    spec: &BlockSpec,
    weights: &BlockWeights<'_, B>,
    work: &mut GradientWork<B>,
    input: BlockInput<'_>,
    x: &B::Floats,
    gradient: &mut B::Floats,
    sums: Sums<'_, B>,
    kept: Kept<'_, B::Floats>,
    pages: &mut B::Pages<'_>,
) -> Result<(), OpError> {
    let tokens = total_tokens(input.rows);
    work.grow(backend, spec, tokens, weights.largest_rank);
    let (step, angles) = ((input.rows, input.lengths), &mut work.forward);
    prepare(backend, spec, weights.dtype, angles, step, input.rows)?;
    let GradientWork {
        forward,
        x: before,
        h,
        fed,
        branch,
        aside,
        heads,
        middle,
    } = work;
    let pass = Pass::new(backend, spec, weights, input, &mut forward.rank);
    let mut back = Backward { pass, sums };
    back.pass.backend.copy(x, before, tokens * spec.hidden)?;
    back.pass.prompts(input.prompts, before)?;
    let (normed, attended) = (&mut forward.normed, &mut forward.branch);
    back.pass.norm(before, &weights.attention_norm, normed)?;
    let (queries, between) = (kept.queries.map(|q| &*q), kept.between);
    let is_known = between.is_none() && spec.residual != Residual::Parallel;
    if queries.is_none() {
        back.queries(normed, &mut forward.heads)?;
    }
    let is_fed = kept.gate.is_none();
    let given = [kept.gate, kept.up];
    let mlp_norm = weights.mlp_norm.as_ref();
    match spec.residual {
        Residual::Sequential => {
            let norm = mlp_norm.ok_or(NO_NORM)?;
            let h = match between {
                Some(h) => {
                    back.feed(is_fed, h, fed)?;
                    h
                }
                None => {
                    back.pass.backend.copy(before, h, tokens * spec.hidden)?;
                    let logsum = &mut heads.logsum;
                    back.attend(queries, &mut forward.heads, (attended, logsum), pages)?;
                    back.pass.add_mlp_norm(h, attended, fed)?;
                    &mut **h
                }
            };
            let work = (&mut forward.middle, &mut *middle);
            back.mlp(fed, gradient, given, work, branch)?;
            back.norm(h, norm, branch)?;
            back.add(gradient, branch)?;
            let own = &mut forward.heads;
            let own = (queries, own, is_known);
            back.attention(gradient, own, normed, heads, branch, pages)?;
            back.norm(before, &weights.attention_norm, branch)?;
            back.add(gradient, branch)
        }
        Residual::Normed => {
            let norm = mlp_norm.ok_or(NO_NORM)?;
            let h = match between {
                Some(h) => {
                    back.feed(is_fed, h, fed)?;
                    h
                }
                None => {
                    // h = a + A(a), where a is the norm.
                    back.pass.backend.copy(normed, h, tokens * spec.hidden)?;
                    let logsum = &mut heads.logsum;
                    back.attend(queries, &mut forward.heads, (attended, logsum), pages)?;
                    back.pass.add_mlp_norm(h, attended, fed)?;
                    &mut **h
                }
            };
            let work = (&mut forward.middle, &mut *middle);
            back.mlp(fed, gradient, given, work, branch)?;
            back.add(gradient, branch)?;
            back.norm(h, norm, gradient)?;
            let own = &mut forward.heads;
            let own = (queries, own, is_known);
            back.attention(gradient, own, normed, heads, branch, pages)?;
            back.add(gradient, branch)?;
            back.norm(before, &weights.attention_norm, gradient)
        }
        Residual::Parallel => {
            let fed = match mlp_norm {
                Some(norm) => {
                    back.pass.norm(before, norm, fed)?;
                    &*fed
                }
                None => &*normed,
            };
            let work = (&mut forward.middle, &mut *middle);
            back.mlp(fed, gradient, given, work, aside)?;
            let own = &mut forward.heads;
            let own = (queries, own, is_known);
            back.attention(gradient, own, normed, heads, branch, pages)?;
            match mlp_norm {
                Some(norm) => back.norm(before, norm, aside)?,
                None => {
                    back.add(branch, aside)?;
                }
            }
            back.norm(before, &weights.attention_norm, branch)?;
            back.add(gradient, branch)?;
            match mlp_norm {
                Some(_) => back.add(gradient, aside),
                None => Ok(()),
            }
        }
    }
}

const NO_NORM: OpError = OpError::Shape {
    op: "backward",
    what: "the MLP of a block that is not parallel has a norm",
};

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

    /// The output of attention, once more, and the logarithms that its gradient takes.
    fn attend(
        &mut self,
        queries: Option<&B::Floats>,
        heads: &mut Heads<B>,
        (out, logsum): (&mut B::Floats, &mut B::Floats),
        pages: &mut B::Pages<'_>,
    ) -> Result<(), OpError> {
        let Heads { q, attended, .. } = heads;
        let queries = queries.unwrap_or(&**q);
        self.pass
            .attend_with(queries, (attended, Some(logsum)), out, pages)
    }

    /// What the MLP is fed, if it is needed.
    fn feed(&mut self, is_fed: bool, h: &B::Floats, fed: &mut B::Floats) -> Result<(), OpError> {
        match is_fed {
            true => self.pass.mlp_norm(h, fed),
            false => Ok(()),
        }
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

    fn add(&mut self, x: &mut B::Floats, y: &B::Floats) -> Result<(), OpError> {
        self.pass.backend.add(Add {
            x,
            y,
            len: self.pass.tokens * self.pass.spec.hidden,
            round: DType::F32,
        })
    }
}
