//! The workers that serve one span together: what the tree keeps of them. Most groups have a single
//! worker. A group is started as one and ends as one; netd knows it by its rank 0.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shared::block::Span;
use shared::config::Device;
use shared::control::DeathCause;
use shared::ids::{Generation, GroupId, Rank, WorkerId};
use shared::survey::Capacity;

use super::child::{Child, ChildId, Lifecycle, Next};
use crate::placement::Placement;

/// What a group is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Assignment {
    /// Its blocks are served.
    Serving,
    /// Its blocks are those of the move.
    Coming,
    /// Its blocks were left; sessions go on.
    Leaving,
    /// Not wanted any more; it goes from the tree once it is reaped.
    Dropped,
}

/// One rank of a group.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Worker {
    pub(super) child: Child,
    pub(super) id: WorkerId,
    pub(super) capacity: Capacity,
    /// Whether a process of its own failed on its device or hung: warpgroups may be to blame where
    /// no sample showed it, so the next ones do without.
    pub(super) by_warps: bool,
    /// For whom it waited at the last reading.
    pub(super) waits_for: Option<Rank>,
    /// Generation of netd whose rings, or whose arena, it was given.
    pub(super) linking: Option<Generation>,
    /// Generation of netd whose rings, or whose arena, it acknowledged.
    pub(super) linked: Option<Generation>,
    /// How it ended, while other ranks of its group were not reaped.
    pub(super) death: Option<Death>,
    /// When generations of its group ended for it.
    #[serde(with = "crate::instants::list")]
    pub(super) blamed: Vec<Instant>,
}

/// How a worker ended.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Death {
    pub(super) cause: DeathCause,
    pub(super) next: Next,
    /// How its process ended.
    pub(super) end: String,
    /// What it said about its failure.
    pub(super) said: Option<String>,
    pub(super) was_unkillable: bool,
    /// Whether it speaks against its device.
    pub(super) counts: bool,
}

/// The workers of one span and how far their link to netd is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct WorkerGroup {
    pub(super) placement: Placement,
    /// The blocks of the instance that its own are a part of.
    pub(super) whole: Span,
    pub(super) assignment: Assignment,
    /// In the order of ranks; at least one.
    pub(super) workers: Vec<Worker>,
    /// Generation of netd that was told of it.
    pub(super) told: Option<Generation>,
    /// Index of the worker for which this generation ends: it died first, or was killed first.
    pub(super) culprit: Option<usize>,
    /// Whether the waits of this generation were told to fail.
    pub(super) is_aborted: bool,
    /// Whether prepare has yet to say how its devices share a block.
    pub(super) awaits_shares: bool,
    /// The device whose blocks it serves as the fallback.
    pub(super) origin: Option<Origin>,
    /// When it, or its origin, is tried again after it was put aside, and after which pause.
    pub(super) aside: Option<Aside>,
    /// Whether it was put aside and has not served since.
    pub(super) is_on_trial: bool,
}

/// A device that was put aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Aside {
    #[serde(with = "crate::instants")]
    pub(super) until: Instant,
    pub(super) pause: Duration,
}

/// The device whose blocks a fallback serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Origin {
    pub(super) device: Device,
    pub(super) span: Span,
    pub(super) step: Comeback,
}

/// How far a device is on its way back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Comeback {
    /// It is left alone until its pause is over.
    Resting,
    /// The driver examines it.
    Examined,
    /// It works; its blocks return once no session is open.
    Passed,
    /// The worker of the fallback is being killed for it.
    Returning,
}

impl WorkerGroup {
    /// A group that was never started, of the instance's blocks `whole`. Its next generation is the
    /// one after `last`.
    pub(super) fn new(
        placement: Placement,
        whole: Span,
        assignment: Assignment,
        last: Generation,
    ) -> WorkerGroup {
        let worker = |id| Worker {
            child: Child::after(ChildId::Worker(id), last),
            id,
            capacity: Capacity::default(),
            by_warps: false,
            waits_for: None,
            linking: None,
            linked: None,
            death: None,
            blamed: Vec::new(),
        };
        let workers = placement.workers().map(worker).collect();
        WorkerGroup {
            placement,
            whole,
            assignment,
            workers,
            told: None,
            culprit: None,
            is_aborted: false,
            awaits_shares: false,
            origin: None,
            aside: None,
            is_on_trial: false,
        }
    }

