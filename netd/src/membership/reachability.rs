//! Whether peers can dial this server, asked of peers before it is announced, and answered to peers
//! that ask the same. Source: `petals/server/reachability.py`.
//!
//! ```text
//!   we start ── rpc_check("can you dial me?") ──> up to 5 peers ──> half or more say yes: direct, else through relays
//!   a peer asks ──> its announced addresses ∩ the IP addresses we see it at ──> a probe node of ours dials them
//!                   and asks whoever answers "are you this peer?" over the new connection
//! ```
//!
//! # Discrepancies
//!
//! Python dials any peer that it is asked about, wherever the DHT says it is. Here only the caller
//! itself is dialled, and only at IP addresses that it is connected from, so that nobody can point
//! this server at somebody else.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::select_ok;
use futures::stream::{FuturesUnordered, StreamExt};
use p2p::{Introduction, Multiaddr, P2p, P2pConfig, PeerId, Protocol, ProtocolKind, ProtocolSpec};
use parking_lot::Mutex;
use prost::Message;
use swarm::names;
use swarm::wire::messages::{NodeInfo, PingRequest, PingResponse};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, info};

/// How long asking a peer about itself may take (Petals).
const SELF_CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// How long asking a peer about another may take (Petals).
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);
/// Answers that are enough (Petals).
const MAX_ANSWERS: usize = 5;
/// Part of the answers that makes a server reachable (Petals).
const THRESHOLD: f64 = 0.5;
/// How long all asking may take: three rounds of peers that say nothing.
const CHECK_LIMIT: Duration = Duration::from_secs(30);
/// Dials for others at once.
pub(crate) const MAX_PROBES: usize = 8;
/// A caller is served once in this time.
pub(crate) const PROBE_PERIOD: Duration = Duration::from_secs(2);
/// After so long a peer answers the same caller again.
pub const ASK_AGAIN: Duration = Duration::from_secs(3);
/// Callers remembered.
const MAX_RECENT: usize = 4096;
/// Addresses dialled for one caller.
pub(crate) const MAX_DIALLED: usize = 4;
/// How long a caller may take to say where it can be dialled.
const INTRODUCTION_TIMEOUT: Duration = Duration::from_secs(2);

/// The check with its bounds, for [`P2pConfig::protocols`].
#[must_use]
pub fn protocol() -> ProtocolSpec {
    ProtocolSpec {
        name: names::REACHABILITY_CHECK,
        kind: ProtocolKind::Unary,
        max_inbound_per_peer: 4,
        max_inbound_total: 64,
    }
}

/// What was asked of a [`Checker`] so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckFigures {
    /// Callers that could be dialled.
    pub reachable: u64,
    /// Callers that could not.
    pub unreachable: u64,
    /// Refused: too many at once, too often, or about somebody else.
    pub refused: u64,
}

/// Answers `rpc_check`. Clones are handles of the same.
#[derive(Clone, Debug)]
pub struct Checker {
    p2p: P2p,
    probes: Arc<Semaphore>,
    shared: Arc<Mutex<ReachabilityState>>,
}

#[derive(Debug, Default)]
struct ReachabilityState {
    recent: HashMap<PeerId, Instant>,
    figures: CheckFigures,
}

impl Checker {
    /// Answers for the node `p2p`.
    #[must_use]
    pub fn new(p2p: P2p) -> Self {
        Self { p2p, probes: Arc::new(Semaphore::new(MAX_PROBES)), shared: Arc::default() }
    }

    /// What was asked so far.
    #[must_use]
    pub fn figures(&self) -> CheckFigures {
        self.with(|shared| shared.figures)
    }

    /// Answers a request of `caller`. About this node itself it is a sign of life; about the caller
    /// it takes seconds.
    ///
    /// # Errors
    /// The text for the caller, who then counts this node as one that did not answer.
    pub async fn answer(&self, caller: PeerId, request: Bytes) -> Result<Bytes, String> {
        let request = PingRequest::decode(request)
            .map_err(|error| format!("ValueError('cannot read the request: {error}')"))?;
        let asked = request.peer.map(|peer| peer.node_id).unwrap_or_default();
        let available = if asked == self.p2p.peer_id().to_bytes() {
            true
        } else if asked == caller.to_bytes() {
            self.dial_back(caller).await?
        } else {
            self.with(|shared| shared.figures.refused += 1);
            false
        };
        let response = PingResponse { available, ..PingResponse::default() };
        Ok(response.encode_to_vec().into())
    }

    async fn dial_back(&self, caller: PeerId) -> Result<bool, String> {
        let permit = self.probes.try_acquire();
        let admitted = permit.is_ok() && self.with(|shared| shared.admit(caller, Instant::now()));
        if !admitted {
            self.with(|shared| shared.figures.refused += 1);
            return Err("RuntimeError('too many reachability checks, ask again later')".into());
        }
        let reachable = self.probe(caller).await;
        info!(peer = %caller, reachable, "checked the reachability of a peer");
        self.with(|shared| match reachable {
            true => shared.figures.reachable += 1,
            false => shared.figures.unreachable += 1,
        });
        Ok(reachable)
    }

