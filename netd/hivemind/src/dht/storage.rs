//! What a node keeps for the swarm: values with expiration times, and dictionaries of such values.
//! Source: `hivemind/dht/storage.py` and `hivemind/utils/timed_storage.py`; acceptance rules are
//! theirs exactly.
//!
//! # Discrepancies
//! Python bounds nothing. Here [`StorageLimits`] bound keys, subkeys, bytes, bytes of one peer and
//! how far in the future a value may expire; what exceeds them is refused as if it had come too
//! late, and counted.

use super::id::DhtId;
use crate::wire::msgpack::{EXT_DHT_DICTIONARY, Limits, Value};
use bytes::Bytes;
use libp2p::PeerId;
use std::collections::{BTreeMap, HashMap};

mod charges;

use charges::Charges;

/// Subkey tag of a regular value: msgpack's nil.
pub const REGULAR_TAG: &[u8] = &[0xc0];
/// Subkey tag of a whole dictionary: no bytes.
pub const DICTIONARY_TAG: &[u8] = &[];

/// Bounds of one store.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StorageLimits {
    /// Keys.
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
    /// Seconds from now to the latest expiration. Petals writes records for minutes.
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
            max_horizon_s: 30.0 * 86_400.0,
        }
    }
}

/// A value and when it ends, Unix seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    /// msgpack of the value.
    pub value: Bytes,
    /// When it ends.
    pub expiration: f64,
}

/// Several values under one key, by subkey.
#[derive(Clone, Debug, PartialEq)]
pub struct Dictionary {
    /// By the msgpack form of the subkey.
    entries: BTreeMap<Bytes, Timed>,
    /// Latest expiration of any entry that ever was in it.
    latest: f64,
}

/// What is stored under a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Stored {
    /// One value.
    Regular(Timed),
    /// Values by subkey.
    Dictionary(Dictionary),
}

impl Dictionary {
    /// A dictionary of one entry.
    #[must_use]
    pub fn single(tag: Bytes, entry: Timed) -> Self {
        Self { latest: entry.expiration, entries: BTreeMap::from([(tag, entry)]) }
    }

    /// The entries by the msgpack form of their subkeys.
    pub fn iter(&self) -> impl Iterator<Item = (&Bytes, &Timed)> {
        self.entries.iter()
    }

    /// Reads extension 0x50 with its payload `[maxsize, latest expiration, [[subkey, value,
    /// expiration], ...]]`.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let Ok(Value::Ext(EXT_DHT_DICTIONARY, payload)) = Value::decode(bytes, Limits::DICTIONARY)
        else {
            return None;
        };
        let payload = Value::decode(&payload, Limits::DICTIONARY).ok()?;
        let [_max_size, Value::Float(latest), entries] = payload.as_sequence()? else {
            return None;
        };
        let mut dictionary = Self { entries: BTreeMap::new(), latest: *latest };
        for entry in entries.as_sequence()? {
            let [subkey, Value::Bin(value), Value::Float(expiration)] = entry.as_sequence()? else {
                return None;
            };
            let timed = Timed { value: value.clone().into(), expiration: *expiration };
            dictionary.merge_entry(subkey.encode().into(), timed);
        }
        dictionary.latest.is_finite().then_some(dictionary)
    }

    /// Writes extension 0x50, without a maximal size.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let entry = |(tag, timed): (&Bytes, &Timed)| {
            let subkey = Value::decode(tag, Limits::SMALL).unwrap_or(Value::Nil);
            Value::List(vec![
                subkey,
                Value::Bin(timed.value.to_vec()),
                Value::Float(timed.expiration),
            ])
        };
        let entries = Value::List(self.entries.iter().map(entry).collect());
        let payload =
            Value::List(vec![Value::Float(f64::INFINITY), Value::Float(self.latest), entries]);
        Value::Ext(EXT_DHT_DICTIONARY, payload.encode()).encode().into()
    }

    /// Takes an entry unless one of the same or a later expiration is there.
    fn merge_entry(&mut self, tag: Bytes, timed: Timed) -> bool {
        self.latest = self.latest.max(timed.expiration);
        match self.entries.get_mut(&tag) {
            Some(old) if old.expiration >= timed.expiration => false,
            Some(old) => {
                *old = timed;
                true
            }
            None => {
                self.entries.insert(tag, timed);
                true
            }
        }
    }

    fn drop_expired(&mut self, now: f64) {
        self.entries.retain(|_, entry| entry.expiration >= now);
    }
}

