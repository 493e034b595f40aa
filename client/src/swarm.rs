//! The swarm as a client sees it: who serves what, how far away they are, who is banned for now.

pub mod capacity;
mod survey;

use std::collections::HashSet;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use p2p::{Multiaddr, P2p, P2pConfig, P2pError, PeerId, Protocol, Scope, Traversal};
use parking_lot::{Mutex, MutexGuard};
use swarm::dht::driver::{Dht, DhtConfig, DhtError};
use swarm::dht::storage::StorageLimits;
use swarm::public_swarm;
use swarm::view::{self, ServerSpan};
use swarm::wire::records::ServerState;

use capacity::SessionSlots;
use survey::MAX_SURVEYS;
use swarm::health::{AnsweringServers, Bans, Pings, ServerRates};

use swarm::routing::{
    Leg, MissingBlock, RouteCandidate, max_throughput, min_latency, without_banned,
};

/// Parallel calls of one lookup, as in Petals' client.
const LOOKUP_WORKERS: usize = 32;
/// Age at which the view is read anew, as in Petals' client.
const REFRESH_PERIOD: Duration = Duration::from_secs(60);
/// Pause between two looks at the DHT while a block has no server.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// How a client enters a swarm.
#[derive(Clone, Debug)]
pub struct SwarmConfig {
    /// Peers to enter through.
    pub initial_peers: Vec<Multiaddr>,
    /// Prefix of the model's module uids.
    pub prefix: String,
    /// Blocks of the model.
    pub num_blocks: u32,
    /// Time to reach the first peer, and to find a server for every block.
    pub startup_timeout: Duration,
}

/// Why the swarm cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SwarmError {
    /// No peers were given.
    #[error(
        "no initial peers: give the address of a server or bootstrap node with --initial_peers"
    )]
    NoPeers,
    #[error(transparent)]
    Network(#[from] P2pError),
    #[error(transparent)]
    Dht(#[from] DhtError),
    /// A block that nobody serves.
    #[error("model {prefix}: {missing}")]
    Missing {
        /// Prefix of the model.
        prefix: String,
        missing: MissingBlock,
    },
    /// This node has as many sessions on a server as it may.
    #[error(
        "no place for a session within {} s: this client has {sessions} sessions on a server of the route already",
        patience.as_secs()
    )]
    Crowded {
        /// The most on one server.
        sessions: usize,
        /// How long it was waited for.
        patience: Duration,
    },
}

/// What a route is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RoutePurpose {
    /// A session of so many tokens: the least time for a step.
    Session {
        /// Tokens.
        max_length: u32,
    },
    /// A batch over whole sequences: the load is spread over all servers.
    Batch {
        /// A random number, which decides among them.
        draw: u64,
    },
}

/// A client in the swarm. Clones are handles of the same client: sessions share what it knows.
#[derive(Clone)]
pub struct Swarm {
    config: Arc<SwarmConfig>,
    p2p: P2p,
    dht: Dht,
    known: Arc<Mutex<KnownServers>>,
    /// Held while the records are read: others wait for the same reading.
    reading: Arc<tokio::sync::Mutex<()>>,
    /// Of all models: servers count the sessions of this node together.
    slots: Arc<SessionSlots>,
}

/// What is known of the servers.
#[derive(Default)]
struct KnownServers {
    servers: Vec<ServerSpan>,
    all_servers: Vec<ServerSpan>,
    read_at: Option<Instant>,
    pings: Pings<PeerId>,
    bans: Bans<PeerId>,
    answers: AnsweringServers<PeerId>,
    rates: ServerRates<PeerId>,
}

