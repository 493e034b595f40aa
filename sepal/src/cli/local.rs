//! Flags of what a client computes itself: `sepal generate`, `gateway` and `chat`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use shared::config::{FetchConfig, LocalConfig};

use super::Env;
use super::serve::{self, HubArgs, cache_dir};
use super::values::{check_maddrs, guesses, model_or_last, seconds};

// Flags of a client of one model: `sepal generate` and `sepal chat`.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct OneModelArgs {
    /// Peers of the swarm
    #[arg(long, num_args = 1.., required = true, value_name = "MULTIADDR")]
    initial_peers: Vec<String>,
    /// Prefix under which the servers announce the model
    #[arg(long, value_name = "PREFIX")]
    dht_prefix: Option<String>,
    #[command(flatten)]
    local: LocalArgs,
    #[command(flatten)]
    fetch: FetchArgs,
    /// Folder of a small model of the same family that guesses next tokens on this machine
    #[arg(long, value_name = "FOLDER")]
    draft: Option<PathBuf>,
    /// Timeout for reaching the swarm and finding servers for all blocks, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    startup_timeout: Duration,
}

/// What [`OneModelArgs`] say.
pub struct OneModel {
    /// Folder, or model of the Hub.
    pub model: String,
    /// Peers of the swarm.
    pub initial_peers: Vec<String>,
    /// Prefix of the module uids; `None` = the model's own.
    pub dht_prefix: Option<String>,
    /// What this machine computes itself.
    pub local: LocalConfig,
    /// How the client's parts of the model come.
    pub fetch: FetchConfig,
    /// Folder of a small model that guesses.
    pub draft: Option<PathBuf>,
    /// Time to reach the swarm and to find servers for all blocks.
    pub startup_timeout: Duration,
}

impl OneModelArgs {
    /// Turns flags into settings; `command` is the one whose positional argument is `model`.
    ///
    /// # Errors
    /// What is wrong with a flag, or that no model was given.
    pub fn resolve(
        mut self,
        model: Option<String>,
        command: &str,
        env: Env<'_>,
    ) -> Result<OneModel, String> {
        let model = model_or_last(model, &mut [&mut self.initial_peers]).ok_or_else(|| {
            format!(
                "no model given: name a folder or a model of the Hub, as in sepal {command} MODEL"
            )
        })?;
        check_maddrs("--initial_peers", &self.initial_peers)?;
        Ok(OneModel {
            model,
            initial_peers: self.initial_peers,
            dht_prefix: self.dht_prefix,
            local: self.local.resolve()?,
            fetch: self.fetch.resolve(env)?,
            draft: self.draft,
            startup_timeout: self.startup_timeout,
        })
    }
}

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct LocalArgs {
    /// Type in which embeddings and head are computed: auto (as in the checkpoint), float32 or
    /// bfloat16
    #[arg(long, value_name = "DTYPE", default_value = "auto")]
    torch_dtype: String,
    /// How the head is stored: none (as in the checkpoint), int8 or nf4, which are smaller and faster and change
    /// the text a little
    #[arg(long, value_name = "TYPE", default_value = "none")]
    head_quant_type: String,
    /// Guess up to N next tokens from repetitions in the text, and compute them in one step; the text
    /// stays the same. 0 guesses none
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = guesses)]
    speculate: usize,
}

impl LocalArgs {
    /// Turns flags into settings.
    pub fn resolve(&self) -> Result<LocalConfig, String> {
        let head = self.head_quant_type.parse();
        Ok(LocalConfig {
            dtype: serve::dtype(&self.torch_dtype)?,
            head: head.map_err(|why| {
                format!("invalid --head_quant_type {}: {why}", self.head_quant_type)
            })?,
            speculate: self.speculate,
        })
    }
}

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct FetchArgs {
    /// Folder for downloads [env: SEPAL_CACHE] [default: ~/.cache/sepal]
    #[arg(long, value_name = "FOLDER")]
    cache_dir: Option<PathBuf>,
    #[command(flatten)]
    hub: HubArgs,
}

impl FetchArgs {
    /// Turns flags into settings.
    pub fn resolve(self, env: Env<'_>) -> Result<FetchConfig, String> {
        let cache_dir = self.cache_dir.unwrap_or_else(|| cache_dir(env));
        Ok(FetchConfig { cache_dir, hub: self.hub.resolve(env)? })
    }
}
