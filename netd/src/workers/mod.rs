//! Workers: which of them serve which blocks, and how a request travels through them. Each worker has a [`link`]; a request
//! over the spans of several goes hop by hop through netd, and one worker's output slot is the next one's input slot.

pub mod arena;
pub mod gradients;
pub mod link;
pub mod recovery;
pub mod tally;

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use shared::block::{BlockIndex, Span};
use shared::control::{DeathCause, WorkerUp};
use shared::dtype::DType;
use shared::ids::{Generation, WorkerId};
use shared::job::{JobBody, JobKind, PageCopy, Prompts, SlotRef};
use shared::shm::doorbell::Doorbell;
use tokio::sync::mpsc;

use crate::sessions::table::StepPlan;
use arena::ArenaMemory;
use link::{Broken, Holds, Job, JobFailure, JobTimes, Link, LinkError};
use tally::Tally;

/// Most workers of one instance.
const MAX_WORKERS: usize = 64;

/// All workers of this instance.
#[derive(Debug)]
pub struct Workers {
    links: RwLock<Vec<Arc<Link>>>,
    arena: ArenaMemory,
    broken: mpsc::Sender<Broken>,
    /// Shared by all workers of this run.
    tally: Arc<Tally>,
}

/// What a request computes. Its slots are in `holds`, in the order of [`Computation::sizes`].
#[derive(Debug)]
pub struct Computation {
    /// Step or forward.
    pub kind: JobKind,
    /// Block dtype.
    pub dtype: DType,
    /// Blocks in the order in which they run.
    pub blocks: Vec<BlockIndex>,
    /// Sequences, at least 1.
    pub batch: u32,
    /// Tokens per sequence, at least 1.
    pub tokens: u32,
    /// Width of the hidden states.
    pub hidden: u32,
    /// Pages, if it is a step.
    pub plan: StepPlan,
    /// Sequences and tokens of the deep prompts, if there are any.
    pub prompts: Option<(u32, u32)>,
    /// Adapter, by its index among those of the model.
    pub adapter: Option<u32>,
}

/// Index of the slot that holds the input.
pub const INPUT: usize = 0;
/// Index of the slot for deep prompts.
pub const PROMPTS: usize = 3;
const BODY: usize = 2;

/// Words of a body without its lists, with room to grow.
const BODY_HEADER_WORDS: usize = 48;

impl Computation {
    /// Bytes of one tensor of hidden states.
    pub fn hidden_bytes(&self) -> u64 {
        u64::from(self.batch)
            * u64::from(self.tokens)
            * u64::from(self.hidden)
            * self.dtype.size_bytes() as u64
    }

    /// Bytes of the deep prompts of one block.
    fn block_prompt_bytes(&self) -> u64 {
        let (batch, tokens) = self.prompts.unwrap_or_default();
        let width = u64::from(self.hidden) * self.dtype.size_bytes() as u64;
        u64::from(batch) * u64::from(tokens) * width
    }

    /// The deep prompts of the blocks at these places of the request.
    fn prompts_of(&self, blocks: &Range<usize>, holds: &Holds) -> Option<Prompts> {
        let (batch, tokens) = self.prompts?;
        let slot = gradients::piece(holds.slots.slot(PROMPTS), self.block_prompt_bytes(), blocks);
        Some(Prompts {
            slot,
            batch,
            tokens,
        })
    }

    /// Slots to reserve: input, output (the two change places from hop to hop), body, and deep prompts if there are any.
    pub fn sizes(&self) -> Vec<u64> {
        let pages: usize = self.plan.tables.iter().map(Vec::len).sum();
        let rows = self.plan.tables.len();
        let words =
            BODY_HEADER_WORDS + self.blocks.len() + 2 * rows + pages + 3 * self.plan.copies.len();
        let mut sizes = vec![self.hidden_bytes(), self.hidden_bytes(), 4 * words as u64];
        if self.prompts.is_some() {
            sizes.push(self.block_prompt_bytes() * self.blocks.len() as u64);
        }
        sizes
    }
}

impl Workers {
    /// No workers yet, over `arena`. The receiver tells whose rings cannot be used any more.
    pub fn new(arena: ArenaMemory) -> (Workers, mpsc::Receiver<Broken>) {
        // A generation of a worker is reported once, and the next one only comes after it was reaped.
        let (broken, reports) = mpsc::channel(MAX_WORKERS);
        let workers = Workers {
            links: RwLock::default(),
            arena,
            broken,
            tally: Arc::default(),
        };
        (workers, reports)
    }

    /// No workers yet, over the same arena, reporting to the same receiver: for other blocks of the same model.
    pub fn beside(&self) -> Workers {
        Workers {
            links: RwLock::default(),
            arena: self.arena.clone(),
            broken: self.broken.clone(),
            tally: self.tally.clone(),
        }
    }

    /// What was computed.
    pub fn tally(&self) -> &Arc<Tally> {
        &self.tally
    }

    /// Whether a generation of `worker` was ever linked here.
    pub fn knows(&self, worker: WorkerId) -> bool {
        self.link(worker).is_some()
    }

    /// Whether none of them will come again.
    pub fn all_gone(&self) -> bool {
        self.links().iter().all(|link| link.is_gone())
    }

    /// The arena that all workers share.
    pub fn arena(&self) -> &ArenaMemory {
        &self.arena
    }

