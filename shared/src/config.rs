//! Settings of a run, one part per role. A field with a flag is that flag: its documentation is the help, and
//! its value is read and checked by clap. What several flags or the environment decide is filled in once, in
//! the command. Names in JSON are those of the flags, by which SIGHUP tells what changed.

mod device;
mod files;
mod network;
pub mod values;
mod worker;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::block::Span;
pub use crate::dtype::{QuantChoice, QuantType};
use crate::sandbox::SandboxMode;
use crate::warpgroups::Warpgroups;
pub use device::{Device, UuidPrefix, processor, shown_uuid};
pub use files::{HubConfig, PrepareConfig, Secret, revision};
pub use network::{Compression, NetdConfig};
use values::{metrics_addr, pause, seconds, size_bytes};
pub use worker::{FaultAction, FaultPlan, FaultPoint, KvMirror, WorkerConfig};

/// Everything `sepal serve` was asked to do. Fields that several flags or the machine decide have no flag
/// of their own.
#[derive(Clone, Debug, Serialize, Deserialize, Args)]
#[command(rename_all = "snake_case", next_help_heading = "Supervision")]
pub struct ServeConfig {
    /// Name of this instance [default: the first free number]
    #[arg(long, value_name = "NAME")]
    pub instance: Option<String>,
    /// Folder of the instances [default: $XDG_RUNTIME_DIR/sepal or /tmp/sepal-UID]
    #[arg(long, value_name = "DIR", required = false)]
    pub runtime_dir: PathBuf,
    /// Devices, one worker each.
    #[arg(skip)]
    #[serde(rename = "device")]
    pub devices: Vec<Device>,
    /// How many devices in a row serve their part of the span together, as a group
    /// (`--tensor_parallel_size`); divides the number of devices.
    #[arg(skip)]
    #[serde(rename = "tensor_parallel_size")]
    pub world_size: usize,
    /// Positions in `devices` of CUDA devices that were named by UUID, each with its first digits;
    /// their numbers are found out at the start.
    #[arg(skip)]
    pub uuids: Vec<(usize, UuidPrefix)>,
    /// What was asked for beside no device. The devices are then chosen at the start, and `devices`
    /// holds what serves where there is no other.
    #[arg(skip)]
    pub automatic: Option<AutomaticDevices>,
    /// What is known of the warpgroups of the CUDA devices among `devices`; found out at the start.
    #[arg(skip)]
    pub warpgroups: Vec<(Device, Warpgroups)>,
    /// Seconds for the sample of warpgroups that a process takes of a CUDA device, once for each
    /// driver and build
    #[arg(long, value_name = "SECONDS", hide = true, default_value = "30", value_parser = seconds)]
    pub sample_timeout: Duration,
    #[command(flatten)]
    pub netd: NetdConfig,
    /// Settings common to all workers.
    #[command(flatten)]
    pub worker: WorkerConfig,
    /// What prepare is to make ready.
    #[command(flatten)]
    pub prepare: PrepareConfig,
    /// When children are restarted.
    #[command(flatten)]
    pub restart: RestartConfig,
    /// How every process logs.
    #[arg(skip)]
    pub log: LogConfig,
    /// Confine the processes that meet peers and models to what their work needs, by Landlock and
    /// seccomp: off, on (as far as the kernel can), or require (else do not start)
    #[arg(long, value_name = "off|on|require", default_value = "on")]
    pub sandbox: SandboxMode,
    /// Time for running steps to finish after SIGTERM or Ctrl-C, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub drain_timeout: Duration,
    /// Maximum memory for blocks, KV cache and processes together. It decides how many blocks fit,
    /// and whether a move loads new blocks beside the old ones [default: the free memory]
    #[arg(id = "max_memory", long = "max_memory", value_name = "SIZE", value_parser = size_bytes, help_heading = "Limits")]
    #[serde(rename = "max_memory")]
    pub max_memory_bytes: Option<u64>,
    /// Limit of open files for each process; 0 does not change the limit
    #[arg(
        id = "increase_file_limit",
        long = "increase_file_limit",
        value_name = "N",
        default_value_t = 4096,
        help_heading = "Limits"
    )]
    #[serde(rename = "increase_file_limit")]
    pub file_limit: u64,
    /// Serve metrics for Prometheus at /metrics, with /livez and /readyz, at this address; a port
    /// alone is one of 127.0.0.1 [default: none]
    #[arg(long, value_name = "ADDR", value_parser = metrics_addr)]
    pub metrics: Option<SocketAddr>,
    /// Show the swarm in a browser at this address: its servers, what is missing, and a chat; a port alone
    /// is one of 127.0.0.1. The chat holds embeddings and head of the model in memory [default: none]
    #[arg(long, value_name = "ADDR", value_parser = metrics_addr)]
    pub web: Option<SocketAddr>,
    /// Processor (cpu or cpu:N) that serves the blocks of a device that keeps failing, as many as fit
    /// in memory, until the device passes its self-test again [default: none, its blocks are OFFLINE]
    #[arg(id = "fallback_device", long = "fallback_device", value_name = "DEVICE", value_parser = processor)]
    #[serde(rename = "fallback_device")]
    pub fallback: Option<Device>,
    /// Print what happens to the server on standard output, as lines of JSON
    #[arg(long)]
    pub events: bool,
    /// Drain when the process that started this one, which has this id, ends
    // It must have started the run from its main thread; another parent means that it has ended already.
    #[arg(long, value_name = "PID", hide = true)]
    pub end_with: Option<u32>,
}

