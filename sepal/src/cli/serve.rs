//! `sepal serve`: the flags of Petals' `run_server` (`petals/cli/run_server.py`) and our own. A
//! flag of `run_server` that tunes machinery that we do not have is accepted and noted.
//!
//! | module | flags about |
//! | --- | --- |
//! | this one | the model, its blocks, devices |
//! | [`devices`] | devices and their groups |
//! | [`network`] | peers and announcements |
//! | [`limits`] | what clients may take |
//! | [`supervision`] | processes |
//! | [`petals`] | what changes nothing here |

mod devices;
mod limits;
mod network;
mod petals;
mod supervision;

use std::path::PathBuf;

use clap::Args;
use shared::block::{Span, is_prefix};
use shared::config::{
    AutomaticDevices, Device, HubConfig, KvMirror, NetdConfig, PrepareConfig, QuantType,
    ServeConfig, SpanChoice, Throughput, WorkerConfig,
};
use shared::dtype::{DType, dtype_or_auto};
use shared::processor::Processor;
use shared::public_swarm;
use supervisor::placement::threads;
use supervisor::sizing;

use super::log::LogArgs;
use super::{Env, hub};
use devices::{Devices, check_nodes};

pub use petals::{NO_EFFECT, notes};

/// Most of the KV cache for one client of the public swarm: its clients are strangers to each other.
const PUBLIC_KV_SHARE: f64 = 0.5;

#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
pub struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    hub: HubConfig,
    #[command(flatten)]
    network: network::NetworkArgs,
    #[command(flatten)]
    limits: limits::LimitArgs,
    #[command(flatten)]
    supervision: supervision::SupervisionArgs,
    #[command(flatten)]
    log: LogArgs,
    #[command(flatten)]
    unused: petals::UnusedArgs,
}

/// What to serve, on what.
#[derive(Debug, Args)]
#[command(rename_all = "snake_case")]
struct ModelArgs {
    /// Model folder in Hugging Face layout, or a repository of the Hub such as bigscience/bloom;
    /// required
    model: Option<String>,
    /// File with settings: TOML, or lines name: value [default: config.yml, if there is one]
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The same as MODEL
    #[arg(long, value_name = "MODEL", conflicts_with = "model")]
    converted_model_name_or_path: Option<String>,
    /// Serve this many consecutive blocks, chosen by what the swarm lacks [default: as many as fit
    /// in memory]
    #[arg(long, value_name = "N", conflicts_with = "block_indices", value_parser = clap::value_parser!(u32).range(1..))]
    num_blocks: Option<u32>,
    /// Serve exactly these blocks and never move
    #[arg(long, value_name = "START:END")]
    block_indices: Option<Span>,
    /// Devices, one worker each: cpu, cpu:N (a NUMA node), cuda:N in the order of the PCI bus,
    /// cuda:GPU-UUID or the beginning of a UUID (nvidia-smi -L), or a list such as cuda:0,cuda:1
    /// [default: every CUDA device that passes `sepal selftest --quick`, else one cpu:N for
    /// each NUMA node, or cpu where there is one]
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,
    /// Devices of one kind that share every block, as one group (tensor parallelism), such as
    /// cuda:0 cuda:1 or cpu:0 cpu:1
    #[arg(long, num_args = 1.., value_name = "DEVICE", conflicts_with = "device")]
    tensor_parallel_devices: Vec<String>,
    /// Devices of a group that shares every block: cuts the devices of --device into groups, each of
    /// which serves a part of the blocks [default: 1, each device serves blocks of its own]
    #[arg(long, value_name = "N", conflicts_with = "tensor_parallel_devices", value_parser = clap::value_parser!(u32).range(1..=15))]
    tensor_parallel_size: Option<u32>,
    /// Type of hidden states and unquantized weights: auto, float32, bfloat16 or float16; auto is
    /// the type of the checkpoint, bfloat16 if that is float32
    // The path has clap take `auto` for a value.
    #[arg(long, value_name = "TYPE", default_value = "auto", value_parser = dtype_or_auto)]
    torch_dtype: std::option::Option<DType>,
    /// How matrices are stored: none, int8 or nf4 [default: nf4 on CUDA devices, none on the CPU]
    #[arg(long, value_name = "TYPE")]
    quant_type: Option<String>,
    /// Folders of LoRA adapters in PEFT layout (adapter_config.json and
    /// adapter_model.safetensors); clients choose an adapter by the name given here
    #[arg(long, num_args = 0.., value_name = "ADAPTER")]
    adapters: Vec<String>,
    /// Compute threads of each worker [default: the cores divided by the workers; hyper-threads of a core
    /// count as one]
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// CPUs on which workers of the processor compute, such as 0-7,16; as many threads as cores stay on
    /// one core each [default: all but those much slower than others]
    #[arg(long, value_name = "LIST", allow_hyphen_values = true)]
    cpus: Option<String>,
    /// Requests per second to announce: a number; auto measures once per machine, model and build;
    /// eval measures again; dry_run measures again, prints the result and exits
    #[arg(long, value_name = "RPS", default_value = "auto", allow_negative_numbers = true)]
    throughput: String,
    /// Folder for prepared models [env: SEPAL_CACHE, PETALS_CACHE] [default: ~/.cache/sepal]
    #[arg(long, value_name = "DIR", required = false)]
    cache_dir: PathBuf,
    /// Name to show on the swarm's leader board
    #[arg(long, value_name = "TEXT")]
    public_name: Option<String>,
    /// Prefix of the blocks' names in the DHT [default: derived from the model's name]
    #[arg(long, value_name = "PREFIX")]
    dht_prefix: Option<String>,
}