    async fn probe(&self, caller: PeerId) -> bool {
        let introduction = timeout(INTRODUCTION_TIMEOUT, self.p2p.introduction(caller)).await;
        let Ok(Ok(introduction)) = introduction else {
            return false;
        };
        let addrs = dialable(&introduction).await;
        debug!(peer = %caller, ?addrs, ?introduction, "dialing back");
        if addrs.is_empty() {
            return false;
        }
        let found = timeout(SELF_CHECK_TIMEOUT, is_there(caller, addrs)).await;
        found.unwrap_or(false)
    }

    fn with<T>(&self, access: impl FnOnce(&mut ReachabilityState) -> T) -> T {
        access(&mut self.shared.lock())
    }
}

impl ReachabilityState {
    /// Whether the caller may be served now; if so it is remembered.
    fn admit(&mut self, caller: PeerId, now: Instant) -> bool {
        self.recent.retain(|_, at| now.duration_since(*at) < PROBE_PERIOD);
        if self.recent.contains_key(&caller) || self.recent.len() >= MAX_RECENT {
            return false;
        }
        self.recent.insert(caller, now);
        true
    }
}

/// The announced TCP addresses, names resolved, that lie at an IP address which the peer is
/// connected from.
async fn dialable(introduction: &Introduction) -> Vec<SocketAddr> {
    let mut found = Vec::new();
    for addr in &introduction.announced {
        for socket in sockets(addr).await {
            let own = introduction.seen_at.contains(&socket.ip().to_canonical());
            if own && socket.port() != 0 && !found.contains(&socket) {
                found.push(socket);
            }
        }
    }
    found.truncate(MAX_DIALLED);
    found
}

/// Where a plain TCP address leads; nowhere for any other.
async fn sockets(addr: &Multiaddr) -> Vec<SocketAddr> {
    let parts: Vec<Protocol<'_>> = addr.iter().collect();
    match &parts[..] {
        [Protocol::Ip4(ip), Protocol::Tcp(port)] => vec![(*ip, *port).into()],
        [Protocol::Ip6(ip), Protocol::Tcp(port)] => vec![(*ip, *port).into()],
        [
            Protocol::Dns(name) | Protocol::Dns4(name) | Protocol::Dns6(name),
            Protocol::Tcp(port),
        ] => {
            let resolved = tokio::net::lookup_host((&**name, *port));
            match timeout(INTRODUCTION_TIMEOUT, resolved).await {
                Ok(Ok(sockets)) => sockets.take(MAX_DIALLED).collect(),
                _ => Vec::new(),
            }
        }
        _ => Vec::new(),
    }
}

fn multiaddr(socket: SocketAddr) -> Multiaddr {
    let ip = match socket.ip() {
        IpAddr::V4(ip) => Protocol::Ip4(ip),
        IpAddr::V6(ip) => Protocol::Ip6(ip),
    };
    Multiaddr::from(ip).with(Protocol::Tcp(socket.port()))
}

/// Whether `peer` answers at one of the addresses. A node of its own dials: the connections that
/// are there prove nothing.
async fn is_there(peer: PeerId, addrs: Vec<SocketAddr>) -> bool {
    let config = P2pConfig::of_caller(Vec::new(), SELF_CHECK_TIMEOUT);
    let Ok((probe, _serves_nothing)) = P2p::start(config).await else {
        return false;
    };
    let dial = |socket: SocketAddr| {
        let addr = multiaddr(socket).with(Protocol::P2p(peer));
        Box::pin(probe.connect(addr))
    };
    let answers = match select_ok(addrs.into_iter().map(dial)).await {
        Ok(_) => ask(&probe, peer, peer).await == Some(true),
        Err(_) => false,
    };
    probe.shutdown().await;
    answers
}

/// Asks `peer` whether it can dial `about`; `None` if it does not say.
async fn ask(p2p: &P2p, peer: PeerId, about: PeerId) -> Option<bool> {
    let request = PingRequest {
        peer: Some(NodeInfo { node_id: about.to_bytes().into() }),
        ..PingRequest::default()
    };
    let limit = if peer == about { SELF_CHECK_TIMEOUT } else { CHECK_TIMEOUT };
    let answer =
        p2p.call_unary(peer, names::REACHABILITY_CHECK, request.encode_to_vec().into(), limit);
    match answer.await {
        Ok(bytes) => PingResponse::decode(bytes).ok().map(|r| r.available),
        Err(error) => {
            debug!(%peer, %error, "peer did not check reachability");
            None
        }
    }
}

/// Asks peers whether they can dial this node, which must answer [`names::REACHABILITY_CHECK`] already: `None` if
/// nobody says, which Petals takes for reachable.
pub async fn check_direct(p2p: &P2p, peers: Vec<PeerId>) -> Option<bool> {
    let deadline = Instant::now() + CHECK_LIMIT;
    let mut peers = peers.into_iter();
    let question = |peer| ask(p2p, peer, p2p.peer_id());
    let mut asked: FuturesUnordered<_> = peers.by_ref().take(MAX_ANSWERS).map(question).collect();
    let (mut answers, mut successes) = (0, 0);
    while answers < MAX_ANSWERS
        && let Ok(Some(answer)) = timeout_at(deadline, asked.next()).await
    {
        match answer {
            Some(reachable) => {
                answers += 1;
                successes += usize::from(reachable);
            }
            None => asked.extend(peers.next().map(question)),
        }
    }
    info!(successes, answers, "asked peers to dial this server");
    (answers > 0).then(|| successes as f64 / answers as f64 >= THRESHOLD)
}

#[cfg(test)]
mod tests;
