//! Moving to other blocks while serving: another part of [`Daemon`].
//!
//! ```text
//!   wish of `swarm::rebalance` ─> Move to the supervisor, JOINING announced        the present blocks are served as ever
//!   WorkerUp* until the new span is covered ─> is the move still harmless? ─> Stays, JOINING taken back
//!       yes ─> a new service takes new sessions, the old one keeps its own ─> announced (see `Announced::move_to`) ─> Moved
//!   MakeRoom ─> harmless? ─> what is left announced OFFLINE, the rest JOINING; the old service ends in its time ─> Vacated, WorkerUp*, Online
//!   MoveFailed ─> JOINING taken back, the next wish has to wait
//!   Pause ─> announced OFFLINE, new sessions refused; those that are open end in their time ─> Vacated, Resume ─> JOINING, WorkerUp*, Online
//!   the old service has no callers and nobody hears of it any more, or its time is over ─> Vacated
//! ```
//!
//! The old service answers those who still ask for its blocks for one update period: so long
//! clients may believe what they read.

use std::sync::Arc;
use std::time::Duration;

use p2p::task;
use shared::block::Span;
use shared::control::{FromNetd, WorkerUp};
use shared::network::NetworkRate;
use swarm::view;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::Instant;
use tracing::{debug, info, warn};

use super::Daemon;
use crate::control::NetdOutbox;
use crate::membership::rebalance::{Wish, opens_hole, without};
use crate::offer::{Announced, Offer};
use crate::rpc::Service;
use crate::workers::Workers;

/// Pause after the first move that failed; doubles with each in a row.
const FIRST_HOLD_OFF: Duration = Duration::from_secs(60);
/// Longest such pause.
const MAX_HOLD_OFF: Duration = Duration::from_secs(3600);
/// Longest look at the swarm before the new place is announced; a swarm that cannot be read says
/// nothing against the move.
const LOOK_PATIENCE: Duration = Duration::from_secs(10);

/// How long sessions may hold up a move that has to leave the old blocks first, where the swarm is not in need.
const IN_PLACE_PATIENCE: Duration = Duration::from_secs(300);

/// What the background work of a move reports.
#[derive(Debug)]
pub(super) enum MoveProgress {
    /// Whether the move to this span is still harmless.
    Looked(Span, bool),
    /// The new place is announced.
    Announced(Span, Box<Announced>),
    /// The network's rate was measured, or cannot be in a dry run.
    Network(Option<NetworkRate>),
    /// The monitor of the public swarm can reach this server, or not: then with what to do about
    /// it.
    Monitored(Result<(), String>),
}

/// A move that is not announced yet.
#[derive(Debug)]
pub(super) struct Coming {
    offer: Offer,
    workers: Arc<Workers>,
    ups: Vec<WorkerUp>,
    joining: AbortHandle,
    looking: bool,
    /// Whether its workers can only start when the present ones are gone.
    in_place: bool,
    /// Share of the usual time that sessions have then.
    patience: f64,
}

/// Blocks that were left while sessions on them were open.
#[derive(Debug)]
pub(super) struct Leaving {
    service: Arc<Service>,
    workers: Arc<Workers>,
    draining: watch::Sender<bool>,
    /// Until when callers are taken who have not heard of the move.
    takes_until: Instant,
    /// When its sessions are ended.
    ends_at: Instant,
    /// Whether the supervisor was told that its workers can go.
    vacated: bool,
}

/// When the next move may be thought of.
#[derive(Debug, Default)]
pub(super) struct HoldOff {
    failures: u32,
    until: Option<Instant>,
}

impl HoldOff {
    fn failed(&mut self) {
        let pause = FIRST_HOLD_OFF.saturating_mul(1 << self.failures.min(10));
        self.failures = self.failures.saturating_add(1);
        self.until = Some(Instant::now() + pause.min(MAX_HOLD_OFF));
    }

    fn over(&self) -> bool {
        self.until.is_none_or(|until| Instant::now() >= until)
    }
}

