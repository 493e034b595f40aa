//! What a node keeps for the swarm: values with expiration times, and dictionaries of such values.
//! Source: `hivemind/dht/storage.py` and `hivemind/utils/timed_storage.py`.
//!
//! # Discrepancies
//! Python bounds nothing and believes the last writer. Here
//! - An expiration more than 30 days ahead, or none, is refused.
//! - [`StorageLimits`] bound entries, bytes, and bytes of one peer. A full store evicts from the
//!   largest peer of the largest IP net the entry that ends first; our own records stay. Under a full
//!   key, a peer that speaks of itself takes the place of what others said, else of the entry that
//!   ends first of the net that has most there.
//! - An expiration more than [`StorageLimits::max_horizon_s`] ahead is cut to that.
//! - What a peer stores under its own PeerID replaces what others stored there, whatever the
//!   expirations; others cannot replace it while it lives. Nobody but we store under our PeerID.
//!   Who reads a key here goes by it alone for half of its life: by then the peer has renewed it,
//!   and if not here, because other nodes are nearer by now, the newer record is theirs.
//! - A single value does not replace a dictionary that holds an entry of the peer it names.

use super::id::DhtId;
use crate::wire::msgpack::Value;
use bytes::Bytes;
use p2p::Net;
use p2p::PeerId;
use std::collections::HashMap;

mod crowd;
mod ledger;
mod values;

use ledger::{Account, Ledger};
pub use values::{DICTIONARY_TAG, Dictionary, Item, REGULAR_TAG, StoredValue, Timed};

/// Bounds of one store.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StorageLimits {
    pub max_keys: usize,
    /// Entries of one dictionary: servers of one block.
    pub max_subkeys: usize,
    /// Bytes of one value, and of one subkey.
    pub max_value_bytes: usize,
    /// Bytes of all values and subkeys.
    pub max_total_bytes: usize,
    /// Bytes of the values and subkeys that one peer has stored here. A peer also brings copies of
    /// others' records, when it makes room for a new node.
    pub max_peer_bytes: usize,
    /// Seconds from now to the latest expiration of what others store; a later one is cut. Petals
    /// writes records for four minutes and renews them every two.
    pub max_horizon_s: f64,
}

impl Default for StorageLimits {
    fn default() -> Self {
        Self {
            max_keys: 65_536,
            max_subkeys: 4096,
            max_value_bytes: 64 << 10,
            max_total_bytes: 64 << 20,
            max_peer_bytes: 8 << 20,
            max_horizon_s: 15.0 * 60.0,
        }
    }
}

/// An expiration further ahead is no expiration but a wrong clock: it is refused, not cut.
pub(super) const MAX_AHEAD_S: f64 = 30.0 * 86_400.0;

/// Bytes that an entry is charged beside its content: what the store and its indexes take for it,
/// measured with entries of one byte, so that many small ones are not free.
pub(super) const ENTRY_OVERHEAD: usize = 640;

/// The subkey tag under which a peer announces itself: its PeerID in base58.
#[must_use]
pub fn tag_of(peer: &PeerId) -> Bytes {
    Value::str(peer.to_base58()).encode().into()
}

/// Who brings an item.
#[derive(Clone, Debug)]
pub struct Owner {
    /// Who is charged; `None`: we.
    account: Option<Account>,
    /// Whether [`StorageLimits::max_peer_bytes`] holds.
    bounded: bool,
    /// The subkey about which it speaks first hand.
    tag: Bytes,
}

impl Owner {
    /// A peer that is connected from `net`.
    #[must_use]
    pub fn peer(peer: PeerId, net: Net) -> Self {
        Self { account: Some((net, peer)), bounded: true, tag: tag_of(&peer) }
    }

    /// Copies that we made of what others answered: evicted like theirs, charged to one account.
    #[must_use]
    pub fn copies(own: PeerId) -> Self {
        Self { account: Some((Net::Unknown, own)), bounded: false, tag: Bytes::new() }
    }
}

/// A bounded store.
#[derive(Debug)]
pub struct Storage {
    limits: StorageLimits,
    own: Owner,
    items: HashMap<DhtId, StoredValue>,
    ledger: Ledger,
    refused: u64,
    evicted: u64,
}

