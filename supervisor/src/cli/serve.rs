//! `sepal serve`: the flags of Petals' `run_server` (`petals/cli/run_server.py`) and our own. A flag of `run_server` that
//! asks for what this version does not do is refused with a sentence; one that only tunes machinery that we do not have is
//! accepted and noted.

use std::path::PathBuf;
use std::thread::available_parallelism;
use std::time::Duration;

use clap::Args;
use shared::block::{Span, is_prefix};
use shared::config::{
    Device, FaultPlan, NetdConfig, PrepareConfig, RestartConfig, ServeConfig, SpanChoice,
    Throughput, WorkerConfig,
};
use shared::dtype::DType;

use super::values::{check_maddrs, devices, fault, model_or_last, seconds, size_bytes};
use super::{DEFAULT_LOG, Env, LogArgs, runtime_dir};

/// Bootstrap peers of the public swarm (`petals/constants.py`, `PUBLIC_INITIAL_PEERS`).
const PUBLIC_INITIAL_PEERS: [&str; 6] = [
    "/dns/bootstrap1.petals.dev/tcp/31337/p2p/QmedTaZXmULqwspJXz44SsPZyTNKxhnnFvYRajfH7MGhCY",
    "/dns/bootstrap2.petals.dev/tcp/31338/p2p/QmQGTqmM7NKjV6ggU1ZCap8zWiyKR89RViDXiqehSiCpY5",
    "/dns6/bootstrap1.petals.dev/tcp/31337/p2p/QmedTaZXmULqwspJXz44SsPZyTNKxhnnFvYRajfH7MGhCY",
    "/dns6/bootstrap2.petals.dev/tcp/31338/p2p/QmQGTqmM7NKjV6ggU1ZCap8zWiyKR89RViDXiqehSiCpY5",
    "/ip4/159.89.214.152/tcp/31337/p2p/QmedTaZXmULqwspJXz44SsPZyTNKxhnnFvYRajfH7MGhCY",
    "/ip4/159.203.156.48/tcp/31338/p2p/QmQGTqmM7NKjV6ggU1ZCap8zWiyKR89RViDXiqehSiCpY5",
];

/// Most workers of an instance: the board has 32 seats, two of which are not for workers.
const MAX_DEVICES: usize = 15;

