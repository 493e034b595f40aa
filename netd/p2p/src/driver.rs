//! The task that owns the swarm: commands in, events out. It never waits on one peer or on one
//! caller.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures::StreamExt;
use libp2p::{
    Multiaddr, PeerId, Swarm, autonat,
    core::{ConnectedPoint, transport::ListenerId},
    identify, kad,
    multiaddr::Protocol,
    ping, relay,
    swarm::{ConnectionId, SwarmEvent},
    upnp,
};
use resource_manager::addresses::ip_of;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, interval_at, timeout},
};
use tracing::{debug, info, warn};

use super::{
    addresses::{is_public, is_relayed, peer_of, without_peer},
    behaviour::{NodeBehaviour, NodeBehaviourEvent, dial_address},
    config::Traversal,
    connections::{Connections, Introduction},
    error::{P2pError, brief},
    limits::{
        Calls, InboundLimits, MAX_WAITING_FOR_INTRODUCTIONS, REDIAL_MAX, REDIAL_MIN, RELAY_PERIOD,
        SHUTDOWN_TIMEOUT,
    },
    reach::Reach,
    relays::Relays,
    rpc_streams::OpenStream,
    traffic::Traffic,
};

mod reachability;

/// What handles ask of the swarm.
#[derive(Debug)]
pub(super) enum NodeCommand {
    Open(OpenStream),
    Connect {
        addr: Multiaddr,
        reply: oneshot::Sender<Result<PeerId, P2pError>>,
    },
    AddAddress {
        peer: PeerId,
        addr: Multiaddr,
    },
    KnownAddresses {
        peer: PeerId,
        reply: oneshot::Sender<Vec<Multiaddr>>,
    },
    ListenAddrs {
        reply: oneshot::Sender<Vec<Multiaddr>>,
    },
    ConnectedPeers {
        reply: oneshot::Sender<Vec<PeerId>>,
    },
    /// Dropped if the peer is not connected.
    Introduction {
        peer: PeerId,
        reply: oneshot::Sender<Introduction>,
    },
    SetReachable {
        reachable: bool,
    },
    Withdraw {
        protocols: Vec<&'static str>,
    },
    Shutdown {
        reply: oneshot::Sender<()>,
    },
}

/// What the task is made with.
pub(super) struct DriverParts {
    pub commands: mpsc::Receiver<NodeCommand>,
    pub initial_peers: Vec<Multiaddr>,
    /// Listeners whose first address is outstanding.
    pub listeners: HashSet<ListenerId>,
    /// Told when all of them have one.
    pub listening: oneshot::Sender<()>,
    pub calls: Arc<Calls>,
    /// Told where peers are.
    pub limits: Arc<InboundLimits>,
    pub traversal: Traversal,
    /// Whether the addresses to announce were given.
    pub announces: bool,
    /// Told the addresses through relays.
    pub relayed: watch::Sender<Vec<Multiaddr>>,
    /// Told whether peers can dial this node.
    pub reachable: watch::Sender<Option<bool>>,
    /// Told whether the router forwards a port to this node.
    pub forwarded: watch::Sender<Option<bool>>,
    /// Counts initial peers that were connected again.
    pub reconnected: watch::Sender<u64>,
    /// Shows what passes the node.
    pub traffic: Arc<Traffic>,
}

