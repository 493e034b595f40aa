//! The forward pass of one block, written once over a spec and a backend.
//!
//! Hidden states enter and leave as f32 values that the block dtype holds exactly, so a chain gives
//! the same bits however it is cut into workers. In between, results are rounded to the block dtype
//! wherever transformers rounds them: in bfloat16 one rounding more or less moves the output by
//! 5e-3, as much as bfloat16 itself.
//!
//! A pass without a cache is a step from prefix 0 over pages of the caller's own.
//!
//! A rank of a group runs the block of its shard: its heads, its columns of the MLP. Hidden states,
//! norms and routers are whole on every rank. Products with `o` and `down`, which are cut by inputs,
//! are summed over the ranks before anything rounds them ([`Pass::whole`]): the halves of a parallel
//! block at once, experts one by one. In a group of one nothing is exchanged.

use kernels::ops::{
    Adapt, Add, AddNorm, Alibi, AppendAttention, Attention, ExpertAdapters, Gated, Gelu, KvAppend,
    Layernorm, Mixture, MixtureWorkspace, NormedProducts, OpError, Product, Products, PromptAdd,
    RankInputs, Rmsnorm, RopeAppend, RopeTable, SiluMul, SplitQkv, SumPlace,
};
use kernels::{Backend, DType, StepRow, kv::total_tokens, ops};
use model::{BlockSpec, Position, Residual};

use super::activations::SavedActivations;
use super::adapters::adapted;
use super::rope;
use super::weights::{BlockWeights, GatedWeights, Linear, MlpWeights, NormWeights, QkvWeights};

mod block_pass;
mod keys;
mod mlp;
mod norms;
mod products;
mod workspace;

use block_pass::Joined;
pub use keys::keys;
pub(super) use mlp::adapters_of;
use products::{CutProduct, product};
pub use workspace::Workspace;
pub(super) use workspace::{Heads, Middle};

/// A piece of a deep prompt, added to the hidden states before the block.
#[derive(Clone, Copy, Debug)]
pub struct PromptPart<'a> {
    /// First element of the hidden states (not: token) that it is added to.
    pub offset: usize,
    pub values: &'a [f32],
}

