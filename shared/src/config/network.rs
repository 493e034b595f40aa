//! Settings of the network daemon.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{SpanChoice, Throughput};

/// How answers to peers are compressed unless a request asks otherwise (`--compression`), by the
/// names of hivemind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Compression {
    /// Not at all.
    #[default]
    None,
    /// f16 values with a mean and a deviation per row.
    MeanStd16Bit,
    /// f16 values.
    Float16,
    /// Eight bits, buckets at quantiles.
    Quantile8Bit,
    /// Eight bits, buckets of one width.
    Uniform8Bit,
    /// Eight bits, a scale per 4096 elements.
    Blockwise8Bit,
}

impl Compression {
    /// All of them, in the order of hivemind's enum.
    pub const ALL: [Compression; 6] = [
        Compression::None,
        Compression::MeanStd16Bit,
        Compression::Float16,
        Compression::Quantile8Bit,
        Compression::Uniform8Bit,
        Compression::Blockwise8Bit,
    ];

    /// The name in hivemind and in flags.
    pub const fn name(self) -> &'static str {
        match self {
            Compression::None => "NONE",
            Compression::MeanStd16Bit => "MEANSTD_16BIT",
            Compression::Float16 => "FLOAT16",
            Compression::Quantile8Bit => "QUANTILE_8BIT",
            Compression::Uniform8Bit => "UNIFORM_8BIT",
            Compression::Blockwise8Bit => "BLOCKWISE_8BIT",
        }
    }
}

impl std::str::FromStr for Compression {
    type Err = String;

    /// Upper or lower case.
    fn from_str(name: &str) -> Result<Compression, String> {
        let all = Compression::ALL;
        let found = all.into_iter().find(|kind| kind.name().eq_ignore_ascii_case(name));
        found.ok_or_else(|| format!("use one of {}", all.map(Compression::name).join(", ")))
    }
}

/// Settings of the network daemon. Names and defaults follow `petals.cli.run_server`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetdConfig {
    /// Prefix of the module uids; `None` takes the family's default for the model.
    pub dht_prefix: Option<String>,
    /// Multiaddrs to listen on.
    pub host_maddrs: Vec<String>,
    /// Multiaddrs to announce in place of the listened ones; empty = announce what is listened on.
    pub announce_maddrs: Vec<String>,
    /// Peers to join through; empty = a new swarm.
    pub initial_peers: Vec<String>,
    /// File of the libp2p private key; `None` = a fresh identity that is kept in the runtime
    /// folder for this run, so that a restarted netd has the same PeerID.
    pub identity_path: Option<PathBuf>,
    /// Whether the server has itself reached through relays when peers cannot dial it.
    pub use_auto_relay: bool,
    /// Which blocks to serve.
    pub span: SpanChoice,
    /// Throughput to announce.
    pub throughput: Throughput,
    /// What the network carries each way, in bits per second, if the operator says so; otherwise
    /// it is measured.
    pub link_bits_per_s: Option<f64>,
    /// Most bits per second that are sent to all peers together (`--max_upload_mbps`); `None` for no
    /// limit.
    pub max_upload_bits_per_s: Option<f64>,
    /// Most bits per second that are relayed for others (`--relay_mbps`); `None` for a part of what the
    /// network carries.
    pub relay_bits_per_s: Option<f64>,
    /// Bytes that requests of all peers together may hold in netd before and while they are computed.
    pub request_memory: u64,
    /// A service to measure the network with, by download and upload address; `None` asks servers
    /// of the swarm.
    pub network_test: Option<(String, String)>,
    /// Folder in which the network's rate is kept; `None` keeps none.
    pub rates_dir: Option<PathBuf>,
    /// Address of the monitor that must be able to reach this server before it goes online; `None`
    /// asks none.
    pub monitor: Option<String>,
    /// Whether a router is asked to forward the port (UPnP).
    pub use_upnp: bool,
    /// Whether peers may have it dial addresses of private nets.
    pub dials_private_nets: bool,
    /// Period of lines with what was computed since the last; `None` writes none.
    pub stats_report_interval: Option<Duration>,
    /// Free text in the record.
    pub public_name: Option<String>,
    /// Compression of answers.
    pub compression: Compression,
    /// Period of announcements.
    pub update_period: Duration,
    /// Lifetime of an announcement; by default twice the period, and at least 3 s.
    pub expiration: Duration,
    /// Moves to other blocks when the weakest block of the swarm has less than this share of the
    /// throughput that it could have (`--balance_quality`): 0 never moves, more than 1 at
    /// every check.
    pub balance_quality: f64,
    /// Mean time between two such checks (`--mean_balance_check_period`); each wait is up to twice
    /// as long.
    pub mean_balance_check_period: Duration,
    /// Largest `max_length` of a session in tokens; `None` = by the model's KV groups (8192 or
    /// 2048).
    pub inference_max_length: Option<u32>,
    /// KV budget per block in tokens; `None` = by the model's KV groups (16384 or 4096).
    pub attn_cache_tokens: Option<u32>,
    /// Part of the KV budget that one peer may hold, above 0 and at most 1.
    pub max_kv_share: f64,
    /// Largest batch × tokens of one request; `None` = by the model's KV groups (8192 or 2048).
    pub max_batch_size: Option<u32>,
    /// Cap of the time a session may wait for KV cache.
    pub max_alloc_timeout: Duration,
    /// Limit of one forward or backward request.
    pub request_timeout: Duration,
    /// Life of one inference session.
    pub session_timeout: Duration,
    /// Longest silence between two steps.
    pub step_timeout: Duration,
    /// How long a session that can be resumed is kept after its stream broke or netd died; zero
    /// keeps none.
    pub session_grace: Duration,
    /// Time to start listening and reach a first peer.
    pub startup_timeout: Duration,
    /// Bytes of the arena shared with the workers.
    pub arena_bytes: u64,
}
