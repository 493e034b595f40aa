//! The book of the pools: who holds what, who waits, and who is next. Pure.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    hash::Hash,
};

use libp2p::PeerId;

use crate::nets::Net;

/// Bytes of each scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolBounds {
    pub total: usize,
    /// Of a public IP net.
    pub net: usize,
    pub peer: usize,
}

impl PoolBounds {
    /// Of `total` bytes a net may have half, and a peer a quarter.
    pub const fn of(total: usize) -> Self {
        Self { total, net: total / 2, peer: total / 4 }
    }
}

/// Bytes for a peer, which is in a net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MemoryClaim {
    pub peer: PeerId,
    pub net: Net,
    pub bytes: usize,
}

/// Who holds what, and who waits, each with a `W` to be told by.
#[derive(Debug)]
pub(super) struct Book<W> {
    bounds: PoolBounds,
    total: usize,
    nets: HashMap<Net, usize>,
    peers: HashMap<PeerId, usize>,
    /// The asks of each peer in their order; no queue is empty.
    waiting: HashMap<PeerId, VecDeque<QueuedClaim<W>>>,
    next_ticket: u64,
}

#[derive(Debug)]
struct QueuedClaim<W> {
    ticket: u64,
    claim: MemoryClaim,
    told: W,
}

impl<W> Book<W> {
    pub(super) fn new(bounds: PoolBounds) -> Self {
        Self {
            bounds,
            total: 0,
            nets: HashMap::new(),
            peers: HashMap::new(),
            waiting: HashMap::new(),
            next_ticket: 0,
        }
    }

    /// Raises each bound to at least so many bytes.
    pub(super) fn raise(&mut self, bytes: usize) {
        let PoolBounds { total, net, peer } = self.bounds;
        self.bounds =
            PoolBounds { total: total.max(bytes), net: net.max(bytes), peer: peer.max(bytes) };
    }

    /// What a peer asks for, at most a whole pool.
    pub(super) fn claim(&self, peer: PeerId, net: Net, bytes: usize) -> MemoryClaim {
        let most = self.bounds.peer.min(self.net_bound(net)).min(self.bounds.total);
        MemoryClaim { peer, net, bytes: bytes.min(most) }
    }

    /// Puts an ask behind the others of its peer; its ticket.
    pub(super) fn wait(&mut self, claim: MemoryClaim, told: W) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.waiting.entry(claim.peer).or_default().push_back(QueuedClaim { ticket, claim, told });
        ticket
    }

    /// Takes an ask out; false if it is not in there any more.
    pub(super) fn forget(&mut self, claim: &MemoryClaim, ticket: u64) -> bool {
        let Entry::Occupied(mut of_peer) = self.waiting.entry(claim.peer) else {
            return false;
        };
        let queue = of_peer.get_mut();
        let before = queue.len();
        queue.retain(|waiting| waiting.ticket != ticket);
        let was_there = queue.len() < before;
        if queue.is_empty() {
            of_peer.remove();
        }
        was_there
    }

    pub(super) fn someone_waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether all pools have room.
    pub(super) fn has_room(&self, claim: &MemoryClaim) -> bool {
        self.has_room_of_its_own(claim) && fits(self.total, claim.bytes, self.bounds.total)
    }

    /// The next ask that is granted, counted already; `None` if none can be now.
    pub(super) fn next(&mut self) -> Option<W> {
        let first_of_each = self.waiting.values().filter_map(VecDeque::front);
        let ready = first_of_each.filter(|waiting| self.has_room_of_its_own(&waiting.claim));
        let next = ready.min_by_key(|waiting| {
            let claim = &waiting.claim;
            (self.of_net(claim.net), self.of_peer(&claim.peer), waiting.ticket)
        })?;
        // Where all together leave it no room, nobody goes before it.
        let claim = self.has_room(&next.claim).then_some(next.claim)?;
        let Entry::Occupied(mut of_peer) = self.waiting.entry(claim.peer) else {
            return None;
        };
        let granted = of_peer.get_mut().pop_front();
        if of_peer.get().is_empty() {
            of_peer.remove();
        }
        self.take(&claim);
        granted.map(|granted| granted.told)
    }

    /// Counts a claim.
    pub(super) fn take(&mut self, claim: &MemoryClaim) {
        self.total += claim.bytes;
        *self.nets.entry(claim.net).or_default() += claim.bytes;
        *self.peers.entry(claim.peer).or_default() += claim.bytes;
    }

    /// Counts a claim no more.
    pub(super) fn give_back(&mut self, claim: &MemoryClaim) {
        self.total = self.total.saturating_sub(claim.bytes);
        release(&mut self.nets, claim.net, claim.bytes);
        release(&mut self.peers, claim.peer, claim.bytes);
    }

    fn has_room_of_its_own(&self, claim: &MemoryClaim) -> bool {
        fits(self.of_net(claim.net), claim.bytes, self.net_bound(claim.net))
            && fits(self.of_peer(&claim.peer), claim.bytes, self.bounds.peer)
    }

    fn net_bound(&self, net: Net) -> usize {
        if net.is_public() { self.bounds.net } else { self.bounds.total }
    }

    fn of_net(&self, net: Net) -> usize {
        self.nets.get(&net).copied().unwrap_or(0)
    }

    fn of_peer(&self, peer: &PeerId) -> usize {
        self.peers.get(peer).copied().unwrap_or(0)
    }
}

