//! How the executor answers: it writes the output slot of a finished job, queues the completion,
//! and posts queued completions as the completion ring has room.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use shared::config::FaultPoint;
use shared::ids::JobId;
use shared::job::{Completion, JobError};
use shared::shm::ring::PushError;
use shared::shm::segment::OutOfBounds;

use super::{Executor, Exit, FLUSH_TIME};
use crate::device::{DeviceBackend, TransferError};
use crate::engine::Job;
use crate::link::Link;
use crate::schedule::{Advance, JobKey, Unit};

/// Completions that wait for room in the completion ring, in the order of their jobs' ends.
#[derive(Debug, Default)]
pub(super) struct Answers {
    queue: VecDeque<Completion>,
}

/// Jobs whose output slot was written, and those whose slot lies outside the arena.
pub(super) type Outputs = HashMap<JobKey, Result<(), JobError>>;

impl Answers {
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.queue.clear();
    }

    /// Answers a job that had no effect.
    pub(super) fn refuse(&mut self, link: &Link, id: JobId, error: JobError) {
        self.push(link, id, Err(error), (0, 0));
    }

    /// `times`: nanoseconds in the queue, and from the job's begin to its end.
    fn push(&mut self, link: &Link, id: JobId, result: Result<(), JobError>, times: (u64, u64)) {
        let (queue_ns, compute_ns) = times;
        self.queue.push_back(Completion {
            id,
            worker_generation: link.worker_generation,
            netd_generation: link.netd_generation,
            result,
            queue_ns,
            compute_ns,
        });
    }

    /// Moves completions into the ring as far as it has room, and wakes netd. Returns whether one
    /// was moved.
    fn post(&mut self, link: &mut Link) -> Result<bool, Exit> {
        let mut posted = false;
        while let Some(completion) = self.queue.front() {
            match link.completions.push(completion.encode()) {
                Ok(()) => posted = true,
                Err(PushError::Full(_)) => break,
                Err(PushError::Corrupt(error)) => return Err(error.into()),
            }
            self.queue.pop_front();
        }
        if posted {
            link.completions.ring_if_sleeping(&link.completion_bell)?;
        }
        Ok(posted)
    }
}

impl<B: DeviceBackend> Executor<'_, B> {
    /// Posts the queued answers as far as the ring has room.
    pub(super) fn post_answers(&mut self, link: &mut Link) -> Result<(), Exit> {
        if self.answers.post(link)? {
            self.board.progress();
        }
        Ok(())
    }

    /// Writes the output slots of the decode steps that end with `unit`. The slots are complete
    /// after the next wait for the device.
    pub(super) fn write_outputs(&mut self, unit: &Unit) -> Result<Outputs, Exit> {
        let mut outputs = Outputs::new();
        for key in self.schedule.ending(unit) {
            if let Some(result) = self.write_output(key)? {
                outputs.insert(key, result);
            }
        }
        Ok(outputs)
    }

    /// Writes the output slot of a job. `None`: the job has not begun.
    fn write_output(&mut self, key: JobKey) -> Result<Option<Result<(), JobError>>, Exit> {
        let job = self.jobs.get(&key);
        let Some((job, begun)) = job.and_then(|job| Some((job, job.begun.as_ref()?))) else {
            return Ok(None);
        };
        match self.engine.output(&job.plan, begun) {
            Ok(()) => Ok(Some(Ok(()))),
            Err(TransferError::Outside(outside)) => Ok(Some(Err(bad_slot(&outside)))),
            Err(TransferError::Op(failure)) => Err(failure.into()),
        }
    }

    /// Answers the job of `advance` if its last block is done. `outputs` has the slots that are
    /// written already.
    pub(super) fn answer_if_finished(
        &mut self,
        link: &mut Link,
        advance: Advance,
        outputs: &mut Outputs,
    ) -> Result<(), Exit> {
        if advance.block_done
            && let Some(job) = self.jobs.get(&advance.job)
        {
            for position in advance.positions.clone() {
                let position = u32::try_from(position).unwrap_or(u32::MAX);
                self.faults.at(job.number, FaultPoint::Block(position));
            }
        }
        if !advance.finished {
            return Ok(());
        }
        let output = match outputs.remove(&advance.job) {
            Some(output) => Some(output),
            None => {
                let output = self.write_output(advance.job)?;
                self.engine.synchronize()?;
                output
            }
        };
        if let Some(job) = self.jobs.remove(&advance.job)
            && let Some(result) = output
        {
            self.answer(link, &job, result)?;
        }
        Ok(())
    }

    /// Posts the answer of a job whose output slot is written.
    fn answer(
        &mut self,
        link: &mut Link,
        job: &Job<B>,
        result: Result<(), JobError>,
    ) -> Result<(), Exit> {
        let Some(begun) = &job.begun else {
            return Ok(());
        };
        self.faults.at(job.number, FaultPoint::Output);
        let compute_ns = u64::try_from(begun.at.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.answers.push(link, job.id, result, (begun.queue_ns, compute_ns));
        self.board.job_done(begun.queue_ns, compute_ns);
        self.post_answers(link)?;
        self.faults.at(job.number, FaultPoint::Completion);
        Ok(())
    }

    /// Refuses every accepted job after the time of a drain, and ends once netd had
    /// [`FLUSH_TIME`] to take the answers.
    pub(super) fn refuse_all(&mut self, link: &Link, until: Instant) -> Result<Option<Unit>, Exit> {
        for (_, job) in self.jobs.drain() {
            self.answers.refuse(link, job.id, JobError::Draining);
        }
        self.schedule.clear();
        if Instant::now() >= until + FLUSH_TIME { Err(Exit::clean()) } else { Ok(None) }
    }
}

/// The refusal of a job one of whose slots lies outside the arena.
pub(super) fn bad_slot(outside: &OutOfBounds) -> JobError {
    JobError::BadSlot { offset: outside.offset, len: outside.len }
}
