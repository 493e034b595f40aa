//! The one thread that owns the device: ring -> schedule -> block -> ring. Between two units it takes new jobs, posts answers
//! and obeys the control thread; while there is nothing to do it sleeps on the submission doorbell.
//!
//! ```text
//! job   popped ─ checked ─ accepted ──────────> begun ──────────> block 0 .. n ─> output ─> completion
//!          │         │                     copies, input read      (units)        written     posted
//!          └─────────┴─> refused: completion with an error, no effect
//! ```
//!
//! The executor holds no session state, and nothing of a job outlives its answer but what the job says: KV pages and the output
//! slot. A new link (a new netd) drops all that was accepted before it.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use kernels::ops::OpError;
use nix::time::{ClockId, clock_gettime};
use shared::config::FaultPoint;
use shared::control::FromWorker;
use shared::exit::ExitReason;
use shared::ids::JobId;
use shared::job::{Completion, Entry, JobBody, JobDescriptor, JobError, JobLimits};
use shared::shm::board::{BoardWriter, Phase};
use shared::shm::doorbell::{MAX_SPIN, WaitError};
use shared::shm::layout::RING_ENTRIES;
use shared::shm::ring::{PushError, RingCorrupt};
use shared::shm::segment::OutOfBounds;
use tracing::{debug, info};

use crate::device::{Paged, TransferError};
use crate::engine::{Engine, EngineError};
use crate::fault::Faults;
use crate::link::Link;
use crate::running::Running;
use crate::schedule::{Advance, Schedule, TaskId, Unit};

/// Longest sleep; nothing depends on it.
const SLEEP: Duration = Duration::from_secs(60);

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
    /// End now, for this reason; the text is for the operator.
    End(ExitReason, String),
}

/// Why the executor ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// For the exit code.
    pub reason: ExitReason,
    /// One sentence for the operator; empty when all is well.
    pub message: String,
}

impl End {
    fn failed(message: impl Into<String>) -> End {
        End {
            reason: ExitReason::Failed,
            message: message.into(),
        }
    }

    fn clean() -> End {
        End {
            reason: ExitReason::Clean,
            message: String::new(),
        }
    }
}

impl From<RingCorrupt> for End {
    fn from(error: RingCorrupt) -> End {
        End::failed(error.to_string())
    }
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> End {
        End::failed(format!("doorbell: {error}"))
    }
}

impl From<EngineError> for End {
    fn from(error: EngineError) -> End {
        match error {
            EngineError::Op(OpError::Device(failure)) => End {
                reason: ExitReason::DeviceLost,
                message: format!("the device failed: {failure}"),
            },
            other => End::failed(format!(
                "a job that was checked cannot be computed: {other}"
            )),
        }
    }
}

/// The executor.
#[derive(Debug)]
pub struct Executor<'w, B: Paged> {
    engine: Engine<'w, B>,
    faults: Faults,
    board: BoardWriter,
    limits: JobLimits,
    spin: Duration,
    schedule: Schedule,
    running: HashMap<TaskId, Running<B>>,
    answers: VecDeque<Completion>,
    taken: u64,
    busy: bool,
    drain: Option<Instant>,
    drain_time: Duration,
}

impl<'w, B: Paged> Executor<'w, B> {
    /// An executor without a link. Jobs are checked against `limits`, whose arena is that of the link to come.
    pub fn new(
        engine: Engine<'w, B>,
        limits: JobLimits,
        faults: Faults,
        board: BoardWriter,
    ) -> Self {
        // Spinning on the only core would keep the writer from running.
        let (times, engine_tokens) = (engine.unit_times(), engine.unit_tokens());
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        Executor {
            engine,
            faults,
            board,
            limits,
            spin: if cores > 1 { MAX_SPIN } else { Duration::ZERO },
            schedule: Schedule::new(times).limited(engine_tokens),
            running: HashMap::new(),
            answers: VecDeque::new(),
            taken: 0,
            busy: true,
            drain: None,
            drain_time: DRAIN_TIME,
        }
    }

    /// Serves until told to end. `report` passes a message to the supervisor.
    pub fn run(mut self, commands: &Receiver<Command>, mut report: impl FnMut(FromWorker)) -> End {
        let mut link = None;
        loop {
            if let Err(end) = self.turn(&mut link, commands, &mut report) {
                return end;
            }
        }
    }

    /// One round: obey, take, answer, then run one unit or sleep.
    fn turn(
        &mut self,
        link: &mut Option<Link>,
        commands: &Receiver<Command>,
        report: &mut impl FnMut(FromWorker),
    ) -> Result<(), End> {
        self.obey(link, commands, report)?;
        let Some(link) = link else { return Ok(()) };
        self.take(link)?;
        self.answer(link)?;
        let unit = match self.drain {
            Some(until) if Instant::now() >= until => self.refuse_all(link, until)?,
            _ => self.schedule.next(Instant::now()),
        };
        match unit {
            Some(unit) => {
                self.enter(Phase::Unit);
                self.unit(link, &unit)?;
                self.board.progress();
                self.answer(link)
            }
            None if self.drain.is_some() && self.answers.is_empty() => Err(End::clean()),
            None => self.sleep(link),
        }
    }

