//! Settings of a run, one part per role. These are finished values: flags and environment are read,
//! checked and filled in with defaults once, in `supervisor::cli`; nothing here means "decide
//! later" except what only the model can tell.

mod tools;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::block::Span;
use crate::dtype::DType;
pub use crate::dtype::QuantType;
use crate::sandbox::SandboxMode;
use crate::warpgroups::Warpgroups;
pub use tools::{CacheAction, CacheConfig, ConvertConfig, PruneConfig};

/// Everything `sepal serve` was asked to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServeConfig {
    /// Name of the instance; `None` takes the first free number.
    pub instance: Option<String>,
    /// Folder for instance locks and short-lived files.
    pub runtime_dir: PathBuf,
    /// Devices, one worker each.
    pub devices: Vec<Device>,
    /// How many devices in a row serve their part of the span together, as a group
    /// (`--tensor_parallel_size`); divides the number of devices.
    pub world_size: usize,
    /// Positions in `devices` of CUDA devices that were named by UUID, each with its first digits;
    /// their numbers are found out at the start.
    pub uuids: Vec<(usize, UuidPrefix)>,
    /// What was asked for beside no device. The devices are then chosen at the start, and `devices`
    /// holds what serves where there is no other.
    pub automatic: Option<AutomaticDevices>,
    /// What is known of the warpgroups of the CUDA devices among `devices`; found out at the start.
    pub warpgroups: Vec<(Device, Warpgroups)>,
    /// Longest time for the sample that finds it out (`--sample_timeout`).
    pub sample_timeout: Duration,
    /// Settings of netd.
    pub netd: NetdConfig,
    /// Settings common to all workers.
    pub worker: WorkerConfig,
    /// What prepare is to make ready.
    pub prepare: PrepareConfig,
    /// When children are restarted.
    pub restart: RestartConfig,
    /// How every process logs.
    pub log: LogConfig,
    /// Whether children are confined (`--sandbox`).
    pub sandbox: SandboxMode,
    /// How long a drain may take before children are killed.
    pub drain_timeout: Duration,
    /// Memory that blocks, KV cache and processes may take (`--max_memory`); `None` = what is
    /// free.
    pub max_memory_bytes: Option<u64>,
    /// Open files allowed to each process (`--increase_file_limit`); 0 leaves the limit as it is.
    pub file_limit: u64,
    /// Where metrics are served (`--metrics`); `None` = nowhere.
    pub metrics: Option<SocketAddr>,
    /// Where the swarm's page is served (`--web`); `None` = nowhere.
    pub web: Option<SocketAddr>,
    /// The processor that serves the blocks of a device that keeps failing (`--fallback_device`).
    pub fallback: Option<Device>,
    /// Whether events are printed on standard output (`--events`).
    pub events: bool,
    /// Process that started this run and whose end, however it comes, drains it (`--end_with`). It
    /// must have started the run from its main thread; another parent means that it has ended
    /// already.
    pub end_with: Option<u32>,
}

/// Settings whose defaults depend on the devices, as they were asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AutomaticDevices {
    /// Compute threads of each worker.
    pub threads: Option<u32>,
    /// How matrices are stored.
    pub quant_type: Option<QuantType>,
}

/// A device that one worker owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Device {
    /// The processor, all cores.
    Cpu,
    /// A NUMA node of the processor (`cpu:N`): its cores, and memory of its own.
    Node(u32),
    /// The CUDA device with this ordinal.
    Cuda(u32),
    /// An emulated CUDA device on the processor (`emu:N`), in builds that have the emulator: for
    /// tests.
    Emulator(u32),
}

impl Device {
    /// Whether it computes on cores of the machine and in its memory.
    pub fn is_processor(self) -> bool {
        match self {
            Device::Cpu | Device::Node(_) => true,
            Device::Cuda(_) | Device::Emulator(_) => false,
        }
    }

    /// How matrices are stored for `devices` unless the operator says so: NF4 on CUDA, as in
    /// Petals, and as in the checkpoint elsewhere.
    pub fn default_quant_type(devices: &[Device]) -> QuantType {
        match devices.iter().any(|device| matches!(device, Device::Cuda(_))) {
            true => QuantType::Nf4,
            false => QuantType::None,
        }
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Node(n) => write!(f, "cpu:{n}"),
            Device::Cuda(n) => write!(f, "cuda:{n}"),
            Device::Emulator(n) => write!(f, "emu:{n}"),
        }
    }
}

