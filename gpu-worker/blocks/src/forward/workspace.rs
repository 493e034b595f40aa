//! Intermediate results of a block, reused from step to step.

use kernels::Backend;
use kernels::ops::experts::list_words;

use model::{BlockSpec, Mlp, Position, Qkv, Residual};

/// Intermediate results, reused from step to step: a step allocates only if it is larger than all
/// before it.
pub struct Workspace<B: Backend> {
    pub(crate) normed: B::Buffer,
    pub(crate) branch: B::Buffer,
    pub(super) aside: B::Buffer,
    /// The other place of the hidden states, in runs.
    pub(super) beside: B::Buffer,
    pub(crate) heads: Heads<B>,
    pub(crate) middle: Middle<B>,
    /// Between the two matrices of an adapter.
    pub(crate) rank: B::Buffer,
}

/// Queries, keys and values of the new tokens, and what attention makes of them.
pub(crate) struct Heads<B: Backend> {
    pub(crate) q: B::Buffer,
    pub(crate) k: B::Buffer,
    pub(crate) v: B::Buffer,
    pub(crate) attended: B::Buffer,
    pub(crate) table: B::Buffer,
    pub(super) fused: B::Buffer,
    pub(super) normed_k: B::Buffer,
}

/// The middle of the MLP.
pub(crate) struct Middle<B: Backend> {
    pub(crate) gate: B::Buffer,
    pub(crate) up: B::Buffer,
    pub(crate) logits: B::Buffer,
    pub(crate) given: B::Buffer,
    /// Which token goes to which expert, on the device.
    pub(crate) lists: B::Buffer,
}

impl<B: Backend> Workspace<B> {
    /// An empty workspace; one serves any number of blocks and specs.
    pub fn new(backend: &mut B) -> Self {
        let mut empty = || backend.buffer(0);
        Workspace {
            normed: empty(),
            branch: empty(),
            aside: empty(),
            beside: empty(),
            heads: Heads {
                q: empty(),
                k: empty(),
                v: empty(),
                attended: empty(),
                table: empty(),
                fused: empty(),
                normed_k: empty(),
            },
            middle: Middle {
                gate: empty(),
                up: empty(),
                logits: empty(),
                given: empty(),
                lists: empty(),
            },
            rank: empty(),
        }
    }

    /// Makes it large enough for runs of `tokens` tokens ([`forward_joined`](super::forward_joined)).
    pub fn grow_for_runs(
        &mut self,
        backend: &mut B,
        spec: &BlockSpec,
        tokens: usize,
        largest_rank: usize,
    ) {
        self.grow(backend, spec, tokens, largest_rank);
        backend.grow(&mut self.beside, tokens * spec.hidden);
    }

    /// Makes it large enough for `tokens` tokens.
    pub fn grow(&mut self, backend: &mut B, spec: &BlockSpec, tokens: usize, largest_rank: usize) {
        let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let only = |needed: bool, width: usize| if needed { width } else { 0 };
        let (heads, middle) = (&mut self.heads, &mut self.middle);
        let (experts, chosen) = match &spec.mlp {
            Mlp::Experts(mlp) => (mlp.experts.len(), mlp.chosen),
            Mlp::Gated(_) | Mlp::Plain(_) => (0, 1),
        };
        let is_plain = matches!(spec.mlp, Mlp::Plain(_));
        let is_rotated = matches!(spec.position, Position::Rope { .. });
        for (buffer, width) in [
            (&mut self.normed, spec.hidden),
            (&mut self.branch, spec.hidden),
            (&mut self.aside, only(spec.residual == Residual::Parallel, spec.hidden)),
            (&mut heads.q, q),
            (&mut heads.k, kv),
            (&mut heads.v, kv),
            (&mut heads.attended, q),
            (&mut heads.table, only(is_rotated, spec.head_dim)),
            (&mut heads.fused, only(matches!(spec.qkv, Qkv::Fused(_)), q + 2 * kv)),
            (&mut heads.normed_k, only(spec.head_norms.is_some(), kv)),
            (&mut middle.gate, chosen * spec.mlp.intermediate()),
            (&mut middle.up, only(!is_plain, chosen * spec.mlp.intermediate())),
            (&mut middle.logits, experts),
            (&mut middle.given, only(experts > 0, chosen * spec.hidden)),
            (&mut self.rank, chosen * largest_rank),
        ] {
            backend.grow(buffer, tokens * width);
        }
        if experts > 0 {
            backend.grow(&mut middle.lists, list_words(tokens, chosen, experts));
        }
    }
}
