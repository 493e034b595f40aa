//! The DHT on the network: one task that feeds the pure [`Node`] with requests, answers and time,
//! and carries out what it wants.
//!
//! ```text
//!   callers ──get_many, store_many, join──> Command ──> task: Node::on ──Action::Call──> P2p::call_unary
//!   netd's dispatcher ──handle_inbound────> Command ──>   └───Answered <──────────────────────┘
//! ```
//!
//! Invariants: each command is answered once or its sender sees the task's end; each call ends
//! within its timeout; commands and calls under way are bounded.

use super::id::DhtId;
use super::node::{
    CallId, DhtAction, DhtEvent, DhtRequest, InboundId, JoinError, Node, NodeConfig, OperationId,
    Response,
};
use super::routing::Contact;
use super::storage::{Item, StorageLimits, StoredValue};
use crate::names::{DHT_FIND, DHT_PING, DHT_STORE};
use crate::wire::fields;
use crate::wire::messages::{FindRequest, NodeInfo, PingRequest, StoreRequest};
use bytes::Bytes;
use futures::future::{BoxFuture, FutureExt, join_all};
use futures::stream::{FuturesUnordered, StreamExt};
use p2p::task;
use p2p::{CallError, P2p, ProtocolKind, ProtocolSpec};
use p2p::{Multiaddr, PeerId};
use prost::Message;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};
use thiserror::Error;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tracing::{debug, info, warn};

/// How long a call may take, call-backs included (`wait_timeout` of hivemind).
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a call may take at most while the node joins: later attempts give initial peers more time.
const JOIN_CALL_TIMEOUT_MAX: Duration = Duration::from_secs(48);
/// Pause before initial peers of whom none answered are asked again.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// How long a ping that measures may take (Petals' servers).
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a get or store may take: several rounds of dead nodes.
pub(super) const OPERATION_TIMEOUT: Duration = Duration::from_secs(120);
/// Fields of one request, elements of its lists counted one by one: the longest is a store of 1,024
/// items.
pub(super) const MAX_FIELDS: usize = 6 * 1024;
/// Commands that wait for the task; more make their senders wait.
const COMMAND_QUEUE: usize = 256;
/// Calls under way; more wait.
pub(super) const MAX_CALLS: usize = 512;
/// Time between ticks of the node.
const TICK: Duration = Duration::from_secs(1);
/// First pause between attempts to find initial peers again that are no longer known; doubles.
const REJOIN_MIN: Duration = Duration::from_secs(10);
/// Longest pause between these attempts.
const REJOIN_MAX: Duration = Duration::from_secs(300);

/// How a node takes part in the DHT.
#[derive(Clone, Debug)]
pub struct DhtConfig {
    /// Whether it only asks: it keeps nothing and others do not learn of it.
    pub client_mode: bool,
    /// Through whom it enters; empty for a new swarm.
    pub initial_peers: Vec<Multiaddr>,
    /// Calls under way per lookup. Petals: as many as the model has blocks for servers, 32 for
    /// clients.
    pub num_workers: usize,
    /// Whether joining fails if initial peers cannot call this node.
    pub strict: bool,
    /// Bounds on what it keeps for others.
    pub limits: StorageLimits,
}

/// The DHT cannot do what was asked.
#[derive(Clone, Debug, Error)]
pub enum DhtError {
    /// No initial peer can be connected.
    #[error("cannot reach any of the initial peers: {0}")]
    Unreachable(String),
    /// The initial peers refuse this node.
    #[error("cannot join the swarm: {0}")]
    Join(#[from] JoinError),
    /// An operation took too long.
    #[error("the DHT did not answer within {0:?}")]
    Timeout(Duration),
    /// The node has ended.
    #[error("the DHT node has ended")]
    Stopped,
}

/// What is known about the node right now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DhtStats {
    /// Nodes in the routing table.
    pub known_nodes: usize,
    /// Keys kept for the swarm.
    pub stored_keys: usize,
    /// Bytes kept for the swarm.
    pub stored_bytes: usize,
}

