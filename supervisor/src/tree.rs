//! The process tree as a pure state machine: events and the time go in, actions come out; no
//! processes, no descriptors, no clock. [`crate::events`] is the driver.
//!
//! ```text
//! start:   spawn prepare and netd at once
//!          prepare Surveyed ----------------> netd Model (once it listens) -> netd ProposedSpan
//!          cut among the devices -----------> prepare Span -> Prepared -> spawn workers
//!          worker Ready -> new rings -> Link -> Linked -> netd WorkerUp
//! death of a worker:  reap -> netd WorkerDown -> pause -> next generation, new rings, the same kv segment
//! ... of a group:     abort the group, kill the other ranks -> all reaped -> netd WorkerDown once, with the fault of the one that
//!                     died or was killed first -> pause -> next generation of all ranks, a new segment of the group
//! death of netd:      reap -> pause -> next generation, new arena; every worker is linked again, and only what a worker
//!                     acknowledged is told to the new netd
//! a device is lost for good:  netd is told the longest rest of the span (Shrink) and goes on with it; nothing is left: the end
//! a device that fails too often is put aside and tried again, see `quarantine`; or another takes its blocks over, see `fallback`
//! ... of a group:  the devices that are left serve its blocks, see `remainder`
//! nonsense in the rings of a worker (netd BrokenRings):  it is killed, and is to blame
//! a move to other blocks:  see `span_move`
//! a pause:  see `pause`; another executable of the supervisor:  see `upgrade`
//! end:     netd drains, then the workers; who does not in time is killed
//! ```
//!
//! Invariants, held by the property test:
//! - a child has at most one live process, and generations only grow;
//! - netd hears of a worker's end only after the worker was reaped;
//! - a pair of generations (worker, netd) is linked at most once, so rings are never used twice;
//! - all ranks of a group have one generation, and none is started while another is left of the last;
//! - the tree finishes only when no process is left, but for unkillable ones.

mod action;
mod child;
mod deaths;
mod fallback;
mod group;
mod messages;
mod pause;
mod quarantine;
mod remainder;
mod serving;
mod shutdown;
mod span_move;
mod upgrade;

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shared::block::Span;
use shared::config::{Device, RestartConfig};
use shared::control::{FromNetd, FromPrepare, FromWorker, ToNetd};
use shared::exit::ExitReason;
use shared::ids::{Generation, GroupId, WorkerId};
use shared::model::{ModelFacts, RankShare};
use shared::survey::Capacity;

pub use action::{Action, Down, Init, Order, Policy, TreeEvent, Up};
pub use child::{Beat, ChildId, ExitStatus, Lifecycle};
use child::{Child, Next};
use group::{Worker, WorkerGroup};
use shutdown::{Ending, SHORT_DRAIN};
use span_move::Move;
use upgrade::Replacing;

use crate::placement::DeviceShare;
use crate::report::{Held, Pause, Readiness};

/// What netd said in its present generation.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct NetdSaid {
    peer_id: String,
    addrs: Vec<String>,
    has_model: bool,
}

/// The whole tree.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tree {
    policy: Policy,
    prepare: Child,
    netd: Child,
    said: NetdSaid,
    groups: Vec<WorkerGroup>,
    /// Devices of the largest group at the start.
    most_ranks: usize,
    facts: Option<ModelFacts>,
    /// Most blocks that memory holds.
    fits: u32,
    /// What workers measured at an earlier start.
    kept: Option<Capacity>,
    span: Option<Span>,
    prepared: bool,
    was_online: bool,
    /// The span that the present netd serves or was told to.
    netd_span: Option<Span>,
    moving: Option<Move>,
    pause: Pause,
    /// Processes of the executable before that are still to be replaced.
    replacing: Option<Replacing>,
    /// Whether the present netd was told of a pause.
    netd_is_paused: bool,
    /// The group for which prepare runs: its devices share blocks anew.
    asked: Option<GroupId>,
    /// Where it was before the present place, until that is online; when both had no room beside
    /// each other.
    came_from: Option<Span>,
    /// Spans that were announced in this run and are not served any more.
    retired: Vec<Span>,
    /// Of groups that are not in the tree any more: names are used again, generations never.
    last_generations: Vec<(GroupId, Generation)>,
    ending: Option<Ending>,
    finished: bool,
}

