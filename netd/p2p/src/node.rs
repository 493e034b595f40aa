//! The node's handle and its start.

use std::{collections::HashSet, net::TcpListener, sync::Arc};

use futures::future::BoxFuture;
use libp2p::{Multiaddr, PeerId, Swarm, core::transport::ListenerId};
use resource_manager::{
    addresses::socket_addr,
    connection_limits::Places,
    nets::Net,
    peerstore::{PeerStanding, SessionMark},
    pools::Reservation,
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
    time::{Instant, timeout_at},
};
use tracing::{info, warn};

use super::{
    addresses::{is_ip6_wildcard, peer_of},
    behaviour::{self, NodeBehaviour},
    config::P2pConfig,
    connections::Introduction,
    driver::{DriverParts, NodeCommand, NodeDriver},
    error::P2pError,
    limits::{COMMAND_QUEUE, Calls, INBOUND_QUEUE, InboundFigures, InboundLimits},
    serve::Inbound,
    traffic::{Traffic, TrafficFigures},
};
use crate::task;

/// A running node. Clones are handles of the same node, which ends when all are dropped.
#[derive(Clone, Debug)]
pub struct P2p {
    peer_id: PeerId,
    commands: mpsc::Sender<NodeCommand>,
    pub(super) calls: Arc<Calls>,
    limits: Arc<InboundLimits>,
    relayed: watch::Receiver<Vec<Multiaddr>>,
    reachable: watch::Receiver<Option<bool>>,
    forwarded: watch::Receiver<Option<bool>>,
    reconnected: watch::Receiver<u64>,
    traffic: Arc<Traffic>,
}

