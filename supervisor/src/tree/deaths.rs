//! How children end: killed by us or by others, reaped, started again or held. Another part of
//! [`Tree`].

use std::time::Instant;

use shared::control::{DeathCause, ToNetd};
use shared::exit::ExitReason;
use shared::ids::{GroupId, WorkerId};

use super::group::{Assignment, Death, Worker, WorkerGroup};
use super::{Action, Beat, ChildId, Down, ExitStatus, Lifecycle, Next, Tree, child};

impl Tree {
    /// A process was reaped.
    pub(super) fn ended(
        &mut self,
        id: ChildId,
        end: &ExitStatus,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        if let ChildId::Worker(worker) = id {
            return self.worker_ended(worker, end, now, out);
        }
        let restart = self.policy.restart;
        let is_done = self.ending.is_some()
            || (id == ChildId::Prepare
                && self.prepared
                && !self.prepares_move()
                && self.asked_for().is_none());
        let Some(child) = self.child_mut(id) else {
            return;
        };
        let was_unkillable = child.state == Lifecycle::Unkillable;
        let next = child.reaped(end, now, &restart);
        child.state = after(next, is_done, was_unkillable);
        let said = child.complaint.clone().or_else(|| not_started(end));
        let (generation, state) = (child.generation, child.state);
        let why = why_of(&end.to_string(), said.as_deref(), state);
        out.push(Action::Show { child: id, generation, state, why });
        match id {
            ChildId::Netd => {
                self.netd_lost(now, out);
                self.unlink_all(out);
            }
            ChildId::Prepare if is_done => self.asked = None,
            ChildId::Prepare | ChildId::Worker(_) => {}
        }
        if let Lifecycle::Held { reason } = state {
            let complaint = complaint_of(id, &end.to_string(), said);
            self.held(id, reason, complaint, now, out);
        }
    }

    /// A worker was reaped. The other ranks of its group end too; when all are reaped the group has
    /// ended.
    fn worker_ended(
        &mut self,
        id: WorkerId,
        end: &ExitStatus,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        let restart = self.policy.restart;
        let rank = usize::from(id.rank.0);
        let Some(group) = self.group_mut(id.group) else {
            return;
        };
        let Some(worker) = group.workers.get_mut(rank) else {
            return;
        };
        let child = &mut worker.child;
        let (before, cause) = (child.state, child.cause(end));
        let death = Death {
            cause,
            next: child.reaped(end, now, &restart),
            end: end.to_string(),
            said: child.complaint.clone().or_else(|| not_started(end)),
            was_unkillable: before == Lifecycle::Unkillable,
            counts: child.counts(end),
        };
        let excused = !death.counts;
        worker.by_warps |= end.reason() == ExitReason::DeviceLost;
        let (child_id, generation) = (child.id, child.generation);
        let why = why_of(&death.end, death.said.as_deref(), Lifecycle::Reaped);
        worker.death = Some(death);
        let was_drained = rank == 0 && matches!(before, Lifecycle::Draining { .. });
        group.culprit.get_or_insert(rank);
        if !group.is_alive() {
            return self.group_ended(id.group, now, out);
        }
        group.workers[rank].child.state = Lifecycle::Reaped;
        let state = Lifecycle::Reaped;
        out.push(Action::Show { child: child_id, generation, state, why });
        if was_drained {
            // What rank 0 had accepted is computed: the others have nothing left to do.
            let others = group.children().filter(|child| child.alive && child.killed.is_none());
            out.extend(others.map(|child| Action::Tell(child.id, Down::Drain)));
        } else {
            end_group(group, &format!("rank {rank} of its group ended"), excused, now, out);
        }
    }

