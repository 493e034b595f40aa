//! What the node speaks: transports, the standard protocols of libp2p, and the RPC streams.
//!
//! TCP with DNS names, Noise or TLS (Noise offered first, as by p2pd), yamux; identify with push,
//! ping, Kademlia as peer routing only. Source of the choices: go-libp2p-daemon as hivemind starts
//! it.

use std::sync::Arc;

use libp2p::{
    PeerId, Swarm, SwarmBuilder, autonat, dcutr, dns, identify,
    identity::{Keypair, PublicKey},
    noise, ping, relay,
    swarm::{NetworkBehaviour, behaviour::toggle::Toggle, dial_opts::DialOpts},
    tls, upnp,
};
use resource_manager::{
    addresses::{Scope, ip_of},
    connection_limits::{self, Places},
    dials::DialGate,
    upload::UploadLimit,
};
use tokio::sync::mpsc;

use super::{
    addresses::peer_of,
    config::{P2pConfig, Traversal},
    error::P2pError,
    limits::{
        CONNECTION_TIMEOUT, IDLE_CONNECTION_TIMEOUT, InboundLimits, MAX_CIRCUIT_BYTES,
        MAX_CIRCUIT_DURATION, MAX_CIRCUITS, MAX_CIRCUITS_PER_PEER, MAX_NEGOTIATING_STREAMS,
        MAX_RESERVATIONS, MAX_RESERVATIONS_PER_PEER, PING_PERIOD,
    },
    muxer::Multiplexing,
    peer_routing::PeerRouting,
    rpc_streams,
    serve::Inbound,
    traffic::Traffic,
    transport::transport,
};

/// How the node introduces itself.
const AGENT: &str = concat!("sepal/", env!("CARGO_PKG_VERSION"));
/// p2pd leaves this empty and compares it with nothing.
const PROTOCOL_VERSION: &str = "/sepal/1";

/// Everything the swarm runs.
#[derive(NetworkBehaviour)]
pub(super) struct NodeBehaviour {
    connection_limits: connection_limits::Behaviour,
    pub identify: identify::Behaviour,
    pub ping: ping::Behaviour,
    pub kad: PeerRouting,
    pub rpc: rpc_streams::Behaviour,
    pub relay_client: relay::client::Behaviour,
    pub relay_service: Toggle<relay::Behaviour>,
    pub hole_punching: Toggle<dcutr::Behaviour>,
    pub autonat: Toggle<autonat::v1::Behaviour>,
    pub upnp: Toggle<upnp::tokio::Behaviour>,
}

/// Makes the swarm; it listens nowhere yet. To be called within a tokio runtime.
pub(super) fn swarm(
    config: &P2pConfig,
    limits: &Arc<InboundLimits>,
    inbound: mpsc::Sender<Inbound>,
    traffic: &Arc<Traffic>,
    places: Places,
) -> Result<Swarm<NodeBehaviour>, P2pError> {
    let make = |key: &Keypair, relay_client: relay::client::Behaviour| {
        let rpc = rpc_streams::Behaviour::new(Arc::clone(limits), inbound, Arc::clone(traffic));
        let peers = Arc::clone(limits.resources().peers());
        let limits = connection_limits::Behaviour::new(peers, places);
        behaviour(config, key.public(), rpc, relay_client, limits)
    };
    let through_relays = (noise::Config::new, tls::Config::new);
    let limit = config.max_upload_bytes_per_s.map(UploadLimit::new);
    let gate = DialGate::new(config.traversal.nearest, &config.initial_peers);
    let gated = || {
        let upload = limit.clone();
        let transport = transport(&config.keypair, upload, Arc::clone(limits), Arc::clone(&gate))?;
        SwarmBuilder::with_existing_identity(config.keypair.clone())
            .with_tokio()
            .with_other_transport(|_| transport)
            .map_err(|error| P2pError::Transport(error.to_string()))
    };
    // Who relays it counts the connection; its streams count by protocol.
    let relayed = || Multiplexing { upload: None, quota: None };
    let bounds = |config: libp2p::swarm::Config| {
        config
            .with_idle_connection_timeout(IDLE_CONNECTION_TIMEOUT)
            .with_max_negotiating_inbound_streams(MAX_NEGOTIATING_STREAMS)
    };
    // A machine without a resolver configuration can still serve peers with plain addresses.
    let swarm = match gated()?.with_dns() {
        Ok(builder) => builder
            .with_relay_client(through_relays, relayed)
            .map_err(|error| P2pError::Transport(error.to_string()))?
            .with_behaviour(make)
            .map_err(|error| P2pError::Transport(error.to_string()))?
            .with_swarm_config(bounds)
            .with_connection_timeout(CONNECTION_TIMEOUT)
            .build(),
        Err(error) => {
            tracing::warn!(%error, "no DNS resolver is configured, DNS addresses may fail");
            gated()?
                .with_dns_config(dns::ResolverConfig::default(), dns::ResolverOpts::default())
                .with_relay_client(through_relays, relayed)
                .map_err(|error| P2pError::Transport(error.to_string()))?
                .with_behaviour(make)
                .map_err(|error| P2pError::Transport(error.to_string()))?
                .with_swarm_config(bounds)
                .with_connection_timeout(CONNECTION_TIMEOUT)
                .build()
        }
    };
    Ok(swarm)
}

