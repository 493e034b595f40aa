//! The entries of a key that is full, by IP net: one net cannot keep the others out. Built when the key
//! first refuses a newcomer, kept until half of the entries are gone.

use bytes::Bytes;
use p2p::Net;
use std::collections::{BTreeSet, HashMap};

/// An expiration, in total order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Expiry(pub(super) f64);

impl Expiry {
    pub(super) fn is_before(self, now: f64) -> bool {
        self.0 < now
    }
}

#[cfg(test)]
thread_local! {
    /// How often expirations were compared.
    pub(super) static COMPARISONS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

impl Ord for Expiry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        #[cfg(test)]
        COMPARISONS.set(COMPARISONS.get() + 1);
        self.0.total_cmp(&other.0)
    }
}

impl PartialOrd for Expiry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Expiry {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Expiry {}

/// Entries of one key that are charged to anybody.
#[derive(Debug, Default)]
pub(super) struct Crowd {
    /// By net, the entry that ends first in front.
    nets: HashMap<Net, BTreeSet<(Expiry, Bytes)>>,
    /// The nets by their entries.
    sizes: BTreeSet<(usize, Net)>,
    /// With fewer entries than this, the key is full no more.
    least: usize,
}

impl Crowd {
    /// That of a key with these entries.
    pub(super) fn of(entries: impl Iterator<Item = (Net, Expiry, Bytes)>) -> Self {
        let mut crowd = Self::default();
        for (net, expiry, tag) in entries {
            crowd.add(net, expiry, tag);
        }
        crowd.least = crowd.len() / 2;
        crowd
    }

    pub(super) fn len(&self) -> usize {
        self.sizes.iter().map(|(size, _)| size).sum()
    }

    pub(super) fn add(&mut self, net: Net, expiry: Expiry, tag: Bytes) {
        let entries = self.nets.entry(net).or_default();
        self.sizes.remove(&(entries.len(), net));
        entries.insert((expiry, tag));
        self.sizes.insert((entries.len(), net));
    }

    /// Takes an entry out; whether the key may still count as full.
    pub(super) fn remove(&mut self, net: Net, expiry: Expiry, tag: &Bytes) -> bool {
        if let Some(entries) = self.nets.get_mut(&net) {
            self.sizes.remove(&(entries.len(), net));
            entries.remove(&(expiry, tag.clone()));
            match entries.len() {
                0 => drop(self.nets.remove(&net)),
                left => drop(self.sizes.insert((left, net))),
            }
        }
        self.len() > self.least
    }

    /// The entry that gives way to one more of `newcomer` (`None`: our own): that which ends first of
    /// the net with most, if that has more than the newcomer's net would have.
    pub(super) fn victim(&self, newcomer: Option<Net>) -> Option<Bytes> {
        let (most, net) = self.sizes.last()?;
        let of_newcomer =
            newcomer.map_or(0, |net| self.nets.get(&net).map_or(0, BTreeSet::len) + 1);
        if *most <= of_newcomer {
            return None;
        }
        self.nets.get(net)?.first().map(|(_, tag)| tag.clone())
    }
}