impl P2p {
    /// Starts a node: listens everywhere, connects to at least one of the initial peers, and runs
    /// the swarm in a task of its own. RPCs of peers come out of the receiver; when it is
    /// dropped, they are reset. To be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// [`P2pError`]; its text tells an operator what to do.
    pub fn start(
        config: P2pConfig,
    ) -> BoxFuture<'static, Result<(Self, mpsc::Receiver<Inbound>), P2pError>> {
        Box::pin(Self::start_with(config, Places::DEFAULT))
    }

    /// The same with so many places for connections.
    pub(super) async fn start_with(
        config: P2pConfig,
        places: Places,
    ) -> Result<(Self, mpsc::Receiver<Inbound>), P2pError> {
        let deadline = Instant::now() + config.startup_timeout;
        let (inbound_sender, inbound) = mpsc::channel(INBOUND_QUEUE);
        let limits = InboundLimits::new(config.protocols.clone(), config.request_memory);
        let asks_router = behaviour::asks_router(&config);
        let traffic = Arc::<Traffic>::default();
        let mut swarm = behaviour::swarm(&config, &limits, inbound_sender, &traffic, places)?;
        let peer_id = *swarm.local_peer_id();
        let listeners = listen(&mut swarm, &config.listen)?;
        for addr in &config.announce {
            swarm.add_external_address(addr.clone());
        }
        let mut initial_peers = config.initial_peers;
        initial_peers.retain(|addr| peer_of(addr) != Some(peer_id));

        let (commands, command_queue) = mpsc::channel(COMMAND_QUEUE);
        let (listening, listens) = oneshot::channel();
        let calls = Arc::<Calls>::default();
        let (relayed_sender, relayed) = watch::channel(Vec::new());
        let (reachable_sender, reachable) = watch::channel(None);
        let (forwarded_sender, forwarded) = watch::channel((!asks_router).then_some(false));
        let (reconnected_sender, reconnected) = watch::channel(0);
        let parts = DriverParts {
            commands: command_queue,
            initial_peers: initial_peers.clone(),
            listeners,
            listening,
            calls: Arc::clone(&calls),
            limits: Arc::clone(&limits),
            traversal: config.traversal,
            announces: !config.announce.is_empty(),
            relayed: relayed_sender,
            reachable: reachable_sender,
            forwarded: forwarded_sender,
            reconnected: reconnected_sender,
            traffic: Arc::clone(&traffic),
        };
        task::spawn(NodeDriver::new(swarm, parts).run());
        let node = Self {
            peer_id,
            commands,
            calls,
            limits,
            relayed,
            reachable,
            forwarded,
            reconnected,
            traffic,
        };
        if timeout_at(deadline, listens).await.is_err() {
            let addr = config.listen.first().cloned().unwrap_or_else(Multiaddr::empty);
            let reason = "the system reports no address of it in time".to_owned();
            return Err(P2pError::Listen { addr, reason });
        }
        node.join(initial_peers, deadline).await?;
        info!(%peer_id, "network node started");
        Ok((node, inbound))
    }

    /// The IP net that a peer is connected from.
    #[must_use]
    pub fn net_of(&self, peer: &PeerId) -> Net {
        self.limits.resources().nets().of(peer)
    }

    /// A peer has a session here: when places for connections run out, the last ones are for it, until
    /// some minutes after the mark is dropped.
    #[must_use]
    pub fn mark_session(&self, peer: PeerId) -> SessionMark {
        self.limits.resources().peers().session(peer, self.net_of(&peer))
    }

    /// Whether a place is kept for connections of a peer.
    #[must_use]
    pub fn keeps_place_for(&self, peer: &PeerId) -> bool {
        self.limits.resources().peers().standing(peer) > PeerStanding::Stranger
    }

    /// Replaces the servers that are known: when places for connections run out, some are for them.
    pub fn set_known_servers(&self, servers: impl IntoIterator<Item = PeerId>) {
        self.limits.resources().peers().set_servers(servers);
    }

    /// Makes room for one request of so many bytes, whatever [`P2pConfig::request_memory`] says.
    pub fn make_room_for(&self, bytes: u64) {
        self.limits.resources().memory().make_room_for(bytes);
    }

    /// Counts a step that a peer pushed by a unary call and that is kept; `None` if there is no room.
    #[must_use]
    pub fn keep_push(&self, peer: PeerId, bytes: usize) -> Option<Reservation> {
        self.limits.resources().memory().keep_push(peer, self.net_of(&peer), bytes)
    }

    /// The identity of the node.
    pub fn peer_id(&self) -> PeerId {
        self.peer_id
    }

    /// Where the node listens, with actual ports, one address for each interface; without `/p2p/ID`
    /// and relays. Empty after the shutdown.
    pub async fn listen_addrs(&self) -> Vec<Multiaddr> {
        self.ask(|reply| NodeCommand::ListenAddrs { reply }).await.unwrap_or_default()
    }

    /// Connects to a peer at an address, which may end in `/p2p/ID`.
    ///
    /// # Errors
    ///
    /// [`P2pError::Unreachable`], or [`P2pError::Stopped`].
    pub async fn connect(&self, addr: Multiaddr) -> Result<PeerId, P2pError> {
        self.ask(|reply| NodeCommand::Connect { addr, reply }).await?
    }

    /// The peers with at least one connection. Empty after the shutdown.
    pub async fn connected_peers(&self) -> Vec<PeerId> {
        self.ask(|reply| NodeCommand::ConnectedPeers { reply }).await.unwrap_or_default()
    }

    /// Where a peer would be dialled: what it said of itself, what was added or found. Not all
    /// peers that a lookup can find are known. Without `/p2p/ID`.
    pub async fn known_addresses(&self, peer: PeerId) -> Vec<Multiaddr> {
        self.ask(|reply| NodeCommand::KnownAddresses { peer, reply }).await.unwrap_or_default()
    }

    /// Remembers where a peer can be dialled, until the peer itself says otherwise.
    pub async fn add_address(&self, peer: PeerId, addr: Multiaddr) {
        drop(self.send(NodeCommand::AddAddress { peer, addr }).await);
    }

    /// RPCs of peers that came to nothing, by reason.
    pub fn inbound_figures(&self) -> InboundFigures {
        self.limits.figures()
    }

    /// Peers, bytes and circuits; waits for nothing.
    pub fn figures(&self) -> TrafficFigures {
        self.traffic.figures(self.limits.resources().circuits().carried())
    }

    /// Counts records of the DHT that peers sent or keep and that are dropped, beside the RPCs that
    /// came to nothing.
    pub fn count_bad_records(&self, count: u64) {
        if count > 0 {
            self.limits.count(|figures| figures.bad_records += count);
        }
    }

    /// Addresses through relays at which the node can be dialled right now, without `/p2p/ID`. To
    /// be watched.
    pub fn relayed_addrs(&self) -> watch::Receiver<Vec<Multiaddr>> {
        self.relayed.clone()
    }

    /// Whether peers can dial the node itself, as far as is known: what [`Self::set_reachable`]
    /// said, or AutoNAT after it. To be watched.
    pub fn reachable(&self) -> watch::Receiver<Option<bool>> {
        self.reachable.clone()
    }

    /// Whether the router of this net forwards a port to the node; `None` until that is known. To
    /// be watched.
    pub fn forwarded(&self) -> watch::Receiver<Option<bool>> {
        self.forwarded.clone()
    }

    /// How often an initial peer was connected again after it was lost. To be watched.
    pub fn reconnections(&self) -> watch::Receiver<u64> {
        self.reconnected.clone()
    }

    /// What a connected peer says of itself, once it has; waits for that.
    ///
    /// # Errors
    ///
    /// [`P2pError::Stopped`], also if the peer is not or no longer connected, or too many wait.
    pub async fn introduction(&self, peer: PeerId) -> Result<Introduction, P2pError> {
        self.ask(|reply| NodeCommand::Introduction { peer, reply }).await
    }

    /// Says whether peers can dial this node. One that they can dial answers routing queries and
    /// may relay; one that they cannot dial only asks, and has itself relayed if it may.
    pub async fn set_reachable(&self, reachable: bool) {
        drop(self.send(NodeCommand::SetReachable { reachable }).await);
    }

    /// Circuits through this node carry so many bytes per second from now on, all together.
    pub fn relay_at(&self, bytes_per_s: u64) {
        self.limits.resources().circuits().set(bytes_per_s);
    }

    /// Offers these protocols no more.
    pub async fn withdraw(&self, protocols: Vec<&'static str>) {
        drop(self.send(NodeCommand::Withdraw { protocols }).await);
    }

    /// Closes all connections and ends the node. Calls fail from now on.
    pub async fn shutdown(&self) {
        drop(self.ask(|reply| NodeCommand::Shutdown { reply }).await);
    }

    pub(super) async fn send(&self, command: NodeCommand) -> Result<(), P2pError> {
        self.commands.send(command).await.map_err(|_| P2pError::Stopped)
    }

    async fn ask<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> NodeCommand,
    ) -> Result<T, P2pError> {
        let (reply, answer) = oneshot::channel();
        self.send(command(reply)).await?;
        answer.await.map_err(|_| P2pError::Stopped)
    }

    /// Waits for the first of the initial peers; the others go on connecting.
    async fn join(&self, initial_peers: Vec<Multiaddr>, deadline: Instant) -> Result<(), P2pError> {
        if initial_peers.is_empty() {
            return Ok(());
        }
        let mut unanswered: Vec<Multiaddr> = initial_peers.clone();
        let mut failures = Vec::new();
        let mut dials = JoinSet::new();
        for addr in initial_peers {
            let node = self.clone();
            dials.spawn(async move { (node.connect(addr.clone()).await, addr) });
        }
        while let Ok(Some(dialled)) = timeout_at(deadline, dials.join_next()).await {
            match dialled {
                Ok((Ok(_), _)) => {
                    dials.detach_all();
                    return Ok(());
                }
                Ok((Err(error), addr)) => {
                    unanswered.retain(|other| *other != addr);
                    failures.push(error.to_string());
                }
                Err(_) => return Err(P2pError::Stopped),
            }
        }
        failures.extend(unanswered.iter().map(|addr| format!("no answer in time from {addr}")));
        Err(P2pError::InitialPeersUnreachable { failures: failures.join("; ") })
    }
}