/// Settings whose defaults depend on the devices, as they were asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AutomaticDevices {
    /// Compute threads of each worker.
    pub threads: Option<u32>,
}

/// Which blocks to serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SpanChoice {
    /// Exactly these (`--block_indices`).
    Fixed(Span),
    /// This many, where the swarm needs them most (`--num_blocks`), clipped to the model.
    Count(u32),
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

impl std::str::FromStr for Throughput {
    type Err = String;

    fn from_str(text: &str) -> Result<Throughput, String> {
        match text {
            "auto" => Ok(Throughput::Measure),
            "eval" => Ok(Throughput::Anew),
            "dry_run" => Ok(Throughput::DryRun),
            number => match number.parse::<f64>() {
                Ok(rps) if rps.is_finite() && rps > 0.0 => Ok(Throughput::Fixed(rps)),
                _ => Err("expected auto, eval, dry_run or a positive number".to_owned()),
            },
        }
    }
}

/// When children are restarted, and how often is too often.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
#[command(rename_all = "snake_case", next_help_heading = "Supervision")]
pub struct RestartConfig {
    /// First pause after a death; the first restart of a child that had served well is immediate.
    #[arg(skip = Duration::from_millis(100))]
    pub backoff_min: Duration,
    /// Longest pause.
    #[arg(skip = Duration::from_secs(30))]
    pub backoff_max: Duration,
    /// Maximum restarts of one process within --restart_window
    // More end the run, or put the device aside while others serve. What kills a worker from outside does
    // not count.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub max_restarts: u32,
    /// Window of --max_restarts, in seconds
    #[arg(id = "restart_window", long = "restart_window", value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    #[serde(rename = "restart_window")]
    pub window: Duration,
    /// Time after which a device that was put aside (--max_restarts) is tried again, in seconds; doubles
    /// with each failure, up to an hour; 0 = never
    // The path has clap take 0 for a value.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = pause_or_never)]
    pub retry_after: std::option::Option<Duration>,
    /// Time without a heartbeat after which a process is killed and restarted, in seconds
    // Whether it has work or not.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub hang_timeout: Duration,
    /// Time for a process to become ready (a worker loads its blocks), in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1800", value_parser = seconds)]
    pub start_timeout: Duration,
}

fn pause_or_never(text: &str) -> Result<Option<Duration>, String> {
    pause(text).map(|pause| Some(pause).filter(|pause| !pause.is_zero()))
}

/// How a process logs to standard error.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogConfig {
    /// Filter in the syntax of `tracing_subscriber::EnvFilter`, for example `info` or
    /// `info,netd=debug`.
    #[serde(rename = "log")]
    pub filter: String,
    /// Lines for people or for machines.
    #[serde(rename = "log_format")]
    pub format: LogFormat,
}

/// Form of a log line.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, strum::IntoStaticStr,
)]
#[strum(serialize_all = "lowercase")]
pub enum LogFormat {
    /// For a person at a terminal: warnings and errors without time stamps, below which the
    /// supervisor draws its progress.
    Terminal,
    /// One line of readable text per event, with its time and process; coloured on a terminal.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl std::str::FromStr for LogFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<LogFormat, String> {
        let named = LogFormat::ALL.into_iter().find(|format| format.name() == name);
        named.ok_or_else(|| "expected terminal, text or json".to_owned())
    }
}

impl LogFormat {
    /// All formats.
    pub const ALL: [LogFormat; 3] = [LogFormat::Terminal, LogFormat::Text, LogFormat::Json];

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        self.into()
    }
}
