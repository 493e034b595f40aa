//! A pause of the instance, which the operator asks for to have the devices for something else.
//! netd stays connected and announces OFFLINE; the workers end and start again. Another part of
//! [`Tree`].
//!
//! ```text
//! Pause:   netd Pause(patience) -> its sessions end -> Vacated -> workers drained, reaped, their segments dropped -> Paused
//! Resume:  netd Resume(span), prepare looks at the blocks again -> Prepared -> workers start as at the first start
//!          before the workers have ended: they end, and start again
//! netd dies:  its sessions are gone, and the workers end at once; the next netd is told of the pause at its start
//! ```
//!
//! To the rest of the tree a pause is a move to the blocks that are served already, without memory
//! for both, whose second half waits for the operator.

use super::group::Assignment;
use super::span_move::{Move, MoveStep};
use std::time::Duration;

use super::*;

impl Tree {
    /// What the operator may expect of the instance.
    pub fn standing(&self) -> Readiness {
        let netd = Some(self.netd.generation);
        let mut served = self.groups.iter().filter(|group| group.is_served());
        let ready = self.was_online
            && self.ending.is_none()
            && self.pause == Pause::No
            && self.netd.is_ready()
            && self.rest().is_some()
            && served.all(|group| group.is_ready() && group.told == netd);
        Readiness { ready, pause: self.pause }
    }

    /// Why `order` cannot be followed now, in a sentence, if it cannot.
    pub fn refusal(&self, order: Order) -> Option<String> {
        if self.ending.is_some() {
            return Some("the instance is stopping".to_owned());
        }
        match order {
            Order::Pause(_) => self.pause_refusal().map(str::to_owned),
            Order::Resume => None,
            Order::Restart(id) => self.restart_refusal(id),
        }
    }

    pub(super) fn pause_refusal(&self) -> Option<&'static str> {
        let moves = self.moving.is_some()
            || !self.prepared
            || self.prepare.state != Lifecycle::Gone
            || self.groups.iter().any(|group| group.assignment != Assignment::Serving);
        if self.pause != Pause::No {
            None
        } else if !self.was_online || self.rest().is_none() {
            Some("the instance is not online yet: pause it when it is, or stop it")
        } else if moves {
            Some("the instance is changing its workers: try again in a minute")
        } else if self.asked.is_some() {
            Some("devices are about to share blocks anew: try again in a minute")
        } else if !(self.netd.is_ready() && self.said.has_model) {
            Some("netd is starting: try again in a few seconds")
        } else {
            None
        }
    }

    fn restart_refusal(&self, id: WorkerId) -> Option<String> {
        let known = self.groups.iter().flat_map(|group| &group.workers);
        let ids: Vec<String> = known.clone().map(|worker| worker.id.to_string()).collect();
        let worker = known.clone().find(|w| (w.id.group, w.id.rank) == (id.group, id.rank));
        match worker {
            None if ids.is_empty() => Some(format!("no worker {id} exists: none runs")),
            None => Some(format!("no worker {id} exists: expected one of {}", ids.join(", "))),
            Some(worker) if !worker.child.is_ready() => {
                let state = worker.child.state.name();
                Some(format!("worker {id} is {state}: only a ready worker can be restarted"))
            }
            Some(_) => None,
        }
    }

    /// Follows what the operator asks for.
    pub(super) fn ordered(&mut self, order: Order, now: Instant, out: &mut Vec<Action>) {
        if self.refusal(order).is_some() {
            return;
        }
        match order {
            Order::Pause(patience) if self.pause == Pause::No => self.begin_pause(patience, out),
            Order::Resume if self.pause != Pause::No => self.resume(now, out),
            Order::Pause(_) | Order::Resume => {}
            Order::Restart(id) => {
                let known = self.groups.iter().flat_map(|group| &group.workers);
                let found = known.map(|worker| worker.id);
                let found = found.into_iter().find(|w| (w.group, w.rank) == (id.group, id.rank));
                if let Some(id) = found.filter(|id| !self.return_blocks(id.group, now, out)) {
                    if let Some(worker) = self.worker_mut(id) {
                        worker.child.excused = true;
                    }
                    self.kill(ChildId::Worker(id), "restart requested".to_owned(), now, out);
                }
            }
        }
    }

    fn begin_pause(&mut self, patience: Duration, out: &mut Vec<Action>) {
        // Devices that were lost are tried again afterwards.
        let Some(span) = self.span else { return };
        self.pause = Pause::Draining;
        self.moving = Some(Move { to: span, step: MoveStep::Emptying });
        self.tell_pause(patience, out);
    }

    fn resume(&mut self, now: Instant, out: &mut Vec<Action>) {
        let was = std::mem::take(&mut self.pause);
        self.tell_pause(Duration::ZERO, out);
        let Some(Move { to, .. }) = self.moving.take_if(|_| was == Pause::Paused) else {
            return;
        };
        // Blocks may have left the cache since.
        (self.prepared, self.was_online) = (false, false);
        self.add_groups(to, Assignment::Serving);
        self.spawn(ChildId::Prepare, now, out);
    }

    /// Tells netd of the pause or its end, unless it knows. A netd that starts later is told at its
    /// start.
    pub(super) fn tell_pause(&mut self, patience: Duration, out: &mut Vec<Action>) {
        let paused = self.pause != Pause::No;
        if self.netd_is_paused == paused || !(self.netd.is_ready() && self.said.has_model) {
            return;
        }
        self.netd_is_paused = paused;
        let message = match (paused, self.span) {
            (true, _) => ToNetd::Pause { patience },
            (false, Some(span)) => ToNetd::Resume(span),
            (false, None) => return,
        };
        out.push(Action::tell_netd(message));
    }

    /// Whether the blocks that all workers have left stay so until the operator says more.
    pub(super) fn stays_paused(&mut self, out: &mut Vec<Action>) -> bool {
        let ended = matches!(self.moving, Some(Move { step: MoveStep::Ending, .. }));
        if self.pause == Pause::No || !ended {
            return false;
        }
        // A process that does not die has its device: the pause does not begin.
        if self.pause == Pause::Draining && self.groups.is_empty() {
            self.pause = Pause::Paused;
            out.push(Action::Paused);
        }
        true
    }
}