/// A node of the DHT. Clones are handles of the same node, which ends when all are dropped.
#[derive(Clone, Debug)]
pub struct Dht {
    commands: mpsc::Sender<DhtCommand>,
    p2p: P2p,
    node_info: NodeInfo,
    initial_peers: Arc<[Multiaddr]>,
    rejoined: watch::Receiver<u64>,
    counts: Arc<DhtCounts>,
}

/// What a node has done so far, and what it holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DhtFigures {
    /// Nodes in the routing table.
    pub nodes: u64,
    /// Keys kept for the swarm.
    pub records: u64,
    /// Bytes kept for the swarm.
    pub record_bytes: u64,
    /// Keys that were looked up.
    pub lookups: u64,
    /// Items that were written.
    pub stores: u64,
    /// Calls to other nodes.
    pub calls: u64,
    /// Those of them that came to nothing.
    pub failed_calls: u64,
    /// Records of our own that a node refused since it had a later one under our name.
    pub refused_renewals: u64,
    /// Records dropped for lack of space.
    pub evicted: u64,
}

/// Figures as the task counts them. It alone writes; anybody reads without asking it.
#[derive(Debug, Default)]
struct DhtCounts {
    nodes: AtomicU64,
    records: AtomicU64,
    record_bytes: AtomicU64,
    lookups: AtomicU64,
    stores: AtomicU64,
    calls: AtomicU64,
    failed_calls: AtomicU64,
    refused_renewals: AtomicU64,
    evicted: AtomicU64,
}

type JoinReply = oneshot::Sender<Result<(), JoinError>>;

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "moved once, into the bounded queue")]
enum DhtCommand {
    Inbound { peer: PeerId, request: DhtRequest, reply: oneshot::Sender<Result<Response, String>> },
    Join { peers: Vec<PeerId>, call_timeout: Duration, reply: JoinReply },
    Get { keys: Vec<DhtId>, latest: bool, reply: oneshot::Sender<Vec<Option<StoredValue>>> },
    Store { items: Vec<(DhtId, Item)>, reply: oneshot::Sender<Vec<usize>> },
    Stats { reply: oneshot::Sender<DhtStats> },
    Peers { reply: oneshot::Sender<Vec<PeerId>> },
}

/// The RPCs that a node serves unless it is a client; part of [`p2p::P2pConfig`].
#[must_use]
pub fn protocols() -> Vec<ProtocolSpec> {
    let spec = |name| ProtocolSpec {
        name,
        kind: ProtocolKind::Unary,
        // A lookup asks a node about several groups of keys at once; hivemind does not bound that.
        max_inbound_per_peer: 64,
        max_inbound_total: 1024,
    };
    [DHT_PING, DHT_STORE, DHT_FIND].map(spec).into()
}

impl Dht {
    /// Counts records that were read and are not believed.
    pub fn count_bad_records(&self, count: u64) {
        self.p2p.count_bad_records(count);
    }

    /// Starts a node that knows nobody. Route requests for [`protocols`] to
    /// [`Self::handle_inbound`], then [`Self::join`]. To be called within a tokio runtime.
    #[must_use]
    pub fn start(p2p: P2p, config: DhtConfig) -> Self {
        let own = Contact { node_id: DhtId(rand::random()), peer_id: p2p.peer_id() };
        let node = Node::new(NodeConfig {
            own,
            client_mode: config.client_mode,
            workers: config.num_workers,
            strict: config.strict,
            limits: config.limits,
        });
        let node_info = node.node_info();
        let (commands, queue) = mpsc::channel(COMMAND_QUEUE);
        let (rejoined_sender, rejoined) = watch::channel(0);
        let driver = DhtDriver {
            node,
            p2p: p2p.clone(),
            permits: Arc::new(Semaphore::new(MAX_CALLS)),
            calls: FuturesUnordered::new(),
            inbound: HashMap::new(),
            operations: HashMap::new(),
            next_id: 0,
            join_peers: Vec::new(),
            rejoin_at: Instant::now(),
            rejoin_pause: REJOIN_MIN,
            rejoined: rejoined_sender,
            call_timeout: CALL_TIMEOUT,
            counts: Arc::default(),
        };
        let counts = driver.counts.clone();
        task::spawn(driver.run(queue));
        let initial_peers = config.initial_peers.into();
        Self { commands, p2p, node_info, initial_peers, rejoined, counts }
    }

