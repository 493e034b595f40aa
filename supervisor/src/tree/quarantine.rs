//! A device that keeps failing is put aside, so that the others go on without it, and tried again after
//! growing pauses. Another part of [`Tree`].
//!
//! ```text
//! more failures than --max_restarts -> held, netd WorkerDown and Shrink(rest)
//!   pause over -> its worker starts on trial, is linked, netd WorkerUp -> Grow
//!   it dies before that -> held again, for twice the pause, at most MAX_PAUSE
//! ```
//! The last device is not put aside: the run ends, and the service manager decides. Neither is a group
//! of several, which goes on with fewer devices (`remainder`).

use std::time::Duration;

use super::group::{Aside, Assignment};
use super::*;

/// Longest pause before a device is tried again.
pub(super) const MAX_PAUSE: Duration = Duration::from_secs(3600);

impl Tree {
    /// Notes when a group that is held for this reason is tried again; the pause, if it is.
    pub(super) fn put_aside(
        &mut self,
        id: GroupId,
        reason: ExitReason,
        now: Instant,
    ) -> Option<Duration> {
        let others = self.groups.iter().any(|group| group.id() != id && group.is_served());
        let pause = self.next_pause(self.group(id)?.aside, now)?;
        let group = self.group_mut(id)?;
        let serves = group.assignment == Assignment::Serving && !group.has_several();
        let failed_often = reason == ExitReason::RestartLimit;
        if !(failed_often && serves && others && !group.is_alive()) {
            group.aside = None;
            return None;
        }
        group.aside = Some(Aside { until: now + pause, pause });
        group.is_on_trial = true;
        Some(pause)
    }

    /// The next group that is tried again, and when.
    pub(super) fn next_trial(&self) -> Option<(Instant, GroupId)> {
        self.trials().min()
    }

    /// The groups that are tried again, and when. Without a model, none is.
    fn trials(&self) -> impl Iterator<Item = (Instant, GroupId)> {
        let may = self.ending.is_none() && self.moving.is_none() && self.facts.is_some();
        let held = |group: &&WorkerGroup| {
            let held = |child: &Child| matches!(child.state, Lifecycle::Held { .. });
            let is_over = !group.is_alive() && group.children().all(held);
            group.assignment == Assignment::Serving && group.is_on_trial && is_over
        };
        let due = self.groups.iter().filter(move |_| may).filter(held);
        due.filter_map(|group| Some((group.aside?.until, group.id())))
    }

    /// Starts the groups whose pause is over, each once: one that cannot start is still due afterwards.
    pub(super) fn try_again(&mut self, now: Instant, out: &mut Vec<Action>) {
        let mut due: Vec<_> = self.trials().filter(|(at, _)| *at <= now).collect();
        due.sort_unstable();
        for (_, id) in due {
            if let Some(group) = self.group_mut(id) {
                group.workers.iter_mut().for_each(|worker| worker.child.forget_deaths());
            }
            out.push(Action::Note(format!("trying group {id} again")));
            self.spawn_group(id, now, out);
        }
    }

    /// netd knows a worker of this group: its blocks are served again, if it was on trial.
    pub(super) fn passed_trial(&mut self, id: GroupId, out: &mut Vec<Action>) {
        let Some(group) = self.group_mut(id).filter(|group| group.is_on_trial) else {
            return;
        };
        group.is_on_trial = false;
        let rest = self.rest().filter(|rest| self.netd_span != Some(*rest));
        if let Some(rest) = rest {
            self.netd_span = Some(rest);
            out.push(Action::tell_netd(ToNetd::Grow(rest)));
        }
    }
}