/// The first digits of the UUID of a CUDA device, as the driver's tools write it:
/// `GPU-5d5ba0d6-4d3c-...`, in hexadecimal without dashes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UuidPrefix(String);

impl UuidPrefix {
    /// Whether a device with these bytes is meant.
    pub fn is_of(&self, uuid: &[u8; 16]) -> bool {
        let digits: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        digits.starts_with(&self.0)
    }
}

impl std::str::FromStr for UuidPrefix {
    type Err = String;

    /// `GPU-` and at least one hexadecimal digit; letters of either case, dashes anywhere.
    fn from_str(text: &str) -> Result<UuidPrefix, String> {
        let rest =
            text.get(..4).filter(|start| start.eq_ignore_ascii_case("GPU-")).map(|_| &text[4..]);
        let digits: String = rest
            .unwrap_or_default()
            .chars()
            .filter(|c| *c != '-')
            .map(|c| c.to_ascii_lowercase())
            .collect();
        match (1..=32).contains(&digits.len()) && digits.chars().all(|c| c.is_ascii_hexdigit()) {
            true => Ok(UuidPrefix(digits)),
            false => Err(
                "expected a UUID as nvidia-smi -L shows it, or its beginning, such as GPU-5d5ba0d6"
                    .to_owned(),
            ),
        }
    }
}

impl std::fmt::Display for UuidPrefix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GPU-{}", self.0)
    }
}

/// A UUID as the driver's tools write it.
pub fn shown_uuid(uuid: &[u8; 16]) -> String {
    let digits: Vec<String> = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |range: std::ops::Range<usize>| digits[range].concat();
    format!("GPU-{}-{}-{}-{}-{}", part(0..4), part(4..6), part(6..8), part(8..10), part(10..16))
}

/// Which blocks to serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpanChoice {
    /// Exactly these (`--block_indices`).
    Fixed(Span),
    /// This many, where the swarm needs them most (`--num_blocks`), clipped to the model.
    Count(u32),
    /// The whole model.
    All,
}

/// What is announced as throughput.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Throughput {
    /// Measured by the workers, or kept from an earlier start with the same device, model and build
    /// (`auto`).
    Measure,
    /// Measured by the workers whatever is kept (`eval`).
    Anew,
    /// Measured anew, printed, and then the run ends (`dry_run`).
    DryRun,
    /// This number (`--throughput FLOAT`), requests per second.
    Fixed(f64),
}

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
#[derive(Clone, Debug, Serialize, Deserialize)]
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

/// Settings common to all workers.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct WorkerConfig {
    /// Compute threads of a CPU worker; 0 = one per core.
    pub threads: u32,
    /// CPUs on which workers of the processor may run (`--cpus`); none = all that are of use.
    pub cpus: Vec<u32>,
    /// Fault to inject, for tests of recovery.
    pub fault: Option<FaultPlan>,
    /// Folder in which measured rates are kept; `None` keeps none.
    pub rates_dir: Option<PathBuf>,
    /// Whether to measure although rates are kept.
    pub measure_anew: bool,
    /// Whether workers of devices that have memory of their own keep a copy of their KV pages in
    /// the host's.
    pub kv_mirror: KvMirror,
    /// Most memory of its device that a worker takes (`--device_memory`); `None` = what is free.
    pub device_bytes: Option<u64>,
}

/// When KV pages of a device are mirrored in host memory, from where the next worker takes them
/// (`--kv_mirror`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum KvMirror {
    /// Always; a start without the memory for it fails.
    On,
    /// Never: a worker's death ends the sessions that it had.
    Off,
    /// When the host's memory allows.
    #[default]
    Auto,
}

impl std::str::FromStr for KvMirror {
    type Err = String;

    fn from_str(name: &str) -> Result<KvMirror, String> {
        match name {
            "on" => Ok(KvMirror::On),
            "off" => Ok(KvMirror::Off),
            "auto" => Ok(KvMirror::Auto),
            _ => Err("expected on, off or auto".to_owned()),
        }
    }
}

