//! Pools of bytes: what peers announce is reserved before it is read, from the pools of the peer, its
//! IP net and the process at once, in the manner of go-libp2p's resource manager. A PeerID costs
//! nothing, so a pool per peer alone would be no bound.
//!
//! ```text
//!   process ──> net (an IPv4 address, an IPv6 /56) ──> peer        a reservation counts in all three
//! ```
//! Loopback and private nets have no pool of their own: the operator's whole swarm may share one
//! such address, and behind it nobody is a stranger.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use libp2p::PeerId;
use tokio::sync::Notify;

use super::nets::Net;

/// Bytes of each scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PoolBounds {
    /// Of all peers.
    pub total: usize,
    /// Of a public IP net.
    pub net: usize,
    /// Of one peer.
    pub peer: usize,
}

/// What is reserved. Clones of the [`Arc`] are handles of the same pools.
#[derive(Debug)]
pub(super) struct Pools {
    bounds: PoolBounds,
    held: Mutex<Held>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Held {
    total: usize,
    nets: HashMap<Net, usize>,
    peers: HashMap<PeerId, usize>,
}

/// Bytes that count until it is dropped.
#[derive(Debug)]
pub(super) struct Reservation {
    pools: Arc<Pools>,
    peer: PeerId,
    net: Net,
    bytes: usize,
}

impl Pools {
    pub(super) fn new(bounds: PoolBounds) -> Arc<Self> {
        Arc::new(Self { bounds, held: Mutex::default(), freed: Notify::new() })
    }

    /// Reserves now; `None` if any of the pools would overflow.
    pub(super) fn try_reserve(
        self: &Arc<Self>,
        peer: PeerId,
        net: Net,
        bytes: usize,
    ) -> Option<Reservation> {
        let mut held = self.lock();
        let of_net = held.nets.get(&net).copied().unwrap_or(0);
        let of_peer = held.peers.get(&peer).copied().unwrap_or(0);
        let fits = |held: usize, bound: usize| held.saturating_add(bytes) <= bound;
        let net_bound = if net.is_public() { self.bounds.net } else { self.bounds.total };
        if !fits(held.total, self.bounds.total)
            || !fits(of_net, net_bound)
            || !fits(of_peer, self.bounds.peer)
        {
            return None;
        }
        held.total += bytes;
        held.nets.insert(net, of_net + bytes);
        held.peers.insert(peer, of_peer + bytes);
        Some(Reservation { pools: Arc::clone(self), peer, net, bytes })
    }

    /// Reserves as soon as there is room. Dropping the future gives up.
    pub(super) async fn reserve(
        self: &Arc<Self>,
        peer: PeerId,
        net: Net,
        bytes: usize,
    ) -> Reservation {
        loop {
            // Before the attempt, so that what is freed in between is not missed.
            let freed = self.freed.notified();
            match self.try_reserve(peer, net, bytes) {
                Some(reservation) => return reservation,
                None => freed.await,
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut held = self.pools.lock();
        held.total = held.total.saturating_sub(self.bytes);
        release(&mut held.nets, self.net, self.bytes);
        release(&mut held.peers, self.peer, self.bytes);
        drop(held);
        self.pools.freed.notify_waiters();
    }
}

fn release<K: std::hash::Hash + Eq>(held: &mut HashMap<K, usize>, key: K, bytes: usize) {
    if let std::collections::hash_map::Entry::Occupied(mut entry) = held.entry(key) {
        *entry.get_mut() = entry.get().saturating_sub(bytes);
        if *entry.get() == 0 {
            entry.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BOUNDS: PoolBounds = PoolBounds { total: 100, net: 60, peer: 40 };

    fn net(last: u8) -> Net {
        Net::of([5, 6, 7, last].into())
    }

    #[test]
    fn each_scope_has_its_bound() {
        let pools = Pools::new(BOUNDS);
        let peers: Vec<PeerId> = (0..4).map(|_| PeerId::random()).collect();
        let first = pools.try_reserve(peers[0], net(1), 40).expect("free");
        assert!(pools.try_reserve(peers[0], net(1), 1).is_none(), "of one peer");
        let _second = pools.try_reserve(peers[1], net(1), 20).expect("free");
        assert!(pools.try_reserve(peers[2], net(1), 1).is_none(), "of one net");
        let _third = pools.try_reserve(peers[2], net(2), 40).expect("free");
        assert!(pools.try_reserve(peers[3], net(3), 1).is_none(), "of all");
        drop(first);
        let local = Net::of([127, 0, 0, 1].into());
        assert!(pools.try_reserve(peers[3], local, 40).is_some(), "freed");
    }

    #[tokio::test]
    async fn who_waits_is_served_when_bytes_are_freed() {
        let (pools, peer) = (Pools::new(BOUNDS), PeerId::random());
        let held = pools.reserve(peer, net(1), 40).await;
        let waiting = tokio::spawn({
            let pools = Arc::clone(&pools);
            async move { pools.reserve(peer, net(1), 40).await.bytes }
        });
        tokio::task::yield_now().await;
        drop(held);
        assert_eq!(waiting.await.expect("served"), 40);
    }

    proptest! {
        #[test]
        fn sums_hold_and_everything_is_given_back(
            steps in prop::collection::vec((0u8..3, 0usize..4, 0usize..50, any::<bool>()), 0..200),
        ) {
            let pools = Pools::new(BOUNDS);
            let peers: Vec<PeerId> = (0..4).map(|_| PeerId::random()).collect();
            let mut held: Vec<Reservation> = Vec::new();
            for (number, peer, bytes, drops) in steps {
                if drops && !held.is_empty() {
                    held.remove(bytes % held.len());
                }
                held.extend(pools.try_reserve(peers[peer], net(number), bytes));
                let sum = |of: &dyn Fn(&&Reservation) -> bool| -> usize {
                    held.iter().filter(of).map(|one| one.bytes).sum()
                };
                prop_assert!(sum(&|_| true) <= BOUNDS.total);
                prop_assert_eq!(sum(&|_| true), pools.lock().total);
                for peer in &peers {
                    prop_assert!(sum(&|one| one.peer == *peer) <= BOUNDS.peer);
                }
                for number in 0..3 {
                    prop_assert!(sum(&|one| one.net == net(number)) <= BOUNDS.net);
                }
            }
            held.clear();
            let left = pools.lock();
            prop_assert_eq!((left.total, left.peers.len()), (0, 0));
        }
    }
}
