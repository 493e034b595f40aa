//! Who serves each block of the model, for a person who looks: read of the swarm only while somebody
//! does.

use std::sync::Arc;
use std::time::Duration;

use shared::figures::{BlockCoverage, MAX_COVERED_BLOCKS};
use swarm::dht::driver::Dht;
use swarm::view::{self, BlockServers, MAX_THROUGHPUT};
use swarm::wire::records::ServerState;
use tokio::time::Instant;
use tracing::debug;

use crate::telemetry::Telemetry;

/// Time between two looks whether somebody asks.
const PACE: Duration = Duration::from_secs(1);
/// How long somebody who asked counts as looking.
const INTEREST: Duration = Duration::from_secs(60);
/// Time between two readings; clients of the swarm read as often.
const PERIOD: Duration = Duration::from_secs(30);

/// Reads who serves the `blocks` blocks of the model with this prefix, while somebody looks.
pub async fn keep(dht: Dht, prefix: String, blocks: u32, telemetry: Arc<Telemetry>) {
    let mut interval = tokio::time::interval(PACE);
    let mut read_at: Option<Instant> = None;
    loop {
        interval.tick().await;
        let is_viewed = telemetry.viewed_ago().is_some_and(|ago| ago < INTEREST);
        if !is_viewed || read_at.is_some_and(|at| at.elapsed() < PERIOD) {
            continue;
        }
        read_at = Some(Instant::now());
        match view::read_blocks(&dht, &prefix, 0..blocks).await {
            Ok(servers) => {
                let shown = servers.iter().take(MAX_COVERED_BLOCKS);
                telemetry.set_coverage(shown.map(coverage).collect());
            }
            Err(error) => debug!(%error, "cannot read the swarm"),
        }
    }
}

/// Servers of a block that are online. What they claim is bounded.
fn coverage(servers: &BlockServers) -> BlockCoverage {
    let online = servers.values().filter(|info| info.state == ServerState::Online);
    let claims = online.clone().map(|info| info.throughput.clamp(0.0, MAX_THROUGHPUT));
    let claims = claims.filter(|throughput| throughput.is_finite());
    BlockCoverage {
        servers: u32::try_from(online.count()).unwrap_or(u32::MAX),
        throughput: claims.sum::<f64>() as f32,
    }
}