const PETALS: &str = "Flags of Petals without effect here";
const NOT_YET: &str = "Flags of Petals that this version refuses";
const SUPERVISOR: &str = "Supervision";
const NETWORK: &str = "Network";
const LIMITS: &str = "Limits";

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ServeArgs {
    /// Model folder in Hugging Face layout (config.json and safetensors); required
    model: Option<String>,
    /// The same as MODEL
    #[arg(long, value_name = "MODEL", conflicts_with = "model")]
    converted_model_name_or_path: Option<String>,
    /// Number of blocks to serve, where the swarm needs them most [default: all]
    #[arg(long, value_name = "N", conflicts_with = "block_indices", value_parser = clap::value_parser!(u32).range(1..))]
    num_blocks: Option<u32>,
    /// Serve exactly these blocks, and never others
    #[arg(long, value_name = "START:END")]
    block_indices: Option<Span>,
    /// Devices, one worker each: cpu, or a list such as cpu,cpu
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: String,
    /// Type to serve in: auto, float32 or bfloat16; auto makes bfloat16 of a float32 checkpoint
    #[arg(long, value_name = "TYPE", default_value = "auto")]
    torch_dtype: String,
    /// How matrices are stored: none, int8 or nf4
    #[arg(long, value_name = "TYPE", default_value = "none")]
    quant_type: String,
    /// Compute threads of each worker [default: the cores, divided among the workers]
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// Requests per second to announce: a number, or auto or eval to measure
    #[arg(
        long,
        value_name = "RPS",
        default_value = "auto",
        allow_negative_numbers = true
    )]
    throughput: String,
    /// Folder for prepared models [env: SEPAL_CACHE, PETALS_CACHE] [default: ~/.cache/sepal]
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Name in the record, for the swarm's leader board
    #[arg(long, value_name = "TEXT")]
    public_name: Option<String>,
    /// Prefix of the blocks' names in the swarm [default: the model's name]
    #[arg(long, value_name = "PREFIX")]
    dht_prefix: Option<String>,

    /// Peers to join through [default: those of the public swarm]
    #[arg(long, num_args = 1.., value_name = "MULTIADDR", conflicts_with = "new_swarm", help_heading = NETWORK)]
    initial_peers: Vec<String>,
    /// Begin a new swarm
    #[arg(long, help_heading = NETWORK)]
    new_swarm: bool,
    /// Listen on this port, on all addresses [default: 0, a free one]
    #[arg(long, value_name = "PORT", conflicts_with = "host_maddrs", help_heading = NETWORK)]
    port: Option<u16>,
    /// Announce this address only; needs --port
    #[arg(long, value_name = "IPV4", requires = "port", conflicts_with = "announce_maddrs", help_heading = NETWORK)]
    public_ip: Option<std::net::Ipv4Addr>,
    /// Where to listen
    #[arg(long, num_args = 1.., value_name = "MULTIADDR", help_heading = NETWORK)]
    host_maddrs: Vec<String>,
    /// What to announce in place of the addresses listened on
    #[arg(long, num_args = 1.., value_name = "MULTIADDR", help_heading = NETWORK)]
    announce_maddrs: Vec<String>,
    /// File of the private key, made if missing; it makes the PeerID stable
    #[arg(long, value_name = "FILE", help_heading = NETWORK)]
    identity_path: Option<PathBuf>,
    /// Seconds to start listening and to reach a first peer
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds, help_heading = NETWORK)]
    daemon_startup_timeout: Duration,
    /// Seconds between two announcements
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds, help_heading = NETWORK)]
    update_period: Duration,
    /// Seconds for which an announcement holds [default: twice the period, at least 3]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = NETWORK)]
    expiration: Option<Duration>,

    /// Longest session in tokens [default: 8192 with grouped key/value heads, else 2048]
    #[arg(long, value_name = "TOKENS", help_heading = LIMITS, value_parser = clap::value_parser!(u32).range(1..))]
    inference_max_length: Option<u32>,
    /// KV cache per block in tokens [default: 16384 with grouped key/value heads, else 4096]
    #[arg(long, value_name = "TOKENS", help_heading = LIMITS, value_parser = clap::value_parser!(u32).range(1..))]
    attn_cache_tokens: Option<u32>,
    /// Largest batch x tokens of one request [default: 8192 with grouped key/value heads, else 2048]
    #[arg(long, value_name = "TOKENS", help_heading = LIMITS, value_parser = clap::value_parser!(u32).range(1..))]
    max_batch_size: Option<u32>,
    /// Longest wait of a session for KV cache, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds, help_heading = LIMITS)]
    max_alloc_timeout: Duration,
    /// Seconds for a whole forward or backward request
    #[arg(long, value_name = "SECONDS", default_value = "180", value_parser = seconds, help_heading = LIMITS)]
    request_timeout: Duration,
    /// Longest life of a session, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1800", value_parser = seconds, help_heading = LIMITS)]
    session_timeout: Duration,
    /// Longest silence between two steps of a session, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "300", value_parser = seconds, help_heading = LIMITS)]
    step_timeout: Duration,
    /// Memory between the network and the workers; pages are taken when used
    #[arg(long, value_name = "SIZE", default_value = "512MiB", value_parser = size_bytes, help_heading = LIMITS)]
    arena_size: u64,
    /// Open files allowed to each process; 0 leaves the limit as it is
    #[arg(long, value_name = "N", default_value_t = 4096, help_heading = LIMITS)]
    increase_file_limit: u64,

    /// Name of this instance [default: the first free number]
    #[arg(long, value_name = "NAME", help_heading = SUPERVISOR)]
    instance: Option<String>,
    /// Folder of the instances [default: $XDG_RUNTIME_DIR/sepal or /tmp/sepal-UID]
    #[arg(long, value_name = "DIR", help_heading = SUPERVISOR)]
    runtime_dir: Option<PathBuf>,
    /// Seconds that running steps get to end after SIGTERM or Ctrl-C
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds, help_heading = SUPERVISOR)]
    drain_timeout: Duration,
    /// Seconds without progress after which a busy process is killed and restarted
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds, help_heading = SUPERVISOR)]
    hang_timeout: Duration,
    /// Seconds that a process may take to become ready, such as a worker that loads its blocks
    #[arg(long, value_name = "SECONDS", default_value = "1800", value_parser = seconds, help_heading = SUPERVISOR)]
    start_timeout: Duration,
    /// More deaths of one process than this within --restart_window are too many
    #[arg(long, value_name = "N", default_value_t = 10, help_heading = SUPERVISOR)]
    max_restarts: u32,
    /// See --max_restarts, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds, help_heading = SUPERVISOR)]
    restart_window: Duration,
    /// A fault that each worker inflicts on itself: ACTION@POINT#JOB[xTIMES]
    #[arg(long, value_name = "FAULT", hide = true, value_parser = fault)]
    inject_fault: Option<FaultPlan>,
    /// Drain when the process that started this one, which has this id, ends
    #[arg(long, value_name = "PID", hide = true)]
    end_with: Option<u32>,
    #[command(flatten)]
    log: LogArgs,

    #[command(flatten)]
    unused: UnusedArgs,
    #[command(flatten)]
    refused: RefusedArgs,
}

