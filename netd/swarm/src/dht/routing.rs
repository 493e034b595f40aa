//! The routing table: which nodes this one knows, in buckets that are finer near its own id.
//! Source: `RoutingTable` and `KBucket` in `hivemind/dht/routing.py`.
//!
//! A bucket covers the ids that share its first `depth` bits. A full bucket splits if it holds our
//! own id or if its depth is no multiple of `DEPTH_MODULO`; otherwise the newcomer waits as a
//! replacement while the least recently seen node is pinged.
//!
//! Invariants: a node id and a PeerID appear at most once among members; our own id never does; at
//! most [`MAX_NODES`] members (Python has no such bound).

use super::id::DhtId;
use p2p::PeerId;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Members of a bucket, and nodes returned by a find.
pub const BUCKET_SIZE: usize = 20;
/// Split rule.
const DEPTH_MODULO: usize = 5;
/// Replacements that a full bucket remembers.
const MAX_REPLACEMENTS: usize = BUCKET_SIZE;
/// Members of the whole table: far more than a swarm of thousands fills, small enough to scan per
/// lookup.
pub const MAX_NODES: usize = 4096;

/// A node of the DHT.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Contact {
    /// Its id in the DHT.
    pub node_id: DhtId,
    pub peer_id: PeerId,
}

/// What became of a node that was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It is a member now, and was before iff `known`.
    Member {
        /// Whether it already was one.
        known: bool,
    },
    /// Its bucket is full; if a node is named, ping it: dead ones make room.
    Full(Option<Contact>),
}

/// The table of one node.
#[derive(Debug)]
pub struct RoutingTable {
    own_id: DhtId,
    /// Ordered by the ids they cover; together they cover all ids.
    buckets: Vec<Bucket>,
    by_peer: HashMap<PeerId, DhtId>,
}

#[derive(Debug)]
struct Bucket {
    /// First id covered.
    lower: DhtId,
    depth: usize,
    /// Least recently seen first.
    members: Vec<BucketMember>,
    /// Least recently seen first.
    replacements: Vec<Contact>,
}

#[derive(Debug)]
struct BucketMember {
    contact: Contact,
    ping_requested: bool,
}

impl RoutingTable {
    /// The empty table of the node `own_id`.
    #[must_use]
    pub fn new(own_id: DhtId) -> Self {
        let whole = Bucket {
            lower: DhtId([0; 20]),
            depth: 0,
            members: Vec::new(),
            replacements: Vec::new(),
        };
        Self { own_id, buckets: vec![whole], by_peer: HashMap::new() }
    }