/// Turns flags and environment into settings; `default_log` is what is logged unless they say.
pub fn resolve(args: ServeArgs, env: Env<'_>, default_log: &str) -> Result<ServeConfig, String> {
    resolve_for(args, env, default_log, None)
}

/// The same, with `model` if none was named.
pub fn resolve_for(
    mut args: ServeArgs,
    env: Env<'_>,
    default_log: &str,
    model: Option<String>,
) -> Result<ServeConfig, String> {
    let Devices { named, uuids, world_size } = args.model.devices()?;
    let automatic = match named {
        Some(_) => None,
        None => {
            Some(AutomaticDevices { threads: args.model.threads, quant_type: args.quant_type()? })
        }
    };
    let devices = named.unwrap_or_else(|| vec![Device::Cpu]);
    let cpus = devices::cpus(args.model.cpus.as_deref())?;
    let processor = Processor::of_worker(&cpus);
    check_nodes(&devices, &processor)?;
    hub::complete(&mut args.hub, env)?;
    let prepare = args.prepare(&devices, model)?;
    let asked_for_peers = !args.network.initial_peers.is_empty();
    let mut netd = args.netd()?;
    // The one folder of the cache that netd and workers write to.
    let rates_dir = prepare.cache_dir.join("rates");
    netd.rates_dir = Some(rates_dir.clone());
    if netd.throughput == Throughput::DryRun {
        // Nobody is to see a server that ends in a moment. Peers that were named help to measure
        // the network.
        netd.host_maddrs = vec!["/ip4/127.0.0.1/tcp/0".to_owned()];
        if !asked_for_peers {
            netd.initial_peers = Vec::new();
        }
    }
    Ok(ServeConfig {
        worker: WorkerConfig {
            threads: threads(args.model.threads, &devices, &processor),
            cpus,
            fault: args.supervision.inject_fault,
            rates_dir: Some(rates_dir),
            measure_anew: matches!(netd.throughput, Throughput::Anew | Throughput::DryRun),
            kv_mirror: kv_mirror(&args.limits.kv_mirror)?,
            device_bytes: args.limits.device_memory,
        },
        devices,
        world_size,
        uuids,
        automatic,
        warpgroups: Vec::new(),
        sample_timeout: args.supervision.sample_timeout,
        prepare,
        netd,
        restart: args.supervision.restart(),
        drain_timeout: args.supervision.drain_timeout,
        max_memory_bytes: args.limits.max_memory,
        file_limit: args.limits.increase_file_limit,
        metrics: args.supervision.metrics,
        web: args.supervision.web,
        fallback: args.supervision.fallback_device,
        events: args.supervision.events,
        end_with: args.supervision.end_with,
        instance: args.supervision.instance,
        runtime_dir: args.supervision.runtime_dir,
        log: args.log.resolve(env, default_log),
        sandbox: args.supervision.sandbox,
    })
}

impl ModelArgs {
    fn devices(&self) -> Result<Devices, String> {
        let listed = &self.tensor_parallel_devices;
        Devices::read(self.device.as_deref(), listed, self.tensor_parallel_size)
    }
}

impl ServeArgs {
    /// How matrices are to be stored, if that was said.
    fn quant_type(&self) -> Result<Option<QuantType>, String> {
        let parse = |name: &String| {
            name.parse().map_err(|why| format!("invalid --quant_type {name}: {why}"))
        };
        self.model.quant_type.as_ref().map(parse).transpose()
    }

    fn prepare(
        &mut self,
        devices: &[Device],
        otherwise: Option<String>,
    ) -> Result<PrepareConfig, String> {
        let named = self.quant_type()?;
        let quant_type = named.unwrap_or(Device::default_quant_type(devices));
        let model = &mut self.model;
        let name = model.model.take().or(model.converted_model_name_or_path.take());
        let name = name.or(otherwise).ok_or(
            "no model given: name a repository of the Hub or a folder, as in sepal serve MODEL",
        )?;
        Ok(PrepareConfig {
            model: name,
            dtype: model.torch_dtype,
            quant_type,
            is_quant_named: named.is_some(),
            adapters: adapters(std::mem::take(&mut model.adapters))?,
            cache_dir: std::mem::take(&mut model.cache_dir),
            hub: std::mem::take(&mut self.hub),
        })
    }

