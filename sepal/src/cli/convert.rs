//! `sepal convert`: a model in a quantized format, as a folder.

use std::path::PathBuf;

use clap::Args;
use shared::block::Span;
use shared::config::{ConvertConfig, LogConfig, PrepareConfig, QuantType};

use super::Env;
use super::log::{LogArgs, QUIET_LOG};
use super::serve::{self, HubArgs, cache_dir};

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ConvertArgs {
    /// Model folder in Hugging Face layout, or a repository of the Hub such as bigscience/bloom
    model: String,
    /// How matrices are stored: int8 or nf4
    #[arg(long, value_name = "TYPE")]
    quant_type: String,
    /// Folder to make; it must not exist yet, or be empty
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Convert only these blocks [default: all]
    #[arg(long, value_name = "START:END")]
    blocks: Option<Span>,
    /// Type of hidden states and unquantized weights: auto, float32, bfloat16 or float16; auto is
    /// the type of the checkpoint, bfloat16 if that is float32
    #[arg(long, value_name = "TYPE", default_value = "auto")]
    torch_dtype: String,
    /// Folder for downloads [env: SEPAL_CACHE, PETALS_CACHE] [default: ~/.cache/sepal]
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    #[command(flatten)]
    hub: HubArgs,
    #[command(flatten)]
    log: LogArgs,
}

/// Turns flags and environment into settings.
pub fn resolve(args: ConvertArgs, env: Env<'_>) -> Result<(ConvertConfig, LogConfig), String> {
    let name = &args.quant_type;
    let refused = || format!("invalid --quant_type {name}: expected int8 or nf4");
    let quant_type: QuantType = name.parse().map_err(|_| refused())?;
    if quant_type == QuantType::None {
        return Err(refused());
    }
    let prepare = PrepareConfig {
        model: args.model,
        dtype: serve::dtype(&args.torch_dtype)?,
        quant_type,
        is_quant_named: true,
        adapters: Vec::new(),
        cache_dir: args.cache_dir.unwrap_or_else(|| cache_dir(env)),
        hub: args.hub.resolve(env)?,
    };
    let config = ConvertConfig { prepare, blocks: args.blocks, out: args.out };
    Ok((config, args.log.resolve(env, QUIET_LOG)))
}
