//! Steps on a CUDA device: recordings of each block and of runs of blocks, by number of tokens,
//! rounded up to a power of two. Their launches read rows, positions and page tables from memory that is written once per
//! unit, so that nothing is recorded again as sequences grow, and the hidden states lie at one
//! address from the first block of a unit to its last.
//!
//! ```text
//! unit   rows written ─ states gathered ─ angles ─ run ─ block ─ ... ─ last sum ─ states scattered ─ wait
//!                                                  (one launch each, nothing of the host between)
//! ```
//! The last sum of a block is made with the first norm of the next. Runs begin at every
//! [`RUN_BLOCKS`]th block of the span, so that any unit consists of runs and few single blocks.
//!
//! Where adapters are loaded, each block is recorded twice: steps without any pay nothing for them.
//! Steps with adapters go block by block, and so does where deep prompts, which come with the first
//! step of a session, are added before a block. A step of more than 32 tokens runs block by block, with the same bits.

use std::collections::HashMap;
use std::ops::Range;

use blocks::kv::KvShape;
use blocks::{
    BlockWeights, PromptPart, Workspace, add_prompts, close_run, forward_joined, open_run, prepare,
};
use kernels::StepRow;
use kernels::cuda::{Buffer, Cuda, Gpu, Pages, Recorded};
use kernels::kv::total_tokens;
use kernels::ops::OpError;
use model::BlockSpec;
use shared::ids::PageId;
use shared::model::MAX_STEP_TOKENS;
use tracing::{debug, info, warn};

use super::NOT_THERE;
use crate::device::direct::{gather, scatter};
use crate::device::{DeviceBackend, DirectSteps, StepRunner, StepUnit};

/// Memory of a device that recordings leave to others. They are planned for
/// ([`model::sizing::graph_block_bytes`]), but what they take is the driver's choice: a
/// block for which there is no memory is launched directly.
const SPARE_BYTES: u64 = 64 << 20;

/// Blocks of a recorded run. Between two recordings launches do not overlap, which costs about a
/// microsecond (estimated: the gaps of `kernels/prebuilt/model/cost.py`).
const RUN_BLOCKS: usize = 8;

/// Runs steps by recorded launches where there are recordings, else block by block.
pub struct RecordedSteps<G: Gpu> {
    direct: DirectSteps<Cuda<G>>,
    /// Nothing before [`record`](Self::record).
    recordings: Option<Recordings<G>>,
}

/// The recordings, and the memory that they read and write.
struct Recordings<G: Gpu> {
    work: Workspace<Cuda<G>>,
    /// Hidden states of the step `[MAX_STEP_TOKENS, hidden]`.
    states: Buffer<G>,
    /// As many negative zeros, for [`open_run`].
    nothing: Buffer<G>,
    /// `None`: it cannot be recorded.
    graphs: HashMap<Key, Option<Recorded<G>>>,
    /// Whether there are recordings with adapters.
    adapted: bool,
    /// Recordings made.
    recorded: u64,
    /// Recordings enqueued.
    replayed: u64,
}

/// What a recording is of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    /// Of the span.
    blocks: Range<usize>,
    /// A power of two.
    tokens: usize,
    /// Whether adapters are added.
    adapted: bool,
}

/// The rows of a step, which were written to their fixed memory before.
struct FixedStep<'a> {
    rows: &'a [StepRow<'a>],
    /// Tokens for which the launches are recorded: a power of two.
    tokens: usize,
    /// Whether some row goes through an adapter.
    adapted: bool,
    /// Deep prompts of each of its blocks; none of blocks past the end.
    prompts: &'a [Vec<PromptPart<'a>>],
}

impl<'a> FixedStep<'a> {
    /// Deep prompts of a block of the unit.
    fn prompts_of(&self, block: usize) -> &'a [PromptPart<'a>] {
        self.prompts.get(block).map_or(&[][..], Vec::as_slice)
    }
}

/// Rows as operations of a recorded step see them: what they are lies in the fixed memory.
fn any_rows(tokens: usize, adapted: bool) -> Vec<StepRow<'static>> {
    const PAGE: &[PageId] = &[PageId(0)];
    vec![StepRow { adapter: adapted.then_some(0), ..StepRow::new(1, 0, PAGE) }; tokens]
}

