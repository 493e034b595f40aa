//! `sepal dht`: a node that others join through. It serves the DHT and nothing else, and runs
//! without a supervisor.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};
use p2p::{Keypair, P2pConfig, P2pError, Traversal, identity};
use shared::config::values::{maddr, megabits, on_off, seconds};
use shared::error_chain::with_causes;
use shared::exit::ExitReason;
use swarm::public_swarm;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::fatal_error::Fatal;
use crate::join::{self, Joined, NodeSettings, addresses};
use crate::run::reactor;

/// Settings of `sepal dht`: the flags of Petals' `run_dht`, and ours.
#[derive(Clone, Debug, PartialEq, Args)]
#[command(rename_all = "snake_case")]
pub struct DhtNodeConfig {
    /// Peers to join through [default: none, start a new swarm]
    #[arg(long, num_args = 0.., value_name = "MULTIADDR", value_parser = maddr)]
    pub initial_peers: Vec<String>,
    /// Addresses to listen on
    #[arg(long, num_args = 0.., value_name = "MULTIADDR", value_parser = maddr)]
    pub host_maddrs: Vec<String>,
    /// Addresses to announce instead of those listened on
    #[arg(long, num_args = 0.., value_name = "MULTIADDR", value_parser = maddr)]
    pub announce_maddrs: Vec<String>,
    /// File of the private key, which keeps the PeerID stable; created if missing
    #[arg(long, value_name = "FILE")]
    pub identity_path: Option<PathBuf>,
    /// Disable relaying for others and hole punching
    #[arg(id = "no_relay", long = "no_relay", action = ArgAction::SetFalse)]
    pub use_relay: bool,
    /// Maximum of what this node relays for peers that others cannot dial, all of them together, in
    /// megabits per second on average; what was not used in the last ten seconds may go at once
    #[arg(id = "relay_mbps", long = "relay_mbps", value_name = "MBPS", default_value = "100", value_parser = megabits)]
    pub relay_bits_per_s: f64,
    /// Use relays when peers cannot dial this node
    #[arg(long)]
    pub use_auto_relay: bool,
    /// Do not ask the router to forward the port (UPnP)
    #[arg(id = "no_upnp", long = "no_upnp", action = ArgAction::SetFalse)]
    pub use_upnp: bool,
    /// Whether peers may have this node dial addresses of private nets and of this machine: on or
    /// off [default: on, in the public swarm off]
    #[arg(id = "dial_private_nets", long = "dial_private_nets", value_name = "on|off", value_parser = on_off)]
    pub dials_private_nets: Option<bool>,
    /// Time between two status lines, in seconds
    // And of the look-up that evicts dead peers.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub refresh_period: Duration,
    /// Timeout for listening and reaching a first peer, and for its answer, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub startup_timeout: Duration,
}

impl DhtNodeConfig {
    /// A node on a free port of the loopback device, with an identity of its own.
    pub fn on_loopback(initial_peers: Vec<String>) -> DhtNodeConfig {
        DhtNodeConfig {
            host_maddrs: vec!["/ip4/127.0.0.1/tcp/0".into()],
            announce_maddrs: Vec::new(),
            initial_peers,
            identity_path: None,
            use_relay: true,
            relay_bits_per_s: 100e6,
            use_auto_relay: false,
            use_upnp: false,
            dials_private_nets: Some(true),
            refresh_period: Duration::from_secs(30),
            startup_timeout: Duration::from_secs(60),
        }
    }

    /// Strangers of the public swarm have no business on private nets.
    fn dials_private_nets(&self) -> bool {
        let is_public = || public_swarm::is_entered_through(&self.initial_peers);
        self.dials_private_nets.unwrap_or_else(|| !is_public())
    }
}

/// Runs until Ctrl-C or SIGTERM. `ready` is given the full addresses that newcomers pass as
/// `--initial_peers`, once the node is part of the swarm; it is the caller who prints.
pub fn run(config: DhtNodeConfig, ready: fn(&[String])) -> ExitReason {
    let runtime = match reactor() {
        Ok(runtime) => runtime,
        Err(error) => {
            error!(%error, "cannot start the reactor");
            return ExitReason::Failed;
        }
    };
    let outcome = runtime.block_on(serve(&config, ready));
    runtime.shutdown_timeout(Duration::from_secs(1));
    match outcome {
        Ok(()) => ExitReason::Clean,
        Err(Fatal { reason, message }) => {
            error!(%reason, "{message}");
            reason
        }
    }
}

