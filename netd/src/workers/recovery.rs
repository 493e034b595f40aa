//! What becomes of the jobs of a dead worker. Pure.
//!
//! A death from outside blames nobody: all jobs in flight are submitted again to the next
//! generation. After a crash that the worker inflicted on itself every job in flight is a
//! *suspect*: suspects are submitted one at a time, alone, before anything else. A job is refused
//! only after it was alone at [`CRASHES_ALONE`] crashes.
//!
//! ```text
//!   submit ──> waiting ──(up, no suspects)──> flying ──> complete
//!                 ^                             │ │
//!                 └──── down: outside ──────────┘ └─ down: self-inflicted ─> suspects ──(up, nothing flies)──> flying alone
//!                                                          alone, second time: refused
//! ```

use std::collections::{HashMap, VecDeque};

use shared::control::DeathCause;
use shared::ids::JobId;

/// Crashes with a job alone in the worker after which the job is refused: once may have been
/// chance.
pub const CRASHES_ALONE: u32 = 2;

/// Jobs of one worker that are not answered yet, and where they are.
#[derive(Debug, Default)]
pub struct Recovery {
    up: bool,
    /// Submitted to the generation that is up, in order.
    flying: Vec<JobId>,
    /// To be submitted freely, in order.
    waiting: VecDeque<JobId>,
    /// To be submitted alone, in order.
    suspects: VecDeque<JobId>,
    /// The suspect that flies.
    tested: Option<JobId>,
    alone: HashMap<JobId, u32>,
}

impl Recovery {
    /// A job arrives. What [`Self::take`] returns then is to be submitted.
    pub fn add(&mut self, job: JobId) {
        self.waiting.push_back(job);
    }

    /// The next job to submit now, which flies from here on.
    pub fn take(&mut self) -> Option<JobId> {
        if !self.up || self.tested.is_some() {
            return None;
        }
        if !self.suspects.is_empty() {
            if !self.flying.is_empty() {
                return None;
            }
            self.tested = self.suspects.pop_front();
            self.flying.extend(self.tested);
            return self.tested;
        }
        let job = self.waiting.pop_front()?;
        self.flying.push(job);
        Some(job)
    }

    /// A job was answered or given up by its client before it flew; true if it was known.
    pub fn remove(&mut self, job: JobId) -> bool {
        self.alone.remove(&job);
        if self.tested == Some(job) {
            self.tested = None;
        }
        let known = self.flying.len() + self.waiting.len() + self.suspects.len();
        self.flying.retain(|j| *j != job);
        self.waiting.retain(|j| *j != job);
        self.suspects.retain(|j| *j != job);
        known > self.flying.len() + self.waiting.len() + self.suspects.len()
    }

    /// Whether `job` was submitted and not answered.
    pub fn flies(&self, job: JobId) -> bool {
        self.flying.contains(&job)
    }

    /// A generation of the worker is there.
    pub fn up(&mut self) {
        self.up = true;
    }

    /// The generation takes no more jobs; what flies stays until its end is known.
    pub fn stop(&mut self) {
        self.up = false;
    }

    /// The generation takes no more jobs (it drains); `job` came back undone.
    pub fn returned(&mut self, job: JobId) {
        self.up = false;
        if self.flies(job) {
            self.flying.retain(|j| *j != job);
            self.tested = self.tested.filter(|j| *j != job);
            self.waiting.push_front(job);
        }
    }

    /// The generation is dead and reaped. Returns the jobs that are refused for good.
    pub fn down(&mut self, cause: DeathCause) -> Vec<JobId> {
        self.up = false;
        let mut lost = std::mem::take(&mut self.flying);
        let tested = self.tested.take();
        let mut refused = Vec::new();
        if cause == DeathCause::SelfInflicted
            && let [job] = lost[..]
        {
            let crashes = self.alone.entry(job).or_default();
            *crashes += 1;
            if *crashes >= CRASHES_ALONE {
                self.alone.remove(&job);
                refused.append(&mut lost);
            }
        }
        let suspect = cause == DeathCause::SelfInflicted || tested.is_some();
        let target = if suspect { &mut self.suspects } else { &mut self.waiting };
        lost.into_iter().rev().for_each(|job| target.push_front(job));
        refused
    }