fn fits(held: usize, bytes: usize, bound: usize) -> bool {
    held.saturating_add(bytes) <= bound
}

fn release<K: Hash + Eq>(held: &mut HashMap<K, usize>, key: K, bytes: usize) {
    if let Entry::Occupied(mut entry) = held.entry(key) {
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

    fn claim(peer: PeerId, last: u8, bytes: usize) -> MemoryClaim {
        MemoryClaim { peer, net: net(last), bytes }
    }

    #[test]
    fn each_scope_has_its_bound() {
        let mut book = Book::<()>::new(BOUNDS);
        let peers: Vec<PeerId> = (0..4).map(|_| PeerId::random()).collect();
        let first = claim(peers[0], 1, 40);
        book.take(&first);
        assert!(!book.has_room(&claim(peers[0], 1, 1)), "of one peer");
        book.take(&claim(peers[1], 1, 20));
        assert!(!book.has_room(&claim(peers[2], 1, 1)), "of one net");
        book.take(&claim(peers[2], 2, 40));
        assert!(!book.has_room(&claim(peers[3], 3, 1)), "of all");
        book.give_back(&first);
        let local = MemoryClaim { net: Net::of([127, 0, 0, 1].into()), ..claim(peers[3], 3, 40) };
        assert!(book.has_room(&local), "freed");
    }

    #[test]
    fn the_net_that_holds_least_goes_first_and_nobody_overtakes_it() {
        let mut book = Book::new(BOUNDS);
        let peers: Vec<PeerId> = (0..4).map(|_| PeerId::random()).collect();
        let held = claim(peers[0], 1, 40);
        book.take(&held);
        book.take(&claim(peers[1], 2, 40));
        book.wait(claim(peers[1], 2, 1), "too much of its own peer");
        book.wait(claim(peers[2], 2, 20), "small, of a net that holds some");
        book.wait(claim(peers[3], 3, 30), "of a net that holds none");
        assert_eq!(book.next(), None, "20 bytes are free, and the first wants 30");
        book.give_back(&held);
        assert_eq!(book.next(), Some("of a net that holds none"));
        assert_eq!(book.next(), Some("small, of a net that holds some"));
        assert_eq!(book.next(), None);
        assert!(book.someone_waits());
    }

    proptest! {
        #[test]
        fn sums_hold_everything_is_given_back_and_nobody_waits_for_ever(
            steps in prop::collection::vec((0u8..3, 0usize..4, 0usize..40, 0u8..3), 0..200),
        ) {
            let mut book = Book::new(BOUNDS);
            let peers: Vec<PeerId> = (0..4).map(|_| PeerId::random()).collect();
            let (mut held, mut waiting) = (Vec::<MemoryClaim>::new(), Vec::<(u64, MemoryClaim)>::new());
            for (number, peer, bytes, what) in steps {
                match what {
                    0 if !held.is_empty() => book.give_back(&held.remove(bytes % held.len())),
                    1 if !waiting.is_empty() => {
                        let (ticket, claim) = waiting.remove(bytes % waiting.len());
                        prop_assert!(book.forget(&claim, ticket));
                        prop_assert!(!book.forget(&claim, ticket));
                    }
                    _ => {
                        let claim = book.claim(peers[peer], net(number), bytes);
                        let ticket = book.wait(claim, claim);
                        waiting.push((ticket, claim));
                    }
                }
                while let Some(claim) = book.next() {
                    let first = waiting.iter().position(|(_, waits)| waits.peer == claim.peer);
                    let (_, expected) = waiting.remove(first.expect("it waited"));
                    prop_assert_eq!(expected, claim, "the asks of a peer keep their order");
                    held.push(claim);
                }
                let sum = |of: &dyn Fn(&&MemoryClaim) -> bool| -> usize {
                    held.iter().filter(of).map(|one| one.bytes).sum()
                };
                prop_assert!(sum(&|_| true) <= BOUNDS.total);
                prop_assert_eq!(sum(&|_| true), book.total);
                for peer in &peers {
                    prop_assert!(sum(&|one| one.peer == *peer) <= BOUNDS.peer);
                }
                for number in 0..3 {
                    prop_assert!(sum(&|one| one.net == net(number)) <= BOUNDS.net);
                }
                prop_assert_eq!(book.someone_waits(), !waiting.is_empty());
            }
            while !held.is_empty() || book.someone_waits() {
                held.drain(..).for_each(|claim| book.give_back(&claim));
                held.extend(std::iter::from_fn(|| book.next()));
                prop_assert!(!held.is_empty() || !book.someone_waits());
            }
            prop_assert_eq!((book.total, book.peers.len(), book.nets.len()), (0, 0, 0));
        }
    }
}