impl Stored {
    /// When all of it has ended.
    #[must_use]
    pub fn expiration(&self) -> f64 {
        match self {
            Self::Regular(timed) => timed.expiration,
            Self::Dictionary(dictionary) => dictionary.latest,
        }
    }

    /// Unites what two nodes returned for one key: entries of dictionaries by newest expiration,
    /// otherwise whichever ends later.
    pub fn merge(&mut self, other: Self) {
        match (self, other) {
            (Self::Dictionary(mine), Self::Dictionary(theirs)) => {
                for (tag, timed) in theirs.entries {
                    mine.merge_entry(tag, timed);
                }
                mine.latest = mine.latest.max(theirs.latest);
            }
            (mine, theirs) if theirs.expiration() > mine.expiration() => *mine = theirs,
            _ => {}
        }
    }

    /// Without what has ended; `None` if nothing is left.
    #[must_use]
    pub fn live(mut self, now: f64) -> Option<Self> {
        if let Self::Dictionary(dictionary) = &mut self {
            dictionary.drop_expired(now);
            if dictionary.entries.is_empty() {
                return None;
            }
        }
        (self.expiration() >= now).then_some(self)
    }

    /// The subkey tag and the bytes with which this is sent to another node.
    #[must_use]
    pub fn to_wire(&self) -> (Bytes, Bytes) {
        match self {
            Self::Regular(timed) => (Bytes::from_static(REGULAR_TAG), timed.value.clone()),
            Self::Dictionary(dictionary) => {
                (Bytes::from_static(DICTIONARY_TAG), dictionary.encode())
            }
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Self::Regular(timed) => ENTRY_OVERHEAD + timed.value.len(),
            Self::Dictionary(dictionary) => {
                let entry =
                    |(tag, timed): (&Bytes, &Timed)| ENTRY_OVERHEAD + tag.len() + timed.value.len();
                ENTRY_OVERHEAD + dictionary.entries.iter().map(entry).sum::<usize>()
            }
        }
    }
}

/// Bytes that an entry is charged beside its content, so that empty values are not free.
const ENTRY_OVERHEAD: usize = 128;

/// One item that somebody wants stored.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    /// One value.
    Regular(Timed),
    /// One entry of a dictionary; the tag is the msgpack form of the subkey.
    Entry(Bytes, Timed),
    /// A whole dictionary.
    Dictionary(Dictionary),
}

impl Item {
    /// An item from a store request; `None` if its bytes are malformed. The tag is brought to the
    /// one form that our own writer makes.
    #[must_use]
    pub fn from_wire(tag: &Bytes, value: &Bytes, expiration: f64) -> Option<Self> {
        let timed = Timed { value: value.clone(), expiration };
        match &tag[..] {
            REGULAR_TAG => Some(Self::Regular(timed)),
            DICTIONARY_TAG => Dictionary::decode(value).map(Self::Dictionary),
            tag => {
                Some(Self::Entry(Value::decode(tag, Limits::SMALL).ok()?.encode().into(), timed))
            }
        }
    }

    /// The subkey tag, the bytes and the expiration of a store request.
    #[must_use]
    pub fn to_wire(&self) -> (Bytes, Bytes, f64) {
        match self {
            Self::Regular(timed) => {
                (Bytes::from_static(REGULAR_TAG), timed.value.clone(), timed.expiration)
            }
            Self::Entry(tag, timed) => (tag.clone(), timed.value.clone(), timed.expiration),
            Self::Dictionary(dictionary) => {
                (Bytes::from_static(DICTIONARY_TAG), dictionary.encode(), dictionary.latest)
            }
        }
    }
}

impl From<Stored> for Item {
    fn from(stored: Stored) -> Self {
        match stored {
            Stored::Regular(timed) => Self::Regular(timed),
            Stored::Dictionary(dictionary) => Self::Dictionary(dictionary),
        }
    }
}

