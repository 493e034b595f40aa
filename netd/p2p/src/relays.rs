//! Which relays a node that cannot be dialled is reached through. Pure: the driver reports what
//! happens and asks what to do next.
//!
//! ```text
//!   identified, offers to relay ──offer──> candidate ──next──> reservation under way ──its address──> in use
//!                                              ^                      |                                  |
//!                                              +── pause, doubling ───+── listener closed (relay gone) ──+
//! ```
//!
//! The reservation itself, and its renewal before it ends, are libp2p's. Source of the numbers:
//! go-libp2p `autorelay`.

use std::collections::HashMap;
use std::time::Duration;

use libp2p::{Multiaddr, PeerId, core::transport::ListenerId};
use tokio::time::Instant;

use super::addresses::{is_public, without_peer};
use super::limits::{MAX_RELAY_CANDIDATES, RELAY_BACKOFF_MAX, RELAY_BACKOFF_MIN, WANTED_RELAYS};

/// Relays, known and used.
#[derive(Debug, Default)]
pub(super) struct Relays {
    wanted: bool,
    candidates: HashMap<PeerId, RelayCandidate>,
    reservations: HashMap<ListenerId, Reservation>,
}

#[derive(Debug)]
struct RelayCandidate {
    /// Where it was reached, without `/p2p/ID`.
    addr: Multiaddr,
    /// The shortest that was measured.
    round_trip: Option<Duration>,
    failures: u32,
    not_before: Option<Instant>,
}

#[derive(Debug)]
struct Reservation {
    relay: PeerId,
    /// Addresses through this relay, without our own `/p2p/ID`; empty until it has agreed.
    addrs: Vec<Multiaddr>,
}

impl Relays {
    /// Whether the node wants relays from now on. Those in use stay until they end: giving one back
    /// while its relay answers would race inside libp2p's client, which panics then.
    pub(super) fn want(&mut self, wanted: bool) {
        self.wanted = wanted;
    }

    /// A peer that we reached at `addr` offers to relay.
    pub(super) fn offer(&mut self, peer: PeerId, addr: Multiaddr) {
        if let Some(known) = self.candidates.get_mut(&peer) {
            known.addr = addr;
            return;
        }
        if self.candidates.len() >= MAX_RELAY_CANDIDATES {
            let worst = self.candidates.iter().max_by_key(|(_, c)| c.failures);
            match worst.map(|(peer, candidate)| (*peer, candidate.failures)) {
                Some((peer, failures)) if failures > 0 => drop(self.candidates.remove(&peer)),
                _ => return,
            }
        }
        let candidate = RelayCandidate { addr, round_trip: None, failures: 0, not_before: None };
        self.candidates.insert(peer, candidate);
    }

    /// A ping of a peer that may offer to relay took so long, there and back.
    pub(super) fn pinged(&mut self, peer: &PeerId, round_trip: Duration) {
        if let Some(candidate) = self.candidates.get_mut(peer) {
            let known = candidate.round_trip.unwrap_or(round_trip);
            candidate.round_trip = Some(known.min(round_trip));
        }
    }

    /// A peer offers no longer to relay.
    pub(super) fn withdraw(&mut self, peer: &PeerId) {
        self.candidates.remove(peer);
    }

    /// The next relay to reserve at, if one is missing and can be asked now: those that failed
    /// least, then those that the whole world can dial, then the nearest: whatever a client sends
    /// goes that way in addition.
    pub(super) fn next(&self, now: Instant) -> Option<(PeerId, Multiaddr)> {
        if !self.wanted || self.reservations.len() >= WANTED_RELAYS {
            return None;
        }
        let used = |peer: &PeerId| self.reservations.values().any(|r| r.relay == *peer);
        let free = self.candidates.iter().filter(|(peer, candidate)| {
            !used(peer) && candidate.not_before.is_none_or(|at| at <= now)
        });
        let best = free.min_by_key(|(peer, c)| {
            let round_trip = c.round_trip.unwrap_or(Duration::MAX);
            (c.failures, !is_public(&c.addr), round_trip, **peer)
        })?;
        Some((*best.0, best.1.addr.clone()))
    }

    /// A reservation is being made.
    pub(super) fn reserving(&mut self, listener: ListenerId, relay: PeerId) {
        let addrs = Vec::new();
        self.reservations.insert(listener, Reservation { relay, addrs });
    }

    /// A relay could not be asked at all.
    pub(super) fn failed(&mut self, relay: &PeerId, now: Instant) {
        if let Some(candidate) = self.candidates.get_mut(relay) {
            let pause = RELAY_BACKOFF_MIN.saturating_mul(1 << candidate.failures.min(16));
            candidate.failures = candidate.failures.saturating_add(1);
            candidate.not_before = Some(now + pause.min(RELAY_BACKOFF_MAX));
        }
    }

    /// A listener has a new address; whether it is that of a reservation.
    pub(super) fn agreed(&mut self, listener: ListenerId, addr: Multiaddr) -> bool {
        let Some(reservation) = self.reservations.get_mut(&listener) else {
            return false;
        };
        let addr = without_peer(addr);
        if !reservation.addrs.contains(&addr) {
            reservation.addrs.push(addr);
        }
        if let Some(candidate) = self.candidates.get_mut(&reservation.relay) {
            candidate.failures = 0;
        }
        true
    }

