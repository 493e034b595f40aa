//! What forward leaves for the gradient of the same block, so that it is not computed twice. All of it is f32, as the operations
//! give it: a gradient has the same bits with it and without.
//!
//! ```text
//! Level::Nothing     of a token nothing                    computed again: queries, attention, what the activation of the MLP takes
//! Level::Queries     queries                               computed again: attention, what the activation takes
//! Level::Attention   and the states behind attention       computed again: what the activation takes
//! Level::Middle      and that too, but of experts          computed again: norms
//! ```
//! Keys and values are in their pages in any case. The last block before the way back is sent through for them alone ([`keys`]).

use kernels::Backend;
use kernels::ops::{KvAppend, OpError, Rope};

use super::forward::{BlockInput, Pass, Workspace, prepare};
use super::spec::{BlockSpec, Mlp, Position, Qkv, Residual};
use super::weights::{BlockWeights, QkvWeights};

/// How much forward leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Keys and values in their pages.
    #[default]
    Nothing,
    /// And queries.
    Queries,
    /// And hidden states between attention and MLP.
    Attention,
    /// And what the activation of the MLP takes.
    Middle,
}

/// What forward leaves of some tokens; what is `None` is computed again.
#[derive(Debug)]
pub struct Kept<'a, F: ?Sized> {
    /// Queries as attention takes them `[tokens, heads, head_dim]`.
    pub queries: Option<&'a mut F>,
    /// Hidden states between attention and MLP `[tokens, hidden]`; parallel blocks have none.
    pub between: Option<&'a mut F>,
    /// What the activation takes `[tokens, intermediate]`.
    pub gate: Option<&'a mut F>,
    /// What it is multiplied with, shaped alike; of a gated MLP.
    pub up: Option<&'a mut F>,
}

impl<F: ?Sized> Default for Kept<'_, F> {
    fn default() -> Self {
        Kept {
            queries: None,
            between: None,
            gate: None,
            up: None,
        }
    }
}

/// What forward leaves of all tokens of a job in one block. On the way there it is written, on the way back used up.
pub struct Store<B: Backend> {
    widths: [usize; 4],
    buffers: [B::Buffer; 4],
}

impl<B: Backend> Store<B> {
    /// Room for `tokens` tokens.
    pub fn new(backend: &mut B, spec: &BlockSpec, level: Level, tokens: usize) -> Store<B> {
        let widths = widths(spec, level);
        Store {
            widths,
            buffers: widths.map(|width| backend.buffer(tokens * width)),
        }
    }

    /// That of the tokens `range`; all `None` if it does not hold them.
    pub fn part(&mut self, range: std::ops::Range<usize>) -> Kept<'_, B::Floats> {
        let mut parts = self
            .buffers
            .iter_mut()
            .zip(self.widths)
            .map(|(all, width)| {
                let part = range.start * width..range.end * width;
                B::part_mut(all, part).filter(|_| width > 0)
            });
        let mut next = || parts.next().flatten();
        Kept {
            queries: next(),
            between: next(),
            gate: next(),
            up: next(),
        }
    }
}

/// Values of a token: queries, states between, gate, up.
fn widths(spec: &BlockSpec, level: Level) -> [usize; 4] {
    let only = |needed: bool, width: usize| if needed { width } else { 0 };
    let (attention, middle) = (level >= Level::Attention, level >= Level::Middle);
    let queries = level >= Level::Queries;
    let (gate, up) = match &spec.mlp {
        Mlp::Gated(_) => (middle, middle),
        Mlp::Plain(_) => (middle, false),
        // Which tokens an expert has is known when it is computed.
        Mlp::Experts(_) => (false, false),
    };
    [
        only(queries, spec.heads * spec.head_dim),
        only(
            attention && spec.residual != Residual::Parallel,
            spec.hidden,
        ),
        only(gate, spec.mlp.intermediate()),
        only(up, spec.mlp.intermediate()),
    ]
}