impl Daemon {
    /// Shows the rebalancer the span that may be left, if there is one now.
    pub(super) fn show_present(&self) {
        let settled = self.coming.is_none()
            && self.leaving.is_none()
            && !self.switching
            && self.hold_off.over()
            && self.online.borrow().is_some();
        let present = settled.then_some(self.offer.span);
        self.present.send_if_modified(|shown| {
            let changed = *shown != present;
            *shown = present;
            changed
        });
    }

    /// The swarm needs this server at `to`.
    pub(super) async fn wish(&mut self, Wish { to, patience }: Wish, outbox: &NetdOutbox) {
        if self.present.borrow().is_none() || to == self.offer.span {
            return;
        }
        let offer = self.offer.at(to);
        let joining = offer.announce_coming(&self.joined, self.offer.span, &self.present_ups());
        self.coming = Some(Coming {
            offer,
            workers: Arc::new(self.workers.beside()),
            ups: Vec::new(),
            joining,
            looking: false,
            in_place: false,
            patience,
        });
        self.show_present();
        outbox.send(FromNetd::Move(to)).await;
    }

    /// The move to `to` is off.
    pub(super) fn move_failed(&mut self, to: Span, why: &str) {
        if let Some(back) = self.came_from.take_if(|_| self.offer.span == to) {
            warn!(%to, why, from = %back.span, "move failed, serving the previous blocks again");
            let from = std::mem::replace(&mut self.offer, back);
            self.whole = self.offer.span;
            self.workers = Arc::new(self.workers.beside());
            self.ups.clear();
            self.start_anew(&from);
            return self.hold_off.failed();
        }
        let Some(coming) = self.coming.take_if(|coming| coming.offer.span == to) else {
            return;
        };
        warn!(%to, why, span = %self.offer.span, "move failed, keeping the blocks");
        coming.joining.abort();
        // Ends by itself once the records are taken back or have expired.
        drop(coming.offer.take_back(&self.joined, self.offer.span));
        self.hold_off.failed();
        self.show_present();
    }

    /// Whose worker this is. New ones belong to the move, if there is one.
    pub(super) fn workers_of(&self, up: &WorkerUp) -> Arc<Workers> {
        // Names of workers that are to go may be used again already.
        let leaving = self.leaving.as_ref().filter(|leaving| !leaving.vacated);
        let leaving = leaving.map(|leaving| &leaving.workers);
        let coming = self.coming.as_ref().map(|coming| &coming.workers);
        let known = [Some(&self.workers), leaving, coming]
            .into_iter()
            .flatten()
            .find(|workers| workers.knows(up.worker));
        known.or(coming).unwrap_or(&self.workers).clone()
    }

    /// All workers there are.
    pub(super) fn all_workers(&self) -> impl Iterator<Item = &Arc<Workers>> {
        let leaving = self.leaving.as_ref().map(|leaving| &leaving.workers);
        let coming = self.coming.as_ref().map(|coming| &coming.workers);
        [Some(&self.workers), leaving, coming].into_iter().flatten()
    }

    /// Notes a worker of the move; once they cover its span, looks whether it is still harmless.
    pub(super) fn coming_up(&mut self, up: WorkerUp) {
        let Some(coming) = &mut self.coming else {
            return;
        };
        coming.ups.retain(|other| other.worker != up.worker);
        coming.ups.push(up);
        if coming.workers.cover(coming.offer.span) {
            self.look_again();
        }
    }

    /// There is no memory for the move beside the present workers.
    pub(super) fn must_make_room(&mut self, to: Span) {
        if let Some(coming) = self.coming.as_mut().filter(|c| c.offer.span == to) {
            coming.in_place = true;
            self.look_again();
        }
    }

