//! Times to likely next servers, published so that clients can choose the chain that is fastest
//! between its servers. The node is told who the servers around are: it keeps places for them. Source: `ModuleAnnouncerThread` and `PingAggregator` in Petals
//! (`server/server.py`, `utils/ping.py`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use p2p::{CallError, P2p, PeerId};
use rand::seq::IteratorRandom;
use swarm::dht::driver::Dht;
use swarm::health::Pings;
use swarm::view::{self, BlockServers};
use tokio::sync::watch;
use tracing::debug;

use crate::membership::announce::ServerStatus;

/// Servers pinged among those of the middle blocks, and among those of the block after ours.
const SAMPLE: usize = 5;

/// Whom to ping.
#[derive(Clone, Debug)]
pub struct Neighbourhood {
    /// Prefix of the model.
    pub prefix: String,
    /// The blocks after our first one, up to the first after our last one: their servers are pinged.
    pub blocks: std::ops::Range<u32>,
    /// The block before our first one, if there is one: its servers push to us.
    pub before: Option<u32>,
    /// This peer.
    pub own: String,
    /// Time between two rounds.
    pub period: Duration,
}

/// Pings for ever and shows the times in `status`; they go out with the next announcement.
pub async fn keep(
    dht: Dht,
    p2p: P2p,
    neighbourhood: Neighbourhood,
    status: watch::Sender<ServerStatus>,
) {
    let mut times = Pings::default();
    loop {
        let Neighbourhood { prefix, blocks, before, own, period } = &neighbourhood;
        let first = before.unwrap_or(blocks.start);
        match view::read_blocks(&dht, prefix, first..blocks.end).await {
            Ok(servers) => {
                p2p.set_known_servers(peers(&servers));
                let unpinged = blocks.start.abs_diff(first) as usize;
                let pinged = servers.get(unpinged..).unwrap_or_default();
                let rounds = candidates(pinged, own).into_iter().map(|peer| ping(&dht, peer));
                for (peer, seconds) in futures::future::join_all(rounds).await {
                    times.measured(peer, seconds, Instant::now());
                }
                let now = by_peer(&times, Instant::now());
                status.send_if_modified(|status| {
                    let changed = status.next_pings != now;
                    status.next_pings = now;
                    changed
                });
            }
            Err(error) => debug!(%error, "cannot read which servers serve the next blocks"),
        }
        tokio::time::sleep(*period).await;
    }
}

/// Smoothed times, in the order of PeerIDs.
fn by_peer(times: &Pings<String>, now: Instant) -> Vec<(String, f64)> {
    let known = times.known(now).map(|(peer, seconds)| (peer.clone(), seconds));
    known.collect::<BTreeMap<_, _>>().into_iter().collect()
}

/// All servers of these blocks.
fn peers(blocks: &[BlockServers]) -> impl Iterator<Item = PeerId> {
    blocks.iter().flat_map(BTreeMap::keys).filter_map(|peer| peer.parse().ok())
}

/// Seconds to `peer`; infinite if it does not answer. Relayed servers do not serve the DHT, and
/// saying so is an answer.
async fn ping(dht: &Dht, peer: String) -> (String, f64) {
    let started = Instant::now();
    let seconds = match peer.parse::<PeerId>() {
        Ok(id) => match dht.ping(id).await {
            Ok(time) => time.as_secs_f64(),
            Err(CallError::NotSupported(_)) => started.elapsed().as_secs_f64(),
            Err(_) => f64::INFINITY,
        },
        Err(_) => f64::INFINITY,
    };
    (peer, seconds)
}

/// Some servers of all blocks but the last, and some of the last.
fn candidates(blocks: &[BlockServers], own: &str) -> BTreeSet<String> {
    let Some((last, middle)) = blocks.split_last() else {
        return BTreeSet::new();
    };
    let middle: BTreeSet<&String> = middle.iter().flat_map(BTreeMap::keys).collect();
    let mut random = rand::rng();
    let mut chosen = middle.into_iter().choose_multiple(&mut random, SAMPLE);
    chosen.extend(last.keys().choose_multiple(&mut random, SAMPLE));
    chosen.into_iter().filter(|peer| *peer != own).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use swarm::wire::records::{ServerInfo, ServerState};

    fn servers(range: std::ops::Range<u32>) -> BlockServers {
        range.map(|peer| (peer.to_string(), ServerInfo::new(ServerState::Online, 1.0))).collect()
    }

    #[test]
    fn times_are_smoothed_and_in_order() {
        let (mut times, now) = (Pings::default(), Instant::now());
        for (peer, seconds) in [("b", f64::INFINITY), ("a", 1.0), ("b", 3.0), ("a", 2.0)] {
            times.measured(peer.to_owned(), seconds, now);
        }
        let shown = by_peer(&times, now);
        let shown: Vec<String> = shown.iter().map(|(peer, s)| format!("{peer} {s:.1}")).collect();
        assert_eq!(shown, ["a 1.2", "b 3.0"]);
    }

    #[test]
    fn few_servers_are_pinged_and_never_ourselves() {
        assert!(candidates(&[], "me").is_empty());
        assert_eq!(candidates(&[servers(0..3), servers(3..4)], "1").len(), 3);
        let many = candidates(&[servers(0..50), servers(50..90), servers(100..150)], "me");
        let last = many.iter().filter(|peer| peer.len() == 3).count();
        assert_eq!((many.len(), last), (2 * SAMPLE, SAMPLE));
    }
}
