//! The one thread that owns the device: ring -> schedule -> block -> ring. Between two units it
//! takes new jobs, posts answers and obeys the control thread; while there is nothing to do it
//! sleeps on the submission doorbell.
//!
//! ```text
//! job   popped ─ checked ─ accepted ──────────> begun ──────────> block 0 .. n ─> output ─> completion
//!          │         │                     copies, input read      (units)        written     posted
//!          └─────────┴─> refused: completion with an error, no effect
//! ```
//!
//! The executor holds no session state, and nothing of a job outlives its answer but what the job
//! says: KV pages and the output slot. A new link (a new netd) drops all that was accepted before
//! it.
//!
//! # One plan, many ranks
//!
//! netd submits jobs to rank 0 of a group only. The [`Executor`] of rank 0 decides what is done
//! next, publishes it in the plan log of the group, and does it; a [`Follower`] on every other rank
//! reads the log and does the same, in the same order. What they do is one piece of code
//! (`execution`), and what is published is in `record`. A worker without a group publishes nothing.
//!
//! ```text
//! rank 0, Executor    ring -> accept -> plan -> publish -> execute -> output -> completion, once all are done
//!                                                  | plan log                              ^
//! others, Follower                                 +----> check -> execute -> done --------+
//! ```
//!
//! A follower reads inputs and prompts from the arena and writes nothing to it. It trusts rank 0 no
//! further than a worker trusts netd. An answer waits until every rank is done with the last unit of
//! its job, since netd may use the slots again after; the next unit does not wait for it. When a
//! rank dies or hangs, the supervisor aborts the group: every wait ends, and every executor with
//! [`ExitReason::GroupAborted`].
//!
//! What a process of a group makes at its start, with the [`GroupMap`] of its rank and a
//! [`WaitPolicy`] from [`wait_policy`]:
//!
//! ```text
//! rank 0    Executor::new(..).publishing(PlanWriter::new(&map, policy)?), run with Command<Link>
//! others    Follower::new(.., PlanReader::new(&map, policy)?),            run with Command<ArenaLink>
//! ```
//!
//! A follower sleeps on its doorbell of the group: its control thread calls [`GroupMap::ring`] with
//! its own rank after each command. That of rank 0 rings the submission doorbell, as without a group.
//! The arena of a new netd comes to the followers first: rank 0 gets its link when all of them have
//! reported theirs. A drain comes to rank 0 first: the others are told when it has ended.
//!
//! [`GroupMap`]: shared::shm::group::GroupMap
//! [`GroupMap::ring`]: shared::shm::group::GroupMap::ring
//! [`WaitPolicy`]: shared::shm::group::WaitPolicy

mod answers;
mod execution;
mod exit;
mod follower;
mod plan_record;
mod publisher;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use shared::config::FaultPoint;
use shared::control::FromWorker;
use shared::exit::ExitReason;
use shared::ids::JobId;
use shared::job::{Entry, JobBody, JobDescriptor, JobError, JobLimits};
use shared::shm::board::{BoardWriter, Phase};
use shared::shm::doorbell::{MAX_SPIN, WaitError, Wake};
use shared::shm::group::PlanWriter;
use shared::shm::layout::RING_ENTRIES;
use shared::shm::ring::Armed;
use tracing::{debug, info};

use crate::device::{DeviceBackend, UnitLimits};
use crate::engine::Engine;
use crate::fault::Faults;
use crate::job::Job;
use crate::link::NetdLink;
use crate::schedule::{JobKey, Schedule, Unit};

use answers::AnswerQueue;
use execution::Execution;
pub use exit::Exit;
pub use follower::{Follower, wait_policy};
use publisher::Publisher;

/// Sleep while answers wait for room in the completion ring, which rings nobody when it is emptied.
const RETRY: Duration = Duration::from_millis(1);

/// Time after a drain during which accepted jobs are still computed.
pub const DRAIN_TIME: Duration = Duration::from_secs(10);

