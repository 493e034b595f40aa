//! A device that keeps failing hands its blocks to another one, if the operator named one
//! (`--fallback_device`), and gets them back when it works again. Another part of [`Tree`].
//!
//! ```text
//! more failures than --max_restarts, or DeviceLost -> a worker of the fallback serves as many of the blocks as fit
//!   pause over -> Examine(device) -> Examined
//!     it failed:  once more after twice the pause, at most MAX_PAUSE
//!     it passed:  back once no session is open (Idle) or the operator restarts the worker
//!   -> a worker of the device on trial -> linked, netd WorkerUp -> Grow
//! ```
//! Each of the two is another worker, with other KV pages: open sessions end, and their clients replay.

use std::time::{Duration, Instant};

use shared::block::Span;
use shared::config::Device;
use shared::exit::ExitReason;
use shared::ids::GroupId;

use super::group::{Aside, Assignment, Comeback, Death, Origin, WorkerGroup};
use super::quarantine::MAX_PAUSE;
use super::{Action, Next, Tree};

impl Tree {
    /// The fallback and the blocks that it takes over from a group that has ended so.
    pub(super) fn falls_back(&self, group: &WorkerGroup, next: Next) -> Option<(Device, Span)> {
        let fallback = self.policy.fallback?;
        let failed = matches!(next, Next::Hold(ExitReason::RestartLimit | ExitReason::DeviceLost));
        let serves = group.assignment == Assignment::Serving && !group.has_several();
        let other = group.placement.devices != [fallback];
        if !(failed && serves && other && self.ending.is_none()) || self.leaves_present() {
            return None;
        }
        let span = self.part_that_fits(group, &[fallback], self.facts.as_ref()?)?;
        Some((fallback, span))
    }

    /// The fallback serves what the device of a group does not.
    pub(super) fn go_on_elsewhere(
        &mut self,
        id: GroupId,
        fallback: Device,
        span: Span,
        death: &Death,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        let Some(before) = self.succeed(id, vec![fallback], death, now, out) else { return };
        let Some(&device) = before.placement.devices.first() else { return };
        let pause = self.next_pause(before.aside, now);
        let origin = Origin { device, span: before.placement.span, step: Comeback::Resting };
        if let Some(group) = self.group_mut(id) {
            group.origin = Some(origin);
            group.aside = pause.map(|pause| Aside { until: now + pause, pause });
            group.placement.span = span;
        }
        let end = death.said.as_deref().unwrap_or(&death.end);
        let again = pause.map_or_else(
            || "restart the server to use the device again".to_owned(),
            |pause| format!("the device is examined in {} s", pause.as_secs()),
        );
        let text = format!(
            "{device} failed too often: {end}; {fallback} serves blocks {span} in its place; {again}"
        );
        out.push(if self.was_online { Action::Complain(text) } else { Action::Note(text) });
        self.shrink_netd(out);
        self.spawn_group(id, now, out);
    }

    /// The next device whose pause is over, and when.
    pub(super) fn next_examination(&self) -> Option<(Instant, GroupId)> {
        if self.ending.is_some() || self.moving.is_some() {
            return None;
        }
        let rests = |group: &&WorkerGroup| {
            group.origin.is_some_and(|origin| origin.step == Comeback::Resting)
        };
        let resting = self.groups.iter().filter(rests);
        resting.filter_map(|group| Some((group.aside?.until, group.id()))).min()
    }

    /// Has the devices examined whose pause is over.
    pub(super) fn examine(&mut self, now: Instant, out: &mut Vec<Action>) {
        while let Some((_, id)) = self.next_examination().filter(|(at, _)| *at <= now) {
            if let Some(origin) = self.group_mut(id).and_then(|group| group.origin.as_mut()) {
                origin.step = Comeback::Examined;
                out.push(Action::Examine(origin.device));
            }
        }
    }