    /// How often the node has found initial peers again after they, or it, had been away: what it
    /// stored may be gone there. To be watched.
    #[must_use]
    pub fn rejoined(&self) -> watch::Receiver<u64> {
        self.rejoined.clone()
    }

    /// Enters the swarm through the initial peers; without any, this node is a new swarm. Requests
    /// must already be routed to [`Self::handle_inbound`]: initial peers call back to see whether
    /// this node is reachable.
    ///
    /// While none of those that are connected answers, they are asked again, each time with twice as
    /// long to answer, until `patience` is over.
    ///
    /// # Errors
    /// [`DhtError`]; its text tells an operator what is wrong.
    pub fn join(&self, patience: Duration) -> BoxFuture<'_, Result<(), DhtError>> {
        Box::pin(async move {
            let deadline = Instant::now() + patience;
            let connect = |addr: &Multiaddr| {
                let (p2p, addr) = (self.p2p.clone(), addr.clone());
                async move { p2p.connect(addr).await.map_err(|error| error.to_string()) }
            };
            let (mut peers, mut failures) = (Vec::new(), Vec::new());
            for outcome in join_all(self.initial_peers.iter().map(connect)).await {
                match outcome {
                    Ok(peer) if !peers.contains(&peer) => peers.push(peer),
                    Ok(_) => {}
                    Err(failure) => failures.push(failure),
                }
            }
            if peers.is_empty() && !self.initial_peers.is_empty() {
                return Err(DhtError::Unreachable(failures.join("; ")));
            }
            let mut call_timeout = CALL_TIMEOUT;
            loop {
                let peers = peers.clone();
                let join = |reply| DhtCommand::Join { peers, call_timeout, reply };
                match self.ask(join).await? {
                    Err(error @ JoinError::NoAnswer(_))
                        if Instant::now() + ASK_AGAIN < deadline =>
                    {
                        info!(%error, "asking again");
                    }
                    outcome => return outcome.map_err(DhtError::from),
                }
                tokio::time::sleep(ASK_AGAIN).await;
                let left = deadline.saturating_duration_since(Instant::now());
                call_timeout = (2 * call_timeout).min(left.min(JOIN_CALL_TIMEOUT_MAX));
            }
        })
    }

    /// Reads keys. With `latest`, asks all nodes near each key and unites what they have; otherwise
    /// stops at the first live value. Values are in the order of `keys`.
    ///
    /// # Errors
    /// [`DhtError::Timeout`] or [`DhtError::Stopped`].
    pub async fn get_many(
        &self,
        keys: Vec<DhtId>,
        latest: bool,
    ) -> Result<Vec<Option<StoredValue>>, DhtError> {
        self.ask(|reply| DhtCommand::Get { keys, latest, reply }).await
    }

    /// Writes items: for each, in the order given, how many nodes accepted it (five if all is well,
    /// fewer in a small swarm).
    ///
    /// # Errors
    /// [`DhtError::Timeout`] or [`DhtError::Stopped`].
    pub async fn store_many(&self, items: Vec<(DhtId, Item)>) -> Result<Vec<usize>, DhtError> {
        self.ask(|reply| DhtCommand::Store { items, reply }).await
    }

    /// Measures the time to a peer and back.
    ///
    /// # Errors
    /// [`CallError`]: the peer does not answer within 5 s, or does not serve the DHT (relayed servers do not).
    pub async fn ping(&self, peer: PeerId) -> Result<Duration, CallError> {
        let request =
            PingRequest { auth: None, peer: Some(self.node_info.clone()), validate: false };
        let started = Instant::now();
        let answer =
            self.p2p.call_unary(peer, DHT_PING, request.encode_to_vec().into(), PING_TIMEOUT);
        answer.await.map(|_| started.elapsed())
    }

    /// Looks a random key up, which refreshes the routing table and shows whether the swarm is
    /// alive: the number of nodes known afterwards.
    ///
    /// # Errors
    /// [`DhtError::Timeout`] or [`DhtError::Stopped`].
    pub async fn random_lookup(&self) -> Result<usize, DhtError> {
        self.get_many(vec![DhtId(rand::random())], true).await?;
        Ok(self.stats().await?.known_nodes)
    }

    /// The state of the node.
    ///
    /// # Errors
    /// [`DhtError::Timeout`] or [`DhtError::Stopped`].
    pub async fn stats(&self) -> Result<DhtStats, DhtError> {
        self.ask(|reply| DhtCommand::Stats { reply }).await
    }

    /// What the node has done and holds, as of about a second ago; waits for nothing.
    #[must_use]
    pub fn figures(&self) -> DhtFigures {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        DhtFigures {
            nodes: load(&self.counts.nodes),
            records: load(&self.counts.records),
            record_bytes: load(&self.counts.record_bytes),
            lookups: load(&self.counts.lookups),
            stores: load(&self.counts.stores),
            calls: load(&self.counts.calls),
            failed_calls: load(&self.counts.failed_calls),
            refused_renewals: load(&self.counts.refused_renewals),
            evicted: load(&self.counts.evicted),
        }
    }

    /// The peers in the routing table.
    ///
    /// # Errors
    /// [`DhtError::Timeout`] or [`DhtError::Stopped`].
    pub async fn peers(&self) -> Result<Vec<PeerId>, DhtError> {
        self.ask(|reply| DhtCommand::Peers { reply }).await
    }

    /// Answers a request of a peer to one of [`protocols`]. May take as long as a call-back, so
    /// give each request a task.
    ///
    /// # Errors
    /// The text for the caller.
    pub async fn handle_inbound(
        &self,
        protocol: &str,
        peer: PeerId,
        request: Bytes,
    ) -> Result<Bytes, String> {
        if !fields::has_at_most(&request, MAX_FIELDS) {
            return Err(format!("ValueError('a request has at most {MAX_FIELDS} fields')"));
        }
        let malformed =
            |error: prost::DecodeError| format!("ValueError('cannot read the request: {error}')");
        let request = match protocol {
            DHT_PING => PingRequest::decode(request).map(DhtRequest::Ping).map_err(malformed)?,
            DHT_STORE => StoreRequest::decode(request).map(DhtRequest::Store).map_err(malformed)?,
            DHT_FIND => FindRequest::decode(request).map(DhtRequest::Find).map_err(malformed)?,
            other => return Err(format!("ValueError('the DHT does not serve {other}')")),
        };
        let reply = self.ask(|reply| DhtCommand::Inbound { peer, request, reply }).await;
        Ok(encode_response(&reply.map_err(|error| error.to_string())??))
    }

    async fn ask<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> DhtCommand,
    ) -> Result<T, DhtError> {
        let (reply, answer) = oneshot::channel();
        let ask = async {
            self.commands.send(command(reply)).await.map_err(|_| DhtError::Stopped)?;
            answer.await.map_err(|_| DhtError::Stopped)
        };
        tokio::time::timeout(OPERATION_TIMEOUT, ask)
            .await
            .map_err(|_| DhtError::Timeout(OPERATION_TIMEOUT))?
    }
}

