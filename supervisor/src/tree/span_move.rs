//! A move of the whole instance to other blocks, which netd asks for. The workers of the new blocks
//! start beside the present ones; nothing that serves is touched before netd has announced the new
//! place. Another part of [`Tree`].
//!
//! ```text
//! netd Move(to) -> prepare Span(to) -> Prepared -> room for both? -> workers of `to` start (Coming), are linked, netd WorkerUp
//!     netd Moved(to):    Coming -> Serving, Serving -> Leaving: sessions that are open go on there
//!     netd Vacated:      Leaving -> drained, reaped, their segments dropped
//!   no room: netd MakeRoom(to), announces and ends its sessions, Vacated -> the old workers end -> those of `to` start. If they fail
//!            for good, those of the old blocks are started again
//!     anything fails:    Coming -> dropped, netd MoveFailed(to); the present workers never noticed
//! netd dies:   before Moved the move is given up; after it the connections are gone, and the old workers with them. The next
//!              netd is told what was announced and is not served any more (`NetdInit::retired`)
//! ```

use std::time::Instant;

use serde::{Deserialize, Serialize};
use shared::block::Span;
use shared::control::{DeathCause, ToNetd};
use shared::exit::ExitReason;
use shared::ids::{Generation, GroupId};

use super::group::{Assignment, WorkerGroup};
use super::{Action, ChildId, Lifecycle, SHORT_DRAIN, Tree};
use crate::placement::Placement;
use crate::report::Pause;

/// Workers on the board: those that serve and their successors.
const MAX_WORKERS: u16 = 30;

/// Left spans that a new netd is told of; records of older ones have expired.
const MAX_RETIRED: usize = 8;

/// How far a move is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum MoveStep {
    /// prepare makes the blocks ready.
    Preparing,
    /// The driver looks whether there is memory for both.
    Asking,
    /// Workers load.
    Loading,
    /// There is no memory for both: netd ends its sessions.
    Emptying,
    /// The workers of the blocks before end; then those of the move start, and serve as they come.
    Ending,
}

/// A move under way.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Move {
    pub(super) to: Span,
    pub(super) step: MoveStep,
}

impl Tree {
    /// netd asks to move.
    pub(super) fn begin_move(&mut self, to: Span, now: Instant, out: &mut Vec<Action>) {
        let known = |facts: &shared::model::ModelFacts| to.end().0 <= facts.num_blocks;
        let busy = self.moving.is_some()
            || self.prepare.alive
            || !self.prepared
            || self.asked.is_some()
            || self.groups.iter().any(|group| group.assignment != Assignment::Serving);
        let refused = if self.ending.is_some() || !self.was_online {
            Some("the server is not online, or is stopping")
        } else if busy {
            Some("another move is in progress")
        } else if self.pause != Pause::No {
            Some("the instance is paused")
        } else if !self.facts.as_ref().is_some_and(known) {
            Some("the model has no such blocks")
        } else {
            None
        };
        if let Some(why) = refused {
            return self.refuse_move(to, why, out);
        }
        let step = MoveStep::Preparing;
        self.moving = Some(Move { to, step });
        self.spawn(ChildId::Prepare, now, out);
    }

    /// Whether prepare works for a move.
    pub(super) fn prepares_move(&self) -> bool {
        matches!(self.moving, Some(Move { step, .. }) if step == MoveStep::Preparing)
    }

    /// The blocks of the move are ready on disk.
    pub(super) fn move_prepared(&mut self, out: &mut Vec<Action>) {
        if let Some(moving) = &mut self.moving {
            moving.step = MoveStep::Asking;
            out.push(Action::AskRoom(moving.to));
        }
    }

    /// The driver's answer to [`Action::AskRoom`].
    pub(super) fn room(
        &mut self,
        span: Span,
        why_not: Option<String>,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        let asked = self.moving.is_some_and(|m| m.to == span && m.step == MoveStep::Asking);
        if !asked {
            return;
        }
        if let Some(why) = why_not {
            self.moving = Some(Move { to: span, step: MoveStep::Emptying });
            out.push(Action::Note(format!(
                "leaving the present blocks before loading blocks {span}: {why}"
            )));
            if self.netd.is_ready() && self.said.has_model {
                out.push(Action::tell_netd(ToNetd::MakeRoom(span)));
            }
            return;
        }
        if let Some(moving) = &mut self.moving {
            moving.step = MoveStep::Loading;
        }
        self.load(span, Assignment::Coming, now, out);
    }

