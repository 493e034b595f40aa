//! Weights: how a worker maps what the manifest names ([`map`]).

pub mod map;