/// Puts the angles of a step into `work`, for [`forward_joined`]: they are the same for all blocks.
/// `rows` are the step. The operations are launched for `launch_rows`, which differ from `rows` in
/// recorded steps alone.
///
/// # Errors
/// [`OpError`] when the device fails.
pub fn prepare<B: Backend>(
    backend: &mut B,
    spec: &BlockSpec,
    dtype: DType,
    work: &mut Workspace<B>,
    rows: &[StepRow<'_>],
    launch_rows: &[StepRow<'_>],
) -> Result<(), OpError> {
    let Position::Rope { inverse_frequencies, theta, scaling } = &spec.position else {
        return Ok(());
    };
    let table = &mut work.heads.table;
    backend.grow(table, total_tokens(launch_rows) * spec.head_dim);
    match rope::table(scaling, *theta, spec.head_dim, rows, dtype) {
        Some(own) => backend.upload(&own, table),
        None => backend.rope_table(RopeTable {
            rows: launch_rows,
            inverse_frequencies,
            out: table,
            round: dtype,
        }),
    }
}

/// Adds the deep prompts of a block to the hidden states that go into it next, each sum rounded to
/// the block dtype.
///
/// # Errors
/// [`OpError`] when a part lies outside `hidden`, or the device fails.
pub fn add_prompts<B: Backend>(
    backend: &mut B,
    prompts: &[PromptPart<'_>],
    hidden: &mut B::Floats,
    round: DType,
) -> Result<(), OpError> {
    prompts.iter().try_for_each(|part| {
        let (offset, prompt) = (part.offset, part.values);
        backend.prompt_add(PromptAdd { x: &mut *hidden, offset, prompt, round })
    })
}

/// Runs the new tokens of `rows`, which lie one after the other in `hidden` `[tokens, hidden]`,
/// through a block. `hidden`, to which deep prompts were [added](add_prompts), is replaced by the
/// block's output; keys and values of the new tokens are written to `pages`, which hold those of the
/// prefixes.
///
/// # Errors
/// [`OpError`] when hidden states or page tables are too short or a page does not exist; `hidden`
/// and the new slots of `pages` are then unspecified.
pub fn forward<B: Backend>(
    backend: &mut B,
    spec: &BlockSpec,
    weights: &BlockWeights<'_, B>,
    work: &mut Workspace<B>,
    rows: &[StepRow<'_>],
    hidden: &mut B::Floats,
    pages: &mut B::Pages<'_>,
) -> Result<(), OpError> {
    let saved = SavedActivations::default();
    forward_saving(backend, spec, weights, work, rows, hidden, pages, saved)
}

/// [`forward`], which saves activations for [`backward`](super::backward).
///
/// # Errors
/// Those of [`forward`].
#[allow(clippy::too_many_arguments, reason = "forward's, and what it leaves")]
pub fn forward_saving<B: Backend>(
    backend: &mut B,
    spec: &BlockSpec,
    weights: &BlockWeights<'_, B>,
    work: &mut Workspace<B>,
    rows: &[StepRow<'_>],
    hidden: &mut B::Floats,
    pages: &mut B::Pages<'_>,
    saved: SavedActivations<'_, B::Floats>,
) -> Result<(), OpError> {
    let mut pass = begin(backend, spec, weights, work, rows, hidden)?;
    pass.halves(hidden, pages, saved)?;
    pass.pass.add(hidden, pass.branch)
}

/// A pass whose angles and first norm are made.
fn begin<'a, 'w, B: Backend>(
    backend: &'a mut B,
    spec: &'a BlockSpec,
    weights: &'a BlockWeights<'w, B>,
    work: &'a mut Workspace<B>,
    rows: &'a [StepRow<'a>],
    hidden: &B::Floats,
) -> Result<Joined<'a, 'w, B>, OpError> {
    prepare(backend, spec, weights.dtype, work, rows, rows)?;
    let mut pass = Joined::new(backend, spec, weights, work, rows);
    pass.pass.norm(hidden, &weights.attention_norm, pass.normed)?;
    Ok(pass)
}

/// [`forward`] of a block in a run of blocks after [`prepare`] for the same rows:
/// the last sum of the block before, which left its summand in `work`, is made with the first norm
/// of this one, and that of this one is left to the next. [`open_run`] goes before the first block,
/// [`close_run`] after the last; the bits are those of the blocks one by one. `work` was made ready
/// by [`Workspace::grow_for_runs`].
///
/// # Errors
/// Those of [`forward`].
pub fn forward_joined<B: Backend>(
    backend: &mut B,
    spec: &BlockSpec,
    weights: &BlockWeights<'_, B>,
    work: &mut Workspace<B>,
    rows: &[StepRow<'_>],
    hidden: &mut B::Floats,
    pages: &mut B::Pages<'_>,
) -> Result<(), OpError> {
    Joined::new(backend, spec, weights, work, rows).step(hidden, pages)
}

/// Makes `work` ready for the first block of a run over `len` values of hidden states: `nothing`
/// holds as many negative zeros, which change no number that they are added to.
///
/// # Errors
/// When there are not so many, or the device fails.
pub fn open_run<B: Backend>(
    backend: &mut B,
    work: &mut Workspace<B>,
    nothing: &B::Floats,
    len: usize,
) -> Result<(), OpError> {
    backend.copy(nothing, &mut work.branch, len)
}

/// The last sum of a run.
///
/// # Errors
/// When `hidden` is shorter than `len`, or the device fails.
pub fn close_run<B: Backend>(
    backend: &mut B,
    work: &Workspace<B>,
    hidden: &mut B::Floats,
    len: usize,
    round: DType,
) -> Result<(), OpError> {
    backend.add(Add { x: hidden, y: &work.branch, len, round })
}

/// What all parts of one pass share.
pub(super) struct Pass<'a, 'w, B: Backend> {
    pub(super) backend: &'a mut B,
    pub(super) spec: &'a BlockSpec,
    pub(super) weights: &'a BlockWeights<'w, B>,
    pub(super) rows: &'a [StepRow<'a>],
    pub(super) tokens: usize,
    /// The adapter of each row of the matrices at hand; empty when none has one.
    pub(super) adapted: Vec<Option<u32>>,
    pub(super) rank: &'a mut B::Floats,
}

impl<'a, 'w, B: Backend> Pass<'a, 'w, B> {
    pub(super) fn new(
        backend: &'a mut B,
        spec: &'a BlockSpec,
        weights: &'a BlockWeights<'w, B>,
        rows: &'a [StepRow<'a>],
        rank: &'a mut B::Floats,
    ) -> Self {
        Pass {
            backend,
            spec,
            weights,
            rows,
            tokens: total_tokens(rows),
            adapted: adapted(rows),
            rank,
        }
    }

    /// Queries, keys and values of `x` `[tokens, hidden]`, before rotation.
    pub(super) fn heads(&mut self, x: &B::Floats, heads: &mut Heads<B>) -> Result<(), OpError> {
        self.project(x, heads)?;
        self.norm_queries(heads)?;
        self.norm_keys(heads)
    }

    /// [`heads`](Self::heads) of the norm of `x` and `branch`, whose sum goes to `x` or `beside`.
    fn heads_of_sum(
        &mut self,
        x: &mut B::Floats,
        branch: &B::Floats,
        beside: &mut B::Floats,
        normed: &mut B::Floats,
        heads: &mut Heads<B>,
    ) -> Result<SumPlace, OpError> {
        let norm = &self.weights.attention_norm;
        let place = match &self.weights.qkv {
            QkvWeights::Separate(qkv) if !self.is_adapted(qkv) => {
                let [q, k, v] = qkv;
                let mut parts = [
                    product(q, &mut *heads.q),
                    product(k, &mut *heads.k),
                    product(v, &mut *heads.v),
                ];
                let norm = self.norm_of_sum(x, branch, norm, normed);
                let (sum, parts, is_gated) = (beside, &mut parts[..], false);
                self.backend.normed_products(NormedProducts { norm, sum, parts, is_gated })?
            }
            _ => {
                self.add_norm(x, branch, norm, normed)?;
                self.project(normed, heads)?;
                SumPlace::X
            }
        };
        self.norm_queries(heads)?;
        self.norm_keys(heads)?;
        Ok(place)
    }

    /// Attention of the new tokens into `heads.attended`; their keys and values go to `pages`.
    /// Queries, keys and values are as the matrices and norms have left them. Where they are to be
    /// saved, `queries` gets the rotated queries.
    fn attend_new(
        &mut self,
        heads: &mut Heads<B>,
        queries: Option<&mut B::Floats>,
        pages: &mut B::Pages<'_>,
    ) -> Result<(), OpError> {
        if queries.is_some() {
            self.append(heads, pages)?;
            self.save(&heads.q, queries, self.spec.heads * self.spec.head_dim)?;
            return self.attend(&heads.q, &mut heads.attended, None, pages);
        }
        self.backend.append_attention(AppendAttention {
            q: &mut *heads.q,
            k: &mut *heads.k,
            v: &*heads.v,
            table: self.is_rotated().then_some(&*heads.table),
            rows: self.rows,
            group: self.spec.group(),
            pages,
            divisor: self.divisor(),
            alibi: self.alibi(),
            window: self.spec.window.unwrap_or(usize::MAX),
            out: &mut *heads.attended,
        })
    }

    /// Attention of the rotated `q` over `pages`, which hold the new tokens, into `attended`
    /// `[tokens, heads, head_dim]`, and beside it, where a gradient will want it, what
    /// [`Attention`] tells of its scores.
    pub(super) fn attend(
        &mut self,
        q: &B::Floats,
        attended: &mut B::Floats,
        logsum: Option<&mut B::Floats>,
        pages: &mut B::Pages<'_>,
    ) -> Result<(), OpError> {
        self.backend.attention(Attention {
            q,
            pages,
            rows: self.rows,
            group: self.spec.group(),
            divisor: self.divisor(),
            alibi: self.alibi(),
            window: self.spec.window.unwrap_or(usize::MAX),
            out: attended,
            logsum,
        })
    }

    /// The product of what attention made with its matrix, into `out` `[tokens, hidden]`.
    pub(super) fn out_of(
        &mut self,
        attended: &B::Floats,
        out: &mut B::Floats,
    ) -> Result<(), OpError> {
        self.part(attended, &self.weights.o, self.tokens, &mut *out)?;
        self.whole([CutProduct { x: attended, linear: &self.weights.o, out }])
    }

    /// Copies values of the tokens to `place`, if they are to be saved.
    pub(super) fn save(
        &mut self,
        values: &B::Floats,
        place: Option<&mut B::Floats>,
        width: usize,
    ) -> Result<(), OpError> {
        match place {
            Some(place) => self.backend.copy(values, place, self.tokens * width),
            None => Ok(()),
        }
    }

    fn is_rotated(&self) -> bool {
        matches!(self.spec.position, Position::Rope { .. })
    }

    /// What scores are divided by.
    pub(super) fn divisor(&self) -> f32 {
        (self.spec.head_dim as f32).sqrt()
    }

    /// The bias of the scores.
    pub(super) fn alibi(&self) -> Option<Alibi<'a>> {
        match &self.spec.position {
            Position::Alibi { slopes, scale } => Some(Alibi { slopes, scale: *scale }),
            Position::Rope { .. } => None,
        }
    }

    /// Queries, keys and values as the matrices give them.
    pub(super) fn project(&mut self, x: &B::Floats, heads: &mut Heads<B>) -> Result<(), OpError> {
        let (weights, tokens) = (self.weights, self.tokens);
        match &weights.qkv {
            QkvWeights::Separate([q, k, v]) => {
                let outs = [&mut *heads.q, &mut *heads.k, &mut *heads.v];
                self.products(x, [q, k, v], tokens, outs)
            }
            QkvWeights::Fused(qkv) => {
                self.linear(x, qkv, tokens, &mut heads.fused)?;
                self.backend.split_qkv(SplitQkv {
                    fused: &heads.fused,
                    q: &mut heads.q,
                    k: &mut heads.k,
                    v: &mut heads.v,
                    tokens,
                    kv_heads: self.spec.kv_heads,
                    group: self.spec.group(),
                    head_dim: self.spec.head_dim,
                })
            }
        }
    }

    /// Rotates queries and keys, and puts keys and values into their pages.
    fn append(&mut self, heads: &mut Heads<B>, pages: &mut B::Pages<'_>) -> Result<(), OpError> {
        if !self.is_rotated() {
            return self.append_keys(heads, pages);
        }
        self.backend.rope_append(RopeAppend {
            q: &mut *heads.q,
            k: &mut *heads.k,
            v: &*heads.v,
            table: &*heads.table,
            rows: self.rows,
            group: self.spec.group(),
            pages,
        })
    }

    /// Puts keys and values into their pages as they are.
    fn append_keys(
        &mut self,
        heads: &mut Heads<B>,
        pages: &mut B::Pages<'_>,
    ) -> Result<(), OpError> {
        let (keys, values) = (&*heads.k, &*heads.v);
        self.backend.kv_append(KvAppend { keys, values, rows: self.rows, pages })
    }

    pub(super) fn add(&mut self, x: &mut B::Floats, y: &B::Floats) -> Result<(), OpError> {
        let round = self.weights.dtype;
        self.backend.add(Add { x, y, len: self.tokens * self.spec.hidden, round })
    }
}