    fn netd(&mut self) -> Result<NetdConfig, String> {
        let network::Addresses { host_maddrs, announce_maddrs, initial_peers } =
            self.network.addresses()?;
        let (model, network, limits) = (&mut self.model, &mut self.network, &self.limits);
        let monitor = network.monitor(&initial_peers);
        let is_public = public_swarm::is_entered_through(&initial_peers);
        Ok(NetdConfig {
            dht_prefix: checked_prefix(model.dht_prefix.take())?,
            host_maddrs,
            announce_maddrs,
            initial_peers,
            identity_path: network.identity_path.take(),
            use_auto_relay: !network.no_auto_relay,
            span: span(model.block_indices, model.num_blocks),
            throughput: throughput(&model.throughput)?,
            link_bits_per_s: network.network_mbps,
            max_upload_bits_per_s: network.max_upload_mbps,
            relay_bits_per_s: network.relay_mbps,
            request_memory: limits
                .request_memory
                .unwrap_or_else(|| request_memory(limits.max_memory)),
            network_test: network.network_test()?,
            rates_dir: None,
            monitor,
            use_upnp: !network.no_upnp,
            // Strangers of the public swarm have no business on private nets.
            dials_private_nets: network.dial_private_nets.unwrap_or(!is_public),
            stats_report_interval: self.supervision.stats_report_interval,
            public_name: model.public_name.take(),
            compression: network.compression,
            update_period: network.update_period,
            expiration: network.expiration(),
            balance_quality: network.balance_quality,
            mean_balance_check_period: network.mean_balance_check_period,
            inference_max_length: limits.inference_max_length,
            attn_cache_tokens: limits.attn_cache_tokens,
            max_kv_share: limits.max_kv_share.unwrap_or(if is_public {
                PUBLIC_KV_SHARE
            } else {
                1.0
            }),
            max_batch_size: limits.max_batch_size,
            max_alloc_timeout: limits.max_alloc_timeout,
            request_timeout: limits.request_timeout,
            session_timeout: limits.session_timeout,
            step_timeout: limits.step_timeout,
            session_grace: limits.session_grace,
            startup_timeout: network.daemon_startup_timeout,
            arena_bytes: arena_bytes(limits.arena_size)?,
        })
    }
}

/// Memory for requests where nothing is said: a part of what may be used.
fn request_memory(max_memory: Option<u64>) -> u64 {
    let free = sizing::within(sizing::available_bytes(), max_memory).unwrap_or(0);
    (free / 8).clamp(256 << 20, 8 << 30)
}

fn checked_prefix(prefix: Option<String>) -> Result<Option<String>, String> {
    match prefix {
        Some(bad) if !is_prefix(&bad) => Err(format!(
            "invalid --dht_prefix {bad:?}: expected a short name without dots and white space"
        )),
        other => Ok(other),
    }
}

fn span(block_indices: Option<Span>, num_blocks: Option<u32>) -> SpanChoice {
    match (block_indices, num_blocks) {
        (Some(span), _) => SpanChoice::Fixed(span),
        (None, Some(count)) => SpanChoice::Count(count),
        (None, None) => SpanChoice::All,
    }
}

fn throughput(text: &str) -> Result<Throughput, String> {
    match text {
        "auto" => Ok(Throughput::Measure),
        "eval" => Ok(Throughput::Anew),
        "dry_run" => Ok(Throughput::DryRun),
        number => match number.parse::<f64>() {
            Ok(rps) if rps.is_finite() && rps > 0.0 => Ok(Throughput::Fixed(rps)),
            _ => Err(format!(
                "invalid --throughput {number:?}: expected auto, eval, dry_run or a positive number"
            )),
        },
    }
}

/// Most adapters of one instance: their names travel in every record of the swarm.
const MAX_ADAPTERS: usize = 64;

/// Longest name of an adapter: that of a path.
const MAX_ADAPTER_BYTES: usize = 4096;

fn adapters(names: Vec<String>) -> Result<Vec<String>, String> {
    if names.len() > MAX_ADAPTERS {
        return Err(format!(
            "--adapters lists {} adapters: expected at most {MAX_ADAPTERS}",
            names.len()
        ));
    }
    for (index, name) in names.iter().enumerate() {
        if name.is_empty() || name.len() > MAX_ADAPTER_BYTES {
            return Err(format!("invalid --adapters {name:?}: expected the path of a folder"));
        }
        if names[..index].contains(name) {
            return Err(format!("invalid --adapters {name:?}: listed twice"));
        }
    }
    Ok(names)
}

fn kv_mirror(text: &str) -> Result<KvMirror, String> {
    let parsed = text.parse::<KvMirror>();
    parsed.map_err(|why| format!("invalid --kv_mirror {text:?}: {why}"))
}

/// At least what two of the smallest useful requests take.
fn arena_bytes(asked: u64) -> Result<u64, String> {
    const LEAST: u64 = 16 << 20;
    if asked < LEAST {
        Err(format!("invalid --arena_size {asked}: expected at least {LEAST} bytes"))
    } else {
        Ok(asked)
    }
}
