//! When the network is measured: once a week for each place of the machine, while this server has
//! nothing to do, and again and again until it succeeds. Nothing waits for it.

use std::time::Duration;

use p2p::P2p;
use shared::network::{NetworkRate, RateSource};
use swarm::dht::driver::Dht;
use tokio::task::spawn_blocking;
use tracing::{debug, warn};

use super::{url, with_peers};
use crate::network_rate::{NetworkLink, RateFile};

/// Pauses after measurements that came to nothing, since there was nobody to measure with; the last
/// is repeated.
const PAUSES: [Duration; 4] = [
    Duration::from_secs(60),
    Duration::from_secs(300),
    Duration::from_secs(900),
    Duration::from_secs(3600),
];
/// Servers that are started together do not ask in the same moment.
const JITTER: Duration = Duration::from_secs(2);
/// Time between two looks at another server of this machine that measures, or at our own sessions.
const BUSY_PERIOD: Duration = Duration::from_secs(10);

/// How the network is measured.
#[derive(Clone, Debug)]
pub struct MeasurementSettings {
    /// Where measurements are kept.
    pub file: Option<RateFile>,
    /// A service to measure with: addresses for the way down and the way up.
    pub service: Option<(String, String)>,
    /// Whether a kept measurement is good enough.
    pub take_kept: bool,
}

/// A kept rate, or measures until there is one; `idle` says whether this server has nothing else to
/// do.
pub async fn keep(
    settings: &MeasurementSettings,
    p2p: &P2p,
    dht: &Dht,
    idle: &(impl Fn() -> bool + Send + Sync),
) -> NetworkRate {
    tokio::time::sleep(JITTER.mul_f64(rand::random_range(0.0..1.0))).await;
    let mut pauses = PAUSES.iter();
    let mut pause = BUSY_PERIOD;
    loop {
        while !idle() {
            tokio::time::sleep(BUSY_PERIOD).await;
        }
        match once(settings, p2p, dht).await {
            MeasurementOutcome::Rate(rate) => return rate,
            MeasurementOutcome::Busy => tokio::time::sleep(BUSY_PERIOD).await,
            MeasurementOutcome::Nobody => {
                pause = pauses.next().copied().unwrap_or(pause);
                debug!(again_in = ?pause, "no peer to measure the network with");
                tokio::time::sleep(pause).await;
            }
        }
    }
}

/// What one attempt came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MeasurementOutcome {
    /// Kept or measured.
    Rate(NetworkRate),
    /// Another server of this machine measures.
    Busy,
    /// Nobody to measure with.
    Nobody,
}

/// One attempt.
pub async fn once(settings: &MeasurementSettings, p2p: &P2p, dht: &Dht) -> MeasurementOutcome {
    let link = NetworkLink::of_system();
    let _lock = match &settings.file {
        Some(file) => match lock(file).await {
            Ok(Some(lock)) => Some(lock),
            Ok(None) => return MeasurementOutcome::Busy,
            Err(error) => {
                warn!(%error, "cannot lock the file of network rates");
                None
            }
        },
        None => None,
    };
    let kept = settings.file.as_ref().and_then(|file| file.kept(&link));
    if let (Some(rate), true) = (kept, settings.take_kept) {
        return MeasurementOutcome::Rate(rate);
    }
    let Some(rate) = measure(settings, p2p, dht).await else {
        return MeasurementOutcome::Nobody;
    };
    if let Some(file) = settings.file.clone() {
        let kept = spawn_blocking(move || file.keep(&link, rate)).await;
        if let Ok(Err(error)) = kept {
            warn!(%error, "cannot save the network rate");
        }
    }
    MeasurementOutcome::Rate(rate)
}

async fn lock(file: &RateFile) -> std::io::Result<Option<std::fs::File>> {
    let file = file.clone();
    let locked = spawn_blocking(move || file.lock()).await;
    locked.unwrap_or_else(|error| Err(std::io::Error::other(error)))
}

async fn measure(settings: &MeasurementSettings, p2p: &P2p, dht: &Dht) -> Option<NetworkRate> {
    if let Some((download, upload)) = &settings.service {
        match url::with_service(download, upload).await {
            Ok(bits_per_s) => {
                return Some(whole(bits_per_s, RateSource::Url));
            }
            Err(error) => {
                warn!(%error, "--network_test_url failed, measuring with servers of the swarm")
            }
        }
    }
    let known = dht.peers().await.unwrap_or_default();
    let bits_per_s = with_peers(p2p, known).await?;
    Some(whole(bits_per_s, RateSource::Peers))
}

/// Whole bits, which the file gives back as they were.
fn whole(bits_per_s: f64, source: RateSource) -> NetworkRate {
    let bits_per_s = bits_per_s.round();
    NetworkRate { bits_per_s, source }
}
