//! A node that refuses our own record has a later one under our name, and we did not write it.
//! Nodes that believe the last writer (hivemind's) are told again with a later expiration: they are
//! asked what they have, and get ours with an expiration one second after it. Only our latest record
//! insists: one that was overtaken by a newer one of ours is rightly refused.

use super::super::id::DhtId;
use super::super::storage::{Item, StoredValue, Timed, tag_of};
use super::{
    Bytes, DhtOperation, DhtRequest, FindRequest, LookupPurpose, Node, OperationId, PeerId,
    Response, parse_result,
};

/// Seconds ahead to which a renewal goes at most. Beyond that, a forged record stays until it ends.
const MAX_AHEAD_S: f64 = 60.0 * 86_400.0;

/// A record of ours that one node refused.
#[derive(Clone, Debug)]
pub(super) struct RecordRefusal {
    pub id: OperationId,
    pub index: usize,
    pub key: DhtId,
    pub item: Item,
}

impl Node {
    /// Notes which records of our own are the latest from now on.
    pub(super) fn note_own(&mut self, items: &[(DhtId, Item)], now: f64) {
        let own = tag_of(&self.config.own.peer_id);
        for (key, item) in items {
            if let Item::Entry(tag, timed) = item
                && *tag == own
                && timed.expiration >= now
            {
                self.said.insert(*key, timed.expiration);
            }
        }
    }

    /// Whether a record is still what we say. An older one that arrives late is rightly refused.
    fn is_latest(&self, refusal: &RecordRefusal) -> bool {
        let Item::Entry(_, ours) = &refusal.item else { return false };
        self.said.get(&refusal.key).is_none_or(|latest| ours.expiration >= *latest)
    }

    /// Asks a node that refused a record of our own what it has instead.
    pub(super) fn contest(&mut self, peer: PeerId, refusal: RecordRefusal, now: f64) {
        if !self.is_latest(&refusal) {
            return self.on_renewal_answer(refusal.id, refusal.index, None, now);
        }
        self.refused_renewals += 1;
        let keys = vec![Bytes::copy_from_slice(&refusal.key.0)];
        let request = FindRequest { auth: None, keys, peer: Some(self.node_info()) };
        self.call(peer, DhtRequest::Find(request), LookupPurpose::Contest(refusal), now);
    }

    /// Stores the record again, later than what the node has.
    pub(super) fn on_contest_answer(
        &mut self,
        peer: PeerId,
        refusal: RecordRefusal,
        response: Option<Response>,
        now: f64,
    ) {
        let found = match response {
            Some(Response::Find(response)) => response.results.into_iter().next(),
            _ => None,
        };
        let theirs = found.and_then(|found| parse_result(found).found);
        let tag = tag_of(&self.config.own.peer_id);
        let is_latest = self.is_latest(&refusal);
        let later = match (theirs, &refusal.item) {
            _ if !is_latest => None,
            (Some(StoredValue::Dictionary(theirs)), Item::Entry(_, ours)) => {
                let entry = theirs.iter().find(|(other, _)| **other == tag);
                entry
                    .map(|(_, theirs)| theirs.expiration + 1.0)
                    .filter(|at| *at > ours.expiration && *at <= now + MAX_AHEAD_S)
                    .map(|at| Timed { value: ours.value.clone(), expiration: at })
            }
            _ => None,
        };
        let items = later.map(|later| vec![(0, refusal.key, Item::Entry(tag, later))]);
        let mut requests = self.store_requests(items.unwrap_or_default(), false);
        match requests.pop() {
            Some((request, _)) => {
                let purpose = LookupPurpose::Renewal(refusal.id, refusal.index);
                self.call(peer, DhtRequest::Store(request), purpose, now);
            }
            None => self.on_renewal_answer(refusal.id, refusal.index, None, now),
        }
    }

    /// Notes whether the node took the later record.
    pub(super) fn on_renewal_answer(
        &mut self,
        id: OperationId,
        index: usize,
        response: Option<Response>,
        now: f64,
    ) {
        let accepted = match response {
            Some(Response::Store(response)) => response.store_ok == [true],
            _ => false,
        };
        if let Some(DhtOperation::Storing(rounds)) = self.operations.get_mut(&id) {
            rounds.renewed(index, accepted);
        }
        self.advance_store(id, now);
    }
}
