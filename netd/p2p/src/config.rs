//! What a node is to be, and the RPCs that it serves.

use std::net::Ipv4Addr;
use std::time::Duration;

use libp2p::{Multiaddr, identity::Keypair, multiaddr::Protocol};
use resource_manager::addresses::Scope;

/// What a node is to be.
#[derive(Clone, Debug)]
pub struct P2pConfig {
    pub keypair: Keypair,
    /// Where it listens; empty for a node that only calls.
    pub listen: Vec<Multiaddr>,
    /// What it tells others instead of its listen addresses; empty to tell those.
    pub announce: Vec<Multiaddr>,
    /// Whom it connects to first, and again whenever the connection is gone.
    pub initial_peers: Vec<Multiaddr>,
    /// Whether it answers peer routing queries; a client-mode node only asks.
    pub kad_server: bool,
    /// The RPCs it serves.
    pub protocols: Vec<ProtocolSpec>,
    /// What it does about NATs and firewalls, its own and those of others.
    pub traversal: Traversal,
    /// How long listening and reaching the first of `initial_peers` may take.
    pub startup_timeout: Duration,
    /// Bytes per second that it sends to all peers together; `None` for no limit.
    pub max_upload_bytes_per_s: Option<u64>,
    /// Bytes that requests on streams may hold, all peers together.
    pub request_memory: u64,
}

impl P2pConfig {
    /// [`Self::request_memory`] of nodes that serve no blocks.
    pub const REQUEST_MEMORY: u64 = 256 << 20;

    /// A node with a fresh key that only calls: it listens nowhere, serves nothing and crosses no
    /// NAT.
    pub fn of_caller(initial_peers: Vec<Multiaddr>, startup_timeout: Duration) -> P2pConfig {
        P2pConfig {
            keypair: Keypair::generate_ed25519(),
            listen: Vec::new(),
            announce: Vec::new(),
            initial_peers,
            kad_server: false,
            protocols: Vec::new(),
            traversal: Traversal::NONE,
            startup_timeout,
            max_upload_bytes_per_s: None,
            request_memory: P2pConfig::REQUEST_MEMORY,
        }
    }

    /// A node with a fresh key on a free port of the loopback device, for tests and benchmarks.
    pub fn on_loopback(
        initial_peers: Vec<Multiaddr>,
        protocols: Vec<ProtocolSpec>,
        startup_timeout: Duration,
    ) -> P2pConfig {
        P2pConfig {
            listen: vec![Multiaddr::from(Ipv4Addr::LOCALHOST).with(Protocol::Tcp(0))],
            kad_server: true,
            protocols,
            ..P2pConfig::of_caller(initial_peers, startup_timeout)
        }
    }
}

/// What a node does about NATs and firewalls, and where it dials. Dialling peers behind relays always works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traversal {
    /// Whether it tries to replace a connection through a relay by a direct one (hole punching).
    pub use_relay: bool,
    /// Whether it relays for others, as soon as it knows that it can be dialled.
    pub relay_service: bool,
    /// Whether it asks peers if they can dial it, and answers theirs (AutoNAT).
    pub autonat: bool,
    /// Whether it has itself reached through relays while it cannot be dialled.
    pub auto_relay: bool,
    /// Whether it asks the router of its net to forward its port (UPnP).
    pub upnp: bool,
    /// The nearest nets that it dials addresses on, initial peers apart: peers decide which
    /// addresses those are.
    pub nearest: Scope,
}

impl Traversal {
    /// Nothing: a probe, or a test on one machine.
    pub const NONE: Self = Self {
        use_relay: false,
        relay_service: false,
        autonat: false,
        auto_relay: false,
        upnp: false,
        nearest: Scope::Machine,
    };
    /// A client: it reaches servers behind NATs and lends nothing.
    pub const CLIENT: Self = Self { use_relay: true, ..Self::NONE };
    /// A server or a bootstrap node.
    pub const SERVER: Self = Self {
        use_relay: true,
        relay_service: true,
        autonat: true,
        auto_relay: true,
        upnp: true,
        nearest: Scope::Machine,
    };
}

/// One RPC that a node serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProtocolSpec {
    /// `Class.method`, the libp2p protocol name.
    pub name: &'static str,
    pub kind: ProtocolKind,
    /// Concurrent streams of one peer; more are reset.
    pub max_inbound_per_peer: usize,
    /// Concurrent streams of all peers; more are reset.
    pub max_inbound_total: usize,
}

/// Framing of an RPC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProtocolKind {
    /// One request, one answer.
    Unary,
    /// Frames in both directions.
    Stream,
}