    fn load(&mut self, span: Span, assignment: Assignment, now: Instant, out: &mut Vec<Action>) {
        let ids = self.add_groups(span, assignment);
        ids.into_iter().for_each(|id| self.spawn_group(id, now, out));
    }

    /// Groups for all of `span`, none of which was started.
    pub(super) fn add_groups(&mut self, span: Span, assignment: Assignment) -> Vec<GroupId> {
        let new = |(placement, group): (Placement, GroupId)| {
            let placement = Placement { group, ..placement };
            WorkerGroup::new(placement, span, assignment, self.last_generation(group))
        };
        let new: Vec<WorkerGroup> =
            self.placements(span).into_iter().zip(self.free_groups()).map(new).collect();
        let ids = new.iter().map(WorkerGroup::id).collect();
        self.groups.extend(new);
        ids
    }

    /// netd has announced the new place: the workers of the old one keep their sessions.
    pub(super) fn moved(&mut self, to: Span, out: &mut Vec<Action>) {
        let Some(_) = self.moving.take_if(|m| m.to == to && m.step == MoveStep::Loading) else {
            return;
        };
        for group in &mut self.groups {
            group.assignment = match group.assignment {
                Assignment::Coming => Assignment::Serving,
                Assignment::Serving => Assignment::Leaving,
                other => other,
            };
        }
        if let Some(from) = self.span.replace(to) {
            self.retire(from);
        }
        self.netd_span = Some(to);
        self.retired.retain(|span| *span != to);
        self.show_online(out);
    }

    /// The sessions of the blocks that were left are over.
    pub(super) fn vacated(&mut self, now: Instant, out: &mut Vec<Action>) {
        match self.moving {
            Some(Move { to, step: MoveStep::Emptying }) => {
                self.came_from = self.span.filter(|span| *span != to);
                self.replace_all(to, now, out);
            }
            _ => self.drop_workers(Assignment::Leaving, now, out),
        }
    }

    /// Ends all workers; those of `to` start when they are gone.
    pub(super) fn replace_all(&mut self, to: Span, now: Instant, out: &mut Vec<Action>) {
        if let Some(from) = self.span.replace(to) {
            self.retire(from);
        }
        self.retired.retain(|span| *span != to);
        self.netd_span = Some(to);
        self.moving = Some(Move { to, step: MoveStep::Ending });
        self.drop_workers(Assignment::Serving, now, out);
    }

    /// Whether the last worker of a place is lost to which this instance came by leaving another,
    /// that is therefore taken again.
    pub(super) fn goes_back(&mut self, why: &str, now: Instant, out: &mut Vec<Action>) -> bool {
        let lost = self.rest().is_none() && self.moving.is_none() && self.ending.is_none();
        let (Some(back), Some(to)) = (self.came_from.take_if(|_| lost), self.span) else {
            return false;
        };
        out.push(Action::Note(format!("returning to blocks {back}: {why}")));
        self.refuse_move(to, why, out);
        self.replace_all(back, now, out);
        true
    }

    /// The blocks that a netd that starts now is to serve.
    pub(super) fn present(&self) -> Option<Span> {
        let ending = self.moving.filter(|moving| moving.step == MoveStep::Ending);
        self.rest().or(ending.map(|moving| moving.to))
    }

    /// The move is off; what serves goes on. netd is told unless it knows.
    pub(super) fn give_up_move(
        &mut self,
        why: &str,
        tell: bool,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        let Some(Move { to, .. }) = self.moving.take() else {
            return;
        };
        self.retire(to);
        if tell {
            self.refuse_move(to, why, out);
        }
        out.push(Action::Note(format!("not moving to blocks {to}: {why}")));
        if self.prepare.alive {
            self.kill(ChildId::Prepare, "no longer needed".to_owned(), now, out);
        } else {
            self.prepare.state = Lifecycle::Gone;
        }
        self.drop_workers(Assignment::Coming, now, out);
    }

