//! The task that owns the swarm: commands in, events out. It never waits on one peer or on one caller.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use futures::StreamExt;
use libp2p::{
    Multiaddr, PeerId, Swarm,
    core::transport::ListenerId,
    identify, kad, ping,
    swarm::{ConnectionId, DialError, SwarmEvent},
};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, interval_at, timeout},
};
use tracing::{debug, info, warn};

use super::{
    behaviour::{NodeBehaviour, NodeBehaviourEvent, dial_address, peer_of},
    connections::{Connections, without_peer},
    error::P2pError,
    limits::{Calls, REDIAL_PERIOD, SHUTDOWN_TIMEOUT},
    reach::Reach,
    rpc_streams::OpenStream,
};

/// What handles ask of the swarm.
#[derive(Debug)]
pub(super) enum Command {
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
    Shutdown {
        reply: oneshot::Sender<()>,
    },
}

/// State of the task.
pub(super) struct Driver {
    swarm: Swarm<NodeBehaviour>,
    commands: mpsc::Receiver<Command>,
    initial_peers: Vec<InitialPeer>,
    /// Listeners whose first address is outstanding, and who waits for them.
    listeners: HashSet<ListenerId>,
    listening: Option<oneshot::Sender<()>>,
    /// Dials of single addresses and who waits for them.
    dials: HashMap<ConnectionId, (Multiaddr, oneshot::Sender<Result<PeerId, P2pError>>)>,
    connections: Connections,
    calls: Arc<Calls>,
    reach: Reach,
}

/// One of the peers to stay connected to.
struct InitialPeer {
    addr: Multiaddr,
    /// Who is there, as the address says or as it turned out.
    peer: Option<PeerId>,
}

impl Driver {
    pub(super) fn new(
        swarm: Swarm<NodeBehaviour>,
        commands: mpsc::Receiver<Command>,
        initial_peers: Vec<Multiaddr>,
        (listeners, listening): (HashSet<ListenerId>, oneshot::Sender<()>),
        calls: Arc<Calls>,
    ) -> Self {
        let initial_peers = initial_peers
            .into_iter()
            .map(|addr| InitialPeer {
                peer: peer_of(&addr),
                addr,
            })
            .collect();
        let mut driver = Self {
            swarm,
            commands,
            initial_peers,
            listeners,
            listening: Some(listening),
            dials: HashMap::new(),
            connections: Connections::default(),
            calls,
            reach: Reach::default(),
        };
        driver.tell_listening();
        driver
    }

    /// Runs until it is told to end or all handles are gone.
    pub(super) async fn run(mut self) {
        let mut redial = interval_at(Instant::now() + REDIAL_PERIOD, REDIAL_PERIOD);
        loop {
            tokio::select! {
                event = self.swarm.select_next_some() => self.on_event(event),
                command = self.commands.recv() => match command {
                    Some(Command::Shutdown { reply }) => {
                        self.shut_down().await;
                        drop(self.swarm);
                        _ = reply.send(());
                        return;
                    }
                    Some(command) => self.on_command(command),
                    None => return self.shut_down().await,
                },
                _ = redial.tick() => self.redial_initial_peers(),
            }
        }
    }

