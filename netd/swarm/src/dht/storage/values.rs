//! Values of the DHT as they are stored, merged and sent: single ones, and dictionaries by subkey.

use crate::wire::msgpack::{EXT_DHT_DICTIONARY, Limits, Value};
use bytes::Bytes;
use std::collections::BTreeMap;

/// Subkey tag of a regular value: msgpack's nil.
pub const REGULAR_TAG: &[u8] = &[0xc0];
/// Subkey tag of a whole dictionary: no bytes.
pub const DICTIONARY_TAG: &[u8] = &[];

/// Bytes that an entry takes in the encoded dictionary beside its value and its subkey, at most.
const ENTRY_BYTES: usize = 24;

/// A value and when it ends, Unix seconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    /// msgpack of the value.
    pub value: Bytes,
    pub expiration: f64,
}

/// Several values under one key, by subkey.
#[derive(Clone, Debug, PartialEq)]
pub struct Dictionary {
    /// By the msgpack form of the subkey.
    pub(in crate::dht) entries: BTreeMap<Bytes, Timed>,
    /// Subkeys whose entries came from the very peer that they name, and until when (Unix seconds)
    /// each of them counts whatever others say.
    first_hand: BTreeMap<Bytes, f64>,
    /// Latest expiration of any entry that ever was in it.
    pub(in crate::dht) latest: f64,
}

/// What is stored under a key.
#[derive(Clone, Debug, PartialEq)]
pub enum StoredValue {
    Regular(Timed),
    /// Values by subkey.
    Dictionary(Dictionary),
}

