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

use super::forward::{BlockInput, Heads, Middle as Forward, Pass, Workspace, adapters_of, prepare};
use super::kept::Kept;
use super::spec::{BlockSpec, Mlp, Norm, Position, Qkv, Residual};
use super::weights::{BlockWeights, GatedWeights, Linear, MlpWeights, NormWeights, QkvWeights};

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

/// Intermediate results of backward, kept from piece to piece.
pub struct GradientWork<B: Backend> {
    forward: Workspace<B>,
    x: B::Buffer,
    h: B::Buffer,
    fed: B::Buffer,
    branch: B::Buffer,
    aside: B::Buffer,
    heads: HeadGradients<B>,
    middle: Middle<B>,
}

struct HeadGradients<B: Backend> {
    attended: B::Buffer,
    /// Of the scores of each query, as attention tells it.
    logsum: B::Buffer,
    q: B::Buffer,
    k: B::Buffer,
    v: B::Buffer,
    fused: B::Buffer,
    part: B::Buffer,
}

struct Middle<B: Backend> {
    grad: B::Buffer,
    weights: B::Buffer,
    logits: B::Buffer,
    shares: B::Buffer,
    part: B::Buffer,
}

impl<B: Backend> GradientWork<B> {
    /// An empty workspace; one serves any number of blocks and specs.
    pub fn new(backend: &mut B) -> Self {
        let forward = Workspace::new(backend);
        let mut empty = || backend.buffer(0);
        GradientWork {
            forward,
            x: empty(),
            h: empty(),
            fed: empty(),
            branch: empty(),
            aside: empty(),
            heads: HeadGradients {
                attended: empty(),
                logsum: empty(),
                q: empty(),
                k: empty(),
                v: empty(),
                fused: empty(),
                part: empty(),
            },
            middle: Middle {
                grad: empty(),
                weights: empty(),
                logits: empty(),
                shares: empty(),
                part: empty(),
            },
        }
    }

    /// Makes all buffers large enough for so many tokens.
    pub(crate) fn grow(
        &mut self,
        backend: &mut B,
        spec: &BlockSpec,
        tokens: usize,
        largest_rank: usize,
    ) {
        self.forward.grow(backend, spec, tokens, largest_rank);
        let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let only = |needed: bool, width: usize| if needed { width } else { 0 };
        let (heads, middle, wide) = (&mut self.heads, &mut self.middle, spec.mlp.intermediate());
        let (experts, chosen) = match &spec.mlp {
            Mlp::Experts(mlp) => (mlp.experts.len(), mlp.chosen),
            Mlp::Gated(_) | Mlp::Plain(_) => (0, 1),
        };
        let is_plain = matches!(spec.mlp, Mlp::Plain(_));
        let is_fused = matches!(spec.qkv, Qkv::Fused(_));
        for (buffer, width) in [
            (&mut self.x, spec.hidden),
            (&mut self.h, spec.hidden),
            (&mut self.fed, spec.hidden),
            (&mut self.branch, spec.hidden),
            (&mut self.aside, spec.hidden),
            (&mut heads.attended, q),
            (&mut heads.logsum, spec.heads),
            (&mut heads.q, q),
            (&mut heads.k, kv),
            (&mut heads.v, kv),
            (&mut heads.fused, only(is_fused, q + 2 * kv)),
            (&mut heads.part, only(!is_fused, spec.hidden)),
            (&mut middle.grad, chosen * wide),
            (&mut middle.weights, experts),
            (&mut middle.logits, experts),
            (&mut middle.shares, experts),
            (&mut middle.part, only(!is_plain, chosen * spec.hidden)),
        ] {
            backend.grow(buffer, tokens * width);
        }
    }
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

