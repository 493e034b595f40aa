//! Flags of what a client computes itself: `sepal generate`, `gateway` and `chat`.

use std::path::PathBuf;

use clap::Args;
use shared::config::{FetchConfig, LocalConfig};

use super::Env;
use super::serve::{self, HubArgs, cache_dir};
use super::values::guesses;

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
        let cache_dir = self.cache_dir.map_or_else(|| cache_dir(env), Ok)?;
        Ok(FetchConfig { cache_dir, hub: self.hub.resolve(env)? })
    }
}
