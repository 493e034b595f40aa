//! The swarm as this server sees it, and this server as the swarm sees it: who serves which blocks
//! ([`swarm::view`]), which blocks are worth serving ([`placement`]), when to move there ([`rebalance`]),
//! our own records ([`announce`]), how well blocks are served ([`coverage`]), whether others can dial us ([`reachability`], [`monitor`]), and
//! what our network carries ([`rate`]).

pub mod announce;
pub mod coverage;
pub mod monitor;
pub mod placement;
pub mod rate;
pub mod reachability;
pub mod rebalance;