/// Unix seconds.
#[must_use]
pub fn unix_now() -> f64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

type Ended = (CallId, Option<Response>);

struct DhtDriver {
    node: Node,
    p2p: P2p,
    permits: Arc<Semaphore>,
    calls: FuturesUnordered<BoxFuture<'static, Ended>>,
    inbound: HashMap<InboundId, oneshot::Sender<Result<Response, String>>>,
    operations: HashMap<OperationId, Waiter>,
    next_id: u64,
    /// Initial peers by id, for joining again when they were away.
    join_peers: Vec<PeerId>,
    rejoin_at: Instant,
    rejoin_pause: Duration,
    rejoined: watch::Sender<u64>,
    /// How long a call may take: longer while the node joins slow peers.
    call_timeout: Duration,
    counts: Arc<DhtCounts>,
}

enum Waiter {
    Join(JoinReply),
    /// Nobody: the node looks for initial peers on its own.
    Rejoin,
    Get(oneshot::Sender<Vec<Option<StoredValue>>>),
    Store(oneshot::Sender<Vec<usize>>),
}

impl DhtDriver {
    async fn run(mut self, mut commands: mpsc::Receiver<DhtCommand>) {
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut reconnections = self.p2p.reconnections();
        loop {
            tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => self.command(command),
                    None => return,
                },
                Some((call, response)) = self.calls.next() => {
                    add(&self.counts.failed_calls, usize::from(response.is_none()));
                    self.feed(DhtEvent::Answered { call, response });
                }
                _ = tick.tick() => {
                    self.feed(DhtEvent::Tick);
                    self.show();
                    self.rejoin_if_lost();
                }
                // An initial peer may have come back as another node, which knows nothing of this one.
                Ok(()) = reconnections.changed() => self.rejoin(self.join_peers.clone()),
            }
        }
    }

    fn command(&mut self, command: DhtCommand) {
        match command {
            DhtCommand::Inbound { peer, request, reply } => {
                let id = InboundId(self.id());
                self.inbound.insert(id, reply);
                let refused_before = self.node.refused();
                let net = self.p2p.net_of(&peer);
                self.feed(DhtEvent::Inbound { id, from: peer, net, request });
                self.p2p.count_bad_records(self.node.refused() - refused_before);
            }
            DhtCommand::Join { peers, call_timeout, reply } => {
                self.join_peers.clone_from(&peers);
                self.call_timeout = call_timeout;
                self.rejoin_at = Instant::now() + REJOIN_MIN;
                let id = self.operation(Waiter::Join(reply));
                self.feed(DhtEvent::Join { id, peers });
            }
            DhtCommand::Get { keys, latest, reply } => {
                add(&self.counts.lookups, keys.len());
                let id = self.operation(Waiter::Get(reply));
                self.feed(DhtEvent::Get { id, keys, latest });
            }
            DhtCommand::Store { items, reply } => {
                add(&self.counts.stores, items.len());
                let id = self.operation(Waiter::Store(reply));
                self.feed(DhtEvent::Store { id, items });
            }
            DhtCommand::Stats { reply } => {
                let storage = self.node.storage();
                let stats = DhtStats {
                    known_nodes: self.node.table().len(),
                    stored_keys: storage.len(),
                    stored_bytes: storage.bytes(),
                };
                // Nobody waits any more if the asker gave up.
                let _ = reply.send(stats);
            }
            DhtCommand::Peers { reply } => {
                let contacts = self.node.table().contacts();
                let _ = reply.send(contacts.map(|contact| contact.peer_id).collect());
            }
        }
    }

    /// Looks for initial peers that are not known any more, with pauses that double until they are.
    fn rejoin_if_lost(&mut self) {
        if self.rejoin_at.elapsed().is_zero() || self.join_peers.is_empty() {
            return;
        }
        let known: HashSet<PeerId> = self.node.table().contacts().map(|c| c.peer_id).collect();
        let peers = self.join_peers.iter().filter(|peer| !known.contains(peer));
        let lost: Vec<PeerId> = peers.copied().collect();
        if lost.is_empty() {
            self.rejoin_pause = REJOIN_MIN;
            self.rejoin_at = Instant::now() + REJOIN_MIN;
            return;
        }
        if known.is_empty() {
            info!("routing table is empty, joining the DHT again");
        }
        self.rejoin_at = Instant::now() + self.rejoin_pause;
        self.rejoin_pause = (2 * self.rejoin_pause).min(REJOIN_MAX);
        self.rejoin(lost);
    }

    fn rejoin(&mut self, peers: Vec<PeerId>) {
        if !peers.is_empty() {
            let id = self.operation(Waiter::Rejoin);
            self.feed(DhtEvent::Join { id, peers });
        }
    }

    fn feed(&mut self, event: DhtEvent) {
        for action in self.node.on(event, unix_now()) {
            self.act(action);
        }
    }

    /// Replies to those who gave up are dropped.
    fn act(&mut self, action: DhtAction) {
        match action {
            DhtAction::Call { call, peer, request } => self.call(call, peer, request),
            DhtAction::Reply { id, response } => {
                if let Some(reply) = self.inbound.remove(&id) {
                    let _ = reply.send(response);
                }
            }
            DhtAction::Joined { id, result } => match self.operations.remove(&id) {
                Some(Waiter::Join(reply)) => {
                    self.call_timeout = CALL_TIMEOUT;
                    drop(reply.send(result));
                }
                _ => match result {
                    Ok(()) => self.rejoined.send_modify(|count| *count += 1),
                    Err(error) => debug!(%error, "cannot join the DHT again"),
                },
            },
            DhtAction::Found { id, found } => {
                if let Some(Waiter::Get(reply)) = self.operations.remove(&id) {
                    let _ = reply.send(found.into_iter().map(|(_, stored)| stored).collect());
                }
            }
            DhtAction::Stored { id, accepted } => {
                if let Some(Waiter::Store(reply)) = self.operations.remove(&id) {
                    let _ = reply.send(accepted);
                }
            }
        }
    }

    /// Shows what the node holds.
    fn show(&self) {
        let storage = self.node.storage();
        let set = |count: &AtomicU64, value: usize| count.store(value as u64, Ordering::Relaxed);
        set(&self.counts.nodes, self.node.table().len());
        set(&self.counts.records, storage.len());
        set(&self.counts.record_bytes, storage.bytes());
        self.counts.evicted.store(storage.evicted(), Ordering::Relaxed);
        let refused = self.node.refused_renewals();
        if self.counts.refused_renewals.swap(refused, Ordering::Relaxed) < refused {
            warn!(refused, "DHT nodes hold records under our PeerID that we did not write");
        }
    }

    fn call(&self, call: CallId, peer: PeerId, request: DhtRequest) {
        add(&self.counts.calls, 1);
        let (p2p, permits) = (self.p2p.clone(), Arc::clone(&self.permits));
        let call_timeout = self.call_timeout;
        let task = async move {
            let _permit = permits.acquire_owned().await;
            let (protocol, message) = encode_request(&request);
            let response = match p2p.call_unary(peer, protocol, message, call_timeout).await {
                Ok(bytes) => decode_response(&request, bytes),
                Err(error) => {
                    debug!(%peer, protocol, %error, "DHT call failed");
                    None
                }
            };
            (call, response)
        };
        self.calls.push(task.boxed());
    }

    fn operation(&mut self, waiter: Waiter) -> OperationId {
        let id = OperationId(self.id());
        self.operations.insert(id, waiter);
        id
    }

    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

fn add(count: &AtomicU64, more: usize) {
    count.fetch_add(more as u64, Ordering::Relaxed);
}

fn encode_request(request: &DhtRequest) -> (&'static str, Bytes) {
    match request {
        DhtRequest::Ping(request) => (DHT_PING, request.encode_to_vec().into()),
        DhtRequest::Store(request) => (DHT_STORE, request.encode_to_vec().into()),
        DhtRequest::Find(request) => (DHT_FIND, request.encode_to_vec().into()),
    }
}

fn encode_response(response: &Response) -> Bytes {
    match response {
        Response::Ping(response) => response.encode_to_vec().into(),
        Response::Store(response) => response.encode_to_vec().into(),
        Response::Find(response) => response.encode_to_vec().into(),
    }
}

/// The answer to `request`; one that cannot be read counts as none.
fn decode_response(request: &DhtRequest, bytes: Bytes) -> Option<Response> {
    match request {
        DhtRequest::Ping(_) => Message::decode(bytes).map(Response::Ping).ok(),
        DhtRequest::Store(_) => Message::decode(bytes).map(Response::Store).ok(),
        DhtRequest::Find(_) => Message::decode(bytes).map(Response::Find).ok(),
    }
}

#[cfg(test)]
mod tests;
