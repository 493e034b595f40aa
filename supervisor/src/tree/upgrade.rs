//! Replacing every process by one of the present executable, after another one handed the run over.
//! Another part of [`Tree`].
//!
//! ```text
//! HandedOver -> each group in turn: killed, started again over the same KV segment, linked, known to netd
//!            -> no session is open, or the operator's patience is over
//!            -> netd, last: tells its clients and ends, started again -> Upgraded
//! ```
//! To the rest of the tree each is a restart that the operator asked for. A process that died meanwhile
//! is one of the present executable already. Moves, pauses and other restarts come first.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shared::control::ToNetd;
use shared::ids::{Generation, GroupId};

use super::group::Assignment;
use super::{Action, ChildId, Down, Lifecycle, Tree};
use crate::report::Pause;

/// Time for netd to end on request; it takes a quarter of a second.
const REPLACE_TIMEOUT: Duration = Duration::from_secs(2);

/// Processes of the executable before.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Replacing {
    /// Groups and their generations, in the order of replacement.
    groups: Vec<(GroupId, Generation)>,
    netd: Generation,
    /// How long open sessions may keep netd from being replaced: it ends their connections.
    patience: Duration,
    /// When that time is over, once it runs.
    #[serde(with = "crate::instants::option")]
    netd_by: Option<Instant>,
}

impl Tree {
    /// Why an upgrade has to wait, in a sentence, if it has to. Every process serves, and nothing else
    /// is under way.
    pub fn upgrade_waits_for(&self) -> Option<String> {
        if self.ending.is_some() {
            return Some("the instance is stopping".to_owned());
        }
        if self.replacing.is_some() {
            return Some("another upgrade is under way".to_owned());
        }
        if self.pause == Pause::Draining {
            return Some("a pause is about to begin".to_owned());
        }
        if let Some(why) = self.pause_refusal() {
            return Some(why.to_owned());
        }
        let lasting = |group: &&super::WorkerGroup| group.is_lasting() && !group.is_ready();
        let late = self.groups.iter().find(lasting)?;
        Some(format!("group {} is starting", late.id()))
    }

    /// A group that does not have a worker for each of its devices, or has none: the tree was not written
    /// by a supervisor.
    pub fn incomplete_group(&self) -> Option<GroupId> {
        let is_whole = |group: &super::WorkerGroup| {
            let ids = group.workers.iter().map(|worker| worker.id);
            !group.workers.is_empty() && ids.eq(group.placement.workers())
        };
        self.groups.iter().find(|group| !is_whole(group)).map(super::WorkerGroup::id)
    }

    /// Whether there are no workers, for as long as the operator wants.
    pub fn is_paused(&self) -> bool {
        self.pause == Pause::Paused
    }

    /// This executable goes on with the run.
    pub(super) fn handed_over(&mut self, patience: Duration) {
        let alive = self.groups.iter().filter(|group| group.is_alive());
        self.replacing = Some(Replacing {
            groups: alive.map(|group| (group.id(), group.generation())).collect(),
            netd: self.netd.generation,
            patience,
            netd_by: None,
        });
    }

    /// What is replaced now; `None` once all processes are of this executable.
    pub fn replaces(&self) -> Option<String> {
        let replacing = self.replacing.as_ref()?;
        Some(match replacing.groups.first() {
            Some((group, _)) => format!("replacing the workers of group {group}"),
            None if replacing.netd == self.netd.generation && self.netd.is_ready() => {
                "waiting for sessions to end, before netd is replaced".to_owned()
            }
            None => "replacing netd".to_owned(),
        })
    }

    /// Replaces the next process once the one before it serves.
    pub(super) fn replace_next(&mut self, now: Instant, out: &mut Vec<Action>) {
        let is_busy = self.moving.is_some() || self.asked.is_some() || self.prepare.alive;
        if self.replacing.is_none() || is_busy && self.pause != Pause::Paused {
            return;
        }
        if self.ending.is_some() {
            self.replacing = None;
            return;
        }
        while let Some(&(id, generation)) =
            self.replacing.as_ref().and_then(|replacing| replacing.groups.first())
        {
            match self.of_before(id, generation) {
                Some(true) => return self.replace(id, now, out),
                Some(false) => return,
                None => {}
            }
            if let Some(replacing) = &mut self.replacing {
                replacing.groups.remove(0);
            }
        }
        self.replace_netd(now, out);
    }

    fn replace_netd(&mut self, now: Instant, out: &mut Vec<Action>) {
        let Some(replacing) = &mut self.replacing else { return };
        // The state that was handed over may hold any number.
        let by = now.checked_add(replacing.patience).unwrap_or(now);
        let by = *replacing.netd_by.get_or_insert(by);
        let knows_all = self.said.has_model && self.netd.is_ready();
        if self.netd.generation > replacing.netd {
            let told = |group: &super::WorkerGroup| {
                !group.is_served() || group.told == Some(self.netd.generation)
            };
            if knows_all && self.groups.iter().all(told) {
                self.replacing = None;
                out.push(Action::Upgraded);
            }
        } else if self.netd.is_ready() && now >= by {
            self.netd.excused = true;
            self.finish_child(
                ChildId::Netd,
                Down::Netd(ToNetd::Replace),
                now + REPLACE_TIMEOUT,
                out,
            );
        }
    }

    /// Whether netd is replaced as soon as no session is open.
    pub(super) fn netd_awaits_idle(&self) -> bool {
        let waits = |of: &Replacing| of.groups.is_empty() && of.netd == self.netd.generation;
        self.replacing.as_ref().is_some_and(waits) && self.netd.is_ready()
    }

    /// No session is open: netd need not wait any longer.
    pub(super) fn hasten_netd(&mut self, now: Instant) {
        if self.netd_awaits_idle()
            && let Some(replacing) = &mut self.replacing
        {
            replacing.netd_by = Some(now);
        }
    }

    /// When netd is replaced at the latest.
    pub(super) fn netd_due(&self) -> Option<Instant> {
        self.replacing.as_ref().filter(|_| self.netd_awaits_idle())?.netd_by
    }

    /// Whether a group is one of the executable before and can be replaced now; false if it has to be
    /// waited for, `None` if it is done or gone.
    fn of_before(&self, id: GroupId, generation: Generation) -> Option<bool> {
        let group = self.group(id)?;
        if group.assignment != Assignment::Serving || !group.is_lasting() {
            return None;
        }
        let is_known = group.is_ready() && group.told == Some(self.netd.generation);
        match group.generation() > generation {
            true if is_known => None,
            true => Some(false),
            false => Some(is_known),
        }
    }

    fn replace(&mut self, id: GroupId, now: Instant, out: &mut Vec<Action>) {
        let Some(group) = self.group_mut(id) else { return };
        for worker in &mut group.workers {
            worker.child.excused = true;
        }
        let leader = group.workers.first().map(|worker| worker.child.id);
        let is_alive = group.children().any(|child| child.state != Lifecycle::Gone);
        if let Some(leader) = leader.filter(|_| is_alive) {
            self.kill(leader, "replaced by the new build".to_owned(), now, out);
        }
    }
}
