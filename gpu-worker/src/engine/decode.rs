//! Decode steps on a device that records: one recording per block and number of tokens, rounded up to a power of two. Its launches read
//! rows, positions and page tables from memory that is written once per unit, so that nothing is recorded again as sequences grow, and
//! the hidden states lie at one place from the first block of a unit to its last.
//!
//! ```text
//! unit   rows written ─ states gathered ─ angles ─ block ─ block ─ ... ─ states given back ─ wait
//!                                                  (one launch each, nothing of the host between)
//! ```
//! A step that the recordings do not cover (deep prompts, adapters, more than 32 tokens, experts chosen on the host) takes the way of all
//! others, with the same bits.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use kernels::StepRow;
use kernels::kv::total_tokens;
use shared::ids::PageId;
use tracing::{debug, info};

use super::{Engine, EngineError};
use crate::block::{BlockInput, Workspace, forward_prepared, prepare};
use crate::device::{MAX_STEP_TOKENS, Paged};

/// What recorded steps need, and the recordings.
pub(super) struct Decode<B: Paged> {
    work: Workspace<B>,
    /// Hidden states of the step `[MAX_STEP_TOKENS, hidden]`.
    pub(super) states: B::Buffer,
    /// By block of the span and power of two of tokens; `None`: it cannot be recorded.
    graphs: HashMap<(usize, usize), Option<B::Graph>>,
    /// Recordings made.
    recorded: u64,
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
        self.decode = Some(Decode {
            work,
            states,
            graphs: HashMap::new(),
            recorded: 0,
        });
        let mut tokens = 1;
        while tokens <= MAX_STEP_TOKENS {
            // A step of no rows: kernels run through and write nothing but what the next step writes anew.
            self.recorded_blocks(tokens, 0..self.blocks.len(), &[], &[])?;
            tokens *= 2;
        }
        self.backend.settle()?;
        info!(recorded = self.recorded(), "decode steps are recorded");
        Ok(())
    }

    /// Recordings made so far.
    pub fn recorded(&self) -> u64 {
        self.decode.as_ref().map_or(0, |decode| decode.recorded)
    }

    /// Kernels that one replay of a block launches for a step of up to `tokens` tokens; `None` without a recording.
    pub fn launches(&self, local: usize, tokens: usize) -> Option<u64> {
        let graphs = &self.decode.as_ref()?.graphs;
        let graph = graphs.get(&(local, tokens.next_power_of_two()))?.as_ref()?;
        Some(B::launches(graph))
    }

    /// Whether recordings can serve `rows`; if so, they are those of the next step.
    pub(super) fn set_step(&mut self, rows: &[StepRow<'_>]) -> Result<bool, EngineError> {
        if self.decode.is_none() || total_tokens(rows) == 0 {
            return Ok(false);
        }
        self.backend.set_step(rows)
    }

    /// Sends the states of a step of at most `tokens` tokens, which was set, through `blocks` of the span. `lengths` as in [`BlockInput`].
    pub(super) fn recorded_blocks(
        &mut self,
        tokens: usize,
        blocks: std::ops::Range<usize>,
        rows: &[StepRow<'_>],
        lengths: &[usize],
    ) -> Result<(), EngineError> {
        let tokens = tokens.next_power_of_two();
        let mut decode = self.decode.take().ok_or(EngineError::Unit(u32::MAX))?;
        if rows.is_empty() {
            self.backend.set_step(rows)?;
        }
        self.backend.use_fixed_step(true);
        let done = self.fixed_blocks(&mut decode, tokens, blocks, rows, lengths);
        self.backend.use_fixed_step(false);
        self.decode = Some(decode);
        done
    }

    fn fixed_blocks(
        &mut self,
        decode: &mut Decode<B>,
        tokens: usize,
        blocks: std::ops::Range<usize>,
        rows: &[StepRow<'_>],
        lengths: &[usize],
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
        let input = BlockInput {
            rows: &room,
            prompts: &[],
            adapters: &[],
            lengths: &[],
        };
        let Decode {
            work,
            states,
            graphs,
            recorded,
        } = decode;
        let dtype = self.shape.dtype;
        prepare(
            &mut self.backend,
            self.spec,
            dtype,
            work,
            (rows, lengths),
            &room,
        )?;
        let first = blocks.start;
        for local in blocks {
            let block = u32::try_from(local).unwrap_or(u32::MAX);
            let weights = self.blocks.get(local).ok_or(EngineError::Unit(block))?;
            let mut pages = self.backend.cached(&mut self.cache, local, rows)?;
            let key = (local, tokens);
            if let Some(Some(graph)) = graphs.get(&key) {
                self.backend.replay(graph, &mut pages)?;
                continue;
            }
            let spec = self.spec;
            let mut run = |backend: &mut B, pages: &mut B::Pages<'_>| {
                forward_prepared(backend, spec, weights, work, input, states, pages)
            };
            // A step of no rows is run once, for what operations keep from then on.
            if !rows.is_empty() || local == first {
                run(&mut self.backend, &mut pages)?;
            }
            if let Entry::Vacant(place) = graphs.entry(key) {
                let graph = self.backend.record(&mut pages, run)?;
                *recorded += u64::from(graph.is_some());
                debug!(block = local, tokens, recorded, "recorded");
                place.insert(graph);
            }
        }
        Ok(())
    }
}
