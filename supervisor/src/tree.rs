//! The process tree as a pure state machine: events and the time go in, actions come out; no
//! processes, no descriptors, no clock. [`crate::events`] is the driver.
//!
//! ```text
//! start:   spawn prepare and netd at once
//!          prepare Inspected ---------------> netd Model (once it listens) -> netd ProposedSpan
//!          cut among the devices -----------> prepare Span -> Prepared -> spawn workers
//!          worker Ready -> new rings -> Link -> Linked -> netd WorkerUp
//! death of a worker:  reap -> netd WorkerDown -> pause -> next generation, new rings, the same kv segment
//! death of netd:      reap -> pause -> next generation, new arena; every worker is linked again, and only what a worker
//!                     acknowledged is told to the new netd
//! a device is lost for good:  netd is told the longest rest of the span (Shrink) and goes on with it; nothing is left: the end
//! nonsense in the rings of a worker (netd BrokenRings):  it is killed, and is to blame
//! a move to other blocks:  see `moving`
//! end:     netd drains, then the workers; who does not in time is killed
//! ```
//!
//! Invariants, held by the property test:
//! - a child has at most one live process, and generations only grow;
//! - netd hears of a worker's end only after the worker was reaped;
//! - a pair of generations (worker, netd) is linked at most once, so rings are never used twice;
//! - the tree finishes only when no process is left, but for unkillable ones.

mod action;
mod child;
mod ending;
mod moving;
mod said;
mod serving;

use std::time::Instant;

use shared::block::Span;
use shared::config::SpanChoice;
use shared::control::{Capacity, FromNetd, FromPrepare, FromWorker};
use shared::exit::ExitReason;
use shared::ids::{Generation, WorkerId};
use shared::model::ModelFacts;

use crate::plan::Placement;

pub use action::{Action, Down, Event, Init, Policy, Up};
pub use child::{Beat, ChildId, ExitStatus, Lifecycle};
use child::{Child, Next};
use ending::{Ending, SHORT_DRAIN};
use moving::{Assignment, Move};

/// A worker and how far its link to netd is.
#[derive(Debug)]
struct Worker {
    child: Child,
    placement: Placement,
    /// The blocks of the instance that its own are a part of.
    whole: Span,
    assignment: Assignment,
    capacity: Capacity,
    /// Whether a process of its own failed on its device or hung: warpgroups may be to blame where
    /// no sample showed it, so the next ones do without.
    by_warps: bool,
    /// Generation of netd whose rings it was given.
    linking: Option<Generation>,
    /// Generation of netd whose rings it acknowledged.
    linked: Option<Generation>,
    /// Generation of netd that was told of it.
    told: Option<Generation>,
}

/// What netd said in its present generation.
#[derive(Debug, Default)]
struct NetdSaid {
    peer_id: String,
    addrs: Vec<String>,
    has_model: bool,
}

/// The whole tree.
#[derive(Debug)]
pub struct Tree {
    policy: Policy,
    prepare: Child,
    netd: Child,
    said: NetdSaid,
    workers: Vec<Worker>,
    facts: Option<ModelFacts>,
    /// Most blocks that memory holds.
    fits: u32,
    span: Option<Span>,
    prepared: bool,
    was_online: bool,
    /// The span that the present netd serves or was told to.
    netd_span: Option<Span>,
    moving: Option<Move>,
    /// Where it was before the present place, until that is online; when both had no room beside
    /// each other.
    came_from: Option<Span>,
    /// Spans that were announced in this run and are not served any more.
    retired: Vec<Span>,
    /// Of workers that are not in the tree any more: names are used again, generations never.
    last_generations: Vec<(WorkerId, Generation)>,
    ending: Option<Ending>,
    finished: bool,
}

impl Tree {
    /// A tree in which nothing was started.
    pub fn new(policy: Policy) -> Tree {
        Tree {
            policy,
            prepare: Child::new(ChildId::Prepare),
            netd: Child::new(ChildId::Netd),
            said: NetdSaid::default(),
            workers: Vec::new(),
            facts: None,
            fits: 0,
            span: None,
            prepared: false,
            was_online: false,
            netd_span: None,
            moving: None,
            came_from: None,
            retired: Vec::new(),
            last_generations: Vec::new(),
            ending: None,
            finished: false,
        }
    }

    /// Workers that there are or will be; 0 before the span is known.
    pub fn worker_count(&self) -> usize {
        self.workers.len()
    }

