//! Flags of `sepal dht` beside those of the node.

use std::path::PathBuf;

use clap::Args;
use netd::dht_node::DhtNodeConfig;
use shared::config::LogConfig;

use super::Env;
use super::log::{DEFAULT_LOG, LogArgs};
use super::ports::PortArgs;
use super::serve;

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct DhtArgs {
    #[command(flatten)]
    node: DhtNodeConfig,
    #[command(flatten)]
    ports: PortArgs,
    /// File with settings: TOML, or lines name: value
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// No effect: peers are found through hivemind's DHT, not through IPFS
    #[arg(long, help_heading = serve::NO_EFFECT)]
    use_ipfs: bool,
    #[command(flatten)]
    log: LogArgs,
}

/// Settings of `sepal dht`, and how it logs.
///
/// # Errors
/// What is wrong with a flag.
pub fn resolve(args: DhtArgs, env: Env<'_>) -> Result<(DhtNodeConfig, LogConfig), String> {
    let DhtArgs { mut node, ports, log, .. } = args;
    ports.fill(&mut node.host_maddrs, &mut node.announce_maddrs)?;
    Ok((node, log.resolve(env, DEFAULT_LOG)))
}
