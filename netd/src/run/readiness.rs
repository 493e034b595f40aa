//! What has to be known before and after a server goes online, and may change while it serves:
//! another part of [`Daemon`].
//!
//! ```text
//!   workers cover the span ─> the monitor of the public swarm, if one is asked ─> ONLINE
//!   ONLINE ─> the network is measured in the background ─┐
//!   AutoNAT changes its mind ────────────────────────────┴─> announced again, not too often
//!   dry run: workers cover the span ─> the network is measured once ─> Rated
//! ```

use std::time::Duration;

use p2p::P2p;
use p2p::task;
use shared::config::Throughput;
use shared::control::{FromNetd, NetdInit};
use shared::network::{NetworkRate, RateSource};
use swarm::dht::driver::Dht;
use tokio::time::{Instant, timeout};
use tracing::info;

use super::span_move::MoveProgress;
use super::{Daemon, Fatal};
use crate::control::NetdOutbox;
use crate::join;
use crate::membership::{monitor, rate};
use crate::network_rate::{self, NetworkLink, RateFile};
use crate::offer::{Offer, RecordUpdate};

/// Time between two announcements for the sake of what is told here. Tests wait for it.
const RENEW_PERIOD: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 30 });
/// How patiently the monitor is asked. Tests wait for it.
const PATIENCE: monitor::Patience = match cfg!(test) {
    true => monitor::Patience { attempts: 2, pause: Duration::from_millis(10) },
    false => monitor::Patience::PETALS,
};
/// Time between two looks whether the measurement still holds.
const LOOK_PERIOD: Duration = Duration::from_secs(86400);
/// How long a dry run looks for somebody to measure with, or waits for another server that
/// measures.
const DRY_RUN_PATIENCE: Duration = Duration::from_secs(60);
/// Time between two such looks.
const DRY_RUN_PAUSE: Duration = Duration::from_secs(2);

/// Where the check by a monitor stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Check {
    Needed,
    UnderWay,
    Done,
}

/// What is known by now, announced or not.
#[derive(Debug)]
pub(super) struct Readiness {
    network: NetworkRate,
    measuring: bool,
    check: Check,
    renewed_at: Option<Instant>,
}

impl Readiness {
    pub(super) fn new(init: &NetdInit, offer: &Offer) -> Readiness {
        let network = offer.standing().network;
        if offer.tells_network() {
            info!(mbps = network.mbps(), source = %network.source, "network rate");
        }
        // A server that comes back was reached before.
        let is_first = init.served.is_none() && !offer.is_dry_run();
        Readiness {
            network,
            measuring: false,
            check: match init.config.monitor.is_some() && is_first {
                true => Check::Needed,
                false => Check::Done,
            },
            renewed_at: None,
        }
    }
}

/// What a dry run measures: it waits for another server that measures, and not for peers to come.
async fn measured_at_once(
    settings: &rate::MeasurementSettings,
    p2p: &P2p,
    dht: &Dht,
) -> Option<NetworkRate> {
    let attempts = async {
        loop {
            match rate::once(settings, p2p, dht).await {
                rate::MeasurementOutcome::Rate(rate) => break Some(rate),
                rate::MeasurementOutcome::Nobody => break None,
                rate::MeasurementOutcome::Busy => tokio::time::sleep(DRY_RUN_PAUSE).await,
            }
        }
    };
    timeout(DRY_RUN_PATIENCE, attempts).await.unwrap_or(None)
}

impl Daemon {
    /// The workers cover the span: goes online, unless something has to be known first. True if
    /// clients can come.
    pub(super) fn may_go_online(&mut self) -> bool {
        if self.is_paused {
            return false;
        }
        if self.offer.is_dry_run() {
            self.measure_network();
            return false;
        }
        if self.readiness.check == Check::Done {
            self.go_online();
            return true;
        }
        if let (Check::Needed, Some(url)) = (self.readiness.check, &self.init.config.monitor) {
            self.readiness.check = Check::UnderWay;
            let (url, peer_id) = (url.clone(), self.joined.peer_id.clone());
            let progress = self.progress.clone();
            task::spawn(async move {
                let result = monitor::validate(&url, &peer_id, PATIENCE).await;
                // Nobody listens when the daemon has ended.
                let _ = progress.send(MoveProgress::Monitored(result)).await;
            });
        }
        false
    }

