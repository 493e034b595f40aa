//! hivemind's DHT: the key-value store of the swarm, in which servers announce their blocks. Runs
//! inside netd's reactor.
//!
//! [`node::Node`] is the whole protocol as a pure state machine (no sockets, no clock, no
//! randomness): routing table, storage, lookups, stores, joining. [`driver`] feeds it from the
//! network. The parts:
//!
//! ```text
//!   driver ── Event ──> node ── Action ──> driver          id       20-byte ids, XOR distance
//!                        ├── routing   who is where         storage  what this node keeps for the swarm
//!                        ├── storage   main and cache       lookup   beam search for the nodes nearest to keys
//!                        └── lookup, one per operation      answer   replies to requests of others
//! ```
//!
//! Nothing here is signed: anybody may claim anything. A peer is believed about itself before others
//! are believed about it, and every count and size that a peer controls is bounded. Source: `hivemind/dht/{node,protocol,routing,storage,traverse}.py`. Times
//! are Unix seconds as `f64`, as on the wire.

mod answer;
mod bounds;
pub mod driver;
pub mod id;
pub mod lookup;
pub mod node;
pub mod routing;
pub mod storage;

pub use bounds::bounds;

#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod simulation;