/// Flags that tune machinery that Sepal does not have, or does better without being told.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case", next_help_heading = PETALS)]
struct UnusedArgs {
    /// Processes that answer requests: netd is one process
    #[arg(long, value_name = "N")]
    num_handlers: Option<u32>,
    /// Tasks fetched ahead of the running one: workers read their ring
    #[arg(long, value_name = "N")]
    prefetch_batches: Option<u32>,
    /// Threads that copy results: results lie in shared memory
    #[arg(long, value_name = "N")]
    sender_threads: Option<u32>,
    /// Petals ignores it as well
    #[arg(long, value_name = "TOKENS")]
    min_batch_size: Option<u32>,
    /// Bound of one chunk of attention: prefill is cut at fixed positions
    #[arg(long, value_name = "BYTES")]
    max_chunk_size_bytes: Option<u64>,
    /// Limit of the download folder: this version downloads nothing
    #[arg(long, value_name = "SIZE")]
    max_disk_space: Option<String>,
    /// Period of a report: see sepal status
    #[arg(long, value_name = "SECONDS")]
    stats_report_interval: Option<f64>,
    /// When to choose other blocks: this version keeps its blocks
    #[arg(long, value_name = "QUALITY")]
    balance_quality: Option<f64>,
    /// Period of that check
    #[arg(long, value_name = "SECONDS")]
    mean_balance_check_period: Option<f64>,
    /// No check whether others can reach this server: this version makes none
    #[arg(long)]
    skip_reachability_check: bool,
    /// No use of relays: this version uses none
    #[arg(long)]
    no_auto_relay: bool,
}

/// Flags that ask for something that this version cannot do.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case", next_help_heading = NOT_YET)]
struct RefusedArgs {
    /// File with flags
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Hub token
    #[arg(long, value_name = "TOKEN")]
    token: Option<String>,
    /// Use the Hub token of this machine
    #[arg(long)]
    use_auth_token: bool,
    /// Revision on the Hub
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// Compression that the record asks for: NONE
    #[arg(long, value_name = "NAME")]
    compression: Option<String>,
    /// Devices that share each block
    #[arg(long, num_args = 1.., value_name = "DEVICE")]
    tensor_parallel_devices: Vec<String>,
    /// LoRA adapters
    #[arg(long, num_args = 0.., value_name = "ADAPTER")]
    adapters: Vec<String>,
    /// Python code for hivemind
    #[arg(long, value_name = "FILE")]
    custom_module_path: Option<PathBuf>,
}

