//! One node of the DHT as a pure state machine: [`Node::on`] takes an [`DhtEvent`] and the time, and
//! returns [`DhtAction`]s. Source: `hivemind/dht/node.py` and `hivemind/dht/protocol.py`.
//!
//! ```text
//!  inbound request ──> answer at once (store, find, plain ping)
//!                  └─> ping with validation: call back, then answer
//!  join  ── pings to initial peers ──> lookup of our own id ──> Joined
//!  get   ── lookup ──> Found, and a copy to the nearest node that lacked it
//!  store ── lookup ──> rounds of calls to the nearest nodes until `REPLICAS` responded ──> Stored
//! ```
//!
//! Invariants: every [`DhtAction::Call`] is answered by one [`DhtEvent::Answered`] (the driver's timeout
//! sees to it), so every operation ends; every answer updates the routing table, a failed call removes
//! the peer. A caller enters the table once it has answered a ping at the id that it claims
//! (hivemind: at once).

use super::answer;
use super::id::DhtId;
use super::lookup::{FindCall, KeyResult, Lookup, LookupAnswer, REPLICAS, Wanted};
use super::routing::{BUCKET_SIZE, Contact, RoutingTable, Seen};
use super::storage::{Dictionary, Item, Owner, Storage, StorageLimits, StoredValue, Timed};
use crate::wire::messages::{
    FindRequest, FindResponse, FindResult, NodeInfo, PingRequest, PingResponse, ResultType,
    StoreRequest, StoreResponse,
};
use bytes::Bytes;
use p2p::Net;
use p2p::PeerId;
use std::collections::{BTreeMap, HashMap};
use thiserror::Error;

mod blacklist;
mod events;
mod renewal;
mod store;
pub(super) mod verify;
pub(super) mod welcome;

use blacklist::Blacklist;
pub use events::*;
use renewal::RecordRefusal;
use store::StoreRounds;
use verify::Verifying;
use welcome::Welcomes;

/// Seconds by which clocks may differ.
pub const MAX_CLOCK_SKEW_S: f64 = 3.0;
/// Call-backs of pings under way; more are answered "not available".
pub(super) const MAX_CALL_BACKS: usize = 256;
/// Seconds between sweeps of the stores.
const SWEEP_PERIOD_S: f64 = 10.0;

/// What a node is made with.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Ourselves.
    pub own: Contact,
    /// Whether we stay out of others' routing tables and answer nobody.
    pub client_mode: bool,
    /// Calls under way per lookup.
    pub workers: usize,
    /// Whether joining fails if an initial peer cannot call us back.
    pub strict: bool,
    /// Bounds of the main store, and of the cache.
    pub limits: StorageLimits,
}

/// A node. See the module.
#[derive(Debug)]
pub struct Node {
    config: NodeConfig,
    table: RoutingTable,
    storage: Storage,
    cache: Storage,
    blacklist: Blacklist,
    welcomes: Welcomes,
    verifying: Verifying,
    refused_renewals: u64,
    /// When our own latest record under each key ends.
    said: HashMap<DhtId, f64>,
    calls: HashMap<CallId, PendingRequest>,
    operations: HashMap<OperationId, DhtOperation>,
    call_backs: usize,
    next_call: u64,
    swept_at: f64,
    actions: Vec<DhtAction>,
}

#[derive(Debug)]
struct PendingRequest {
    peer: PeerId,
    sent_at: f64,
    purpose: LookupPurpose,
}

#[derive(Debug)]
enum LookupPurpose {
    /// Nothing but the routing table depends on it.
    Background,
    CallBack {
        id: InboundId,
        claimed: DhtId,
    },
    Join(OperationId),
    Find(OperationId, FindCall),
    Store(OperationId, Vec<usize>),
    /// What a node has that refused a record of our own.
    Contest(RecordRefusal),
    /// The same record once more, with a later expiration.
    Renewal(OperationId, usize),
    /// Whether a caller is who it claims to be.
    Verify {
        claimed: DhtId,
    },
}

