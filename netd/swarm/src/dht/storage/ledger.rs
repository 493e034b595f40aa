//! Who holds what in the store and when it ends: accounts by IP net and peer, and an index of all
//! entries by expiration. Every operation takes logarithmic time.
//!
//! ```text
//!   entries  (key, tag) ──> account, bytes, expiration
//!   ends     all entries, the one that ends first in front             ──> what has ended
//!   nets     net ──> bytes, peers ──> bytes, entries by expiration     ──> what is evicted
//!   crowds   keys that are full ──> net ──> entries by expiration      ──> what gives way under a key
//! ```
//! Invariant: an entry is in `entries` and `ends`, and, unless it is our own, in its account.

use super::super::id::DhtId;
use super::crowd::{Crowd, Expiry};
use bytes::Bytes;
use p2p::Net;
use p2p::PeerId;
use std::collections::{BTreeSet, HashMap};

/// Who is charged for an entry.
pub(super) type Account = (Net, PeerId);

/// Entries, the one that ends first in front.
type Ends = BTreeSet<(Expiry, DhtId, Bytes)>;

#[derive(Debug)]
struct LedgerEntry {
    account: Option<Account>,
    bytes: usize,
    expiration: f64,
}

#[derive(Debug, Default)]
struct NetAccount {
    bytes: usize,
    peers: HashMap<PeerId, PeerAccount>,
    sizes: BTreeSet<(usize, PeerId)>,
}

#[derive(Debug, Default)]
struct PeerAccount {
    bytes: usize,
    ends: Ends,
}

/// The accounts of a store.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    entries: HashMap<DhtId, HashMap<Bytes, LedgerEntry>>,
    ends: Ends,
    nets: HashMap<Net, NetAccount>,
    sizes: BTreeSet<(usize, Net)>,
    crowds: HashMap<DhtId, Crowd>,
    bytes: usize,
}

impl Ledger {
    /// Bytes of all entries.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes that a peer is charged for.
    pub(super) fn held_by(&self, (net, peer): &Account) -> usize {
        let account = self.nets.get(net).and_then(|net| net.peers.get(peer));
        account.map_or(0, |account| account.bytes)
    }

    /// Bytes of one entry, if this account is charged for it.
    pub(super) fn of(&self, account: &Account, key: &DhtId, tag: &[u8]) -> usize {
        let entry = self.entries.get(key).and_then(|tags| tags.get(tag));
        entry.filter(|entry| entry.account == Some(*account)).map_or(0, |entry| entry.bytes)
    }

    /// Bytes of all entries under a key.
    pub(super) fn under(&self, key: &DhtId) -> usize {
        let tags = self.entries.get(key);
        tags.map_or(0, |tags| tags.values().map(|entry| entry.bytes).sum())
    }

    /// Notes an entry in place of an earlier one; no account: our own, which is never evicted.
    pub(super) fn record(
        &mut self,
        account: Option<Account>,
        key: DhtId,
        tag: Bytes,
        bytes: usize,
        expiration: f64,
    ) {
        self.release(&key, &tag);
        self.bytes += bytes;
        let end = (Expiry(expiration), key, tag.clone());
        if let Some(account) = account {
            self.resize(account, |peer| {
                peer.bytes += bytes;
                peer.ends.insert(end.clone());
            });
        }
        if let (Some((net, _)), Some(crowd)) = (account, self.crowds.get_mut(&key)) {
            crowd.add(net, Expiry(expiration), tag.clone());
        }
        self.ends.insert(end);
        self.entries
            .entry(key)
            .or_default()
            .insert(tag, LedgerEntry { account, bytes, expiration });
    }

    /// An entry is gone.
    pub(super) fn release(&mut self, key: &DhtId, tag: &Bytes) {
        let Some(tags) = self.entries.get_mut(key) else {
            return;
        };
        let gone = tags.remove(tag);
        if tags.is_empty() {
            self.entries.remove(key);
        }
        let Some(entry) = gone else {
            return;
        };
        self.bytes = self.bytes.saturating_sub(entry.bytes);
        let end = (Expiry(entry.expiration), *key, tag.clone());
        self.ends.remove(&end);
        if let Some(account) = entry.account {
            self.resize(account, |peer| {
                peer.bytes = peer.bytes.saturating_sub(entry.bytes);
                peer.ends.remove(&end);
            });
            if let Some(crowd) = self.crowds.get_mut(key)
                && !crowd.remove(account.0, Expiry(entry.expiration), tag)
            {
                self.crowds.remove(key);
            }
        }
    }

