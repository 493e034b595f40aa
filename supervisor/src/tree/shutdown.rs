//! The end of the run: netd drains, then the workers; who does not in time is killed. Another part
//! of [`Tree`].

use std::time::{Duration, Instant};

use super::*;
use serde::{Deserialize, Serialize};

/// A second request to stop counts as impatience only after this time: `timeout` and some shells
/// signal a process and its group at once.
const IMPATIENCE: Duration = Duration::from_millis(500);

/// Time that prepare, and the workers after netd, get to end: they hold nothing that could be lost.
pub(super) const SHORT_DRAIN: Duration = Duration::from_secs(5);

/// The end of the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Ending {
    pub(super) reason: ExitReason,
    #[serde(with = "crate::instants")]
    pub(super) since: Instant,
    pub(super) forced: bool,
    pub(super) workers_told: bool,
}

impl Tree {
    pub(super) fn stop(&mut self, now: Instant, out: &mut Vec<Action>) {
        match &mut self.ending {
            None => self.end(ExitReason::Clean, None, now, out),
            Some(ending) if now >= ending.since + IMPATIENCE => {
                ending.forced = true;
                let ids: Vec<_> = self.live().map(|(id, _)| id).collect();
                ids.into_iter()
                    .for_each(|id| self.kill(id, "second request to stop".to_owned(), now, out));
            }
            Some(_) => {}
        }
    }

    /// Begins the end: who waits is gone, who had not begun to serve is killed, netd drains and the
    /// workers after it.
    pub(super) fn end(
        &mut self,
        reason: ExitReason,
        complaint: Option<String>,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        if self.ending.is_some() {
            return;
        }
        self.ending = Some(Ending { reason, since: now, forced: false, workers_told: false });
        self.moving = None;
        out.extend(complaint.map(Action::Complain));
        let ids: Vec<_> = self.children().map(|child| child.id).collect();
        ids.into_iter().for_each(|id| self.give_up(id, now, out));
        self.drain(ChildId::Prepare, now + SHORT_DRAIN.min(self.policy.drain_timeout), out);
        self.drain(ChildId::Netd, now + self.policy.drain_timeout, out);
    }

    /// A child that does not serve is not needed any more. One that serves goes on.
    pub(super) fn give_up(&mut self, id: ChildId, now: Instant, out: &mut Vec<Action>) {
        let Some(child) = self.child_mut(id) else {
            return;
        };
        match child.state {
            Lifecycle::Waiting | Lifecycle::Backoff { .. } => child.state = Lifecycle::Gone,
            Lifecycle::Starting { .. } => self.kill(id, "no longer needed".to_owned(), now, out),
            _ => {}
        }
    }

    /// Has a group finish what its rank 0 has accepted. The other ranks are told when rank 0 is
    /// reaped, as it needs them until then.
    pub(super) fn drain_group(&mut self, id: GroupId, until: Instant, out: &mut Vec<Action>) {
        let Some(group) = self.group_mut(id).filter(|group| group.is_ready()) else {
            return;
        };
        let state = Lifecycle::Draining { until };
        for worker in &mut group.workers {
            let child = &mut worker.child;
            child.state = state;
            let (child, generation) = (child.id, child.generation);
            out.push(Action::Show { child, generation, state, why: String::new() });
        }
        out.extend(group.leader().map(|leader| Action::Tell(leader.child.id, Down::Drain)));
    }

    /// Has netd or prepare finish.
    pub(super) fn drain(&mut self, id: ChildId, until: Instant, out: &mut Vec<Action>) {
        self.finish_child(id, Down::Drain, until, out);
    }

    /// Has netd or prepare finish as `how` says.
    pub(super) fn finish_child(
        &mut self,
        id: ChildId,
        how: Down,
        until: Instant,
        out: &mut Vec<Action>,
    ) {
        let Some(child) = self.child_mut(id) else {
            return;
        };
        if child.is_ready() {
            child.state = Lifecycle::Draining { until };
            let (generation, state) = (child.generation, child.state);
            out.push(Action::Show { child: id, generation, state, why: String::new() });
            out.push(Action::Tell(id, how));
        }
    }

    pub(super) fn check_end(&mut self, now: Instant, out: &mut Vec<Action>) {
        let gone = |child: &Child| !child.alive || child.state == Lifecycle::Unkillable;
        let netd_gone = gone(&self.netd);
        let all_gone = self.children().all(gone);
        let Some(ending) = &mut self.ending else {
            return;
        };
        if netd_gone && !ending.workers_told {
            ending.workers_told = true;
            let until = now + SHORT_DRAIN.min(self.policy.drain_timeout);
            let ids: Vec<_> = self.groups.iter().map(WorkerGroup::id).collect();
            ids.into_iter().for_each(|id| self.drain_group(id, until, out));
        }
        let Some(ending) = &self.ending else { return };
        if all_gone {
            self.finished = true;
            let forced = ending.forced && ending.reason == ExitReason::Clean;
            out.push(Action::Finish(if forced { ExitReason::Failed } else { ending.reason }));
        }
    }
}
