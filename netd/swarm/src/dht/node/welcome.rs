//! What a new neighbour is given: the values that it should keep from now on. Node ids are free, so
//! a stranger that makes up new ones must not draw the store again and again: a peer is welcomed
//! once an hour, only after it answered a call at the node id that it claims, and all newcomers
//! together get a bounded number of bytes per minute.

use super::super::id::DhtId;
use super::super::storage::Item;
use super::{Contact, DhtRequest, LookupPurpose, Node, PeerId, REPLICAS};
use std::collections::HashMap;

/// Stored keys that are looked through when a new node appears.
const MAX_WELCOME_KEYS: usize = 1024;
/// Seconds until a peer is welcomed again.
pub(in crate::dht) const WELCOME_PERIOD_S: f64 = 3600.0;
/// Peers whose welcome is remembered; while there are more, nobody is welcomed.
pub(in crate::dht) const MAX_WELCOMED: usize = 16_384;
/// Bytes of values for one newcomer.
pub(in crate::dht) const MAX_WELCOME_BYTES: usize = 2 << 20;
/// Bytes of values for all newcomers of one minute.
pub(in crate::dht) const MAX_WELCOME_BYTES_PER_MINUTE: usize = 16 << 20;

/// Who was welcomed when, and what it cost in the current minute.
#[derive(Debug, Default)]
pub(super) struct Welcomes {
    at: HashMap<PeerId, f64>,
    minute: f64,
    bytes: usize,
}

impl Welcomes {
    /// Whether a peer may be welcomed now; from then on it was.
    fn admits(&mut self, peer: PeerId, now: f64) -> bool {
        if self.at.contains_key(&peer) || self.at.len() >= MAX_WELCOMED {
            return false;
        }
        self.at.insert(peer, now);
        true
    }

    /// Bytes that a newcomer may get now.
    fn bytes_left(&mut self, now: f64) -> usize {
        if now - self.minute >= 60.0 {
            (self.minute, self.bytes) = (now, 0);
        }
        MAX_WELCOME_BYTES_PER_MINUTE.saturating_sub(self.bytes).min(MAX_WELCOME_BYTES)
    }

    /// Forgets those who may be welcomed again.
    pub(super) fn drop_expired(&mut self, now: f64) {
        self.at.retain(|_, at| now - *at < WELCOME_PERIOD_S);
    }
}

impl Node {
    /// A node that the table did not know has answered a call of ours.
    pub(super) fn meet(&mut self, contact: Contact, now: f64) {
        if !self.storage.is_empty() && self.welcomes.admits(contact.peer_id, now) {
            self.welcome(contact, now);
        }
    }

    /// Sends a newcomer what it should keep.
    fn welcome(&mut self, contact: Contact, now: f64) {
        let items = self.welcome_items(&contact.node_id, now);
        for (request, _) in self.store_requests(items, false) {
            self.call(contact.peer_id, DhtRequest::Store(request), LookupPurpose::Background, now);
        }
    }

    /// Items for which `new` is among the nearest while we are the nearest of the nodes before it.
    fn welcome_items(&mut self, new: &DhtId, now: f64) -> Vec<(usize, DhtId, Item)> {
        let own = &self.config.own.node_id;
        let belongs = |key: &&DhtId| {
            let others = self.table.nearest(key, REPLICAS + 1, Some(own)).into_iter();
            let neighbours: Vec<_> = others.filter(|c| c.node_id != *new).take(REPLICAS).collect();
            let (Some(nearest), Some(farthest)) = (neighbours.first(), neighbours.last()) else {
                return true;
            };
            new.distance(key) < farthest.node_id.distance(key)
                && own.distance(key) < nearest.node_id.distance(key)
        };
        let keys: Vec<_> =
            self.storage.keys().take(MAX_WELCOME_KEYS).filter(belongs).copied().collect();
        let mut left = self.welcomes.bytes_left(now);
        let mut items = Vec::new();
        for key in keys {
            let bytes = self.storage.bytes_under(&key);
            if bytes <= left
                && let Some(stored) = self.storage.find(&key, now)
            {
                left -= bytes;
                self.welcomes.bytes += bytes;
                items.push((0, key, stored.into()));
            }
        }
        items
    }
}
