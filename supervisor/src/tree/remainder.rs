//! A rank of a group is lost for good: the other devices of the group share its blocks anew. Another
//! part of [`Tree`].
//!
//! ```text
//! the group has ended as often as it may -> the rank for which it ended most often is left out
//!   one processor is left:   it serves alone, at once
//!   other devices are left:  prepare decides their shares, and what their units need:
//!                            Init of this group -> Surveyed -> Drain
//!   -> workers of as many of the blocks as fit -> linked, netd WorkerUp: announced again
//! ```
//! The group keeps its name and gets other workers: none of their KV pages is one of the workers before
//! them, so netd hears that those do not come back, and their sessions end. A move under way is given
//! up. One that has begun to leave the present blocks goes on: its workers find the device lost again.

use std::time::Instant;

use shared::block::Span;
use shared::config::Device;
use shared::exit::ExitReason;
use shared::ids::GroupId;
use shared::model::ModelFacts;

use super::group::{Assignment, Death, WorkerGroup};
use super::span_move::MoveStep;
use super::{Action, ChildId, Lifecycle, Next, SHORT_DRAIN, Tree};
use crate::placement::{self, Placement};

impl Tree {
    /// Whether a group that has ended so goes on with fewer devices.
    pub(super) fn leaves_remainder(&self, group: &WorkerGroup, next: Next) -> bool {
        next == Next::Hold(ExitReason::RestartLimit)
            && group.has_several()
            && group.assignment == Assignment::Serving
            && !self.leaves_present()
            && self.ending.is_none()
    }

    /// Whether a move has begun to leave the present blocks.
    pub(super) fn leaves_present(&self) -> bool {
        matches!(self.moving.map(|moving| moving.step), Some(MoveStep::Emptying | MoveStep::Ending))
    }

    /// Replaces a group whose processes are reaped by one without the device that is lost.
    pub(super) fn go_on_with_fewer(
        &mut self,
        id: GroupId,
        death: &Death,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        let Some(group) = self.group(id) else { return };
        let (lost, mut devices) = (group.most_to_blame(), group.placement.devices.clone());
        let device = devices.remove(lost);
        let Some(before) = self.succeed(id, devices, death, now, out) else { return };
        let have_memory = !self.policy.memory.devices.is_empty();
        let Some(next) = self.group_mut(id) else { return };
        next.awaits_shares = next.has_several() || have_memory;
        let of_left = before.workers.iter().enumerate().filter(|(rank, _)| *rank != lost);
        for (worker, (_, before)) in next.workers.iter_mut().zip(of_left) {
            worker.by_warps = before.by_warps;
        }
        let (placement, awaits) = (next.placement.clone(), next.awaits_shares);
        let text = complaint(id, lost, device, death, &placement);
        // A complaint before the first announcement is told at the end of the run alone.
        out.push(if self.was_online { Action::Complain(text) } else { Action::Note(text) });
        self.share_without(&placement, lost);
        if !awaits {
            self.start_remainder(id, now, out);
        }
    }

    /// Replaces a group whose processes are reaped by one on other devices, which is not started yet.
    /// Returns the one before.
    pub(super) fn succeed(
        &mut self,
        id: GroupId,
        devices: Vec<Device>,
        death: &Death,
        now: Instant,
        out: &mut Vec<Action>,
    ) -> Option<WorkerGroup> {
        if self.moving.is_some() {
            self.give_up_move("a device was lost", true, now, out);
        }
        let group = self.group_mut(id)?;
        let generation = group.generation();
        for worker in &mut group.workers {
            worker.child.state = Lifecycle::Gone;
            let (child, state) = (worker.child.id, worker.child.state);
            out.push(Action::Show { child, generation, state, why: death.end.clone() });
        }
        if group.has_several() {
            out.push(Action::DropGroup(id, generation));
        }
        self.group_down(id, death.cause, out);
        let group = self.groups.iter_mut().find(|group| group.id() == id)?;
        out.extend(group.workers.iter().map(|worker| Action::DropWorker(worker.id)));
        let placement = Placement { devices, ..group.placement.clone() };
        let next = WorkerGroup::new(placement, group.whole, Assignment::Serving, generation);
        Some(std::mem::replace(group, next))
    }

    /// The plan from now on: without rank `lost` of what is now `placement`.
    fn share_without(&mut self, placement: &Placement, lost: usize) {
        let before = self.policy.shares.iter().take(placement.share);
        let before: usize = before.map(|share| share.devices.len()).sum();
        let memory = &mut self.policy.memory;
        // Either all devices are there, in their order, or none.
        if memory.devices.len() as u64 == memory.workers && before + lost < memory.devices.len() {
            memory.devices.remove(before + lost);
        }
        memory.workers = memory.workers.saturating_sub(1);
        let mut kept = 1.0;
        if let Some(ranks) = memory.ranks.get_mut(placement.share) {
            let heads = |rank: &shared::model::RankShare| f64::from(rank.heads);
            let all: f64 = ranks.iter().map(heads).sum();
            kept = 1.0 - ranks.get(lost).map_or(0.0, heads) / all.max(1.0);
            // Until prepare has decided again these are the shares of no group, but so many.
            match placement.devices.len() {
                0 | 1 => ranks.clear(),
                _ if lost < ranks.len() => drop(ranks.remove(lost)),
                _ => {}
            }
        }
        if let Some(share) = self.policy.shares.get_mut(placement.share) {
            share.devices.clone_from(&placement.devices);
            share.rate *= kept;
        }
    }