    /// All workers of a group are reaped.
    fn group_ended(&mut self, id: GroupId, now: Instant, out: &mut Vec<Action>) {
        let (is_ending, window) = (self.ending.is_some(), self.policy.restart.window);
        let Some(group) = self.group_mut(id) else {
            return;
        };
        let is_done = is_ending || group.assignment == Assignment::Dropped;
        let (Some(mut next), Some(death)) = (group.next(), group.culprit_death().cloned()) else {
            return;
        };
        if let (true, Next::Restart(_)) = (group.is_on_trial, next) {
            next = Next::Hold(ExitReason::RestartLimit);
        }
        group.blame(now, window);
        if self.returned(id, &death, now, out) {
            return;
        }
        let fallback = self.group(id).and_then(|group| self.falls_back(group, next));
        if let Some((fallback, span)) = fallback {
            return self.go_on_elsewhere(id, fallback, span, &death, now, out);
        }
        if self.group(id).is_some_and(|group| self.leaves_remainder(group, next)) {
            return self.go_on_with_fewer(id, &death, now, out);
        }
        let Some(group) = self.group_mut(id) else {
            return;
        };
        let deaths = || group.workers.iter().filter_map(|worker| worker.death.as_ref());
        let was_unkillable = deaths().any(|death| death.was_unkillable);
        let state = after(next, is_done, was_unkillable);
        let culprit = group.culprit.unwrap_or_default();
        for (rank, worker) in group.workers.iter_mut().enumerate() {
            let (child, generation) = (worker.child.id, worker.child.generation);
            worker.child.state = state;
            let why = match &worker.death {
                Some(death) if rank == culprit => why_of(&death.end, death.said.as_deref(), state),
                _ => format!("with rank {culprit} of its group"),
            };
            out.push(Action::Show { child, generation, state, why });
        }
        if group.has_several() {
            out.push(Action::DropGroup(id, group.generation()));
        }
        let culprit = group.workers.get(culprit).map(|worker| worker.child.id);
        self.group_down(id, death.cause, out);
        if let (Lifecycle::Held { reason }, Some(culprit)) = (state, culprit) {
            let mut complaint = complaint_of(culprit, &death.end, death.said);
            if let Some(pause) = self.put_aside(id, reason, now) {
                complaint += &format!("; its device is tried again in {} s", pause.as_secs());
            }
            self.held(culprit, reason, complaint, now, out);
        }
    }

    /// Tells netd that all of a group is reaped.
    pub(super) fn group_down(&mut self, id: GroupId, cause: DeathCause, out: &mut Vec<Action>) {
        let tell = self.netd.alive && self.said.has_model && self.netd.killed.is_none();
        let netd = self.netd.generation;
        let Some(group) = self.group_mut(id) else {
            return;
        };
        let (restarting, generation) = (group.is_restarting(), group.generation());
        // netd must hear of the end of what it knows, and that nobody comes in place of what it may
        // wait for.
        let is_known = group.told == Some(netd);
        group.drop_rings(out);
        let leader = group.leader().map(|leader| leader.id);
        if let (Some(worker), true) = (leader, tell && (is_known || !restarting)) {
            let down = ToNetd::WorkerDown { worker, generation, cause, restarting };
            out.push(Action::tell_netd(down));
        }
    }

