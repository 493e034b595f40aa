//! Flags of `serve` that together, or with the swarm, decide settings of netd.

use std::time::Duration;

use clap::Args;
use shared::block::Span;
use shared::config::values::{on_off, seconds, share, size_bytes};
use shared::config::{NetdConfig, SpanChoice, Throughput};
use swarm::public_swarm;

use crate::cli::ports::PortArgs;

/// Most of the KV cache for one client of the public swarm: its clients are strangers to each other.
const PUBLIC_KV_SHARE: f64 = 0.5;

/// The monitor of the public swarm (`petals/constants.py`, `REACHABILITY_API_URL`).
const PUBLIC_MONITOR: &str = "https://health.petals.dev";

/// Which blocks.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct SpanArgs {
    /// Serve this many consecutive blocks, chosen by what the swarm lacks [default: as many as fit
    /// in memory]
    #[arg(long, value_name = "N", conflicts_with = "block_indices", value_parser = clap::value_parser!(u32).range(1..))]
    num_blocks: Option<u32>,
    /// Serve exactly these blocks and never move
    #[arg(long, value_name = "START:END")]
    block_indices: Option<Span>,
}

impl SpanArgs {
    /// What they say.
    pub fn choice(&self) -> SpanChoice {
        match (self.block_indices, self.num_blocks) {
            (Some(span), _) => SpanChoice::Fixed(span),
            (None, Some(count)) => SpanChoice::Count(count),
            (None, None) => SpanChoice::All,
        }
    }
}

/// Flags whose settings depend on others.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case", next_help_heading = "Network")]
pub struct NetworkArgs {
    /// Start a new swarm
    #[arg(long)]
    new_swarm: bool,
    #[command(flatten)]
    ports: PortArgs,
    /// Measure the network with this service instead of servers of the swarm: a URL to download
    /// from, and a second one to upload to if it differs
    #[arg(long, num_args = 1..=2, value_name = "URL", conflicts_with = "network_mbps", value_parser = url)]
    network_test_url: Vec<String>,
    /// Monitor that must reach this server before it goes ONLINE [default: health.petals.dev in the
    /// public swarm, none elsewhere]
    #[arg(long, value_name = "URL", value_parser = url)]
    reachability_monitor: Option<String>,
    /// Skip the check by a monitor
    #[arg(long)]
    skip_reachability_check: bool,
    /// Whether peers may have this server dial addresses of private nets and of this machine: on or
    /// off [default: on, in the public swarm off]
    #[arg(long, value_name = "on|off", value_parser = on_off)]
    dial_private_nets: Option<bool>,
    /// Lifetime of an announcement, in seconds [default: twice the period, at least 3]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    expiration: Option<Duration>,
    /// Maximum share of the KV cache for all sessions of one client, above 0 and at most 1. While
    /// other clients wait, a client above its fair share gets no more [default: 1, in the public
    /// swarm 0.5]
    #[arg(long, value_name = "SHARE", value_parser = share, help_heading = "Limits")]
    max_kv_share: Option<f64>,
    /// Memory for requests of all peers together; one IP net may hold half, one peer a quarter, and
    /// more wait unread. The largest request always fits [default: an eighth of the free memory, at
    /// least 256MiB, at most 8GiB]
    #[arg(long, value_name = "SIZE", value_parser = size_bytes, help_heading = "Limits")]
    request_memory: Option<u64>,
}

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

impl NetworkArgs {
    /// Fills in what these flags and the swarm decide.
    ///
    /// # Errors
    /// A sentence, for flags that do not go together.
    pub fn fill(self, netd: &mut NetdConfig) -> Result<(), String> {
        self.ports.fill(&mut netd.host_maddrs, &mut netd.announce_maddrs)?;
        let asked_for_peers = !netd.initial_peers.is_empty();
        if !self.new_swarm && !asked_for_peers {
            netd.initial_peers = public_swarm::INITIAL_PEERS.map(str::to_owned).to_vec();
        }
        let is_public = public_swarm::is_entered_through(&netd.initial_peers);
        // The public swarm's monitor if it joins that, and then and elsewhere whom the operator names
        // (`server.py`, `should_validate_reachability`).
        let public = is_public.then(|| PUBLIC_MONITOR.to_owned());
        netd.monitor =
            self.reachability_monitor.or(public).filter(|_| !self.skip_reachability_check);
        // Strangers of the public swarm have no business on private nets.
        netd.dials_private_nets = self.dial_private_nets.unwrap_or(!is_public);
        netd.max_kv_share =
            self.max_kv_share.unwrap_or(if is_public { PUBLIC_KV_SHARE } else { 1.0 });
        netd.request_memory = self.request_memory.unwrap_or(0);
        netd.network_test = match self.network_test_url.as_slice() {
            [] => None,
            [one] => Some((one.clone(), one.clone())),
            [download, upload, ..] => Some((download.clone(), upload.clone())),
        };
        // `petals/server/server.py`: twice the period, at least 3 s.
        let twice = (2 * netd.update_period).max(Duration::from_secs(3));
        netd.expiration = self.expiration.unwrap_or(twice);
        if netd.throughput == Throughput::DryRun {
            // Nobody is to see a server that ends in a moment. Peers that were named help to measure
            // the network.
            netd.host_maddrs = vec!["/ip4/127.0.0.1/tcp/0".to_owned()];
            if !asked_for_peers {
                netd.initial_peers = Vec::new();
            }
        }
        Ok(())
    }
}