    /// A listener has ended; the relay if it was one.
    pub(super) fn closed(&mut self, listener: ListenerId, now: Instant) -> Option<PeerId> {
        let reservation = self.reservations.remove(&listener)?;
        self.failed(&reservation.relay, now);
        Some(reservation.relay)
    }

    /// Whether this peer relays for us.
    pub(super) fn uses(&self, peer: &PeerId) -> bool {
        self.reservations.values().any(|r| r.relay == *peer)
    }

    /// All addresses through relays.
    pub(super) fn addrs(&self) -> Vec<Multiaddr> {
        let mut addrs: Vec<Multiaddr> = self
            .reservations
            .values()
            .flat_map(|reservation| reservation.addrs.iter().cloned())
            .collect();
        addrs.sort_unstable();
        addrs.dedup();
        addrs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(text: &str) -> Multiaddr {
        text.parse().expect("address")
    }

    fn wanting() -> Relays {
        let mut relays = Relays::default();
        relays.want(true);
        relays
    }

    #[test]
    fn public_relays_come_first_and_no_more_than_wanted_are_used() {
        let now = Instant::now();
        let [local, first, second] = std::array::from_fn(|_| PeerId::random());
        let mut relays = Relays::default();
        relays.offer(local, addr("/ip4/10.0.0.1/tcp/1"));
        assert_eq!(relays.next(now), None, "not wanted");
        relays.want(true);
        assert_eq!(relays.next(now).expect("one").0, local);
        relays.offer(first, addr("/ip4/5.6.7.8/tcp/1"));
        relays.offer(second, addr("/ip4/5.6.7.9/tcp/1"));
        for _ in 0..WANTED_RELAYS {
            let (relay, _) = relays.next(now).expect("a public one");
            assert_ne!(relay, local);
            relays.reserving(ListenerId::next(), relay);
            assert!(relays.uses(&relay));
        }
        assert_eq!(relays.next(now), None, "enough");
        relays.want(false);
        let listener = *relays.reservations.keys().next().expect("one is used");
        relays.closed(listener, now);
        assert_eq!(relays.next(now), None, "not wanted any more");
        assert!(relays.uses(&relays.reservations.values().next().expect("the other").relay));
    }

    #[test]
    fn the_nearest_relay_comes_first_by_its_shortest_round_trip() {
        let now = Instant::now();
        let [near, far, unknown] = std::array::from_fn(|_| PeerId::random());
        let mut relays = wanting();
        relays.pinged(&near, Duration::from_millis(1));
        for peer in [unknown, far, near] {
            relays.offer(peer, addr("/ip4/5.6.7.8/tcp/1"));
        }
        for (peer, times) in [(far, [100, 90]), (near, [10, 500])] {
            for ms in times {
                relays.pinged(&peer, Duration::from_millis(ms));
            }
        }
        let mut order = Vec::new();
        while let Some((relay, _)) = relays.next(now) {
            order.push(relay);
            relays.withdraw(&relay);
        }
        assert_eq!(order, [near, far, unknown]);
    }

    #[test]
    fn a_relay_that_dies_is_replaced_and_asked_again_after_a_bounded_pause() {
        let (now, relay, other) = (Instant::now(), PeerId::random(), PeerId::random());
        let mut relays = wanting();
        relays.offer(relay, addr("/ip4/5.6.7.8/tcp/1"));
        let listener = ListenerId::next();
        relays.reserving(listener, relay);
        let circuit = addr("/ip4/5.6.7.8/tcp/1/p2p-circuit");
        assert!(relays.agreed(listener, circuit.clone()));
        assert_eq!(relays.addrs(), [circuit]);
        assert!(!relays.agreed(ListenerId::next(), addr("/ip4/1.2.3.4/tcp/1")));

        assert_eq!(relays.closed(listener, now), Some(relay));
        assert!(relays.addrs().is_empty());
        assert_eq!(relays.next(now), None, "pauses");
        relays.offer(other, addr("/ip4/5.6.7.9/tcp/1"));
        assert_eq!(relays.next(now).expect("another").0, other);
        relays.withdraw(&other);
        assert!(relays.next(now + RELAY_BACKOFF_MIN).is_some());
        for _ in 0..100 {
            relays.failed(&relay, now);
        }
        assert_eq!(relays.next(now + RELAY_BACKOFF_MAX - RELAY_BACKOFF_MIN), None);
        assert!(relays.next(now + RELAY_BACKOFF_MAX).is_some());
        assert_eq!(relays.closed(listener, now), None, "closed already");
    }

    #[test]
    fn candidates_are_bounded_and_bad_ones_make_room() {
        let mut relays = wanting();
        let peers: Vec<PeerId> = (0..MAX_RELAY_CANDIDATES).map(|_| PeerId::random()).collect();
        for peer in &peers {
            relays.offer(*peer, addr("/ip4/5.6.7.8/tcp/1"));
        }
        let late = PeerId::random();
        relays.offer(late, addr("/ip4/5.6.7.9/tcp/1"));
        assert!(!relays.candidates.contains_key(&late), "no room");
        relays.failed(&peers[3], Instant::now());
        relays.offer(late, addr("/ip4/5.6.7.9/tcp/1"));
        assert!(relays.candidates.contains_key(&late));
        assert!(!relays.candidates.contains_key(&peers[3]));
        assert_eq!(relays.candidates.len(), MAX_RELAY_CANDIDATES);
    }
}
