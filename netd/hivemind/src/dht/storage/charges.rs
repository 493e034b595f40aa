//! Which peer has brought what is stored, so that one cannot fill the store. As many entries as the
//! store has.

use super::super::id::DhtId;
use bytes::Bytes;
use libp2p::PeerId;
use std::collections::HashMap;

/// Bytes held, by the peer that brought them.
#[derive(Debug, Default)]
pub(super) struct Charges {
    /// By key, and by tag of the entry (none for a regular value).
    entries: HashMap<DhtId, HashMap<Bytes, (PeerId, usize)>>,
    held: HashMap<PeerId, usize>,
}

impl Charges {
    /// Bytes that this peer has brought.
    pub(super) fn held_by(&self, peer: &PeerId) -> usize {
        self.held.get(peer).copied().unwrap_or(0)
    }

    /// Bytes of one entry, if this peer has brought it.
    pub(super) fn of(&self, peer: &PeerId, key: &DhtId, tag: &[u8]) -> usize {
        let entry = self.entries.get(key).and_then(|tags| tags.get(tag));
        entry.filter(|(owner, _)| owner == peer).map_or(0, |e| e.1)
    }

    /// An entry was stored; nobody is charged for our own.
    pub(super) fn charge(&mut self, owner: Option<PeerId>, key: DhtId, tag: Bytes, bytes: usize) {
        self.release(&key, &tag);
        if let Some(owner) = owner {
            *self.held.entry(owner).or_default() += bytes;
            let tags = self.entries.entry(key).or_default();
            tags.insert(tag, (owner, bytes));
        }
    }

    /// An entry is gone.
    pub(super) fn release(&mut self, key: &DhtId, tag: &[u8]) {
        let Some(tags) = self.entries.get_mut(key) else {
            return;
        };
        let gone = tags.remove(tag);
        if tags.is_empty() {
            self.entries.remove(key);
        }
        let Some((owner, bytes)) = gone else {
            return;
        };
        if let Some(held) = self.held.get_mut(&owner) {
            *held = held.saturating_sub(bytes);
            if *held == 0 {
                self.held.remove(&owner);
            }
        }
    }

    /// Peers that are charged for anything.
    #[cfg(test)]
    pub(super) fn peers(&self) -> usize {
        self.held.len()
    }
}
