//! Flags of `serve` about peers: where to listen, whom to join, what to announce and when.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use shared::config::Compression;
use shared::config::values::{maddr, megabits, on_off, seconds};
use shared::public_swarm;

use crate::cli::ports::PortArgs;

#[derive(Debug, Args)]
#[command(rename_all = "snake_case", next_help_heading = "Network")]
pub struct NetworkArgs {
    /// Peers to join through [default: those of the public swarm]
    #[arg(long, num_args = 1.., value_name = "MULTIADDR", conflicts_with = "new_swarm", value_parser = maddr)]
    pub(super) initial_peers: Vec<String>,
    /// Start a new swarm
    #[arg(long)]
    pub(super) new_swarm: bool,
    #[command(flatten)]
    pub(super) ports: PortArgs,
    /// Addresses to listen on
    #[arg(long, num_args = 1.., value_name = "MULTIADDR", value_parser = maddr)]
    pub(super) host_maddrs: Vec<String>,
    /// Addresses to announce instead of those listened on
    #[arg(long, num_args = 1.., value_name = "MULTIADDR", value_parser = maddr)]
    pub(super) announce_maddrs: Vec<String>,
    /// Do not use relays of the swarm when peers cannot dial this server
    #[arg(long)]
    pub(super) no_auto_relay: bool,
    /// File of the private key, which keeps the PeerID stable; created if missing
    #[arg(long, value_name = "FILE")]
    pub(super) identity_path: Option<PathBuf>,
    /// Compression of answers and of requests to this server: NONE, MEANSTD_16BIT, FLOAT16,
    /// QUANTILE_8BIT, UNIFORM_8BIT or BLOCKWISE_8BIT
    #[arg(long, value_name = "NAME", default_value = "NONE")]
    pub(super) compression: Compression,
    /// Network rate in each direction in megabits per second [default: measured with other servers
    /// and kept for a week; before that 100, or the speed of the link if lower]
    #[arg(long, value_name = "MBPS", value_parser = megabits)]
    pub(super) network_mbps: Option<f64>,
    /// Maximum of what this server sends to all its peers together, in megabits per second. It also
    /// bounds the announced throughput, and the network is not measured [default: no limit]
    #[arg(long, value_name = "MBPS", value_parser = megabits)]
    pub(super) max_upload_mbps: Option<f64>,
    /// Maximum of what this server relays for peers that others cannot dial, all of them together, in
    /// megabits per second on average; what was not used in the last ten seconds may go at once [default: a
    /// quarter of the network rate]
    #[arg(long, value_name = "MBPS", value_parser = megabits)]
    pub(super) relay_mbps: Option<f64>,
    /// Measure the network with this service instead of servers of the swarm: a URL to download
    /// from, and a second one to upload to if it differs
    #[arg(long, num_args = 1..=2, value_name = "URL", conflicts_with = "network_mbps")]
    pub(super) network_test_url: Vec<String>,
    /// Monitor that must reach this server before it goes ONLINE [default: health.petals.dev in the
    /// public swarm, none elsewhere]
    #[arg(long, value_name = "URL", value_parser = url)]
    pub(super) reachability_monitor: Option<String>,
    /// Skip the check by a monitor
    #[arg(long)]
    pub(super) skip_reachability_check: bool,
    /// Do not ask the router to forward the port (UPnP)
    #[arg(long)]
    pub(super) no_upnp: bool,
    /// Whether peers may have this server dial addresses of private nets and of this machine: on or
    /// off [default: on, in the public swarm off]
    #[arg(long, value_name = "on|off", value_parser = on_off)]
    pub(super) dial_private_nets: Option<bool>,
    /// Timeout for listening and reaching a first peer, and for its answer, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub(super) daemon_startup_timeout: Duration,
    /// Time between two announcements, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds)]
    pub(super) update_period: Duration,
    /// Lifetime of an announcement, in seconds [default: twice the period, at least 3]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(super) expiration: Option<Duration>,
    /// Move to other blocks when the throughput of the swarm's weakest block is below this share of
    /// what a better placement allows; 0 disables moves
    #[arg(long, value_name = "QUALITY", default_value = "0.75", value_parser = quality)]
    pub(super) balance_quality: f64,
    /// Mean time between two evaluations of the placement, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub(super) mean_balance_check_period: Duration,
}

