//! Settings of the network daemon.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args};
use serde::{Deserialize, Serialize};
use strum::{Display, EnumString, VariantNames};

use super::values::{maddr, megabits, pause, seconds, size_bytes};
use super::{SpanChoice, Throughput};
use crate::block::is_prefix;

/// How answers to peers are compressed unless a request asks otherwise (`--compression`), by the
/// names of hivemind in upper or lower case.
#[derive(Display, EnumString, VariantNames)]
#[strum(ascii_case_insensitive, parse_err_ty = String, parse_err_fn = expected_compressions)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Compression {
    /// Not at all.
    #[default]
    #[strum(serialize = "NONE")]
    None,
    /// f16 values with a mean and a deviation per row.
    #[strum(serialize = "MEANSTD_16BIT")]
    MeanStd16Bit,
    /// f16 values.
    #[strum(serialize = "FLOAT16")]
    Float16,
    /// Eight bits, buckets at quantiles.
    #[strum(serialize = "QUANTILE_8BIT")]
    Quantile8Bit,
    /// Eight bits, buckets of one width.
    #[strum(serialize = "UNIFORM_8BIT")]
    Uniform8Bit,
    /// Eight bits, a scale per 4096 elements.
    #[strum(serialize = "BLOCKWISE_8BIT")]
    Blockwise8Bit,
}

fn expected_compressions(_: &str) -> String {
    format!("use one of {}", Compression::VARIANTS.join(", "))
}

