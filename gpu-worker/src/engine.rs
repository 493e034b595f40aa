//! What the executor drives: the blocks of the span over a device, and the KV pages. Knows jobs only as rows and pages.

mod decode;
mod gradients;
mod parked;
#[cfg(all(test, feature = "emu"))]
mod parked_tests;
#[cfg(all(test, feature = "emu"))]
mod tests;
mod transfer;
mod units;

pub use parked::Parked;

use std::sync::Arc;
use std::time::Duration;

use kernels::ops::OpError;
use kernels::{PageLayout, StepRow};
use shared::block::{BlockIndex, Span};
use shared::dtype::DType;
use shared::ids::PageId;
use shared::job::{JobBody, JobKind};
use shared::model::PAGE_TOKENS;
use shared::shm::arena::ArenaMap;
use shared::shm::kv::KvMap;

use crate::block::{
    BlockInput, BlockSpec, BlockWeights, GradientWork, WeightsError, Workspace, forward,
};
use crate::device::Paged;
use crate::kv::{KvShape, WrongSegment};
use crate::schedule::{BATCH_TOKENS, UnitTimes};
use crate::sizing::{scratch_bytes, unit_tokens};
use crate::weights::map::MappedWeights;

/// Multiplications and additions of a unit that a small machine does in the time of one ([`UnitTimes::PROCESSOR`]).
const UNIT_FLOPS: u64 = 2_000_000_000;

/// Pieces of such a unit, and the fewest tokens of one: so many that units come close to the time they may take, and no more, as a
/// processor computes few tokens at a time for little less than many.
const UNIT_PIECES: usize = 4;
const PIECE_TOKENS: usize = 4;

/// Work of a unit of gradients, in units of forward of as many tokens: that again, two gradients of attention, one of each matrix.
pub(crate) const BACK_COST: usize = 4;

/// Rows of a decode step and pages of each that a rehearsal computes.
const REHEARSED_ROWS: usize = 32;
const REHEARSED_PAGES: usize = 4;

/// A machine that does less in a second does not serve.
const SLOWEST_FLOPS: u64 = 5_000_000_000;

/// Why a unit could not be computed. For a job that was checked each of these is a bug.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// An operation refused its arguments.
    #[error(transparent)]
    Op(#[from] OpError),
    /// The kv segment is too small.
    #[error(transparent)]
    Segment(#[from] WrongSegment),
    /// The weights do not make a block.
    #[error("block {block}")]
    Weights {
        /// The block.
        block: BlockIndex,
        /// Why.
        #[source]
        source: WeightsError,
    },
    /// A unit names a job, a block or values that are not there.
    #[error("a unit of block {0} names what is not there")]
    Unit(u32),
}

/// What an engine is made for.
#[derive(Clone, Copy, Debug)]
pub struct EngineShape {
    /// The blocks.
    pub span: Span,
    /// Block dtype.
    pub dtype: DType,
    /// Pages per block.
    pub kv_pages: u32,
    /// Whether the pages are in the segment too, or instead: those of the processor always are.
    pub kv_survives: bool,
    /// Bytes that a job for gradients may keep of its blocks.
    pub gradient_bytes: u64,
}

/// The blocks of a span, ready to run.
pub struct Engine<'w, B: Paged> {
    backend: B,
    spec: &'w BlockSpec,
    blocks: Vec<BlockWeights<'w, B>>,
    work: Workspace<B>,
    gradients: GradientWork<B>,
    cache: B::Cache,
    kv_shape: KvShape,
    shape: EngineShape,
    /// Pages that a job without cache brings along, while they are used.
    room: B::Room,
    /// Hidden states of the rows of a unit, one after the other, when they are not where their job keeps them.
    states: B::Buffer,
    /// The input of a block on the way back, and the sums of a unit there.
    before: B::Buffer,
    sums: [B::Buffer; 2],
    /// What jobs keep on the device: those of forward, and those for gradients.
    regions: [parked::Region<B>; 2],
    /// Most bytes of a job for gradients, if more is kept of it than its inputs, keys and values.
    kept_bytes: u64,
    /// The arena of the link that is served.
    link: Option<(Arc<ArenaMap>, B::Reach)>,
    /// Recorded decode steps, where the device records and [`record_steps`](Self::record_steps) was called.
    decode: Option<decode::Decode<B>>,
}