/// State of the task.
pub(super) struct NodeDriver {
    swarm: Swarm<NodeBehaviour>,
    commands: mpsc::Receiver<NodeCommand>,
    initial_peers: Vec<InitialPeer>,
    /// Listeners whose first address is outstanding, and who waits for them.
    listeners: HashSet<ListenerId>,
    listening: Option<oneshot::Sender<()>>,
    /// Dials of single addresses and who waits for them.
    dials: HashMap<ConnectionId, (Multiaddr, oneshot::Sender<Result<PeerId, P2pError>>)>,
    connections: Connections,
    calls: Arc<Calls>,
    limits: Arc<InboundLimits>,
    reach: Reach,
    traversal: Traversal,
    announces: bool,
    /// Whether others may use it as a relay.
    relaying: bool,
    relays: Relays,
    relayed: watch::Sender<Vec<Multiaddr>>,
    reachable: watch::Sender<Option<bool>>,
    forwarded: watch::Sender<Option<bool>>,
    reconnected: watch::Sender<u64>,
    traffic: Arc<Traffic>,
    /// Who waits for a peer to say where it can be dialled.
    introductions: Vec<(PeerId, oneshot::Sender<Introduction>)>,
}

/// One of the peers to stay connected to.
struct InitialPeer {
    addr: Multiaddr,
    /// Who is there, as the address says or as it turned out.
    peer: Option<PeerId>,
    /// When it may be dialled again.
    redial_at: Instant,
    /// How long to wait after that.
    pause: Duration,
    /// Whether it was connected and is no longer.
    lost: bool,
}

impl NodeDriver {
    pub(super) fn new(swarm: Swarm<NodeBehaviour>, parts: DriverParts) -> Self {
        let redial_at = Instant::now() + REDIAL_MIN;
        let initial_peers = parts
            .initial_peers
            .into_iter()
            .map(|addr| InitialPeer {
                peer: peer_of(&addr),
                addr,
                redial_at,
                pause: REDIAL_MIN,
                lost: false,
            })
            .collect();
        let mut driver = Self {
            swarm,
            commands: parts.commands,
            initial_peers,
            listeners: parts.listeners,
            listening: Some(parts.listening),
            dials: HashMap::new(),
            connections: Connections::default(),
            calls: parts.calls,
            limits: parts.limits,
            reach: Reach::default(),
            traversal: parts.traversal,
            announces: parts.announces,
            relaying: false,
            relays: Relays::default(),
            relayed: parts.relayed,
            reachable: parts.reachable,
            forwarded: parts.forwarded,
            reconnected: parts.reconnected,
            traffic: parts.traffic,
            introductions: Vec::new(),
        };
        driver.tell_listening();
        driver.offer_to_relay();
        driver
    }

    /// Runs until it is told to end or all handles are gone.
    pub(super) async fn run(mut self) {
        let mut redial = interval_at(Instant::now() + REDIAL_MIN, REDIAL_MIN);
        let mut relays = interval_at(Instant::now() + RELAY_PERIOD, RELAY_PERIOD);
        loop {
            tokio::select! {
                event = self.swarm.select_next_some() => self.on_event(event),
                command = self.commands.recv() => match command {
                    Some(NodeCommand::Shutdown { reply }) => {
                        self.shut_down().await;
                        drop(self.swarm);
                        _ = reply.send(());
                        return;
                    }
                    Some(command) => self.on_command(command),
                    None => return self.shut_down().await,
                },
                _ = redial.tick() => {
                    self.redial_initial_peers();
                    self.limits.resources().peers().sweep(Instant::now());
                    self.trim();
                }
                _ = relays.tick() => self.reserve(),
            }
        }
    }

    fn on_command(&mut self, command: NodeCommand) {
        match command {
            NodeCommand::Open(request) => self.reach.open(&mut self.swarm, request),
            NodeCommand::Connect { addr, reply } => self.connect(addr, reply),
            NodeCommand::AddAddress { peer, addr } => {
                self.swarm.behaviour_mut().kad.add_address(&peer, without_peer(addr));
            }
            NodeCommand::KnownAddresses { peer, reply } => {
                drop(reply.send(self.known_addresses(peer)));
            }
            NodeCommand::ListenAddrs { reply } => {
                let listeners = self.swarm.listeners();
                let own = listeners.filter(|addr| !is_relayed(addr)).cloned();
                drop(reply.send(own.collect()));
            }
            NodeCommand::ConnectedPeers { reply } => {
                drop(reply.send(self.swarm.connected_peers().copied().collect()));
            }
            NodeCommand::Introduction { peer, reply } => self.introduce(peer, reply),
            NodeCommand::SetReachable { reachable } => self.set_reachable(reachable),
            NodeCommand::Withdraw { protocols } => self.swarm.behaviour().rpc.withdraw(&protocols),
            NodeCommand::Shutdown { .. } => {}
        }
    }

