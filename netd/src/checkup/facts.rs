//! What is asked of the network, and what is learned there.

use serde::{Deserialize, Serialize};
use shared::config::HubConfig;

/// What a node found in the swarm.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SwarmFacts {
    /// Addresses given to join through; 0 for a new swarm.
    pub initial_peers: usize,
    /// Peers that the node is connected to.
    pub connected: usize,
    /// Peers of the DHT that it has heard of.
    pub known: usize,
    /// Seconds that this machine's clock is ahead of each peer that was asked.
    pub clock_ahead_s: Vec<f64>,
    /// Whether peers can dial the node; `None` if no peer said.
    pub reachable: Option<bool>,
    /// Whether the node listened on another port, because the configured one was in use.
    pub on_other_port: bool,
    /// Whether the router forwards the port; `None` if it was not asked.
    pub forwarded: Option<bool>,
    /// Whether a relay agreed to relay for the node; `None` if none was needed or allowed.
    pub relayed: Option<bool>,
}

/// What is asked of the Hub.
#[derive(Clone, Debug, Default)]
pub struct HubQuestion {
    /// How the Hub is asked.
    pub hub: HubConfig,
    /// Repository of the model, if it is one.
    pub model: Option<String>,
}

/// What the Hub said.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HubFacts {
    pub endpoint: String,
    /// Seconds that this machine's clock is ahead of the Hub's.
    pub clock_ahead_s: Option<f64>,
    /// Whether the token is valid; `None` if there is none.
    pub token: Option<TokenState>,
    /// Whether the model can be read; `None` if it was not asked.
    pub model: Option<ModelState>,
    /// Bytes of the weights of the model.
    pub model_bytes: Option<u64>,
}

/// What the Hub says of a token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TokenState {
    /// It belongs to this account.
    Valid(String),
    /// It is unknown or was revoked.
    Refused,
    /// The Hub did not say, for this reason.
    Unknown(String),
}

/// What the Hub says of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ModelState {
    /// Its config.json can be read.
    Readable,
    /// There is no such model, revision or config.json.
    Missing,
    /// The Hub wants another token, or access must be asked for.
    Forbidden,
    /// The Hub did not say, for this reason.
    Unknown(String),
}
