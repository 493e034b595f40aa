//! Intermediate results of a backward pass, reused from piece to piece.

use kernels::Backend;
use model::{BlockSpec, Mlp, Qkv};

use crate::forward::Workspace;

/// Intermediate results of a backward pass, reused from piece to piece.
pub struct GradientWork<B: Backend> {
    pub(super) forward: Workspace<B>,
    pub(super) x: B::Buffer,
    pub(super) h: B::Buffer,
    pub(super) fed: B::Buffer,
    pub(super) branch: B::Buffer,
    pub(super) aside: B::Buffer,
    pub(super) heads: HeadGradients<B>,
    pub(super) middle: Middle<B>,
}

pub(super) struct HeadGradients<B: Backend> {
    pub(super) attended: B::Buffer,
    /// Of the scores of each query, as attention tells it.
    pub(super) logsum: B::Buffer,
    pub(super) q: B::Buffer,
    pub(super) k: B::Buffer,
    pub(super) v: B::Buffer,
    pub(super) fused: B::Buffer,
    pub(super) part: B::Buffer,
}

pub(super) struct Middle<B: Backend> {
    pub(super) grad: B::Buffer,
    pub(super) weights: B::Buffer,
    pub(super) logits: B::Buffer,
    pub(super) shares: B::Buffer,
    pub(super) part: B::Buffer,
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
    pub fn grow(&mut self, backend: &mut B, spec: &BlockSpec, tokens: usize, largest_rank: usize) {
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