#[derive(Debug)]
enum DhtOperation {
    Pinging { asked: usize, waiting: usize, answered: usize, error: Option<JoinError> },
    Looking { lookup: Lookup, goal: Goal },
    Storing(StoreRounds),
}

#[derive(Debug)]
enum Goal {
    Join,
    Get,
    Store(Vec<(DhtId, Item)>),
}

impl Node {
    /// A node that knows nobody.
    #[must_use]
    pub fn new(config: NodeConfig) -> Self {
        Self {
            table: RoutingTable::new(config.own.node_id),
            storage: Storage::new(config.limits, config.own.peer_id),
            cache: Storage::new(config.limits, config.own.peer_id),
            blacklist: Blacklist::default(),
            welcomes: Welcomes::default(),
            verifying: Verifying::default(),
            refused_renewals: 0,
            said: HashMap::new(),
            calls: HashMap::new(),
            operations: HashMap::new(),
            call_backs: 0,
            next_call: 0,
            swept_at: 0.0,
            actions: Vec::new(),
            config,
        }
    }

    /// The nodes known.
    #[must_use]
    pub fn table(&self) -> &RoutingTable {
        &self.table
    }

    /// The main store.
    #[must_use]
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Items of others refused so far, by the main store and the cache.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.storage.refused() + self.cache.refused()
    }

    /// Records of our own that a node refused since it had a later one under our name.
    #[must_use]
    pub fn refused_renewals(&self) -> u64 {
        self.refused_renewals
    }

    /// How we name ourselves in messages.
    #[must_use]
    pub fn node_info(&self) -> NodeInfo {
        let id = if self.config.client_mode { &[][..] } else { &self.config.own.node_id.0 };
        NodeInfo { node_id: Bytes::copy_from_slice(id) }
    }

    /// Takes an event that happened at `now` (Unix seconds).
    pub fn on(&mut self, event: DhtEvent, now: f64) -> Vec<DhtAction> {
        match event {
            DhtEvent::Inbound { id, from, net, request } => {
                self.on_inbound(id, from, net, request, now);
            }
            DhtEvent::Answered { call, response } => self.on_answered(call, response, now),
            DhtEvent::Join { id, peers } => self.join(id, peers, now),
            DhtEvent::Get { id, keys, latest } => {
                let sufficient = if latest { f64::INFINITY } else { now };
                self.look(id, keys, sufficient, Goal::Get, now);
            }
            DhtEvent::Store { id, items } => {
                self.note_own(&items, now);
                let mut keys: Vec<_> = items.iter().map(|(key, _)| *key).collect();
                keys.sort_unstable();
                keys.dedup();
                self.look(id, keys, f64::INFINITY, Goal::Store(items), now);
            }
            DhtEvent::Tick => self.tick(now),
        }
        std::mem::take(&mut self.actions)
    }

    fn tick(&mut self, now: f64) {
        if now - self.swept_at >= SWEEP_PERIOD_S {
            self.swept_at = now;
            self.storage.drop_expired(now);
            self.cache.drop_expired(now);
            self.blacklist.drop_expired(now);
            self.welcomes.drop_expired(now);
            self.said.retain(|_, end| *end >= now);
        }
    }

    // Requests of others.

    fn on_inbound(&mut self, id: InboundId, from: PeerId, net: Net, request: DhtRequest, now: f64) {
        let info = match &request {
            DhtRequest::Ping(request) => &request.peer,
            DhtRequest::Store(request) => &request.peer,
            DhtRequest::Find(request) => &request.peer,
        };
        let caller = info.as_ref().and_then(|info| DhtId::from_wire(&info.node_id));
        let response = match request {
            DhtRequest::Ping(request) => match caller {
                Some(claimed) if request.validate => return self.call_back(id, from, claimed, now),
                _ => Ok(self.pong(false, now)),
            },
            DhtRequest::Store(request) => {
                let owner = Owner::peer(from, net);
                let stored =
                    answer::store(&owner, &request, &mut self.storage, &mut self.cache, now);
                stored.map(|store_ok| {
                    let peer = Some(self.node_info());
                    Response::Store(StoreResponse { auth: None, store_ok, peer })
                })
            }
            DhtRequest::Find(request) => {
                let stores = [&self.storage, &self.cache];
                answer::find(&request, caller.as_ref(), &self.table, stores, now).map(|results| {
                    Response::Find(FindResponse {
                        auth: None,
                        results,
                        peer: Some(self.node_info()),
                    })
                })
            }
        };
        self.actions.push(DhtAction::Reply { id, response });
        if let Some(node_id) = caller {
            self.called_by(Contact { node_id, peer_id: from }, net, now);
        }
    }

    fn pong(&self, available: bool, now: f64) -> Response {
        Response::Ping(PingResponse {
            auth: None,
            peer: Some(self.node_info()),
            dht_time: now,
            available,
        })
    }

    fn call_back(&mut self, id: InboundId, from: PeerId, claimed: DhtId, now: f64) {
        if self.call_backs >= MAX_CALL_BACKS {
            let response = Ok(self.pong(false, now));
            return self.actions.push(DhtAction::Reply { id, response });
        }
        self.call_backs += 1;
        self.ping(from, false, LookupPurpose::CallBack { id, claimed }, now);
    }

    // Answers to our calls.

    fn on_answered(&mut self, call: CallId, response: Option<Response>, now: f64) {
        let Some(pending) = self.calls.remove(&call) else {
            return;
        };
        let peer = pending.peer;
        let info = match &response {
            Some(Response::Ping(response)) => response.peer.as_ref(),
            Some(Response::Store(response)) => response.peer.as_ref(),
            Some(Response::Find(response)) => response.peer.as_ref(),
            None => None,
        };
        let node_id = info.and_then(|info| DhtId::from_wire(&info.node_id));
        if matches!(response, Some(Response::Ping(_))) {
            self.blacklist.succeeded(&peer);
        }
        match (&response, node_id) {
            (None, _) => self.table.remove(&peer),
            (Some(_), Some(node_id)) if pending.purpose.admits(node_id) => {
                let contact = Contact { node_id, peer_id: peer };
                if self.met(contact, now) {
                    self.meet(contact, now);
                }
            }
            (Some(_), _) => {}
        }
        match pending.purpose {
            LookupPurpose::Background => {}
            LookupPurpose::CallBack { id, claimed } => {
                self.call_backs = self.call_backs.saturating_sub(1);
                let response = Ok(self.pong(node_id == Some(claimed), now));
                self.actions.push(DhtAction::Reply { id, response });
            }
            LookupPurpose::Join(id) => {
                self.on_join_answer(id, peer, pending.sent_at, response, now)
            }
            LookupPurpose::Find(id, call) => self.on_find_answer(id, peer, &call, response, now),
            LookupPurpose::Store(id, items) => {
                self.on_store_answer(id, peer, &items, response, now)
            }
            LookupPurpose::Contest(refusal) => self.on_contest_answer(peer, refusal, response, now),
            LookupPurpose::Renewal(id, index) => self.on_renewal_answer(id, index, response, now),
            LookupPurpose::Verify { claimed } => self.verified(peer, node_id == Some(claimed), now),
        }
    }

    /// Updates the routing table with a node heard of first hand; whether it is new to us.
    fn met(&mut self, contact: Contact, now: f64) -> bool {
        let is_new = !self.table.contains(&contact) && contact.node_id != self.config.own.node_id;
        if let Seen::Full(Some(old)) = self.table.seen(contact) {
            self.ping(old.peer_id, false, LookupPurpose::Background, now);
        }
        is_new
    }

    fn ping(&mut self, peer: PeerId, validate: bool, purpose: LookupPurpose, now: f64) {
        let request = PingRequest { auth: None, peer: Some(self.node_info()), validate };
        self.call(peer, DhtRequest::Ping(request), purpose, now);
    }

    fn call(&mut self, peer: PeerId, request: DhtRequest, purpose: LookupPurpose, now: f64) {
        let call = CallId(self.next_call);
        self.next_call += 1;
        self.calls.insert(call, PendingRequest { peer, sent_at: now, purpose });
        self.actions.push(DhtAction::Call { call, peer, request });
    }

    // Joining.

    fn join(&mut self, id: OperationId, peers: Vec<PeerId>, now: f64) {
        if peers.is_empty() {
            return self.actions.push(DhtAction::Joined { id, result: Ok(()) });
        }
        let asked = peers.len();
        let operation = DhtOperation::Pinging { asked, waiting: asked, answered: 0, error: None };
        self.operations.insert(id, operation);
        for peer in peers {
            self.ping(peer, !self.config.client_mode, LookupPurpose::Join(id), now);
        }
    }

    fn on_join_answer(
        &mut self,
        id: OperationId,
        peer: PeerId,
        sent_at: f64,
        response: Option<Response>,
        now: f64,
    ) {
        let demands_call_back = self.config.strict && !self.config.client_mode;
        let Some(DhtOperation::Pinging { asked, waiting, answered, error }) =
            self.operations.get_mut(&id)
        else {
            return;
        };
        *waiting = waiting.saturating_sub(1);
        if let Some(Response::Ping(response)) = response {
            *answered += 1;
            let skew = clock_skew(response.dht_time, sent_at, now);
            if skew != 0.0 {
                error.get_or_insert(JoinError::ClockSkew { peer, skew_s: skew });
            } else if demands_call_back && !response.available {
                error.get_or_insert(JoinError::NotReachable(peer));
            }
        }
        if *waiting > 0 {
            return;
        }
        let failure = error.take().or((*answered == 0).then_some(JoinError::NoAnswer(*asked)));
        self.operations.remove(&id);
        match failure {
            Some(error) => self.actions.push(DhtAction::Joined { id, result: Err(error) }),
            None => self.look(id, vec![self.config.own.node_id], f64::INFINITY, Goal::Join, now),
        }
    }

    // Lookups.

    fn look(&mut self, id: OperationId, keys: Vec<DhtId>, sufficient: f64, goal: Goal, now: f64) {
        let reads = matches!(goal, Goal::Get);
        let wanted = |key: DhtId| Wanted {
            key,
            seeds: self.table.nearest(&key, BUCKET_SIZE, None),
            known: reads
                .then(|| answer::best_of([&self.storage, &self.cache], &key, now))
                .flatten(),
        };
        let wanted = keys.into_iter().map(wanted).collect();
        let lookup = Lookup::new(self.config.own, wanted, sufficient, self.config.workers);
        self.operations.insert(id, DhtOperation::Looking { lookup, goal });
        self.advance(id, now);
    }

    /// Makes the calls that a lookup allows, and ends it when nothing is left.
    fn advance(&mut self, id: OperationId, now: f64) {
        loop {
            let Some(DhtOperation::Looking { lookup, .. }) = self.operations.get_mut(&id) else {
                return;
            };
            let Some(call) = lookup.next_call(|peer| self.blacklist.contains(peer, now)) else {
                break;
            };
            let keys =
                lookup.keys(&call).iter().map(|key| Bytes::copy_from_slice(&key.0)).collect();
            let request = FindRequest { auth: None, keys, peer: Some(self.node_info()) };
            self.call(
                call.contact.peer_id,
                DhtRequest::Find(request),
                LookupPurpose::Find(id, call),
                now,
            );
        }
        let idle = matches!(self.operations.get(&id), Some(DhtOperation::Looking { lookup, .. }) if lookup.is_idle());
        if idle && let Some(DhtOperation::Looking { lookup, goal }) = self.operations.remove(&id) {
            self.looked(id, lookup.finish(now), goal, now);
        }
    }

    fn on_find_answer(
        &mut self,
        id: OperationId,
        peer: PeerId,
        call: &FindCall,
        response: Option<Response>,
        now: f64,
    ) {
        let results = match response {
            Some(Response::Find(response)) if response.results.len() == call.searches.len() => {
                Some(response.results)
            }
            _ => None,
        };
        match &results {
            Some(_) => self.blacklist.succeeded(&peer),
            None => self.blacklist.failed(peer, now),
        }
        if let Some(DhtOperation::Looking { lookup, .. }) = self.operations.get_mut(&id) {
            match results {
                Some(results) => {
                    lookup.on_answers(call, results.into_iter().map(parse_result).collect())
                }
                None => lookup.on_failure(call),
            }
            self.advance(id, now);
        }
    }

    fn looked(&mut self, id: OperationId, results: Vec<KeyResult>, goal: Goal, now: f64) {
        match goal {
            Goal::Join => self.actions.push(DhtAction::Joined { id, result: Ok(()) }),
            Goal::Get => {
                results.iter().for_each(|result| self.cache_result(result, now));
                let live = |result: KeyResult| {
                    (result.key, result.found.and_then(|found| found.live(now)))
                };
                self.actions
                    .push(DhtAction::Found { id, found: results.into_iter().map(live).collect() });
            }
            Goal::Store(items) => {
                let own = (!self.config.client_mode).then_some(self.config.own);
                self.operations
                    .insert(id, DhtOperation::Storing(StoreRounds::new(items, &results, own)));
                self.advance_store(id, now);
            }
        }
    }

    /// Keeps a copy of a value newer than ours, and gives one to the nearest node that lacks it.
    fn cache_result(&mut self, result: &KeyResult, now: f64) {
        let Some(found) = result.found.clone().and_then(|found| found.live(now)) else {
            return;
        };
        let ours = answer::best_of([&self.storage, &self.cache], &result.key, now);
        if ours.is_some_and(|ours| ours.expiration() >= found.expiration()) {
            return;
        }
        let item = Item::from(found);
        if let Some(nearest) =
            result.nearest.iter().find(|contact| Some(contact.node_id) != result.source)
        {
            for request in self.store_requests(vec![(0, result.key, item.clone())], true) {
                self.call(
                    nearest.peer_id,
                    DhtRequest::Store(request.0),
                    LookupPurpose::Background,
                    now,
                );
            }
        }
        self.cache.store_for(&Owner::copies(self.config.own.peer_id), result.key, item, now);
    }
}

