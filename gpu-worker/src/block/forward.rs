//! The forward pass of one block, written once over a spec and a backend.
//!
//! Hidden states enter and leave as f32 values that the block dtype holds exactly, so a chain gives the same bits
//! however it is cut into workers. In between, results are rounded to the block dtype wherever transformers rounds them:
//! in bfloat16 one rounding more or less moves the output by 5e-3, as much as bfloat16 itself.
//!
//! A pass without a cache is a step from prefix 0 over pages of the caller's own.

use kernels::ops::{
    Add, Attention, KvAppend, OpError, PromptAdd, Rmsnorm, Rope, RopeTable, SiluMul,
};
use kernels::{Backend, StepRow, kv::total_tokens, ops};

use super::spec::{BlockSpec, Mlp, Norm, Position, Residual};
use super::weights::{BlockWeights, Linear};

/// What goes through a block besides the hidden states.
#[derive(Clone, Copy, Debug)]
pub struct BlockInput<'a> {
    /// The batch; its new tokens lie one after the other in the hidden states.
    pub rows: &'a [StepRow<'a>],
    /// Deep prompts of this block.
    pub prompts: &'a [PromptPart<'a>],
}

/// A piece of a deep prompt, added to the hidden states before the block.
#[derive(Clone, Copy, Debug)]
pub struct PromptPart<'a> {
    /// First element of the hidden states (not: token) that it is added to.
    pub offset: usize,
    /// Its values.
    pub values: &'a [f32],
}

/// Intermediate results, kept from step to step: a step allocates only if it is larger than all before it.
pub struct Workspace<B: Backend> {
    normed: B::Buffer,
    q: B::Buffer,
    k: B::Buffer,
    v: B::Buffer,
    attended: B::Buffer,
    branch: B::Buffer,
    gate: B::Buffer,
    up: B::Buffer,
    table: B::Buffer,
}

impl<B: Backend> Workspace<B> {
    /// An empty workspace; one serves any number of blocks and specs.
    pub fn new(backend: &mut B) -> Self {
        let [normed, q, k, v, attended, branch, gate, up, table] =
            [(); 9].map(|()| backend.buffer(0));
        Workspace {
            normed,
            q,
            k,
            v,
            attended,
            branch,
            gate,
            up,
            table,
        }
    }

    fn grow(&mut self, backend: &mut B, spec: &BlockSpec, tokens: usize) {
        let Mlp::GatedSilu(mlp) = spec.mlp;
        let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        for (buffer, width) in [
            (&mut self.normed, spec.hidden),
            (&mut self.q, q),
            (&mut self.k, kv),
            (&mut self.v, kv),
            (&mut self.attended, q),
            (&mut self.branch, spec.hidden),
            (&mut self.gate, mlp.intermediate),
            (&mut self.up, mlp.intermediate),
            (&mut self.table, spec.head_dim),
        ] {
            backend.grow(buffer, tokens * width);
        }
    }
}

/// Runs the new tokens of `input.rows` through a block. `hidden` `[tokens, hidden]` is replaced by the block's output; keys
/// and values of the new tokens are written to `pages`, which hold those of the prefixes.
///
/// # Errors
/// [`OpError`] when hidden states, prompts or page tables are too short or a page does not exist; `hidden` and the new slots of
/// `pages` are then unspecified.
pub fn forward<B: Backend>(
    backend: &mut B,
    spec: &BlockSpec,
    weights: &BlockWeights<'_, B>,
    work: &mut Workspace<B>,
    input: BlockInput<'_>,
    hidden: &mut B::Floats,
    pages: &mut B::Pages<'_>,
) -> Result<(), OpError> {
    work.grow(backend, spec, total_tokens(input.rows));
    let mut pass = Pass {
        backend,
        spec,
        weights,
        rows: input.rows,
        tokens: total_tokens(input.rows),
    };
    for part in input.prompts {
        let prompt = PromptAdd {
            x: &mut *hidden,
            offset: part.offset,
            prompt: part.values,
            round: weights.dtype,
        };
        pass.backend.prompt_add(prompt)?;
    }
    match spec.residual {
        Residual::Sequential => {
            pass.norm(hidden, &weights.attention_norm, &mut work.normed)?;
            pass.attention(work, pages)?;
            pass.add(hidden, &work.branch)?;
            pass.norm(hidden, &weights.mlp_norm, &mut work.normed)?;
            pass.mlp(work)?;
            pass.add(hidden, &work.branch)
        }
    }
}

