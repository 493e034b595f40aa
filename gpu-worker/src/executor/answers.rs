//! How the executor answers: it writes the output slot of a finished job, queues the completion,
//! and posts queued completions as the completion ring has room.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use shared::config::FaultPoint;
use shared::ids::JobId;
use shared::job::{Completion, JobError};
use shared::shm::ring::PushError;

use super::execution::{Execution, bad_slot};
use super::publisher::{Publisher, Until};
use super::{Executor, Exit, FLUSH_TIME};
use crate::device::{DeviceBackend, TransferError};
use crate::engine::Begun;
use crate::job::Job;
use crate::link::NetdLink;
use crate::schedule::{Advance, JobKey, Unit};

/// Answers that wait for the other ranks and for room in the completion ring, in the order of their
/// jobs' ends.
#[derive(Debug, Default)]
pub(super) struct AnswerQueue {
    queue: VecDeque<QueuedAnswer>,
    /// Numbers of the jobs whose completions were just posted, and these.
    posted: Vec<(u64, Completion)>,
}

#[derive(Debug)]
struct QueuedAnswer {
    completion: Completion,
    /// Number of the job, if it was computed.
    number: Option<u64>,
    /// What every rank has to have done first: netd may use the slots of the job again after.
    until: Until,
}

/// Jobs whose output slot was written, and those whose slot lies outside the arena.
pub(super) type Outputs = HashMap<JobKey, Result<(), JobError>>;

impl AnswerQueue {
    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.queue.clear();
    }

    /// What the next answer waits for from the other ranks; `None`: there is no answer.
    pub(super) fn next_until(&self) -> Option<Until> {
        self.queue.front().map(|answer| answer.until)
    }

    /// Answers a job that had no effect, after `until`.
    pub(super) fn refuse(&mut self, link: &NetdLink, id: JobId, error: JobError, until: Until) {
        let completion = Completion {
            id,
            worker_generation: link.worker_generation,
            netd_generation: link.netd_generation,
            result: Err(error),
            queue_ns: 0,
            compute_ns: 0,
        };
        self.queue.push_back(QueuedAnswer { completion, number: None, until });
    }

    /// Moves completions into the ring as far as it has room and the other ranks are done, and
    /// wakes netd. Returns whether one was moved.
    fn post(&mut self, link: &mut NetdLink, publisher: &Publisher) -> Result<bool, Exit> {
        self.posted.clear();
        let before = self.queue.len();
        while let Some(answer) = self.queue.front() {
            if !publisher.is_done(answer.until)? {
                break;
            }
            match link.completions.push(answer.completion.encode()) {
                Ok(()) => self.posted.extend(answer.number.map(|n| (n, answer.completion))),
                Err(PushError::Full(_)) => break,
                Err(PushError::Corrupt(error)) => return Err(error.into()),
            }
            self.queue.pop_front();
        }
        let is_posted = self.queue.len() < before;
        if is_posted {
            link.completions.ring_if_sleeping(&link.completion_bell)?;
        }
        Ok(is_posted)
    }
}

impl<B: DeviceBackend> Executor<'_, B> {
    /// Posts the queued answers as far as the ring has room and the other ranks are done. Returns
    /// whether it posted one.
    pub(super) fn post_answers(&mut self, link: &mut NetdLink) -> Result<bool, Exit> {
        let is_posted = self.answers.post(link, &self.publisher)?;
        if is_posted {
            self.execution.board.progress();
            for (number, completion) in &self.answers.posted {
                self.execution.faults.at(*number, FaultPoint::Completion);
                if self.execution.faults.repeats(*number) {
                    // A full ring spares it the lie.
                    let _ = link.completions.push(completion.encode());
                    link.completions.ring_if_sleeping(&link.completion_bell)?;
                }
            }
        }
        Ok(is_posted)
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
        let Execution { engine, jobs, begun, .. } = &mut self.execution;
        let (Some(job), Some(begun)) = (jobs.get(&key), begun.get(&key)) else {
            return Ok(None);
        };
        match engine.output(job, begun) {
            Ok(()) => Ok(Some(Ok(()))),
            Err(TransferError::Outside(outside)) => Ok(Some(Err(bad_slot(&outside)))),
            Err(TransferError::Op(failure)) => Err(failure.into()),
        }
    }

    /// Answers the job of `advance` if its last block is done. `outputs` has the slots that are
    /// written already.
    pub(super) fn answer_if_finished(
        &mut self,
        link: &mut NetdLink,
        advance: Advance,
        outputs: &mut Outputs,
    ) -> Result<(), Exit> {
        self.execution.advanced(&advance);
        if !advance.finished {
            return Ok(());
        }
        let output = match outputs.remove(&advance.job) {
            Some(output) => Some(output),
            None => {
                let output = self.write_output(advance.job)?;
                self.execution.engine.synchronize()?;
                output
            }
        };
        let job = self.execution.jobs.remove(&advance.job);
        let begun = self.execution.begun.remove(&advance.job);
        match (job, begun, output) {
            (Some(job), Some(begun), Some(result)) => self.answer(link, &job, &begun, result),
            _ => Ok(()),
        }
    }

    /// Queues the answer of a job whose output slot is written.
    fn answer(
        &mut self,
        link: &mut NetdLink,
        job: &Job,
        begun: &Begun<B>,
        result: Result<(), JobError>,
    ) -> Result<(), Exit> {
        self.execution.faults.at(job.number, FaultPoint::Output);
        let (queue_ns, compute_ns) = (begun.queue_ns, nanoseconds(begun.at.elapsed()));
        let completion = Completion {
            id: job.id,
            worker_generation: link.worker_generation,
            netd_generation: link.netd_generation,
            result,
            queue_ns,
            compute_ns,
        };
        let until = self.publisher.until_now();
        self.answers.queue.push_back(QueuedAnswer { completion, number: Some(job.number), until });
        let (kind, tokens) = (job.body.kind, job.body.total_tokens());
        self.execution.board.job_done(kind, tokens, queue_ns, compute_ns);
        self.post_answers(link)?;
        Ok(())
    }

    /// Refuses every accepted job after the time of a drain, and ends once netd had
    /// [`FLUSH_TIME`] to take the answers.
    pub(super) fn refuse_all(
        &mut self,
        link: &NetdLink,
        until: Instant,
    ) -> Result<Option<Unit>, Exit> {
        self.execution.begun.clear();
        for (_, job) in self.execution.jobs.drain() {
            self.answers.refuse(link, job.id, JobError::Draining, self.publisher.until_now());
        }
        self.schedule.clear();
        if Instant::now() >= until + FLUSH_TIME { Err(Exit::clean()) } else { Ok(None) }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