impl<'w, B: Paged> Engine<'w, B> {
    /// Puts weights, pages and backend together.
    ///
    /// # Errors
    /// [`EngineError::Weights`] or [`EngineError::Segment`] when they do not fit.
    pub fn new(
        mut backend: B,
        spec: &'w BlockSpec,
        weights: &'w MappedWeights,
        kv: KvMap,
        shape: EngineShape,
    ) -> Result<Engine<'w, B>, EngineError> {
        let kv_shape = KvShape {
            layout: spec.page_layout(shape.dtype),
            blocks: shape.span.block_count(),
            pages: shape.kv_pages as usize,
        };
        let cache = backend.open_cache(kv_shape, shape.kv_survives.then_some(kv))?;
        let blocks = shape
            .span
            .blocks()
            .map(|block| {
                block_weights(&mut backend, spec, weights, shape.dtype, block)
                    .map_err(|source| EngineError::Weights { block, source })
            })
            .collect::<Result<_, _>>()?;
        let work = Workspace::new(&mut backend);
        let gradients = GradientWork::new(&mut backend);
        let regions = Self::regions(&mut backend, spec);
        let kept_bytes = match backend.keeps_results() {
            true => shape.gradient_bytes,
            false => 0,
        };
        let mut empty = || backend.buffer(0);
        let (states, before, sums) = (empty(), empty(), [empty(), empty()]);
        Ok(Engine {
            backend,
            spec,
            blocks,
            work,
            gradients,
            cache,
            kv_shape,
            shape,
            room: B::Room::default(),
            states,
            before,
            sums,
            regions,
            kept_bytes,
            link: None,
            decode: None,
        })
    }

    /// Tokens at whose multiples rows are cut: a power of two that depends on the size of a block alone, so that the same
    /// job is cut in the same places by every worker. Gradients cost more, but are cut where pages end: within one, their sums are of all
    /// its tokens.
    pub fn piece_tokens(&self, kind: JobKind) -> usize {
        match kind {
            JobKind::Step | JobKind::Forward => {
                (self.forward_tokens() / UNIT_PIECES).max(PIECE_TOKENS)
            }
            JobKind::Backward => (self.forward_tokens() / BACK_COST).max(PAGE_TOKENS),
        }
    }

    /// Tokens of a unit of a forward pass on a small machine.
    pub(crate) fn forward_tokens(&self) -> usize {
        forward_tokens(self.spec)
    }

    /// How long units may take on this device.
    pub fn unit_times(&self) -> UnitTimes {
        self.backend.unit_times()
    }

    /// Most tokens of units other than decode steps, there and on the way back: as many as memory is planned for, where a device has its own.
    pub fn unit_tokens(&self) -> [usize; 2] {
        match self.backend.parks() {
            true => unit_tokens(self.spec),
            false => [usize::MAX; 2],
        }
    }

    /// A unit that takes longer hangs: it would be computed at less than `SLOWEST_FLOPS`.
    pub fn unit_limit(&self) -> Duration {
        let tokens = (self.forward_tokens().max(BATCH_TOKENS)).max(BACK_COST * PAGE_TOKENS) as u64;
        Duration::from_secs(1 + self.token_flops().saturating_mul(tokens) / SLOWEST_FLOPS)
    }

    fn token_flops(&self) -> u64 {
        token_flops(self.spec)
    }

    /// Bytes of one page of one block.
    pub fn page_bytes(&self) -> usize {
        self.layout().page_bytes()
    }

    /// Width of the hidden states.
    pub fn hidden_size(&self) -> usize {
        self.spec.hidden
    }

    /// Makes the page copies of a job in all its blocks.
    ///
    /// # Errors
    /// [`EngineError`] for a job that was not checked.
    pub fn copy_pages(&mut self, body: &JobBody) -> Result<(), EngineError> {
        if body.copies.is_empty() {
            return Ok(());
        }
        for block in &body.blocks {
            let local = self
                .shape
                .span
                .local(*block)
                .ok_or(EngineError::Unit(block.0))?;
            self.backend
                .copy_pages(&mut self.cache, local, &body.copies)?;
        }
        Ok(())
    }

    /// Sends `rows` through the first block over `page_count` pages of its own: for measurements. Returns when the device is done.
    ///
    /// # Errors
    /// [`EngineError`] when the rows do not fit the pages.
    pub fn trial(
        &mut self,
        rows: &[StepRow<'_>],
        hidden: &mut [f32],
        page_count: usize,
    ) -> Result<(), EngineError> {
        let weights = self.blocks.first().ok_or(EngineError::Unit(0))?;
        let layout = self.kv_shape.layout;
        let bytes = page_count * layout.page_bytes();
        self.backend.grow(&mut self.states, hidden.len());
        self.backend.upload(hidden, &mut self.states)?;
        let mut pages = self.backend.blank(&mut self.room, layout, bytes)?;
        let input = BlockInput {
            rows,
            prompts: &[],
            adapters: &[],
            lengths: &[],
        };
        forward(
            &mut self.backend,
            self.spec,
            weights,
            &mut self.work,
            input,
            &mut self.states,
            &mut pages,
        )?;
        Ok(self.backend.download(&self.states, hidden)?)
    }

    /// Runs the largest units of forward passes once, and takes the memory of the largest unit of a backward pass, so that the device has what it needs for any smaller one: memory that is not there is
    /// missed here, not in a client's step.
    ///
    /// # Errors
    /// [`EngineError`] when the device has no memory, or fails.
    pub fn rehearse(&mut self) -> Result<(), EngineError> {
        let tokens = self.forward_tokens().max(BATCH_TOKENS);
        let count = tokens.div_ceil(PAGE_TOKENS);
        let pages: Vec<PageId> = (0..count)
            .map(|page| PageId(u32::try_from(page).unwrap_or(u32::MAX)))
            .collect();
        let rows = [StepRow {
            tokens,
            prefix: 0,
            pages: &pages,
        }];
        let mut hidden = vec![0.0; tokens * self.spec.hidden];
        self.trial(&rows, &mut hidden, count)?;
        let ranks = self.blocks.iter().map(BlockWeights::largest_rank);
        let largest_rank = ranks.max().unwrap_or(0);
        self.open_regions()?;
        let [forward, back] = unit_tokens(self.spec);
        let (backend, spec) = (&mut self.backend, self.spec);
        self.work.grow(backend, spec, forward, largest_rank);
        self.gradients.grow(backend, spec, back, largest_rank);
        let hidden_width = spec.hidden;
        backend.grow(&mut self.states, forward.max(back) * hidden_width);
        backend.grow(&mut self.before, back * hidden_width);
        let positions = self.kv_shape.pages * PAGE_TOKENS;
        backend.warm(&scratch_bytes(spec, positions))?;
        // The largest batch of decode steps.
        let pages: Vec<PageId> = (0..REHEARSED_ROWS * REHEARSED_PAGES)
            .map(|page| PageId(u32::try_from(page).unwrap_or(u32::MAX)))
            .collect();
        let rows: Vec<StepRow<'_>> = pages
            .chunks(REHEARSED_PAGES)
            .map(|pages| StepRow {
                tokens: 1,
                prefix: REHEARSED_PAGES * PAGE_TOKENS - 1,
                pages,
            })
            .collect();
        self.trial(
            &rows,
            &mut hidden[..rows.len() * self.spec.hidden],
            pages.len(),
        )
    }

    /// Gives back memory that only large units need.
    pub fn trim(&mut self) {
        self.work = Workspace::new(&mut self.backend);
        self.gradients = GradientWork::new(&mut self.backend);
        self.states = self.backend.buffer(0);
        self.room = B::Room::default();
    }

    fn layout(&self) -> PageLayout {
        self.kv_shape.layout
    }
}

