//! The libp2p node of the daemon and of clients: connections, peer routing, and the RPC framing of
//! hivemind.
//!
//! ```text
//!   callers (dht, swarm, rpc)            handlers (rpc, dht)
//!        | P2p::call_unary, open_stream       ^ mpsc::Receiver<Inbound>
//!        v                                    |
//!   call.rs  --- Command --->  driver.rs   serve.rs  one task per inbound RPC stream
//!        |                     one task:      ^
//!        |                     the swarm      |
//!        |                        |           |
//!        +<--- libp2p stream --- rpc_streams.rs (behaviour and connection handlers)
//! ```
//!
//! Bytes of RPCs never pass through the task of the swarm: a negotiated stream goes straight to the
//! task that reads or writes it. Everything that a peer can make grow has a bound, in the
//! [`resource_manager`], in `limits` or in its [`ProtocolSpec`].
//!
//! # Discrepancies
//!
//! The protocol names of hivemind have no leading slash, so the identify protocol neither shows nor
//! advertises them; go-libp2p peers then spend one more round trip on their first call.
#![forbid(unsafe_code)]

mod addresses;
mod behaviour;
mod bounds;
mod call;
mod config;
mod connections;
mod driver;
mod error;
mod frame;
#[cfg(test)]
mod fuzz;
pub mod identity;
mod inbound_reader;
mod limits;
mod messages;
mod muxer;
mod node;
mod peer_routing;
mod reach;
mod relays;
mod rpc_streams;
mod serve;
pub mod task;
#[cfg(test)]
mod tests;
mod traffic;
mod transport;
mod unary_call;

pub use libp2p::{Multiaddr, PeerId, identity::Keypair, multiaddr::Protocol};
pub use resource_manager::{
    addresses::{Scope, ip_of},
    circuits::RELAY_PART_OF_NETWORK,
    memory::MemoryPurpose,
    nets::Net,
    peerstore::SessionMark,
    pools::Reservation,
};

pub use self::{
    bounds::{bounds, of_protocols},
    call::RpcStream,
    config::{P2pConfig, ProtocolKind, ProtocolSpec, Traversal},
    connections::Introduction,
    error::{CallError, InboundError, P2pError},
    frame::DEFAULT_MAX_FRAME_BYTES,
    inbound_reader::{InboundReader, ReceivedRequest},
    limits::InboundFigures,
    node::P2p,
    serve::{Inbound, InboundStream, InboundWriter, UnaryResponder},
    traffic::{PathFigures, TrafficFigures},
    unary_call::MAX_UNARY_BYTES,
};
