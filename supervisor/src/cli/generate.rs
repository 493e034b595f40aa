//! Flags of `sepal generate`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use shared::config::{FetchConfig, GenerateConfig, LogConfig, SamplingConfig};

use super::Env;
use super::local::{FetchArgs, LocalArgs};
use super::log::{LogArgs, QUIET_LOG};
use super::values::{check_maddrs, model_or_last, seconds, token_bias};

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct GenerateArgs {
    /// Model folder in Hugging Face layout, with tokenizer.json, embeddings and head, or a model of the Hub, of
    /// which just these are downloaded; required
    model: Option<String>,
    /// Text to continue
    #[arg(long, short)]
    prompt: String,
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
    /// Maximum number of tokens to generate
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_new_tokens: u32,
    /// Sample tokens at this temperature [default: greedy decoding]
    #[arg(long, value_name = "T")]
    temperature: Option<f32>,
    /// Sample from the N most probable tokens
    #[arg(long, value_name = "N", requires = "temperature")]
    top_k: Option<usize>,
    /// Sample from the most probable tokens whose probabilities sum to P
    #[arg(long, value_name = "P", requires = "temperature")]
    top_p: Option<f32>,
    /// Sample from tokens at least P times as probable as the most probable one
    #[arg(long, value_name = "P", requires = "temperature")]
    min_p: Option<f32>,
    /// Seed of the sampling; the same seed gives the same text
    #[arg(long, value_name = "N", requires = "temperature")]
    seed: Option<u64>,
    /// Divide the logits of tokens of the prompt and of the text by P; 1 does nothing
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    repetition_penalty: f32,
    /// Subtract P from the logit of a token for each time that it was generated, from -2 to 2
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Subtract P from the logit of a token that was generated, from -2 to 2
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Add a bias from -100 to 100 to the logit of a token, by its number
    #[arg(long, value_name = "TOKEN=BIAS", value_parser = token_bias)]
    logit_bias: Vec<(u32, f32)>,
    /// End the text before this one; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    /// Print speed and step times at the end
    #[arg(long)]
    stats: bool,
    /// Timeout for reaching the swarm and finding servers for all blocks, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    startup_timeout: Duration,
    #[command(flatten)]
    log: LogArgs,
}

/// What is to be generated, how the client's parts of the model come, and how it logs.
///
/// # Errors
/// What is wrong with a flag.
pub fn resolve(
    mut args: GenerateArgs,
    env: Env<'_>,
) -> Result<(GenerateConfig, FetchConfig, LogConfig), String> {
    let model = model_or_last(args.model, &mut [&mut args.initial_peers])
        .ok_or("no model given: name a folder or a model of the Hub, as in sepal generate MODEL")?;
    check_maddrs("--initial_peers", &args.initial_peers)?;
    let fetch = args.fetch.resolve(env)?;
    let config = GenerateConfig {
        model: model.into(),
        dht_prefix: args.dht_prefix,
        initial_peers: args.initial_peers,
        prompt: args.prompt,
        local: args.local.resolve()?,
        draft: args.draft,
        max_new_tokens: args.max_new_tokens,
        sampling: SamplingConfig {
            temperature: args.temperature,
            top_k: args.top_k,
            top_p: args.top_p,
            min_p: args.min_p,
            repetition_penalty: args.repetition_penalty,
            frequency_penalty: args.frequency_penalty,
            presence_penalty: args.presence_penalty,
            logit_bias: args.logit_bias,
            seed: args.seed,
        },
        stop: args.stop,
        stats: args.stats,
        startup_timeout: args.startup_timeout,
    };
    Ok((config, fetch, args.log.resolve(env, QUIET_LOG)))
}