/// Sends the states of a recorded step through blocks of the span, whose pages are `own`.
fn through<G: Gpu>(
    cuda: &mut Cuda<G>,
    unit: &StepUnit<'_, '_, Cuda<G>>,
    blocks: Range<usize>,
    work: &mut Workspace<Cuda<G>>,
    rows: &[StepRow<'_>],
    states: &mut Buffer<G>,
    own: &mut [Pages<'_>],
) -> Result<(), OpError> {
    for (block, pages) in blocks.zip(own) {
        let weights = unit.weights.get(block).ok_or(NOT_THERE)?;
        forward_joined(cuda, unit.spec, weights, work, rows, states, pages)?;
    }
    Ok(())
}

impl<G: Gpu> RecordedSteps<G> {
    /// Takes memory for units of several jobs that are not recorded, with `values` values together.
    pub fn reserve(&mut self, cuda: &mut Cuda<G>, values: usize) {
        self.direct.reserve(cuda, values);
    }

    /// Records the steps of all blocks of a span and all numbers of tokens, so that none is
    /// recorded while clients wait. `unit` names all blocks and no job; whole blocks have
    /// `whole_heads` heads.
    ///
    /// # Errors
    /// [`OpError`] when the device has no memory, or fails.
    pub fn record(
        &mut self,
        cuda: &mut Cuda<G>,
        cache: &mut <Cuda<G> as DeviceBackend>::Cache,
        shape: KvShape,
        unit: &StepUnit<'_, '_, Cuda<G>>,
        whole_heads: usize,
    ) -> Result<(), OpError> {
        if shape.pages == 0 {
            return Ok(());
        }
        let heads = [unit.spec.heads, whole_heads];
        let BlockSpec { hidden, heads: own, head_dim, mlp, .. } = unit.spec;
        let inputs = (*hidden).max(own * head_dim).max(mlp.intermediate());
        cuda.open_steps(heads, shape.layout.head_dim, shape.pages, inputs)?;
        let before = free_bytes(cuda);
        let recordings = self.recordings.insert(Recordings::new(cuda, unit)?);
        let kinds: &[bool] = if recordings.adapted { &[false, true] } else { &[false] };
        let singles = kinds.iter().map(|adapted| (*adapted, 1));
        // Runs come last: where memory is short, single blocks do.
        for (adapted, longest) in singles.chain([(false, RUN_BLOCKS)]) {
            let mut tokens = 1;
            while tokens <= MAX_STEP_TOKENS {
                // A step of no rows: kernels run through and write nothing but what the next step
                // writes anew.
                cuda.set_step(&[], unit.blocks.start)?;
                cuda.use_fixed_step(true);
                let done = recordings.record(cuda, cache, unit, tokens, adapted, longest);
                cuda.use_fixed_step(false);
                done?;
                tokens *= 2;
            }
        }
        cuda.wait()?;
        recordings.tell(before, free_bytes(cuda));
        if let Some(failure) = cuda.early_refusal() {
            warn!(%failure, "driver overlaps no launches, decode steps are slower");
        }
        Ok(())
    }

    /// Recordings made so far.
    pub fn recorded(&self) -> u64 {
        self.recordings.as_ref().map_or(0, |recordings| recordings.recorded)
    }

    /// Blocks that steps went through by recordings so far.
    pub fn replayed(&self) -> u64 {
        self.recordings.as_ref().map_or(0, |recordings| recordings.replayed)
    }

    /// Launches of all recordings together.
    pub fn recorded_launches(&self) -> u64 {
        self.recordings.as_ref().map_or(0, Recordings::launches)
    }

    /// Kernels that one replay of a block launches for a step of up to `tokens` tokens without
    /// adapters; `None` without a recording.
    pub fn launches(&self, local: usize, tokens: usize) -> Option<u64> {
        let graphs = &self.recordings.as_ref()?.graphs;
        let (blocks, tokens) = (local..local + 1, tokens.next_power_of_two());
        Some(graphs.get(&Key { blocks, tokens, adapted: false })?.as_ref()?.launches())
    }
}

impl<G: Gpu> StepRunner<Cuda<G>> for RecordedSteps<G> {
    fn new(cuda: &mut Cuda<G>) -> Self {
        RecordedSteps { direct: DirectSteps::new(cuda), recordings: None }
    }

    fn run(
        &mut self,
        cuda: &mut Cuda<G>,
        work: &mut Workspace<Cuda<G>>,
        cache: &mut <Cuda<G> as DeviceBackend>::Cache,
        mut unit: StepUnit<'_, '_, Cuda<G>>,
    ) -> Result<(), OpError> {
        let adapted = unit.rows.iter().any(|row| row.adapter.is_some());
        let tokens = total_tokens(&unit.rows);
        let recordings = match &mut self.recordings {
            Some(recordings)
                if (1..=MAX_STEP_TOKENS).contains(&tokens)
                    && (!adapted || recordings.adapted)
                    && cuda.set_step(&unit.rows, unit.blocks.start)? =>
            {
                recordings
            }
            _ => return self.direct.run(cuda, work, cache, unit),
        };
        gather(cuda, &unit.hidden, &mut recordings.states)?;
        let step = FixedStep {
            rows: &unit.rows,
            tokens: tokens.next_power_of_two(),
            adapted,
            prompts: &unit.prompts,
        };
        recordings.run(cuda, cache, &unit, &step)?;
        scatter(cuda, &mut unit.hidden, &recordings.states)
    }
}

impl<G: Gpu> Recordings<G> {
    fn new(cuda: &mut Cuda<G>, unit: &StepUnit<'_, '_, Cuda<G>>) -> Result<Recordings<G>, OpError> {
        let rank = unit.weights.iter().map(BlockWeights::largest_rank).max().unwrap_or(0);
        let mut work = Workspace::new(cuda);
        work.grow_for_runs(cuda, unit.spec, MAX_STEP_TOKENS, rank);
        let values = MAX_STEP_TOKENS * unit.spec.hidden;
        let (states, mut nothing) = (cuda.buffer(values), cuda.buffer(values));
        cuda.upload(&vec![-0.0; values], &mut nothing)?;
        Ok(Recordings {
            work,
            states,
            nothing,
            graphs: HashMap::new(),
            adapted: rank > 0,
            recorded: 0,
            replayed: 0,
        })
    }

    fn launches(&self) -> u64 {
        self.graphs.values().flatten().map(Recorded::launches).sum()
    }

    /// Logs how much device memory the recordings took, to compare with what is planned for each
    /// launch ([`model::sizing::GRAPH_LAUNCH_BYTES`]).
    fn tell(&self, before: Option<u64>, after: Option<u64>) {
        let (recorded, launches) = (self.recorded, self.launches());
        let direct = self.graphs.values().filter(|graph| graph.is_none()).count();
        let bytes = before.zip(after).map(|(before, after)| before.saturating_sub(after));
        let launch_bytes = bytes.and_then(|bytes| bytes.checked_div(launches));
        match direct {
            0 => info!(recorded, bytes, launch_bytes, "recorded all decode steps"),
            _ => warn!(
                recorded,
                direct, bytes, launch_bytes, after, "recorded only some decode steps"
            ),
        }
    }

    /// Records a step of so many tokens through all blocks of `unit`, which are those of the span:
    /// by single blocks, or by runs of `longest`.
    fn record(
        &mut self,
        cuda: &mut Cuda<G>,
        cache: &mut <Cuda<G> as DeviceBackend>::Cache,
        unit: &StepUnit<'_, '_, Cuda<G>>,
        tokens: usize,
        adapted: bool,
        longest: usize,
    ) -> Result<(), OpError> {
        let rows = any_rows(tokens, adapted);
        let (spec, values) = (unit.spec, tokens * unit.spec.hidden);
        prepare(cuda, spec, unit.dtype, &mut self.work, &[], &rows)?;
        open_run(cuda, &mut self.work, &self.nothing, values)?;
        let mut pages = cache.blocks(cuda, unit.blocks.clone(), &[])?;
        let (first, end) = (unit.blocks.start, unit.blocks.end);
        for start in (first..end).step_by(longest) {
            let blocks = start..(start + longest).min(end);
            // A run of one block is there already.
            if longest > 1 && blocks.len() == 1 {
                continue;
            }
            let own = pages.get_mut(blocks.start - first..blocks.end - first).ok_or(NOT_THERE)?;
            let (work, states) = (&mut self.work, &mut self.states);
            let mut run = |cuda: &mut Cuda<G>, own: &mut [Pages<'_>]| {
                through(cuda, unit, blocks.clone(), work, &rows, states, own)
            };
            // Run once, for what operations keep from then on.
            if start == first {
                run(cuda, own)?;
            }
            let graph = match free_bytes(cuda).is_none_or(|free| free >= SPARE_BYTES) {
                true => cuda.record(own, run)?,
                false => None,
            };
            self.recorded += u64::from(graph.is_some());
            debug!(?blocks, tokens, recorded = self.recorded, "recorded a decode step");
            self.graphs.insert(Key { blocks, tokens, adapted }, graph);
        }
        close_run(cuda, &self.work, &mut self.states, values, unit.dtype)
    }

    /// Sends the states of a step through the blocks of `unit`.
    fn run(
        &mut self,
        cuda: &mut Cuda<G>,
        cache: &mut <Cuda<G> as DeviceBackend>::Cache,
        unit: &StepUnit<'_, '_, Cuda<G>>,
        step: &FixedStep<'_>,
    ) -> Result<(), OpError> {
        cuda.use_fixed_step(true);
        let done = self.fixed_blocks(cuda, cache, unit, step);
        cuda.use_fixed_step(false);
        done
    }

    fn fixed_blocks(
        &mut self,
        cuda: &mut Cuda<G>,
        cache: &mut <Cuda<G> as DeviceBackend>::Cache,
        unit: &StepUnit<'_, '_, Cuda<G>>,
        step: &FixedStep<'_>,
    ) -> Result<(), OpError> {
        let rows = any_rows(step.tokens, step.adapted);
        let (spec, dtype) = (unit.spec, unit.dtype);
        prepare(cuda, spec, dtype, &mut self.work, step.rows, &rows)?;
        let first = unit.blocks.start;
        let values = step.tokens * spec.hidden;
        open_run(cuda, &mut self.work, &self.nothing, values)?;
        let mut pages = cache.blocks(cuda, unit.blocks.clone(), step.rows)?;
        let mut at = first;
        while at < unit.blocks.end {
            let prompts = step.prompts_of(at - first);
            if !prompts.is_empty() {
                self.add_prompts(cuda, prompts, values, dtype)?;
            }
            let key = self.next(at, unit, step);
            let blocks = key.blocks.clone();
            let own = pages.get_mut(at - first..blocks.end - first).ok_or(NOT_THERE)?;
            if let Some(Some(graph)) = self.graphs.get(&key) {
                cuda.replay(graph, own)?;
                self.replayed += blocks.len() as u64;
            } else {
                let (work, states) = (&mut self.work, &mut self.states);
                through(cuda, unit, blocks.clone(), work, &rows, states, own)?;
            }
            at = blocks.end;
        }
        close_run(cuda, &self.work, &mut self.states, values, dtype)
    }

    /// The run of recorded blocks that begins at block `at` and lies in the unit, or this block
    /// alone.
    fn next(&self, at: usize, unit: &StepUnit<'_, '_, Cuda<G>>, step: &FixedStep<'_>) -> Key {
        let first = unit.blocks.start;
        let (tokens, adapted) = (step.tokens, step.adapted);
        let end = (at + RUN_BLOCKS).min(unit.weights.len());
        let run = Key { blocks: at..end, tokens, adapted };
        let may_run = end <= unit.blocks.end
            && (at + 1..end).all(|block| step.prompts_of(block - first).is_empty())
            && matches!(self.graphs.get(&run), Some(Some(_)));
        if may_run { run } else { Key { blocks: at..at + 1, tokens, adapted } }
    }

    /// Adds deep prompts between two blocks of a run, where the last sum is not made yet.
    fn add_prompts(
        &mut self,
        cuda: &mut Cuda<G>,
        prompts: &[PromptPart<'_>],
        values: usize,
        round: kernels::DType,
    ) -> Result<(), OpError> {
        close_run(cuda, &self.work, &mut self.states, values, round)?;
        open_run(cuda, &mut self.work, &self.nothing, values)?;
        add_prompts(cuda, prompts, &mut self.states, round)
    }
}

/// Free bytes of the device; `None` when it does not tell.
fn free_bytes<G: Gpu>(cuda: &Cuda<G>) -> Option<u64> {
    let (free, _) = cuda.gpu().memory().ok()?;
    Some(free as u64)
}