    fn on_command(&mut self, command: Command) {
        match command {
            Command::Open(request) => self.reach.open(&mut self.swarm, request),
            Command::Connect { addr, reply } => self.connect(addr, reply),
            Command::AddAddress { peer, addr } => {
                self.swarm
                    .behaviour_mut()
                    .kad
                    .add_address(&peer, without_peer(addr));
            }
            Command::KnownAddresses { peer, reply } => {
                drop(reply.send(self.known_addresses(peer)));
            }
            Command::ListenAddrs { reply } => {
                drop(reply.send(self.swarm.listeners().cloned().collect()));
            }
            Command::ConnectedPeers { reply } => {
                drop(reply.send(self.swarm.connected_peers().copied().collect()));
            }
            Command::Shutdown { .. } => {}
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

    fn redial_initial_peers(&mut self) {
        for InitialPeer { addr, peer } in &self.initial_peers {
            if !peer.is_some_and(|peer| self.swarm.is_connected(&peer)) {
                debug!(%addr, "dial initial peer again");
                drop(self.swarm.dial(dial_address(addr)));
            }
        }
    }

    fn on_event(&mut self, event: SwarmEvent<NodeBehaviourEvent>) {
        match event {
            SwarmEvent::Behaviour(event) => self.on_behaviour_event(event),
            SwarmEvent::ConnectionEstablished {
                peer_id,
                connection_id,
                endpoint,
                ..
            } => {
                debug!(peer = %peer_id, ?endpoint, "connected");
                self.connections
                    .established(connection_id, peer_id, &endpoint, Instant::now());
                for initial in &mut self.initial_peers {
                    if endpoint.is_dialer() && *endpoint.get_remote_address() == initial.addr {
                        initial.peer = Some(peer_id);
                    }
                }
                if let Some((_, reply)) = self.dials.remove(&connection_id) {
                    drop(reply.send(Ok(peer_id)));
                }
                self.reach.connected(&mut self.swarm, peer_id);
                self.trim();
            }
            SwarmEvent::ConnectionClosed {
                peer_id,
                connection_id,
                cause,
                ..
            } => {
                debug!(peer = %peer_id, ?cause, "disconnected");
                self.connections.closed(connection_id);
            }
            SwarmEvent::OutgoingConnectionError {
                connection_id,
                peer_id,
                error,
            } => {
                let reason = brief(&error);
                if let Some((addr, reply)) = self.dials.remove(&connection_id) {
                    drop(reply.send(Err(P2pError::Unreachable {
                        addr,
                        reason: reason.clone(),
                    })));
                }
                if let Some(peer) = peer_id {
                    self.reach.dial_failed(&mut self.swarm, peer, &reason);
                }
            }
            SwarmEvent::NewListenAddr {
                listener_id,
                address,
            } => {
                info!(%address, "listening");
                self.listeners.remove(&listener_id);
                self.tell_listening();
            }
            SwarmEvent::ListenerClosed {
                addresses, reason, ..
            } => {
                warn!(?addresses, ?reason, "no longer listening");
            }
            SwarmEvent::ListenerError { error, .. } => warn!(%error, "listener"),
            _ => {}
        }
    }

    fn on_behaviour_event(&mut self, event: NodeBehaviourEvent) {
        match event {
            NodeBehaviourEvent::Identify(identify::Event::Received {
                peer_id,
                connection_id,
                info,
            }) => self.on_identified(peer_id, connection_id, info),
            // The first failure in a row is not even told.
            NodeBehaviourEvent::Ping(ping::Event {
                peer,
                connection,
                result: Err(failure),
            }) if !matches!(failure, ping::Failure::Unsupported) => {
                debug!(%peer, %failure, "connection is dead");
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
            _ => {}
        }
    }

    /// Puts every identified peer into the routing table, even one that does not route itself: only so
    /// can others find peers in client mode through this node.
    fn on_identified(&mut self, peer: PeerId, connection: ConnectionId, info: identify::Info) {
        let addrs = self.connections.addresses(connection, info.listen_addrs);
        if addrs.is_empty() {
            return;
        }
        let kad = &mut self.swarm.behaviour_mut().kad;
        // What the peer says now replaces what it said before, so its addresses cannot pile up.
        kad.remove_peer(&peer);
        for addr in addrs {
            kad.add_address(&peer, addr);
        }
    }

    fn known_addresses(&mut self, peer: PeerId) -> Vec<Multiaddr> {
        let kad = &mut self.swarm.behaviour_mut().kad;
        let Some(bucket) = kad.kbucket(peer) else {
            return Vec::new();
        };
        let entry = bucket
            .iter()
            .find(|entry| *entry.node.key.preimage() == peer);
        let addrs = entry.iter().flat_map(|entry| entry.node.value.iter());
        addrs.cloned().map(without_peer).collect()
    }

    /// Closes idle connections if there are too many.
    fn trim(&mut self) {
        let swarm = &self.swarm;
        let surplus = self.connections.surplus(Instant::now(), |peer| {
            swarm.behaviour().rpc.serves(peer)
                || self.calls.under_way(peer)
                || self
                    .initial_peers
                    .iter()
                    .any(|initial| initial.peer == Some(*peer))
        });
        for id in surplus {
            debug!(?id, "too many connections, an idle one is closed");
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

/// One line of what a dial failed with.
pub(super) fn brief(error: &DialError) -> String {
    match error {
        DialError::Transport(failures) => {
            let last = failures
                .iter()
                .map(|(_, error)| root_cause(error))
                .next_back();
            last.unwrap_or_else(|| "no address works".to_owned())
        }
        DialError::WrongPeerId { obtained, .. } => {
            format!("another peer answers there: {obtained}")
        }
        DialError::NoAddresses => "no address is known".to_owned(),
        DialError::LocalPeerId { .. } => "that is this node itself".to_owned(),
        DialError::Denied { cause } => root_cause(cause),
        other => root_cause(other),
    }
}

/// The innermost of a chain of errors: what the operating system or the peer said.
fn root_cause(mut error: &(dyn std::error::Error + 'static)) -> String {
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