impl Storage {
    /// An empty store of the node `own`.
    #[must_use]
    pub fn new(limits: StorageLimits, own: PeerId) -> Self {
        let own = Owner { account: None, bounded: false, tag: tag_of(&own) };
        let (items, ledger) = (HashMap::new(), Ledger::default());
        Self { limits, own, items, ledger, refused: 0, evicted: 0 }
    }

    /// Keys held, some perhaps expired.
    #[must_use]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether nothing is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Bytes held, with a fixed charge per entry.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.ledger.bytes()
    }

    /// Bytes held under one key.
    #[must_use]
    pub fn bytes_under(&self, key: &DhtId) -> usize {
        self.ledger.under(key)
    }

    /// Items refused so far because of a bound, or because they spoke in our name.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// Entries dropped so far to make room for others.
    #[must_use]
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// The keys held.
    pub fn keys(&self) -> impl Iterator<Item = &DhtId> {
        self.items.keys()
    }

    /// What is alive under a key.
    #[must_use]
    pub fn find(&self, key: &DhtId, now: f64) -> Option<StoredValue> {
        self.items.get(key)?.clone().live(now)
    }

    /// Stores an item of our own if the rules accept it.
    pub fn store(&mut self, key: DhtId, item: Item, now: f64) -> bool {
        let own = self.own.clone();
        self.store_for(&own, key, item, now)
    }

    /// Stores an item that `owner` brings if the rules accept it and the owner's share allows it.
    /// Of a dictionary, each entry on its own; whether all were accepted.
    pub fn store_for(&mut self, owner: &Owner, key: DhtId, item: Item, now: f64) -> bool {
        self.drop_expired(now);
        match item {
            Item::Regular(timed) => self.store_one(owner, key, None, timed, now),
            Item::Entry(tag, timed) => self.store_one(owner, key, Some(tag), timed, now),
            Item::Dictionary(dictionary) => {
                let entries = dictionary.entries.into_iter();
                let store =
                    |all, (tag, timed)| self.store_one(owner, key, Some(tag), timed, now) && all;
                entries.fold(true, store)
            }
        }
    }

    /// Drops everything that has ended.
    pub fn drop_expired(&mut self, now: f64) {
        while let Some((key, tag)) = self.ledger.ended(now) {
            self.remove(&key, &tag);
        }
    }

    /// Stores one value (`tag`: of an entry).
    fn store_one(
        &mut self,
        owner: &Owner,
        key: DhtId,
        tag: Option<Bytes>,
        mut timed: Timed,
        now: f64,
    ) -> bool {
        let ours = owner.account.is_none();
        // False for what is no number.
        let possible = timed.expiration <= now + MAX_AHEAD_S;
        if !possible {
            self.refused += 1;
            return false;
        }
        if !ours && timed.expiration > now + self.limits.max_horizon_s {
            timed.expiration = now + self.limits.max_horizon_s;
        }
        if timed.expiration < now {
            return false;
        }
        let in_our_name = !ours && tag.as_ref() == Some(&self.own.tag);
        if in_our_name {
            self.refused += 1;
            return false;
        }
        let is_first_hand = tag.as_ref() == Some(&owner.tag);
        let charged_tag = tag.clone().unwrap_or_default();
        let bytes = ENTRY_OVERHEAD + charged_tag.len() + timed.value.len();
        if !self.is_newer(&key, tag.as_ref(), &timed, is_first_hand) {
            return false;
        }
        if !self.fits(owner, &key, &charged_tag, &timed)
            || !self.make_room(owner, &key, tag.as_ref(), is_first_hand, bytes)
        {
            self.refused += 1;
            return false;
        }
        let expiration = timed.expiration;
        // We know best what we say. Others say it again after half of its life.
        let alone_until = if ours { f64::INFINITY } else { now.midpoint(expiration) };
        let first_hand = is_first_hand.then_some(alone_until);
        self.put(key, tag, timed, first_hand);
        self.ledger.record(owner.account, key, charged_tag, bytes, expiration);
        true
    }

    /// Whether what is there gives way to this.
    fn is_newer(&self, key: &DhtId, tag: Option<&Bytes>, timed: &Timed, first_hand: bool) -> bool {
        match (self.items.get(key), tag) {
            (None, _) => true,
            (Some(StoredValue::Regular(old)), _) => first_hand || old.expiration < timed.expiration,
            (Some(StoredValue::Dictionary(old)), Some(tag)) => old.accepts(tag, timed, first_hand),
            (Some(StoredValue::Dictionary(old)), None) => {
                !old.has_first_hand() && old.latest < timed.expiration
            }
        }
    }

    /// Whether the value, and what its owner holds with it, are within their bounds. What it would
    /// replace is the owner's own only if the owner had stored that, too.
    fn fits(&self, owner: &Owner, key: &DhtId, tag: &Bytes, timed: &Timed) -> bool {
        let bytes = ENTRY_OVERHEAD + tag.len() + timed.value.len();
        let within_share = |account: &Account| {
            let held = self.ledger.held_by(account) - self.ledger.of(account, key, tag);
            !owner.bounded || held + bytes <= self.limits.max_peer_bytes
        };
        timed.value.len().max(tag.len()) <= self.limits.max_value_bytes
            && bytes <= self.limits.max_total_bytes
            && owner.account.as_ref().is_none_or(within_share)
    }

    /// Evicts until there is room; whether there is.
    fn make_room(
        &mut self,
        owner: &Owner,
        key: &DhtId,
        tag: Option<&Bytes>,
        first_hand: bool,
        bytes: usize,
    ) -> bool {
        if let (Some(StoredValue::Dictionary(dictionary)), Some(tag)) = (self.items.get(key), tag)
            && !dictionary.entries.contains_key(tag)
            && dictionary.entries.len() >= self.limits.max_subkeys
        {
            let net = owner.account.map(|(net, _)| net);
            let evicted = match first_hand {
                true => dictionary.first_of_others().or_else(|| self.ledger.victim_under(key, net)),
                false => None,
            };
            let Some(evicted) = evicted else {
                return false;
            };
            self.remove(key, &evicted);
            self.evicted += 1;
        }
        loop {
            let is_new = !self.items.contains_key(key);
            let full = (is_new && self.items.len() >= self.limits.max_keys)
                || self.ledger.bytes() + bytes > self.limits.max_total_bytes;
            if !full {
                return true;
            }
            let victim = match &owner.account {
                Some(account) => self.ledger.victim(account, bytes),
                None => self.ledger.victim_for_us(),
            };
            let Some((key, tag)) = victim else {
                return false;
            };
            self.remove(&key, &tag);
            self.evicted += 1;
        }
    }

    fn put(&mut self, key: DhtId, tag: Option<Bytes>, timed: Timed, first_hand: Option<f64>) {
        match (self.items.get_mut(&key), tag) {
            (Some(StoredValue::Dictionary(dictionary)), Some(tag)) => {
                dictionary.merge_entry(tag, timed, first_hand);
            }
            (_, tag) => {
                let new = match tag {
                    None => StoredValue::Regular(timed),
                    Some(tag) => {
                        StoredValue::Dictionary(Dictionary::single(tag, timed, first_hand))
                    }
                };
                match self.items.insert(key, new) {
                    Some(StoredValue::Regular(_)) => self.ledger.release(&key, &Bytes::new()),
                    Some(StoredValue::Dictionary(old)) => {
                        old.entries.keys().for_each(|tag| self.ledger.release(&key, tag));
                    }
                    None => {}
                }
            }
        }
    }

    /// Takes one value out (an empty tag: a regular one).
    fn remove(&mut self, key: &DhtId, tag: &Bytes) {
        self.ledger.release(key, tag);
        let any_left = match self.items.get_mut(key) {
            Some(StoredValue::Dictionary(dictionary)) => dictionary.remove(tag),
            Some(StoredValue::Regular(_)) | None => false,
        };
        if !any_left {
            self.items.remove(key);
        }
    }
}

#[cfg(test)]
mod tests;
