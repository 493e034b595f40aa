//! The executor of every rank but 0: it reads the plan log of its group, checks each record, and
//! does what it says. It decides nothing, has no rings, and reads inputs and prompts from the arena
//! without ever writing to it. [The executor](super) has the whole picture.
//!
//! Rank 0 is another process, and may be broken: whatever a record holds is checked against what
//! this rank knows from the supervisor (span, pages, arena) and from the records before it. A unit
//! must be what each of its jobs does next. After a bad record the rank ends; nothing is repaired.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use shared::config::FaultPoint;
use shared::control::FromWorker;
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use shared::ids::Generation;
use shared::job::{JobBody, JobError, JobLimits};
use shared::shm::board::{BoardWriter, Phase};
use shared::shm::doorbell::MAX_SPIN;
use shared::shm::group::{PlanReader, WaitPolicy};
use shared::shm::layout::RING_ENTRIES;
use tracing::{debug, info};

use super::execution::Execution;
use super::plan_record::{Begin, Malformed, Record};
use super::{ExecutorCommand, Exit};
use crate::device::DeviceBackend;
use crate::engine::Engine;
use crate::fault::Faults;
use crate::job::Job;
use crate::link::ArenaLink;
use crate::schedule::{JobKey, Unit, Walk};

/// Arenas that wait for the word of rank 0; more than that stay with the control thread.
const MAX_ARENAS: usize = 16;

/// How a rank of a group waits for the others: it spins only if it `may_spin`, where every thread of
/// every rank has a core of its own, and reports to `board` that it is alive.
pub fn wait_policy(may_spin: bool, board: &Arc<BoardWriter>) -> WaitPolicy {
    let board = Arc::clone(board);
    WaitPolicy {
        spin: if may_spin { MAX_SPIN } else { Duration::ZERO },
        interval: board.heartbeat(),
        heartbeat: Box::new(move || board.progress()),
    }
}

/// Why a record cannot be followed.
#[derive(Debug, thiserror::Error)]
pub(super) enum PlanError {
    #[error(transparent)]
    Malformed(#[from] Malformed),
    #[error("job {} begins although it is there, or {RING_ENTRIES} are", key.0)]
    Occupied { key: JobKey },
    #[error("job {} asks for what this rank does not have", key.0)]
    Body {
        key: JobKey,
        #[source]
        source: JobError,
    },
    #[error("job {} is to be dropped and does not exist", key.0)]
    NoJob { key: JobKey },
    #[error("a unit of block {block} is not what its jobs do next")]
    Unit { block: u32 },
    #[error("the arena of netd generation {wanted} did not come")]
    NoArena { wanted: Generation },
}

impl From<PlanError> for Exit {
    fn from(error: PlanError) -> Exit {
        let error = with_causes(&error);
        Exit::failed(format!("rank 0 published a plan that cannot be followed: {error}"))
    }
}

/// Does what rank 0 of the group published.
#[derive(Debug)]
pub struct Follower<'w, B: DeviceBackend> {
    pub(super) execution: Execution<'w, B>,
    plans: PlanReader,
    pub(super) limits: JobLimits,
    /// Where the jobs are.
    walks: HashMap<JobKey, Walk>,
    /// Links that came from the supervisor and that rank 0 did not name yet.
    links: VecDeque<ArenaLink>,
}

impl<'w, B: DeviceBackend> Follower<'w, B> {
    /// A rank that follows `plans`. Jobs are checked against `limits`, whose arena is that of the
    /// link to come.
    pub fn new(
        engine: Engine<'w, B>,
        limits: JobLimits,
        faults: Faults,
        board: impl Into<Arc<BoardWriter>>,
        plans: PlanReader,
    ) -> Self {
        Follower {
            execution: Execution::new(engine, faults, board.into()),
            plans,
            limits,
            walks: HashMap::new(),
            links: VecDeque::new(),
        }
    }

    /// Follows until the control thread says that it is over. `report` passes a message to the
    /// supervisor.
    pub fn run(
        mut self,
        commands: &Receiver<ExecutorCommand<ArenaLink>>,
        mut report: impl FnMut(FromWorker),
    ) -> Exit {
        let mut bytes = Vec::new();
        loop {
            if let Err(end) = self.round(&mut bytes, commands, &mut report) {
                return end;
            }
        }
    }

    /// One round: obey, then do what the next record says, if it comes within a heartbeat.
    fn round(
        &mut self,
        bytes: &mut Vec<u8>,
        commands: &Receiver<ExecutorCommand<ArenaLink>>,
        report: &mut impl FnMut(FromWorker),
    ) -> Result<(), Exit> {
        self.obey(commands, report)?;
        let Some(position) = self.plans.next(bytes, self.execution.board.heartbeat())? else {
            self.execution.enter(Phase::Idle);
            self.execution.board.progress();
            return Ok(());
        };
        let record = Record::decode(bytes).map_err(PlanError::from)?;
        self.follow(&record)?;
        self.plans.done(position)?;
        self.execution.board.progress();
        Ok(())
    }

