//! A look at servers that are known by their records alone. A record costs nothing, so that what
//! it claims counts little until its server has answered: several are asked at once, drawn by lot
//! and not by what they claim, until servers that answered cover the blocks.

use std::collections::HashSet;
use std::ops::Range;
use std::pin::pin;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use p2p::{CallError, PeerId};
use rand::seq::SliceRandom;

use super::{KnownServers, Swarm};
use swarm::routing::Leg;

/// Servers that are asked at once.
pub(super) const MAX_ASKED: usize = 32;
/// Such looks before one route.
pub(super) const MAX_SURVEYS: usize = 8;
/// How long a look takes at most. Who answers later is heard in the next one.
const MAX_TIME: Duration = Duration::from_secs(3);
/// From then on a look ends as soon as the blocks are covered.
const ENOUGH_AFTER: Duration = Duration::from_secs(1);
/// Time between two such looks at what was heard.
const LOOK: Duration = Duration::from_millis(50);

impl Swarm {
    /// Asks these servers.
    pub(super) async fn survey(&self, asked: Vec<PeerId>, blocks: Range<u32>) {
        let began = Instant::now();
        let ping = |peer| async move { (peer, self.dht.ping(peer).await) };
        let mut pings: FuturesUnordered<_> = asked.into_iter().map(ping).collect();
        let mut end = pin!(tokio::time::sleep(MAX_TIME));
        loop {
            tokio::select! {
                heard = pings.next() => match heard {
                    Some((peer, ping)) => self.known.lock().heard(peer, ping, Instant::now()),
                    None => return,
                },
                () = &mut end => return,
                () = tokio::time::sleep(LOOK), if began.elapsed() >= ENOUGH_AFTER => {}
            }
            if began.elapsed() >= ENOUGH_AFTER && self.known.lock().is_covered(blocks.clone()) {
                return;
            }
        }
    }
}

impl KnownServers {
    /// What became of a ping. A relayed server serves no DHT: that it says so is an answer.
    pub(super) fn heard(&mut self, peer: PeerId, ping: Result<Duration, CallError>, now: Instant) {
        match ping {
            Ok(ping) => {
                self.pings.measured(peer, ping.as_secs_f64(), now);
                self.answers.heard(peer, now);
            }
            Err(CallError::Unreachable { .. } | CallError::Timeout(_)) => {
                self.pings.measured(peer, f64::INFINITY, now);
            }
            Err(_) => self.answers.heard(peer, now),
        }
    }

    /// Whether servers that have answered serve all `blocks`.
    fn is_covered(&self, blocks: Range<u32>) -> bool {
        let candidates = self.candidates();
        let answered = || candidates.iter().filter(|candidate| candidate.has_answered);
        blocks.into_iter().all(|block| answered().any(|c| c.blocks.contains(&block)))
    }

    /// Servers that a look should ask, [`MAX_ASKED`] at most: those that were not heard of lately
    /// first, in an order that nobody can choose.
    pub(super) fn to_ask(&self, is_wanted: impl Fn(&PeerId) -> bool) -> Vec<PeerId> {
        let now = Instant::now();
        let mut peers: Vec<PeerId> = self.servers.iter().filter_map(super::peer).collect();
        peers.retain(|peer| is_wanted(peer));
        peers.shuffle(&mut rand::rng());
        peers.sort_by_key(|peer| self.pings.seconds(peer, now).is_some());
        peers.truncate(MAX_ASKED);
        peers
    }

    /// Servers to ask before `route` is taken, because it goes over some that never answered.
    pub(super) fn strangers(&self, route: &[Leg<PeerId>], asked: &HashSet<PeerId>) -> Vec<PeerId> {
        let now = Instant::now();
        let is_stranger = |peer: &PeerId| {
            !self.answers.has_answered(peer, now) && self.pings.seconds(peer, now).is_none()
        };
        match route.iter().any(|leg| !self.answers.has_answered(&leg.peer, now)) {
            true => self.to_ask(|peer| is_stranger(peer) && !asked.contains(peer)),
            false => Vec::new(),
        }
    }
}