/// Time after that for netd to take the last answers.
const FLUSH_TIME: Duration = Duration::from_secs(1);

/// Longest wait of a rank for anything but its group before it looks whether that was aborted.
const ABORT_POLL: Duration = Duration::from_millis(50);

/// What the control thread tells the executor. `L` is the [`NetdLink`] of a worker that gets jobs from
/// netd, or the [`ArenaLink`](crate::link::ArenaLink) of one that follows another.
#[derive(Debug)]
pub enum ExecutorCommand<L = NetdLink> {
    /// Serve this link and nothing of an older one.
    Link(Box<L>),
    /// Finish what is accepted, then end. A follower, of which rank 0 needs nothing more, ends.
    Drain,
    /// Exit now, for this reason; the text is for the operator.
    End(ExitReason, String),
}

/// Takes jobs from the ring of a link, computes them on its device, and answers each once.
#[derive(Debug)]
pub struct Executor<'w, B: DeviceBackend> {
    execution: Execution<'w, B>,
    publisher: Publisher,
    limits: JobLimits,
    spin: Duration,
    schedule: Schedule,
    answers: AnswerQueue,
    taken: u64,
    drain: Option<Instant>,
    drain_time: Duration,
}

impl<'w, B: DeviceBackend> Executor<'w, B> {
    /// An executor without a link. Jobs are checked against `limits`, whose arena is that of the
    /// link to come.
    pub fn new(
        engine: Engine<'w, B>,
        limits: JobLimits,
        faults: Faults,
        board: impl Into<Arc<BoardWriter>>,
    ) -> Self {
        let UnitLimits { times, tokens } = engine.unit_limits();
        Executor {
            execution: Execution::new(engine, faults, board.into()),
            publisher: Publisher::default(),
            limits,
            spin: spin_time(),
            schedule: Schedule::new(times).limited(tokens),
            answers: AnswerQueue::default(),
            taken: 0,
            drain: None,
            drain_time: DRAIN_TIME,
        }
    }

    /// The same, looking for jobs so long before it sleeps.
    #[must_use]
    pub fn spinning(mut self, spin: Duration) -> Self {
        self.spin = spin;
        self
    }

    /// The same as rank 0 of a group, whose other ranks follow what is written to `plans`.
    #[must_use]
    pub fn publishing(mut self, plans: PlanWriter) -> Self {
        self.publisher = Publisher::new(plans);
        self
    }

    /// Serves until told to end. `report` passes a message to the supervisor.
    pub fn run(
        mut self,
        commands: &Receiver<ExecutorCommand>,
        mut report: impl FnMut(FromWorker),
    ) -> Exit {
        let mut link = None;
        loop {
            if let Err(end) = self.round(&mut link, commands, &mut report) {
                return end;
            }
        }
    }

    /// One round: obey, take jobs, plan a unit, run it, answer; or sleep.
    fn round(
        &mut self,
        link: &mut Option<NetdLink>,
        commands: &Receiver<ExecutorCommand>,
        report: &mut impl FnMut(FromWorker),
    ) -> Result<(), Exit> {
        self.obey(link, commands, report)?;
        let Some(link) = link else { return Ok(()) };
        self.take_jobs(link)?;
        self.post_answers(link)?;
        match self.plan_unit(link)? {
            Some(unit) => {
                self.run_unit(link, &unit)?;
                self.execution.board.progress();
                self.post_answers(link)?;
                Ok(())
            }
            None if self.drain.is_some() && self.answers.is_empty() => Err(Exit::clean()),
            None => self.sleep(link),
        }
    }

