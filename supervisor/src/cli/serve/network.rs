//! Flags of `serve` about peers: where to listen, whom to join, what to announce and when.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use shared::config::Compression;

use crate::cli::values::{check_maddrs, seconds};

/// Bootstrap peers of the public swarm (`petals/constants.py`, `PUBLIC_INITIAL_PEERS`).
const PUBLIC_INITIAL_PEERS: [&str; 6] = [
    "/dns/bootstrap1.petals.dev/tcp/31337/p2p/QmedTaZXmULqwspJXz44SsPZyTNKxhnnFvYRajfH7MGhCY",
    "/dns/bootstrap2.petals.dev/tcp/31338/p2p/QmQGTqmM7NKjV6ggU1ZCap8zWiyKR89RViDXiqehSiCpY5",
    "/dns6/bootstrap1.petals.dev/tcp/31337/p2p/QmedTaZXmULqwspJXz44SsPZyTNKxhnnFvYRajfH7MGhCY",
    "/dns6/bootstrap2.petals.dev/tcp/31338/p2p/QmQGTqmM7NKjV6ggU1ZCap8zWiyKR89RViDXiqehSiCpY5",
    "/ip4/159.89.214.152/tcp/31337/p2p/QmedTaZXmULqwspJXz44SsPZyTNKxhnnFvYRajfH7MGhCY",
    "/ip4/159.203.156.48/tcp/31338/p2p/QmQGTqmM7NKjV6ggU1ZCap8zWiyKR89RViDXiqehSiCpY5",
];

#[derive(Debug, Args)]
#[command(rename_all = "snake_case", next_help_heading = "Network")]
pub struct NetworkArgs {
    /// Peers to join through [default: those of the public swarm]
    #[arg(long, num_args = 1.., value_name = "MULTIADDR", conflicts_with = "new_swarm")]
    pub(super) initial_peers: Vec<String>,
    /// Begin a new swarm
    #[arg(long)]
    pub(super) new_swarm: bool,
    /// Listen on this port, on all addresses [default: 0, a free one]
    #[arg(long, value_name = "PORT", conflicts_with = "host_maddrs")]
    pub(super) port: Option<u16>,
    /// Announce this address only; needs --port
    #[arg(
        long,
        value_name = "IPV4",
        requires = "port",
        conflicts_with = "announce_maddrs"
    )]
    pub(super) public_ip: Option<std::net::Ipv4Addr>,
    /// Where to listen
    #[arg(long, num_args = 1.., value_name = "MULTIADDR")]
    pub(super) host_maddrs: Vec<String>,
    /// What to announce in place of the addresses listened on
    #[arg(long, num_args = 1.., value_name = "MULTIADDR")]
    pub(super) announce_maddrs: Vec<String>,
    /// Do not have this server reached through relays of the swarm when peers cannot dial it
    #[arg(long)]
    pub(super) no_auto_relay: bool,
    /// File of the private key, made if missing; it makes the PeerID stable
    #[arg(long, value_name = "FILE")]
    pub(super) identity_path: Option<PathBuf>,
    /// How answers are compressed, and requests to this server: NONE, MEANSTD_16BIT, FLOAT16, QUANTILE_8BIT, UNIFORM_8BIT or
    /// BLOCKWISE_8BIT
    #[arg(long, value_name = "NAME", default_value = "NONE")]
    pub(super) compression: Compression,
    /// Megabits per second that the network carries each way; Petals assumes 100 where it cannot measure
    #[arg(long, value_name = "MBPS", default_value = "100")]
    pub(super) network_mbps: f64,
    /// Seconds to start listening and to reach a first peer
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub(super) daemon_startup_timeout: Duration,
    /// Seconds between two announcements
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds)]
    pub(super) update_period: Duration,
    /// Seconds for which an announcement holds [default: twice the period, at least 3]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub(super) expiration: Option<Duration>,
    /// Move to other blocks when the weakest block of the swarm has less than this share of what it could have; 0 = never
    #[arg(long, value_name = "QUALITY", default_value = "0.75", value_parser = quality)]
    pub(super) balance_quality: f64,
    /// Mean seconds between two looks at the balance of the swarm
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub(super) mean_balance_check_period: Duration,
}

/// What `--balance_quality` may be.
fn quality(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(quality) if quality.is_finite() && quality >= 0.0 => Ok(quality),
        _ => Err("give a number of at least 0, such as 0.75".to_owned()),
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
        let announce_maddrs = std::mem::take(&mut self.announce_maddrs);
        let (host_maddrs, announce_maddrs) = addresses(
            self.port,
            self.public_ip,
            std::mem::take(&mut self.host_maddrs),
            announce_maddrs,
        )?;
        let initial_peers = match (self.new_swarm, std::mem::take(&mut self.initial_peers)) {
            (true, _) => Vec::new(),
            (false, peers) if peers.is_empty() => PUBLIC_INITIAL_PEERS.map(str::to_owned).to_vec(),
            (false, peers) => peers,
        };
        check_maddrs("--initial_peers", &initial_peers)?;
        Ok(Addresses {
            host_maddrs,
            announce_maddrs,
            initial_peers,
        })
    }

    /// How long an announcement holds (`petals/server/server.py`: twice the period, at least 3 s).
    pub fn expiration(&self) -> Duration {
        let twice = (2 * self.update_period).max(Duration::from_secs(3));
        self.expiration.unwrap_or(twice)
    }
}

/// Where to listen and what to announce (`run_server.py`: `--port` and `--public_ip` are short for multiaddrs).
fn addresses(
    port: Option<u16>,
    public_ip: Option<std::net::Ipv4Addr>,
    host_maddrs: Vec<String>,
    announce_maddrs: Vec<String>,
) -> Result<(Vec<String>, Vec<String>), String> {
    check_maddrs("--host_maddrs", &host_maddrs)?;
    check_maddrs("--announce_maddrs", &announce_maddrs)?;
    let port = port.unwrap_or(0);
    let hosts = match host_maddrs {
        hosts if hosts.is_empty() => vec![
            format!("/ip4/0.0.0.0/tcp/{port}"),
            format!("/ip6/::/tcp/{port}"),
        ],
        hosts => hosts,
    };
    match public_ip {
        Some(ip) if port == 0 => Err(format!(
            "--public_ip {ip} needs the port that leads here; give --port"
        )),
        Some(ip) => Ok((hosts, vec![format!("/ip4/{ip}/tcp/{port}")])),
        None => Ok((hosts, announce_maddrs)),
    }
}
