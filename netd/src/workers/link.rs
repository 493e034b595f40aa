//! The link to one worker: its rings, the jobs in flight, and what becomes of them when the worker
//! dies.
//!
//! ```text
//!   RPC task ── run() ──> submission ring ──> worker ──> completion ring ──bell──> completions() ── reply ──> RPC task
//!                  ^ one lock, no wait                                  reactor, no thread between
//! ```
//!
//! Jobs in flight never exceed the completion ring, so that neither ring can be full: more callers
//! wait for a permit. What a job names ([`Holds`]) stays with its record here until the job was
//! answered or its worker reaped, also when the client that asked has gone; of a worker that cannot
//! be killed it stays for ever.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use p2p::task;
use parking_lot::Mutex;
use shared::block::Span;
use shared::clock::monotonic_ns;
use shared::control::{DeathCause, WorkerUp};
use shared::ids::{Generation, JobId, WorkerId};
use shared::job::{Completion, JobDescriptor, JobError, SlotRef, WorkKind};
use shared::shm::doorbell::Doorbell;
use shared::shm::layout::RING_ENTRIES;
use shared::shm::pair::{PairError, RingHandle, RingIdentity, RingPair};
use shared::shm::ring::{Armed, Consumer, Producer, PushError, RingCorrupt};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::AbortHandle;
use tracing::{error, info, warn};

use super::job::Holds;
use super::recovery::Recovery;

/// How long a job took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobTimes {
    /// From submission to the start of the work, in nanoseconds.
    pub queue_ns: u64,
    /// From there to its end, in nanoseconds.
    pub compute_ns: u64,
}

/// Why a job has no result. The texts go to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JobFailure {
    /// The worker refused it.
    #[error("the worker refused the request: {0}")]
    Refused(#[from] JobError),
    /// It was alone in the worker at two crashes.
    #[error("this request ran alone and crashed the worker twice; it is not retried")]
    Crashes,
    /// The worker is gone and will not be replaced.
    #[error(
        "the worker for these blocks failed and will not be restarted; open a new session or ask another server"
    )]
    WorkerGone,
    /// The worker died, and with it the KV cache that was not mirrored.
    #[error(
        "the worker died and the KV cache of this session with it; open a new session and send its tokens again"
    )]
    CacheLost,
}

/// Rings that cannot be used any more. Their worker has to end before its jobs can go anywhere
/// else: until then it may still write what they name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    pub worker: WorkerId,
    pub generation: Generation,
    pub message: String,
}

/// Link to one worker, over all its generations.
#[derive(Debug)]
pub struct WorkerLink {
    worker: WorkerId,
    span: Span,
    broken: mpsc::Sender<Broken>,
    /// One permit per job that is not answered.
    permits: Arc<Semaphore>,
    state: Mutex<LinkState>,
}

#[derive(Debug)]
struct LinkState {
    recovery: Recovery,
    jobs: HashMap<JobId, InFlight>,
    rings: Option<RingEnds>,
    gone: bool,
    last_job: u64,
    /// Whether the next generation finds the KV pages of this one, and how often they were lost.
    kv_survives: bool,
    kv_losses: u64,
    /// Which pages the generation has that was up last.
    kv_version: u64,
}

#[derive(Debug)]
struct InFlight {
    kind: WorkKind,
    /// Where its body lies.
    body: SlotRef,
    /// When it was submitted last.
    submitted_ns: u64,
    holds: Arc<Holds>,
    reply: oneshot::Sender<Result<JobTimes, JobFailure>>,
    _permit: OwnedSemaphorePermit,
}

/// The ends of one generation's rings.
#[derive(Debug)]
struct RingEnds {
    identity: RingIdentity,
    submissions: Producer<RingHandle>,
    completions: Consumer<RingHandle>,
    bell: Arc<Doorbell>,
    task: AbortHandle,
    /// Whether the rings were given up. The jobs in flight wait for the worker's end.
    broken: bool,
}

/// Why a worker's rings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The segment is not what the supervisor announced.
    #[error(transparent)]
    Rings(#[from] PairError),
    /// The doorbell cannot be watched.
    #[error("cannot watch the doorbell of worker {worker}")]
    Bell {
        worker: WorkerId,
        #[source]
        source: io::Error,
    },
}

