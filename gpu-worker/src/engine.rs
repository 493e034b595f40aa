//! What the executor drives: the blocks of the span over a device, and the KV pages. A job is
//! [begun](Engine::begin), goes through its [units](Engine::unit), and its
//! [output](Engine::output) is written. What a device does in its own way is behind
//! [`DeviceBackend`].

mod cuda;
mod job;
#[cfg(all(test, feature = "emu"))]
mod resident_tests;
#[cfg(all(test, feature = "emu"))]
mod tests;
mod units;

pub use job::Begun;

use std::sync::Arc;

use blocks::kv::{KvShape, page_layout};
use blocks::map::MappedWeights;
use blocks::{BlockWeights, WeightsError, Workspace, forward};
use kernels::StepRow;
use kernels::ops::OpError;
use model::BlockSpec;
use model::shards::Shard;
use model::sizing::{BACK_COST, forward_tokens};
use shared::block::{BlockIndex, Span};
use shared::dtype::DType;
use shared::job::{JobBody, WorkKind};
use shared::model::PAGE_TOKENS;
use shared::shm::arena::ArenaMap;
use shared::shm::kv::KvMap;

use crate::device::{DeviceBackend, PassRunner, StepRunner, UnitLimits};

/// Pieces of a unit of [`forward_tokens`], and the fewest tokens of one: so many that units come
/// close to the time they may take, and no more, as a processor computes few tokens at a time for
/// little less than many.
const UNIT_PIECES: usize = 4;
const PIECE_TOKENS: usize = 4;

/// Why a unit could not be computed. For a job that was checked each of these is a bug.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// An operation refused its arguments.
    #[error(transparent)]
    Op(#[from] OpError),
    /// The weights do not make a block.
    #[error("block {block}")]
    Weights {
        block: BlockIndex,
        #[source]
        source: WeightsError,
    },
    /// A unit names a job, a block or values that are not there.
    #[error("a unit of block {0} names a job, block or value that does not exist")]
    Unit(u32),
}

/// What an engine is made for.
#[derive(Clone, Copy, Debug)]
pub struct EngineShape {
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

/// The form of the blocks that an engine runs: whole ones, or the shard of a rank of a group, whose
/// weights are [mapped](MappedWeights::map_shard) and whose backend has [joined](kernels::Cpu::join)
/// its group.
#[derive(Clone, Copy, Debug)]
pub struct BlockForm<'w> {
    /// The blocks of the model: jobs are cut by them alike on all ranks.
    pub whole: &'w BlockSpec,
    /// What this rank has of them; `None` in a group of one.
    pub shard: Option<&'w Shard>,
}

impl<'w> BlockForm<'w> {
    /// The form of what runs here.
    pub fn spec(&self) -> &'w BlockSpec {
        self.shard.map_or(self.whole, |shard| &shard.spec)
    }
}

impl<'w> From<&'w BlockSpec> for BlockForm<'w> {
    fn from(whole: &'w BlockSpec) -> BlockForm<'w> {
        BlockForm { whole, shard: None }
    }
}

/// The blocks of a span, ready to run.
pub struct Engine<'w, B: DeviceBackend> {
    backend: B,
    /// Of the blocks of the model.
    whole: &'w BlockSpec,
    /// Of what runs here.
    spec: &'w BlockSpec,
    blocks: Vec<BlockWeights<'w, B>>,
    cache: B::Cache,
    kv_shape: KvShape,
    shape: EngineShape,
    /// Intermediate results of forward passes.
    work: Workspace<B>,
    steps: B::Steps,
    passes: B::Passes,
    /// The arena of the link that is served.
    link: Option<(Arc<ArenaMap>, B::Arena)>,
    /// Hidden states and pages of measurements.
    trial: (B::Buffer, B::PageMemory),
}