    /// What an examination found.
    pub(super) fn examined(
        &mut self,
        device: Device,
        fault: Option<String>,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        let of_device = |group: &&mut WorkerGroup| {
            group.origin.is_some_and(|o| (o.device, o.step) == (device, Comeback::Examined))
        };
        for group in self.groups.iter_mut().filter(of_device) {
            let (Some(origin), Some(aside)) = (&mut group.origin, &mut group.aside) else {
                continue;
            };
            match &fault {
                None => {
                    origin.step = Comeback::Passed;
                    out.push(Action::Note(format!(
                        "{device} works again: its blocks return once no session is open; \
                         `sepal restart {}.0` returns them now",
                        group.placement.group
                    )));
                }
                Some(fault) => {
                    origin.step = Comeback::Resting;
                    aside.pause = aside.pause.saturating_mul(2).min(MAX_PAUSE);
                    aside.until = now + aside.pause;
                    let pause = aside.pause.as_secs();
                    out.push(Action::Note(format!(
                        "{device} is examined again in {pause} s: {fault}"
                    )));
                }
            }
        }
    }

    /// Whether [`super::TreeEvent::Idle`] would change anything.
    pub fn waits_for_idle(&self) -> bool {
        self.netd_awaits_idle()
            || self.moving.is_none() && self.groups.iter().any(WorkerGroup::may_return)
    }

    /// No session is open.
    pub(super) fn idle(&mut self, now: Instant, out: &mut Vec<Action>) {
        self.hasten_netd(now);
        if self.ending.is_some() || self.moving.is_some() {
            return;
        }
        let ids: Vec<_> =
            self.groups.iter().filter(|g| g.may_return()).map(WorkerGroup::id).collect();
        for id in ids {
            self.return_blocks(id, now, out);
        }
    }

    /// Ends the worker of the fallback in favour of a device that works again; false if there is none.
    pub(super) fn return_blocks(
        &mut self,
        id: GroupId,
        now: Instant,
        out: &mut Vec<Action>,
    ) -> bool {
        let Some(group) = self.group_mut(id).filter(|group| group.may_return()) else {
            return false;
        };
        let Some(worker) = group.workers.first_mut() else { return false };
        worker.child.excused = true;
        let worker = worker.child.id;
        if let Some(origin) = &mut group.origin {
            origin.step = Comeback::Returning;
        }
        self.kill(worker, "its device works again".to_owned(), now, out);
        true
    }

    /// Starts the device again whose fallback has ended for it; false if there is none.
    pub(super) fn returned(
        &mut self,
        id: GroupId,
        death: &Death,
        now: Instant,
        out: &mut Vec<Action>,
    ) -> bool {
        let Some(group) = self.group(id) else { return false };
        let returns = |origin: &Origin| origin.step == Comeback::Returning;
        let (Some(origin), aside) = (group.origin.filter(returns), group.aside) else {
            return false;
        };
        if self.ending.is_some() || self.succeed(id, vec![origin.device], death, now, out).is_none()
        {
            return false;
        }
        if let Some(group) = self.group_mut(id) {
            group.placement.span = origin.span;
            (group.aside, group.is_on_trial) = (aside, true);
        }
        self.shrink_netd(out);
        self.spawn_group(id, now, out);
        true
    }

    /// How long a device that fails now rests, unless the operator wants it left alone.
    pub(super) fn next_pause(&self, last: Option<Aside>, now: Instant) -> Option<Duration> {
        let first = self.policy.restart.retry_after?;
        // One that has served for so long since begins anew.
        let recent = last.filter(|aside| now < aside.until + MAX_PAUSE);
        let doubled = recent.map(|aside| aside.pause.saturating_mul(2));
        Some(doubled.unwrap_or(first).min(MAX_PAUSE.max(first)))
    }
}

impl WorkerGroup {
    /// Whether its device works again.
    fn may_return(&self) -> bool {
        let passed = |origin: Origin| origin.step == Comeback::Passed;
        self.origin.is_some_and(passed) && self.children().all(|child| child.is_ready())
    }
}
