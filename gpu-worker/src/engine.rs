//! What the executor drives: the blocks of the span over a device, and the KV pages. Knows jobs only as rows and pages.

use std::collections::HashMap;
use std::time::Duration;

use kernels::ops::{OpError, convert};
use kernels::{PageLayout, StepRow};
use shared::block::{BlockIndex, Span};
use shared::dtype::DType;
use shared::ids::PageId;
use shared::job::{JobBody, JobKind};
use shared::model::PAGE_TOKENS;
use shared::shm::arena::ArenaMap;
use shared::shm::kv::KvMap;
use shared::shm::segment::OutOfBounds;

use crate::block::{
    BlockInput, BlockSpec, BlockWeights, GradientWork, PromptPart, Sums, WeightsError, Workspace,
    backward, forward,
};
use crate::device::Paged;
use crate::kv::{KvShape, WrongSegment};
use crate::running::{Back, Begun, Running};
use crate::schedule::{BATCH_TOKENS, Member, TaskId, Unit};
use crate::sizing::attention_bytes;
use crate::weights::map::MappedWeights;

/// Multiplications and additions of a unit that a small machine does in [`UNIT_TIME`](crate::schedule::UNIT_TIME).
const PIECE_FLOPS: u64 = 2_000_000_000;

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
    /// Hidden states of the rows of a unit, one after the other: on the host, and on the device.
    hidden: Vec<f32>,
    states: B::Buffer,
    sums: [B::Buffer; 2],
    /// A result on its way into the arena.
    bytes: Vec<u8>,
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
        let mut empty = || backend.buffer(0);
        let (states, sums) = (empty(), [empty(), empty()]);
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
            hidden: Vec::new(),
            states,
            sums,
            bytes: Vec::new(),
        })
    }

    /// Tokens at whose multiples rows are cut: a power of two that depends on the size of a block alone, so that the same
    /// job is cut in the same places by every worker. Gradients are cut finer, as they cost more.
    pub fn piece_tokens(&self, kind: JobKind) -> usize {
        match kind {
            JobKind::Step | JobKind::Forward => self.forward_tokens(),
            JobKind::Backward => (self.forward_tokens() / BACK_COST).max(PAGE_TOKENS),
        }
    }

    fn forward_tokens(&self) -> usize {
        forward_tokens(self.spec)
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

    /// Elements of the keys of a token in one block.
    pub fn kv_width(&self) -> usize {
        self.spec.kv_heads * self.spec.head_dim
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
        let mut scratch_range = 0..0;
        if let [one] = unit.members.as_slice() {
            let job = running.get_mut(&one.task).ok_or_else(missing)?;
            if let Some((position, pieces)) = job.back(one.position, one.pieces.clone()) {
                return self.back_unit(unit.block, local, position, pieces, job);
            }
            keep_input(job, one).ok_or_else(missing)?;
            scratch_range = job.scratch_range(one.position, self.page_bytes());
        }
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
        let (mut adapters, mut lengths) = (Vec::new(), Vec::new());
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
            adapters.resize(rows.len(), job.body.adapter);
            lengths.extend(job.row_lengths(member.pieces.clone()));
        }
        let layout = self.layout();
        let weights = self.blocks.get(local).ok_or_else(missing)?;
        let input = BlockInput {
            rows: &rows,
            prompts: &prompts,
            adapters: &adapters,
            lengths: &lengths,
        };
        self.backend.grow(&mut self.states, self.hidden.len());
        self.backend.upload(&self.hidden, &mut self.states)?;
        if scratch.is_empty() {
            let mut pages = self.backend.cached(&mut self.cache, local, &rows)?;
            forward(
                &mut self.backend,
                self.spec,
                weights,
                &mut self.work,
                input,
                &mut self.states,
                &mut pages,
            )?;
        } else {
            let own = scratch.get_mut(scratch_range).ok_or_else(missing)?;
            let mut pages = self.backend.lend(&mut self.room, layout, own)?;
            forward(
                &mut self.backend,
                self.spec,
                weights,
                &mut self.work,
                input,
                &mut self.states,
                &mut pages,
            )?;
            drop(pages);
            self.backend.give_back(&mut self.room, own)?;
        }
        self.backend.download(&self.states, &mut self.hidden)?;
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

    /// A unit on the way back: the gradient of some pieces through the block at `position` of the job.
    fn back_unit(
        &mut self,
        block: u32,
        local: usize,
        position: usize,
        pieces: std::ops::Range<usize>,
        job: &mut Running,
    ) -> Result<(), EngineError> {
        let missing = || EngineError::Unit(block);
        let (page_bytes, layout) = (self.page_bytes(), self.layout());
        let mut begun = job.begun.take().ok_or_else(missing)?;
        let Begun {
            prompts: all_prompts,
            scratch,
            back,
            ..
        } = &mut begun;
        let back = back.as_mut().ok_or_else(missing)?;
        if pieces.end == job.piece_count() {
            back.keys.fill(0.0);
            back.values.fill(0.0);
        }
        let values = job.values(pieces.clone());
        let size = self.shape.dtype.size_bytes();
        let input = back.inputs.get(position).ok_or_else(missing)?;
        let input = input
            .get(values.start * size..values.end * size)
            .ok_or_else(missing)?;
        let x = convert::to_vec(self.shape.dtype, input);
        let mut prompts = Vec::new();
        for (to, from) in job.prompt_parts(position, pieces.clone()) {
            prompts.push(PromptPart {
                offset: to.start - values.start,
                values: all_prompts.get(from).ok_or_else(missing)?,
            });
        }
        let rows = job.rows(pieces.clone());
        let own = job.scratch_range(position, page_bytes);
        let own = scratch.get_mut(own).ok_or_else(missing)?;
        let gradient = back.gradient.get_mut(values).ok_or_else(missing)?;
        let [keys, key_values] = &mut self.sums;
        for (host, device) in [
            (&*gradient, &mut self.states),
            (&back.keys, &mut *keys),
            (&back.values, &mut *key_values),
        ] {
            self.backend.grow(device, host.len());
            self.backend.upload(host, device)?;
        }
        let mut pages = self.backend.lend(&mut self.room, layout, own)?;
        backward(
            &mut self.backend,
            self.spec,
            self.blocks.get(local).ok_or_else(missing)?,
            &mut self.gradients,
            BlockInput {
                rows: &rows,
                prompts: &prompts,
                adapters: &vec![job.body.adapter; rows.len()],
                lengths: &job.row_lengths(pieces.clone()),
            },
            &x,
            &mut self.states,
            Sums {
                keys: &mut *keys,
                values: &mut *key_values,
                starts: &job.row_starts(pieces.clone()),
            },
            &mut pages,
        )?;
        drop(pages);
        self.backend.give_back(&mut self.room, own)?;
        self.backend.download(&self.states, gradient)?;
        self.backend.download(keys, &mut back.keys)?;
        self.backend.download(key_values, &mut back.values)?;
        if pieces.start == 0 {
            keep_prompt_gradient(&job.body, position, back).ok_or_else(missing)?;
        }
        job.begun = Some(begun);
        Ok(())
    }

    /// Writes the results of a job into its output slots.
    ///
    /// # Errors
    /// When a slot lies outside the arena, which the check of the body excludes.
    pub fn output(
        &mut self,
        body: &JobBody,
        begun: &Begun,
        arena: &ArenaMap,
    ) -> Result<(), OutOfBounds> {
        let prompts = begun.back.as_ref().map(|back| back.prompts.as_slice());
        let results = [
            Some((body.output, begun.result())),
            body.prompt_gradient.zip(prompts),
        ];
        results
            .into_iter()
            .flatten()
            .try_for_each(|(slot, values)| {
                self.bytes.resize(values.len() * body.dtype.size_bytes(), 0);
                convert::from_f32(body.dtype, values, &mut self.bytes);
                arena.write(slot.offset, &self.bytes)
            })
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
        let back = self.piece_tokens(JobKind::Backward);
        self.gradients
            .grow(&mut self.backend, self.spec, back, largest_rank);
        let positions = self.kv_shape.pages * PAGE_TOKENS;
        self.backend.warm(attention_bytes(self.spec, positions))?;
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
        self.hidden = Vec::new();
        self.states = self.backend.buffer(0);
        self.room = B::Room::default();
        self.bytes = Vec::new();
    }

    fn layout(&self) -> PageLayout {
        self.kv_shape.layout
    }
}