/// Turns flags and environment into settings, and notes flags without effect.
pub fn resolve(mut args: ServeArgs, env: Env<'_>) -> Result<(ServeConfig, Vec<String>), String> {
    args.refused.check()?;
    let notes = args.unused.notes();
    let devices = serving_devices(&args.device)?;
    let model = args.model.or(args.converted_model_name_or_path);
    let mut lists = [
        &mut args.initial_peers,
        &mut args.host_maddrs,
        &mut args.announce_maddrs,
    ];
    let model = model_or_last(model, &mut lists).ok_or("give a model folder: sepal serve MODEL")?;
    if args
        .dht_prefix
        .as_deref()
        .is_some_and(|prefix| !is_prefix(prefix))
    {
        let prefix = args.dht_prefix.unwrap_or_default();
        return Err(format!(
            "--dht_prefix {prefix:?} must be short and hold neither a dot nor white space"
        ));
    }
    let (host_maddrs, announce_maddrs) = addresses(
        args.port,
        args.public_ip,
        args.host_maddrs,
        args.announce_maddrs,
    )?;
    let initial_peers = match (args.new_swarm, args.initial_peers) {
        (true, _) => Vec::new(),
        (false, peers) if peers.is_empty() => PUBLIC_INITIAL_PEERS.map(str::to_owned).to_vec(),
        (false, peers) => peers,
    };
    check_maddrs("--initial_peers", &initial_peers)?;
    let span = match (args.block_indices, args.num_blocks) {
        (Some(span), _) => SpanChoice::Fixed(span),
        (None, Some(count)) => SpanChoice::Count(count),
        (None, None) => SpanChoice::All,
    };
    let config = ServeConfig {
        instance: args.instance,
        runtime_dir: args.runtime_dir.unwrap_or_else(|| runtime_dir(env)),
        worker: WorkerConfig {
            threads: threads(args.threads, devices.len()),
            fault: args.inject_fault,
        },
        devices,
        netd: NetdConfig {
            dht_prefix: args.dht_prefix,
            host_maddrs,
            announce_maddrs,
            initial_peers,
            identity_path: args.identity_path,
            span,
            throughput: throughput(&args.throughput)?,
            public_name: args.public_name,
            update_period: args.update_period,
            expiration: args
                .expiration
                .unwrap_or((2 * args.update_period).max(Duration::from_secs(3))),
            inference_max_length: args.inference_max_length,
            attn_cache_tokens: args.attn_cache_tokens,
            max_batch_size: args.max_batch_size,
            max_alloc_timeout: args.max_alloc_timeout,
            request_timeout: args.request_timeout,
            session_timeout: args.session_timeout,
            step_timeout: args.step_timeout,
            startup_timeout: args.daemon_startup_timeout,
            arena_bytes: arena_bytes(args.arena_size)?,
        },
        prepare: PrepareConfig {
            model,
            dtype: dtype(&args.torch_dtype)?,
            quant_type: args
                .quant_type
                .parse()
                .map_err(|why| format!("--quant_type {}: {why}", args.quant_type))?,
            cache_dir: args.cache_dir.unwrap_or_else(|| cache_dir(env)),
        },
        restart: RestartConfig {
            backoff_min: Duration::from_millis(100),
            backoff_max: Duration::from_secs(30),
            max_restarts: args.max_restarts,
            window: args.restart_window,
            hang_timeout: args.hang_timeout,
            start_timeout: args.start_timeout,
        },
        log: args.log.resolve(env, DEFAULT_LOG),
        drain_timeout: args.drain_timeout,
        file_limit: args.increase_file_limit,
        end_with: args.end_with,
    };
    Ok((config, notes))
}

impl UnusedArgs {
    fn notes(&self) -> Vec<String> {
        let given = [
            (
                "num_handlers",
                self.num_handlers.is_some(),
                "one process answers all requests",
            ),
            (
                "prefetch_batches",
                self.prefetch_batches.is_some(),
                "workers read ahead by themselves",
            ),
            (
                "sender_threads",
                self.sender_threads.is_some(),
                "results are not copied between processes",
            ),
            (
                "min_batch_size",
                self.min_batch_size.is_some(),
                "whatever is ready is computed together",
            ),
            (
                "max_chunk_size_bytes",
                self.max_chunk_size_bytes.is_some(),
                "prefill is cut at fixed positions",
            ),
            (
                "max_disk_space",
                self.max_disk_space.is_some(),
                "nothing is downloaded",
            ),
            (
                "stats_report_interval",
                self.stats_report_interval.is_some(),
                "`sepal status` shows the counters",
            ),
            (
                "balance_quality",
                self.balance_quality.is_some(),
                "this version keeps the blocks it chose",
            ),
            (
                "mean_balance_check_period",
                self.mean_balance_check_period.is_some(),
                "this version keeps its blocks",
            ),
            (
                "skip_reachability_check",
                self.skip_reachability_check,
                "this version makes no such check",
            ),
            (
                "no_auto_relay",
                self.no_auto_relay,
                "this version uses no relays",
            ),
        ];
        let note = |(flag, _, why): &(&str, bool, &str)| format!("--{flag} has no effect: {why}");
        given
            .iter()
            .filter(|(_, given, _)| *given)
            .map(note)
            .collect()
    }
}

