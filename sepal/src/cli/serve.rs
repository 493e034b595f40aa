//! `sepal serve`: the flags of Petals' `run_server` (`petals/cli/run_server.py`) and our own. A
//! flag of `run_server` that tunes machinery that we do not have is accepted and noted.
//!
//! Most flags are fields of [`ServeConfig`]. Here are those that only together, or with the machine, decide a
//! setting.
//!
//! | module | flags about |
//! | --- | --- |
//! | this one | the model |
//! | [`devices`] | devices and their groups |
//! | [`network`] | blocks, peers and announcements |
//! | [`petals`] | what changes nothing here |

mod devices;
mod network;
mod petals;

use std::path::PathBuf;

use clap::Args;
use shared::config::{PrepareConfig, ServeConfig, Throughput};

use super::log::LogArgs;
use super::{Env, hub};
use devices::DeviceArgs;
use network::{NetworkArgs, SpanArgs};
pub use petals::{NO_EFFECT, notes};

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    span: SpanArgs,
    #[command(flatten)]
    devices: DeviceArgs,
    #[command(flatten)]
    serve: ServeConfig,
    #[command(flatten)]
    network: NetworkArgs,
    #[command(flatten)]
    log: LogArgs,
    #[command(flatten)]
    unused: petals::UnusedArgs,
}

/// What to serve.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
struct ModelArgs {
    /// Model folder in Hugging Face layout, or a repository of the Hub such as bigscience/bloom;
    /// required
    model: Option<String>,
    /// File with settings: TOML, or lines name: value [default: config.yml, if there is one]
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The same as MODEL
    #[arg(long, value_name = "MODEL", conflicts_with = "model")]
    converted_model_name_or_path: Option<String>,
}

/// Turns flags and environment into settings; `default_log` is what is logged unless they say.
pub fn resolve(args: ServeArgs, env: Env<'_>, default_log: &str) -> Result<ServeConfig, String> {
    resolve_for(args, env, default_log, None)
}

/// The same, with `model` if none was named.
pub fn resolve_for(
    args: ServeArgs,
    env: Env<'_>,
    default_log: &str,
    model: Option<String>,
) -> Result<ServeConfig, String> {
    let ServeArgs { model: named, span, devices, mut serve, network, log, unused: _ } = args;
    let named = named.model.or(named.converted_model_name_or_path).or(model);
    serve.prepare.model = named.ok_or(
        "no model given: name a repository of the Hub or a folder, as in sepal serve MODEL",
    )?;
    devices.fill(&mut serve)?;
    hub::complete(&mut serve.prepare.hub, env)?;
    check_adapters(&serve.prepare)?;
    serve.netd.span = span.choice();
    network.fill(&mut serve.netd)?;
    // The one folder of the cache that netd and workers write to.
    let rates_dir = serve.prepare.cache_dir.join("rates");
    serve.worker.rates_dir = Some(rates_dir.clone());
    serve.netd.rates_dir = Some(rates_dir);
    serve.worker.measure_anew =
        matches!(serve.netd.throughput, Throughput::Anew | Throughput::DryRun);
    serve.log = log.resolve(env, default_log);
    Ok(serve)
}

/// Most adapters of one instance: their names travel in every record of the swarm.
const MAX_ADAPTERS: usize = 64;

fn check_adapters(prepare: &PrepareConfig) -> Result<(), String> {
    let names = &prepare.adapters;
    if names.len() > MAX_ADAPTERS {
        return Err(format!(
            "--adapters lists {} adapters: expected at most {MAX_ADAPTERS}",
            names.len()
        ));
    }
    match names.iter().enumerate().find(|(index, name)| names[..*index].contains(name)) {
        Some((_, name)) => Err(format!("invalid --adapters {name:?}: listed twice")),
        None => Ok(()),
    }
}