/// Tokens of a unit of a forward pass on a small machine.
pub(crate) fn forward_tokens(spec: &BlockSpec) -> usize {
    let tokens = UNIT_FLOPS / token_flops(spec);
    let tokens = usize::try_from(tokens)
        .unwrap_or(usize::MAX)
        .clamp(PAGE_TOKENS, 256);
    1 << tokens.ilog2()
}

/// Multiplications and additions of one token in one block, attention left out.
fn token_flops(spec: &BlockSpec) -> u64 {
    let elements = |shape: &[usize]| shape.iter().map(|&side| side as u64).product::<u64>();
    let tensors = spec.tensors(0);
    let weights: u64 = tensors.iter().map(|t| elements(&t.shape)).sum();
    2 * weights.max(1)
}

/// The weights of a block, with its parts of all adapters.
fn block_weights<'w, B: Paged>(
    backend: &mut B,
    spec: &BlockSpec,
    weights: &'w MappedWeights,
    dtype: DType,
    block: BlockIndex,
) -> Result<BlockWeights<'w, B>, WeightsError> {
    let mut made = BlockWeights::new(backend, spec, dtype, |name| weights.tensor(block, name))?;
    for adapter in 0..weights.adapter_count() {
        made.add_adapter(backend, spec, |name| weights.adapter(adapter, block, name))?;
    }
    Ok(made)
}

impl<B: Paged> std::fmt::Debug for Engine<'_, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, feature = "emu"))]
mod memory_tests;
#[cfg(all(test, feature = "emu"))]
mod mixture_tests;
