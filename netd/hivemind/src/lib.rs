//! The protocols of hivemind and Petals, for the daemon and for clients: how peers reach each
//! other, how the DHT finds servers, and what the bytes on the wire mean.
//!
//! ```text
//!   netd, client ──> view ──> dht ──> p2p ──> the swarm
//!                     └────────┴───> wire    names
//! ```
//!
//! - [`p2p`]: the libp2p node and hivemind's RPC framing
//! - [`dht`]: hivemind's DHT
//! - [`wire`]: messages, msgpack, tensors, metadata and records against our own types
//! - [`names`]: every RPC's name
//! - [`task`]: how tasks are started
//! - [`view`]: who serves which blocks
//! - [`bounds`]: what peers can make a node hold or do, as data
//!
//! Nothing here serves blocks or keeps sessions: netd and the client do that on top.
#![forbid(unsafe_code)]

pub mod bounds;
pub mod dht;
pub mod names;
pub mod p2p;
pub mod task;
pub mod view;
pub mod wire;