/// What a sound worker never writes into its completion ring. It is killed, and its jobs in flight go
/// to the next generation.
#[derive(Debug, thiserror::Error)]
enum Nonsense {
    #[error(transparent)]
    Ring(#[from] RingCorrupt),
    #[error("completion ring has an entry that is no completion")]
    NoCompletion,
    #[error("completion of job {0} is of other generations than its rings")]
    OtherGeneration(JobId),
    #[error("completion of job {0}, which is not in flight")]
    NotInFlight(JobId),
    #[error("completion of job {id} claims {claimed} ns, {passed} ns after the job was submitted")]
    Times { id: JobId, claimed: u64, passed: u64 },
}

impl WorkerLink {
    /// A link to `worker`, which serves `span` and is not up yet. `index` tells links apart in job
    /// ids. Rings that cannot be used any more are reported to `broken`.
    pub fn new(
        worker: WorkerId,
        span: Span,
        index: u16,
        broken: mpsc::Sender<Broken>,
    ) -> WorkerLink {
        WorkerLink {
            worker,
            span,
            broken,
            permits: Arc::new(Semaphore::new(RING_ENTRIES)),
            state: Mutex::new(LinkState {
                recovery: Recovery::default(),
                jobs: HashMap::new(),
                rings: None,
                gone: false,
                last_job: u64::from(index) << 48,
                kv_survives: true,
                kv_losses: 0,
                kv_version: 0,
            }),
        }
    }

    pub fn worker(&self) -> WorkerId {
        self.worker
    }

    /// Its blocks.
    pub fn span(&self) -> Span {
        self.span
    }

    /// Whether a generation is up.
    pub fn is_up(&self) -> bool {
        self.state.lock().rings.is_some()
    }

    /// Whether no generation will come.
    pub fn is_gone(&self) -> bool {
        self.state.lock().gone
    }

    /// How often the KV pages of all sessions were lost.
    pub fn kv_losses(&self) -> u64 {
        self.state.lock().kv_losses
    }

    /// Which pages the worker has ([`WorkerUp::kv_version`]).
    pub fn kv_version(&self) -> u64 {
        self.state.lock().kv_version
    }

    /// Has the worker compute the job at `body`, over its deaths if need be. Waits while 256 jobs
    /// are in flight. A future that is dropped gives the job up if it was not submitted yet; else
    /// the worker finishes it and the answer is forgotten.
    pub async fn run(
        &self,
        kind: WorkKind,
        body: SlotRef,
        holds: Arc<Holds>,
    ) -> Result<JobTimes, JobFailure> {
        let Ok(_permit) = self.permits.clone().acquire_owned().await else {
            return Err(JobFailure::WorkerGone);
        };
        let (reply, answer) = oneshot::channel();
        let (id, bell) = {
            let mut state = self.state.lock();
            if state.gone {
                return Err(JobFailure::WorkerGone);
            }
            state.last_job += 1;
            let id = JobId(state.last_job);
            state.jobs.insert(id, InFlight { kind, body, submitted_ns: 0, holds, reply, _permit });
            state.recovery.add(id);
            (id, self.submit(&mut state))
        };
        ring(bell.as_deref());
        let interest = JobWaiter { link: self, job: id };
        let answer = answer.await.unwrap_or(Err(JobFailure::WorkerGone));
        std::mem::forget(interest);
        answer
    }

    /// A generation of the worker is linked. Jobs that wait are submitted to it.
    ///
    /// # Errors
    /// [`LinkError`]; the worker stays down for this netd then.
    pub fn up(
        self: &Arc<Self>,
        up: &WorkerUp,
        rings: OwnedFd,
        submission_bell: Doorbell,
        completion_bell: Doorbell,
    ) -> Result<(), LinkError> {
        let identity = RingIdentity {
            worker: up.worker,
            worker_generation: up.link.worker_generation,
            netd_generation: up.link.netd_generation,
        };
        let (submissions, completions) = RingPair::open(rings, &identity)?.netd_end();
        let bell = watched(completion_bell)
            .map_err(|source| LinkError::Bell { worker: self.worker, source })?;
        let bell = {
            let mut state = self.state.lock();
            // The task finds the end only after this lock is released.
            let task = task::spawn(self.clone().completions(identity.worker_generation, bell));
            let end = RingEnds {
                identity,
                submissions,
                completions,
                bell: Arc::new(submission_bell),
                task: task.abort_handle(),
                broken: false,
            };
            if let Some(old) = state.rings.replace(end) {
                old.task.abort();
            }
            state.kv_survives = up.kv_survives;
            state.kv_version = up.kv_version;
            state.recovery.up();
            self.submit(&mut state)
        };
        ring(bell.as_deref());
        info!(worker = %self.worker, generation = identity.worker_generation.0, span = %self.span, "worker up");
        Ok(())
    }