    /// Carries out the commands that are there.
    fn obey(
        &mut self,
        commands: &Receiver<ExecutorCommand<ArenaLink>>,
        report: &mut impl FnMut(FromWorker),
    ) -> Result<(), Exit> {
        while self.links.len() < MAX_ARENAS {
            match commands.try_recv() {
                Ok(ExecutorCommand::Link(link)) => {
                    // Rank 0 gets its link after, so that no plan comes before its arena.
                    report(FromWorker::Linked { netd_generation: link.netd_generation });
                    self.links.push_back(*link);
                }
                Ok(ExecutorCommand::Drain) => return Err(Exit::clean()),
                Ok(ExecutorCommand::End(reason, message)) => return Err(Exit { reason, message }),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    return Err(Exit { reason: ExitReason::ParentGone, message: String::new() });
                }
            }
        }
        Ok(())
    }

    /// Does what a record says.
    pub(super) fn follow(&mut self, record: &Record<'_>) -> Result<(), Exit> {
        match record {
            Record::Link { netd_generation } => {
                let wanted = *netd_generation;
                let is_older = |link: &ArenaLink| link.netd_generation < wanted;
                while self.links.front().is_some_and(is_older) {
                    self.links.pop_front();
                }
                let link = self.links.pop_front().filter(|link| link.netd_generation == wanted);
                self.link(&link.ok_or(PlanError::NoArena { wanted })?);
                Ok(())
            }
            Record::Begin(begin) => {
                self.execution.enter(Phase::Unit);
                self.begin(begin)
            }
            Record::Unit(unit) => {
                self.execution.enter(Phase::Unit);
                self.unit(unit)
            }
            Record::Drop(key) if self.walks.contains_key(key) => {
                self.forget(*key);
                Ok(())
            }
            Record::Drop(key) => Err(PlanError::NoJob { key: *key }.into()),
        }
    }

    pub(super) fn link(&mut self, link: &ArenaLink) {
        let abandoned = self.walks.len();
        info!(netd_generation = %link.netd_generation, abandoned, "linked to the arena of netd");
        self.walks.clear();
        self.limits.arena_bytes = link.arena.len();
        self.execution.link(&link.arena);
    }

    fn begin(&mut self, begin: &Begin<'_>) -> Result<(), Exit> {
        let Begin { key, number, id, body } = *begin;
        if self.walks.contains_key(&key) || self.walks.len() >= RING_ENTRIES {
            return Err(PlanError::Occupied { key }.into());
        }
        let mut body = JobBody::decode(body, &self.limits)
            .map_err(|source| PlanError::Body { key, source })?;
        // That of the prompts is written to the arena behind each block, by rank 0 alone.
        body.prompt_gradient = None;
        let piece_tokens = self.execution.engine.piece_tokens(body.kind);
        let mut job = Job::new(id, body, piece_tokens);
        job.number = number;
        self.walks.insert(key, job.walk());
        self.execution.jobs.insert(key, job);
        self.execution.faults.at(number, FaultPoint::Taken);
        if let Some(error) = self.execution.begin(key)? {
            // Rank 0 finds the same, and says that the job is to be dropped.
            debug!(job = id.0, %error, "job cannot begin");
        }
        Ok(())
    }

    fn unit(&mut self, unit: &Unit) -> Result<(), Exit> {
        if !self.is_next(unit) {
            return Err(PlanError::Unit { block: unit.block }.into());
        }
        self.execution.unit(unit)?;
        self.execution.engine.synchronize()?;
        for member in &unit.members {
            if let Some(walk) = self.walks.get_mut(&member.job) {
                let advance = walk.advance(member, unit.count as usize);
                self.execution.advanced(&advance);
                if advance.finished {
                    self.forget(member.job);
                }
            }
        }
        Ok(())
    }

    /// Whether each member has begun and goes on with this unit; none is named twice.
    fn is_next(&self, unit: &Unit) -> bool {
        let is_ascending = unit.members.is_sorted_by(|one, next| one.job < next.job);
        let mut members = unit.members.iter();
        !unit.members.is_empty()
            && is_ascending
            && members.all(|member| {
                let walk = self.walks.get(&member.job);
                self.execution.begun.contains_key(&member.job)
                    && walk.is_some_and(|walk| walk.is_next(unit, member))
            })
    }

    fn forget(&mut self, key: JobKey) {
        self.walks.remove(&key);
        self.execution.forget(key);
    }
}
