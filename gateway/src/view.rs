//! A model as the page shows it: its servers, and the blocks that no server serves.

use std::ops::Range;
use std::time::{Duration, SystemTime};

use client::swarm::Swarm;
use parking_lot::Mutex;

/// How often the records of the servers are read.
const REFRESH_PERIOD: Duration = Duration::from_secs(10);

/// Blocks that no server serves, and since when.
#[derive(Clone, Debug, Default)]
pub struct Holes {
    /// Ranges of blocks; empty if there is a route.
    pub blocks: Vec<Range<u32>>,
    /// When the first of them was found.
    pub since: Option<SystemTime>,
}

/// The servers of one model.
pub struct ModelServers {
    /// The model's name in the API.
    pub name: String,
    pub swarm: Swarm,
    holes: Mutex<Holes>,
}

impl ModelServers {
    /// A model whose servers are not known yet.
    pub fn new(name: String, swarm: Swarm) -> ModelServers {
        let all = 0..swarm.num_blocks();
        let unknown = Holes { blocks: vec![all], since: Some(SystemTime::now()) };
        ModelServers { name, swarm, holes: Mutex::new(unknown) }
    }

    /// Blocks that no server serves, by the records as they are now.
    pub fn holes(&self) -> Holes {
        self.find_holes();
        self.holes.lock().clone()
    }

    /// Reads the records of the servers, again and again.
    pub async fn keep_up(&self) {
        loop {
            if let Err(error) = self.swarm.refresh().await {
                tracing::warn!(model = self.name, %error, "cannot read the servers' records");
            }
            self.find_holes();
            tokio::time::sleep(REFRESH_PERIOD).await;
        }
    }

    fn find_holes(&self) {
        let servers = self.swarm.servers();
        let covered =
            |block: u32| servers.iter().any(|s| (s.start..s.end).contains(&(block as usize)));
        let mut blocks: Vec<Range<u32>> = Vec::new();
        for block in (0..self.swarm.num_blocks()).filter(|block| !covered(*block)) {
            match blocks.last_mut() {
                Some(last) if last.end == block => last.end += 1,
                _ => blocks.push(block..block + 1),
            }
        }
        let mut holes = self.holes.lock();
        if holes.blocks.is_empty() != blocks.is_empty() {
            holes.since = (!blocks.is_empty()).then(SystemTime::now);
            let (model, missing) = (&self.name, format!("{blocks:?}"));
            match blocks.is_empty() {
                true => tracing::info!(model, "every block has a server"),
                false => tracing::warn!(model, missing, "blocks have no server"),
            }
        }
        holes.blocks = blocks;
    }
}