impl RefusedArgs {
    fn check(&self) -> Result<(), String> {
        let other = |value: &Option<String>, only: &str| {
            value
                .as_ref()
                .is_some_and(|v| !v.eq_ignore_ascii_case(only))
        };
        let hub = "this version serves model folders and downloads nothing; download the model and give its folder";
        let given = [
            (
                "config",
                self.config.is_some(),
                "this version reads no files with flags; give the flags themselves",
            ),
            ("token", self.token.is_some(), hub),
            ("use_auth_token", self.use_auth_token, hub),
            ("revision", self.revision.is_some(), hub),
            (
                "compression",
                other(&self.compression, "none"),
                "this version asks for no compression; give NONE",
            ),
            (
                "tensor_parallel_devices",
                self.tensor_parallel_devices.len() > 1,
                "this version does not split blocks among devices; list them with --device to split the span",
            ),
            (
                "adapters",
                !self.adapters.is_empty(),
                "this version serves no adapters; leave it out",
            ),
            (
                "custom_module_path",
                self.custom_module_path.is_some(),
                "sepal runs no Python; leave it out",
            ),
        ];
        match given.iter().find(|(_, given, _)| *given) {
            Some((flag, _, why)) => Err(format!("--{flag}: {why}")),
            None => Ok(()),
        }
    }
}

fn serving_devices(text: &str) -> Result<Vec<Device>, String> {
    let devices = devices(text).map_err(|why| format!("--device {text}: {why}"))?;
    if let Some(cuda) = devices
        .iter()
        .find(|device| matches!(device, Device::Cuda(_)))
    {
        return Err(format!(
            "--device {cuda}: this version serves on the processor only; give cpu"
        ));
    }
    if devices.len() > MAX_DEVICES {
        return Err(format!(
            "--device lists {} devices; give at most {MAX_DEVICES}",
            devices.len()
        ));
    }
    Ok(devices)
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

fn throughput(text: &str) -> Result<Throughput, String> {
    match text {
        "auto" | "eval" => Ok(Throughput::Measure),
        "dry_run" => Err(
            "--throughput dry_run: this version measures while it serves; give eval or a number"
                .into(),
        ),
        number => match number.parse::<f64>() {
            Ok(rps) if rps.is_finite() && rps > 0.0 => Ok(Throughput::Fixed(rps)),
            _ => Err(format!(
                "--throughput {number:?} is neither auto, eval nor a number above 0"
            )),
        },
    }
}

pub(super) fn dtype(text: &str) -> Result<Option<DType>, String> {
    match text {
        "auto" => Ok(None),
        "float16" => Err(
            "--torch_dtype float16: this version computes in float32 or bfloat16; give one of them"
                .into(),
        ),
        name => name
            .parse()
            .map(Some)
            .map_err(|error| format!("--torch_dtype: {error}")),
    }
}

/// At least what two of the smallest useful requests take.
fn arena_bytes(asked: u64) -> Result<u64, String> {
    const LEAST: u64 = 16 << 20;
    if asked < LEAST {
        Err(format!(
            "--arena_size {asked} is too small; give at least {LEAST}"
        ))
    } else {
        Ok(asked)
    }
}

fn threads(asked: Option<u32>, workers: usize) -> u32 {
    let cores = available_parallelism().map_or(1, usize::from);
    let share = u32::try_from(cores / workers.max(1)).unwrap_or(1).max(1);
    asked.filter(|threads| *threads > 0).unwrap_or(share)
}

fn cache_dir(env: Env<'_>) -> PathBuf {
    let given = |name| env(name).filter(|dir| !dir.is_empty()).map(PathBuf::from);
    given("SEPAL_CACHE")
        .or_else(|| given("PETALS_CACHE"))
        .unwrap_or_else(|| {
            given("HOME")
                .unwrap_or_else(|| PathBuf::from("/tmp"))
                .join(".cache/sepal")
        })
}
