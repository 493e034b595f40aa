//! Settings of a run, one part per role. These are finished values: flags and environment are read,
//! checked and filled in with defaults once, in `supervisor::cli`; nothing here means "decide
//! later" except what only the model can tell.

mod device;
mod files;
mod network;
pub mod values;
mod worker;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::block::Span;
pub use crate::dtype::QuantType;
use crate::sandbox::SandboxMode;
use crate::warpgroups::Warpgroups;
pub use device::{Device, UuidPrefix, processor, shown_uuid};
pub use files::{HubConfig, PrepareConfig, Secret, revision};
pub use network::{Compression, NetdConfig};
pub use worker::{FaultAction, FaultPlan, FaultPoint, KvMirror, WorkerConfig};

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
        match self {
            LogFormat::Terminal => "terminal",
            LogFormat::Text => "text",
            LogFormat::Json => "json",
        }
    }
}