impl Swarm {
    /// Enters the swarm as a client: nothing is served, and others do not learn of this node.
    ///
    /// # Errors
    /// [`SwarmError`] when no peer answers.
    pub fn join(config: SwarmConfig) -> BoxFuture<'static, Result<Swarm, SwarmError>> {
        Box::pin(async move {
            if config.initial_peers.is_empty() {
                return Err(SwarmError::NoPeers);
            }
            let (p2p, _nothing_is_served) = P2p::start(P2pConfig {
                // Nobody is served there: a hole can only be punched from a port that listens.
                listen: vec![
                    Multiaddr::from(Ipv4Addr::UNSPECIFIED).with(Protocol::Tcp(0)),
                    Multiaddr::from(Ipv6Addr::UNSPECIFIED).with(Protocol::Tcp(0)),
                ],
                traversal: Traversal {
                    nearest: nearest(&config.initial_peers),
                    ..Traversal::CLIENT
                },
                ..P2pConfig::of_caller(config.initial_peers.clone(), config.startup_timeout)
            })
            .await?;
            let dht = Dht::start(
                p2p.clone(),
                DhtConfig {
                    client_mode: true,
                    initial_peers: config.initial_peers.clone(),
                    num_workers: LOOKUP_WORKERS,
                    strict: false,
                    limits: StorageLimits::default(),
                },
            );
            dht.join(config.startup_timeout).await?;
            let (config, known, reading) = (Arc::new(config), Arc::default(), Arc::default());
            let slots = Arc::default();
            Ok(Swarm { config, p2p, dht, known, reading, slots })
        })
    }

    /// The same swarm for another model. A route waits at most `patience` for blocks that nobody
    /// serves.
    #[must_use]
    pub fn for_model(&self, prefix: String, num_blocks: u32, patience: Duration) -> Swarm {
        let startup_timeout = patience;
        let config = SwarmConfig { prefix, num_blocks, startup_timeout, ..(*self.config).clone() };
        Swarm {
            config: Arc::new(config),
            known: Arc::default(),
            reading: Arc::default(),
            ..self.clone()
        }
    }

    fn known(&self) -> MutexGuard<'_, KnownServers> {
        self.known.lock()
    }

    /// The network node.
    pub fn p2p(&self) -> &P2p {
        &self.p2p
    }

    /// Prefix of the model's module uids.
    pub fn prefix(&self) -> &str {
        &self.config.prefix
    }

    /// Blocks of the model.
    pub fn num_blocks(&self) -> u32 {
        self.config.num_blocks
    }

    /// Servers that are ONLINE or JOINING, as last read.
    pub fn all_servers(&self) -> Vec<ServerSpan> {
        self.known().all_servers.clone()
    }

    /// The route that a session would take now and the estimated seconds of its steps; `None` if a
    /// block has no server.
    pub fn route_now(&self) -> Option<(Vec<Leg<PeerId>>, f64)> {
        let candidates = self.known().candidates();
        min_latency(&candidates, 0..self.config.num_blocks, None).ok()
    }

    /// Servers that are ONLINE, as last read.
    pub fn servers(&self) -> Vec<ServerSpan> {
        self.known().servers.clone()
    }

    /// Reads all records of the model and measures the way to some of its servers.
    ///
    /// # Errors
    /// [`SwarmError::Dht`].
    pub fn refresh(&self) -> BoxFuture<'_, Result<(), SwarmError>> {
        Box::pin(async move {
            let asked_at = Instant::now();
            let _reading = self.reading.lock().await;
            if self.known().read_at.is_some_and(|at| at >= asked_at) {
                // Read by another meanwhile.
                return Ok(());
            }
            let blocks =
                view::read_blocks(&self.dht, &self.config.prefix, 0..self.config.num_blocks)
                    .await?;
            let asked = {
                let mut known = self.known();
                known.servers = view::spans(&blocks, 0, ServerState::Online);
                known.all_servers = view::spans(&blocks, 0, ServerState::Joining);
                known.read_at = Some(Instant::now());
                known.to_ask(|_| true)
            };
            self.survey(asked, 0..self.config.num_blocks).await;
            Ok(())
        })
    }

    /// The best route through `blocks` for `purpose`. Reads the records anew when they are old or
    /// lack a block, until the start-up time is over.
    ///
    /// # Errors
    /// [`SwarmError::Missing`] names the first block that nobody serves.
    pub async fn route(
        &self,
        blocks: Range<u32>,
        purpose: RoutePurpose,
    ) -> Result<Vec<Leg<PeerId>>, SwarmError> {
        let end = Instant::now() + self.config.startup_timeout;
        let read_at = self.known().read_at;
        if read_at.is_none_or(|at| at.elapsed() > REFRESH_PERIOD) {
            self.refresh().await?;
        }
        let (mut asked, mut surveys) = (HashSet::new(), 0);
        loop {
            match self.find(blocks.clone(), purpose) {
                Ok(legs) => {
                    let strangers = self.known().strangers(&legs, &asked);
                    if strangers.is_empty() || surveys == MAX_SURVEYS {
                        return Ok(legs);
                    }
                    asked.extend(strangers.iter().copied());
                    surveys += 1;
                    self.survey(strangers, blocks.clone()).await;
                    continue;
                }
                Err(missing) if Instant::now() >= end => {
                    return Err(SwarmError::Missing {
                        prefix: self.config.prefix.clone(),
                        missing,
                    });
                }
                Err(missing) => {
                    tracing::debug!(block = missing.block, "block has no server, looking again")
                }
            }
            tokio::time::sleep(LOOK_AGAIN).await;
            self.refresh().await?;
        }
    }

    /// The best route by what is known.
    fn find(
        &self,
        blocks: Range<u32>,
        purpose: RoutePurpose,
    ) -> Result<Vec<Leg<PeerId>>, MissingBlock> {
        let candidates = self.known().candidates();
        match purpose {
            RoutePurpose::Session { max_length } => {
                // A server whose sessions wait is passed by if others serve its blocks.
                let candidates = without_banned(&candidates, |peer| self.slots.is_full(peer));
                min_latency(&candidates, blocks, Some(u64::from(max_length))).map(|(legs, _)| legs)
            }
            RoutePurpose::Batch { draw } => max_throughput(&candidates, blocks, draw),
        }
    }

    /// Routes around `peer` for a while; longer each time. When a block has no other server, the
    /// records are read anew before the next route (petals `sequence_manager.py`,
    /// `on_request_failure`).
    pub fn ban(&self, peer: PeerId) {
        let now = Instant::now();
        let mut known = self.known();
        known.bans.failed(peer, now);
        let left = known.candidates();
        if left.iter().any(|c| known.bans.banned(&c.peer, now)) {
            known.read_at = None;
        }
    }

    /// Forgets the failures of `peer`: it has answered.
    pub fn trust(&self, peer: &PeerId) {
        let mut known = self.known();
        known.bans.answered(peer);
        known.answers.heard(*peer, Instant::now());
    }

    /// `peer` took `spent` for a step of one token through so many blocks, the way included.
    pub fn note_rate(&self, peer: &PeerId, blocks: usize, spent: Duration) {
        let mut known = self.known();
        let way = known.pings.seconds(peer, Instant::now()).filter(|ping| ping.is_finite());
        let seconds = (spent.as_secs_f64() - way.unwrap_or(0.0)).max(0.0);
        known.rates.measured(*peer, seconds / blocks.max(1) as f64);
    }

    /// Whether the sessions of `peer` go back to a position: servers of Petals do from 2.3 on, earlier
    /// ones ignore that they are asked to.
    pub fn rolls_back(&self, peer: &PeerId) -> bool {
        let id = peer.to_base58();
        let known = self.known();
        let record = known.all_servers.iter().find(|server| server.peer_id == id);
        record.and_then(|server| server.info.version.as_deref()).is_some_and(knows_roll_back)
    }

    /// Closes all connections, of all handles.
    pub async fn leave(&self) {
        self.p2p.shutdown().await;
    }
}