/// Seconds by which a peer's clock lies outside of what sending and receiving times allow; 0 if it
/// does not, or is not given.
fn clock_skew(dht_time: f64, sent_at: f64, now: f64) -> f64 {
    let (earliest, latest) = (sent_at - MAX_CLOCK_SKEW_S, now + MAX_CLOCK_SKEW_S);
    match dht_time {
        time if time == 0.0 || (earliest..=latest).contains(&time) => 0.0,
        time => time - now,
    }
}

fn parse_result(result: FindResult) -> LookupAnswer {
    let timed = || Timed { value: result.value.clone(), expiration: result.expiration_time };
    let found = match result.r#type() {
        ResultType::NotFound => None,
        ResultType::FoundRegular => {
            result.expiration_time.is_finite().then(|| StoredValue::Regular(timed()))
        }
        ResultType::FoundDictionary => {
            Dictionary::decode(&result.value).map(StoredValue::Dictionary)
        }
    };
    let pairs = result.nearest_node_ids.iter().zip(&result.nearest_peer_ids).take(BUCKET_SIZE);
    let contact = |(node_id, peer_id): (&Bytes, &Bytes)| {
        Some(Contact {
            node_id: DhtId::from_wire(node_id)?,
            peer_id: PeerId::from_bytes(peer_id).ok()?,
        })
    };
    LookupAnswer { found, nearest: pairs.filter_map(contact).collect() }
}

#[cfg(test)]
mod tests;