async fn serve(config: &DhtNodeConfig, ready: fn(&[String])) -> Result<(), Fatal> {
    let listen_for = |kind, name: &str| {
        signal(kind).map_err(|error| Fatal::failed(format!("cannot listen for {name}: {error}")))
    };
    let mut interrupt = listen_for(SignalKind::interrupt(), "SIGINT")?;
    let mut terminate = listen_for(SignalKind::terminate(), "SIGTERM")?;
    let ended = async {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    };
    let node = async {
        let joined = start(config).await?;
        ready(&joined.addrs);
        heartbeat(&joined, config.refresh_period).await
    };
    tokio::select! {
        outcome = node => outcome,
        () = ended => {
            info!("received a signal, stopping");
            Ok(())
        }
    }
}

/// Starts the node and joins.
///
/// # Errors
/// [`Fatal`] with a sentence for the operator.
pub async fn start(config: &DhtNodeConfig) -> Result<Joined, Fatal> {
    let keypair = match &config.identity_path {
        Some(path) => identity::load_or_create(path)
            .map_err(|error| Fatal::bad_config(with_causes(&error)))?,
        None => Keypair::generate_ed25519(),
    };
    let settings = NodeSettings {
        keypair,
        listen: addresses("host_maddrs", &config.host_maddrs)?,
        announce: addresses("announce_maddrs", &config.announce_maddrs)?,
        initial_peers: addresses("initial_peers", &config.initial_peers)?,
        traversal: Traversal {
            use_relay: config.use_relay,
            relay_service: config.use_relay,
            autonat: true,
            auto_relay: config.use_relay && config.use_auto_relay,
            upnp: config.use_upnp,
            nearest: join::nearest(config.dials_private_nets()),
        },
        check_reachability: false,
        startup_timeout: config.startup_timeout,
        max_upload_bytes_per_s: None,
        request_memory: P2pConfig::REQUEST_MEMORY,
    };
    let started = join::start(&settings, Vec::new()).await;
    let (p2p, inbound) = started.map_err(|error| {
        let reason = match error {
            P2pError::PortInUse { .. } => ExitReason::Busy,
            P2pError::Stopped | P2pError::Transport(_) => ExitReason::Failed,
            _ => ExitReason::BadConfig,
        };
        Fatal { reason, message: error.to_string() }
    })?;
    p2p.relay_at((config.relay_bits_per_s / 8.0) as u64);
    let (_, nothing_served) = watch::channel(None);
    let joined = join::enter(p2p, inbound, &settings, nothing_served).await;
    joined.map_err(|error| Fatal::bad_config(error.to_string()))
}

/// Looks at the swarm again and again, which keeps the routing table fresh.
async fn heartbeat(joined: &Joined, period: Duration) -> Result<(), Fatal> {
    let mut beat = tokio::time::interval(period.max(Duration::from_millis(100)));
    loop {
        beat.tick().await;
        match joined.dht.random_lookup().await {
            Ok(known) => info!(known, "refreshed the routing table"),
            Err(error) => warn!(%error, "cannot refresh the routing table"),
        }
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_second_node_joins_through_the_addresses_of_the_first() {
        let first = start(&DhtNodeConfig::on_loopback(Vec::new())).await.unwrap();
        assert!(first.addrs[0].contains("/p2p/") && first.port() > 0, "{:?}", first.addrs);
        let second = start(&DhtNodeConfig::on_loopback(first.addrs.clone())).await.unwrap();
        assert_eq!(second.dht.random_lookup().await.unwrap(), 1);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_port_in_use_and_unreachable_peers_are_named() {
        let first = start(&DhtNodeConfig::on_loopback(Vec::new())).await.unwrap();
        let port = first.port();
        let taken = DhtNodeConfig {
            host_maddrs: vec![format!("/ip4/127.0.0.1/tcp/{port}")],
            ..DhtNodeConfig::on_loopback(Vec::new())
        };
        let fatal = start(&taken).await.unwrap_err();
        assert_eq!(fatal.reason, ExitReason::Busy);
        assert!(fatal.message.contains(&port.to_string()), "{}", fatal.message);

        let nobody =
            "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp";
        let fatal = start(&DhtNodeConfig::on_loopback(vec![nobody.into()])).await.unwrap_err();
        assert_eq!(fatal.reason, ExitReason::BadConfig);
        assert!(fatal.message.contains("127.0.0.1/tcp/9"), "{}", fatal.message);
    }
}
