//! What netd and the supervisor must know of a model: sizes and types, but neither weights nor the
//! form of its blocks.

use serde::{Deserialize, Serialize};

use crate::block::Span;
use crate::config::QuantType;
use crate::dtype::DType;

/// Tokens in one page of the KV cache.
pub const PAGE_TOKENS: usize = 16;

/// Most tokens of a decode step that a CUDA device replays as a recording.
pub const MAX_STEP_TOKENS: usize = 32;

/// Memory of a worker for what it keeps of blocks during one request for gradients, unless a single
/// block needs more ([`ModelFacts::gradient_bytes`]).
pub const GRADIENT_BYTES: u64 = 512 << 20;

/// Facts about a model, found by `prepare` in its folder and checked there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelFacts {
    /// Folder name or Hub repository id, for people.
    pub name: String,
    /// `https://huggingface.co/...` when the model came from the Hub, for the swarm's model index.
    pub repository: Option<String>,
    /// `model_type` of config.json, for example `llama`.
    pub model_type: String,
    /// Prefix of the module uids when the family has a default for this model (Hub models only).
    pub dht_prefix: Option<String>,
    /// Number of transformer blocks of the whole model.
    pub num_blocks: u32,
    /// Width of the hidden states.
    pub hidden_size: u32,
    /// Query heads.
    pub attention_heads: u32,
    /// Key/value heads.
    pub kv_heads: u32,
    /// Width of one head.
    pub head_dim: u32,
    /// Most tokens of a text (`model::context_length`); `None` where config.json names no length.
    pub context_tokens: Option<u32>,
    /// Type of weights, hidden states and cache as served.
    pub dtype: DType,
    /// How matrices are stored.
    pub quant_type: QuantType,
    /// Bytes of one block's weights as served, with its parts of all adapters.
    pub block_bytes: u64,
    /// Bytes of what a client computes with: embeddings, head and last norm, as stored in `dtype`.
    pub client_bytes: u64,
    /// Names of the adapters, as requests choose them; jobs name them by their index here.
    pub adapters: Vec<String>,
}

/// What one rank of a group holds of every block: what is decided of a cut, and what memory depends
/// on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankShare {
    pub heads: u32,
    /// The key/value heads that they read.
    pub kv_heads: u32,
    /// Its columns of the middle of the MLP, or of each expert.
    pub columns: u32,
    /// Bytes of its part of one block's weights, as [`ModelFacts::block_bytes`].
    pub block_bytes: u64,
    /// Bytes of those that a worker copies out of the files that hold the block. They are in the
    /// memory of the machine, also where the device has its own.
    pub copied_bytes: u64,
    /// Whether its products are slow because of where the block is cut.
    pub is_slow: bool,
}

/// The dimensions of a block that its operations, and their scratch memory, depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockDimensions {
    /// Width of the hidden states.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of one head.
    pub head_dim: usize,
    /// Width in the middle of the MLP, or of one expert.
    pub intermediate: usize,
    /// Experts that a token goes through; 1 without a mixture.
    pub experts_per_token: usize,
    /// Whether queries, keys and values come from one matrix.
    pub is_fused: bool,
    /// Whether attention and MLP are added to the same hidden states.
    pub is_parallel: bool,
}

impl BlockDimensions {
    /// Outputs of the matrix that queries, keys and values share; 0 where each has its own.
    pub fn fused_outputs(&self) -> usize {
        if self.is_fused { (self.heads + 2 * self.kv_heads) * self.head_dim } else { 0 }
    }
}

impl ModelFacts {
    /// These facts as far as the memory of a rank depends on them: its heads and its weights.
    pub fn of_rank(&self, rank: &RankShare) -> ModelFacts {
        ModelFacts {
            attention_heads: rank.heads,
            kv_heads: rank.kv_heads,
            block_bytes: rank.block_bytes,
            ..self.clone()
        }
    }

    /// Query heads per key/value head; above 1 Petals takes its larger defaults.
    pub fn kv_groups(&self) -> u32 {
        self.attention_heads / self.kv_heads.max(1)
    }

    /// Bytes of keys and values of one token in one block.
    pub fn kv_token_bytes(&self) -> usize {
        2 * self.kv_heads as usize * self.head_dim as usize * self.dtype.size_bytes()
    }

    /// Bytes of one page of one block: `[kv_heads, 2, PAGE_TOKENS, head_dim]`.
    pub fn kv_page_bytes(&self) -> usize {
        PAGE_TOKENS * self.kv_token_bytes()
    }

    /// Bytes that a worker keeps per block for gradients over `batch` sequences of `tokens` tokens,
    /// the first `prompts` of them with deep prompts: the input of the block, pages with its
    /// keys and values, the prompts and their gradient in f32.
    pub fn gradient_block_bytes(&self, batch: u32, tokens: u32, prompts: u32) -> u64 {
        let hidden = u64::from(self.hidden_size);
        let inputs = u64::from(tokens) * hidden * self.dtype.size_bytes() as u64;
        let pages = u64::from(tokens.div_ceil(PAGE_TOKENS as u32)) * self.kv_page_bytes() as u64;
        let prompts = u64::from(prompts) * hidden * 2 * 4;
        u64::from(batch).saturating_mul(inputs.saturating_add(pages).saturating_add(prompts))
    }

    /// What one block needs at most for gradients over at most `max_batch_size` tokens without
    /// prompts, of one sequence or of sequences of one token.
    pub fn most_gradient_block_bytes(&self, max_batch_size: u32) -> u64 {
        let whole = self.gradient_block_bytes(1, max_batch_size, 0);
        whole.max(self.gradient_block_bytes(max_batch_size, 1, 0))
    }

    /// Bytes that a worker keeps of all blocks at most for one request for gradients: what one
    /// sequence of `max_batch_size` tokens needs in all blocks of the model, at most
    /// [`GRADIENT_BYTES`], and what any request needs in one block.
    pub fn gradient_bytes(&self, max_batch_size: u32) -> u64 {
        let whole = self.gradient_block_bytes(1, max_batch_size, 0);
        let all = whole.saturating_mul(self.num_blocks.into());
        all.min(GRADIENT_BYTES).max(self.most_gradient_block_bytes(max_batch_size))
    }

    /// Bytes of the kv segment of a worker: `[blocks of the span, pages, page]`.
    pub fn kv_segment_bytes(&self, span: Span, pages: u32) -> usize {
        span.block_count() * pages as usize * self.kv_page_bytes()
    }

    /// Bytes of the kv segment of a worker whose pages are `in_segment`; of another it is one page
    /// of memory that nobody uses.
    pub fn kv_segment_bytes_if(&self, in_segment: bool, span: Span, pages: u32) -> usize {
        const UNUSED_BYTES: usize = 4096;
        match in_segment {
            true => self.kv_segment_bytes(span, pages),
            false => UNUSED_BYTES,
        }
    }
}