    /// Generation `generation` is dead and reaped.
    pub fn down(&self, generation: Generation, cause: DeathCause, restarting: bool) {
        let mut state = self.state.lock();
        state.close(generation);
        for job in state.recovery.down(cause) {
            warn!(worker = %self.worker, %job, "job refused after two crashes");
            state.answer(job, Err(JobFailure::Crashes));
        }
        state.lose_kv();
        if !restarting {
            state.end_for_good();
        }
        info!(worker = %self.worker, generation = generation.0, ?cause, restarting, jobs = state.jobs.len(), "worker down");
    }

    /// Generation `generation` was killed and does not die: what its jobs name is never used again.
    pub fn unkillable(&self, generation: Generation) {
        let mut state = self.state.lock();
        state.close(generation);
        let flying = state.jobs.iter().filter(|(id, _)| state.recovery.flies(**id));
        let held: Vec<_> = flying.map(|(_, record)| record.holds.clone()).collect();
        error!(worker = %self.worker, generation = generation.0, jobs = held.len(), "cannot kill a worker, its memory stays reserved");
        held.into_iter().for_each(std::mem::forget);
        state.end_for_good();
    }

    /// Takes completions of one generation as they come.
    async fn completions(self: Arc<Self>, generation: Generation, bell: AsyncFd<Doorbell>) {
        loop {
            match self.take_completions(generation) {
                Ok(true) => {}
                Ok(false) => return,
                Err(nonsense) => {
                    return self.give_up(&mut self.state.lock(), generation, &nonsense);
                }
            }
            let rung = async {
                let mut ready = bell.readable().await?;
                // The bell is emptied before the ring is looked at again, never between arming and
                // sleeping.
                bell.get_ref().clear()?;
                ready.clear_ready();
                io::Result::Ok(())
            };
            if let Err(error) = rung.await {
                return self.give_up(&mut self.state.lock(), generation, &error);
            }
        }
    }

    /// Answers every completed job and arms the bell; false once the generation is over.
    fn take_completions(&self, generation: Generation) -> Result<bool, Nonsense> {
        let mut state = self.state.lock();
        loop {
            state.drain()?;
            let bell = self.submit(&mut state);
            ring(bell.as_deref());
            let Some(end) = state
                .rings
                .as_mut()
                .filter(|e| e.identity.worker_generation == generation && !e.broken)
            else {
                return Ok(false);
            };
            if end.completions.arm()? == Armed::Sleep {
                return Ok(true);
            }
        }
    }

    /// Submits what may fly now; returns the bell if it has to be rung.
    fn submit(&self, state: &mut LinkState) -> Option<Arc<Doorbell>> {
        match state.submit() {
            Ok(bell) => bell,
            Err((generation, full)) => {
                self.give_up(state, generation, &full);
                None
            }
        }
    }

    /// The rings of a generation cannot be used any more: nothing is submitted or answered until
    /// the worker has ended.
    fn give_up(&self, state: &mut LinkState, generation: Generation, why: &dyn std::fmt::Display) {
        let present =
            |end: &&mut RingEnds| end.identity.worker_generation == generation && !end.broken;
        let Some(end) = state.rings.as_mut().filter(present) else {
            return;
        };
        end.broken = true;
        state.recovery.stop();
        let broken = Broken { worker: self.worker, generation, message: why.to_string() };
        error!(worker = %self.worker, generation = generation.0, error = %why, "rings abandoned");
        if let Err(lost) = self.broken.try_send(broken) {
            error!(worker = %self.worker, %lost, "cannot report broken rings");
        }
    }
}

impl LinkState {
    /// The pages of the last generation are gone, unless they survive it: steps that were to go on
    /// from them fail.
    fn lose_kv(&mut self) {
        if self.kv_survives {
            return;
        }
        self.kv_losses += 1;
        let is_step = |job: &InFlight| job.kind.is_step();
        let steps: Vec<JobId> =
            self.jobs.iter().filter(|(_, record)| is_step(record)).map(|(id, _)| *id).collect();
        for job in steps {
            self.recovery.remove(job);
            self.answer(job, Err(JobFailure::CacheLost));
        }
    }

