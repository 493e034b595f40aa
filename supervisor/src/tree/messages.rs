//! What each child says, and what follows from it. Another part of [`Tree`].

use std::time::Instant;

use shared::survey::{Capacity, DeviceMemory, Speeds, Survey};

use super::*;

impl Tree {
    pub(super) fn said(&mut self, id: ChildId, up: Up, now: Instant, out: &mut Vec<Action>) {
        match (id, up) {
            (ChildId::Prepare, Up::Prepare(message)) => self.prepare_said(message, now, out),
            (ChildId::Netd, Up::Netd(message)) => self.netd_said(message, now, out),
            (ChildId::Worker(worker), Up::Worker(message)) => {
                self.worker_said(worker, message, now, out)
            }
            _ => {}
        }
    }

    fn prepare_said(&mut self, message: FromPrepare, now: Instant, out: &mut Vec<Action>) {
        match message {
            FromPrepare::Surveyed(survey) => self.surveyed(*survey, now, out),
            // The driver shows it.
            FromPrepare::Progress(_) => {}
            FromPrepare::Prepared if self.prepares_move() => self.move_prepared(out),
            FromPrepare::Prepared if self.span.is_some() => {
                self.prepared = true;
                let waiting = |child: &Child| child.state == Lifecycle::Waiting;
                let is_due =
                    |group: &&WorkerGroup| !group.awaits_shares && group.children().all(waiting);
                let groups = self.groups.iter().filter(is_due);
                let ids: Vec<_> = groups.map(WorkerGroup::id).collect();
                if self.ending.is_none() {
                    ids.into_iter().for_each(|id| self.spawn_group(id, now, out));
                }
            }
            FromPrepare::Prepared => {}
            FromPrepare::Failed { message, .. } => self.prepare.complaint = Some(message),
        }
    }

    /// The model and the devices are known; a later survey may be of one group alone.
    fn surveyed(&mut self, survey: Survey, now: Instant, out: &mut Vec<Action>) {
        let Survey { facts, ranks, devices, kept, speeds } = survey;
        if !ranks.is_empty() {
            self.take_shares(ranks);
        }
        self.take_devices(devices);
        // Workers have their blocks for life.
        if let (Some(Speeds { rates, cuts }), None) = (speeds, self.span) {
            DeviceShare::set_rates(&mut self.policy.shares, &rates);
            self.policy.cuts = cuts;
        }
        if let (Some(_), Some(id)) = (self.asked_for(), self.asked) {
            return self.shares_told(id, now, out);
        }
        if let Err(complaint) = self.take_facts(facts, kept) {
            return self.end(ExitReason::BadConfig, Some(complaint), now, out);
        }
        self.set_ready(ChildId::Prepare, now, String::new(), out);
        self.give_model(out);
    }

    /// Checks the blocks asked for against the model, when it is told for the first time.
    fn take_facts(&mut self, facts: ModelFacts, kept: Option<Capacity>) -> Result<(), String> {
        if self.facts.is_none() {
            let Policy { span, memory, shares, .. } = &self.policy;
            self.fits = memory.served(*span, &facts, shares)?;
            (self.facts, self.kept) = (Some(facts), kept);
        }
        Ok(())
    }

    /// Free memory counts as of the start: told anew, the present workers have most of it. What units
    /// need depends on the shares, and changes with those of the group that prepare was asked for.
    fn take_devices(&mut self, told: Vec<DeviceMemory>) {
        let asked = self.asked_for().map(|group| group.placement.share);
        let devices = &mut self.policy.memory.devices;
        if devices.is_empty() {
            *devices = told;
        } else if let Some(share) = asked {
            let before = self.policy.shares.iter().take(share);
            let before: usize = before.map(|share| share.devices.len()).sum();
            for (known, told) in devices.iter_mut().skip(before).zip(told) {
                known.work_bytes = told.work_bytes;
            }
        }
    }

    /// Workers hold their shares for life, so later ones of the same groups change nothing.
    fn take_shares(&mut self, told: Vec<Vec<RankShare>>) {
        let asked = self.asked_for().map(|group| group.placement.share);
        let ranks = &mut self.policy.memory.ranks;
        if ranks.is_empty() {
            *ranks = told;
        } else if let Some(of_asked) = asked.and_then(|share| ranks.get_mut(share)) {
            *of_asked = told.into_iter().next().unwrap_or_default();
        }
    }

    fn netd_said(&mut self, message: FromNetd, now: Instant, out: &mut Vec<Action>) {
        match message {
            FromNetd::Listening { peer_id, addrs } => {
                self.set_ready(ChildId::Netd, now, format!("listening as {peer_id}"), out);
                (self.said.peer_id, self.said.addrs) = (peer_id, addrs);
                self.give_model(out);
            }
            FromNetd::ProposedSpan(span) => self.take_span(span, now, out),
            FromNetd::Online => {
                self.came_from = None;
                self.show_online(out);
            }
            FromNetd::Move(to) => self.begin_move(to, now, out),
            FromNetd::Moved(to) => self.moved(to, out),
            FromNetd::Vacated => self.vacated(now, out),
            FromNetd::Stays => self.give_up_move("netd cancelled it", false, now, out),
            FromNetd::BrokenRings { worker, generation, message } => {
                self.broken_rings(worker, generation, message, now, out)
            }
            // The driver ends the run.
            FromNetd::Rated(_) => {}
            FromNetd::Failed { message, .. } => self.netd.complaint = Some(message),
        }
    }

    pub(super) fn show_online(&mut self, out: &mut Vec<Action>) {
        let Some(span) = self.rest() else { return };
        self.was_online = true;
        let (peer_id, addrs) = (self.said.peer_id.clone(), self.said.addrs.clone());
        out.push(Action::Online { span, peer_id, addrs });
    }

    fn worker_said(
        &mut self,
        id: WorkerId,
        message: FromWorker,
        now: Instant,
        out: &mut Vec<Action>,
    ) {
        match message {
            FromWorker::Ready(capacity) => {
                let Some(worker) = self.worker_mut(id) else {
                    return;
                };
                worker.capacity = capacity;
                let Some(span) = self.group(id.group).map(|group| group.placement.span) else {
                    return;
                };
                self.set_ready(ChildId::Worker(id), now, format!("blocks {span}"), out);
                self.link_all(out);
            }
            FromWorker::Linked { netd_generation } => self.linked(id, netd_generation, out),
            FromWorker::Failed { message, .. } => {
                if let Some(worker) = self.worker_mut(id) {
                    worker.child.complaint = Some(message);
                }
            }
        }
    }

    pub(super) fn set_ready(
        &mut self,
        id: ChildId,
        now: Instant,
        why: String,
        out: &mut Vec<Action>,
    ) {
        let Some(child) = self.child_mut(id) else {
            return;
        };
        if matches!(child.state, Lifecycle::Starting { .. }) {
            child.ready(now);
            out.push(Action::Show {
                child: id,
                generation: child.generation,
                state: child.state,
                why,
            });
        }
    }
}