/// A fault that a worker inflicts on itself at a point of a job, to test recovery. Armed in the
/// first `times` generations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultPlan {
    /// What happens.
    pub action: FaultAction,
    /// Where in the job.
    pub point: FaultPoint,
    /// At which job of the worker's life, counted from 0.
    pub job: u64,
    /// In how many generations of the worker.
    pub times: u32,
    /// In which rank of a group; `None` = in all.
    pub rank: Option<u16>,
}

/// What an injected fault does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultAction {
    /// SIGKILL, as from outside.
    Kill,
    /// Abort, as from a bug of the worker.
    Abort,
    /// Stop making progress.
    Hang,
    /// Post the completion of the job twice, as no sound worker does.
    Repeat,
}

/// Where in a job a fault strikes: between any two of its effects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FaultPoint {
    /// At the start, before the device is opened; of no job.
    Start,
    /// Taken from the ring, nothing done.
    Taken,
    /// After the page copies.
    Copies,
    /// After the block at this position of the job.
    Block(u32),
    /// After the output slot was written.
    Output,
    /// After the completion was posted.
    Completion,
}

/// What prepare makes ready.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PrepareConfig {
    /// Folder in Hugging Face layout, or a Hub repository id.
    pub model: String,
    /// Type to serve in; `None` = the checkpoint's, float32 becoming bfloat16 as in Petals.
    pub dtype: Option<DType>,
    /// How matrices are to be stored.
    pub quant_type: QuantType,
    /// Whether the operator named that; else a model that is stored in another way stays as it is.
    pub is_quant_named: bool,
    /// LoRA adapters: folders in PEFT layout or Hub repository ids, by the names that requests
    /// choose them with.
    pub adapters: Vec<String>,
    /// Folder for downloads and prepared blocks.
    pub cache_dir: PathBuf,
    /// How the Hub is asked for what is not there.
    pub hub: HubConfig,
}

/// How files are downloaded from the Hugging Face Hub.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HubConfig {
    /// Address of the Hub (`HF_ENDPOINT`); `None` = the public one.
    pub endpoint: Option<String>,
    /// Whether that may be an address without encryption, beyond this machine.
    pub is_plain_http_allowed: bool,
    /// What proves that the operator may read the model.
    pub token: Option<Secret>,
    /// Branch, tag or commit; `None` = `main`.
    pub revision: Option<String>,
    /// Whether only what was downloaded earlier may be used (`HF_HUB_OFFLINE`).
    pub offline: bool,
    /// Most bytes that downloads and prepared blocks may take in the cache folder; `None` = what
    /// the disk has.
    pub max_disk_bytes: Option<u64>,
}

/// A text that no log and no error shows.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret(String);

impl Secret {
    /// Hides `text`.
    pub fn new(text: impl Into<String>) -> Secret {
        Secret(text.into())
    }

    /// The text, for the one place that needs it.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// When children are restarted, and how often is too often.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartConfig {
    /// First pause after a death; the first restart of a child that had served well is immediate.
    pub backoff_min: Duration,
    /// Longest pause.
    pub backoff_max: Duration,
    /// More deaths of one child than this within `window` end the run, or put its device aside while
    /// others serve. What kills a worker from outside does not count.
    pub max_restarts: u32,
    /// The window of `max_restarts`.
    pub window: Duration,
    /// After which pause a device that was put aside is tried again; doubles with each failure.
    /// `None` = never.
    pub retry_after: Option<Duration>,
    /// A child that makes no progress for this long is killed, whether it has work or not.
    pub hang_timeout: Duration,
    /// A child must have reported ready within this time after its start.
    pub start_timeout: Duration,
}

/// How a process logs to standard error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogConfig {
    /// Filter in the syntax of `tracing_subscriber::EnvFilter`, for example `info` or
    /// `info,netd=debug`.
    pub filter: String,
    /// Lines for people or for machines.
    pub format: LogFormat,
}