impl Dictionary {
    /// A dictionary of one entry. `first_hand`: the peer that it names brought it, and it counts
    /// alone until then.
    #[must_use]
    pub fn single(tag: Bytes, entry: Timed, first_hand: Option<f64>) -> Self {
        let mut single = Self {
            entries: BTreeMap::new(),
            first_hand: BTreeMap::new(),
            latest: entry.expiration,
        };
        single.merge_entry(tag, entry, first_hand);
        single
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
        let mut dictionary =
            Self { entries: BTreeMap::new(), first_hand: BTreeMap::new(), latest: *latest };
        for entry in entries.as_sequence()? {
            let [subkey, Value::Bin(value), Value::Float(expiration)] = entry.as_sequence()? else {
                return None;
            };
            let timed = Timed { value: value.clone().into(), expiration: *expiration };
            dictionary.merge_entry(subkey.encode().into(), timed, None);
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

    /// Whether [`Self::merge_entry`] would take this entry.
    pub(super) fn accepts(&self, tag: &Bytes, timed: &Timed, first_hand: bool) -> bool {
        match (self.entries.get(tag), self.first_hand.contains_key(tag), first_hand) {
            (None, ..) | (Some(_), false, true) => true,
            (Some(_), true, false) => false,
            (Some(old), ..) => old.expiration < timed.expiration,
        }
    }

    /// Takes an entry unless one of the same or a later expiration is there. What a peer says of
    /// itself (`first_hand`, with the time until which that counts alone) replaces what others say,
    /// and never the other way round.
    pub(in crate::dht) fn merge_entry(
        &mut self,
        tag: Bytes,
        timed: Timed,
        first_hand: Option<f64>,
    ) -> bool {
        if !self.accepts(&tag, &timed, first_hand.is_some()) {
            self.confirm(&tag, &timed, first_hand);
            return false;
        }
        self.latest = self.latest.max(timed.expiration);
        if let Some(until) = first_hand {
            self.first_hand.insert(tag.clone(), until);
        }
        self.entries.insert(tag, timed);
        true
    }

    /// A peer that says again what it said before: that counts alone for longer.
    fn confirm(&mut self, tag: &Bytes, timed: &Timed, first_hand: Option<f64>) {
        if let (Some(until), Some(known)) = (first_hand, self.first_hand.get_mut(tag))
            && self.entries.get(tag) == Some(timed)
        {
            *known = known.max(until);
        }
    }

    /// Gives each entry the value that most of `voters` have, if any has the entry, and of those of
    /// as many the one that ends later. What a peer said of itself stays while it counts alone;
    /// then it is one more vote, and gives way to what ends later. Votes count values: nodes cut
    /// expirations, each at its own time.
    pub(in crate::dht) fn decide_by(&mut self, voters: &[&Self], now: f64) {
        for (tag, entry) in &mut self.entries {
            let until = self.first_hand.get(tag);
            if until.is_some_and(|until| now < *until) {
                continue;
            }
            let own = until.map(|_| entry.clone());
            let is_older = |version: &&Timed| {
                own.as_ref().is_some_and(|own| version.expiration < own.expiration)
            };
            let theirs = voters.iter().filter_map(|voter| voter.entries.get(tag));
            let versions: Vec<&Timed> = theirs.filter(|v| !is_older(v)).chain(&own).collect();
            let votes = |version: &Timed| {
                versions.iter().filter(|other| other.value == version.value).count()
            };
            let best = versions
                .iter()
                .max_by(|a, b| votes(a).cmp(&votes(b)).then(a.expiration.total_cmp(&b.expiration)));
            if let Some(best) = best {
                *entry = (*best).clone();
            }
        }
    }

    /// Drops the largest entries until the values and subkeys have at most so many bytes.
    pub(in crate::dht) fn shrink_to(&mut self, bytes: usize) {
        let size = |(tag, timed): (&Bytes, &Timed)| tag.len() + timed.value.len() + ENTRY_BYTES;
        let mut total: usize = self.entries.iter().map(size).sum();
        if total <= bytes {
            return;
        }
        let mut sizes: Vec<(usize, Bytes)> =
            self.entries.iter().map(|entry| (size(entry), entry.0.clone())).collect();
        sizes.sort_unstable();
        while total > bytes
            && let Some((size, tag)) = sizes.pop()
        {
            total -= size;
            self.remove(&tag);
        }
    }

    /// Takes an entry out; whether any are left.
    pub(super) fn remove(&mut self, tag: &Bytes) -> bool {
        self.entries.remove(tag);
        self.first_hand.remove(tag);
        !self.entries.is_empty()
    }

    /// Whether any entry came from the peer that it names.
    pub(super) fn has_first_hand(&self) -> bool {
        !self.first_hand.is_empty()
    }

    /// The entry that ends first of those that others than the named peer brought.
    pub(super) fn first_of_others(&self) -> Option<Bytes> {
        let others = self.entries.iter().filter(|(tag, _)| !self.first_hand.contains_key(*tag));
        let first = others.min_by(|a, b| a.1.expiration.total_cmp(&b.1.expiration));
        first.map(|(tag, _)| tag.clone())
    }

    fn drop_expired(&mut self, now: f64) {
        self.entries.retain(|_, entry| entry.expiration >= now);
        self.first_hand.retain(|tag, _| self.entries.contains_key(tag));
    }
}

impl StoredValue {
    /// When all of it has ended.
    #[must_use]
    pub fn expiration(&self) -> f64 {
        match self {
            Self::Regular(timed) => timed.expiration,
            Self::Dictionary(dictionary) => dictionary.latest,
        }
    }

    /// Marks the entry under `tag` as what its own peer says: the node that answered was that peer.
    pub fn heard_from(&mut self, tag: &Bytes) {
        if let Self::Dictionary(dictionary) = self
            && dictionary.entries.contains_key(tag)
        {
            dictionary.first_hand.insert(tag.clone(), f64::INFINITY);
        }
    }

    /// Unites what two nodes returned for one key: entries of dictionaries by newest expiration,
    /// those of the named peers themselves first, otherwise whichever ends later. A single value
    /// never replaces a dictionary, so that one node cannot hide the entries of all others.
    pub fn merge(&mut self, other: Self) {
        match (self, other) {
            (Self::Dictionary(mine), Self::Dictionary(mut theirs)) => {
                mine.latest = mine.latest.max(theirs.latest);
                for (tag, timed) in std::mem::take(&mut theirs.entries) {
                    let first_hand = theirs.first_hand.get(&tag).copied();
                    mine.merge_entry(tag, timed, first_hand);
                }
            }
            (mine @ Self::Regular(_), theirs @ Self::Dictionary(_)) => *mine = theirs,
            (Self::Dictionary(_), Self::Regular(_)) => {}
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
}

/// One item that somebody wants stored.
#[derive(Clone, Debug, PartialEq)]
pub enum Item {
    Regular(Timed),
    /// One entry of a dictionary; the tag is the msgpack form of the subkey.
    Entry(Bytes, Timed),
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

impl From<StoredValue> for Item {
    fn from(stored: StoredValue) -> Self {
        match stored {
            StoredValue::Regular(timed) => Self::Regular(timed),
            StoredValue::Dictionary(dictionary) => Self::Dictionary(dictionary),
        }
    }
}