    pub(super) fn id(&self) -> GroupId {
        self.placement.group
    }

    /// Rank 0, by which netd knows the group and which alone has rings.
    pub(super) fn leader(&self) -> Option<&Worker> {
        self.workers.first()
    }

    /// The generation of the present or the last processes, the same for all ranks.
    pub(super) fn generation(&self) -> Generation {
        self.leader().map_or(Generation(0), |leader| leader.child.generation)
    }

    pub(super) fn has_several(&self) -> bool {
        self.workers.len() > 1
    }

    pub(super) fn children(&self) -> impl Iterator<Item = &Child> {
        self.workers.iter().map(|worker| &worker.child)
    }

    /// Whether a process of it was not reaped.
    pub(super) fn is_alive(&self) -> bool {
        self.children().any(|child| child.alive)
    }

    /// Whether all of it serves and nothing of it is about to be killed.
    pub(super) fn is_ready(&self) -> bool {
        self.children().all(Child::is_ready)
    }

    /// Whether it will be started again after its end.
    pub(super) fn is_restarting(&self) -> bool {
        self.children().all(|child| matches!(child.state, Lifecycle::Backoff { .. }))
    }

    /// Whether it serves, or will again without anybody's help.
    pub(super) fn is_lasting(&self) -> bool {
        let lost =
            |child: &Child| matches!(child.state, Lifecycle::Held { .. } | Lifecycle::Unkillable);
        !self.children().any(lost)
    }

    /// Whether its blocks count as served.
    pub(super) fn is_served(&self) -> bool {
        self.assignment == Assignment::Serving && self.is_lasting() && !self.is_on_trial
    }

    /// Notes for which worker this generation ended. What is longer ago than `window` counts no more.
    pub(super) fn blame(&mut self, now: Instant, window: Duration) {
        for worker in &mut self.workers {
            worker.blamed.retain(|&at| now.duration_since(at) <= window);
        }
        let culprit = self.culprit.and_then(|culprit| self.workers.get_mut(culprit));
        let counts = |worker: &&mut Worker| worker.death.as_ref().is_some_and(|death| death.counts);
        if let Some(worker) = culprit.filter(counts) {
            worker.blamed.push(now);
        }
    }

    /// Index of the worker for which most generations ended; of equal ones the last one.
    pub(super) fn most_to_blame(&self) -> usize {
        let culprit = self.culprit.unwrap_or_default();
        let most = |index: &usize| (self.workers[*index].blamed.len(), *index == culprit);
        (0..self.workers.len()).max_by_key(most).unwrap_or(culprit)
    }

    /// Whether nothing is left of it but processes that do not die.
    pub(super) fn is_stuck(&self) -> bool {
        let mut alive = self.children().filter(|child| child.alive).peekable();
        alive.peek().is_some() && alive.all(|child| child.state == Lifecycle::Unkillable)
    }

    /// The worker that holds `index` up: it waits for another, that for a third perhaps; the last
    /// of them that is as late.
    pub(super) fn holds_up(&self, index: usize, is_late: impl Fn(&Worker) -> bool) -> usize {
        let next = |at: &usize| {
            let waits_for = usize::from(self.workers.get(*at)?.waits_for?.0);
            self.workers.get(waits_for).filter(|worker| is_late(worker)).map(|_| waits_for)
        };
        // As many steps as there are workers: some may wait for each other.
        std::iter::successors(Some(index), next).take(self.workers.len()).last().unwrap_or(index)
    }

    /// What follows the end of all workers: nothing, if the one for which they ended, or any other,
    /// is not to be started again; else the latest of their starts.
    pub(super) fn next(&self) -> Option<Next> {
        let nexts =
            || self.workers.iter().filter_map(|worker| worker.death.as_ref()).map(|d| d.next);
        let is_hold = |next: &Next| matches!(next, Next::Hold(_));
        let culprit = self.culprit_death().map(|death| death.next).filter(is_hold);
        let latest = |one, other| match (one, other) {
            (Next::Restart(one), Next::Restart(other)) => Next::Restart(one.max(other)),
            (hold, Next::Restart(_)) | (_, hold) => hold,
        };
        culprit.or_else(|| nexts().find(is_hold)).or_else(|| nexts().reduce(latest))
    }

    /// How the worker ended for which this generation ended.
    pub(super) fn culprit_death(&self) -> Option<&Death> {
        self.workers.get(self.culprit?)?.death.as_ref()
    }
}
