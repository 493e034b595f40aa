//! What the network of this machine carries, and how that is known, as netd tells the supervisor.

use serde::{Deserialize, Serialize};

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