    fn connect(&mut self, addr: Multiaddr, reply: oneshot::Sender<Result<PeerId, P2pError>>) {
        if let Some(peer) = peer_of(&addr)
            && self.swarm.is_connected(&peer)
        {
            return drop(reply.send(Ok(peer)));
        }
        let dial = dial_address(&addr);
        let id = dial.connection_id();
        match self.swarm.dial(dial) {
            Ok(()) => drop(self.dials.insert(id, (addr, reply))),
            Err(error) => {
                let reason = brief(&error);
                drop(reply.send(Err(P2pError::Unreachable { addr, reason })));
            }
        }
    }

    /// Dials initial peers that are not connected, each after pauses that double up to a bound.
    fn redial_initial_peers(&mut self) {
        let now = Instant::now();
        for initial in &mut self.initial_peers {
            if initial.peer.is_some_and(|peer| self.swarm.is_connected(&peer)) {
                initial.pause = REDIAL_MIN;
                initial.redial_at = now;
            } else if initial.redial_at <= now {
                debug!(addr = %initial.addr, "redialing an initial peer");
                drop(self.swarm.dial(dial_address(&initial.addr)));
                // Many servers that lost the same peer do not come back in the same moment.
                initial.redial_at = now + initial.pause.mul_f64(rand::random_range(0.5..1.0));
                initial.pause = (2 * initial.pause).min(REDIAL_MAX);
            }
        }
    }

    /// Answers now, or when the peer has introduced itself.
    fn introduce(&mut self, peer: PeerId, reply: oneshot::Sender<Introduction>) {
        self.introductions.retain(|(_, reply)| !reply.is_closed());
        if let Some(introduction) = self.connections.introduction(&peer) {
            drop(reply.send(introduction));
        } else if self.swarm.is_connected(&peer)
            && self.introductions.len() < MAX_WAITING_FOR_INTRODUCTIONS
        {
            self.introductions.push((peer, reply));
        }
    }

    fn on_event(&mut self, event: SwarmEvent<NodeBehaviourEvent>) {
        match event {
            SwarmEvent::Behaviour(event) => self.on_behaviour_event(event),
            SwarmEvent::ConnectionEstablished { peer_id, connection_id, endpoint, .. } => {
                self.on_connected(peer_id, connection_id, &endpoint);
            }
            SwarmEvent::ConnectionClosed { peer_id, connection_id, cause, .. } => {
                debug!(peer = %peer_id, ?cause, "disconnected");
                self.on_disconnected(peer_id, connection_id);
            }
            SwarmEvent::OutgoingConnectionError { connection_id, peer_id, error } => {
                let reason = brief(&error);
                if let Some((addr, reply)) = self.dials.remove(&connection_id) {
                    drop(reply.send(Err(P2pError::Unreachable { addr, reason: reason.clone() })));
                }
                if let Some(peer) = peer_id {
                    self.reach.dial_failed(&mut self.swarm, peer, &reason);
                }
            }
            SwarmEvent::NewListenAddr { listener_id, address } => {
                self.on_listening(listener_id, address);
            }
            SwarmEvent::ListenerClosed { listener_id, addresses, reason } => {
                self.on_listener_closed(listener_id, &addresses, &reason);
            }
            SwarmEvent::ExternalAddrConfirmed { address } => {
                info!(%address, "reachable at a new address");
                self.offer_to_relay();
                self.push_addresses();
            }
            SwarmEvent::ExternalAddrExpired { address } => {
                debug!(%address, "no longer reachable at an address");
                self.offer_to_relay();
                self.push_addresses();
            }
            SwarmEvent::ListenerError { error, .. } => warn!(%error, "listener failed"),
            _ => {}
        }
    }