    /// Takes in one event and says what to do now.
    pub fn on(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut out = Vec::new();
        if self.finished {
            return out;
        }
        match event {
            Event::Start => {
                self.spawn(ChildId::Prepare, now, &mut out);
                self.spawn(ChildId::Netd, now, &mut out);
            }
            Event::Stop => self.stop(now, &mut out),
            Event::Tick => {}
            Event::Said(id, generation, up) if self.is(id, generation) => {
                self.said(id, up, now, &mut out)
            }
            Event::Ended(id, generation, end) if self.is(id, generation) => {
                self.ended(id, &end, now, &mut out)
            }
            Event::Closed(id, generation) if self.is(id, generation) => {
                if let Some(child) = self.child_mut(id) {
                    child.channel_closed(now);
                }
            }
            Event::Unruly(id, generation, what) if self.is(id, generation) => {
                self.kill(id, what.to_owned(), now, &mut out);
            }
            Event::Beat(id, generation, beat) if self.is(id, generation) => {
                self.beat(id, beat, now, &mut out)
            }
            Event::Room(span, why_not) => self.room(span, why_not, now, &mut out),
            _ => {}
        }
        self.check_times(now, &mut out);
        self.sweep(now, &mut out);
        self.check_end(now, &mut out);
        out
    }

    /// When [`Event::Tick`] is due at the latest.
    pub fn deadline(&self) -> Option<Instant> {
        self.children().filter_map(|child| child.deadline(&self.policy.restart)).min()
    }

    /// Children with a live process, and its generation.
    pub fn live(&self) -> impl Iterator<Item = (ChildId, Generation)> {
        self.children().filter(|child| child.alive).map(|child| (child.id, child.generation))
    }

    fn children(&self) -> impl Iterator<Item = &Child> {
        [&self.prepare, &self.netd]
            .into_iter()
            .chain(self.workers.iter().map(|worker| &worker.child))
    }

    fn child_mut(&mut self, id: ChildId) -> Option<&mut Child> {
        match id {
            ChildId::Prepare => Some(&mut self.prepare),
            ChildId::Netd => Some(&mut self.netd),
            ChildId::Worker(worker) => self.worker_mut(worker).map(|worker| &mut worker.child),
        }
    }

    fn worker_mut(&mut self, id: WorkerId) -> Option<&mut Worker> {
        self.workers.iter_mut().find(|worker| worker.placement.worker == id)
    }

    fn is(&self, id: ChildId, generation: Generation) -> bool {
        self.children().any(|child| child.id == id && child.is(generation))
    }

    fn spawn(&mut self, id: ChildId, now: Instant, out: &mut Vec<Action>) {
        let init = match id {
            ChildId::Prepare => Init::Prepare,
            ChildId::Netd => {
                let previous_addrs = std::mem::take(&mut self.said).addrs;
                self.said.addrs.clone_from(&previous_addrs);
                self.netd_span = self.present();
                Init::Netd { previous_addrs, served: self.netd_span, retired: self.retired.clone() }
            }
            ChildId::Worker(worker) => {
                let Some(facts) = self.facts.clone() else {
                    return;
                };
                let Some(worker) = self.worker_mut(worker) else {
                    return;
                };
                Init::Worker {
                    placement: worker.placement,
                    whole: worker.whole,
                    facts,
                    by_warps: worker.by_warps,
                }
            }
        };
        let Some(child) = self.child_mut(id) else {
            return;
        };
        let generation = child.start(now);
        let state = child.state;
        out.push(Action::Spawn(id, generation));
        out.push(Action::Show { child: id, generation, state, why: String::new() });
        out.push(Action::Tell(id, Down::Init(init)));
        match id {
            ChildId::Netd => self.link_all(out),
            ChildId::Prepare => self.order_span(out),
            ChildId::Worker(_) => {}
        }
    }

    fn ended(&mut self, id: ChildId, end: &ExitStatus, now: Instant, out: &mut Vec<Action>) {
        let restart = self.policy.restart;
        let ending = self.ending.is_some();
        let done = match id {
            ChildId::Prepare => self.prepared && !self.prepares_move(),
            ChildId::Netd => false,
            ChildId::Worker(id) => {
                self.worker_mut(id).is_some_and(|w| w.assignment == Assignment::Dropped)
            }
        };
        let Some(child) = self.child_mut(id) else {
            return;
        };
        let cause = child.cause(end);
        let was_unkillable = child.state == Lifecycle::Unkillable;
        let next = child.reaped(end, now, &restart);
        child.state = match next {
            _ if ending || done => Lifecycle::Gone,
            _ if was_unkillable => Lifecycle::Held { reason: ExitReason::DeviceLost },
            Next::Restart(until) => Lifecycle::Backoff { until },
            Next::Hold(reason) => Lifecycle::Held { reason },
        };
        let (generation, state) = (child.generation, child.state);
        let said = child.complaint.clone().or_else(|| match end {
            ExitStatus::NotStarted { message, .. } => Some(message.clone()),
            ExitStatus::Code(_) | ExitStatus::Signal(_) => None,
        });
        // What a held child said is part of the complaint that follows, once.
        let why = match &said {
            Some(said) if matches!(state, Lifecycle::Backoff { .. }) => format!("{end}: {said}"),
            _ => end.to_string(),
        };
        let complaint = match said {
            Some(said) => format!("{id}: {said}"),
            None => format!("{id} is not restarted: {end}"),
        };
        out.push(Action::Show { child: id, generation, state, why });
        match id {
            ChildId::Prepare => {}
            ChildId::Netd => {
                self.netd_lost(now, out);
                self.unlink_all(out);
            }
            ChildId::Worker(worker) => {
                if end.reason() == ExitReason::DeviceLost {
                    self.suspect(id);
                }
                self.worker_down(worker, cause, out);
            }
        }
        if let Lifecycle::Held { reason } = state {
            self.held(id, reason, complaint, now, out);
        }
    }