/// A bounded store.
#[derive(Debug)]
pub struct Storage {
    limits: StorageLimits,
    items: HashMap<DhtId, Stored>,
    bytes: usize,
    charges: Charges,
    refused: u64,
}

impl Storage {
    /// An empty store.
    #[must_use]
    pub fn new(limits: StorageLimits) -> Self {
        Self { limits, items: HashMap::new(), bytes: 0, charges: Charges::default(), refused: 0 }
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
        self.bytes
    }

    /// Items refused so far because a bound was reached.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.refused
    }

    /// The keys held.
    pub fn keys(&self) -> impl Iterator<Item = &DhtId> {
        self.items.keys()
    }

    /// What is alive under a key.
    #[must_use]
    pub fn find(&self, key: &DhtId, now: f64) -> Option<Stored> {
        self.items.get(key)?.clone().live(now)
    }

    /// Stores an item of our own if the rules accept it.
    pub fn store(&mut self, key: DhtId, item: Item, now: f64) -> bool {
        self.store_for(None, key, item, now)
    }

    /// Stores an item that a peer brings if the rules accept it and the peer has room left; `None`:
    /// our own.
    pub fn store_for(&mut self, owner: Option<PeerId>, key: DhtId, item: Item, now: f64) -> bool {
        match item {
            Item::Regular(timed) => self.store_regular(owner, key, timed, now),
            Item::Entry(tag, timed) => self.store_entry(owner, key, tag, timed, now),
            // Python stops at the first refusal as well.
            Item::Dictionary(dictionary) => dictionary
                .entries
                .into_iter()
                .all(|(tag, timed)| self.store_entry(owner, key, tag, timed, now)),
        }
    }

    /// Drops everything that has ended.
    pub fn drop_expired(&mut self, now: f64) {
        let keys: Vec<_> = self.items.keys().copied().collect();
        for key in keys {
            self.drop_expired_under(&key, now);
        }
    }

    /// Stores an item as [`Self::store_for`] does, but makes room by dropping what ends soonest:
    /// how a cache stores.
    pub fn store_evicting(
        &mut self,
        owner: Option<PeerId>,
        key: DhtId,
        item: Item,
        now: f64,
    ) -> bool {
        let bytes = match &item {
            Item::Regular(timed) => timed.value.len(),
            Item::Entry(tag, timed) => tag.len() + timed.value.len(),
            Item::Dictionary(dictionary) => dictionary
                .iter()
                .map(|(tag, timed)| ENTRY_OVERHEAD + tag.len() + timed.value.len())
                .sum(),
        };
        while !self.is_empty() && self.is_full(&key, bytes + 2 * ENTRY_OVERHEAD) {
            self.evict_one();
        }
        self.store_for(owner, key, item, now)
    }

    fn evict_one(&mut self) {
        let soonest =
            self.items.iter().min_by(|a, b| a.1.expiration().total_cmp(&b.1.expiration()));
        if let Some(key) = soonest.map(|(key, _)| *key) {
            self.put(key, None);
        }
    }

    /// Whether `bytes` more under `key` would exceed the limits.
    fn is_full(&self, key: &DhtId, bytes: usize) -> bool {
        let is_new = !self.items.contains_key(key);
        (is_new && self.items.len() >= self.limits.max_keys)
            || self.bytes + bytes > self.limits.max_total_bytes
    }

    fn store_regular(&mut self, owner: Option<PeerId>, key: DhtId, timed: Timed, now: f64) -> bool {
        self.drop_expired_under(&key, now);
        let later = self.items.get(&key).is_none_or(|old| old.expiration() < timed.expiration);
        if !later || !self.admits(owner.as_ref(), &key, &[], &timed, now) {
            return false;
        }
        let charged = ENTRY_OVERHEAD + timed.value.len();
        self.put(key, Some(Stored::Regular(timed)));
        self.charges.charge(owner, key, Bytes::new(), charged);
        true
    }

    fn store_entry(
        &mut self,
        owner: Option<PeerId>,
        key: DhtId,
        tag: Bytes,
        timed: Timed,
        now: f64,
    ) -> bool {
        self.drop_expired_under(&key, now);
        if !self.admits(owner.as_ref(), &key, &tag, &timed, now) {
            return false;
        }
        let charged = ENTRY_OVERHEAD + tag.len() + timed.value.len();
        let charged_tag = tag.clone();
        let accepted = self.merge_entry(key, tag, timed);
        if accepted {
            self.charges.charge(owner, key, charged_tag, charged);
        }
        accepted
    }

    fn merge_entry(&mut self, key: DhtId, tag: Bytes, timed: Timed) -> bool {
        match self.items.get_mut(&key) {
            Some(Stored::Dictionary(dictionary)) => {
                let old = dictionary.entries.get(&tag).map(|entry| entry.value.len());
                if old.is_none() && dictionary.entries.len() >= self.limits.max_subkeys {
                    self.refused += 1;
                    return false;
                }
                let (tag_bytes, value_bytes) = (tag.len(), timed.value.len());
                let accepted = dictionary.merge_entry(tag, timed);
                if accepted {
                    let freed = old.unwrap_or(0);
                    let added =
                        value_bytes + if old.is_none() { ENTRY_OVERHEAD + tag_bytes } else { 0 };
                    self.bytes = (self.bytes + added).saturating_sub(freed);
                }
                accepted
            }
            Some(Stored::Regular(old)) if old.expiration >= timed.expiration => false,
            _ => {
                self.put(key, Some(Stored::Dictionary(Dictionary::single(tag, timed))));
                true
            }
        }
    }

    /// The bounds, and the rule that nothing already ended is stored.
    fn admits(
        &mut self,
        owner: Option<&PeerId>,
        key: &DhtId,
        tag: &[u8],
        timed: &Timed,
        now: f64,
    ) -> bool {
        let size = timed.value.len().max(tag.len());
        let new_bytes = 2 * ENTRY_OVERHEAD + timed.value.len() + tag.len();
        let within = timed.expiration <= now + self.limits.max_horizon_s
            && size <= self.limits.max_value_bytes
            && self.bytes + new_bytes <= self.limits.max_total_bytes
            && (self.items.contains_key(key) || self.items.len() < self.limits.max_keys)
            && owner.is_none_or(|owner| {
                // What the item would replace is the peer's own only if the peer had stored that,
                // too.
                let replaced = self.charges.of(owner, key, tag);
                self.charges.held_by(owner) - replaced + new_bytes <= self.limits.max_peer_bytes
            });
        self.refused += u64::from(!within);
        within && timed.expiration >= now
    }

    fn drop_expired_under(&mut self, key: &DhtId, now: f64) {
        let Some(stored) = self.items.get_mut(key) else {
            return;
        };
        let gone = match stored {
            Stored::Regular(timed) => timed.expiration < now,
            Stored::Dictionary(dictionary) => {
                let before: usize = dictionary.entries.len();
                let expired = |(tag, timed): (&Bytes, &Timed)| {
                    if timed.expiration < now {
                        ENTRY_OVERHEAD + tag.len() + timed.value.len()
                    } else {
                        0
                    }
                };
                let freed: usize = dictionary.entries.iter().map(expired).sum();
                if freed > 0 {
                    let ended = |(_, timed): &(&Bytes, &Timed)| timed.expiration < now;
                    for (tag, _) in dictionary.entries.iter().filter(ended) {
                        self.charges.release(key, tag);
                    }
                    dictionary.drop_expired(now);
                    self.bytes = self.bytes.saturating_sub(freed);
                }
                before > 0 && dictionary.entries.is_empty()
            }
        };
        if gone {
            self.put(*key, None);
        }
    }

    fn put(&mut self, key: DhtId, stored: Option<Stored>) {
        let added = stored.as_ref().map_or(0, Stored::bytes);
        let old = match stored {
            Some(stored) => self.items.insert(key, stored),
            None => self.items.remove(&key),
        };
        match &old {
            Some(Stored::Regular(_)) => self.charges.release(&key, &[]),
            Some(Stored::Dictionary(dictionary)) => {
                dictionary.entries.keys().for_each(|tag| self.charges.release(&key, tag))
            }
            None => {}
        }
        self.bytes = (self.bytes + added).saturating_sub(old.as_ref().map_or(0, Stored::bytes));
    }
}

#[cfg(test)]
mod tests;
