//! Decode steps on a device that records: one recording per block and number of tokens, rounded up to a power of two. Its launches read
//! rows, positions and page tables from memory that is written once per unit, so that nothing is recorded again as sequences grow, and
//! the hidden states lie at one place from the first block of a unit to its last.
//!
//! ```text
//! unit   rows written ─ states gathered ─ angles ─ block ─ block ─ ... ─ last sum ─ states given back ─ wait
//!                                                  (one launch each, nothing of the host between)
//! ```
//! The last sum of a block is made with the first norm of the next.
//!
//! Where adapters are loaded, each block is recorded twice: steps without any pay nothing for them. Deep prompts, which come with the first step of
//! a session, are added before the recording of their block. A step of more than 32 tokens takes the way of all others, with the same bits.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use kernels::StepRow;
use kernels::kv::total_tokens;
use kernels::ops::PromptAdd;
use shared::ids::PageId;
use tracing::{debug, info, warn};

use super::{Engine, EngineError};
use crate::block::{
    BlockInput, PromptPart, Workspace, close_run, forward_joined, open_run, prepare,
};
use crate::device::{MAX_STEP_TOKENS, Paged};

/// Memory of a device that recordings leave to others. They are planned for ([`shared::model::ModelFacts::graph_block_bytes`]), but what they take is
/// the driver's: a block for which there is none is launched directly.
const SPARE_BYTES: u64 = 64 << 20;

/// What recorded steps need, and the recordings.
pub(super) struct Decode<B: Paged> {
    work: Workspace<B>,
    /// Hidden states of the step `[MAX_STEP_TOKENS, hidden]`.
    pub(super) states: B::Buffer,
    /// As many negative zeros, for [`open_run`].
    nothing: B::Buffer,
    /// By block of the span, power of two of tokens, and whether adapters are added; `None`: it cannot be recorded.
    graphs: HashMap<(usize, usize, bool), Option<B::Graph>>,
    /// Whether there are recordings with adapters.
    pub(super) adapted: bool,
    /// Recordings made.
    recorded: u64,
    /// Recordings enqueued.
    replayed: u64,
}

/// What is special about a step: its rows are set before, by [`Engine::set_step`].
#[derive(Clone, Copy, Default)]
pub(super) struct Step<'a> {
    pub(super) rows: &'a [StepRow<'a>],
    /// As in [`BlockInput`].
    pub(super) lengths: &'a [usize],
    /// Whether some row goes through an adapter.
    pub(super) adapted: bool,
    /// Deep prompts of each of its blocks; none of blocks past the end.
    pub(super) prompts: &'a [Vec<PromptPart<'a>>],
}

impl<B: Paged> Decode<B> {
    /// Launches of all recordings together.
    pub(super) fn recorded_launches(&self) -> u64 {
        self.graphs.values().flatten().map(B::launches).sum()
    }
}

