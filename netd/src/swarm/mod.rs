//! The swarm as this server sees it, and this server as the swarm sees it: who serves which blocks ([`view`]), which blocks
//! are worth serving ([`placement`]), and our own records ([`announce`]).

pub mod announce;
pub mod placement;
#[cfg(test)]
mod simulation;
pub mod throughput;
pub mod view;
