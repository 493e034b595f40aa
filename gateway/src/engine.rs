//! All models of a gateway, and how many texts may be under way.

use std::collections::BTreeMap;
use std::sync::Arc;

use client::swarm::{Swarm, SwarmConfig, SwarmError};
use shared::config::GatewayConfig;
use tokio::sync::Semaphore;

use crate::metrics::Metrics;
use crate::model::{Local, Model, ModelError};

/// Why the gateway does not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A swarm.
    #[error(transparent)]
    Swarm(#[from] SwarmError),
    /// An address that cannot be read.
    #[error(
        "invalid peer {0:?}: expected a multiaddr such as /ip4/127.0.0.1/tcp/31337/p2p/PEER_ID"
    )]
    BadAddress(String),
}

impl EngineError {
    /// Whether trying again cannot help.
    pub fn is_of_settings(&self) -> bool {
        !matches!(self, EngineError::Swarm(_))
    }
}

/// What requests are served with.
pub struct Engine {
    models: BTreeMap<String, Arc<Model>>,
    /// Texts under way.
    pub slots: Arc<Semaphore>,
    /// What is counted.
    pub metrics: Metrics,
}

impl Engine {
    /// Loads all models and enters their swarms, each swarm once.
    ///
    /// # Errors
    /// [`EngineError`]: one sentence that names what is wrong and what to do.
    pub async fn start(config: &GatewayConfig) -> Result<Engine, EngineError> {
        let mut joined: BTreeMap<Vec<String>, Swarm> = BTreeMap::new();
        let mut models = BTreeMap::new();
        for wanted in &config.models {
            let local = Local::load(wanted, config)?;
            let peers = match wanted.initial_peers.is_empty() {
                true => &config.initial_peers,
                false => &wanted.initial_peers,
            };
            let swarm = match joined.get(peers) {
                Some(swarm) => swarm.clone(),
                None => {
                    let swarm = join(config, peers, &local).await?;
                    joined.insert(peers.clone(), swarm.clone());
                    swarm
                }
            };
            let swarm =
                swarm.for_model(local.prefix.clone(), local.num_blocks(), config.route_timeout);
            tracing::info!(model = wanted.name, prefix = local.prefix, "model loaded");
            models.insert(wanted.name.clone(), Arc::new(local.over(swarm, config)));
        }
        let slots = Arc::new(Semaphore::new(config.max_streams));
        Ok(Engine { models, slots, metrics: Metrics::default() })
    }

    /// The models, by name.
    pub fn models(&self) -> impl Iterator<Item = &Arc<Model>> {
        self.models.values()
    }

    /// A model by its name.
    pub fn model(&self, name: &str) -> Option<&Arc<Model>> {
        self.models.get(name)
    }

    /// Closes all connections.
    pub async fn leave(&self) {
        for model in self.models.values() {
            model.swarm.leave().await;
        }
    }
}

async fn join(
    config: &GatewayConfig,
    peers: &[String],
    local: &Local,
) -> Result<Swarm, EngineError> {
    let parse = |text: &String| text.parse().map_err(|_| EngineError::BadAddress(text.clone()));
    let swarm = Swarm::join(SwarmConfig {
        initial_peers: peers.iter().map(parse).collect::<Result<_, _>>()?,
        prefix: local.prefix.clone(),
        num_blocks: local.num_blocks(),
        startup_timeout: config.startup_timeout,
    });
    Ok(swarm.await?)
}
