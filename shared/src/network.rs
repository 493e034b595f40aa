//! The network of this machine: the rate that was measured, which a file of the cache folder keeps,
//! and the link of the default route. netd measures and writes; `sepal config` reads the same.
//!
//! The order in which a rate is taken, the first that there is: what the operator says
//! (`--network_mbps`), what was measured, what Petals assumes. All but the first are at most the
//! speed of the link ([`Link::speed_bits_per_s`]).

mod file;
mod link;
mod rate;

use crate::config::{NetdConfig, Throughput};

pub use file::RateFile;
pub use link::NetworkLink;
pub use rate::{ASSUMED_BITS_PER_S, NetworkRate, RateSource};

impl NetworkRate {
    /// What is known of the network without asking anybody, by these settings.
    pub fn known(config: &NetdConfig) -> NetworkRate {
        let link = NetworkLink::of_system();
        let file = config.rates_dir.as_deref().map(RateFile::new);
        let takes_kept = config.throughput == Throughput::Measure;
        let kept = file.filter(|_| takes_kept).and_then(|file| file.kept(&link));
        NetworkRate::of(config.link_bits_per_s, kept, &link).at_most(config.max_upload_bits_per_s)
    }
}
