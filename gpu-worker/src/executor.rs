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

mod answers;
mod exit;

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use shared::config::FaultPoint;
use shared::control::FromWorker;
use shared::exit::ExitReason;
use shared::ids::JobId;
use shared::job::{Entry, JobBody, JobDescriptor, JobError, JobLimits};
use shared::shm::board::{BoardWriter, Phase};
use shared::shm::doorbell::{MAX_SPIN, WaitError, Wake};
use shared::shm::layout::RING_ENTRIES;
use tracing::{debug, info};

use crate::device::{DeviceBackend, TransferError, UnitLimits};
use crate::engine::{Engine, Job};
use crate::fault::Faults;
use crate::job::JobPlan;
use crate::link::Link;
use crate::schedule::{JobKey, Schedule, Unit};

use answers::{Answers, bad_slot};
pub use exit::Exit;

/// Sleep while answers wait for room in the completion ring, which rings nobody when it is emptied.
const RETRY: Duration = Duration::from_millis(1);

/// Time after a drain during which accepted jobs are still computed.
pub const DRAIN_TIME: Duration = Duration::from_secs(10);

/// Time after that for netd to take the last answers.
const FLUSH_TIME: Duration = Duration::from_secs(1);

/// What the control thread tells the executor.
#[derive(Debug)]
pub enum Command {
    /// Serve this link and nothing of an older one.
    Link(Box<Link>),
    /// Finish what is accepted, then end.
    Drain,
    /// Exit now, for this reason; the text is for the operator.
    End(ExitReason, String),
}

