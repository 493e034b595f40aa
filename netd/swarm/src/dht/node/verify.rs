//! Who calls is not yet known: a node id is free, and one that does not answer would send lookups of
//! others into the void. A caller enters the routing table when it has answered a ping at the id that
//! it claims; the ping goes over the connection that it made.

use super::{Contact, DhtId, LookupPurpose, Node, PeerId};
use p2p::Net;
use std::collections::HashMap;

/// Callers that are pinged at once; others are when they call again.
pub(in crate::dht) const MAX_VERIFYING: usize = 256;
/// The same for callers of one net, who may be one.
pub(in crate::dht) const MAX_VERIFYING_OF_NET: usize = 32;

/// Callers whose answer is waited for.
#[derive(Debug, Default)]
pub(super) struct Verifying(HashMap<PeerId, Net>);

impl Verifying {
    fn has_room_for(&self, net: Net) -> bool {
        let of_net = self.0.values().filter(|other| **other == net).count();
        self.0.len() < MAX_VERIFYING && of_net < MAX_VERIFYING_OF_NET
    }
}

impl LookupPurpose {
    /// Whether a node that answered a call with this id is what the call was for.
    pub(super) fn admits(&self, node_id: DhtId) -> bool {
        !matches!(self, LookupPurpose::Verify { claimed } if *claimed != node_id)
    }
}

impl Node {
    /// A node has called. A member of the table counts as seen; another is pinged first.
    pub(super) fn called_by(&mut self, contact: Contact, net: Net, now: f64) {
        if self.table.contains(&contact) {
            self.met(contact, now);
            return;
        }
        let Contact { node_id, peer_id } = contact;
        let is_refused = node_id == self.config.own.node_id
            || self.blacklist.contains(&peer_id, now)
            || self.verifying.0.contains_key(&peer_id)
            || !self.verifying.has_room_for(net);
        if !is_refused {
            self.verifying.0.insert(peer_id, net);
            self.ping(peer_id, false, LookupPurpose::Verify { claimed: node_id }, now);
        }
    }

    /// A caller was pinged. One that is not what it claims is left alone for a while.
    pub(super) fn verified(&mut self, peer: PeerId, is_true: bool, now: f64) {
        self.verifying.0.remove(&peer);
        if !is_true {
            self.blacklist.failed(peer, now);
        }
    }
}
