//! Decode steps as recorded launches. What changes from step to step (rows, positions, page tables,
//! adapters) lies in device memory at a fixed address, which is written before the launches;
//! everything else that a launch is given stays as it is. A recording is made for a number of
//! tokens and serves every step of no more: kernels end at once for tokens that are not there.
//!
//! ```text
//! open_steps ──> set_step(rows) ──> fixed(true), operations ...              the step itself
//!                               └─> record(operations) ──> replay, replay     the same, as one launch
//! ```
//! A recording cannot outlive what it names: once there is one, the pool gives nothing back to the
//! device, and it is replayed over the pages it was made for.

use std::sync::Arc;

use shared::model::MAX_STEP_TOKENS;

use super::address::Address;
use super::gpu::Gpu;
use super::memory::{MemoryPool, PooledMemory};
use super::pages::Outlet;
use super::{Cuda, Pages, Recording, batch, bytes_of};
use crate::kv::{PAGE_TOKENS, StepRow, total_tokens};
use crate::ops::OpError;
use crate::tuning::{CUDA_STEP_WORKSPACE_BYTES, cuda_packed_bytes};

/// In the words of a step: a token without an adapter.
pub(super) const NO_ADAPTER: u32 = u32::MAX;

/// Most pages that the rows of a recorded step name: 32 rows of 128 K positions.
const MAX_STEP_PAGES: usize = 1 << 18;

/// Fixed memory of recorded steps.
#[derive(Debug)]
pub(super) struct Fixed<G: Gpu> {
    words: PooledMemory<G>,
    /// Tiles of attention for whose results there is memory.
    tiles: usize,
    /// Results of tiles, and packed rows of products: one after the other.
    pub(super) workspace: PooledMemory<G>,
    /// Whether operations read the step from here.
    on: bool,
    /// The block of the span that the unit begins with.
    pub(super) first: usize,
}

/// Launches that were recorded.
#[derive(Debug)]
pub struct Recorded<G: Gpu> {
    graph: G::Graph,
    launches: u64,
    /// Of each block that is gone through.
    pages: Vec<(Address, Outlet)>,
    pool: Arc<MemoryPool<G>>,
}

impl<G: Gpu> Recorded<G> {
    /// Kernels that one replay launches.
    pub fn launches(&self) -> u64 {
        self.launches
    }
}

impl<G: Gpu> Cuda<G> {
    /// Reserves the memory of recorded steps over a pool of `pages` pages for each block, of
    /// attention with `heads` heads of `head_dim`, of `whole_heads` that whole blocks have: the ranks
    /// of a group record the same steps. No matrix has more than `inputs` inputs.
    ///
    /// # Errors
    /// When the device has no memory for them.
    pub fn open_steps(
        &mut self,
        [heads, whole_heads]: [usize; 2],
        head_dim: usize,
        pages: usize,
        inputs: usize,
    ) -> Result<(), OpError> {
        let named = pages.saturating_mul(MAX_STEP_TOKENS).min(MAX_STEP_PAGES);
        let words = MAX_STEP_TOKENS + batch::words(MAX_STEP_TOKENS, MAX_STEP_TOKENS) + named;
        let words = self.reserve(4 * words)?;
        // Of one tile: product, maximum and sum of every head.
        let tile_bytes = |heads: usize| heads * (head_dim + 4) * 4;
        // Every position of the pool once, and a tile that each row has begun; rows that share more
        // take turns outside recordings.
        let tiles = pages.div_ceil(batch::TILE_TOKENS / PAGE_TOKENS) + 2 * MAX_STEP_TOKENS;
        let tiles = tiles.min(CUDA_STEP_WORKSPACE_BYTES / tile_bytes(whole_heads.max(1)));
        let packed = cuda_packed_bytes(inputs, MAX_STEP_TOKENS);
        let workspace = self.reserve(packed.max(tiles * tile_bytes(heads)))?;
        self.fixed = Some(Fixed { words, tiles, workspace, on: false, first: 0 });
        Ok(())
    }