    /// Asks prepare for the shares of the next group that waits for them.
    pub(super) fn ask_shares(&mut self, now: Instant, out: &mut Vec<Action>) {
        let is_free = self.prepare.state == Lifecycle::Gone && !self.prepare.alive;
        if self.ending.is_some() || self.moving.is_some() || self.asked.is_some() || !is_free {
            return;
        }
        self.asked = self.groups.iter().find(|group| group.awaits_shares).map(WorkerGroup::id);
        if self.asked.is_some() {
            self.spawn(ChildId::Prepare, now, out);
        }
    }

    /// The group for which prepare runs.
    pub(super) fn asked_for(&self) -> Option<&WorkerGroup> {
        self.asked.and_then(|id| self.group(id)).filter(|group| group.awaits_shares)
    }

    /// The groups of devices that prepare is told of.
    pub(super) fn groups_to_prepare(&self) -> Vec<Vec<Device>> {
        match self.asked_for() {
            Some(group) => vec![group.placement.devices.clone()],
            None => self.policy.shares.iter().map(|share| share.devices.clone()).collect(),
        }
    }

    /// prepare has told the shares of the group that it was asked for, and has nothing else to do.
    pub(super) fn shares_told(&mut self, id: GroupId, now: Instant, out: &mut Vec<Action>) {
        self.set_ready(ChildId::Prepare, now, String::new(), out);
        self.drain(ChildId::Prepare, now + SHORT_DRAIN.min(self.policy.drain_timeout), out);
        if let Some(group) = self.group_mut(id) {
            group.awaits_shares = false;
        }
        self.start_remainder(id, now, out);
    }

    /// Starts what is left of a group, for as many of its blocks as it holds.
    fn start_remainder(&mut self, id: GroupId, now: Instant, out: &mut Vec<Action>) {
        let Some((group, facts)) = self.group(id).zip(self.facts.as_ref()) else {
            return;
        };
        let devices = placement::names(&group.placement.devices);
        let Some(span) = self.part_that_fits(group, &group.placement.devices, facts) else {
            let blocks = group.placement.span;
            let why = format!("no block of {blocks} fits into the memory of {devices}");
            return self.drop_remainder(id, ExitReason::OutOfMemory, why, now, out);
        };
        if let Some(group) = self.group_mut(id) {
            group.placement.span = span;
        }
        self.shrink_netd(out);
        self.spawn_group(id, now, out);
    }

    /// The blocks of `group` that `devices` hold: those at one end, of which more stay served
    /// together with the other groups.
    pub(super) fn part_that_fits(
        &self,
        group: &WorkerGroup,
        devices: &[Device],
        facts: &ModelFacts,
    ) -> Option<Span> {
        let Placement { span, share, .. } = group.placement;
        let mut shares = self.policy.shares.clone();
        if let Some(share) = shares.get_mut(share) {
            share.devices = devices.to_vec();
        }
        let most = self.policy.memory.most_per_group(facts, &shares);
        let count = most.get(share).copied().unwrap_or(u32::MAX);
        let (start, end) = (span.start().0, span.end().0);
        let count = count.min(end - start);
        let others = || {
            let others = self.groups.iter().filter(|other| other.id() != group.id());
            others.filter(|other| other.is_served()).map(|other| other.placement.span)
        };
        let parts = [Span::new(end - count, end), Span::new(start, start + count)];
        let served = |part: &Span| {
            let rest = placement::longest_rest(others().chain([*part]));
            rest.map_or(0, |rest| rest.block_count())
        };
        parts.into_iter().filter_map(Result::ok).max_by_key(served)
    }

    /// prepare cannot say how the devices that are left share a block.
    pub(super) fn shares_refused(
        &mut self,
        reason: ExitReason,
        why: String,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        self.prepare.state = Lifecycle::Gone;
        if let Some(id) = self.asked.take() {
            self.drop_remainder(id, reason, why, now, out);
        }
    }

    /// The devices that are left of a group serve nothing.
    fn drop_remainder(
        &mut self,
        id: GroupId,
        reason: ExitReason,
        why: String,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        if let Some(group) = self.group_mut(id) {
            group.assignment = Assignment::Dropped;
            group.awaits_shares = false;
            group.workers.iter_mut().for_each(|worker| worker.child.state = Lifecycle::Gone);
        }
        if self.rest().is_none() {
            return self.end(reason, Some(why), now, out);
        }
        out.push(Action::Complain(why));
        self.shrink_netd(out);
    }
}

/// What the operator is told of a device that is lost.
fn complaint(id: GroupId, rank: usize, lost: Device, death: &Death, left: &Placement) -> String {
    let end = death.said.as_deref().unwrap_or(&death.end);
    let verb = if left.devices.len() == 1 { "serves" } else { "share" };
    format!(
        "rank {rank} of group {id} ({lost}) is not restarted: {end}; {} {verb} blocks {} from now on",
        placement::names(&left.devices),
        left.span
    )
}