/// What all parts of one pass share.
struct Pass<'a, 'w, B: Backend> {
    backend: &'a mut B,
    spec: &'a BlockSpec,
    weights: &'a BlockWeights<'w, B>,
    rows: &'a [StepRow<'a>],
    tokens: usize,
}

impl<B: Backend> Pass<'_, '_, B> {
    /// `work.normed` to `work.branch`.
    fn attention(
        &mut self,
        work: &mut Workspace<B>,
        pages: &mut B::Pages<'_>,
    ) -> Result<(), OpError> {
        let Workspace {
            normed,
            q,
            k,
            v,
            attended,
            branch,
            table,
            ..
        } = work;
        let weights = self.weights;
        self.linear(normed, &weights.q, q)?;
        self.linear(normed, &weights.k, k)?;
        self.linear(normed, &weights.v, v)?;
        self.rotate(q, k, table)?;
        self.backend.kv_append(KvAppend {
            keys: k,
            values: v,
            rows: self.rows,
            pages,
        })?;
        self.backend.attention(Attention {
            q,
            pages,
            rows: self.rows,
            group: self.spec.group(),
            divisor: (self.spec.head_dim as f32).sqrt(),
            out: attended,
        })?;
        self.linear(attended, &weights.o, branch)
    }

    fn rotate(
        &mut self,
        q: &mut B::Floats,
        k: &mut B::Floats,
        table: &mut B::Floats,
    ) -> Result<(), OpError> {
        let Position::Rope {
            inverse_frequencies,
            ..
        } = &self.spec.position;
        let (tokens, head_dim, round) = (self.tokens, self.spec.head_dim, self.weights.dtype);
        self.backend.rope_table(RopeTable {
            rows: self.rows,
            inverse_frequencies,
            out: &mut *table,
            round,
        })?;
        for (x, heads) in [(q, self.spec.heads), (k, self.spec.kv_heads)] {
            self.backend.rope(Rope {
                x,
                table: &*table,
                tokens,
                heads,
                head_dim,
                round,
            })?;
        }
        Ok(())
    }

    /// `work.normed` to `work.branch`.
    fn mlp(&mut self, work: &mut Workspace<B>) -> Result<(), OpError> {
        let Workspace {
            normed,
            branch,
            gate,
            up,
            ..
        } = work;
        let weights = self.weights;
        let Mlp::GatedSilu(mlp) = self.spec.mlp;
        self.linear(normed, &weights.gate, gate)?;
        self.linear(normed, &weights.up, up)?;
        self.backend.silu_mul(SiluMul {
            gate,
            up,
            len: self.tokens * mlp.intermediate,
            round: weights.dtype,
        })?;
        self.linear(gate, &weights.down, branch)
    }

    fn norm(
        &mut self,
        x: &B::Floats,
        weight: &B::Floats,
        out: &mut B::Floats,
    ) -> Result<(), OpError> {
        let Norm::Rms { eps } = self.spec.norm;
        let (rows, width, round) = (self.tokens, self.spec.hidden, self.weights.dtype);
        self.backend.rmsnorm(Rmsnorm {
            x,
            weight,
            out,
            rows,
            width,
            eps,
            round,
        })
    }

    fn linear(
        &mut self,
        x: &B::Floats,
        linear: &Linear<'_, B>,
        out: &mut B::Floats,
    ) -> Result<(), OpError> {
        let (weight, bias) = (linear.weight.clone(), linear.bias.as_deref());
        self.backend.linear(ops::Linear {
            x,
            weight,
            bias,
            out,
            rows: self.tokens,
        })
    }

    fn add(&mut self, x: &mut B::Floats, y: &B::Floats) -> Result<(), OpError> {
        let round = self.weights.dtype;
        self.backend.add(Add {
            x,
            y,
            len: self.tokens * self.spec.hidden,
            round,
        })
    }
}