impl KnownServers {
    /// The servers that a route may lead over.
    fn candidates(&self) -> Vec<RouteCandidate<PeerId>> {
        let all: Vec<RouteCandidate<PeerId>> =
            self.servers.iter().filter_map(|s| self.candidate(s)).collect();
        let now = Instant::now();
        without_banned(&all, |peer| self.bans.banned(peer, now))
    }

    fn candidate(&self, server: &ServerSpan) -> Option<RouteCandidate<PeerId>> {
        let next = server.info.next_pings.iter().flatten();
        let (peer, now) = (peer(server)?, Instant::now());
        Some(RouteCandidate {
            peer,
            blocks: u32::try_from(server.start).ok()?..u32::try_from(server.end).ok()?,
            inference_rps: server.info.inference_rps,
            measured_rps: self.rates.per_second(&peer),
            has_answered: self.answers.has_answered(&peer, now),
            cache_tokens_left: server.info.cache_tokens_left,
            ping_s: self.pings.seconds(&peer, now),
            next_pings_s: Arc::new(
                next.filter_map(|(peer, ping)| Some((peer.parse().ok()?, *ping))).collect(),
            ),
        })
    }
}

/// Whether a version of Petals knows `start_from_position`.
fn knows_roll_back(version: &str) -> bool {
    let mut numbers = version.split('.').map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= (2, 3),
        _ => false,
    }
}

fn peer(server: &ServerSpan) -> Option<PeerId> {
    server.peer_id.parse().ok()
}

/// The nearest nets that records of servers may have a client dial: strangers of the public swarm have
/// no business on private nets.
fn nearest(initial_peers: &[Multiaddr]) -> Scope {
    let peers: Vec<String> = initial_peers.iter().map(Multiaddr::to_string).collect();
    match public_swarm::is_entered_through(&peers) {
        true => Scope::World,
        false => Scope::Machine,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_before_2_3_and_what_is_none_do_not_roll_back() {
        for version in ["2.3.0.dev2", "2.3", "2.10.1", "3.0.0"] {
            assert!(knows_roll_back(version), "{version}");
        }
        for version in ["2.2.0.post1", "1.9", "2", "", "latest", "2.x.3", "-3.4"] {
            assert!(!knows_roll_back(version), "{version}");
        }
    }
}