    fn on_connected(&mut self, peer: PeerId, connection: ConnectionId, endpoint: &ConnectedPoint) {
        debug!(%peer, ?endpoint, "connected");
        self.show_peers();
        self.connections.established(connection, peer, endpoint, Instant::now());
        if !endpoint.is_relayed()
            && let Some(ip) = ip_of(endpoint.get_remote_address())
        {
            self.limits.resources().nets().connected(peer, ip);
        }
        self.note_reached(endpoint);
        for initial in &mut self.initial_peers {
            if endpoint.is_dialer() && *endpoint.get_remote_address() == initial.addr {
                initial.peer = Some(peer);
            }
            if initial.peer == Some(peer) && std::mem::take(&mut initial.lost) {
                info!(%peer, "initial peer reconnected");
                self.reconnected.send_modify(|count| *count += 1);
            }
        }
        if let Some((_, reply)) = self.dials.remove(&connection) {
            drop(reply.send(Ok(peer)));
        }
        self.reach.connected(&mut self.swarm, peer);
        self.trim();
    }

    fn on_disconnected(&mut self, peer: PeerId, connection: ConnectionId) {
        self.connections.closed(connection);
        self.show_peers();
        if !self.swarm.is_connected(&peer) {
            self.limits.resources().nets().gone(&peer);
            self.introductions.retain(|(waiting, _)| *waiting != peer);
            for initial in &mut self.initial_peers {
                initial.lost |= initial.peer == Some(peer);
            }
        }
    }

    fn show_peers(&self) {
        let peers = self.swarm.network_info().num_peers() as u64;
        self.traffic.peers.store(peers, Ordering::Relaxed);
    }

    fn on_listening(&mut self, listener: ListenerId, address: Multiaddr) {
        if self.relays.agreed(listener, address.clone()) {
            info!(%address, "reachable through a relay");
            return self.tell_relayed();
        }
        info!(%address, "listening");
        self.listeners.remove(&listener);
        self.tell_listening();
    }

    fn on_listener_closed(
        &mut self,
        listener: ListenerId,
        addresses: &[Multiaddr],
        reason: &std::io::Result<()>,
    ) {
        if let Some(relay) = self.relays.closed(listener, Instant::now()) {
            info!(%relay, ?reason, "relay ended its reservation");
            self.tell_relayed();
            return self.reserve();
        }
        if !addresses.iter().any(is_relayed) {
            warn!(?addresses, ?reason, "stopped listening");
        }
    }