    fn obey(
        &mut self,
        link: &mut Option<Link>,
        commands: &Receiver<Command>,
        report: &mut impl FnMut(FromWorker),
    ) -> Result<(), End> {
        loop {
            let command = match (&link, self.drain) {
                (None, None) => {
                    self.enter(Phase::Idle);
                    commands.recv().map_err(|_| TryRecvError::Disconnected)
                }
                (None, Some(_)) => return Err(End::clean()),
                (Some(_), _) => commands.try_recv(),
            };
            match command {
                Ok(Command::Link(next)) => {
                    let abandoned = self.running.len();
                    info!(netd_generation = %next.netd_generation, abandoned, "linked");
                    self.drop_jobs();
                    self.limits.arena_bytes = next.arena.len();
                    self.engine.link(&next.arena);
                    report(FromWorker::Linked {
                        netd_generation: next.netd_generation,
                    });
                    *link = Some(*next);
                }
                Ok(Command::Drain) => {
                    info!(jobs = self.running.len(), "draining");
                    self.drain.get_or_insert(Instant::now() + self.drain_time);
                }
                Ok(Command::End(reason, message)) => return Err(End { reason, message }),
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => {
                    return Err(End {
                        reason: ExitReason::ParentGone,
                        message: String::new(),
                    });
                }
            }
        }
    }

    fn drop_jobs(&mut self) {
        self.schedule.clear();
        self.running.clear();
        self.answers.clear();
    }

    /// Takes jobs out of the ring while their answers have room.
    fn take(&mut self, link: &mut Link) -> Result<(), End> {
        while self.running.len() + self.answers.len() < RING_ENTRIES {
            let Some(entry) = link.submissions.pop()? else {
                break;
            };
            let number = self.taken;
            self.taken += 1;
            match self.accept(link, &entry, number) {
                Ok(job) => {
                    let task = self.schedule.accept(job.shape());
                    self.running.insert(task, job);
                    self.faults.at(number, FaultPoint::Taken);
                }
                Err(error) => {
                    debug!(job = entry[1], %error, "refused");
                    self.answers
                        .push_back(refusal(link, JobId(entry[1]), error));
                }
            }
        }
        Ok(())
    }

    fn accept(&self, link: &Link, entry: &Entry, number: u64) -> Result<Running<B>, JobError> {
        let descriptor = JobDescriptor::decode(entry)?;
        let stale = |got: u32, want: u32| JobError::Stale {
            got: got.into(),
            want: want.into(),
        };
        let (worker, netd) = (descriptor.worker_generation, descriptor.netd_generation);
        if worker != link.worker_generation {
            return Err(stale(worker.0, link.worker_generation.0));
        }
        if netd != link.netd_generation {
            return Err(stale(netd.0, link.netd_generation.0));
        }
        // Bounded by MAX_BODY_BYTES in decode().
        let mut bytes = vec![0u8; descriptor.body.len as usize];
        let bad_slot = JobError::BadSlot {
            offset: descriptor.body.offset,
            len: descriptor.body.len,
        };
        link.arena
            .read(descriptor.body.offset, &mut bytes)
            .map_err(|_| bad_slot)?;
        let body = JobBody::decode(&bytes, &self.limits)?;
        if body.kind != descriptor.kind {
            return Err(JobError::BadBody { at: 0 });
        }
        Ok(Running::new(
            number,
            descriptor.id,
            descriptor.submitted_ns,
            body,
            self.engine.piece_tokens(descriptor.kind),
        ))
    }

    /// Posts what is answered, as far as the ring has room.
    fn answer(&mut self, link: &mut Link) -> Result<(), End> {
        let mut posted = false;
        while let Some(completion) = self.answers.front() {
            match link.completions.push(completion.encode()) {
                Ok(()) => posted = true,
                Err(PushError::Full(_)) => break,
                Err(PushError::Corrupt(error)) => return Err(error.into()),
            }
            self.answers.pop_front();
        }
        if posted {
            link.completions.ring_if_sleeping(&link.completion_bell)?;
        }
        Ok(())
    }

    fn unit(&mut self, link: &mut Link, unit: &Unit) -> Result<(), End> {
        for member in &unit.members {
            if !self.begin(link, member.task)? {
                return Ok(());
            }
        }
        let start = Instant::now();
        self.engine.unit(unit, &mut self.running)?;
        // Outputs of decode steps go behind their last unit, so that one wait is for both.
        let mut outputs = HashMap::new();
        for task in self.schedule.ending(unit) {
            if let Some(result) = self.output(task)? {
                outputs.insert(task, result);
            }
        }
        self.engine.settle()?;
        for advance in self.schedule.done(unit, start.elapsed()) {
            let output = outputs.remove(&advance.task);
            self.advanced(link, advance, output)?;
        }
        Ok(())
    }