/// Settings of the network daemon. Names and defaults follow `petals.cli.run_server`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Args)]
#[command(rename_all = "snake_case", next_help_heading = "Network")]
pub struct NetdConfig {
    /// Prefix of the blocks' names in the DHT [default: derived from the model's name]
    #[arg(long, value_name = "PREFIX", value_parser = prefix, help_heading = None::<&str>)]
    pub dht_prefix: Option<String>,
    /// Addresses to listen on
    #[arg(long, num_args = 1.., value_name = "MULTIADDR", value_parser = maddr)]
    pub host_maddrs: Vec<String>,
    /// Addresses to announce instead of those listened on
    #[arg(long, num_args = 1.., value_name = "MULTIADDR", value_parser = maddr)]
    pub announce_maddrs: Vec<String>,
    /// Peers to join through [default: those of the public swarm]
    // None = a new swarm.
    #[arg(long, num_args = 1.., value_name = "MULTIADDR", conflicts_with = "new_swarm", value_parser = maddr)]
    pub initial_peers: Vec<String>,
    /// File of the private key, which keeps the PeerID stable; created if missing
    // `None` = a fresh identity that is kept in the runtime folder for this run, so that a restarted netd
    // has the same PeerID.
    #[arg(long, value_name = "FILE")]
    pub identity_path: Option<PathBuf>,
    /// Do not use relays of the swarm when peers cannot dial this server
    #[arg(id = "no_auto_relay", long = "no_auto_relay", action = ArgAction::SetFalse)]
    #[serde(rename = "no_auto_relay")]
    pub use_auto_relay: bool,
    /// Which blocks to serve.
    #[arg(skip = SpanChoice::All)]
    #[serde(rename = "num_blocks")]
    pub span: SpanChoice,
    /// Requests per second to announce: a number; auto measures once per machine, model and build;
    /// eval measures again; dry_run measures again, prints the result and exits
    #[arg(long, value_name = "RPS", default_value = "auto", allow_negative_numbers = true, help_heading = None::<&str>)]
    pub throughput: Throughput,
    /// Network rate in each direction in megabits per second [default: measured with other servers
    /// and kept for a week; before that 100, or the speed of the link if lower]
    #[arg(id = "network_mbps", long = "network_mbps", value_name = "MBPS", value_parser = megabits)]
    #[serde(rename = "network_mbps")]
    pub link_bits_per_s: Option<f64>,
    /// Maximum of what this server sends to all its peers together, in megabits per second. It also
    /// bounds the announced throughput, and the network is not measured [default: no limit]
    #[arg(id = "max_upload_mbps", long = "max_upload_mbps", value_name = "MBPS", value_parser = megabits)]
    #[serde(rename = "max_upload_mbps")]
    pub max_upload_bits_per_s: Option<f64>,
    /// Maximum of what this server relays for peers that others cannot dial, all of them together, in
    /// megabits per second on average; what was not used in the last ten seconds may go at once [default: a
    /// quarter of the network rate]
    #[arg(id = "relay_mbps", long = "relay_mbps", value_name = "MBPS", value_parser = megabits)]
    #[serde(rename = "relay_mbps")]
    pub relay_bits_per_s: Option<f64>,
    /// Bytes that requests of all peers together may hold in netd before and while they are computed; 0 =
    /// by the memory that is free at the start.
    #[arg(skip)]
    pub request_memory: u64,
    /// A service to measure the network with, by download and upload address; `None` asks servers
    /// of the swarm.
    #[arg(skip)]
    #[serde(rename = "network_test_url")]
    pub network_test: Option<(String, String)>,
    /// Folder in which the network's rate is kept; `None` keeps none.
    #[arg(skip)]
    pub rates_dir: Option<PathBuf>,
    /// Address of the monitor that must be able to reach this server before it goes online; `None`
    /// asks none.
    #[arg(skip)]
    #[serde(rename = "reachability_monitor")]
    pub monitor: Option<String>,
    /// Do not ask the router to forward the port (UPnP)
    #[arg(id = "no_upnp", long = "no_upnp", action = ArgAction::SetFalse)]
    #[serde(rename = "no_upnp")]
    pub use_upnp: bool,
    /// Whether peers may have it dial addresses of private nets.
    #[arg(skip)]
    #[serde(rename = "dial_private_nets")]
    pub dials_private_nets: bool,
    /// Log statistics in hivemind's format with this period, in seconds [default: never]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Supervision")]
    pub stats_report_interval: Option<Duration>,
    /// Name to show on the swarm's leader board
    #[arg(long, value_name = "TEXT", help_heading = None::<&str>)]
    pub public_name: Option<String>,
    /// Compression of answers and of requests to this server: NONE, MEANSTD_16BIT, FLOAT16,
    /// QUANTILE_8BIT, UNIFORM_8BIT or BLOCKWISE_8BIT
    #[arg(long, value_name = "NAME", default_value = "NONE")]
    pub compression: Compression,
    /// Time between two announcements, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds)]
    pub update_period: Duration,
    /// Lifetime of an announcement.
    #[arg(skip)]
    pub expiration: Duration,
    /// Move to other blocks when the throughput of the swarm's weakest block is below this share of
    /// what a better placement allows; 0 disables moves
    // More than 1 moves at every check.
    #[arg(long, value_name = "QUALITY", default_value = "0.75", value_parser = quality)]
    pub balance_quality: f64,
    /// Mean time between two evaluations of the placement, in seconds
    // Each wait is up to twice as long.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub mean_balance_check_period: Duration,
    /// Maximum length of a session in tokens [default: what the model takes by its config.json; if it names
    /// no length, 8192 with grouped key/value heads, else 2048]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Limits")]
    pub inference_max_length: Option<u32>,
    /// KV cache per block in tokens [default: 16384 with grouped key/value heads, else 4096]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Limits")]
    pub attn_cache_tokens: Option<u32>,
    /// Part of the KV budget that one peer may hold, above 0 and at most 1.
    #[arg(skip)]
    pub max_kv_share: f64,
    /// Maximum batch size times tokens of one request [default: 8192 with grouped key/value heads, else
    /// 2048]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Limits")]
    pub max_batch_size: Option<u32>,
    /// Maximum time that a session waits for KV cache, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds, help_heading = "Limits")]
    pub max_alloc_timeout: Duration,
    /// Timeout of a forward or backward request, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "180", value_parser = seconds, help_heading = "Limits")]
    pub request_timeout: Duration,
    /// Maximum lifetime of a session, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1800", value_parser = seconds, help_heading = "Limits")]
    pub session_timeout: Duration,
    /// Maximum time between two steps of a session, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds, help_heading = "Limits")]
    pub step_timeout: Duration,
    /// Time that the KV cache of a session is kept after its connection broke or the network daemon
    /// restarted, for a client that can resume it, in seconds; 0 keeps none
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = pause, help_heading = "Limits")]
    pub session_grace: Duration,
    /// Timeout for listening and reaching a first peer, and for its answer, in seconds
    #[arg(id = "daemon_startup_timeout", long = "daemon_startup_timeout", value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    #[serde(rename = "daemon_startup_timeout")]
    pub startup_timeout: Duration,
    /// Shared memory for tensors between the network daemon and the workers; allocated when used
    #[arg(id = "arena_size", long = "arena_size", value_name = "SIZE", default_value = "512MiB", value_parser = arena_bytes, help_heading = "Limits")]
    #[serde(rename = "arena_size")]
    pub arena_bytes: u64,
}

fn prefix(text: &str) -> Result<String, String> {
    let expected = || "expected a short name without dots and white space".to_owned();
    is_prefix(text).then(|| text.to_owned()).ok_or_else(expected)
}

fn quality(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(quality) if quality.is_finite() && quality >= 0.0 => Ok(quality),
        _ => Err("expected a number of at least 0, such as 0.75".to_owned()),
    }
}

/// At least what two of the smallest useful requests take.
fn arena_bytes(text: &str) -> Result<u64, String> {
    const LEAST: u64 = 16 << 20;
    let asked = size_bytes(text)?;
    (asked >= LEAST).then_some(asked).ok_or_else(|| format!("expected at least {LEAST} bytes"))
}
