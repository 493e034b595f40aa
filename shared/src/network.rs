//! The network of this machine: the rate that was measured, which a file of the cache folder keeps,
//! and the link of the default route. netd measures and writes; `sepal config` reads the same.
//!
//! The order in which a rate is taken, the first that there is: what the operator says
//! (`--network_mbps`), what was measured, what Petals assumes. All but the first are at most the
//! speed of the link ([`Link::speed_bits_per_s`]).

mod file;
mod link;
mod rate;

pub use file::RateFile;
pub use link::Link;
pub use rate::{ASSUMED_BITS_PER_S, NetworkRate, RateSource};