impl Tree {
    /// A tree in which nothing was started.
    pub fn new(policy: Policy) -> Tree {
        let sizes = policy.shares.iter().map(|share| share.devices.len());
        Tree {
            most_ranks: sizes.max().unwrap_or(1),
            policy,
            prepare: Child::new(ChildId::Prepare),
            netd: Child::new(ChildId::Netd),
            said: NetdSaid::default(),
            groups: Vec::new(),
            facts: None,
            fits: 0,
            kept: None,
            span: None,
            prepared: false,
            was_online: false,
            netd_span: None,
            moving: None,
            pause: Pause::No,
            replacing: None,
            netd_is_paused: false,
            asked: None,
            came_from: None,
            retired: Vec::new(),
            last_generations: Vec::new(),
            ending: None,
            finished: false,
        }
    }

    /// Workers that there are or will be; 0 before the span is known.
    pub fn worker_count(&self) -> usize {
        self.groups.iter().map(|group| group.workers.len()).sum()
    }

    /// What the ranks of each group hold of a block, once prepare has told; nothing for a group that
    /// is a single worker.
    pub fn ranks(&self) -> &[Vec<RankShare>] {
        &self.policy.memory.ranks
    }

    /// Devices of the largest group at the start, of which no later one has more.
    pub fn most_ranks(&self) -> usize {
        self.most_ranks
    }

    /// The groups of devices that serve.
    pub fn shares(&self) -> &[DeviceShare] {
        &self.policy.shares
    }

    /// The device of a worker, and the blocks of the instance that it was started for.
    pub fn placed(&self, id: WorkerId) -> Option<(Device, Span)> {
        let group = self.group(id.group)?;
        Some((*group.placement.devices.get(usize::from(id.rank.0))?, group.whole))
    }

    /// The spans that workers were, are or will be started for, before and while each is cut among
    /// devices.
    pub fn served_spans(&self) -> Vec<Span> {
        self.groups.iter().map(|group| group.whole).collect()
    }

    /// The device of a worker that there is, and its part of every block.
    pub fn has(&self, id: WorkerId) -> Option<Held> {
        let group =
            self.group(id.group).filter(|group| group.workers.iter().any(|w| w.id == id))?;
        let (rank, share) = (usize::from(id.rank.0), group.placement.share);
        let is_told =
            |ranks: &&Vec<RankShare>| !group.awaits_shares && ranks.len() == group.workers.len();
        let ranks = self.ranks().get(share).filter(is_told);
        let device = *group.placement.devices.get(rank)?;
        Some(Held { device, share: ranks.and_then(|ranks| ranks.get(rank).copied()) })
    }

    /// Other limits hold from now on.
    pub fn set_limits(&mut self, restart: RestartConfig, drain_timeout: Duration) {
        (self.policy.restart, self.policy.drain_timeout) = (restart, drain_timeout);
    }

    /// Takes in one event and says what to do now.
    pub fn on(&mut self, event: TreeEvent, now: Instant) -> Vec<Action> {
        let mut out = Vec::new();
        if self.finished {
            return out;
        }
        match event {
            TreeEvent::Start => {
                self.spawn(ChildId::Prepare, now, &mut out);
                self.spawn(ChildId::Netd, now, &mut out);
            }
            TreeEvent::Ordered(order) => self.ordered(order, now, &mut out),
            TreeEvent::Stop => self.stop(now, &mut out),
            TreeEvent::Tick => {}
            TreeEvent::Said(id, generation, up) if self.is(id, generation) => {
                self.said(id, up, now, &mut out)
            }
            TreeEvent::Ended(id, generation, end) if self.is(id, generation) => {
                self.ended(id, &end, now, &mut out)
            }
            TreeEvent::Closed(id, generation) if self.is(id, generation) => {
                if let Some(child) = self.child_mut(id) {
                    child.channel_closed(now);
                }
            }
            TreeEvent::Unruly(id, generation, what) if self.is(id, generation) => {
                self.kill(id, what.to_owned(), now, &mut out);
            }
            TreeEvent::Beat(id, generation, beat) if self.is(id, generation) => {
                self.beat(id, beat, now, &mut out)
            }
            TreeEvent::Examined(device, fault) => self.examined(device, fault, now, &mut out),
            TreeEvent::HandedOver(patience) => self.handed_over(patience),
            TreeEvent::Idle => self.idle(now, &mut out),
            TreeEvent::Room(span, why_not) => self.room(span, why_not, now, &mut out),
            _ => {}
        }
        self.check_times(now, &mut out);
        self.sweep(now, &mut out);
        self.ask_shares(now, &mut out);
        self.replace_next(now, &mut out);
        self.check_end(now, &mut out);
        out
    }