    /// The monitor has spoken.
    pub(super) async fn monitored(&mut self, result: Result<(), String>, outbox: &NetdOutbox) {
        self.readiness.check = Check::Done;
        if let Err(message) = result {
            self.fatal = Some(Fatal::bad_config(message));
        } else if self.online.borrow().is_none() && self.workers.cover(self.offer.span) {
            self.go_online();
            outbox.send(FromNetd::Online).await;
        }
    }

    /// Measures the network in the background and again when the measurement has grown old, unless
    /// nobody asks for its rate.
    pub(super) fn measure_network(&mut self) {
        let config = &self.init.config;
        // Who limits what is sent wants no measurement that sends as much as it can.
        let is_limited = config.max_upload_bits_per_s.is_some();
        let is_given = is_limited || self.readiness.network.source == RateSource::Operator;
        if self.readiness.measuring || !self.offer.tells_network() {
            return;
        }
        self.readiness.measuring = true;
        let mut settings = rate::MeasurementSettings {
            file: config.rates_dir.as_deref().map(RateFile::new),
            service: config.network_test.clone(),
            take_kept: config.throughput == Throughput::Measure,
        };
        let (p2p, dht) = (self.joined.p2p.clone(), self.joined.dht.clone());
        let progress = self.progress.clone();
        if self.offer.is_dry_run() {
            task::spawn(async move {
                let rate = match is_given {
                    true => None,
                    false => measured_at_once(&settings, &p2p, &dht).await,
                };
                // Nobody listens when the daemon has ended.
                let _ = progress.send(MoveProgress::Network(rate)).await;
            });
        } else if !is_given {
            let service = self.online.subscribe();
            task::spawn(async move {
                let is_idle = move || {
                    let service = service.borrow();
                    service.as_ref().is_none_or(|service| service.active() == 0)
                };
                loop {
                    let rate = rate::keep(&settings, &p2p, &dht, &is_idle).await;
                    if progress.send(MoveProgress::Network(Some(rate))).await.is_err() {
                        return;
                    }
                    settings.take_kept = true;
                    tokio::time::sleep(LOOK_PERIOD).await;
                }
            });
        }
    }

    /// The network's rate is known, or nobody can be asked.
    pub(super) async fn network_measured(
        &mut self,
        rate: Option<NetworkRate>,
        outbox: &NetdOutbox,
    ) {
        if let Some(rate) = rate {
            let network = network_rate::of(None, Some(rate), &NetworkLink::of_system());
            if network != self.readiness.network {
                info!(mbps = network.mbps(), source = %network.source, "network rate");
            }
            let allowed = self.init.config.relay_bits_per_s;
            self.joined.p2p.relay_at(join::relay_bytes_per_s(allowed, network));
            self.readiness.network = network;
        }
        if self.offer.is_dry_run() {
            self.offer.set_standing(self.standing_now());
            let rating = self.offer.rating(&self.present_ups());
            outbox.send(FromNetd::Rated(rating)).await;
        }
    }

    fn standing_now(&self) -> RecordUpdate {
        RecordUpdate { network: self.readiness.network, using_relay: self.joined.relayed_now() }
    }

    /// Announces again if something has changed that the record tells.
    pub(super) fn renew(&mut self) {
        let (now, present) = (self.standing_now(), self.offer.standing());
        let too_soon = |at: Instant| at.elapsed() < RENEW_PERIOD;
        if now == present || self.switching || self.readiness.renewed_at.is_some_and(too_soon) {
            return;
        }
        if now.using_relay != present.using_relay {
            let way = match now.using_relay {
                true => "via relays",
                false => "directly",
            };
            info!(way, "server is accessible");
        }
        self.offer.set_standing(now);
        let ups = self.present_ups();
        self.announced.renew(&self.offer, &self.joined, &ups);
        self.readiness.renewed_at = Some(Instant::now());
    }
}