    /// Writes the rows of the next step to their fixed memory, for a unit that begins with the block
    /// `first` of the span. False: they do not fit, and nothing was written.
    ///
    /// # Errors
    /// When a number does not fit a word, or the device fails.
    pub fn set_step(&mut self, rows: &[StepRow<'_>], first: usize) -> Result<bool, OpError> {
        self.host("a step")?;
        let Some(fixed) = &mut self.fixed else {
            return Ok(false);
        };
        let fits = total_tokens(rows) <= MAX_STEP_TOKENS && batch::tiles(rows) <= fixed.tiles;
        let (at, room) = (fixed.words.address(), fixed.words.bytes());
        let mut words = std::mem::take(&mut self.words);
        let written = batch::write(rows, first, &mut words);
        fixed.first = first;
        words.splice(0..0, adapter_words(rows));
        let fits = fits && 4 * words.len() <= room;
        let done = match (&written, fits) {
            // SAFETY: the memory is as long at least.
            (Ok(()), true) => unsafe { self.gpu.write(bytes_of(&words), at) },
            _ => Ok(()),
        };
        self.words = words;
        written?;
        self.noted(done)?;
        Ok(fits)
    }

    /// From now on operations take the rows of [`set_step`](Self::set_step) for those that they are
    /// given, which only say for how many tokens there is room; or no longer.
    pub fn use_fixed_step(&mut self, on: bool) {
        if let Some(fixed) = &mut self.fixed {
            fixed.on = on;
        }
    }

    /// The fixed memory, while operations use it.
    pub(super) fn fixed(&self) -> Option<&Fixed<G>> {
        self.fixed.as_ref().filter(|fixed| fixed.on)
    }

    /// Records what `enqueue` launches over the pages of some blocks, instead of running it. `None`:
    /// not all of it can be recorded.
    ///
    /// # Errors
    /// Those of `enqueue`, and the device's.
    pub fn record(
        &mut self,
        pages: &mut [Pages<'_>],
        enqueue: impl FnOnce(&mut Cuda<G>, &mut [Pages<'_>]) -> Result<(), OpError>,
    ) -> Result<Option<Recorded<G>>, OpError> {
        self.host("a recording")?;
        let places = pages.iter().map(Pages::place).collect();
        if self.gpu.begin_recording().is_err() {
            return Ok(None);
        }
        self.pool.keep_all();
        let before = self.launches;
        self.recording = Recording::On;
        let done = enqueue(self, pages);
        let recording = std::mem::replace(&mut self.recording, Recording::Off);
        let graph = self.gpu.end_recording();
        match (done, graph) {
            (Err(_), _) if recording == Recording::Refused => Ok(None),
            (Ok(()), Err(_)) => Ok(None),
            (Err(error), _) => Err(error),
            (Ok(()), Ok(graph)) => Ok(Some(Recorded {
                graph,
                launches: self.launches - before,
                pages: places,
                pool: Arc::clone(&self.pool),
            })),
        }
    }

    /// Enqueues what was recorded over the same pages.
    ///
    /// # Errors
    /// When the pages are others, or the device fails.
    pub fn replay(
        &mut self,
        recorded: &Recorded<G>,
        pages: &mut [Pages<'_>],
    ) -> Result<(), OpError> {
        self.host("a replay")?;
        if !recorded.pages.iter().copied().eq(pages.iter().map(Pages::place))
            || !Arc::ptr_eq(&recorded.pool, &self.pool)
        {
            let (op, what) = ("replay", "the launches were recorded over other pages");
            return Err(OpError::Shape { op, what });
        }
        self.launches += recorded.launches;
        // SAFETY: the pool keeps all memory that launches were given since the first recording, and
        // the pages are borrowed.
        let done = unsafe { self.gpu.replay(&recorded.graph) };
        self.noted(done)
    }

    /// Kernels launched so far, recorded or run.
    pub fn launches(&self) -> u64 {
        self.launches
    }
}

impl<G: Gpu> Fixed<G> {
    /// Where the rows lie: behind the adapters of their tokens.
    pub(super) fn batch(&self) -> Address {
        self.words.address().offset(4 * MAX_STEP_TOKENS)
    }

    /// Where the number of tokens lies.
    pub(super) fn tokens(&self) -> Address {
        self.batch().offset(4)
    }

    /// Where the adapters of the tokens lie.
    pub(super) fn adapters(&self) -> Address {
        self.words.address()
    }
}

/// The adapter of each token of a step.
fn adapter_words(rows: &[StepRow<'_>]) -> [u32; MAX_STEP_TOKENS] {
    let mut words = [NO_ADAPTER; MAX_STEP_TOKENS];
    let of_tokens = rows
        .iter()
        .flat_map(|row| std::iter::repeat_n(row.adapter.unwrap_or(NO_ADAPTER), row.tokens));
    words.iter_mut().zip(of_tokens).for_each(|(word, of)| *word = of);
    words
}
