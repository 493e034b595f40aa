//! This server's records in the DHT, from JOINING to OFFLINE.

use std::time::Duration;

use p2p::task;
use shared::control::WorkerUp;
use shared::figures::Announcement;
use swarm::dht::driver::Dht;
use swarm::wire::records::ServerState;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::Instant;
use tracing::warn;

use super::{Offer, status};
use crate::join::Joined;
use crate::membership::announce::{self, AnnounceConfig, Announcer, ServerStatus};
use crate::membership::rebalance::{common, without};
use crate::pings;

/// How long a move waits for the announcement of the new place before it counts as done; the
/// announcer goes on.
const MOVE_PATIENCE: Duration = Duration::from_secs(20);

/// This server's records, as long as they are kept alive.
#[derive(Debug)]
pub struct Announced {
    phase: AnnouncedPhase,
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "there is one")]
enum AnnouncedPhase {
    Joining {
        task: JoinHandle<()>,
        config: Box<AnnounceConfig>,
        dht: Dht,
    },
    Announcing {
        status: watch::Sender<ServerStatus>,
        announcer: Announcer,
        pings: Option<AbortHandle>,
    },
    Ended,
}

impl Announced {
    /// What peers are told now.
    pub fn state(&self) -> Announcement {
        match &self.phase {
            AnnouncedPhase::Joining { .. } => Announcement::Joining,
            AnnouncedPhase::Announcing { status, .. } => match status.borrow().state {
                ServerState::Online => Announcement::Online,
                ServerState::Joining => Announcement::Joining,
                ServerState::Offline => Announcement::Offline,
            },
            AnnouncedPhase::Ended => Announcement::Nothing,
        }
    }

    /// From JOINING to ONLINE.
    pub fn online(
        &mut self,
        offer: &Offer,
        joined: &Joined,
        ups: &[WorkerUp],
        cache_tokens_left: u64,
    ) {
        if let AnnouncedPhase::Joining { task, .. } = &self.phase {
            task.abort();
        }
        let config = AnnounceConfig { info: offer.record(ups), ..offer.config.clone() };
        let first = status(ServerState::Online, Some(cache_tokens_left));
        let (status, receiver) = watch::channel(first);
        let announcer = Announcer::start(joined.dht.clone(), config, receiver);
        let (dht, p2p) = (joined.dht.clone(), joined.p2p.clone());
        let pings = pings::keep(dht, p2p, offer.neighbourhood(), status.clone());
        let pings = Some(task::spawn(pings).abort_handle());
        self.phase = AnnouncedPhase::Announcing { status, announcer, pings };
    }

    /// Announces the same blocks in the same state with a record that has changed.
    pub fn renew(&mut self, offer: &Offer, joined: &Joined, ups: &[WorkerUp]) {
        match std::mem::replace(&mut self.phase, AnnouncedPhase::Ended) {
            AnnouncedPhase::Joining { task, .. } => {
                task.abort();
                *self = offer.announce_joining(joined);
            }
            AnnouncedPhase::Announcing { status, announcer, pings } => {
                announcer.stop();
                let config = AnnounceConfig { info: offer.record(ups), ..offer.config.clone() };
                let announcer = Announcer::start(joined.dht.clone(), config, status.subscribe());
                self.phase = AnnouncedPhase::Announcing { status, announcer, pings };
            }
            AnnouncedPhase::Ended => {}
        }
    }

    /// From ONLINE at `from` to ONLINE at `to`, both of which are served now. In an order in which
    /// no reader sees blocks between the two (readers join the records of a peer into one
    /// span): what is left goes OFFLINE first, then the blocks in both change their record,
    /// then the new ones go ONLINE. The order is checked in [`crate::membership::rebalance`].
    pub async fn move_to(
        &mut self,
        from: &Offer,
        to: &Offer,
        joined: &Joined,
        ups: &[WorkerUp],
        cache_tokens_left: u64,
    ) {
        self.stop();
        let (dht, gone) = (&joined.dht, without(from.span, to.span));
        let offline = status(ServerState::Offline, None);
        if !announce::store_under(dht, &from.config, &offline, &gone).await {
            warn!(blocks = %from.span, "announcing that this server left its blocks timed out, retrying");
            from.take_back(joined, to.span);
        }
        let config = AnnounceConfig { info: to.record(ups), ..to.config.clone() };
        let online = status(ServerState::Online, Some(cache_tokens_left));
        let both = common(from.span, to.span);
        announce::store_under(dht, &config, &online, &both).await;
        self.online(to, joined, ups, cache_tokens_left);
        if let AnnouncedPhase::Announcing { announcer, .. } = &self.phase {
            let mut announced = announcer.announced();
            let there = announced.wait_for(|state| *state == Some(ServerState::Online));
            if tokio::time::timeout(MOVE_PATIENCE, there).await.is_err() {
                warn!(blocks = %to.span, "announcing the new span timed out, retrying");
            }
        }
    }

    /// Announces nothing more, and does not say so: what follows replaces it.
    pub fn stop(&mut self) {
        match std::mem::replace(&mut self.phase, AnnouncedPhase::Ended) {
            AnnouncedPhase::Announcing { announcer, pings, .. } => {
                pings.iter().for_each(AbortHandle::abort);
                announcer.stop();
            }
            AnnouncedPhase::Joining { task, .. } => task.abort(),
            AnnouncedPhase::Ended => {}
        }
    }

    /// JOINING records that `task` keeps alive.
    pub(super) fn joining(task: JoinHandle<()>, config: AnnounceConfig, dht: Dht) -> Announced {
        Announced { phase: AnnouncedPhase::Joining { task, config: Box::new(config), dht } }
    }

    /// Records that nobody keeps alive.
    pub fn none() -> Announced {
        Announced { phase: AnnouncedPhase::Ended }
    }

    /// The free cache of the next announcement.
    pub fn cache_tokens_left(&self, tokens: u64) {
        if let AnnouncedPhase::Announcing { status, .. } = &self.phase {
            status.send_if_modified(|status| {
                let changed = status.cache_tokens_left != Some(tokens);
                status.cache_tokens_left = Some(tokens);
                changed
            });
        }
    }

    /// Announces OFFLINE, in the background.
    pub fn offline(&mut self) {
        match &self.phase {
            AnnouncedPhase::Announcing { status, pings, .. } => {
                // The announcer ends with the last sender of its status.
                pings.iter().for_each(AbortHandle::abort);
                status.send_modify(|status| status.state = ServerState::Offline);
            }
            AnnouncedPhase::Joining { .. } => {
                if let AnnouncedPhase::Joining { task, config, dht } =
                    std::mem::replace(&mut self.phase, AnnouncedPhase::Ended)
                {
                    task.abort();
                    let (sender, receiver) = watch::channel(status(ServerState::Offline, None));
                    let announcer = Announcer::start(dht, *config, receiver);
                    self.phase =
                        AnnouncedPhase::Announcing { status: sender, announcer, pings: None };
                }
            }
            AnnouncedPhase::Ended => {}
        }
    }

    /// Announces OFFLINE and waits until that is done, at most until `deadline`.
    pub async fn end(&mut self, deadline: Instant) {
        self.offline();
        let ended = match std::mem::replace(&mut self.phase, AnnouncedPhase::Ended) {
            AnnouncedPhase::Announcing { announcer, .. } => announcer.finished(deadline).await,
            _ => true,
        };
        if !ended {
            let late = Duration::as_secs_f64(&deadline.elapsed());
            warn!(late, "announcing OFFLINE timed out; clients may still try this server");
        }
    }
}