/// Settings of `sepal dht`.
#[derive(Clone, Debug, PartialEq)]
pub struct DhtNodeConfig {
    /// Peers to join through; empty = a new swarm.
    pub initial_peers: Vec<String>,
    /// Multiaddrs to listen on.
    pub host_maddrs: Vec<String>,
    /// Multiaddrs to announce in place of the listened ones.
    pub announce_maddrs: Vec<String>,
    /// File of the private key, made if missing; `None` = a new identity.
    pub identity_path: Option<PathBuf>,
    /// Whether it relays for others, as soon as it is known to be reachable, and punches holes.
    pub use_relay: bool,
    /// Most bits per second that it relays.
    pub relay_bits_per_s: f64,
    /// Whether it has itself reached through relays when AutoNAT says that peers cannot dial it.
    pub use_auto_relay: bool,
    /// Whether a router is asked to forward the port (UPnP).
    pub use_upnp: bool,
    /// Whether peers may have it dial addresses of private nets.
    pub dials_private_nets: bool,
    /// Period of the status lines and of the look-up that evicts dead peers.
    pub refresh_period: Duration,
    /// Time to listen and to reach a first peer.
    pub startup_timeout: Duration,
}

/// How the parts of a model that a client computes itself are downloaded, if they are in no folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchConfig {
    /// Folder for downloads.
    pub cache_dir: PathBuf,
    /// How the Hub is asked.
    pub hub: HubConfig,
}

/// Settings of `sepal generate`.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateConfig {
    /// Model folder.
    pub model: PathBuf,
    /// Prefix of the module uids; `None` = the model's own.
    pub dht_prefix: Option<String>,
    /// Peers of the swarm.
    pub initial_peers: Vec<String>,
    /// Text to continue.
    pub prompt: String,
    /// What this machine computes itself.
    pub local: LocalConfig,
    /// Folder of a small model that guesses.
    pub draft: Option<PathBuf>,
    /// Most tokens to add.
    pub max_new_tokens: u32,
    /// How tokens are chosen.
    pub sampling: SamplingConfig,
    /// Texts before which the text ends.
    pub stop: Vec<String>,
    /// Whether to print speed and the time of a step at the end.
    pub stats: bool,
    /// Time to reach the swarm and to find servers for all blocks.
    pub startup_timeout: Duration,
}

/// What a client computes itself, and guesses.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LocalConfig {
    /// Type of embeddings and head; `None` = the checkpoint's.
    pub dtype: Option<DType>,
    /// How the head is stored.
    pub head: QuantType,
    /// Most tokens that are guessed for one step; 0 = none.
    pub speculate: usize,
}

/// Settings of `sepal gateway`.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayConfig {
    /// The models, each with its name.
    pub models: Vec<GatewayModel>,
    /// Peers of the swarm, for models that name none of their own.
    pub initial_peers: Vec<String>,
    /// Where to listen.
    pub listen: SocketAddr,
    /// What this machine computes itself of each model.
    pub local: LocalConfig,
    /// Chat template in place of those of the models.
    pub chat_template: Option<PathBuf>,
    /// File of API keys, one a line; `None` lets everybody in.
    pub api_keys: Option<PathBuf>,
    /// Certificate chain and key, in PEM; `None` speaks plain HTTP.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Origins of web pages that may call the API; `*` for all.
    pub cors_origins: Vec<String>,
    /// Texts under way at once.
    pub max_streams: usize,
    /// Requests of one caller (API key, else IP address) in a minute; `None` = no limit.
    pub requests_per_minute: Option<u32>,
    /// Most bytes of a request.
    pub max_body_bytes: usize,
    /// Tokens of a text for which the request names no number.
    pub default_max_tokens: u32,
    /// Sessions of ended texts that are kept for their next turn, for each model.
    pub sessions_kept: usize,
    /// How long they are kept.
    pub session_idle: Duration,
    /// How long a request waits for servers of all blocks.
    pub route_timeout: Duration,
    /// Time to reach the swarm.
    pub startup_timeout: Duration,
    /// The server of this machine whose page this is; `None` for a gateway of its own.
    pub server: Option<ShownServer>,
}

/// A server that has the page of its swarm shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShownServer {
    /// Its supervisor, whose end is the end of the page.
    pub pid: u32,
    /// Blocks of the model.
    pub num_blocks: u32,
    /// Whether the process of the page is confined.
    pub sandbox: SandboxMode,
}

