//! Settings that several commands of a client share: their flags.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use shared::config::QuantType;
use shared::config::values::{maddr, seconds};
use shared::dtype::{DType, dtype_or_auto};

/// Most tokens that can be guessed for one step: each costs the servers a token.
const MAX_GUESSES: usize = 64;

/// Settings of a client of one model.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(rename_all = "snake_case")]
pub struct ClientConfig {
    /// Peers of the swarm
    #[arg(long, num_args = 1.., required = true, value_name = "MULTIADDR", value_parser = maddr)]
    pub initial_peers: Vec<String>,
    /// Prefix under which the servers announce the model
    #[arg(long, value_name = "PREFIX")]
    pub dht_prefix: Option<String>,
    #[command(flatten)]
    pub local: LocalConfig,
    /// Folder of a small model of the same family that guesses next tokens on this machine
    #[arg(long, value_name = "FOLDER")]
    pub draft: Option<PathBuf>,
    /// Timeout for reaching the swarm and finding servers for all blocks, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub startup_timeout: Duration,
}

/// What a client computes itself, and guesses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Args)]
#[command(rename_all = "snake_case")]
pub struct LocalConfig {
    /// Type in which embeddings and head are computed: auto (as in the checkpoint), float32 or
    /// bfloat16
    // The path has clap take `auto` for a value.
    #[arg(id = "torch_dtype", long = "torch_dtype", value_name = "DTYPE", default_value = "auto", value_parser = dtype_or_auto)]
    pub dtype: std::option::Option<DType>,
    /// How the head is stored: none (as in the checkpoint), int8 or nf4, which are smaller and faster and change
    /// the text a little
    #[arg(
        id = "head_quant_type",
        long = "head_quant_type",
        value_name = "TYPE",
        default_value = "none"
    )]
    pub head: QuantType,
    /// Guess up to N next tokens from repetitions in the text, and compute them in one step; the text
    /// stays the same. 0 guesses none
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = guesses)]
    pub speculate: usize,
}

/// How tokens are chosen. The default is greedy.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(rename_all = "snake_case")]
pub struct SamplingConfig {
    /// Sample tokens at this temperature [default: greedy decoding]
    // `None` ignores top-k, top-p, min-p and the seed.
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Sample from the N most probable tokens
    #[arg(long, value_name = "N", requires = "temperature")]
    pub top_k: Option<usize>,
    /// Sample from the most probable tokens whose probabilities sum to P
    #[arg(long, value_name = "P", requires = "temperature")]
    pub top_p: Option<f32>,
    /// Sample from tokens at least P times as probable as the most probable one
    #[arg(long, value_name = "P", requires = "temperature")]
    pub min_p: Option<f32>,
    /// Divide the logits of tokens of the prompt and of the text by P; 1 does nothing
    // Negative logits are multiplied.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub repetition_penalty: f32,
    /// Subtract P from the logit of a token for each time that it was generated, from -2 to 2
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Subtract P from the logit of a token that was generated, from -2 to 2
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// Add a bias from -100 to 100 to the logit of a token, by its number
    #[arg(long, value_name = "TOKEN=BIAS", value_parser = token_bias)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the sampling; the same seed gives the same text
    // `None` = from the system.
    #[arg(long, value_name = "N", requires = "temperature")]
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

/// The bias of a token: `TOKEN=BIAS`.
fn token_bias(text: &str) -> Result<(u32, f32), String> {
    let parsed = text.split_once('=').and_then(|(token, bias)| {
        Some((token.parse().ok()?, bias.parse().ok().filter(|bias: &f32| bias.is_finite())?))
    });
    parsed.ok_or_else(|| "expected the number of a token and a bias, as in 1234=-100".to_owned())
}

/// Most tokens that are guessed for one step.
fn guesses(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| *number <= MAX_GUESSES);
    number.ok_or_else(|| format!("expected a number from 0 to {MAX_GUESSES}"))
}