    /// Whether the move cannot go on without this child.
    pub(super) fn fails_move(&self, id: ChildId) -> bool {
        match id {
            ChildId::Prepare => self.prepares_move(),
            ChildId::Netd => false,
            ChildId::Worker(worker) => {
                self.group(worker.group).is_some_and(|group| group.assignment == Assignment::Coming)
            }
        }
    }

    /// Ends the run if nothing is served and nothing comes.
    pub(super) fn check_rest(&mut self, reason: ExitReason, now: Instant, out: &mut Vec<Action>) {
        if self.rest().is_none() && self.moving.is_none() {
            let complaint = "no worker is left: all failed for good".to_owned();
            self.end(reason, Some(complaint), now, out);
        }
    }

    /// netd is dead: a move that it did not finish is off, and sessions of the old blocks are gone
    /// with their connections.
    pub(super) fn netd_lost(&mut self, now: Instant, out: &mut Vec<Action>) {
        if let (Some(Move { to, step: MoveStep::Emptying }), Pause::Draining) =
            (self.moving, self.pause)
        {
            // The sessions ended with netd.
            self.replace_all(to, now, out);
        } else if self.moving.is_some_and(|moving| moving.step != MoveStep::Ending) {
            self.give_up_move("netd ended", false, now, out);
        }
        // The next netd is told one place, and knows no way back.
        self.came_from = None;
        self.drop_workers(Assignment::Leaving, now, out);
    }

    /// Takes out of the tree who was dropped and has ended, and starts who waits for that.
    pub(super) fn sweep(&mut self, now: Instant, out: &mut Vec<Action>) {
        let over =
            |group: &mut WorkerGroup| group.assignment == Assignment::Dropped && !group.is_alive();
        for group in self.groups.extract_if(.., over) {
            let (id, generation) = (group.id(), group.generation());
            self.last_generations.retain(|(other, _)| *other != id);
            self.last_generations.push((id, generation));
            out.extend(group.workers.iter().map(|worker| Action::DropWorker(worker.id)));
        }
        let over = self.groups.iter().all(WorkerGroup::is_stuck);
        if over && self.stays_paused(out) {
            return;
        }
        let waiting = |moving: &mut Move| moving.step == MoveStep::Ending && over;
        if let Some(Move { to, .. }) = self.moving.take_if(waiting) {
            self.load(to, Assignment::Serving, now, out);
        }
    }

    fn refuse_move(&self, to: Span, why: &str, out: &mut Vec<Action>) {
        if self.netd.is_ready() && self.said.has_model {
            out.push(Action::tell_netd(ToNetd::MoveFailed { to, why: why.to_owned() }));
        }
    }

    fn drop_workers(&mut self, assignment: Assignment, now: Instant, out: &mut Vec<Action>) {
        let mut ids = Vec::new();
        for group in self.groups.iter_mut().filter(|group| group.assignment == assignment) {
            group.assignment = Assignment::Dropped;
            ids.push((group.id(), group.children().map(|child| child.id).collect::<Vec<_>>()));
        }
        for (group, workers) in ids {
            let waits = self.group(group).is_some_and(WorkerGroup::is_restarting);
            workers.into_iter().for_each(|id| self.give_up(id, now, out));
            if waits {
                // netd waits for its next generation.
                self.group_down(group, DeathCause::Outside, out);
            }
            self.drain_group(group, now + SHORT_DRAIN.min(self.policy.drain_timeout), out);
        }
    }

    fn retire(&mut self, span: Span) {
        self.retired.retain(|other| *other != span);
        self.retired.push(span);
        let over = self.retired.len().saturating_sub(MAX_RETIRED);
        self.retired.drain(..over);
    }

    fn free_groups(&self) -> Vec<GroupId> {
        let used = |id: &GroupId| self.group(*id).is_some();
        let size = u16::try_from(self.most_ranks).unwrap_or(u16::MAX);
        (0..MAX_WORKERS / size.max(1)).map(GroupId).filter(|group| !used(group)).collect()
    }

    fn last_generation(&self, id: GroupId) -> Generation {
        let last = self.last_generations.iter().find(|(other, _)| *other == id);
        last.map_or(Generation(0), |(_, generation)| *generation)
    }
}