/// Settings of `sepal chat`.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatConfig {
    /// The one model, its swarm, and bounds.
    pub engine: GatewayConfig,
    /// What the assistant is told first.
    pub system: Option<String>,
    /// How tokens are chosen.
    pub sampling: SamplingConfig,
    /// File of what was entered before; `None` = none.
    pub history: Option<PathBuf>,
}

/// A model that a gateway offers.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewayModel {
    /// Its name in the API.
    pub name: String,
    /// Folder in Hugging Face layout.
    pub folder: PathBuf,
    /// Prefix of the module uids; `None` = the folder's.
    pub dht_prefix: Option<String>,
    /// Peers of its swarm; none = those of the gateway.
    pub initial_peers: Vec<String>,
    /// Folder of a small model that guesses for it.
    pub draft: Option<PathBuf>,
}

/// How tokens are chosen. The default is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingConfig {
    /// Divides the logits; `None` chooses greedily and ignores top-k, top-p, min-p and the seed.
    pub temperature: Option<f32>,
    /// Keeps the most probable tokens only.
    pub top_k: Option<usize>,
    /// Keeps the smallest set of tokens whose probabilities sum to at least this.
    pub top_p: Option<f32>,
    /// Keeps tokens that are at least this share as probable as the most probable one.
    pub min_p: Option<f32>,
    /// Divides the logits of tokens of the prompt and of the text, or multiplies negative ones; 1
    /// = none.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of a token for each time that it was said.
    pub frequency_penalty: f32,
    /// Subtracted from the logit of a token that was said.
    pub presence_penalty: f32,
    /// Added to the logits of tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the draws; `None` = from the system.
    pub seed: Option<u64>,
}

impl Default for SamplingConfig {
    fn default() -> SamplingConfig {
        SamplingConfig {
            temperature: None,
            top_k: None,
            top_p: None,
            min_p: None,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: None,
        }
    }
}

/// Settings of `sepal demo`.
#[derive(Clone, Debug, PartialEq)]
pub struct DemoConfig {
    /// Text to continue; `None` = one that suits the model.
    pub prompt: Option<String>,
    /// Most tokens to add.
    pub max_new_tokens: u32,
    /// Whether the swarm stays until Ctrl-C.
    pub keep: bool,
}

/// Settings of `sepal probe`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProbeConfig {
    /// Addresses of the server; all end in its PeerID.
    pub peers: Vec<String>,
    /// Prefix of the model's module uids.
    pub dht_prefix: String,
    /// Its blocks.
    pub blocks: std::ops::Range<u32>,
    /// Width of the hidden states.
    pub hidden_size: u32,
    /// The process that waits for the outcome.
    pub parent: u32,
}

/// Form of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LogFormat {
    /// For a person at a terminal: warnings and errors without time stamps, below which the
    /// supervisor draws its progress.
    Terminal,
    /// One line of readable text per event, with its time and process; coloured on a terminal.
    Text,
    /// One JSON object a line.
    Json,
}

impl LogFormat {
    /// All formats.
    pub const ALL: [LogFormat; 3] = [LogFormat::Terminal, LogFormat::Text, LogFormat::Json];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            LogFormat::Terminal => "terminal",
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_meant_by_any_of_its_beginnings() {
        let uuid: [u8; 16] = std::array::from_fn(|n| 0x5d + n as u8);
        let shown = shown_uuid(&uuid);
        assert_eq!(shown, "GPU-5d5e5f60-6162-6364-6566-6768696a6b6c");
        let is_of = |text: &str| text.parse::<UuidPrefix>().map(|prefix| prefix.is_of(&uuid));
        for text in [&*shown, &shown.to_uppercase(), "GPU-5d5e5f60", "gpu-5", "GPU-5d5e5f6061"] {
            assert_eq!(is_of(text), Ok(true), "{text}");
        }
        assert_eq!(is_of("GPU-5d5f"), Ok(false));
        for text in ["", "GPU-", "GPU-xyz", "5d5e", "GPÜ-5", &format!("{shown}0"), "GPU--"] {
            assert!(is_of(text).unwrap_err().contains("nvidia-smi -L"), "{text}");
        }
    }
}