impl<'w, B: DeviceBackend> Engine<'w, B> {
    /// Puts weights, pages and backend together. `form` is that of whole blocks, or a rank's.
    ///
    /// # Errors
    /// [`EngineError::Weights`] or [`EngineError::Op`] when they do not fit.
    pub fn new(
        mut backend: B,
        form: impl Into<BlockForm<'w>>,
        weights: &'w MappedWeights,
        kv: KvMap,
        shape: EngineShape,
    ) -> Result<Engine<'w, B>, EngineError> {
        let form = form.into();
        let (whole, spec) = (form.whole, form.spec());
        let kv_shape = KvShape {
            layout: page_layout(spec, shape.dtype),
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
        Ok(Engine {
            work: Workspace::new(&mut backend),
            steps: B::Steps::new(&mut backend),
            passes: B::Passes::new(&mut backend, spec, shape.gradient_bytes),
            trial: (backend.buffer(0), B::PageMemory::default()),
            backend,
            whole,
            spec,
            blocks,
            cache,
            kv_shape,
            shape,
            link: None,
        })
    }

    /// Tokens at whose multiples rows are cut: a power of two that depends on the size of a block
    /// alone, so that the same job is cut in the same places by every worker. Gradients cost
    /// more, but are cut where pages end: within one, their sums are of all its tokens.
    pub fn piece_tokens(&self, kind: WorkKind) -> usize {
        match kind {
            WorkKind::Decode | WorkKind::Prefill | WorkKind::Forward => {
                (self.forward_tokens() / UNIT_PIECES).max(PIECE_TOKENS)
            }
            WorkKind::Backward => (self.forward_tokens() / BACK_COST).max(PAGE_TOKENS),
        }
    }

    /// Tokens of a unit of a forward pass on a small machine.
    pub(crate) fn forward_tokens(&self) -> usize {
        forward_tokens(self.whole)
    }

    /// How large units may be on this device.
    pub fn unit_limits(&self) -> UnitLimits {
        self.backend.unit_limits(self.whole)
    }

    /// What rank 0 of the group decides, on all ranks; in a group of one what is given.
    ///
    /// # Errors
    /// [`EngineError::Op`] when the exchange fails.
    pub fn agree(&mut self, is_so: bool) -> Result<bool, EngineError> {
        let mut word = self.backend.buffer(1);
        self.backend.upload(&[if is_so { 1.0 } else { 0.0 }], &mut word)?;
        self.backend.broadcast(&mut word, 1)?;
        let mut told = [0.0];
        self.backend.download(&word, &mut told)?;
        Ok(told[0] != 0.0)
    }

    /// Bytes of one page of one block.
    pub fn page_bytes(&self) -> usize {
        self.kv_shape.layout.page_bytes()
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
        if body.pages.copies.is_empty() {
            return Ok(());
        }
        for block in &body.blocks {
            let local = self.shape.span.local(*block).ok_or(EngineError::Unit(block.0))?;
            self.backend.copy_pages(&mut self.cache, local, &body.pages.copies)?;
        }
        Ok(())
    }

    /// Sends `rows` through the first block over `page_count` pages of its own: for measurements.
    /// Returns when the device is done.
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
        let (backend, (states, memory)) = (&mut self.backend, &mut self.trial);
        backend.grow(states, hidden.len());
        backend.upload(hidden, states)?;
        let mut pages = backend.pages_in(memory, layout, page_count * layout.page_bytes())?;
        forward(backend, self.spec, weights, &mut self.work, rows, states, &mut pages)?;
        Ok(backend.download(states, hidden)?)
    }

    /// Gives back the memory of measurements.
    pub fn trim(&mut self) {
        self.work = Workspace::new(&mut self.backend);
        self.end_trials();
    }

    fn end_trials(&mut self) {
        self.trial = (self.backend.buffer(0), B::PageMemory::default());
    }

    /// Serves jobs whose tensors lie in `arena`, and no others.
    pub fn link(&mut self, arena: &Arc<ArenaMap>) {
        // The old one first: both at once would be pinned.
        self.link = None;
        let opened = self.backend.open_arena(arena);
        self.link = Some((Arc::clone(arena), opened));
    }

    /// Waits until the device has done all that it was given.
    ///
    /// # Errors
    /// The device's.
    pub fn synchronize(&mut self) -> Result<(), EngineError> {
        Ok(self.backend.synchronize(&mut self.cache)?)
    }
}

/// The weights of a block, with its parts of all adapters.
fn block_weights<'w, B: DeviceBackend>(
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

impl<B: DeviceBackend> std::fmt::Debug for Engine<'_, B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("shape", &self.shape).finish_non_exhaustive()
    }
}

#[cfg(all(test, feature = "emu"))]
mod memory_tests;
#[cfg(all(test, feature = "emu"))]
mod mixture_tests;
