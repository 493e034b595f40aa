//! Settings of `sepal chat`: its flags.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use client::config::{ClientConfig, SamplingConfig};

use crate::config::{EngineConfig, GatewayModel};

/// Settings of `sepal chat`.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(rename_all = "snake_case")]
pub struct ChatConfig {
    /// Model folder in Hugging Face layout, with tokenizer.json, embeddings, head and chat template, or a model of
    /// the Hub, of which just these are downloaded
    pub model: GatewayModel,
    #[command(flatten)]
    pub client: ClientConfig,
    /// Chat template (Jinja) in place of that of the model
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
    /// What the assistant is told first
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Maximum number of tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: u32,
    /// Sample tokens at this temperature; 0 takes the most probable one
    #[arg(long, value_name = "T", default_value_t = 0.7, value_parser = temperature)]
    pub temperature: f32,
    /// Sample from the most probable tokens whose probabilities sum to P
    #[arg(long, value_name = "P", default_value_t = 0.9)]
    pub top_p: f32,
    /// Seed of the sampling; the same seed gives the same answers
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// File of what was entered before; `None` = none.
    #[arg(skip)]
    pub history: Option<PathBuf>,
}

fn temperature(text: &str) -> Result<f32, String> {
    let number = text.parse().ok().filter(|temperature| *temperature >= 0.0);
    number.ok_or_else(|| "expected 0 or a positive number".to_owned())
}

impl ChatConfig {
    /// What the one conversation is computed with.
    pub fn engine(&self) -> EngineConfig {
        let ClientConfig { initial_peers, dht_prefix, local, draft, startup_timeout } =
            self.client.clone();
        EngineConfig {
            models: vec![GatewayModel { dht_prefix, draft, ..self.model.clone() }],
            initial_peers,
            local,
            chat_template: self.chat_template.clone(),
            sessions_kept: 1,
            session_idle: Duration::from_secs(240),
            max_streams: 1,
            route_timeout: startup_timeout,
            startup_timeout,
            server: None,
        }
    }

    /// How tokens are chosen.
    pub fn sampling(&self) -> SamplingConfig {
        SamplingConfig {
            temperature: (self.temperature > 0.0).then_some(self.temperature),
            top_p: Some(self.top_p),
            seed: self.seed,
            ..SamplingConfig::default()
        }
    }
}