    /// Looks in the background whether the move is still harmless, once.
    fn look_again(&mut self) {
        let Some(coming) = self.coming.as_mut().filter(|coming| !coming.looking) else {
            return;
        };
        coming.looking = true;
        let (to, present) = (coming.offer.span, self.offer.span);
        let (dht, own) = (self.joined.dht.clone(), self.joined.peer_id.clone());
        let (prefix, blocks) = (self.offer.prefix.clone(), self.facts.num_blocks);
        let progress = self.progress.clone();
        task::spawn(async move {
            let look = view::read_blocks(&dht, &prefix, 0..blocks);
            let harmless = match tokio::time::timeout(LOOK_PATIENCE, look).await {
                Ok(Ok(view)) => !opens_hole(&view, &own, &without(present, to)),
                _ => true,
            };
            // Nobody listens when the daemon has ended.
            let _ = progress.send(MoveProgress::Looked(to, harmless)).await;
        });
    }

    /// Background work of a move is done.
    pub(super) async fn progressed(&mut self, progress: MoveProgress, outbox: &NetdOutbox) {
        match progress {
            MoveProgress::Looked(to, harmless) => {
                let Some(coming) = self.coming.as_ref().filter(|c| c.offer.span == to) else {
                    return;
                };
                if harmless && coming.in_place {
                    self.make_room();
                } else if harmless {
                    self.switch();
                } else {
                    outbox.send(FromNetd::Stays).await;
                    self.move_failed(to, "it would leave blocks without a server");
                }
            }
            MoveProgress::Announced(to, announced) => {
                self.announced = *announced;
                self.switching = false;
                self.hold_off = HoldOff::default();
                info!(span = %to, "moved");
                outbox.send(FromNetd::Moved(to)).await;
            }
            MoveProgress::Network(rate) => self.network_measured(rate, outbox).await,
            MoveProgress::Monitored(result) => self.monitored(result, outbox).await,
        }
    }

    /// Announces that this server goes, and lets its sessions end.
    fn make_room(&mut self) {
        let (Some(coming), Some(before)) = (self.coming.take(), self.online.borrow().clone())
        else {
            return;
        };
        coming.joining.abort();
        let from = std::mem::replace(&mut self.offer, coming.offer);
        self.whole = self.offer.span;
        let workers = std::mem::replace(&mut self.workers, coming.workers);
        let draining = std::mem::replace(&mut self.draining, watch::Sender::new(false));
        self.ups.clear();
        self.start_anew(&from);
        self.came_from = Some(from);
        let of = |usual: Duration| usual.mul_f64(coming.patience);
        let takes_until = Instant::now() + of(self.init.config.update_period);
        let patience = of(IN_PLACE_PATIENCE.min(self.init.config.session_timeout));
        self.leaving = Some(Leaving {
            service: before,
            workers,
            draining,
            takes_until,
            ends_at: takes_until + patience,
            vacated: false,
        });
        self.show_present();
    }

    /// Announces JOINING at the present offer in place of what was announced at `from`.
    fn start_anew(&mut self, from: &Offer) {
        self.announced.stop();
        // Ends by itself once the records are taken back or have expired.
        drop(from.take_back(&self.joined, self.offer.span));
        self.announced = self.offer.announce_joining(&self.joined);
    }

    /// From here on new sessions go to the workers of the new blocks.
    fn switch(&mut self) {
        let (Some(coming), Some(before)) = (self.coming.take(), self.online.borrow().clone())
        else {
            return;
        };
        coming.joining.abort();
        let from = std::mem::replace(&mut self.offer, coming.offer);
        self.whole = self.offer.span;
        let workers = std::mem::replace(&mut self.workers, coming.workers);
        self.ups = coming.ups;
        let draining = std::mem::replace(&mut self.draining, watch::Sender::new(false));
        let service = Service::after(self.service_parts(), &before);
        let left = service.kv.tokens_left();
        self.online.send_replace(Some(Arc::new(service)));
        let takes_until = Instant::now() + self.init.config.update_period;
        self.leaving = Some(Leaving {
            service: before,
            workers,
            draining,
            takes_until,
            ends_at: takes_until + self.init.config.session_timeout,
            vacated: false,
        });
        self.switching = true;
        let (to, ups, joined) = (self.offer.clone(), self.ups.clone(), self.joined.clone());
        let mut announced = std::mem::replace(&mut self.announced, Announced::none());
        let progress = self.progress.clone();
        task::spawn(async move {
            announced.move_to(&from, &to, &joined, &ups, left).await;
            let done = MoveProgress::Announced(to.span, Box::new(announced));
            let _ = progress.send(done).await;
        });
        self.show_present();
    }

