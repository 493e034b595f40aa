//! A device that computes for a stated time: decode steps that are ready go together and first, then a slice of the oldest other job. Pure;
//! the clock is the caller's.

use std::collections::VecDeque;
use std::time::Duration;

use shared::job::{JobBody, JobDescriptor, WorkKind};

use crate::times::Times;

/// Longest time that a prefill, a forward pass or gradients hold up a decode step: a unit of a real worker on a GPU is as long.
pub const SLICE: Duration = Duration::from_millis(2);

/// Most rows that are computed together, as in a real worker.
const MAX_ROWS: u32 = 32;

/// A job that was taken from the ring.
#[derive(Debug)]
pub struct Job {
    /// Its name and generations.
    pub descriptor: JobDescriptor,
    /// What it asks for; checked.
    pub body: JobBody,
}

/// What the device does next: it is busy for `time`, and then `ended` are done.
#[derive(Debug)]
pub struct Work {
    /// How long it takes.
    pub time: Duration,
    /// Jobs that end with it.
    pub ended: Vec<Job>,
}

/// Jobs that wait.
#[derive(Debug)]
pub struct Device {
    times: Times,
    steps: VecDeque<Job>,
    others: VecDeque<(Job, Duration)>,
}

impl Device {
    /// A device without jobs.
    pub fn new(times: Times) -> Device {
        Device { times, steps: VecDeque::new(), others: VecDeque::new() }
    }

    /// Accepts a job.
    pub fn accept(&mut self, job: Job) {
        if job.body.kind == WorkKind::Decode {
            self.steps.push_back(job);
        } else {
            let time = self.times.of_job(&job.body);
            self.others.push_back((job, time));
        }
    }

    /// Forgets all jobs.
    pub fn clear(&mut self) {
        self.steps.clear();
        self.others.clear();
    }

    /// The next piece of work.
    pub fn next(&mut self) -> Option<Work> {
        let mut rows = 0;
        let together = self.steps.iter().take_while(|job| {
            rows += job.body.batch;
            rows <= MAX_ROWS
        });
        // One job may have more rows than go together.
        let count = together.count().max(1).min(self.steps.len());
        if count > 0 {
            let ended: Vec<Job> = self.steps.drain(..count).collect();
            return Some(Work {
                time: self.times.of_steps(ended.iter().map(|job| &job.body)),
                ended,
            });
        }
        let (job, left) = self.others.pop_front()?;
        let time = left.min(SLICE);
        if left > time {
            self.others.push_front((job, left - time));
            return Some(Work { time, ended: Vec::new() });
        }
        Some(Work { time, ended: vec![job] })
    }
}

#[cfg(test)]
mod tests {
    use shared::ids::{Generation, GroupId, JobId, WorkerId};
    use shared::job::SlotRef;

    use testkit::jobs::job_body as body;

    use super::*;

    fn job(id: u64, kind: WorkKind, batch: u32, tokens: u32) -> Job {
        let slot = SlotRef { offset: 0, len: 0 };
        Job {
            descriptor: JobDescriptor {
                id: JobId(id),
                kind,
                worker: WorkerId::solo(GroupId(0)),
                worker_generation: Generation(1),
                netd_generation: Generation(1),
                body: slot,
                submitted_ns: 0,
            },
            body: body(kind, batch, tokens, 1),
        }
    }

    /// Microseconds and the jobs that end, of everything that waits.
    fn all(device: &mut Device) -> Vec<(u128, Vec<u64>)> {
        let works = std::iter::from_fn(|| device.next());
        let ended = |work: &Work| work.ended.iter().map(|job| job.descriptor.id.0).collect();
        works.map(|work| (work.time.as_micros(), ended(&work))).collect()
    }

    const TIMES: Times = Times { step_us: 1000.0, row_us: 100.0, token_us: 50.0 };

    #[test]
    fn steps_go_together_and_before_slices_of_the_oldest_other_job() {
        let mut device = Device::new(TIMES);
        device.accept(job(1, WorkKind::Forward, 1, 100));
        device.accept(job(2, WorkKind::Prefill, 1, 33));
        assert_eq!(device.next().map(|work| (work.time, work.ended.len())), Some((SLICE, 0)));
        device.accept(job(3, WorkKind::Decode, 1, 1));
        device.accept(job(4, WorkKind::Decode, 2, 1));
        let expected = [(1200, vec![3, 4]), (2000, vec![]), (1000, vec![1]), (1650, vec![2])];
        assert_eq!(all(&mut device), expected);
    }

    #[test]
    fn no_more_rows_go_together_than_a_worker_takes() {
        let mut device = Device::new(TIMES);
        (0..3).for_each(|id| device.accept(job(id, WorkKind::Decode, 16, 1)));
        assert_eq!(all(&mut device), [(4100, vec![0, 1]), (2500, vec![2])]);
    }

    #[test]
    fn a_new_netd_finds_nothing_of_the_old_one() {
        let mut device = Device::new(TIMES);
        device.accept(job(1, WorkKind::Decode, 1, 1));
        device.accept(job(2, WorkKind::Backward, 1, 1));
        device.clear();
        assert!(device.next().is_none());
    }
}