    /// A child will not be started again: without netd or prepare, or without any worker, nothing
    /// is served; a mistake in the configuration that shows before the first announcement is
    /// reported by ending.
    fn held(
        &mut self,
        id: ChildId,
        reason: ExitReason,
        complaint: String,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        if self.fails_move(id) {
            self.give_up_move(&complaint, true, now, out);
            return self.check_rest(reason, now, out);
        }
        if matches!(id, ChildId::Worker(_)) && self.goes_back(&complaint, now, out) {
            return;
        }
        let needed = !matches!(id, ChildId::Worker(_));
        let early = !self.was_online
            && reason != ExitReason::RestartLimit
            && reason != ExitReason::DeviceLost;
        if needed || early || (self.rest().is_none() && self.moving.is_none()) {
            self.end(reason, Some(complaint), now, out);
        } else {
            out.push(Action::Complain(complaint));
            self.shrink_netd(out);
        }
    }

    fn beat(&mut self, id: ChildId, beat: Beat, now: Instant, out: &mut Vec<Action>) {
        let pace = self.policy.pace;
        // A drain has a deadline of its own.
        let judged = self.child_mut(id).filter(|child| {
            matches!(child.state, Lifecycle::Starting { .. } | Lifecycle::Ready { .. })
        });
        let stood = judged.and_then(|child| child.beat(beat, now, pace));
        if let Some(stood) = stood {
            self.suspect(id);
            self.kill(id, format!("hangs: no progress for {} ms", stood.as_millis()), now, out);
        }
    }

    /// The next processes of this worker do without warpgroups.
    fn suspect(&mut self, id: ChildId) {
        if let ChildId::Worker(id) = id
            && let Some(worker) = self.worker_mut(id)
        {
            worker.by_warps = true;
        }
    }

    fn kill(&mut self, id: ChildId, why: String, now: Instant, out: &mut Vec<Action>) {
        let Some(child) = self.child_mut(id) else {
            return;
        };
        if child.alive && child.killed.is_none() {
            child.killed = Some(now);
            out.push(Action::Kill(id, child.generation, why));
        }
    }

    fn check_times(&mut self, now: Instant, out: &mut Vec<Action>) {
        let restart = self.policy.restart;
        let ids: Vec<_> = self.children().map(|child| child.id).collect();
        for id in ids {
            let Some(child) = self.child_mut(id) else {
                continue;
            };
            if let Some(why) = child.overdue(now, &restart) {
                if let (Some(ending), ChildId::Netd) = (&mut self.ending, id) {
                    ending.forced = true;
                }
                self.suspect(id);
                self.kill(id, why, now, out);
                continue;
            }
            match (child.state, child.killed) {
                (Lifecycle::Backoff { until }, _) if now >= until => self.spawn(id, now, out),
                (Lifecycle::Unkillable, _) => {}
                (_, Some(killed)) if child.alive && now >= killed + child::KILL_PATIENCE => {
                    self.unkillable(id, now, out);
                }
                _ => {}
            }
        }
    }

    /// The process stays in the kernel, for example in a driver. What it may still write stays out
    /// of use.
    fn unkillable(&mut self, id: ChildId, now: Instant, out: &mut Vec<Action>) {
        let Some(child) = self.child_mut(id) else {
            return;
        };
        child.state = Lifecycle::Unkillable;
        let (generation, state) = (child.generation, child.state);
        let why = "SIGKILL had no effect";
        out.push(Action::Show { child: id, generation, state, why: why.to_owned() });
        if let ChildId::Worker(worker) = id
            && self.said.has_model
            && self.netd.is_ready()
        {
            out.push(Action::Tell(ChildId::Netd, Down::WorkerUnkillable { worker, generation }));
        }
        let complaint = format!("{id}: {why}; its memory stays reserved, and it is not restarted");
        self.held(id, ExitReason::DeviceLost, complaint, now, out);
    }
}

#[cfg(test)]
mod tests;