    /// Gradient of attention: `grad` of its output, `out` of its input `fed`. Queries are where they were kept, or in `heads`, and so is, if
    /// it `is_known`, what attention gave.
    fn attention(
        &mut self,
        grad: &B::Floats,
        (queries, heads, is_known): (Option<&B::Floats>, &mut Heads<B>, bool),
        fed: &B::Floats,
        work: &mut HeadGradients<B>,
        out: &mut B::Floats,
        pages: &mut B::Pages<'_>,
    ) -> Result<(), OpError> {
        let (spec, weights, tokens) = (self.pass.spec, self.pass.weights, self.pass.tokens);
        self.linear(grad, &weights.o, tokens, &mut work.attended)?;
        let (divisor, alibi) = (self.pass.divisor(), self.pass.alibi());
        self.pass.backend.attention_grad(AttentionGrad {
            q: queries.unwrap_or(&*heads.q),
            grad: &work.attended,
            pages,
            rows: self.pass.rows,
            starts: self.sums.starts,
            group: spec.group(),
            divisor,
            alibi,
            window: spec.window.unwrap_or(usize::MAX),
            known: is_known.then_some(Known {
                out: &heads.attended,
                logsum: &work.logsum,
            }),
            q_grad: &mut work.q,
            k_grad: &mut *self.sums.keys,
            v_grad: &mut *self.sums.values,
        })?;
        let positions = self.positions();
        for (sums, part) in [
            (&*self.sums.keys, &mut work.k),
            (&*self.sums.values, &mut work.v),
        ] {
            self.pass.backend.gather(Gather {
                x: sums,
                index: &positions,
                width: spec.kv_heads * spec.head_dim,
                out: part,
            })?;
        }
        self.rotate_back(heads, work)?;
        self.norm_heads(fed, heads, work)?;
        self.project(work, out)
    }

    /// Rows of the sums that are the tokens of this piece.
    fn positions(&self) -> Vec<u32> {
        let rows = self.pass.rows.iter().zip(self.sums.starts);
        rows.flat_map(|(row, start)| {
            let first = start + row.prefix;
            (first..first + row.tokens).map(|p| u32::try_from(p).unwrap_or(u32::MAX))
        })
        .collect()
    }

    fn rotate_back(
        &mut self,
        heads: &Heads<B>,
        work: &mut HeadGradients<B>,
    ) -> Result<(), OpError> {
        let Position::Rope { .. } = self.pass.spec.position else {
            return Ok(());
        };
        for (x, count) in [
            (&mut work.q, self.pass.spec.heads),
            (&mut work.k, self.pass.spec.kv_heads),
        ] {
            self.pass.backend.rope(Rope {
                x,
                table: &heads.table,
                tokens: self.pass.tokens,
                heads: count,
                head_dim: self.pass.spec.head_dim,
                round: DType::F32,
                inverse: true,
            })?;
        }
        Ok(())
    }

    /// Through the norms of the heads, whose inputs are computed once more.
    fn norm_heads(
        &mut self,
        fed: &B::Floats,
        heads: &mut Heads<B>,
        work: &mut HeadGradients<B>,
    ) -> Result<(), OpError> {
        let (spec, tokens) = (self.pass.spec, self.pass.tokens);
        let Some([q_scale, k_scale]) = &self.pass.weights.head_norms else {
            return Ok(());
        };
        match &self.pass.weights.qkv {
            QkvWeights::Separate([q, k, _]) => {
                let outs = [&mut *heads.q, &mut *heads.k];
                self.pass.products(fed, [q, k], tokens, outs)?;
            }
            QkvWeights::Fused(_) => self.pass.project(fed, heads)?,
        }
        for (x, weight, grad, count) in [
            (&heads.q, q_scale, &mut work.q, spec.heads),
            (&heads.k, k_scale, &mut work.k, spec.kv_heads),
        ] {
            self.pass.backend.norm_grad(NormGrad {
                x,
                weight,
                grad,
                rows: tokens * count,
                width: spec.head_dim,
                eps: spec.norm.eps(),
                centered: false,
            })?;
        }
        Ok(())
    }

