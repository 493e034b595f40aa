//! The network daemon: the one process of Sepal that speaks with the swarm. Async lives here and
//! only here.
//!
//! ```text
//!   supervisor ── control ──> run ──> join (p2p, dht) ──> offer (which blocks, records)
//!                              │
//!   peers ── p2p ──> rpc::dispatch ──> rpc::{info, forward, inference, push}
//!                                         │         │
//!                                      sessions   workers ── rings, arena ──> gpu-worker
//! ```
//!
//! - crates [`swarm`] and [`p2p`]: the DHT and the bytes of the wire; the libp2p node
//! - [`membership`]: who serves what, and what this server says of itself
//! - [`rpc`]: the transformer RPCs; [`sessions`]: KV budget, pages, page tables
//! - [`workers`]: jobs in flight, and what becomes of them when a worker dies
//! - [`telemetry`]: what is counted of the work; `figures` gathers it for people, `metrics` for Prometheus
//! - [`bounds`]: what peers can make it hold or do, as data
//! - [`run`]: the daemon's life; [`dht_node`]: `sepal dht`; [`checkup`]: the network checks of `sepal doctor`
#![forbid(unsafe_code)]

pub mod bounds;
pub mod checkup;
#[cfg(test)]
mod clock;
mod control;
pub mod dht_node;
pub mod fatal_error;
mod figures;
mod http;
pub mod join;
pub mod membership;
mod metrics;
pub mod network_rate;
mod offer;
mod pings;
pub mod rpc;
pub mod run;
pub mod sessions;
pub mod telemetry;
pub mod throughput;
pub mod workers;