    fn on_behaviour_event(&mut self, event: NodeBehaviourEvent) {
        match event {
            NodeBehaviourEvent::Identify(identify::Event::Received {
                peer_id,
                connection_id,
                info,
            }) => self.on_identified(peer_id, connection_id, info),
            NodeBehaviourEvent::RelayService(relay::Event::CircuitReqAccepted { .. }) => {
                self.traffic.circuits.fetch_add(1, Ordering::Relaxed);
            }
            NodeBehaviourEvent::Ping(ping::Event { peer, connection, result: Ok(round_trip) })
                if self.connections.dialed_directly(connection).is_some() =>
            {
                self.relays.pinged(&peer, round_trip);
            }
            // The first failure in a row is not even told.
            NodeBehaviourEvent::Ping(ping::Event { peer, connection, result: Err(failure) })
                if !matches!(failure, ping::Failure::Unsupported) =>
            {
                debug!(%peer, %failure, "ping failed, closing the connection");
                self.swarm.close_connection(connection);
            }
            NodeBehaviourEvent::Kad(kad::Event::OutboundQueryProgressed {
                id,
                result: kad::QueryResult::GetClosestPeers(result),
                ..
            }) => {
                let peers = match result {
                    Ok(found) => found.peers,
                    Err(kad::GetClosestPeersError::Timeout { peers, .. }) => peers,
                };
                self.reach.looked_up(&mut self.swarm, id, peers);
            }
            NodeBehaviourEvent::Autonat(autonat::v1::Event::StatusChanged { new, .. }) => {
                info!(status = ?new, "AutoNAT status changed");
                // What the operator announces holds, whatever others can or cannot dial.
                match new {
                    autonat::v1::NatStatus::Public(_) => self.found_reachable(true),
                    autonat::v1::NatStatus::Private if !self.announces => {
                        self.found_reachable(false);
                    }
                    _ => {}
                }
            }
            NodeBehaviourEvent::Upnp(event) => self.on_router(event),
            NodeBehaviourEvent::HolePunching(event) => match event.result {
                Ok(connection) => {
                    info!(peer = %event.remote_peer_id, %connection, "hole punched, connected directly");
                }
                Err(error) => {
                    debug!(peer = %event.remote_peer_id, %error, "hole punching failed, keeping the relay");
                }
            },
            _ => {}
        }
    }

    /// Puts every identified peer into the routing table, even one that does not route itself: only
    /// so can others find peers in client mode through this node.
    fn on_identified(&mut self, peer: PeerId, connection: ConnectionId, info: identify::Info) {
        self.connections.introduced(connection, &info.listen_addrs);
        if let Some(introduction) = self.connections.introduction(&peer) {
            let waiting = self.introductions.extract_if(.., |(other, _)| *other == peer);
            for (_, reply) in waiting {
                drop(reply.send(introduction.clone()));
            }
        }
        if info.protocols.contains(&relay::HOP_PROTOCOL_NAME) {
            if let Some(addr) = self.connections.dialed_directly(connection) {
                self.relays.offer(peer, addr);
                self.reserve();
            }
        } else if !self.relays.uses(&peer) {
            self.relays.withdraw(&peer);
        }
        let addrs = self.connections.addresses(connection, info.listen_addrs);
        if addrs.is_empty() {
            return;
        }
        // What the peer says now replaces what it said before, so its addresses cannot pile up.
        self.swarm.behaviour_mut().kad.replace_addresses(&peer, addrs);
    }

    fn known_addresses(&mut self, peer: PeerId) -> Vec<Multiaddr> {
        let addrs = self.swarm.behaviour_mut().kad.addresses(peer);
        addrs.into_iter().map(without_peer).collect()
    }

    /// Closes idle connections if there are too many.
    fn trim(&mut self) {
        let swarm = &self.swarm;
        let is_used = |peer: &PeerId| {
            swarm.behaviour().rpc.serves(peer)
                || self.relays.uses(peer)
                || self.calls.under_way(peer)
                || self.initial_peers.iter().any(|initial| initial.peer == Some(*peer))
        };
        let standing = |peer: &PeerId| self.limits.resources().peers().standing(peer);
        let surplus = self.connections.surplus(Instant::now(), is_used, standing);
        for id in surplus {
            debug!(?id, "too many connections, closing an idle one");
            self.swarm.close_connection(id);
        }
    }

    fn tell_listening(&mut self) {
        if self.listeners.is_empty()
            && let Some(waiting) = self.listening.take()
        {
            _ = waiting.send(());
        }
    }

    /// Closes every connection properly, so that peers notice at once.
    async fn shut_down(&mut self) {
        let peers: Vec<PeerId> = self.swarm.connected_peers().copied().collect();
        for peer in peers {
            _ = self.swarm.disconnect_peer_id(peer);
        }
        let closed = async {
            while self.swarm.connected_peers().next().is_some() {
                self.swarm.select_next_some().await;
            }
        };
        drop(timeout(SHUTDOWN_TIMEOUT, closed).await);
    }
}