    fn project(&mut self, work: &mut HeadGradients<B>, out: &mut B::Floats) -> Result<(), OpError> {
        let (spec, tokens) = (self.pass.spec, self.pass.tokens);
        match &self.pass.weights.qkv {
            QkvWeights::Separate([q, k, v]) => {
                self.linear(&work.q, q, tokens, out)?;
                self.linear(&work.k, k, tokens, &mut work.part)?;
                self.add(out, &work.part)?;
                self.linear(&work.v, v, tokens, &mut work.part)?;
                self.add(out, &work.part)
            }
            QkvWeights::Fused(qkv) => {
                self.pass.backend.join_qkv(JoinQkv {
                    fused: &mut work.fused,
                    q: &work.q,
                    k: &work.k,
                    v: &work.v,
                    tokens,
                    kv_heads: spec.kv_heads,
                    group: spec.group(),
                    head_dim: spec.head_dim,
                })?;
                self.linear(&work.fused, qkv, tokens, out)
            }
        }
    }

    /// Gradient of the MLP: `grad` of its output, `out` of its input `fed`. What its activation takes is `given`, or computed of `fed` into `of`.
    fn mlp(
        &mut self,
        fed: &B::Floats,
        grad: &B::Floats,
        given: [Option<&mut B::Floats>; 2],
        (of, work): (&mut Forward<B>, &mut Middle<B>),
        out: &mut B::Floats,
    ) -> Result<(), OpError> {
        let (weights, tokens) = (self.pass.weights, self.pass.tokens);
        match &weights.mlp {
            MlpWeights::Gated(mlp) => {
                let [gate, up] = match given {
                    [Some(gate), Some(up)] => [gate, up],
                    _ => {
                        let outs = [&mut *of.gate, &mut *of.up];
                        self.pass
                            .products(fed, [&mlp.gate, &mlp.up], tokens, outs)?;
                        [&mut *of.gate, &mut *of.up]
                    }
                };
                self.linear(grad, &mlp.down, tokens, &mut work.grad)?;
                self.gated_input(mlp, tokens, [&mut *gate, up], &work.grad, &mut work.part)?;
                self.linear(gate, &mlp.gate, tokens, out)?;
                self.add(out, &work.part)
            }
            MlpWeights::Plain {
                activation,
                up,
                down,
            } => {
                let [given, _] = given;
                let x = match given {
                    Some(given) => given,
                    None => {
                        self.pass.linear(fed, up, tokens, &mut of.gate)?;
                        &mut *of.gate
                    }
                };
                self.linear(grad, down, tokens, &mut work.grad)?;
                self.pass.backend.gelu_grad(GeluGrad {
                    x,
                    grad: &mut work.grad,
                    len: tokens * self.pass.spec.mlp.intermediate(),
                    kind: *activation,
                })?;
                self.linear(&work.grad, up, tokens, out)
            }
            MlpWeights::Experts {
                router,
                chosen,
                experts,
                together,
                adapters,
            } => {
                self.pass.linear(fed, router, tokens, &mut work.logits)?;
                let pass = &mut self.pass;
                let adapters = adapters_of(experts, adapters, &pass.adapted, &mut *pass.rank);
                pass.backend.mixture_grad(MixtureGrad {
                    x: fed,
                    grad,
                    logits: &mut work.logits,
                    experts: together,
                    adapters,
                    tokens,
                    chosen: *chosen,
                    room: ExpertsGradRoom {
                        gate: &mut of.gate,
                        up: &mut of.up,
                        grad: &mut work.grad,
                        given: [&mut of.given, &mut work.part],
                        weights: &mut work.weights,
                        shares: &mut work.shares,
                        lists: &mut of.lists,
                    },
                    out,
                    round: weights.dtype,
                })?;
                self.linear(&work.logits, router, tokens, &mut work.part)?;
                self.add(out, &work.part)
            }
        }
    }

    /// Turns gate and up into their gradients, `grad` being that of their product, and that of up into the input's part of it.
    fn gated_input(
        &mut self,
        mlp: &GatedWeights<'_, B>,
        rows: usize,
        [gate, up]: [&mut B::Floats; 2],
        grad: &B::Floats,
        part: &mut B::Floats,
    ) -> Result<(), OpError> {
        self.pass.backend.silu_mul_grad(SiluMulGrad {
            gate,
            up: &mut *up,
            grad,
            len: rows * self.pass.spec.mlp.intermediate(),
        })?;
        self.linear(up, &mlp.up, rows, part)
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