    /// Submits what may fly now; returns the bell if it has to be rung.
    ///
    /// # Errors
    /// The generation whose submission ring is corrupt, and how.
    fn submit(&mut self) -> Result<Option<Arc<Doorbell>>, (Generation, &'static str)> {
        let mut pushed = false;
        while let Some(id) = self.recovery.take() {
            let (Some(record), Some(end)) = (self.jobs.get_mut(&id), &mut self.rings) else {
                continue;
            };
            if record.reply.is_closed() {
                self.recovery.remove(id);
                self.jobs.remove(&id);
                continue;
            }
            record.submitted_ns = monotonic_ns();
            let descriptor = JobDescriptor {
                id,
                kind: record.kind,
                worker: end.identity.worker,
                worker_generation: end.identity.worker_generation,
                netd_generation: end.identity.netd_generation,
                body: record.body,
                submitted_ns: record.submitted_ns,
            };
            match end.submissions.push(descriptor.encode()) {
                Ok(()) => pushed = true,
                Err(error) => {
                    let generation = end.identity.worker_generation;
                    self.recovery.returned(id);
                    // Permits keep jobs below the size of the ring, so that it is full only when it
                    // is corrupt.
                    return Err(match error {
                        PushError::Full(_) => (generation, "submission ring full beyond its jobs"),
                        _ => (generation, "submission ring corrupt"),
                    });
                }
            }
        }
        let bell = self.rings.as_ref().filter(|_| pushed);
        Ok(bell.filter(|end| end.submissions.must_wake()).map(|end| end.bell.clone()))
    }

    /// Answers what is in the completion ring, up to the first entry that no sound worker writes.
    fn drain(&mut self) -> Result<(), Nonsense> {
        while let Some(end) = &mut self.rings {
            let Some(entry) = end.completions.pop()? else {
                break;
            };
            let identity = end.identity;
            let completion = Completion::decode(&entry).ok_or(Nonsense::NoCompletion)?;
            self.check(&completion, &identity)?;
            let Completion { id, result, queue_ns, compute_ns, .. } = completion;
            if let Err(JobError::Draining | JobError::Stale { .. }) = result {
                self.recovery.returned(id);
                continue;
            }
            let times = result.map(|()| JobTimes { queue_ns, compute_ns });
            self.recovery.remove(id);
            self.answer(id, times.map_err(JobFailure::Refused));
        }
        Ok(())
    }

    /// Whether a job of these rings can have ended so.
    fn check(&self, completion: &Completion, rings: &RingIdentity) -> Result<(), Nonsense> {
        let Completion { id, worker_generation, netd_generation, queue_ns, compute_ns, .. } =
            *completion;
        if (worker_generation, netd_generation) != (rings.worker_generation, rings.netd_generation)
        {
            return Err(Nonsense::OtherGeneration(id));
        }
        let record = self.jobs.get(&id).filter(|_| self.recovery.flies(id));
        let record = record.ok_or(Nonsense::NotInFlight(id))?;
        let claimed = queue_ns.saturating_add(compute_ns);
        let passed = monotonic_ns().saturating_sub(record.submitted_ns);
        if claimed > passed {
            return Err(Nonsense::Times { id, claimed, passed });
        }
        Ok(())
    }

    /// Ends a generation, after what it completed before its end was answered.
    fn close(&mut self, generation: Generation) {
        if self.rings.as_ref().is_none_or(|end| end.identity.worker_generation != generation) {
            return;
        }
        // After nonsense, nothing that the worker wrote is believed.
        let is_sound = self.rings.as_ref().is_some_and(|end| !end.broken);
        if is_sound && let Err(nonsense) = self.drain() {
            warn!(generation = generation.0, error = %nonsense, "lost completions of a dead worker");
        }
        if let Some(end) = self.rings.take() {
            end.task.abort();
        }
    }

    fn end_for_good(&mut self) {
        self.gone = true;
        for job in self.recovery.gone() {
            self.answer(job, Err(JobFailure::WorkerGone));
        }
    }

    fn answer(&mut self, job: JobId, answer: Result<JobTimes, JobFailure>) {
        if let Some(record) = self.jobs.remove(&job) {
            // Nobody listens when the client has gone.
            let _ = record.reply.send(answer);
        }
    }
}

/// A caller that waits for a job. If it goes away before the job was submitted, so does the job.
struct JobWaiter<'a> {
    link: &'a WorkerLink,
    job: JobId,
}

impl Drop for JobWaiter<'_> {
    fn drop(&mut self) {
        let record = {
            let mut state = self.link.state.lock();
            if state.recovery.flies(self.job) {
                return;
            }
            state.recovery.remove(self.job);
            state.jobs.remove(&self.job)
        };
        drop(record);
    }
}

#[expect(
    deprecated,
    reason = "the replacement is unsafe for types that may change their descriptor; a Doorbell owns one for life"
)]
fn watched(bell: Doorbell) -> io::Result<AsyncFd<Doorbell>> {
    AsyncFd::with_interest(bell, Interest::READABLE)
}

fn ring(bell: Option<&Doorbell>) {
    if let Some(Err(error)) = bell.map(Doorbell::ring) {
        error!(%error, "cannot ring the doorbell of a worker");
    }
}

#[cfg(test)]
mod tests;
