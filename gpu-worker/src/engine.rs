//! What the executor drives: the blocks of the span over the CPU, and the KV pages. Knows jobs only as rows and pages.

use std::collections::HashMap;
use std::time::Duration;

use kernels::ops::{OpError, convert};
use kernels::{Cpu, KvPages, PageLayout, StepRow};
use shared::block::{BlockIndex, Span};
use shared::dtype::DType;
use shared::job::JobBody;
use shared::model::PAGE_TOKENS;
use shared::shm::arena::ArenaMap;
use shared::shm::kv::KvMap;
use shared::shm::segment::OutOfBounds;

use crate::block::{
    BlockInput, BlockSpec, BlockWeights, PromptPart, WeightsError, Workspace, forward,
};
use crate::kv::{KvPool, KvShape, WrongSegment};
use crate::running::Running;
use crate::schedule::{BATCH_TOKENS, TaskId, Unit};
use crate::weights::map::MappedWeights;

/// Multiplications and additions of a unit that a small machine does in [`UNIT_TIME`](crate::schedule::UNIT_TIME).
const PIECE_FLOPS: u64 = 2_000_000_000;

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
}

/// The blocks of a span, ready to run.
pub struct Engine<'w> {
    backend: Cpu,
    spec: &'w BlockSpec,
    blocks: Vec<BlockWeights<'w, Cpu>>,
    work: Workspace<Cpu>,
    kv: KvMap,
    kv_shape: KvShape,
    shape: EngineShape,
    /// Hidden states of the rows of a unit, one after the other.
    hidden: Vec<f32>,
    /// A result on its way into the arena.
    bytes: Vec<u8>,
}