/// Tokens of the pieces of a forward pass.
pub(crate) fn forward_tokens(spec: &BlockSpec) -> usize {
    let tokens = PIECE_FLOPS / token_flops(spec);
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

/// Keeps the input of a block for the way back, if there will be one.
fn keep_input(job: &mut Running, member: &Member) -> Option<()> {
    let (values, dtype) = (job.values(member.pieces.clone()), job.body.dtype);
    let begun = job.begun.as_mut()?;
    let Some(back) = &mut begun.back else {
        return Some(());
    };
    let size = dtype.size_bytes();
    let input = back.inputs.get_mut(member.position)?;
    let bytes = input.get_mut(values.start * size..values.end * size)?;
    convert::from_f32(dtype, begun.hidden.get(values)?, bytes);
    Some(())
}

/// Takes the gradient of the prompts of a block: that of the hidden states they were added to.
fn keep_prompt_gradient(body: &JobBody, position: usize, back: &mut Back) -> Option<()> {
    let Some(prompts) = body.prompts.filter(|_| body.prompt_gradient.is_some()) else {
        return Some(());
    };
    let hidden = body.hidden as usize;
    let (batch, row) = (body.batch as usize, body.tokens as usize * hidden);
    let part = prompts.tokens as usize * hidden;
    for index in 0..batch {
        let to = (position * batch + index) * part;
        let from = back.gradient.get(index * row..index * row + part)?;
        back.prompts.get_mut(to..to + part)?.copy_from_slice(from);
    }
    Some(())
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