    /// Carries out the commands that are there; without a link it waits for one.
    fn obey(
        &mut self,
        link: &mut Option<NetdLink>,
        commands: &Receiver<ExecutorCommand>,
        report: &mut impl FnMut(FromWorker),
    ) -> Result<(), Exit> {
        loop {
            let command = match (&link, self.drain) {
                (None, None) => {
                    self.execution.enter(Phase::Idle);
                    self.first_command(commands)
                }
                (None, Some(_)) => return Err(Exit::clean()),
                (Some(_), _) => commands.try_recv(),
            };
            match command {
                Ok(ExecutorCommand::Link(next)) => {
                    self.link(&next)?;
                    report(FromWorker::Linked { netd_generation: next.netd_generation });
                    *link = Some(*next);
                }
                Ok(ExecutorCommand::Drain) => {
                    info!(jobs = self.execution.jobs.len(), "draining");
                    self.drain.get_or_insert(Instant::now() + self.drain_time);
                }
                Ok(ExecutorCommand::End(reason, message)) => return Err(Exit { reason, message }),
                Err(TryRecvError::Empty) => return Ok(self.publisher.check_abort()?),
                Err(TryRecvError::Disconnected) => {
                    return Err(Exit { reason: ExitReason::ParentGone, message: String::new() });
                }
            }
        }
    }

    /// Drops what came through an older link.
    fn link(&mut self, next: &NetdLink) -> Result<(), Exit> {
        let abandoned = self.execution.jobs.len();
        info!(netd_generation = %next.netd_generation, abandoned, "linked to netd");
        self.schedule.clear();
        self.answers.clear();
        self.limits.arena_bytes = next.arena.len();
        self.publisher.link(next.netd_generation)?;
        self.publisher.join(&next.submission_bell)?;
        self.execution.link(&next.arena);
        Ok(())
    }

    /// Waits for a command while there is no link, with a heartbeat. `Empty`: the group was
    /// aborted.
    fn first_command(
        &self,
        commands: &Receiver<ExecutorCommand>,
    ) -> Result<ExecutorCommand, TryRecvError> {
        let heartbeat = self.execution.board.heartbeat();
        let interval =
            if self.publisher.is_followed() { heartbeat.min(ABORT_POLL) } else { heartbeat };
        while self.publisher.check_abort().is_ok() {
            match commands.recv_timeout(interval) {
                Err(RecvTimeoutError::Timeout) => self.execution.board.progress(),
                received => return received.map_err(|_| TryRecvError::Disconnected),
            }
        }
        Err(TryRecvError::Empty)
    }

    /// Takes jobs out of the ring while their answers have room.
    fn take_jobs(&mut self, link: &mut NetdLink) -> Result<(), Exit> {
        while self.execution.jobs.len() + self.answers.len() < RING_ENTRIES {
            let Some(entry) = link.submissions.pop()? else {
                break;
            };
            let number = self.taken;
            self.taken += 1;
            match self.accept(link, &entry, number) {
                Ok(job) => {
                    let key = self.schedule.accept(job.walk());
                    self.execution.jobs.insert(key, job);
                    self.execution.faults.at(number, FaultPoint::Taken);
                }
                Err(error) => {
                    debug!(job = entry[1], %error, "job refused");
                    self.answers.refuse(link, JobId(entry[1]), error, None);
                }
            }
        }
        Ok(())
    }

    /// Checks an entry of the ring, whose bytes may be anything, and copies its body out of the
    /// arena.
    fn accept(&self, link: &NetdLink, entry: &Entry, number: u64) -> Result<Job, JobError> {
        let descriptor = JobDescriptor::decode(entry)?;
        let stale = |got: u32, want: u32| JobError::Stale { got: got.into(), want: want.into() };
        let (worker, netd) = (descriptor.worker_generation, descriptor.netd_generation);
        if worker != link.worker_generation {
            return Err(stale(worker.0, link.worker_generation.0));
        }
        if netd != link.netd_generation {
            return Err(stale(netd.0, link.netd_generation.0));
        }
        descriptor.check_worker(link.worker)?;
        // Bounded by MAX_BODY_BYTES in decode().
        let mut bytes = vec![0u8; descriptor.body.len as usize];
        let bad_slot =
            JobError::BadSlot { offset: descriptor.body.offset, len: descriptor.body.len };
        link.arena.read(descriptor.body.offset, &mut bytes).map_err(|_| bad_slot)?;
        let body = JobBody::decode(&bytes, &self.limits)?;
        if body.kind != descriptor.kind {
            return Err(JobError::BadBody { at: 0 });
        }
        let piece_tokens = self.execution.engine.piece_tokens(descriptor.kind);
        let mut job = Job::new(descriptor.id, body, piece_tokens);
        (job.number, job.submitted_ns) = (number, descriptor.submitted_ns);
        Ok(job)
    }

