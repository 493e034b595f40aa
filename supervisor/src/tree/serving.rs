//! Who serves what: the model and the span on their way to netd, prepare and the workers, the rings
//! between each worker and the present netd, and what is left when a worker is lost for good.
//! Another part of [`Tree`].

use std::time::Instant;

use shared::block::Span;
use shared::config::{Device, SpanChoice};
use shared::control::DeathCause;
use shared::exit::ExitReason;
use shared::ids::{Generation, WorkerId};

use super::moving::Assignment;
use super::{Action, ChildId, Down, Lifecycle, Policy, Tree, Worker};
use crate::plan::{self, Placement};

impl Tree {
    /// Tells netd the model once both are there, and then of every worker that had been linked
    /// before.
    pub(super) fn give_model(&mut self, out: &mut Vec<Action>) {
        let Some(facts) = &self.facts else { return };
        if !self.netd.is_ready() || self.said.has_model {
            return;
        }
        self.said.has_model = true;
        if self.policy.span == SpanChoice::All && self.fits < facts.num_blocks {
            out.push(Action::Tell(ChildId::Netd, Down::Fits(self.fits)));
        }
        out.push(Action::Tell(ChildId::Netd, Down::Model(facts.clone())));
        let ids: Vec<_> = self.workers.iter().map(|worker| worker.placement.worker).collect();
        ids.into_iter().for_each(|id| self.tell_up(id, out));
        self.shrink_netd(out);
    }

    /// The first proposal is cut among the devices; the blocks of a worker are for life, so later
    /// ones change nothing.
    pub(super) fn take_span(&mut self, span: Span, now: Instant, out: &mut Vec<Action>) {
        let Some(facts) = &self.facts else { return };
        if span.end().0 > facts.num_blocks {
            let complaint =
                format!("netd proposed blocks {span} of a model with {} blocks", facts.num_blocks);
            return self.end(ExitReason::BadConfig, Some(complaint), now, out);
        }
        if self.span.is_some() || self.ending.is_some() {
            return;
        }
        (self.span, self.netd_span) = (Some(span), Some(span));
        self.workers = self
            .placements(span)
            .into_iter()
            .map(|placement| Worker::new(placement, span, Assignment::Serving))
            .collect();
        if self.workers.len() < self.policy.shares.len() {
            let (blocks, devices) = (span.block_count(), self.policy.shares.len());
            out.push(Action::Complain(format!(
                "{devices} devices share {blocks} blocks: the last devices stay unused"
            )));
        }
        self.order_span(out);
    }

    /// How the blocks of `span` are cut among the devices.
    pub(crate) fn placements(&self, span: Span) -> Vec<Placement> {
        let Policy { shares, memory, cuts, .. } = &self.policy;
        let devices: Vec<Device> = shares.iter().map(|share| share.device).collect();
        let most = self.facts.as_ref().map(|facts| memory.most_per_device(facts, &devices));
        plan::cut(span, shares, &most.unwrap_or_default(), cuts)
    }

    pub(super) fn order_span(&self, out: &mut Vec<Action>) {
        let wanted = match &self.moving {
            Some(moving) if self.prepares_move() => Some(moving.to),
            _ => self.span.filter(|_| !self.prepared),
        };
        if let (Some(span), true) = (wanted, self.prepare.is_reachable()) {
            out.push(Action::Tell(ChildId::Prepare, Down::Span(span)));
        }
    }

    /// Gives every ready worker rings to the present netd, unless it has them. A new netd gets new
    /// rings at its start: they need no more of it than its generation.
    pub(super) fn link_all(&mut self, out: &mut Vec<Action>) {
        if !self.netd.is_reachable() || self.ending.is_some() {
            return;
        }
        let netd = self.netd.generation;
        for worker in &mut self.workers {
            if worker.child.is_ready() && worker.linking != Some(netd) {
                worker.linking = Some(netd);
                out.push(Action::Tell(worker.child.id, Down::Link { netd }));
            }
        }
    }

    pub(super) fn tell_up(&mut self, id: WorkerId, out: &mut Vec<Action>) {
        let knows_model = self.netd.is_ready() && self.said.has_model;
        let netd = Some(self.netd.generation);
        let Some(worker) = self.worker_mut(id) else {
            return;
        };
        if knows_model && worker.linked == netd && worker.told != netd && worker.child.is_ready() {
            worker.told = netd;
            let (placement, generation, capacity) =
                (worker.placement, worker.child.generation, worker.capacity);
            out.push(Action::Tell(
                ChildId::Netd,
                Down::WorkerUp { placement, generation, capacity },
            ));
        }
    }

    /// netd was reaped: nobody uses its rings any more.
    pub(super) fn unlink_all(&mut self, out: &mut Vec<Action>) {
        self.said.has_model = false;
        for worker in &mut self.workers {
            drop_rings(worker, out);
        }
    }

    pub(super) fn worker_down(&mut self, id: WorkerId, cause: DeathCause, out: &mut Vec<Action>) {
        let tell = self.netd.alive && self.said.has_model && self.netd.killed.is_none();
        let netd = self.netd.generation;
        let Some(worker) = self.worker_mut(id) else {
            return;
        };
        let restarting = matches!(worker.child.state, Lifecycle::Backoff { .. });
        let generation = worker.child.generation;
        // netd must hear of the end of what it knows, and that nobody comes in place of what it may
        // wait for.
        let known = worker.told == Some(netd);
        drop_rings(worker, out);
        if tell && (known || !restarting) {
            out.push(Action::Tell(
                ChildId::Netd,
                Down::WorkerDown { worker: id, generation, cause, restarting },
            ));
        }
    }

    /// Only the rings that a worker shares with the present netd say anything about it.
    pub(super) fn broken_rings(
        &mut self,
        id: WorkerId,
        generation: Generation,
        message: String,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        let netd = Some(self.netd.generation);
        let Some(worker) = self.worker_mut(id) else {
            return;
        };
        let child = &mut worker.child;
        if worker.told == netd && child.is(generation) && child.killed.is_none() {
            child.guilty = true;
            self.kill(ChildId::Worker(id), message, now, out);
        }
    }

    /// Tells netd what is left of the span, unless it knows. A netd that starts later is told at
    /// its start.
    pub(super) fn shrink_netd(&mut self, out: &mut Vec<Action>) {
        let rest = self.rest().filter(|rest| self.netd_span != Some(*rest));
        if let (Some(rest), true, true) = (rest, self.said.has_model, self.netd.is_ready()) {
            self.netd_span = Some(rest);
            out.push(Action::Tell(ChildId::Netd, Down::Shrink(rest)));
        }
    }

    /// The blocks that this instance can serve: the longest part of the plan without lost devices.
    pub(super) fn rest(&self) -> Option<Span> {
        let serves = |worker: &&Worker| {
            worker.assignment == Assignment::Serving
                && !matches!(worker.child.state, Lifecycle::Held { .. } | Lifecycle::Unkillable)
        };
        plan::longest_rest(self.workers.iter().filter(serves).map(|worker| worker.placement.span))
    }
}

fn drop_rings(worker: &mut Worker, out: &mut Vec<Action>) {
    if let Some(netd) = worker.linking.take() {
        let (worker, generation) = (worker.placement.worker, worker.child.generation);
        out.push(Action::DropRings { worker, generation, netd });
    }
    (worker.linked, worker.told) = (None, None);
}