/// Bytes of a token in one block.
pub fn token_bytes(spec: &BlockSpec, level: Level) -> u64 {
    4 * widths(spec, level).iter().sum::<usize>() as u64
}

/// How much each of `blocks` blocks may leave of `tokens` tokens, so that all of it takes at most `most_bytes`. The last block is
/// only sent through for its keys and values, which gives its queries too where the three are one product. A byte of the higher
/// level saves as much as one of the lower.
pub fn levels(spec: &BlockSpec, blocks: usize, tokens: usize, most_bytes: u64) -> Vec<Level> {
    let mut levels = vec![Level::Nothing; blocks];
    let Some((last, others)) = levels.split_last_mut() else {
        return levels;
    };
    let mut left = most_bytes;
    let mut raise = |place: &mut Level, level: Level| {
        let more = token_bytes(spec, level) - token_bytes(spec, *place);
        if let Some(rest) = left.checked_sub(more.saturating_mul(tokens as u64)) {
            (*place, left) = (level, rest);
        }
    };
    if matches!(spec.qkv, Qkv::Fused(_)) {
        raise(last, Level::Queries);
    }
    for level in [Level::Attention, Level::Middle] {
        others
            .iter_mut()
            .rev()
            .for_each(|place| raise(place, level));
    }
    levels
}

/// Sends the new tokens of `input.rows` into a block as far as their keys and values, which are written to `pages`. `hidden`
/// `[tokens, hidden]` is then unspecified. Of what is to be `kept` it leaves the queries where they come with the keys.
///
/// # Errors
/// Those of [`forward`](super::forward).
#[allow(clippy::too_many_arguments, reason = "forward's, and what it leaves")]
pub fn keys<B: Backend>(
    backend: &mut B,
    spec: &BlockSpec,
    weights: &BlockWeights<'_, B>,
    work: &mut Workspace<B>,
    input: BlockInput<'_>,
    hidden: &mut B::Floats,
    pages: &mut B::Pages<'_>,
    kept: Kept<'_, B::Floats>,
) -> Result<(), OpError> {
    let step = (input.rows, input.lengths);
    prepare(backend, spec, weights.dtype, work, step, input.rows)?;
    let tokens = kernels::kv::total_tokens(input.rows);
    work.grow(backend, spec, tokens, weights.largest_rank);
    let Workspace {
        normed,
        heads,
        rank,
        ..
    } = work;
    let mut pass = Pass::new(backend, spec, weights, input, rank);
    pass.prompts(input.prompts, hidden)?;
    pass.norm(hidden, &weights.attention_norm, normed)?;
    let QkvWeights::Separate([_, k, v]) = &weights.qkv else {
        pass.heads(normed, heads, pages)?;
        return pass.keep(&heads.q, kept.queries, spec.heads * spec.head_dim);
    };
    let outs = [&mut *heads.k, &mut *heads.v];
    pass.products(normed, [k, v], tokens, outs)?;
    pass.norm_keys(heads)?;
    if let Position::Rope { .. } = &spec.position {
        pass.backend.rope(Rope {
            x: &mut *heads.k,
            table: &*heads.table,
            tokens,
            heads: spec.kv_heads,
            head_dim: spec.head_dim,
            round: weights.dtype,
            inverse: false,
        })?;
    }
    pass.backend.kv_append(KvAppend {
        keys: &*heads.k,
        values: &*heads.v,
        rows: input.rows,
        pages,
    })
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
        use Level::{Attention, Middle, Nothing};
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
        assert_eq!(levels, [Level::Middle, Level::Queries]);
        let mut cpu = kernels::Cpu::new(1);
        let mut store = Store::new(&mut cpu, &spec, Level::Middle, 10);
        let kept = store.part(3..5);
        assert_eq!(kept.queries.map(|q| q.len()), Some(2 * 48));
        assert!(kept.between.is_none() && kept.up.is_none());
        assert_eq!(kept.gate.map(|g| g.len()), Some(2 * 4 * 48));
        assert!(store.part(9..11).queries.is_none());
    }
}