    /// The unit to run now, if there is one. After the time of a drain all jobs are refused instead.
    fn plan_unit(&mut self, link: &NetdLink) -> Result<Option<Unit>, Exit> {
        match self.drain {
            Some(until) if Instant::now() >= until => self.refuse_all(link, until),
            _ => Ok(self.schedule.next(Instant::now())),
        }
    }

    /// Begins the jobs of a unit, runs it, and answers the jobs that end with it.
    fn run_unit(&mut self, link: &mut NetdLink, unit: &Unit) -> Result<(), Exit> {
        self.execution.enter(Phase::Unit);
        for member in &unit.members {
            if !self.begin(link, member.job)? {
                return Ok(());
            }
        }
        self.publisher.unit(unit)?;
        let start = Instant::now();
        self.execution.unit(unit)?;
        // The outputs follow their last unit on the device, so that one wait is for both.
        let mut outputs = self.write_outputs(unit)?;
        self.execution.engine.synchronize()?;
        for advance in self.schedule.done(unit, start.elapsed()) {
            self.answer_if_finished(link, advance, &mut outputs)?;
        }
        Ok(())
    }

    /// Begins a job, unless that is done. False: the job was refused.
    fn begin(&mut self, link: &NetdLink, key: JobKey) -> Result<bool, Exit> {
        let Some(job) = self.execution.jobs.get(&key) else {
            return Ok(false);
        };
        if self.execution.begun.contains_key(&key) {
            return Ok(true);
        }
        let id = job.id;
        self.publisher.begin(key, job.number, id, &job.body)?;
        let Some(error) = self.execution.begin(key)? else {
            return Ok(true);
        };
        self.publisher.remove(key)?;
        self.answers.refuse(link, id, error, self.publisher.until_now());
        self.schedule.remove(key);
        self.execution.forget(key);
        Ok(false)
    }

    /// Sleeps until the next job, a command, the end of what an answer waits for, or the next
    /// heartbeat.
    fn sleep(&mut self, link: &mut NetdLink) -> Result<(), Exit> {
        self.execution.enter(Phase::Idle);
        let heartbeat = self.execution.board.heartbeat();
        let (spin, timeout) = match self.answers.next_until() {
            None => (self.spin, heartbeat),
            Some(until) => match self.publisher.arm(until)? {
                Armed::Sleep => (Duration::ZERO, heartbeat),
                Armed::Ready if self.post_answers(link)? => return Ok(()),
                Armed::Ready => (self.spin, RETRY),
            },
        };
        let woken = link.submissions.wait(&link.submission_bell, spin, timeout);
        self.publisher.disarm();
        match woken {
            // Jobs that wait are work: only what is done with them counts as progress.
            Ok(Wake::Ready) => Ok(()),
            Ok(Wake::Rung | Wake::TimedOut) => {
                self.execution.board.progress();
                Ok(())
            }
            Err(WaitError::Corrupt(error)) => Err(error.into()),
            Err(WaitError::Doorbell(error)) => Err(error.into()),
        }
    }
}

/// How long an executor looks for jobs before it sleeps: not at all on the only CPU of this thread, where it
/// would keep their writer from running.
pub fn spin_time() -> Duration {
    match std::thread::available_parallelism() {
        Ok(cpus) if cpus.get() > 1 => MAX_SPIN,
        _ => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests;