    /// Writes the output slot of a job, which is there after the next wait for the device, and says whether it could be written. `None`: the
    /// job has not begun.
    fn output(&mut self, task: TaskId) -> Result<Option<Result<(), JobError>>, End> {
        let job = self.running.get(&task);
        let Some((job, begun)) = job.and_then(|job| Some((job, job.begun.as_ref()?))) else {
            return Ok(None);
        };
        match self.engine.output(&job.body, begun) {
            Ok(()) => Ok(Some(Ok(()))),
            Err(TransferError::Outside(outside)) => Ok(Some(Err(bad_slot(&outside)))),
            Err(TransferError::Engine(failure)) => Err(failure.into()),
        }
    }

    /// Makes the copies of a job and reads its input, unless that is done. False: the job was refused.
    fn begin(&mut self, link: &Link, task: TaskId) -> Result<bool, End> {
        let Some(job) = self.running.get_mut(&task) else {
            return Ok(false);
        };
        if job.begun.is_some() {
            return Ok(true);
        }
        self.engine.copy_pages(&job.body)?;
        self.faults.at(job.number, FaultPoint::Copies);
        match self.engine.begin(job, monotonic_ns()) {
            Ok(()) => Ok(true),
            Err(TransferError::Engine(failure)) => Err(failure.into()),
            Err(TransferError::Outside(outside)) => {
                self.answers
                    .push_back(refusal(link, job.id, bad_slot(&outside)));
                self.schedule.remove(task);
                self.running.remove(&task);
                Ok(false)
            }
        }
    }

    /// `output`: what became of the output slot, if it is written.
    fn advanced(
        &mut self,
        link: &mut Link,
        advance: Advance,
        output: Option<Result<(), JobError>>,
    ) -> Result<(), End> {
        if advance.block_done
            && let Some(job) = self.running.get(&advance.task)
        {
            for position in advance.positions.clone() {
                let position = u32::try_from(position).unwrap_or(u32::MAX);
                self.faults.at(job.number, FaultPoint::Block(position));
            }
        }
        if !advance.finished {
            return Ok(());
        }
        let output = match output {
            Some(output) => Some(output),
            None => {
                let output = self.output(advance.task)?;
                self.engine.settle()?;
                output
            }
        };
        if let Some(job) = self.running.remove(&advance.task)
            && let Some(result) = output
        {
            self.finish(link, &job, result)?;
        }
        Ok(())
    }

    /// Posts the answer of a job whose output slot is written.
    fn finish(
        &mut self,
        link: &mut Link,
        job: &Running<B>,
        result: Result<(), JobError>,
    ) -> Result<(), End> {
        let Some(begun) = &job.begun else {
            return Ok(());
        };
        self.faults.at(job.number, FaultPoint::Output);
        let compute_ns = u64::try_from(begun.at.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.answers.push_back(Completion {
            id: job.id,
            worker_generation: link.worker_generation,
            netd_generation: link.netd_generation,
            result,
            queue_ns: begun.queue_ns,
            compute_ns,
        });
        self.board.job_done(begun.queue_ns, compute_ns);
        self.answer(link)?;
        self.faults.at(job.number, FaultPoint::Completion);
        Ok(())
    }

    /// After the time of a drain: answers all accepted jobs with a refusal.
    fn refuse_all(&mut self, link: &Link, until: Instant) -> Result<Option<Unit>, End> {
        let refusals = self
            .running
            .drain()
            .map(|(_, job)| refusal(link, job.id, JobError::Draining));
        self.answers.extend(refusals);
        self.schedule.clear();
        if Instant::now() >= until + FLUSH_TIME {
            Err(End::clean())
        } else {
            Ok(None)
        }
    }

    fn sleep(&mut self, link: &mut Link) -> Result<(), End> {
        self.enter(Phase::Idle);
        let timeout = if self.answers.is_empty() {
            SLEEP
        } else {
            RETRY
        };
        match link
            .submissions
            .wait(&link.submission_bell, self.spin, timeout)
        {
            Ok(_) => Ok(()),
            Err(WaitError::Corrupt(error)) => Err(error.into()),
            Err(WaitError::Doorbell(error)) => Err(error.into()),
        }
    }

    fn enter(&mut self, phase: Phase) {
        let busy = phase == Phase::Unit;
        if busy != self.busy {
            self.board.enter(
                phase,
                if busy {
                    self.engine.unit_limit()
                } else {
                    Duration::ZERO
                },
            );
            self.busy = busy;
        }
    }
}

fn bad_slot(outside: &OutOfBounds) -> JobError {
    JobError::BadSlot {
        offset: outside.offset,
        len: outside.len,
    }
}

fn refusal(link: &Link, id: JobId, error: JobError) -> Completion {
    Completion {
        id,
        worker_generation: link.worker_generation,
        netd_generation: link.netd_generation,
        result: Err(error),
        queue_ns: 0,
        compute_ns: 0,
    }
}

/// CLOCK_MONOTONIC, which all processes of the machine share.
fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from);
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
