//! Weights: what prepare left for the workers ([`manifest`]) and how a worker maps it ([`map`]).

pub mod manifest;
pub mod map;
