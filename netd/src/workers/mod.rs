//! Workers: which of them serve which blocks, and how a request travels through them. Each worker
//! has a [`link`]; a request over the spans of several goes hop by hop through netd, and one
//! worker's output slot is the next one's input slot.

mod allocator;
pub mod arena;
pub mod gradients;
pub mod job;
pub mod link;
pub mod recovery;
pub mod tally;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::RwLock;
use shared::block::{BlockIndex, Span};
use shared::control::{DeathCause, WorkerUp};
use shared::ids::{Generation, WorkerId};
use shared::job::{JobBody, SlotRef};
use shared::shm::doorbell::Doorbell;
use tokio::sync::mpsc;

use arena::ArenaMemory;
use job::{BODY, Holds, INPUT, Job};
use link::{Broken, JobFailure, JobTimes, LinkError, WorkerLink};
use tally::Tally;

/// Most workers of one instance.
const MAX_WORKERS: usize = 64;

/// All workers of this instance.
#[derive(Debug)]
pub struct Workers {
    links: RwLock<Vec<Arc<WorkerLink>>>,
    arena: ArenaMemory,
    broken: mpsc::Sender<Broken>,
    /// Shared by all workers of this run.
    tally: Arc<Tally>,
}

impl Workers {
    /// No workers yet, over `arena`. The receiver tells whose rings cannot be used any more.
    pub fn new(arena: ArenaMemory) -> (Workers, mpsc::Receiver<Broken>) {
        // A generation of a worker is reported once, and the next one only comes after it was
        // reaped.
        let (broken, reports) = mpsc::channel(MAX_WORKERS);
        let workers = Workers { links: RwLock::default(), arena, broken, tally: Arc::default() };
        (workers, reports)
    }

    /// No workers yet, over the same arena, reporting to the same receiver: for other blocks of the
    /// same model.
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
        self.links.read().iter().all(|link| link.is_gone())
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
        rings: OwnedFd,
        submission: Doorbell,
        completion: Doorbell,
    ) -> Result<(), LinkError> {
        // One that was gone for good comes back as another, which has none of its pages.
        let known = self.link(up.worker).filter(|link| !link.is_gone());
        let link = known.unwrap_or_else(|| self.add(up.worker, up.span));
        link.up(up, rings, submission, completion)
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
        let links = self.links.read();
        span.blocks().all(|b| links.iter().any(|link| link.span().contains(b) && link.is_up()))
    }

    /// How often workers of these blocks have lost the KV pages of all sessions; a worker that took
    /// the place of another has none of its pages. A session whose number has changed has none.
    pub fn kv_losses(&self, blocks: &[BlockIndex]) -> u64 {
        self.links
            .read()
            .iter()
            .filter(|link| blocks.iter().any(|block| link.span().contains(*block)))
            .map(|link| link.kv_losses() + 1)
            .sum()
    }

    /// Which pages the workers of these blocks have: the same number as under an earlier netd means
    /// the same pages.
    pub fn kv_version(&self, blocks: &[BlockIndex]) -> u64 {
        let links = self.links.read();
        let of_blocks = blocks.iter().map(|block| {
            let mut own = links.iter().rev().filter(|link| link.span().contains(*block));
            own.find(|link| !link.is_gone()).map_or(0, |link| link.kv_version())
        });
        let mix = |sum: u64, version: u64| (sum ^ version).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        of_blocks.fold(1, |sum, version| mix(sum.rotate_left(23), version))
    }

    /// Runs `job` through the workers of its blocks. The input and the prompts are written.
    /// Returns the slot that holds the result, which `holds` keeps.
    ///
    /// # Errors
    /// [`JobFailure`] of the first hop that fails.
    pub async fn run(
        &self,
        job: &Job,
        holds: &Arc<Holds>,
    ) -> Result<(SlotRef, JobTimes), JobFailure> {
        let (mut input, mut output) = (holds.slots.slot(INPUT), holds.slots.slot(INPUT + 1));
        let mut total = JobTimes::default();
        let mut done = 0;
        while done < job.body.blocks.len() {
            let (link, end) = self.hop(&job.body.blocks, done).ok_or(JobFailure::WorkerGone)?;
            let body = job.part(&(done..end), input, output, holds);
            let times = self.run_on(&link, &body, holds).await?;
            total.queue_ns += times.queue_ns;
            total.compute_ns += times.compute_ns;
            (input, output) = (output, input);
            done = end;
        }
        Ok((input, total))
    }

    /// Writes a body, has one worker compute it, and counts it.
    async fn run_on(
        &self,
        link: &WorkerLink,
        body: &JobBody,
        holds: &Arc<Holds>,
    ) -> Result<JobTimes, JobFailure> {
        let slot = self.write_body(body, holds.slots.slot(BODY))?;
        let times = link.run(body.kind, slot, holds.clone()).await?;
        self.tally.count(body.kind, body.batch, times.compute_ns);
        Ok(times)
    }

    fn write_body(&self, body: &JobBody, slot: SlotRef) -> Result<SlotRef, JobFailure> {
        let bytes = body.encode();
        let len = bytes.len() as u64;
        let fits = len <= slot.len && self.arena.map().write(slot.offset, &bytes).is_ok();
        if fits {
            Ok(SlotRef { offset: slot.offset, len })
        } else {
            Err(JobFailure::Refused(shared::job::JobError::BodyTooLong { bytes: len }))
        }
    }

    /// The worker of block `blocks[from]`, and up to where the blocks after it are its own as well.
    fn hop(&self, blocks: &[BlockIndex], from: usize) -> Option<(Arc<WorkerLink>, usize)> {
        let links = self.links.read();
        let first = blocks.get(from)?;
        let mut of_block = links.iter().filter(|link| link.span().contains(*first));
        // A worker that is gone may have been replaced.
        let link = of_block.clone().find(|link| !link.is_gone()).or_else(|| of_block.next())?;
        let own = blocks[from..].iter().take_while(|block| link.span().contains(**block)).count();
        Some((link.clone(), from + own))
    }

    fn link(&self, worker: WorkerId) -> Option<Arc<WorkerLink>> {
        self.links.read().iter().rev().find(|link| link.worker() == worker).cloned()
    }

    fn add(&self, worker: WorkerId, span: Span) -> Arc<WorkerLink> {
        let mut links = self.links.write();
        let present = links.iter().filter(|link| !link.is_gone()).count();
        debug_assert!(present < MAX_WORKERS, "the supervisor has fewer seats");
        let link = Arc::new(WorkerLink::new(worker, span, links.len() as u16, self.broken.clone()));
        links.push(link.clone());
        link
    }
}