    /// Looks whether the blocks that were left can go.
    pub(super) async fn look_at_leaving(&mut self, outbox: &NetdOutbox) {
        let Some(leaving) = self.leaving.as_mut().filter(|leaving| !leaving.vacated) else {
            return;
        };
        let now = Instant::now();
        if self.switching || now < leaving.takes_until {
            return;
        }
        if self.came_from.is_some() {
            self.online.send_replace(None);
        }
        if let Some(service) = self.online.borrow().as_ref() {
            service.forget_before();
        }
        if now >= leaving.ends_at {
            leaving.draining.send_replace(true);
        }
        // This one, and whoever serves a caller.
        let callers = Arc::strong_count(&leaving.service).saturating_sub(1);
        if callers > 0 {
            return debug!(callers, "sessions still use the previous blocks");
        }
        leaving.vacated = true;
        outbox.send(FromNetd::Vacated).await;
    }

    /// The operator wants the devices: goes OFFLINE, refuses new sessions, and gives those that are
    /// open `patience`.
    pub(super) async fn pause(&mut self, patience: Duration, outbox: &NetdOutbox) {
        self.is_paused = true;
        self.announced.offline();
        let next = Arc::new(self.workers.beside());
        let workers = std::mem::replace(&mut self.workers, next);
        self.ups.clear();
        self.resumption.clear();
        let Some(service) = self.online.send_replace(None) else {
            outbox.send(FromNetd::Vacated).await;
            return;
        };
        info!(patience_s = patience.as_secs(), sessions = service.open_sessions(), "pausing");
        let draining = std::mem::replace(&mut self.draining, watch::Sender::new(false));
        let takes_until = Instant::now();
        let ends_at = takes_until + patience;
        self.leaving =
            Some(Leaving { service, workers, draining, takes_until, ends_at, vacated: false });
        self.look_at_leaving(outbox).await;
        self.show_present();
    }

    /// The pause is over: workers of `span` are about to come.
    pub(super) fn resume(&mut self, span: Span) {
        info!(%span, "resuming");
        self.is_paused = false;
        self.announced.stop();
        (self.offer, self.whole) = (self.offer.at(span), span);
        self.announced = self.offer.announce_joining(&self.joined);
    }

    /// A worker has ended for good; the blocks that were left are forgotten with the last of
    /// theirs.
    pub(super) fn forget_left(&mut self) {
        let over = |leaving: &mut Leaving| leaving.vacated && leaving.workers.all_gone();
        if self.leaving.take_if(over).is_some() {
            info!("previous blocks released");
            self.show_present();
        }
    }

    /// Ends the sessions on blocks that were left.
    pub(super) fn end_left(&self) {
        if let Some(leaving) = &self.leaving {
            leaving.draining.send_replace(true);
        }
    }

    /// Ends every session, also on blocks that were left, and takes back what a move announced.
    pub(super) async fn end_moves(&mut self) {
        self.end_left();
        if let Some(coming) = self.coming.take() {
            coming.joining.abort();
            let back = coming.offer.take_back(&self.joined, self.offer.span);
            let _ = tokio::time::timeout(super::FAREWELL, back).await;
        }
        while self.switching {
            let next = tokio::time::timeout(super::FAREWELL, self.progressed.recv()).await;
            match next {
                Ok(Some(MoveProgress::Announced(_, announced))) => {
                    self.announced = *announced;
                    self.switching = false;
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => self.switching = false,
            }
        }
    }
}
