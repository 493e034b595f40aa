//! What the network carries, and how that is known.

use serde::{Deserialize, Serialize};

use super::link::NetworkLink;

/// Rate of a network that could not be measured (`petals/server/throughput.py`).
pub const ASSUMED_BITS_PER_S: f64 = 1e8;

/// How a rate is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, strum::Display)]
pub enum RateSource {
    /// The operator says so.
    #[strum(to_string = "given by --network_mbps")]
    Operator,
    /// Bytes went to and from servers of the swarm.
    #[strum(to_string = "measured with servers of the swarm")]
    Peers,
    /// Bytes went to and from the service that the operator named (`--network_test_url`).
    #[strum(to_string = "measured with --network_test_url")]
    Url,
    /// The speed of the link, which is less than what was measured or assumed.
    #[strum(to_string = "the speed of the link")]
    Link,
    /// What the operator allows (`--max_upload_mbps`), which is less than the rest.
    #[strum(to_string = "given by --max_upload_mbps")]
    Upload,
    /// Nothing was measured.
    #[strum(to_string = "assumed, nothing was measured yet")]
    Assumed,
}

/// What the network carries each way.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetworkRate {
    /// The slower way, in bits per second.
    pub bits_per_s: f64,
    /// How that is known.
    pub source: RateSource,
}

impl NetworkRate {
    /// The rate that counts, in the order of [`crate::network`].
    pub fn of(
        asked: Option<f64>,
        measured: Option<NetworkRate>,
        link: &NetworkLink,
    ) -> NetworkRate {
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

    /// The same, but no more than the operator lets this machine send.
    pub fn at_most(self, upload_bits_per_s: Option<f64>) -> NetworkRate {
        match upload_bits_per_s.filter(|most| *most < self.bits_per_s) {
            Some(bits_per_s) => NetworkRate { bits_per_s, source: RateSource::Upload },
            None => self,
        }
    }

    /// Megabits per second, for people.
    pub fn mbps(&self) -> f64 {
        (self.bits_per_s / 1e4).round() / 1e2
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
            let rate = NetworkRate::of(asked, measured, &link);
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
