//! The rate of this machine's network: what was measured, which a file of the cache folder keeps,
//! and the link of the default route. netd measures and writes; `sepal config` reads the same.
//!
//! The order in which a rate is taken, the first that there is: what the operator says
//! (`--network_mbps`), what was measured, what Petals assumes. All but the first are at most the
//! speed of the link ([`NetworkLink::speed_bits_per_s`]).

mod file;
mod link;

use shared::config::{NetdConfig, Throughput};
use shared::network::{NetworkRate, RateSource};

pub use file::RateFile;
pub use link::NetworkLink;

/// Rate of a network that could not be measured (`petals/server/throughput.py`).
pub const ASSUMED_BITS_PER_S: f64 = 1e8;

/// What is known of the network without asking anybody, by these settings.
pub fn known(config: &NetdConfig) -> NetworkRate {
    let link = NetworkLink::of_system();
    let file = config.rates_dir.as_deref().map(RateFile::new);
    let takes_kept = config.throughput == Throughput::Measure;
    let kept = file.filter(|_| takes_kept).and_then(|file| file.kept(&link));
    of(config.link_bits_per_s, kept, &link).at_most(config.max_upload_bits_per_s)
}

/// The rate that counts, in the order of this module's head.
pub fn of(asked: Option<f64>, measured: Option<NetworkRate>, link: &NetworkLink) -> NetworkRate {
    if let Some(bits_per_s) = asked {
        let source = RateSource::Operator;
        return NetworkRate { bits_per_s, source };
    }
    let rate = measured
        .unwrap_or(NetworkRate { bits_per_s: ASSUMED_BITS_PER_S, source: RateSource::Assumed });
    match link.speed_bits_per_s {
        Some(bits_per_s) if bits_per_s < rate.bits_per_s => {
            NetworkRate { bits_per_s, source: RateSource::Link }
        }
        _ => rate,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEERS: NetworkRate = NetworkRate { bits_per_s: 4e8, source: RateSource::Peers };

    #[test]
    fn the_operator_goes_before_a_measurement_before_what_is_assumed_and_the_link_bounds() {
        let rate = |asked, measured, speed| {
            let link = NetworkLink { name: "eth0 via 0101A8C0".into(), speed_bits_per_s: speed };
            let rate = of(asked, measured, &link);
            (rate.bits_per_s, rate.source)
        };
        let (fast, slow) = (Some(1e9), Some(1e7));
        assert_eq!(rate(Some(5.0), Some(PEERS), slow), (5.0, RateSource::Operator));
        assert_eq!(rate(None, Some(PEERS), fast), (4e8, RateSource::Peers));
        assert_eq!(rate(None, Some(PEERS), None), (4e8, RateSource::Peers));
        assert_eq!(rate(None, Some(PEERS), slow), (1e7, RateSource::Link));
        assert_eq!(rate(None, None, fast), (1e8, RateSource::Assumed));
        assert_eq!(rate(None, None, slow), (1e7, RateSource::Link));
        let upload = NetworkRate { bits_per_s: 2e7, source: RateSource::Upload };
        assert_eq!((PEERS.at_most(Some(2e7)), PEERS.at_most(Some(5e8))), (upload, PEERS));
        assert_eq!(PEERS.at_most(None), PEERS);
    }
}
