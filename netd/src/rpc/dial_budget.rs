//! How many next servers in vain one client may name. A client says which peers a server connects
//! to; one that names peers that cannot be reached aims the server's dials at whoever it likes.
//! Pure but for the lock.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use p2p::{Net, PeerId};
use parking_lot::Mutex;

/// Next servers that were not reached, of one client within [`MEMORY`]. A server that has just
/// died is one.
pub(crate) const MAX_MISSES: usize = 4;
/// How long such a next server counts.
pub(crate) const MEMORY: Duration = Duration::from_secs(60);
/// Clients that are remembered.
pub(crate) const MAX_CLIENTS: usize = 1024;

/// Who names next servers: a PeerID costs nothing, so that a public IP net counts as one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Namer {
    /// A peer of a net that strangers cannot be on.
    Peer(PeerId),
    /// All peers of a public net.
    Net(Net),
}

impl Namer {
    /// Who `peer` of `net` counts as.
    pub fn of(peer: PeerId, net: Net) -> Namer {
        match net.is_public() {
            true => Namer::Net(net),
            false => Namer::Peer(peer),
        }
    }
}

/// Next servers that were named and have not been reached.
#[derive(Debug, Default)]
pub struct DialBudget {
    misses: Mutex<HashMap<Namer, Vec<Instant>>>,
}

impl DialBudget {
    /// Counts one more next server of a client until it [`hit`](Self::hit)s; false if the client
    /// may name none now.
    pub fn aim(&self, namer: Namer, now: Instant) -> bool {
        let mut clients = self.misses.lock();
        if clients.len() >= MAX_CLIENTS {
            clients.retain(|_, misses| misses.iter().any(|since| *since + MEMORY > now));
        }
        if clients.len() >= MAX_CLIENTS && !clients.contains_key(&namer) {
            return false;
        }
        let misses = clients.entry(namer).or_default();
        misses.retain(|since| *since + MEMORY > now);
        let may = misses.len() < MAX_MISSES;
        if may {
            misses.push(now);
        }
        may
    }

    /// A next server of the client was reached.
    pub fn hit(&self, namer: Namer) {
        let mut clients = self.misses.lock();
        if let Some(misses) = clients.get_mut(&namer) {
            misses.pop();
            if misses.is_empty() {
                clients.remove(&namer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn public(last: u8) -> Net {
        Net::of([203, 0, 113, last].into())
    }

    #[test]
    fn a_client_names_few_servers_in_vain_and_as_many_that_are_there_as_it_likes() {
        let (budget, now) = (DialBudget::default(), Instant::now());
        let client = Namer::of(PeerId::random(), Net::of([127, 0, 0, 1].into()));
        for _ in 0..100 {
            assert!(budget.aim(client, now));
            budget.hit(client);
        }
        assert!((0..MAX_MISSES).all(|_| budget.aim(client, now)));
        assert!(!budget.aim(client, now));
        assert!(!budget.aim(client, now + MEMORY / 2), "a refused one does not prolong it");
        assert!(budget.aim(client, now + MEMORY));
        let neighbour = Namer::of(PeerId::random(), Net::of([127, 0, 0, 1].into()));
        assert!(budget.aim(neighbour, now), "another peer of this machine");
    }

    #[test]
    fn peer_ids_of_one_public_net_are_one_client_and_clients_are_bounded() {
        let (budget, now) = (DialBudget::default(), Instant::now());
        let named = (0..100).filter(|_| budget.aim(Namer::of(PeerId::random(), public(1)), now));
        assert_eq!(named.count(), MAX_MISSES);
        assert!(budget.aim(Namer::of(PeerId::random(), public(2)), now));
        let crowd = |_: &usize| budget.aim(Namer::Peer(PeerId::random()), now);
        assert_eq!((0..2 * MAX_CLIENTS).filter(crowd).count(), MAX_CLIENTS - 2);
        assert!(budget.aim(Namer::Peer(PeerId::random()), now + MEMORY));
    }
}
