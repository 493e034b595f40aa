//! `sepal plan`: the arguments of `sepal serve`, since any of them may change what it would do.

use clap::Args;
use shared::config::{QuantType, ServeConfig};

use super::Env;
use super::log::QUIET_LOG;
use super::serve::{self, ServeArgs};

/// Settings of `sepal plan`.
#[derive(Clone, Debug)]
pub struct PlanOptions {
    /// What `sepal serve` would be given.
    pub config: ServeConfig,
    /// The formats to plan for.
    pub formats: Vec<QuantType>,
    /// Print JSON instead of a table.
    pub json: bool,
    /// Flags without effect, a sentence each.
    pub notes: Vec<String>,
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    serve: ServeArgs,
    /// Print JSON instead of a table; deploy/TOOLS.md describes its keys
    #[arg(long, help_heading = "Output")]
    json: bool,
}

/// Turns flags and environment into settings. All formats are planned for unless one is named.
pub fn resolve(
    args: PlanArgs,
    env: Env<'_>,
    notes: Vec<String>,
) -> Result<Box<PlanOptions>, String> {
    let config = serve::resolve(args.serve, env, QUIET_LOG)?;
    let formats = match config.prepare.quant_type.named() {
        Some(quant_type) => vec![quant_type],
        None => vec![QuantType::None, QuantType::Int8, QuantType::Nf4],
    };
    Ok(Box::new(PlanOptions { config, formats, json: args.json, notes }))
}