    /// No generation will come: all jobs that are not answered.
    pub fn gone(&mut self) -> Vec<JobId> {
        self.up = false;
        self.tested = None;
        self.alone.clear();
        let mut jobs = std::mem::take(&mut self.flying);
        jobs.extend(self.suspects.drain(..));
        jobs.extend(self.waiting.drain(..));
        jobs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use DeathCause::{Outside, SelfInflicted};

    const NONE: [u64; 0] = [];

    fn with(jobs: std::ops::Range<u64>) -> Recovery {
        let mut recovery = Recovery::default();
        jobs.for_each(|job| recovery.add(JobId(job)));
        recovery
    }

    fn submitted(recovery: &mut Recovery) -> Vec<u64> {
        std::iter::from_fn(|| recovery.take()).map(|job| job.0).collect()
    }

    fn ids(jobs: Vec<JobId>) -> Vec<u64> {
        jobs.into_iter().map(|job| job.0).collect()
    }

    #[test]
    fn nothing_is_submitted_before_a_worker_is_up() {
        let mut recovery = with(0..3);
        assert_eq!(submitted(&mut recovery), NONE);
        recovery.up();
        assert_eq!(submitted(&mut recovery), [0, 1, 2]);
        recovery.add(JobId(3));
        assert_eq!(submitted(&mut recovery), [3]);
    }

    #[test]
    fn a_death_from_outside_resubmits_all_in_order_however_often() {
        let mut recovery = with(0..3);
        for _ in 0..5 {
            recovery.up();
            assert_eq!(submitted(&mut recovery), [0, 1, 2]);
            assert_eq!(ids(recovery.down(Outside)), NONE);
        }
        assert!(recovery.remove(JobId(1)));
        recovery.up();
        assert_eq!(submitted(&mut recovery), [0, 2]);
    }

    #[test]
    fn after_a_crash_jobs_go_one_at_a_time_before_new_ones() {
        let mut recovery = with(0..3);
        recovery.up();
        submitted(&mut recovery);
        assert_eq!(ids(recovery.down(SelfInflicted)), NONE);
        recovery.add(JobId(3));
        recovery.add(JobId(4));
        recovery.up();
        for suspect in 0..3 {
            assert_eq!(submitted(&mut recovery), [suspect]);
            assert!(recovery.remove(JobId(suspect)));
        }
        assert_eq!(submitted(&mut recovery), [3, 4]);
    }

    #[test]
    fn only_the_job_that_was_alone_at_two_crashes_is_refused() {
        let mut recovery = with(0..3);
        recovery.up();
        submitted(&mut recovery);
        recovery.down(SelfInflicted);
        recovery.up();
        assert_eq!(submitted(&mut recovery), [0]);
        recovery.remove(JobId(0));
        assert_eq!(submitted(&mut recovery), [1]);
        assert_eq!(ids(recovery.down(SelfInflicted)), NONE);
        recovery.up();
        assert_eq!(submitted(&mut recovery), [1]);
        assert_eq!(ids(recovery.down(SelfInflicted)), [1]);
        recovery.up();
        assert_eq!(submitted(&mut recovery), [2]);
        recovery.remove(JobId(2));
        recovery.add(JobId(5));
        assert_eq!(submitted(&mut recovery), [5]);
    }

    #[test]
    fn a_kill_from_outside_does_not_count_against_a_suspect() {
        let mut recovery = with(7..8);
        for cause in [SelfInflicted, Outside, Outside] {
            recovery.up();
            assert_eq!(submitted(&mut recovery), [7]);
            assert_eq!(ids(recovery.down(cause)), NONE);
        }
        recovery.up();
        assert_eq!(submitted(&mut recovery), [7]);
        assert_eq!(ids(recovery.down(SelfInflicted)), [7]);
    }

    #[test]
    fn a_returned_job_waits_for_the_next_generation() {
        let mut recovery = with(0..2);
        recovery.up();
        submitted(&mut recovery);
        recovery.returned(JobId(1));
        assert_eq!(submitted(&mut recovery), NONE);
        recovery.remove(JobId(0));
        recovery.down(Outside);
        recovery.up();
        assert_eq!(submitted(&mut recovery), [1]);
    }

    #[test]
    fn a_worker_that_will_not_come_back_leaves_no_job() {
        let mut recovery = with(0..4);
        recovery.up();
        recovery.take();
        recovery.take();
        recovery.down(SelfInflicted);
        assert_eq!(ids(recovery.gone()), [0, 1, 2, 3]);
        recovery.up();
        assert_eq!(submitted(&mut recovery), NONE);
        assert!(!recovery.remove(JobId(0)));
    }
}