    /// A child will not be started again: without netd or prepare, or without any worker, nothing
    /// is served; a mistake in the configuration that shows before the first announcement is
    /// reported by ending.
    pub(super) fn held(
        &mut self,
        id: ChildId,
        reason: ExitReason,
        complaint: String,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        if id == ChildId::Prepare && self.asked_for().is_some() {
            return self.shares_refused(reason, complaint, now, out);
        }
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

    /// A reading of the board. A rank that waits for others beats; who does not is to blame, or the
    /// one that it waits for if that stands still as well.
    pub(super) fn beat(&mut self, id: ChildId, beat: Beat, now: Instant, out: &mut Vec<Action>) {
        let pace = self.policy.pace;
        if let ChildId::Worker(worker) = id
            && let Some(worker) = self.worker_mut(worker)
        {
            worker.waits_for = beat.waits_for;
        }
        // A drain has a deadline of its own.
        let judged = self.child_mut(id).filter(|child| {
            matches!(child.state, Lifecycle::Starting { .. } | Lifecycle::Ready { .. })
        });
        if let Some(stood) = judged.and_then(|child| child.beat(beat, now, pace)) {
            let nearly = stood.saturating_sub(pace * 2);
            let id = self.to_blame(id, |worker| worker.child.stood() >= nearly);
            self.suspect(id);
            self.kill(id, format!("hangs: no progress for {} ms", stood.as_millis()), now, out);
        }
    }

    /// Who is late when this child is: itself, or another rank that it waits for.
    fn to_blame(&self, id: ChildId, is_late: impl Fn(&Worker) -> bool) -> ChildId {
        let ChildId::Worker(worker) = id else {
            return id;
        };
        let Some(group) = self.group(worker.group) else {
            return id;
        };
        let late = group.holds_up(usize::from(worker.rank.0), is_late);
        group.workers.get(late).map_or(id, |worker| worker.child.id)
    }

    /// The next processes of this worker do without warpgroups.
    fn suspect(&mut self, id: ChildId) {
        if let ChildId::Worker(id) = id
            && let Some(worker) = self.worker_mut(id)
        {
            worker.by_warps = true;
        }
    }

    /// Kills a child; a worker with all of its group.
    pub(super) fn kill(&mut self, id: ChildId, why: String, now: Instant, out: &mut Vec<Action>) {
        let Some(child) = self.child_mut(id) else {
            return;
        };
        if !child.alive || child.killed.is_some() {
            return;
        }
        child.killed = Some(now);
        let excused = child.excused;
        let kill = Action::Kill(id, child.generation, why);
        let ChildId::Worker(worker) = id else {
            return out.push(kill);
        };
        if let Some(group) = self.group_mut(worker.group) {
            group.culprit.get_or_insert(usize::from(worker.rank.0));
            // The abort comes first: no rank is to compute with what a dead one left.
            abort(group, out);
            out.push(kill);
            let why = format!("rank {} of its group is killed", worker.rank);
            end_group(group, &why, excused, now, out);
        }
    }

    pub(super) fn check_times(&mut self, now: Instant, out: &mut Vec<Action>) {
        self.try_again(now, out);
        self.examine(now, out);
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
                let late = |worker: &Worker| worker.child.overdue(now, &restart).is_some();
                let id = self.to_blame(id, late);
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
        let complaint = format!("{id}: {why}; its memory stays reserved, and it is not restarted");
        if let ChildId::Worker(worker) = id
            && let Some(group) = self.group(worker.group)
        {
            let of_unkillable = |child: &&child::Child| child.state == Lifecycle::Unkillable;
            if group.children().filter(of_unkillable).count() > 1 {
                return out.push(Action::Complain(complaint));
            }
            if let (Some(leader), true, true) =
                (group.leader(), self.said.has_model, self.netd.is_ready())
            {
                let down = ToNetd::WorkerUnkillable { worker: leader.id, generation };
                out.push(Action::tell_netd(down));
            }
        }
        self.held(id, ExitReason::DeviceLost, complaint, now, out);
    }
}

/// Has every wait in a group of several fail, once in a generation.
fn abort(group: &mut WorkerGroup, out: &mut Vec<Action>) {
    if group.has_several() && !std::mem::replace(&mut group.is_aborted, true) {
        out.push(Action::AbortGroup(group.id(), group.generation()));
    }
}

/// Ends the workers of a group that are left: they are of no use without the others. Their ends count
/// if that of the other does (not `excused`), as the limit is one of the group.
fn end_group(
    group: &mut WorkerGroup,
    why: &str,
    excused: bool,
    now: Instant,
    out: &mut Vec<Action>,
) {
    abort(group, out);
    for worker in &mut group.workers {
        let child = &mut worker.child;
        if child.alive && child.killed.is_none() {
            (child.killed, child.excused) = (Some(now), excused);
            out.push(Action::Kill(child.id, child.generation, why.to_owned()));
        }
    }
}

/// What a child is after its end.
fn after(next: Next, is_done: bool, was_unkillable: bool) -> Lifecycle {
    match next {
        _ if is_done => Lifecycle::Gone,
        _ if was_unkillable => Lifecycle::Held { reason: ExitReason::DeviceLost },
        Next::Restart(until) => Lifecycle::Backoff { until },
        Next::Hold(reason) => Lifecycle::Held { reason },
    }
}

fn not_started(end: &ExitStatus) -> Option<String> {
    match end {
        ExitStatus::NotStarted { message, .. } => Some(message.clone()),
        ExitStatus::Code(_) | ExitStatus::Signal(_) => None,
    }
}

/// How a child ended, with what it said; what a held child said is part of the complaint that
/// follows, once.
fn why_of(end: &str, said: Option<&str>, state: Lifecycle) -> String {
    match said {
        Some(said) if matches!(state, Lifecycle::Backoff { .. } | Lifecycle::Reaped) => {
            format!("{end}: {said}")
        }
        _ => end.to_owned(),
    }
}

fn complaint_of(id: ChildId, end: &str, said: Option<String>) -> String {
    match said {
        Some(said) => format!("{id}: {said}"),
        None => format!("{id} is not restarted: {end}"),
    }
}
