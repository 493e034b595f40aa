//! Flags of `sepal generate`.

use clap::Args;
use shared::config::{FetchConfig, GenerateConfig, LogConfig, SamplingConfig};

use super::Env;
use super::local::OneModelArgs;
use super::log::{LogArgs, QUIET_LOG};
use super::values::token_bias;

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct GenerateArgs {
    /// Model folder in Hugging Face layout, with tokenizer.json, embeddings and head, or a model of the Hub, of
    /// which just these are downloaded; required
    model: Option<String>,
    /// Text to continue
    #[arg(long, short)]
    prompt: String,
    #[command(flatten)]
    of: OneModelArgs,
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
    #[command(flatten)]
    log: LogArgs,
}

/// What is to be generated, how the client's parts of the model come, and how it logs.
///
/// # Errors
/// What is wrong with a flag.
pub fn resolve(
    args: GenerateArgs,
    env: Env<'_>,
) -> Result<(GenerateConfig, FetchConfig, LogConfig), String> {
    let of = args.of.resolve(args.model, "generate", env)?;
    let config = GenerateConfig {
        model: of.model.into(),
        dht_prefix: of.dht_prefix,
        initial_peers: of.initial_peers,
        prompt: args.prompt,
        local: of.local,
        draft: of.draft,
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
        startup_timeout: of.startup_timeout,
    };
    Ok((config, of.fetch, args.log.resolve(env, QUIET_LOG)))
}
