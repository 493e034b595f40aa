//! Steps on a CUDA device: one recording per block and number of tokens, rounded up to a power of
//! two. Its launches read rows, positions and page tables from memory that is written once per
//! unit, so that nothing is recorded again as sequences grow, and the hidden states lie at one
//! address from the first block of a unit to its last.
//!
//! ```text
//! unit   rows written ─ states gathered ─ angles ─ block ─ block ─ ... ─ last sum ─ states scattered ─ wait
//!                                                  (one launch each, nothing of the host between)
//! ```
//! The last sum of a block is made with the first norm of the next.
//!
//! Where adapters are loaded, each block is recorded twice: steps without any pay nothing for them.
//! Deep prompts, which come with the first step of a session, are added before the recording of
//! their block. A step of more than 32 tokens runs block by block, with the same bits.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;

use kernels::Backend;
use kernels::StepRow;
use kernels::cuda::{Buffer, Cuda, Gpu, Pages, Recorded};
use kernels::kv::total_tokens;
use kernels::ops::{OpError, PromptAdd};
use shared::ids::PageId;
use shared::model::MAX_STEP_TOKENS;
use tracing::{debug, info, warn};

use super::NOT_THERE;
use crate::block::{
    BlockInput, BlockWeights, PromptPart, Workspace, close_run, forward_joined, open_run, prepare,
};
use crate::device::direct::{gather, scatter};
use crate::device::{DeviceBackend, DirectSteps, StepRunner, StepUnit};
use crate::kv::KvShape;

/// Memory of a device that recordings leave to others. They are planned for
/// ([`model::sizing::graph_block_bytes`]), but what they take is the driver's choice: a
/// block for which there is no memory is launched directly.
const SPARE_BYTES: u64 = 64 << 20;

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
    /// By block of the span, power of two of tokens, and whether adapters are added; `None`: it
    /// cannot be recorded.
    graphs: HashMap<(usize, usize, bool), Option<Recorded<G>>>,
    /// Whether there are recordings with adapters.
    adapted: bool,
    /// Recordings made.
    recorded: u64,
    /// Recordings enqueued.
    replayed: u64,
}

/// The rows of a step, which were written to their fixed memory before.
struct FixedStep<'a> {
    rows: &'a [StepRow<'a>],
    lengths: &'a [usize],
    /// Tokens for which the launches are recorded: a power of two.
    tokens: usize,
    /// Whether some row goes through an adapter.
    adapted: bool,
    /// Deep prompts of each of its blocks; none of blocks past the end.
    prompts: &'a [Vec<PromptPart<'a>>],
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
        (unit, whole_heads): (&StepUnit<'_, '_, Cuda<G>>, usize),
    ) -> Result<(), OpError> {
        if shape.pages == 0 {
            return Ok(());
        }
        let heads = [unit.spec.heads, whole_heads];
        cuda.open_steps(heads, shape.layout.head_dim, shape.pages)?;
        let before = free_bytes(cuda);
        let recordings = self.recordings.insert(Recordings::new(cuda, unit)?);
        let kinds: &[bool] = if recordings.adapted { &[false, true] } else { &[false] };
        for &adapted in kinds {
            let mut tokens = 1;
            while tokens <= MAX_STEP_TOKENS {
                // A step of no rows: kernels run through and write nothing but what the next step
                // writes anew.
                cuda.set_step(&[], &[], unit.blocks.start)?;
                let (rows, lengths, prompts) = (&[][..], &[][..], &[][..]);
                let step = FixedStep { rows, lengths, tokens, adapted, prompts };
                recordings.run(cuda, cache, unit, &step)?;
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
        let graph = graphs.get(&(local, tokens.next_power_of_two(), false))?.as_ref()?;
        Some(graph.launches())
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
        let adapted = unit.adapters.iter().any(Option::is_some);
        let tokens = total_tokens(&unit.rows);
        let recordings = match &mut self.recordings {
            Some(recordings)
                if (1..=MAX_STEP_TOKENS).contains(&tokens)
                    && (!adapted || recordings.adapted)
                    && cuda.set_step(&unit.rows, &unit.adapters, unit.blocks.start)? =>
            {
                recordings
            }
            _ => return self.direct.run(cuda, work, cache, unit),
        };
        gather(cuda, &unit.hidden, &mut recordings.states)?;
        let step = FixedStep {
            rows: &unit.rows,
            lengths: &unit.lengths,
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
        work.grow(cuda, unit.spec, MAX_STEP_TOKENS, rank);
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
        // Operations see so many rows of one token; what they are lies in the fixed memory.
        let page = [PageId(0)];
        let rows = vec![StepRow { tokens: 1, prefix: 0, pages: &page }; step.tokens];
        let any = vec![Some(0); if step.adapted { step.tokens } else { 0 }];
        let input = BlockInput { rows: &rows, prompts: &[], adapters: &any, lengths: &[] };
        let (spec, dtype) = (unit.spec, unit.dtype);
        prepare(cuda, spec, dtype, &mut self.work, (step.rows, step.lengths), &rows)?;
        let Range { start: first, .. } = unit.blocks;
        let values = step.tokens * spec.hidden;
        open_run(cuda, &mut self.work, &self.nothing, values)?;
        for local in unit.blocks.clone() {
            let weights = unit.weights.get(local).ok_or(NOT_THERE)?;
            let prompts = step.prompts.get(local - first).map_or(&[][..], Vec::as_slice);
            if !prompts.is_empty() {
                self.add_prompts(cuda, prompts, (values, dtype))?;
            }
            let mut pages = cuda.cached(cache, local, step.rows)?;
            let key = (local, step.tokens, step.adapted);
            if let Some(Some(graph)) = self.graphs.get(&key) {
                cuda.replay(graph, &mut pages)?;
                self.replayed += 1;
                continue;
            }
            let (work, states) = (&mut self.work, &mut self.states);
            let mut run = |cuda: &mut Cuda<G>, pages: &mut Pages<'_>| {
                forward_joined(cuda, spec, weights, work, input, states, pages)
            };
            // A step of no rows is run once, for what operations keep from then on.
            if !step.rows.is_empty() || local == first {
                run(cuda, &mut pages)?;
            }
            if let Entry::Vacant(vacant) = self.graphs.entry(key) {
                let graph = match free_bytes(cuda).is_none_or(|free| free >= SPARE_BYTES) {
                    true => cuda.record(&mut pages, run)?,
                    false => None,
                };
                self.recorded += u64::from(graph.is_some());
                debug!(
                    block = local,
                    tokens = step.tokens,
                    recorded = self.recorded,
                    "recorded a decode step"
                );
                vacant.insert(graph);
            }
        }
        close_run(cuda, &self.work, &mut self.states, (values, dtype))
    }

    /// Adds deep prompts between two blocks of a run, where the last sum is not made yet.
    fn add_prompts(
        &mut self,
        cuda: &mut Cuda<G>,
        prompts: &[PromptPart<'_>],
        (values, round): (usize, kernels::DType),
    ) -> Result<(), OpError> {
        close_run(cuda, &self.work, &mut self.states, (values, round))?;
        open_run(cuda, &mut self.work, &self.nothing, values)?;
        prompts.iter().try_for_each(|part| {
            let (offset, prompt) = (part.offset, part.values);
            cuda.prompt_add(PromptAdd { x: &mut *self.states, offset, prompt, round })
        })
    }
}

/// Free bytes of the device; `None` when it does not tell.
fn free_bytes<G: Gpu>(cuda: &Cuda<G>) -> Option<u64> {
    let (free, _) = cuda.gpu().memory().ok()?;
    Some(free as u64)
}
