//! Activations that the forward pass saves for the gradient of the same block, so that they are not
//! computed twice. All of them are f32, as the operations give them: a gradient has the same bits
//! with them and without.
//!
//! ```text
//! SaveLevel::Nothing     nothing                               recomputed: queries, attention, input of the MLP's activation
//! SaveLevel::Queries     queries                               recomputed: attention, input of the activation
//! SaveLevel::Attention   also the hidden states after it       recomputed: input of the activation
//! SaveLevel::Middle      also the activation's input, unless   recomputed: norms
//!                        the block has experts
//! ```
//! Keys and values are in their pages in any case. Of the last block before the backward pass only
//! keys and values are computed ([`keys`](super::keys)).

use kernels::Backend;
use model::{BlockSpec, Mlp, Qkv, Residual};

/// How much the forward pass saves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum SaveLevel {
    /// Keys and values in their pages.
    #[default]
    Nothing,
    Queries,
    /// And hidden states between attention and MLP.
    Attention,
    /// And what the activation of the MLP takes.
    Middle,
}

/// Where the activations of some tokens are saved; what is `None` is recomputed.
#[derive(Debug)]
pub struct SavedActivations<'a, F: ?Sized> {
    /// Queries as attention takes them `[tokens, heads, head_dim]`.
    pub queries: Option<&'a mut F>,
    /// Hidden states between attention and MLP `[tokens, hidden]`; parallel blocks have none.
    pub between: Option<&'a mut F>,
    /// What the activation takes `[tokens, intermediate]`.
    pub gate: Option<&'a mut F>,
    /// What it is multiplied with, shaped alike; of a gated MLP.
    pub up: Option<&'a mut F>,
}

impl<F: ?Sized> Default for SavedActivations<'_, F> {
    fn default() -> Self {
        SavedActivations { queries: None, between: None, gate: None, up: None }
    }
}

/// The saved activations of all tokens of a job in one block. The forward pass writes them, and the
/// backward pass consumes them.
pub struct ActivationStore<B: Backend> {
    widths: [usize; 4],
    buffers: [B::Buffer; 4],
}

impl<B: Backend> ActivationStore<B> {
    /// Memory for `tokens` tokens.
    pub fn new(
        backend: &mut B,
        spec: &BlockSpec,
        level: SaveLevel,
        tokens: usize,
    ) -> ActivationStore<B> {
        let widths = widths(spec, level);
        ActivationStore { widths, buffers: widths.map(|width| backend.buffer(tokens * width)) }
    }

    /// The activations of the tokens `range`; all `None` if the store does not hold them.
    pub fn part(&mut self, range: std::ops::Range<usize>) -> SavedActivations<'_, B::Floats> {
        let mut parts = self.buffers.iter_mut().zip(self.widths).map(|(all, width)| {
            let part = range.start * width..range.end * width;
            B::part_mut(all, part).filter(|_| width > 0)
        });
        let mut next = || parts.next().flatten();
        SavedActivations { queries: next(), between: next(), gate: next(), up: next() }
    }
}

/// Values of a token: queries, states between, gate, up.
fn widths(spec: &BlockSpec, level: SaveLevel) -> [usize; 4] {
    let only = |needed: bool, width: usize| if needed { width } else { 0 };
    let (attention, middle) = (level >= SaveLevel::Attention, level >= SaveLevel::Middle);
    let queries = level >= SaveLevel::Queries;
    let (gate, up) = match &spec.mlp {
        Mlp::Gated(_) => (middle, middle),
        Mlp::Plain(_) => (middle, false),
        // Which tokens an expert has is known when it is computed.
        Mlp::Experts(_) => (false, false),
    };
    [
        only(queries, spec.heads * spec.head_dim),
        only(attention && spec.residual != Residual::Parallel, spec.hidden),
        only(gate, spec.mlp.intermediate()),
        only(up, spec.mlp.intermediate()),
    ]
}

/// Bytes of a token in one block.
pub fn token_bytes(spec: &BlockSpec, level: SaveLevel) -> u64 {
    4 * widths(spec, level).iter().sum::<usize>() as u64
}

/// How much each of `blocks` blocks may save of `tokens` tokens, so that all blocks together take
/// at most `most_bytes`. Of the last block only keys and values are computed, and its queries too
/// where the three are one product. A byte of the higher level avoids as much work as one of the
/// lower.
pub fn levels(spec: &BlockSpec, blocks: usize, tokens: usize, most_bytes: u64) -> Vec<SaveLevel> {
    let mut levels = vec![SaveLevel::Nothing; blocks];
    let Some((last, others)) = levels.split_last_mut() else {
        return levels;
    };
    let mut left = most_bytes;
    let mut raise = |raised: &mut SaveLevel, level: SaveLevel| {
        let more = token_bytes(spec, level) - token_bytes(spec, *raised);
        if let Some(rest) = left.checked_sub(more.saturating_mul(tokens as u64)) {
            (*raised, left) = (level, rest);
        }
    };
    if matches!(spec.qkv, Qkv::Fused(_)) {
        raise(last, SaveLevel::Queries);
    }
    for level in [SaveLevel::Attention, SaveLevel::Middle] {
        others.iter_mut().rev().for_each(|raised| raise(raised, level));
    }
    levels
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn llama() -> BlockSpec {
        let config = json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
            "num_key_value_heads": 2, "num_hidden_layers": 4, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        });
        BlockSpec::from_config(&config).unwrap()
    }

    fn falcon() -> BlockSpec {
        let config = json!({
            "model_type": "falcon", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
        });
        BlockSpec::from_config(&config).unwrap()
    }

    #[test]
    fn blocks_that_come_back_first_leave_most_and_all_of_it_fits() {
        use SaveLevel::{Attention, Middle, Nothing};
        let spec = llama();
        let (attention, middle) = (4 * (64 + 64), 4 * 2 * 96);
        assert_eq!(token_bytes(&spec, Middle), attention + middle);
        let at = |bytes| levels(&spec, 3, 10, bytes);
        assert_eq!(at(10 * attention - 1), [Nothing; 3]);
        assert_eq!(at(10 * attention), [Nothing, Attention, Nothing]);
        assert_eq!(at(20 * attention), [Attention, Attention, Nothing]);
        let more = 20 * attention + 10 * middle;
        assert_eq!(at(more), [Attention, Middle, Nothing]);
        assert_eq!(at(u64::MAX), [Middle, Middle, Nothing]);
        assert_eq!(levels(&spec, 1, 10, u64::MAX), [Nothing]);
    }

    #[test]
    fn a_fused_product_leaves_queries_in_the_last_block_and_parallel_blocks_no_states() {
        let spec = falcon();
        let levels = levels(&spec, 2, 10, u64::MAX);
        assert_eq!(levels, [SaveLevel::Middle, SaveLevel::Queries]);
        let mut cpu = kernels::Cpu::new(1);
        let mut store = ActivationStore::new(&mut cpu, &spec, SaveLevel::Middle, 10);
        let saved = store.part(3..5);
        assert_eq!(saved.queries.map(|q| q.len()), Some(2 * 48));
        assert!(saved.between.is_none() && saved.up.is_none());
        assert_eq!(saved.gate.map(|g| g.len()), Some(2 * 4 * 48));
        assert!(store.part(9..11).queries.is_none());
    }
}
