//! Flags of `sepal dht`: those of Petals' `run_dht`, and ours.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use shared::config::{DhtNodeConfig, LogConfig};
use shared::public_swarm;

use super::Env;
use super::log::{DEFAULT_LOG, LogArgs};
use super::serve;
use super::values::{bits_per_s, check_maddrs, on_off, seconds};

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct DhtArgs {
    /// Peers to join through [default: none, start a new swarm]
    #[arg(long, num_args = 0.., value_name = "MULTIADDR")]
    initial_peers: Vec<String>,
    /// Listen on this port on all addresses [default: a free port]
    #[arg(long, value_name = "PORT", conflicts_with = "host_maddrs")]
    port: Option<u16>,
    /// Announce only this address; requires --port
    #[arg(long, value_name = "IPV4", requires = "port", conflicts_with = "announce_maddrs")]
    public_ip: Option<std::net::Ipv4Addr>,
    /// Addresses to listen on
    #[arg(long, num_args = 0.., value_name = "MULTIADDR")]
    host_maddrs: Vec<String>,
    /// Addresses to announce instead of those listened on
    #[arg(long, num_args = 0.., value_name = "MULTIADDR")]
    announce_maddrs: Vec<String>,
    /// File of the private key, which keeps the PeerID stable; created if missing
    #[arg(long, value_name = "FILE")]
    identity_path: Option<PathBuf>,
    /// File with settings: TOML, or lines name: value
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Disable relaying for others and hole punching
    #[arg(long)]
    no_relay: bool,
    /// Maximum of what this node relays for peers that others cannot dial, all of them together, in
    /// megabits per second on average; what was not used in the last ten seconds may go at once
    #[arg(long, value_name = "MBPS", default_value_t = 100.0)]
    relay_mbps: f64,
    /// Use relays when peers cannot dial this node
    #[arg(long)]
    use_auto_relay: bool,
    /// Do not ask the router to forward the port (UPnP)
    #[arg(long)]
    no_upnp: bool,
    /// Whether peers may have this node dial addresses of private nets and of this machine: on or
    /// off [default: on, in the public swarm off]
    #[arg(long, value_name = "on|off", value_parser = on_off)]
    dial_private_nets: Option<bool>,
    /// No effect: peers are found through hivemind's DHT, not through IPFS
    #[arg(long, help_heading = serve::NO_EFFECT)]
    use_ipfs: bool,
    /// Time between two status lines, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    refresh_period: Duration,
    /// Timeout for listening and reaching a first peer, and for its answer, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    startup_timeout: Duration,
    #[command(flatten)]
    log: LogArgs,
}

/// Settings of `sepal dht`, and how it logs.
///
/// # Errors
/// What is wrong with a flag.
pub fn resolve(args: DhtArgs, env: Env<'_>) -> Result<(DhtNodeConfig, LogConfig), String> {
    check_maddrs("--initial_peers", &args.initial_peers)?;
    let (host_maddrs, announce_maddrs) =
        serve::addresses(args.port, args.public_ip, args.host_maddrs, args.announce_maddrs)?;
    let is_public = public_swarm::is_entered_through(&args.initial_peers);
    let config = DhtNodeConfig {
        initial_peers: args.initial_peers,
        host_maddrs,
        announce_maddrs,
        identity_path: args.identity_path,
        use_relay: !args.no_relay,
        use_auto_relay: args.use_auto_relay,
        relay_bits_per_s: bits_per_s("--relay_mbps", args.relay_mbps)?,
        use_upnp: !args.no_upnp,
        dials_private_nets: args.dial_private_nets.unwrap_or(!is_public),
        refresh_period: args.refresh_period,
        startup_timeout: args.startup_timeout,
    };
    Ok((config, args.log.resolve(env, DEFAULT_LOG)))
}