impl<B: Paged> Engine<'_, B> {
    /// Gets ready to record decode steps, and records them for all blocks and numbers of tokens, so that none is recorded while clients
    /// wait. A device that does not record is left as it is.
    ///
    /// # Errors
    /// [`EngineError`] when the device has no memory, or fails.
    pub fn record_steps(&mut self) -> Result<(), EngineError> {
        let layout = self.kv_shape.layout;
        if self.kv_shape.pages == 0
            || !self
                .backend
                .open_steps(self.spec.heads, layout.head_dim, self.kv_shape.pages)?
        {
            return Ok(());
        }
        let mut work = Workspace::new(&mut self.backend);
        let rank = self.blocks.iter().map(|block| block.largest_rank()).max();
        work.grow(
            &mut self.backend,
            self.spec,
            MAX_STEP_TOKENS,
            rank.unwrap_or(0),
        );
        let states = self.backend.buffer(MAX_STEP_TOKENS * self.spec.hidden);
        let mut nothing = self.backend.buffer(MAX_STEP_TOKENS * self.spec.hidden);
        let zeros = vec![-0.0; MAX_STEP_TOKENS * self.spec.hidden];
        self.backend.upload(&zeros, &mut nothing)?;
        self.decode = Some(Decode {
            work,
            states,
            nothing,
            graphs: HashMap::new(),
            adapted: rank.is_some_and(|rank| rank > 0),
            recorded: 0,
            replayed: 0,
        });
        let before = self.backend.free_bytes();
        let kinds: &[bool] = match &self.decode {
            Some(decode) if decode.adapted => &[false, true],
            _ => &[false],
        };
        for &adapted in kinds {
            let step = Step {
                adapted,
                ..Step::default()
            };
            let mut tokens = 1;
            while tokens <= MAX_STEP_TOKENS {
                // A step of no rows: kernels run through and write nothing but what the next step writes anew.
                self.recorded_blocks(tokens, 0..self.blocks.len(), step)?;
                tokens *= 2;
            }
        }
        self.backend.settle()?;
        let after = self.backend.free_bytes();
        let bytes = before.zip(after).map(|(b, a)| b.saturating_sub(a));
        let (recorded, direct) = self.recordings();
        let launches = self.decode.as_ref().map_or(0, Decode::recorded_launches);
        // To compare with what is planned for each, `GRAPH_LAUNCH_BYTES`.
        let launch_bytes = bytes.and_then(|bytes| bytes.checked_div(launches));
        match direct {
            0 => info!(recorded, bytes, launch_bytes, "decode steps are recorded"),
            _ => warn!(
                recorded,
                direct, bytes, launch_bytes, after, "not all decode steps are recorded"
            ),
        }
        Ok(())
    }

    /// Recordings that there are, and those that are not, for whose steps a block is launched directly.
    fn recordings(&self) -> (u64, usize) {
        let graphs = self.decode.iter().flat_map(|decode| decode.graphs.values());
        (
            self.recorded(),
            graphs.filter(|graph| graph.is_none()).count(),
        )
    }

    /// Recordings made so far.
    pub fn recorded(&self) -> u64 {
        self.decode.as_ref().map_or(0, |decode| decode.recorded)
    }

    /// Blocks that steps went through by recordings so far.
    pub fn replayed(&self) -> u64 {
        self.decode.as_ref().map_or(0, |decode| decode.replayed)
    }

    /// Kernels that one replay of a block launches for a step of up to `tokens` tokens without adapters; `None` without a recording.
    pub fn launches(&self, local: usize, tokens: usize) -> Option<u64> {
        let graphs = &self.decode.as_ref()?.graphs;
        let key = (local, tokens.next_power_of_two(), false);
        let graph = graphs.get(&key)?.as_ref()?;
        Some(B::launches(graph))
    }

    /// Whether recordings can serve `rows` with the adapters of each; if so, they are those of the next step.
    pub(super) fn set_step(
        &mut self,
        rows: &[StepRow<'_>],
        adapters: &[Option<u32>],
    ) -> Result<bool, EngineError> {
        if self.decode.is_none() || total_tokens(rows) == 0 {
            return Ok(false);
        }
        self.backend.set_step(rows, adapters)
    }

    /// Sends the states of a step of at most `tokens` tokens, which was set, through `blocks` of the span.
    pub(super) fn recorded_blocks(
        &mut self,
        tokens: usize,
        blocks: std::ops::Range<usize>,
        step: Step<'_>,
    ) -> Result<(), EngineError> {
        let tokens = tokens.next_power_of_two();
        let mut decode = self.decode.take().ok_or(EngineError::Unit(u32::MAX))?;
        if step.rows.is_empty() {
            self.backend.set_step(step.rows, &[])?;
        }
        self.backend.use_fixed_step(true);
        let done = self.fixed_blocks(&mut decode, tokens, blocks, step);
        self.backend.use_fixed_step(false);
        self.decode = Some(decode);
        done
    }

    fn fixed_blocks(
        &mut self,
        decode: &mut Decode<B>,
        tokens: usize,
        blocks: std::ops::Range<usize>,
        step: Step<'_>,
    ) -> Result<(), EngineError> {
        // Operations see so many rows of one token; what they are lies in the fixed memory.
        let page = [PageId(0)];
        let room = vec![
            StepRow {
                tokens: 1,
                prefix: 0,
                pages: &page
            };
            tokens
        ];
        let any = vec![Some(0); if step.adapted { tokens } else { 0 }];
        let input = BlockInput {
            rows: &room,
            prompts: &[],
            adapters: &any,
            lengths: &[],
        };
        let Decode {
            work,
            states,
            nothing,
            graphs,
            recorded,
            replayed,
            ..
        } = decode;
        let dtype = self.shape.dtype;
        prepare(
            &mut self.backend,
            self.spec,
            dtype,
            work,
            (step.rows, step.lengths),
            &room,
        )?;
        let first = blocks.start;
        let values = tokens * self.spec.hidden;
        open_run(&mut self.backend, work, nothing, values)?;
        for local in blocks {
            let block = u32::try_from(local).unwrap_or(u32::MAX);
            let weights = self.blocks.get(local).ok_or(EngineError::Unit(block))?;
            let prompts = step
                .prompts
                .get(local - first)
                .map_or(&[][..], Vec::as_slice);
            if !prompts.is_empty() {
                // The states must be whole.
                close_run(&mut self.backend, work, states, (values, dtype))?;
                open_run(&mut self.backend, work, nothing, values)?;
            }
            for part in prompts {
                self.backend.prompt_add(PromptAdd {
                    x: &mut *states,
                    offset: part.offset,
                    prompt: part.values,
                    round: dtype,
                })?;
            }
            let mut pages = self.backend.cached(&mut self.cache, local, step.rows)?;
            let key = (local, tokens, step.adapted);
            if let Some(Some(graph)) = graphs.get(&key) {
                self.backend.replay(graph, &mut pages)?;
                *replayed += 1;
                continue;
            }
            let spec = self.spec;
            let mut run = |backend: &mut B, pages: &mut B::Pages<'_>| {
                forward_joined(backend, spec, weights, work, input, states, pages)
            };
            // A step of no rows is run once, for what operations keep from then on.
            if !step.rows.is_empty() || local == first {
                run(&mut self.backend, &mut pages)?;
            }
            if let Entry::Vacant(place) = graphs.entry(key) {
                let free = self.backend.free_bytes();
                let graph = match free.is_none_or(|free| free >= SPARE_BYTES) {
                    true => self.backend.record(&mut pages, run)?,
                    false => None,
                };
                *recorded += u64::from(graph.is_some());
                debug!(block = local, tokens, recorded, "recorded");
                place.insert(graph);
            }
        }
        Ok(close_run(&mut self.backend, work, states, (values, dtype))?)
    }
}
