//! Peers that failed to answer a find are left alone for a while: 5 s, doubled with every failure
//! in a row. Source: `Blacklist` in `hivemind/dht/node.py`.

use p2p::PeerId;
use std::collections::HashMap;

/// Seconds of the first ban.
const BASE_S: f64 = 5.0;
/// Failures that still double the ban: 5 s · 2¹⁰ is well over an hour.
const MAX_DOUBLINGS: i32 = 10;
/// Peers remembered; beyond that new failures are not.
const MAX_PEERS: usize = 4096;
/// Seconds after the end of a ban for which its count is remembered.
const MEMORY_S: f64 = 3600.0;

#[derive(Debug, Default)]
pub(super) struct Blacklist(HashMap<PeerId, Ban>);

#[derive(Debug)]
struct Ban {
    until: f64,
    failures: i32,
}

impl Blacklist {
    pub(super) fn contains(&self, peer: &PeerId, now: f64) -> bool {
        self.0.get(peer).is_some_and(|ban| now < ban.until)
    }

    /// Notes a failure; failures during a ban do not lengthen it.
    pub(super) fn failed(&mut self, peer: PeerId, now: f64) {
        if self.contains(&peer, now) || (self.0.len() >= MAX_PEERS && !self.0.contains_key(&peer)) {
            return;
        }
        let ban = self.0.entry(peer).or_insert(Ban { until: now, failures: 0 });
        ban.until =
            now + BASE_S * f64::from(2_i32.pow(ban.failures.min(MAX_DOUBLINGS).unsigned_abs()));
        ban.failures += 1;
    }

    pub(super) fn succeeded(&mut self, peer: &PeerId) {
        self.0.remove(peer);
    }

    pub(super) fn drop_expired(&mut self, now: f64) {
        self.0.retain(|_, ban| now < ban.until + MEMORY_S);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bans_double_until_a_success() {
        let (mut blacklist, peer) = (Blacklist::default(), PeerId::random());
        blacklist.failed(peer, 100.0);
        assert!(blacklist.contains(&peer, 104.9) && !blacklist.contains(&peer, 105.0));
        blacklist.failed(peer, 105.0);
        assert!(blacklist.contains(&peer, 114.9) && !blacklist.contains(&peer, 115.0));
        blacklist.succeeded(&peer);
        blacklist.failed(peer, 200.0);
        assert!(!blacklist.contains(&peer, 205.0));
    }
}