    /// When [`TreeEvent::Tick`] is due at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        let due = self.children().filter_map(|child| child.deadline(&self.policy.restart));
        let trials = [self.next_trial(), self.next_examination()].into_iter().flatten();
        due.chain(trials.map(|(at, _)| at)).chain(self.netd_due()).min()
    }

    /// Children with a live process, and its generation.
    pub fn live(&self) -> impl Iterator<Item = (ChildId, Generation)> {
        self.children().filter(|child| child.alive).map(|child| (child.id, child.generation))
    }

    /// Whether the run makes progress: nobody waits for a child to die, and some group or netd can
    /// serve. A child that only stands still is killed before, and one that cannot be killed is left
    /// out as long as others serve.
    pub fn goes_on(&self) -> bool {
        let dies = |child: &Child| child.alive && child.killed.is_some();
        let is_left = |child: &Child| child.state == Lifecycle::Unkillable;
        let groups = !self.groups.is_empty()
            && self.groups.iter().all(|group| group.children().any(is_left));
        !groups && !is_left(&self.netd) && !self.children().any(|c| dies(c) && !is_left(c))
    }

    /// Whether the run is about to end.
    pub fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    fn children(&self) -> impl Iterator<Item = &Child> {
        [&self.prepare, &self.netd]
            .into_iter()
            .chain(self.groups.iter().flat_map(WorkerGroup::children))
    }

    fn child_mut(&mut self, id: ChildId) -> Option<&mut Child> {
        match id {
            ChildId::Prepare => Some(&mut self.prepare),
            ChildId::Netd => Some(&mut self.netd),
            ChildId::Worker(worker) => self.worker_mut(worker).map(|worker| &mut worker.child),
        }
    }

    fn worker_mut(&mut self, id: WorkerId) -> Option<&mut Worker> {
        self.group_mut(id.group)?.workers.iter_mut().find(|worker| worker.id == id)
    }

    fn group(&self, id: GroupId) -> Option<&WorkerGroup> {
        self.groups.iter().find(|group| group.id() == id)
    }

    fn group_mut(&mut self, id: GroupId) -> Option<&mut WorkerGroup> {
        self.groups.iter_mut().find(|group| group.id() == id)
    }

    fn is(&self, id: ChildId, generation: Generation) -> bool {
        self.children().any(|child| child.id == id && child.is(generation))
    }

    /// Starts prepare or netd.
    fn spawn(&mut self, id: ChildId, now: Instant, out: &mut Vec<Action>) {
        let init = match id {
            ChildId::Prepare => Init::Prepare(self.groups_to_prepare()),
            ChildId::Netd => {
                let previous_addrs = std::mem::take(&mut self.said).addrs;
                self.said.addrs.clone_from(&previous_addrs);
                self.netd_span = self.present();
                self.netd_is_paused = self.pause != Pause::No;
                Init::Netd {
                    previous_addrs,
                    served: self.netd_span,
                    whole: self.span,
                    retired: self.retired.clone(),
                    paused: self.netd_is_paused,
                }
            }
            ChildId::Worker(worker) => return self.spawn_group(worker.group, now, out),
        };
        let Some(child) = self.child_mut(id) else {
            return;
        };
        start(child, init, now, out);
        match id {
            ChildId::Netd => self.link_all(out),
            ChildId::Prepare => self.order_span(out),
            ChildId::Worker(_) => {}
        }
    }

    /// Starts all workers of a group.
    fn spawn_group(&mut self, id: GroupId, now: Instant, out: &mut Vec<Action>) {
        let Some(facts) = self.facts.clone() else {
            return;
        };
        let Some(group) = self.group_mut(id) else {
            return;
        };
        (group.culprit, group.is_aborted) = (None, false);
        for worker in &mut group.workers {
            (worker.waits_for, worker.death) = (None, None);
            let init = Init::Worker {
                placement: group.placement.clone(),
                rank: worker.id.rank,
                whole: group.whole,
                facts: facts.clone(),
                by_warps: worker.by_warps,
            };
            start(&mut worker.child, init, now, out);
        }
    }
}

/// A new process of `child` begins.
fn start(child: &mut Child, init: Init, now: Instant, out: &mut Vec<Action>) {
    let (id, generation) = (child.id, child.start(now));
    let state = child.state;
    out.push(Action::Spawn(id, generation));
    out.push(Action::Show { child: id, generation, state, why: String::new() });
    out.push(Action::Tell(id, Down::Init(init)));
}

#[cfg(test)]
mod tests;