    /// Members in all.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_peer.len()
    }

    /// Whether nobody is known.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_peer.is_empty()
    }

    /// Whether this very pair is a member.
    #[must_use]
    pub fn contains(&self, contact: &Contact) -> bool {
        self.by_peer.get(&contact.peer_id) == Some(&contact.node_id)
    }

    /// All members.
    pub fn contacts(&self) -> impl Iterator<Item = Contact> {
        self.buckets.iter().flat_map(|bucket| bucket.members.iter().map(|m| m.contact))
    }

    /// Records that `contact` was heard of first hand. A peer that comes with a new node id loses
    /// its old one, a node id that comes from a new peer moves there.
    pub fn seen(&mut self, contact: Contact) -> Seen {
        if contact.node_id == self.own_id {
            return Seen::Full(None);
        }
        let known = self.contains(&contact);
        if self.by_peer.get(&contact.peer_id).is_some_and(|old| *old != contact.node_id) {
            self.remove(&contact.peer_id);
        }
        loop {
            let index = self.bucket_of(&contact.node_id);
            let Some(bucket) = self.buckets.get_mut(index) else {
                return Seen::Full(None);
            };
            let at_capacity = self.by_peer.len() >= MAX_NODES && !known;
            if !at_capacity && let Some(displaced) = bucket.admit(contact) {
                if let Some(old) = displaced {
                    self.by_peer.remove(&old);
                }
                self.by_peer.insert(contact.peer_id, contact.node_id);
                return Seen::Member { known };
            }
            if at_capacity || !bucket.may_split(&self.own_id) {
                bucket.remember(contact);
                return Seen::Full(bucket.least_recently_seen());
            }
            let upper = bucket.split();
            self.buckets.insert(index + 1, upper);
        }
    }

    /// Forgets a peer that did not answer; the freshest replacement takes its place.
    pub fn remove(&mut self, peer_id: &PeerId) {
        let Some(node_id) = self.by_peer.remove(peer_id) else {
            return;
        };
        let index = self.bucket_of(&node_id);
        let Some(bucket) = self.buckets.get_mut(index) else {
            return;
        };
        bucket.members.retain(|m| m.contact.node_id != node_id);
        while let Some(replacement) = bucket.replacements.pop() {
            if let Entry::Vacant(vacant) = self.by_peer.entry(replacement.peer_id) {
                vacant.insert(replacement.node_id);
                bucket.members.push(BucketMember { contact: replacement, ping_requested: false });
                break;
            }
        }
    }

    /// The `count` members nearest to `key`, nearest first, without the node `exclude`.
    #[must_use]
    pub fn nearest(&self, key: &DhtId, count: usize, exclude: Option<&DhtId>) -> Vec<Contact> {
        let mut found: Vec<_> = self.contacts().filter(|c| Some(&c.node_id) != exclude).collect();
        let distance = |c: &Contact| c.node_id.distance(key);
        if count < found.len() {
            found.select_nth_unstable_by_key(count, distance);
            found.truncate(count);
        }
        found.sort_unstable_by_key(distance);
        found
    }

    /// Index of the bucket that covers `id`.
    fn bucket_of(&self, id: &DhtId) -> usize {
        self.buckets.partition_point(|bucket| bucket.lower <= *id).saturating_sub(1)
    }
}

impl Bucket {
    /// Makes `contact` the most recently seen member if it is one or there is room: `Some`, with
    /// the peer that had its node id before, if another had.
    fn admit(&mut self, contact: Contact) -> Option<Option<PeerId>> {
        let known = self.members.iter().position(|m| m.contact.node_id == contact.node_id);
        let displaced = match known {
            Some(index) => {
                Some(self.members.remove(index).contact.peer_id).filter(|p| *p != contact.peer_id)
            }
            None if self.members.len() < BUCKET_SIZE => None,
            None => return None,
        };
        self.members.push(BucketMember { contact, ping_requested: false });
        Some(displaced)
    }

    fn remember(&mut self, contact: Contact) {
        self.replacements.retain(|c| c.peer_id != contact.peer_id && c.node_id != contact.node_id);
        if self.replacements.len() >= MAX_REPLACEMENTS {
            self.replacements.remove(0);
        }
        self.replacements.push(contact);
    }

    fn may_split(&self, own_id: &DhtId) -> bool {
        let holds_own = (0..self.depth).all(|bit| own_id.bit(bit) == self.lower.bit(bit));
        self.depth < 160 && (holds_own || !self.depth.is_multiple_of(DEPTH_MODULO))
    }

    /// The member to ping next; each is named once until it is seen again.
    fn least_recently_seen(&mut self) -> Option<Contact> {
        let member = self.members.iter_mut().find(|m| !m.ping_requested)?;
        member.ping_requested = true;
        Some(member.contact)
    }