/// Listens on every address that the machine has; at least one must work. Returns the listeners
/// whose addresses are to be waited for.
fn listen(
    swarm: &mut Swarm<NodeBehaviour>,
    addrs: &[Multiaddr],
) -> Result<HashSet<ListenerId>, P2pError> {
    // libp2p shares ports between processes of one user (SO_REUSEPORT): ask for them alone first.
    for addr in addrs {
        if let Some(socket) = socket_addr(addr)
            && let Err(error) = TcpListener::bind(socket)
            && error.kind() == std::io::ErrorKind::AddrInUse
        {
            return Err(P2pError::PortInUse { addr: addr.clone() });
        }
    }
    let mut listeners = Vec::new();
    let mut failure = None;
    for addr in addrs {
        match swarm.listen_on(addr.clone()) {
            Ok(listener) => listeners.push((listener, addr)),
            Err(error) => {
                let reason = error.to_string();
                warn!(%addr, reason, "cannot listen");
                failure = Some(P2pError::Listen { addr: addr.clone(), reason });
            }
        }
    }
    match failure {
        Some(error) if listeners.is_empty() => Err(error),
        _ => {
            // An IPv6 wildcard has no address at all on a machine without IPv6.
            let only = listeners.len() == 1;
            let waited = listeners.into_iter().filter(|(_, addr)| only || !is_ip6_wildcard(addr));
            Ok(waited.map(|(listener, _)| listener).collect())
        }
    }
}
