//! What becomes of a plan: the device and the jobs that are on their way. Every rank of a group does
//! the same with the same plan, and nothing here knows who planned it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use shared::clock::monotonic_ns;
use shared::config::FaultPoint;
use shared::job::{JobError, WorkKind};
use shared::shm::arena::ArenaMap;
use shared::shm::board::{BoardWriter, Phase};
use shared::shm::segment::OutOfBounds;

use super::Exit;
use crate::device::{DeviceBackend, TransferError};
use crate::engine::{Begun, Engine};
use crate::fault::Faults;
use crate::job::Job;
use crate::schedule::{Advance, JobKey, Unit};

/// The engine, and the jobs that were accepted and not finished.
#[derive(Debug)]
pub(super) struct Execution<'w, B: DeviceBackend> {
    pub(super) engine: Engine<'w, B>,
    pub(super) jobs: HashMap<JobKey, Job>,
    /// What those of them have that have begun.
    pub(super) begun: HashMap<JobKey, Begun<B>>,
    pub(super) faults: Faults,
    pub(super) board: Arc<BoardWriter>,
    busy: bool,
}

impl<'w, B: DeviceBackend> Execution<'w, B> {
    pub(super) fn new(engine: Engine<'w, B>, faults: Faults, board: Arc<BoardWriter>) -> Self {
        let (jobs, begun) = (HashMap::new(), HashMap::new());
        Execution { engine, jobs, begun, faults, board, busy: true }
    }

    /// Shows on the board whether there is work.
    pub(super) fn enter(&mut self, phase: Phase) {
        let busy = phase == Phase::Unit;
        if busy != self.busy {
            self.board.enter(phase, Duration::ZERO);
            self.busy = busy;
        }
    }

    /// Drops all jobs. Those to come have their tensors in `arena`.
    pub(super) fn link(&mut self, arena: &Arc<ArenaMap>) {
        self.jobs.clear();
        self.begun.clear();
        self.engine.link(arena);
    }

    /// Makes the page copies of a job, then reads its input. `Some`: the job cannot begin, and has
    /// had no effect but its copies.
    pub(super) fn begin(&mut self, key: JobKey) -> Result<Option<JobError>, Exit> {
        let Some(job) = self.jobs.get(&key) else {
            return Ok(None);
        };
        self.engine.copy_pages(&job.body)?;
        self.faults.at(job.number, FaultPoint::Copies);
        match self.engine.begin(job, monotonic_ns()) {
            Ok(begun) => {
                self.begun.insert(key, begun);
                Ok(None)
            }
            Err(TransferError::Op(failure)) => Err(failure.into()),
            Err(TransferError::Outside(outside)) => Ok(Some(bad_slot(&outside))),
        }
    }

    /// Runs a unit of jobs that have begun. The device is done after the next wait for it.
    pub(super) fn unit(&mut self, unit: &Unit) -> Result<(), Exit> {
        self.engine.unit(unit, &self.jobs, &mut self.begun)?;
        let jobs = || unit.members.iter().filter_map(|of| self.jobs.get(&of.job));
        if jobs().all(|job| job.body.kind == WorkKind::Decode) {
            self.board.decoded(jobs().map(|job| u64::from(job.body.batch)).sum());
        }
        Ok(())
    }

    /// Drops a job.
    pub(super) fn forget(&mut self, key: JobKey) {
        self.jobs.remove(&key);
        self.begun.remove(&key);
    }

    /// A unit took a job along: past the blocks, unless pieces are left.
    pub(super) fn advanced(&self, advance: &Advance) {
        if advance.block_done
            && let Some(job) = self.jobs.get(&advance.job)
        {
            for position in advance.positions.clone() {
                let position = u32::try_from(position).unwrap_or(u32::MAX);
                self.faults.at(job.number, FaultPoint::Block(position));
            }
        }
    }
}

/// The refusal of a job one of whose slots lies outside the arena.
pub(super) fn bad_slot(outside: &OutOfBounds) -> JobError {
    JobError::BadSlot { offset: outside.offset, len: outside.len }
}