/// The monitor of the public swarm (`petals/constants.py`, `REACHABILITY_API_URL`).
const PUBLIC_MONITOR: &str = "https://health.petals.dev";

/// An address of a web service.
fn url(text: &str) -> Result<String, String> {
    let rest = text.strip_prefix("https://").or(text.strip_prefix("http://"));
    let is_one = rest.is_some_and(|rest| !rest.is_empty() && !rest.starts_with('/'));
    let clean = !text.contains(|c: char| c.is_whitespace() || c.is_control());
    match is_one && clean {
        true => Ok(text.to_owned()),
        false => Err("expected a URL such as https://example.org/test".to_owned()),
    }
}

/// What `--balance_quality` may be.
fn quality(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(quality) if quality.is_finite() && quality >= 0.0 => Ok(quality),
        _ => Err("expected a number of at least 0, such as 0.75".to_owned()),
    }
}

/// Where to listen, what to announce, and whom to join; checked.
#[derive(Debug)]
pub struct Addresses {
    /// Multiaddrs to listen on.
    pub host_maddrs: Vec<String>,
    /// Multiaddrs to announce in place of those.
    pub announce_maddrs: Vec<String>,
    /// Whom to join; nobody = a new swarm.
    pub initial_peers: Vec<String>,
}

impl NetworkArgs {
    /// `run_server.py`: `--port` and `--public_ip` are short for multiaddrs.
    pub fn addresses(&mut self) -> Result<Addresses, String> {
        let mut host_maddrs = std::mem::take(&mut self.host_maddrs);
        let mut announce_maddrs = std::mem::take(&mut self.announce_maddrs);
        self.ports.fill(&mut host_maddrs, &mut announce_maddrs)?;
        let initial_peers = match (self.new_swarm, std::mem::take(&mut self.initial_peers)) {
            (true, _) => Vec::new(),
            (false, peers) if peers.is_empty() => {
                public_swarm::INITIAL_PEERS.map(str::to_owned).to_vec()
            }
            (false, peers) => peers,
        };
        Ok(Addresses { host_maddrs, announce_maddrs, initial_peers })
    }

    /// Whom to ask whether this server can be reached: the public swarm's monitor if it joins that,
    /// and then and elsewhere whom the operator names (`server.py`,
    /// `should_validate_reachability`).
    pub fn monitor(&self, initial_peers: &[String]) -> Option<String> {
        let public =
            public_swarm::is_entered_through(initial_peers).then(|| PUBLIC_MONITOR.to_owned());
        let asked = self.reachability_monitor.clone().or(public);
        asked.filter(|_| !self.skip_reachability_check)
    }

    /// The service to measure the network with, download first.
    ///
    /// # Errors
    /// For what is no address.
    pub fn network_test(&self) -> Result<Option<(String, String)>, String> {
        let checked = |text: &String| {
            url(text).map_err(|why| format!("invalid --network_test_url {text:?}: {why}"))
        };
        let urls: Vec<String> =
            self.network_test_url.iter().map(checked).collect::<Result<_, _>>()?;
        Ok(match &urls[..] {
            [] => None,
            [one] => Some((one.clone(), one.clone())),
            [download, upload, ..] => Some((download.clone(), upload.clone())),
        })
    }

    /// How long an announcement holds (`petals/server/server.py`: twice the period, at least 3 s).
    pub fn expiration(&self) -> Duration {
        let twice = (2 * self.update_period).max(Duration::from_secs(3));
        self.expiration.unwrap_or(twice)
    }
}
