//! What only a device with memory of its own needs before it serves: memory for the largest units,
//! and recorded steps.

use blocks::BlockWeights;
use kernels::StepRow;
use kernels::cuda::scratch::scratch_bytes;
use kernels::cuda::{Cuda, Gpu};
use model::sizing::{BATCH_TOKENS, unit_tokens};
use shared::ids::PageId;
use shared::model::PAGE_TOKENS;

use super::{Engine, EngineError};
use crate::device::StepUnit;

/// Rows of a decode step and pages of each that a rehearsal computes.
const REHEARSED_ROWS: usize = 32;
const REHEARSED_PAGES: usize = 4;

/// Pieces of memory for what the host tells kernels (rows, page tables, indexes), more than are
/// alive at once, and their size: larger than any.
const SMALL_PIECES: usize = 8;
const SMALL_PIECE_BYTES: usize = 64 << 10;

impl<G: Gpu> Engine<'_, Cuda<G>> {
    /// Runs the largest units of forward passes once, and takes the memory of the largest unit of a
    /// backward pass, so that the device has what it needs for any smaller one: memory that is not
    /// there is missed here, not in a client's step.
    ///
    /// # Errors
    /// [`EngineError`] when the device has no memory, or fails.
    pub fn rehearse(&mut self) -> Result<(), EngineError> {
        let (hidden_width, tokens) = (self.spec.hidden, self.forward_tokens().max(BATCH_TOKENS));
        let pages = first_pages(tokens.div_ceil(PAGE_TOKENS));
        let rows = [StepRow::new(tokens, 0, &pages)];
        let mut hidden = vec![0.0; tokens * hidden_width];
        self.trial(&rows, &mut hidden, pages.len())?;
        self.end_trials();
        self.reserve()?;
        // The largest batch of decode steps.
        let pages = first_pages(REHEARSED_ROWS * REHEARSED_PAGES);
        let rows: Vec<StepRow<'_>> = pages
            .chunks(REHEARSED_PAGES)
            .map(|pages| StepRow::new(1, REHEARSED_PAGES * PAGE_TOKENS - 1, pages))
            .collect();
        self.trial(&rows, &mut hidden[..rows.len() * hidden_width], pages.len())?;
        self.end_trials();
        Ok(())
    }

    /// Takes the memory of the largest units.
    fn reserve(&mut self) -> Result<(), EngineError> {
        let spec = self.spec;
        let largest_rank = self.blocks.iter().map(BlockWeights::largest_rank).max().unwrap_or(0);
        let [forward, back] = unit_tokens(self.whole);
        let cuda = &mut self.backend;
        self.passes.reserve(cuda, spec, back, largest_rank)?;
        self.work.grow(cuda, spec, forward, largest_rank);
        self.steps.reserve(cuda, BATCH_TOKENS * spec.hidden);
        self.cache.reserve(cuda, forward.max(BATCH_TOKENS))?;
        let positions = self.kv_shape.pages * PAGE_TOKENS;
        let scratch = scratch_bytes(&spec.dimensions(), [forward, back], positions);
        // All at once, given back to the pool when all are there. The first is where units work on
        // hidden states that are not in place.
        let staging = cuda.buffer(forward.max(back) * spec.hidden);
        let mut taken = Vec::new();
        for bytes in scratch {
            taken.push(cuda.scratch(bytes)?);
        }
        for _ in 0..SMALL_PIECES {
            taken.push(cuda.scratch(SMALL_PIECE_BYTES)?);
        }
        drop((staging, taken));
        Ok(())
    }

    /// Records decode steps of all blocks, so that none is recorded while clients wait.
    ///
    /// # Errors
    /// [`EngineError`] when the device has no memory, or fails.
    pub fn record_steps(&mut self) -> Result<(), EngineError> {
        let (dtype, all) = (self.shape.dtype, 0..self.blocks.len());
        let unit = StepUnit::new(self.spec, dtype, &self.blocks, all);
        let (cuda, cache) = (&mut self.backend, &mut self.cache);
        Ok(self.steps.record(cuda, cache, self.kv_shape, &unit, self.whole.heads)?)
    }
}

/// The first `count` pages.
fn first_pages(count: usize) -> Vec<PageId> {
    (0..count).map(|page| PageId(u32::try_from(page).unwrap_or(u32::MAX))).collect()
}
