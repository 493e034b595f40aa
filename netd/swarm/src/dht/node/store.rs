//! The second half of a store: rounds of calls to the nodes nearest to each key, until enough of
//! them responded. Source: `store_many` in `hivemind/dht/node.py`. A refusal counts as a response:
//! the node has something newer.

use super::super::answer::MAX_ITEMS;
use super::super::id::DhtId;
use super::super::lookup::KeyResult;
use super::super::routing::Contact;
use super::super::storage::{Item, tag_of};
use super::{
    BTreeMap, Bytes, DhtAction, DhtOperation, DhtRequest, LookupPurpose, Node, OperationId, PeerId,
    REPLICAS, RecordRefusal, Response,
};
use crate::wire::messages::StoreRequest;
use std::collections::VecDeque;

/// Bytes of values in one request; the whole message must stay under 4 MiB.
const MAX_REQUEST_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct StoreRounds {
    items: Vec<Placing>,
    calls: usize,
}

#[derive(Debug)]
struct Placing {
    key: DhtId,
    item: Item,
    /// Nodes not yet tried, nearest first.
    targets: VecDeque<Contact>,
    /// Calls of this round.
    waiting: usize,
    responded: usize,
    accepted: usize,
}

impl StoreRounds {
    /// Items with the nodes that lookups found; `own` takes its place among them unless we are a
    /// client.
    pub(super) fn new(
        items: Vec<(DhtId, Item)>,
        results: &[KeyResult],
        own: Option<Contact>,
    ) -> Self {
        let place = |(key, item): (DhtId, Item)| {
            let found = results.iter().find(|result| result.key == key);
            let mut targets: Vec<_> =
                found.map(|result| result.nearest.clone()).unwrap_or_default();
            targets.extend(own);
            targets.sort_by_key(|contact| contact.node_id.distance(&key));
            Placing { key, item, targets: targets.into(), waiting: 0, responded: 0, accepted: 0 }
        };
        Self { items: items.into_iter().map(place).collect(), calls: 0 }
    }

    /// Nodes to try now with the items for each; nothing while a round is under way.
    fn next_round(&mut self) -> BTreeMap<PeerId, Vec<(usize, DhtId, Item)>> {
        let mut round: BTreeMap<PeerId, Vec<_>> = BTreeMap::new();
        if self.calls > 0 {
            return round;
        }
        for (index, placing) in self.items.iter_mut().enumerate() {
            while placing.responded + placing.waiting < REPLICAS {
                let Some(target) = placing.targets.pop_front() else {
                    break;
                };
                placing.waiting += 1;
                round.entry(target.peer_id).or_default().push((
                    index,
                    placing.key,
                    placing.item.clone(),
                ));
            }
        }
        round
    }

    /// Notes what became of one item at one node; `None` if the node did not respond.
    fn placed(&mut self, index: usize, accepted: Option<bool>) {
        let Some(placing) = self.items.get_mut(index) else {
            return;
        };
        placing.waiting = placing.waiting.saturating_sub(1);
        placing.responded += usize::from(accepted.is_some());
        placing.accepted += usize::from(accepted == Some(true));
    }

    /// Notes that a node which had refused an item was asked once more.
    pub(super) fn renewed(&mut self, index: usize, accepted: bool) {
        self.calls = self.calls.saturating_sub(1);
        if let Some(placing) = self.items.get_mut(index) {
            placing.accepted += usize::from(accepted);
        }
    }

    /// An item, if it is an entry under `tag`.
    fn of(&self, index: usize, tag: &Bytes) -> Option<(DhtId, Item)> {
        let placing = self.items.get(index)?;
        let is_own = matches!(&placing.item, Item::Entry(other, _) if other == tag);
        is_own.then(|| (placing.key, placing.item.clone()))
    }
}

impl Node {
    /// Starts the next round, or ends the store.
    pub(super) fn advance_store(&mut self, id: OperationId, now: f64) {
        loop {
            let Some(DhtOperation::Storing(rounds)) = self.operations.get_mut(&id) else {
                return;
            };
            let mut round = rounds.next_round();
            if rounds.calls == 0 && round.is_empty() {
                break;
            }
            for (index, key, item) in round.remove(&self.config.own.peer_id).unwrap_or_default() {
                let accepted = self.storage.store(key, item, now);
                rounds.placed(index, Some(accepted));
            }
            if round.is_empty() && rounds.calls > 0 {
                return;
            }
            for (peer, items) in round {
                for (request, indexes) in self.store_requests(items, false) {
                    if let Some(DhtOperation::Storing(rounds)) = self.operations.get_mut(&id) {
                        rounds.calls += 1;
                    }
                    self.call(
                        peer,
                        DhtRequest::Store(request),
                        LookupPurpose::Store(id, indexes),
                        now,
                    );
                }
            }
        }
        if let Some(DhtOperation::Storing(rounds)) = self.operations.remove(&id) {
            let accepted = rounds.items.iter().map(|placing| placing.accepted).collect();
            self.actions.push(DhtAction::Stored { id, accepted });
        }
    }

    pub(super) fn on_store_answer(
        &mut self,
        id: OperationId,
        peer: PeerId,
        indexes: &[usize],
        response: Option<Response>,
        now: f64,
    ) {
        let Some(DhtOperation::Storing(rounds)) = self.operations.get_mut(&id) else {
            return;
        };
        rounds.calls = rounds.calls.saturating_sub(1);
        let flags = match response {
            Some(Response::Store(response)) if response.store_ok.len() == indexes.len() => {
                response.store_ok
            }
            _ => Vec::new(),
        };
        let own_tag = tag_of(&self.config.own.peer_id);
        let mut refusals = Vec::new();
        for (position, &index) in indexes.iter().enumerate() {
            let accepted = flags.get(position).copied();
            rounds.placed(index, accepted);
            if accepted == Some(false)
                && let Some((key, item)) = rounds.of(index, &own_tag)
            {
                rounds.calls += 1;
                refusals.push(RecordRefusal { id, index, key, item });
            }
        }
        for refusal in refusals {
            self.contest(peer, refusal, now);
        }
        self.advance_store(id, now);
    }

    /// Store requests of bounded size for `items`, each with the indexes that came with its items.
    pub(super) fn store_requests(
        &self,
        items: Vec<(usize, DhtId, Item)>,
        in_cache: bool,
    ) -> Vec<(StoreRequest, Vec<usize>)> {
        let mut requests: Vec<(StoreRequest, Vec<usize>)> = Vec::new();
        let mut bytes = usize::MAX;
        for (index, key, item) in items {
            let (tag, value, expiration) = item.to_wire();
            let size = tag.len() + value.len();
            let full = requests.last().is_none_or(|(_, indexes)| indexes.len() >= MAX_ITEMS);
            if full || bytes.saturating_add(size) > MAX_REQUEST_BYTES {
                let empty =
                    StoreRequest { peer: Some(self.node_info()), ..StoreRequest::default() };
                requests.push((empty, Vec::new()));
                bytes = 0;
            }
            bytes += size;
            if let Some((request, indexes)) = requests.last_mut() {
                request.keys.push(Bytes::copy_from_slice(&key.0));
                request.subkeys.push(tag);
                request.values.push(value);
                request.expiration_time.push(expiration);
                request.in_cache.push(in_cache);
                indexes.push(index);
            }
        }
        requests
    }
}
