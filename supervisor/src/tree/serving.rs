//! Who serves what: the model and the span on their way to netd, prepare and the workers, the rings
//! between each worker and the present netd, and what is left when a worker is lost for good.
//! Another part of [`Tree`].

use std::time::{Duration, Instant};

use shared::block::Span;
use shared::config::SpanChoice;
use shared::control::ToNetd;
use shared::exit::ExitReason;
use shared::ids::{Generation, GroupId, WorkerId};

use super::group::{Assignment, WorkerGroup};
use super::{Action, ChildId, Down, Policy, Tree};
use crate::placement::{self, Placement};

impl Tree {
    /// Tells netd the model once both are there, and then of every worker that had been linked
    /// before.
    pub(super) fn give_model(&mut self, out: &mut Vec<Action>) {
        let Some(facts) = &self.facts else { return };
        if !self.netd.is_ready() || self.said.has_model {
            return;
        }
        self.said.has_model = true;
        let is_part = self.policy.span == SpanChoice::All && self.fits < facts.num_blocks;
        let fits = is_part.then_some(self.fits);
        if let Some(blocks) = fits {
            let all = facts.num_blocks;
            out.push(Action::Note(format!("only {blocks} of {all} blocks fit in memory")));
        }
        let facts = facts.clone();
        out.push(Action::tell_netd(ToNetd::Model { facts, fits, kept: self.kept }));
        self.tell_pause(Duration::ZERO, out);
        let ids: Vec<_> = self.groups.iter().map(WorkerGroup::id).collect();
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
        let new = |placement| WorkerGroup::new(placement, span, Assignment::Serving, Generation(0));
        self.groups = self.placements(span).into_iter().map(new).collect();
        if self.groups.len() < self.policy.shares.len() {
            let (blocks, shares) = (span.block_count(), self.policy.shares.len());
            let what = match self.groups.iter().any(WorkerGroup::has_several) {
                true => "groups of devices",
                false => "devices",
            };
            out.push(Action::Complain(format!(
                "{shares} {what} share {blocks} blocks: the last {what} stay unused"
            )));
        }
        self.order_span(out);
    }

    /// How the blocks of `span` are cut among the groups of devices.
    pub(crate) fn placements(&self, span: Span) -> Vec<Placement> {
        let Policy { shares, memory, cuts, .. } = &self.policy;
        memory.placements(span, self.facts.as_ref(), shares, cuts)
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

    /// Gives every ready group rings to the present netd, unless it has them: its rank 0, after the
    /// other ranks acknowledged the arena. A new netd gets new rings at its start: they need no more
    /// of it than its generation.
    pub(super) fn link_all(&mut self, out: &mut Vec<Action>) {
        if !self.netd.is_reachable() || self.ending.is_some() {
            return;
        }
        let netd = self.netd.generation;
        for group in self.groups.iter_mut().filter(|group| group.is_ready()) {
            let Some((leader, others)) = group.workers.split_first_mut() else {
                continue;
            };
            let others_linked = others.iter().all(|worker| worker.linked == Some(netd));
            let due = match others_linked {
                true => std::slice::from_mut(leader),
                false => others,
            };
            for worker in due.iter_mut().filter(|worker| worker.linking != Some(netd)) {
                worker.linking = Some(netd);
                out.push(Action::Tell(worker.child.id, Down::Link { netd }));
            }
        }
    }

    /// A worker acknowledged its rings or its arena.
    pub(super) fn linked(&mut self, id: WorkerId, netd: Generation, out: &mut Vec<Action>) {
        let Some(worker) = self.worker_mut(id) else {
            return;
        };
        if worker.linking == Some(netd) && worker.linked != Some(netd) {
            worker.linked = Some(netd);
            self.link_all(out);
            self.tell_up(id.group, out);
        }
    }

    pub(super) fn tell_up(&mut self, id: GroupId, out: &mut Vec<Action>) {
        let knows_model = self.netd.is_ready() && self.said.has_model;
        let netd = Some(self.netd.generation);
        let Some(group) = self.group_mut(id) else {
            return;
        };
        let linked = group.workers.iter().all(|worker| worker.linked == netd);
        if !(knows_model && linked && group.told != netd && group.is_ready()) {
            return;
        }
        group.told = netd;
        let (placement, generation) = (group.placement.clone(), group.generation());
        if let Some(capacity) = group.leader().map(|leader| leader.capacity) {
            let up = Down::WorkerUp { placement, generation, capacity };
            out.push(Action::Tell(ChildId::Netd, up));
            self.passed_trial(id, out);
        }
    }

    /// netd was reaped: nobody uses its rings any more.
    pub(super) fn unlink_all(&mut self, out: &mut Vec<Action>) {
        self.said.has_model = false;
        for group in &mut self.groups {
            group.drop_rings(out);
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
        if self.group(id.group).is_none_or(|group| group.told != netd) {
            return;
        }
        let Some(worker) = self.worker_mut(id) else {
            return;
        };
        let child = &mut worker.child;
        if child.is(generation) && child.killed.is_none() {
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
            out.push(Action::tell_netd(ToNetd::Shrink(rest)));
        }
    }

    /// The blocks that this instance can serve: the longest part of the plan without lost devices.
    pub(super) fn rest(&self) -> Option<Span> {
        let served = self.groups.iter().filter(|group| group.is_served());
        placement::longest_rest(served.map(|group| group.placement.span))
    }
}

impl WorkerGroup {
    /// Its rings, and the arena of the other ranks, are of no more use.
    pub(super) fn drop_rings(&mut self, out: &mut Vec<Action>) {
        for worker in &mut self.workers {
            let netd = worker.linking.take();
            worker.linked = None;
            if let (Some(netd), 0) = (netd, worker.id.rank.0) {
                let (worker, generation) = (worker.id, worker.child.generation);
                out.push(Action::DropRings { worker, generation, netd });
            }
        }
        self.told = None;
    }
}
