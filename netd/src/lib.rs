//! The network daemon: the one process of Sepal that speaks with the swarm.

pub mod dht;
pub mod p2p;
pub mod swarm;
pub mod wire;
