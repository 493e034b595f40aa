//! Bounds on what peers may make a libp2p node hold or do, in the manner of go-libp2p's resource
//! manager. A PeerID costs nothing and an IP net costs money, so most bounds hold three times: for a
//! peer, for its net ([`nets`]) and for the process.
//!
//! | Bounded | Where |
//! | --- | --- |
//! | connections, handshakes, dials under way | [`connection_limits::Behaviour`], a part of the swarm's behaviour |
//! | who gets the last connections | [`peerstore`]: peers with a session, known servers |
//! | where peers make the node dial | [`dials::DialGate`], before the transport by [`gated_transport`] |
//! | connections that say nothing | [`first_byte`], around a socket |
//! | streams of a protocol | [`streams`] |
//! | bytes of requests, before they are read | [`pools`], one for each purpose in [`memory`] |
//! | readers and callers that stop halfway | [`stall_timeout`], around a reader |
//! | bytes per second that are sent | [`upload`], around a connection |
//! | bytes per second that are relayed | [`circuits`], by the multiplexer |
//!
//! Each is usable alone; [`ResourceManager`] has those that share what they know of peers. Nothing here
//! starts a node or reads a message. Who finds no room waits or is refused; the user of the crate says
//! so to the peer and counts it.
//!
//! # Example
//!
//! A server that reserves the bytes of a request before it reads them:
//!
//! ```
//! use libp2p::PeerId;
//! use resource_manager::{ResourceManager, memory::MemoryPurpose, streams::StreamBounds};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let manager = ResourceManager::new(256 << 20);
//! let peer = PeerId::random();
//! manager.nets().connected(peer, [203, 0, 113, 7].into());
//!
//! // A stream of the peer: at most two of this protocol, and eight of all peers.
//! let bounds = StreamBounds { per_peer: 2, total: 8 };
//! let stream = manager.streams().admit(peer, "/example/1", bounds).expect("the first one");
//!
//! // It announces 1 MiB, which is read once there is room for it.
//! let held = manager.ask(MemoryPurpose::Step, peer, 1 << 20).await;
//! // ... read and answer ...
//! drop((held, stream));
//! # }
//! ```
//!
//! The limits on connections are a behaviour beside the node's own:
//! `connection_limits::Behaviour::new(Arc::clone(manager.peers()), Places::DEFAULT)`.
#![forbid(unsafe_code)]

pub mod addresses;
pub mod bounds;
pub mod circuits;
pub mod connection_limits;
pub mod dials;
pub mod first_byte;
pub mod gated_transport;
pub mod memory;
pub mod nets;
pub mod peerstore;
pub mod pools;
pub mod stall_timeout;
pub mod streams;
pub mod upload;

use std::sync::Arc;

use libp2p::PeerId;

use self::{
    circuits::CircuitRates,
    memory::{MemoryPurpose, RequestMemory},
    nets::Nets,
    peerstore::Peerstore,
    pools::MemoryAsk,
    streams::StreamCounts,
};

/// What peers hold of one node, and where they are.
#[derive(Debug)]
pub struct ResourceManager {
    nets: Nets,
    peers: Arc<Peerstore>,
    streams: Arc<StreamCounts>,
    memory: RequestMemory,
    circuits: Arc<CircuitRates>,
}

impl ResourceManager {
    /// One under which requests on streams hold so many bytes, all peers together.
    #[must_use]
    pub fn new(request_memory: u64) -> Self {
        Self {
            nets: Nets::default(),
            peers: Arc::default(),
            streams: Arc::default(),
            memory: RequestMemory::new(request_memory),
            circuits: Arc::default(),
        }
    }

    /// Asks for bytes for what a peer sends.
    pub fn ask(&self, purpose: MemoryPurpose, peer: PeerId, bytes: usize) -> MemoryAsk {
        self.memory.of(purpose).ask(peer, self.nets.of(&peer), bytes)
    }

    /// Where connected peers are.
    pub fn nets(&self) -> &Nets {
        &self.nets
    }

    /// Peers that matter more than others.
    pub fn peers(&self) -> &Arc<Peerstore> {
        &self.peers
    }

    /// Streams that peers opened.
    pub fn streams(&self) -> &Arc<StreamCounts> {
        &self.streams
    }

    /// Bytes that requests hold.
    pub fn memory(&self) -> &RequestMemory {
        &self.memory
    }

    /// How fast circuits of others are.
    pub fn circuits(&self) -> &Arc<CircuitRates> {
        &self.circuits
    }
}
