//! The swarm, for its servers and for clients: what the bytes on the wire mean, how the DHT finds
//! servers, who serves which blocks, and which of them a client asks.
//!
//! ```text
//!   netd, client ──> view ──> dht ──> p2p (the node)
//!        │            └────────┴───> wire    names
//!        └─────────> routing, health
//! ```
//!
//! - [`wire`]: messages, msgpack, tensors, metadata and records against our own types
//! - [`names`]: every RPC's name
//! - [`dht`]: hivemind's DHT
//! - [`view`]: who serves which blocks
//! - [`routing`], [`health`]: Petals' choice of servers, and what it remembers of them
//!
//! All of it is pure but [`dht::driver`], through which the DHT and its readers reach peers.
#![forbid(unsafe_code)]

pub mod dht;
pub mod health;
pub mod names;
pub mod public_swarm;
pub mod routing;
pub mod view;
pub mod wire;