/// Takes jobs from the ring of a link, computes them on its device, and answers each once.
#[derive(Debug)]
pub struct Executor<'w, B: DeviceBackend> {
    engine: Engine<'w, B>,
    faults: Faults,
    board: BoardWriter,
    limits: JobLimits,
    spin: Duration,
    schedule: Schedule,
    jobs: HashMap<JobKey, Job<B>>,
    answers: Answers,
    taken: u64,
    busy: bool,
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
        board: BoardWriter,
    ) -> Self {
        // Spinning on the only core would keep the writer from running.
        let UnitLimits { times, tokens } = engine.unit_limits();
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Executor {
            engine,
            faults,
            board,
            limits,
            spin: if cores > 1 { MAX_SPIN } else { Duration::ZERO },
            schedule: Schedule::new(times).limited(tokens),
            jobs: HashMap::new(),
            answers: Answers::default(),
            taken: 0,
            busy: true,
            drain: None,
            drain_time: DRAIN_TIME,
        }
    }

    /// Serves until told to end. `report` passes a message to the supervisor.
    pub fn run(mut self, commands: &Receiver<Command>, mut report: impl FnMut(FromWorker)) -> Exit {
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
        link: &mut Option<Link>,
        commands: &Receiver<Command>,
        report: &mut impl FnMut(FromWorker),
    ) -> Result<(), Exit> {
        self.obey(link, commands, report)?;
        let Some(link) = link else { return Ok(()) };
        self.take_jobs(link)?;
        self.post_answers(link)?;
        match self.plan_unit(link)? {
            Some(unit) => {
                self.run_unit(link, &unit)?;
                self.board.progress();
                self.post_answers(link)
            }
            None if self.drain.is_some() && self.answers.is_empty() => Err(Exit::clean()),
            None => self.sleep(link),
        }
    }

    /// Carries out the commands that are there; without a link it waits for one.
    fn obey(
        &mut self,
        link: &mut Option<Link>,
        commands: &Receiver<Command>,
        report: &mut impl FnMut(FromWorker),
    ) -> Result<(), Exit> {
        loop {
            let command = match (&link, self.drain) {
                (None, None) => {
                    self.enter(Phase::Idle);
                    self.first_command(commands)
                }
                (None, Some(_)) => return Err(Exit::clean()),
                (Some(_), _) => commands.try_recv(),
            };
            match command {
                Ok(Command::Link(next)) => {
                    let abandoned = self.jobs.len();
                    info!(netd_generation = %next.netd_generation, abandoned, "linked to netd");
                    self.drop_jobs();
                    self.limits.arena_bytes = next.arena.len();
                    self.engine.link(&next.arena);
                    report(FromWorker::Linked { netd_generation: next.netd_generation });
                    *link = Some(*next);
                }
                Ok(Command::Drain) => {
                    info!(jobs = self.jobs.len(), "draining");
                    self.drain.get_or_insert(Instant::now() + self.drain_time);
                }
                Ok(Command::End(reason, message)) => return Err(Exit { reason, message }),
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => {
                    return Err(Exit { reason: ExitReason::ParentGone, message: String::new() });
                }
            }
        }
    }

    /// Waits for a command while there is no link, with a heartbeat.
    fn first_command(&self, commands: &Receiver<Command>) -> Result<Command, TryRecvError> {
        loop {
            match commands.recv_timeout(self.board.heartbeat()) {
                Err(RecvTimeoutError::Timeout) => self.board.progress(),
                received => return received.map_err(|_| TryRecvError::Disconnected),
            }
        }
    }

    fn drop_jobs(&mut self) {
        self.schedule.clear();
        self.jobs.clear();
        self.answers.clear();
    }

    /// Takes jobs out of the ring while their answers have room.
    fn take_jobs(&mut self, link: &mut Link) -> Result<(), Exit> {
        while self.jobs.len() + self.answers.len() < RING_ENTRIES {
            let Some(entry) = link.submissions.pop()? else {
                break;
            };
            let number = self.taken;
            self.taken += 1;
            match self.accept(link, &entry, number) {
                Ok(job) => {
                    let key = self.schedule.accept(job.plan.shape());
                    self.jobs.insert(key, job);
                    self.faults.at(number, FaultPoint::Taken);
                }
                Err(error) => {
                    debug!(job = entry[1], %error, "job refused");
                    self.answers.refuse(link, JobId(entry[1]), error);
                }
            }
        }
        Ok(())
    }

    /// Checks an entry of the ring, whose bytes may be anything, and copies its body out of the
    /// arena.
    fn accept(&self, link: &Link, entry: &Entry, number: u64) -> Result<Job<B>, JobError> {
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
        let plan = JobPlan::new(body, self.engine.piece_tokens(descriptor.kind));
        Ok(Job::new(number, descriptor.id, descriptor.submitted_ns, plan))
    }

    /// The unit to run now, if there is one. After the time of a drain all jobs are refused instead.
    fn plan_unit(&mut self, link: &Link) -> Result<Option<Unit>, Exit> {
        match self.drain {
            Some(until) if Instant::now() >= until => self.refuse_all(link, until),
            _ => Ok(self.schedule.next(Instant::now())),
        }
    }

    /// Begins the jobs of a unit, runs it, and answers the jobs that end with it.
    fn run_unit(&mut self, link: &mut Link, unit: &Unit) -> Result<(), Exit> {
        self.enter(Phase::Unit);
        for member in &unit.members {
            if !self.begin(link, member.job)? {
                return Ok(());
            }
        }
        let start = Instant::now();
        self.engine.unit(unit, &mut self.jobs)?;
        // The outputs follow their last unit on the device, so that one wait is for both.
        let mut outputs = self.write_outputs(unit)?;
        self.engine.synchronize()?;
        for advance in self.schedule.done(unit, start.elapsed()) {
            self.answer_if_finished(link, advance, &mut outputs)?;
        }
        Ok(())
    }

    /// Makes the copies of a job and reads its input, unless that is done. False: the job was
    /// refused.
    fn begin(&mut self, link: &Link, key: JobKey) -> Result<bool, Exit> {
        let Some(job) = self.jobs.get_mut(&key) else {
            return Ok(false);
        };
        if job.begun.is_some() {
            return Ok(true);
        }
        self.engine.copy_pages(&job.plan.body)?;
        self.faults.at(job.number, FaultPoint::Copies);
        match self.engine.begin(job, monotonic_ns()) {
            Ok(()) => Ok(true),
            Err(TransferError::Op(failure)) => Err(failure.into()),
            Err(TransferError::Outside(outside)) => {
                self.answers.refuse(link, job.id, bad_slot(&outside));
                self.schedule.remove(key);
                self.jobs.remove(&key);
                Ok(false)
            }
        }
    }

    /// Sleeps until the next job, a command or the next heartbeat.
    fn sleep(&mut self, link: &mut Link) -> Result<(), Exit> {
        self.enter(Phase::Idle);
        let timeout = if self.answers.is_empty() { self.board.heartbeat() } else { RETRY };
        match link.submissions.wait(&link.submission_bell, self.spin, timeout) {
            // Jobs that wait are work: only what is done with them counts as progress.
            Ok(Wake::Ready) => Ok(()),
            Ok(Wake::Rung | Wake::TimedOut) => {
                self.board.progress();
                Ok(())
            }
            Err(WaitError::Corrupt(error)) => Err(error.into()),
            Err(WaitError::Doorbell(error)) => Err(error.into()),
        }
    }

    fn enter(&mut self, phase: Phase) {
        let busy = phase == Phase::Unit;
        if busy != self.busy {
            self.board.enter(phase, Duration::ZERO);
            self.busy = busy;
        }
    }
}

/// CLOCK_MONOTONIC, which all processes of the machine share.
fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