    /// Keeps the lower half and returns the upper.
    fn split(&mut self) -> Bucket {
        let bit = self.depth;
        let mut lower = self.lower;
        if let Some(byte) = lower.0.get_mut(bit / 8) {
            *byte |= 0x80 >> (bit % 8);
        }
        let (upper, own) =
            std::mem::take(&mut self.members).into_iter().partition(|m| m.contact.node_id.bit(bit));
        let (waiting, stay) =
            std::mem::take(&mut self.replacements).into_iter().partition(|c| c.node_id.bit(bit));
        (self.members, self.replacements, self.depth) = (own, stay, bit + 1);
        Bucket { lower, depth: bit + 1, members: upper, replacements: waiting }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn contact(number: u32) -> Contact {
        Contact { node_id: DhtId::of_bytes(&number.to_be_bytes()), peer_id: PeerId::random() }
    }

    fn with_first_byte(byte: u8, number: u32) -> Contact {
        let mut contact = contact(number);
        contact.node_id.0[0] = byte;
        contact
    }

    fn own_id() -> DhtId {
        DhtId([0; 20])
    }

    #[test]
    fn nearest_agrees_with_sorting_everybody() {
        let mut table = RoutingTable::new(own_id());
        (0..300).for_each(|n| {
            table.seen(contact(n));
        });
        let key = DhtId::of_text("key");
        let mut all: Vec<_> = table.contacts().collect();
        all.sort_by_key(|c| c.node_id.distance(&key));
        assert_eq!(table.nearest(&key, 20, None), all[..20]);
        assert_eq!(table.nearest(&key, 20, Some(&all[0].node_id)), all[1..21]);
    }

    #[test]
    fn full_bucket_far_away_names_its_least_recently_seen_member() {
        let mut table = RoutingTable::new(own_id());
        // All share ten bits with each other and none with us: splitting stops at depth 5.
        let far: Vec<_> = (0..BUCKET_SIZE as u32).map(|n| with_first_byte(0xff, n)).collect();
        for contact in &far {
            assert_eq!(table.seen(*contact), Seen::Member { known: false });
        }
        assert_eq!(table.seen(far[0]), Seen::Member { known: true });
        let late = with_first_byte(0xff, 1000);
        assert_eq!(table.seen(late), Seen::Full(Some(far[1])));
        assert_eq!(table.seen(late), Seen::Full(Some(far[2])));
        assert!(!table.contains(&late));
        table.remove(&far[1].peer_id);
        assert!(table.contains(&late) && !table.contains(&far[1]));
    }

    #[test]
    fn buckets_near_us_split_without_end() {
        let mut table = RoutingTable::new(own_id());
        let near = (0..200).map(|n| with_first_byte(0, n));
        let members = near.filter(|c| matches!(table.seen(*c), Seen::Member { .. })).count();
        assert!(members > 100, "{members}");
    }

    #[test]
    fn peer_with_a_new_node_id_replaces_its_old_one() {
        let mut table = RoutingTable::new(own_id());
        let old = contact(1);
        let new = Contact { node_id: contact(2).node_id, ..old };
        table.seen(old);
        table.seen(new);
        assert_eq!(table.contacts().collect::<Vec<_>>(), [new]);
        let other_peer = Contact { peer_id: PeerId::random(), ..new };
        table.seen(other_peer);
        assert_eq!((table.contacts().collect::<Vec<_>>(), table.len()), (vec![other_peer], 1));
    }

    #[test]
    fn own_id_never_enters() {
        let mut table = RoutingTable::new(own_id());
        table.seen(Contact { node_id: own_id(), peer_id: PeerId::random() });
        assert!(table.is_empty());
    }

    proptest! {
        #[test]
        fn members_stay_consistent(steps in prop::collection::vec((any::<u8>(), 0u32..60, any::<bool>()), 0..300)) {
            let peers: Vec<_> = (0..60).map(|_| PeerId::random()).collect();
            let mut table = RoutingTable::new(own_id());
            for (byte, number, remove) in steps {
                let peer_id = peers[number as usize];
                if remove {
                    table.remove(&peer_id);
                } else {
                    table.seen(Contact { peer_id, ..with_first_byte(byte, number) });
                }
                let members: Vec<_> = table.contacts().collect();
                prop_assert_eq!(members.len(), table.len());
                for bucket in &table.buckets {
                    prop_assert!(bucket.members.len() <= BUCKET_SIZE);
                }
                for (index, bucket) in table.buckets.iter().enumerate() {
                    for member in &bucket.members {
                        prop_assert_eq!(table.bucket_of(&member.contact.node_id), index);
                        prop_assert!(table.contains(&member.contact));
                    }
                }
            }
        }
    }
}