    /// A generation of a worker is linked.
    ///
    /// # Errors
    /// [`LinkError`] when its rings cannot be used.
    pub fn up(
        &self,
        up: &WorkerUp,
        submission: Doorbell,
        completion: Doorbell,
    ) -> Result<(), LinkError> {
        let link = self
            .link(up.worker)
            .unwrap_or_else(|| self.add(up.worker, up.span));
        link.up(up, submission, completion)
    }

    /// A generation of a worker is dead and reaped.
    pub fn down(
        &self,
        worker: WorkerId,
        generation: Generation,
        cause: DeathCause,
        restarting: bool,
    ) {
        if let Some(link) = self.link(worker) {
            link.down(generation, cause, restarting);
        }
    }

    /// A generation of a worker cannot be killed.
    pub fn unkillable(&self, worker: WorkerId, generation: Generation) {
        if let Some(link) = self.link(worker) {
            link.unkillable(generation);
        }
    }

    /// Whether every block of `span` has a worker that is up.
    pub fn cover(&self, span: Span) -> bool {
        let links = self.links();
        span.blocks().all(|b| {
            links
                .iter()
                .any(|link| link.span().contains(b) && link.is_up())
        })
    }

    /// How often workers of these blocks have lost the KV pages of all sessions. A session whose number has changed has none.
    pub fn kv_losses(&self, blocks: &[BlockIndex]) -> u64 {
        self.links()
            .iter()
            .filter(|link| blocks.iter().any(|block| link.span().contains(*block)))
            .map(|link| link.kv_losses())
            .sum()
    }

    /// Completions that no job was waiting for, over all workers.
    pub fn stale_completions(&self) -> u64 {
        self.links()
            .iter()
            .map(|link| link.stale_completions())
            .sum()
    }

    /// Runs `work` through the workers of its blocks. The input and the prompts are written. Returns the slot that holds the
    /// result, which `holds` keeps.
    ///
    /// # Errors
    /// [`JobFailure`] of the first hop that fails.
    pub async fn run(
        &self,
        work: &mut Computation,
        holds: &Arc<Holds>,
    ) -> Result<(SlotRef, JobTimes), JobFailure> {
        let (mut input, mut output) = (holds.slots.slot(INPUT), holds.slots.slot(INPUT + 1));
        let blocks = std::mem::take(&mut work.blocks);
        let plan = std::mem::take(&mut work.plan);
        let mut body = body(work, plan, input, output);
        let mut total = JobTimes::default();
        let mut done = 0;
        while done < blocks.len() {
            let (link, end) = self.hop(&blocks, done).ok_or(JobFailure::WorkerGone)?;
            body.blocks = blocks[done..end].to_vec();
            (body.input, body.output) = (input, output);
            body.prompts = work.prompts_of(&(done..end), holds);
            let body = self.write_body(&body, holds.slots.slot(BODY))?;
            let times = link
                .run(Job {
                    kind: work.kind,
                    body,
                    holds: holds.clone(),
                })
                .await?;
            self.tally.count(work.kind, work.batch, times.compute_ns);
            total.queue_ns += times.queue_ns;
            total.compute_ns += times.compute_ns;
            (input, output) = (output, input);
            done = end;
        }
        Ok((input, total))
    }

    fn write_body(&self, body: &JobBody, slot: SlotRef) -> Result<SlotRef, JobFailure> {
        let bytes = body.encode();
        let len = bytes.len() as u64;
        let fits = len <= slot.len && self.arena.map().write(slot.offset, &bytes).is_ok();
        if fits {
            Ok(SlotRef {
                offset: slot.offset,
                len,
            })
        } else {
            Err(JobFailure::Refused(shared::job::JobError::BodyTooLong {
                bytes: len,
            }))
        }
    }

    /// The worker of block `blocks[from]`, and up to where the blocks after it are its own as well.
    fn hop(&self, blocks: &[BlockIndex], from: usize) -> Option<(Arc<Link>, usize)> {
        let links = self.links();
        let first = blocks.get(from)?;
        let link = links.iter().find(|link| link.span().contains(*first))?;
        let own = blocks[from..]
            .iter()
            .take_while(|block| link.span().contains(**block))
            .count();
        Some((link.clone(), from + own))
    }

    fn link(&self, worker: WorkerId) -> Option<Arc<Link>> {
        self.links()
            .iter()
            .find(|link| link.worker() == worker)
            .cloned()
    }

    fn add(&self, worker: WorkerId, span: Span) -> Arc<Link> {
        let mut links = self.links.write().unwrap_or_else(PoisonError::into_inner);
        debug_assert!(links.len() < MAX_WORKERS, "the supervisor has fewer seats");
        let link = Arc::new(Link::new(
            worker,
            span,
            links.len() as u16,
            self.broken.clone(),
        ));
        links.push(link.clone());
        link
    }

    fn links(&self) -> std::sync::RwLockReadGuard<'_, Vec<Arc<Link>>> {
        self.links.read().unwrap_or_else(PoisonError::into_inner)
    }
}

fn body(work: &Computation, plan: StepPlan, input: SlotRef, output: SlotRef) -> JobBody {
    let rows = plan.tables.len();
    let copies: Vec<PageCopy> = plan.copies;
    JobBody {
        kind: work.kind,
        dtype: work.dtype,
        blocks: Vec::new(),
        adapter: work.adapter,
        batch: work.batch,
        tokens: work.tokens,
        hidden: work.hidden,
        prefix_lengths: vec![plan.prefix; rows],
        page_tables: plan.tables,
        copies,
        input,
        output,
        prompts: None,
        output_gradient: None,
        prompt_gradient: None,
    }
}