impl<'w> Engine<'w> {
    /// Puts weights, pages and backend together.
    ///
    /// # Errors
    /// [`EngineError::Weights`] or [`EngineError::Segment`] when they do not fit.
    pub fn new(
        mut backend: Cpu,
        spec: &'w BlockSpec,
        weights: &'w MappedWeights,
        kv: KvMap,
        shape: EngineShape,
    ) -> Result<Engine<'w>, EngineError> {
        let kv_shape = KvShape {
            layout: spec.page_layout(shape.dtype),
            blocks: shape.span.block_count(),
            pages: shape.kv_pages as usize,
        };
        let mut kv = kv;
        KvPool::new(kv_shape, kv.values_mut())?;
        let blocks = shape
            .span
            .blocks()
            .map(|block| {
                BlockWeights::new(&mut backend, spec, shape.dtype, |name| {
                    weights.tensor(block, name)
                })
                .map_err(|source| EngineError::Weights { block, source })
            })
            .collect::<Result<_, _>>()?;
        let work = Workspace::new(&mut backend);
        Ok(Engine {
            backend,
            spec,
            blocks,
            work,
            kv,
            kv_shape,
            shape,
            hidden: Vec::new(),
            bytes: Vec::new(),
        })
    }

    /// Tokens at whose multiples rows are cut: a power of two that depends on the size of a block alone, so that the same
    /// job is cut in the same places by every worker.
    pub fn piece_tokens(&self) -> usize {
        let tokens = PIECE_FLOPS / self.token_flops();
        let tokens = usize::try_from(tokens)
            .unwrap_or(usize::MAX)
            .clamp(PAGE_TOKENS, 256);
        1 << tokens.ilog2()
    }

    /// A unit that takes longer hangs: it would be computed at less than `SLOWEST_FLOPS`.
    pub fn unit_limit(&self) -> Duration {
        let tokens = self.piece_tokens().max(BATCH_TOKENS) as u64;
        Duration::from_secs(1 + self.token_flops().saturating_mul(tokens) / SLOWEST_FLOPS)
    }

    /// Multiplications and additions of one token in one block, attention left out.
    fn token_flops(&self) -> u64 {
        let elements = |shape: &[usize]| shape.iter().map(|&side| side as u64).product::<u64>();
        let weights: u64 = self
            .spec
            .tensors(0)
            .iter()
            .map(|t| elements(&t.shape))
            .sum();
        2 * weights.max(1)
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
        let mut pool = KvPool::new(self.kv_shape, self.kv.values_mut())?;
        for block in &body.blocks {
            let local = self
                .shape
                .span
                .local(*block)
                .ok_or(EngineError::Unit(block.0))?;
            pool.copy(local, &body.copies)?;
        }
        Ok(())
    }

    /// Runs one unit: its members' rows go through the block together, each row as if alone.
    ///
    /// # Errors
    /// [`EngineError`] when the unit does not fit its jobs.
    pub fn unit(
        &mut self,
        unit: &Unit,
        running: &mut HashMap<TaskId, Running>,
    ) -> Result<(), EngineError> {
        let missing = || EngineError::Unit(unit.block);
        let local = self
            .shape
            .span
            .local(BlockIndex(unit.block))
            .ok_or_else(missing)?;
        // A job without cache brings its pages; it is alone in its units.
        let mut scratch = match unit.members.as_slice() {
            [one] => running
                .get_mut(&one.task)
                .and_then(|j| j.begun.as_mut())
                .map(|b| std::mem::take(&mut b.scratch)),
            _ => None,
        }
        .unwrap_or_default();
        let (mut rows, mut prompts) = (Vec::new(), Vec::new());
        self.hidden.clear();
        for member in &unit.members {
            let job = running.get(&member.task).ok_or_else(missing)?;
            let begun = job.begun.as_ref().ok_or_else(missing)?;
            let values = job.values(member.pieces.clone());
            for (to, from) in job.prompt_parts(member.position, member.pieces.clone()) {
                let offset = self.hidden.len() + to.start - values.start;
                prompts.push(PromptPart {
                    offset,
                    values: begun.prompts.get(from).ok_or_else(missing)?,
                });
            }
            self.hidden
                .extend_from_slice(begun.hidden.get(values).ok_or_else(missing)?);
            rows.extend(job.rows(member.pieces.clone()));
        }
        let layout = self.layout();
        let weights = self.blocks.get(local).ok_or_else(missing)?;
        let input = BlockInput {
            rows: &rows,
            prompts: &prompts,
        };
        if scratch.is_empty() {
            let mut pool = KvPool::new(self.kv_shape, self.kv.values_mut())?;
            let mut pages = pool.block(local).ok_or_else(missing)?;
            forward(
                &mut self.backend,
                self.spec,
                weights,
                &mut self.work,
                input,
                &mut self.hidden,
                &mut pages,
            )?;
        } else {
            let mut pages = KvPages::new(layout, &mut scratch);
            forward(
                &mut self.backend,
                self.spec,
                weights,
                &mut self.work,
                input,
                &mut self.hidden,
                &mut pages,
            )?;
        }
        self.scatter(unit, running, scratch).ok_or_else(missing)
    }

    /// Gives the members what came out of the block.
    fn scatter(
        &self,
        unit: &Unit,
        running: &mut HashMap<TaskId, Running>,
        scratch: Vec<u8>,
    ) -> Option<()> {
        let mut rest = self.hidden.as_slice();
        for member in &unit.members {
            let job = running.get_mut(&member.task)?;
            let values = job.values(member.pieces.clone());
            let (own, others) = rest.split_at_checked(values.len())?;
            job.begun
                .as_mut()?
                .hidden
                .get_mut(values)?
                .copy_from_slice(own);
            rest = others;
        }
        if !scratch.is_empty() {
            let first = unit.members.first()?;
            running.get_mut(&first.task)?.begun.as_mut()?.scratch = scratch;
        }
        Some(())
    }

    /// Writes the result of a job into its output slot.
    ///
    /// # Errors
    /// When the slot lies outside the arena, which the check of the body excludes.
    pub fn output(
        &mut self,
        body: &JobBody,
        hidden: &[f32],
        arena: &ArenaMap,
    ) -> Result<(), OutOfBounds> {
        self.bytes.resize(hidden.len() * body.dtype.size_bytes(), 0);
        convert::from_f32(body.dtype, hidden, &mut self.bytes);
        arena.write(body.output.offset, &self.bytes)
    }

    /// Sends `rows` through the first block over pages of the caller's own: for measurements.
    ///
    /// # Errors
    /// [`EngineError`] when the rows do not fit the pages.
    pub fn trial(
        &mut self,
        rows: &[StepRow<'_>],
        hidden: &mut [f32],
        pages: &mut [u8],
    ) -> Result<(), EngineError> {
        let weights = self.blocks.first().ok_or(EngineError::Unit(0))?;
        let mut pages = KvPages::new(self.kv_shape.layout, pages);
        let input = BlockInput { rows, prompts: &[] };
        Ok(forward(
            &mut self.backend,
            self.spec,
            weights,
            &mut self.work,
            input,
            hidden,
            &mut pages,
        )?)
    }

    /// Gives back memory that only large units need.
    pub fn trim(&mut self) {
        self.work = Workspace::new(&mut self.backend);
        self.hidden = Vec::new();
        self.bytes = Vec::new();
    }

    fn layout(&self) -> PageLayout {
        self.kv_shape.layout
    }
}

impl std::fmt::Debug for Engine<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}
