//! Settings of the commands that use a swarm: `sepal generate`, `chat`, `gateway`, `demo` and `probe`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::dtype::{DType, QuantType};
use crate::sandbox::SandboxMode;

/// Settings of `sepal generate`.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateConfig {
    /// Model folder.
    pub model: PathBuf,
    /// Prefix of the module uids; `None` = the model's own.
    pub dht_prefix: Option<String>,
    /// Peers of the swarm.
    pub initial_peers: Vec<String>,
    /// Text to continue.
    pub prompt: String,
    /// What this machine computes itself.
    pub local: LocalConfig,
    /// Folder of a small model that guesses.
    pub draft: Option<PathBuf>,
    /// Most tokens to add.
    pub max_new_tokens: u32,
    /// How tokens are chosen.
    pub sampling: SamplingConfig,
    /// Texts before which the text ends.
    pub stop: Vec<String>,
    /// Whether to print speed and the time of a step at the end.
    pub stats: bool,
    /// Time to reach the swarm and to find servers for all blocks.
    pub startup_timeout: Duration,
}

/// What a client computes itself, and guesses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LocalConfig {
    /// Type of embeddings and head; `None` = the checkpoint's.
    pub dtype: Option<DType>,
    /// How the head is stored.
    pub head: QuantType,
    /// Most tokens that are guessed for one step; 0 = none.
    pub speculate: usize,
}

/// Settings of `sepal gateway`.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayConfig {
    /// The models, each with its name.
    pub models: Vec<GatewayModel>,
    /// Peers of the swarm, for models that name none of their own.
    pub initial_peers: Vec<String>,
    pub listen: SocketAddr,
    /// What this machine computes itself of each model.
    pub local: LocalConfig,
    /// Chat template in place of those of the models.
    pub chat_template: Option<PathBuf>,
    /// File of API keys, one a line; `None` lets everybody in.
    pub api_keys: Option<PathBuf>,
    /// Certificate chain and key, in PEM; `None` speaks plain HTTP.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Origins of web pages that may call the API; `*` for all.
    pub cors_origins: Vec<String>,
    /// Texts under way at once.
    pub max_streams: usize,
    /// Requests of one caller (API key, else IP address) in a minute; `None` = no limit.
    pub requests_per_minute: Option<u32>,
    /// Most bytes of a request.
    pub max_body_bytes: usize,
    /// Tokens of a text for which the request names no number.
    pub default_max_tokens: u32,
    /// Sessions of ended texts that are kept for their next turn, for each model.
    pub sessions_kept: usize,
    /// How long they are kept.
    pub session_idle: Duration,
    /// How long a request waits for servers of all blocks.
    pub route_timeout: Duration,
    /// Time to reach the swarm.
    pub startup_timeout: Duration,
    /// The server of this machine whose page this is; `None` for a gateway of its own.
    pub server: Option<ShownServer>,
}

/// A server that has the page of its swarm shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShownServer {
    /// Its supervisor, whose end is the end of the page.
    pub pid: u32,
    /// Blocks of the model.
    pub num_blocks: u32,
    /// Whether the process of the page is confined.
    pub sandbox: SandboxMode,
}

/// Settings of `sepal chat`.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatConfig {
    /// The one model, its swarm, and bounds.
    pub engine: GatewayConfig,
    /// What the assistant is told first.
    pub system: Option<String>,
    /// How tokens are chosen.
    pub sampling: SamplingConfig,
    /// File of what was entered before; `None` = none.
    pub history: Option<PathBuf>,
}

/// A model that a gateway offers.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayModel {
    /// Its name in the API.
    pub name: String,
    /// Folder in Hugging Face layout.
    pub folder: PathBuf,
    /// Prefix of the module uids; `None` = the folder's.
    pub dht_prefix: Option<String>,
    /// Peers of its swarm; none = those of the gateway.
    pub initial_peers: Vec<String>,
    /// Folder of a small model that guesses for it.
    pub draft: Option<PathBuf>,
}

/// How tokens are chosen. The default is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingConfig {
    /// Divides the logits; `None` chooses greedily and ignores top-k, top-p, min-p and the seed.
    pub temperature: Option<f32>,
    /// Keeps the most probable tokens only.
    pub top_k: Option<usize>,
    /// Keeps the smallest set of tokens whose probabilities sum to at least this.
    pub top_p: Option<f32>,
    /// Keeps tokens that are at least this share as probable as the most probable one.
    pub min_p: Option<f32>,
    /// Divides the logits of tokens of the prompt and of the text, or multiplies negative ones; 1
    /// = none.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of a token for each time that it was said.
    pub frequency_penalty: f32,
    /// Subtracted from the logit of a token that was said.
    pub presence_penalty: f32,
    /// Added to the logits of tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the draws; `None` = from the system.
    pub seed: Option<u64>,
}

impl Default for SamplingConfig {
    fn default() -> SamplingConfig {
        SamplingConfig {
            temperature: None,
            top_k: None,
            top_p: None,
            min_p: None,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

/// Settings of `sepal demo`.
#[derive(Clone, Debug, PartialEq)]
pub struct DemoConfig {
    /// Text to continue; `None` = one that suits the model.
    pub prompt: Option<String>,
    /// Most tokens to add.
    pub max_new_tokens: u32,
    /// Whether the swarm stays until Ctrl-C.
    pub keep: bool,
}

/// Settings of `sepal probe`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeConfig {
    /// Addresses of the server; all end in its PeerID.
    pub peers: Vec<String>,
    /// Prefix of the model's module uids.
    pub dht_prefix: String,
    pub blocks: std::ops::Range<u32>,
    /// Width of the hidden states.
    pub hidden_size: u32,
    /// The process that waits for the outcome.
    pub parent: u32,
}
