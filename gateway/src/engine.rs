//! All models of a gateway, and how many texts may be under way.

use std::collections::BTreeMap;
use std::sync::Arc;

use client::swarm::{Swarm, SwarmConfig, SwarmError};
use shared::error_chain::with_causes;
use tokio::sync::Semaphore;

use crate::config::{EngineConfig, GatewayModel};
use crate::metrics::Metrics;
use crate::model::{Model, ModelError, ModelFiles};
use crate::view::ModelServers;

/// Why the gateway does not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Model(#[from] ModelError),
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
    views: Vec<Arc<ModelServers>>,
    models: BTreeMap<String, Arc<Model>>,
    /// Texts under way.
    pub slots: Arc<Semaphore>,
    pub metrics: Metrics,
}

impl Engine {
    /// Loads all models and enters their swarms, each swarm once.
    ///
    /// # Errors
    /// [`EngineError`]: one sentence that names what is wrong and what to do.
    pub async fn start(config: &EngineConfig) -> Result<Engine, EngineError> {
        let mut joined: BTreeMap<Vec<String>, Swarm> = BTreeMap::new();
        let (mut views, mut models) = (Vec::new(), BTreeMap::new());
        for wanted in &config.models {
            let (blocks, local) = load(wanted, config)?;
            let peers = match wanted.initial_peers.is_empty() {
                true => &config.initial_peers,
                false => &wanted.initial_peers,
            };
            let swarm = match joined.get(peers) {
                Some(swarm) => swarm.clone(),
                None => {
                    let swarm = join(config, peers, &blocks).await?;
                    joined.insert(peers.clone(), swarm.clone());
                    swarm
                }
            };
            let swarm = swarm.for_model(blocks.prefix.clone(), blocks.count, config.route_timeout);
            let view = Arc::new(ModelServers::new(wanted.name.clone(), swarm));
            views.push(view.clone());
            if let Some(local) = local {
                tracing::info!(model = wanted.name, prefix = blocks.prefix, "model loaded");
                models.insert(wanted.name.clone(), Arc::new(local.over(view, config)));
            }
        }
        let slots = Arc::new(Semaphore::new(config.max_streams));
        Ok(Engine { views, models, slots, metrics: Metrics::default() })
    }

    /// The servers of all models, of those too that are shown and not offered.
    pub fn views(&self) -> impl Iterator<Item = &Arc<ModelServers>> {
        self.views.iter()
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
        for view in &self.views {
            view.swarm.leave().await;
        }
    }
}

/// The blocks of a model, by the names that servers announce.
struct Blocks {
    prefix: String,
    count: u32,
}

/// Reads the files of a model. One that its own server shows and that cannot be used here is not
/// offered: its servers are shown.
fn load(
    wanted: &GatewayModel,
    config: &EngineConfig,
) -> Result<(Blocks, Option<ModelFiles>), EngineError> {
    match (ModelFiles::load(wanted, config), &config.server, &wanted.dht_prefix) {
        (Ok(local), ..) => {
            let blocks = Blocks { prefix: local.prefix.clone(), count: local.num_blocks() };
            Ok((blocks, Some(local)))
        }
        (Err(error), Some(server), Some(prefix)) => {
            let why = with_causes(&error);
            tracing::warn!(model = wanted.name, why, "the page has no chat");
            Ok((Blocks { prefix: prefix.clone(), count: server.num_blocks }, None))
        }
        (Err(error), ..) => Err(error.into()),
    }
}

async fn join(
    config: &EngineConfig,
    peers: &[String],
    blocks: &Blocks,
) -> Result<Swarm, EngineError> {
    let parse = |text: &String| text.parse().map_err(|_| EngineError::BadAddress(text.clone()));
    let swarm = Swarm::join(SwarmConfig {
        initial_peers: peers.iter().map(parse).collect::<Result<_, _>>()?,
        prefix: blocks.prefix.clone(),
        num_blocks: blocks.count,
        startup_timeout: config.startup_timeout,
    });
    Ok(swarm.await?)
}