fn behaviour(
    config: &P2pConfig,
    key: PublicKey,
    rpc: rpc_streams::Behaviour,
    relay_client: relay::client::Behaviour,
    connection_limits: connection_limits::Behaviour,
) -> NodeBehaviour {
    let traversal = config.traversal;
    let peer = key.to_peer_id();
    // Announced addresses replace the listen addresses, as in p2pd.
    let identify = identify::Config::new(PROTOCOL_VERSION.to_owned(), key)
        .with_agent_version(AGENT.to_owned())
        .with_push_listen_addr_updates(true)
        .with_hide_listen_addrs(!config.announce.is_empty());
    NodeBehaviour {
        connection_limits,
        identify: identify::Behaviour::new(identify),
        ping: ping::Behaviour::new(
            ping::Config::new().with_interval(PING_PERIOD).with_timeout(PING_PERIOD),
        ),
        kad: PeerRouting::new(peer, config.kad_server),
        rpc,
        relay_client,
        relay_service: Toggle::from(traversal.relay_service.then(|| relay_service(peer))),
        hole_punching: Toggle::from(traversal.use_relay.then(|| dcutr::Behaviour::new(peer))),
        autonat: Toggle::from(autonat(traversal, peer)),
        upnp: Toggle::from(asks_router(config).then(upnp::tokio::Behaviour::default)),
    }
}

/// Circuits for others, within bounds. Off until the driver knows that others can dial this node.
fn relay_service(peer: PeerId) -> relay::Behaviour {
    let config = relay::Config {
        max_reservations: MAX_RESERVATIONS,
        max_reservations_per_peer: MAX_RESERVATIONS_PER_PEER,
        max_circuits: MAX_CIRCUITS,
        max_circuits_per_peer: MAX_CIRCUITS_PER_PEER,
        max_circuit_duration: MAX_CIRCUIT_DURATION,
        max_circuit_bytes: MAX_CIRCUIT_BYTES,
        // Reservations and circuits per peer and per IP address and hour: those of libp2p.
        ..relay::Config::default()
    };
    let mut service = relay::Behaviour::new(peer, config);
    service.set_status(Some(relay::Status::Disable));
    service
}

/// Asks others whether this node can be dialled, and answers others; only about observed addresses.
fn autonat(traversal: Traversal, peer: PeerId) -> Option<autonat::v1::Behaviour> {
    traversal.autonat.then(|| autonat::v1::Behaviour::new(peer, autonat::v1::Config::default()))
}

/// Whether a router may be asked to forward ports: not when the operator says what to announce, or
/// for a node of one machine.
pub(super) fn asks_router(config: &P2pConfig) -> bool {
    let leaves = |addr: &libp2p::Multiaddr| {
        ip_of(addr).is_some_and(|ip| ip.is_ipv4() && Scope::of(ip) != Scope::Machine)
    };
    config.traversal.upnp && config.announce.is_empty() && config.listen.iter().any(leaves)
}

/// A dial of one address, whatever else is going on with the peer it names.
pub(super) fn dial_address(addr: &libp2p::Multiaddr) -> DialOpts {
    match peer_of(addr) {
        Some(peer) => DialOpts::peer_id(peer)
            .addresses(vec![addr.clone()])
            .condition(libp2p::swarm::dial_opts::PeerCondition::Always)
            .build(),
        None => DialOpts::unknown_peer_id().address(addr.clone()).build(),
    }
}