    /// The entry under a full key that gives way to one more of a net (`None`: to our own), if the net
    /// has fewer there than another.
    pub(super) fn victim_under(&mut self, key: &DhtId, newcomer: Option<Net>) -> Option<Bytes> {
        let tags = self.entries.get(key)?;
        let crowd = self.crowds.entry(*key).or_insert_with(|| {
            let charged = tags.iter().filter_map(|(tag, entry)| {
                Some((entry.account?.0, Expiry(entry.expiration), tag.clone()))
            });
            Crowd::of(charged)
        });
        crowd.victim(newcomer)
    }

    /// An entry that has ended before `now`.
    pub(super) fn ended(&self, now: f64) -> Option<(DhtId, Bytes)> {
        let (expiry, key, tag) = self.ends.first()?;
        expiry.is_before(now).then(|| (*key, tag.clone()))
    }

    /// What to evict so that `newcomer` may hold `bytes` more: the entry that ends first of the
    /// largest peer in the largest net, the newcomer counted with what it wants. `None`: only the
    /// newcomer itself is that large, or nothing can be evicted.
    pub(super) fn victim(&self, newcomer: &Account, bytes: usize) -> Option<(DhtId, Bytes)> {
        let (largest, net) = self.sizes.last()?;
        let account = self.nets.get(net)?;
        let of_newcomer = self.nets.get(&newcomer.0).map_or(0, |net| net.bytes) + bytes;
        if *net != newcomer.0 && of_newcomer > *largest {
            return self.first_of(newcomer);
        }
        let (largest, peer) = account.sizes.last()?;
        if *net == newcomer.0 && self.held_by(newcomer) + bytes > *largest {
            return self.first_of(newcomer);
        }
        self.first_of(&(*net, *peer))
    }

    /// The entry to evict for one of our own.
    pub(super) fn victim_for_us(&self) -> Option<(DhtId, Bytes)> {
        let (_, net) = self.sizes.last()?;
        let (_, peer) = self.nets.get(net)?.sizes.last()?;
        self.first_of(&(*net, *peer))
    }

    fn first_of(&self, (net, peer): &Account) -> Option<(DhtId, Bytes)> {
        let (_, key, tag) = self.nets.get(net)?.peers.get(peer)?.ends.first()?;
        Some((*key, tag.clone()))
    }

    /// Changes an account, and its position among the others.
    fn resize(&mut self, (net, peer): Account, change: impl FnOnce(&mut PeerAccount)) {
        let of_net = self.nets.entry(net).or_default();
        let of_peer = of_net.peers.entry(peer).or_default();
        let before = of_peer.bytes;
        change(of_peer);
        let after = of_peer.bytes;
        of_net.sizes.remove(&(before, peer));
        if after == 0 {
            of_net.peers.remove(&peer);
        } else {
            of_net.sizes.insert((after, peer));
        }
        self.sizes.remove(&(of_net.bytes, net));
        of_net.bytes = (of_net.bytes + after).saturating_sub(before);
        if of_net.bytes == 0 {
            self.nets.remove(&net);
        } else {
            self.sizes.insert((of_net.bytes, net));
        }
    }

    /// Peers that are charged for anything.
    #[cfg(test)]
    pub(super) fn peers(&self) -> usize {
        self.nets.values().map(|net| net.peers.len()).sum()
    }

    /// Whether all indexes agree.
    #[cfg(test)]
    pub(super) fn is_consistent(&self) -> bool {
        let entries: Vec<_> = self.entries.values().flat_map(|tags| tags.values()).collect();
        let charged: usize = entries.iter().filter(|e| e.account.is_some()).map(|e| e.bytes).sum();
        let nets: usize = self.nets.values().map(|net| net.bytes).sum();
        let peers = || self.nets.values().flat_map(|net| net.peers.values());
        let in_accounts: usize = peers().map(|peer| peer.ends.len()).sum();
        let bytes: usize = entries.iter().map(|e| e.bytes).sum();
        let charged_under = |key: &DhtId| {
            let tags = self.entries.get(key).into_iter().flat_map(HashMap::values);
            tags.filter(|entry| entry.account.is_some()).count()
        };
        self.ends.len() == entries.len()
            && self.crowds.iter().all(|(key, crowd)| crowd.len() == charged_under(key))
            && self.bytes == bytes
            && (charged, charged) == (nets, peers().map(|peer| peer.bytes).sum())
            && in_accounts == entries.iter().filter(|e| e.account.is_some()).count()
            && self.sizes.len() == self.nets.len()
    }
}
