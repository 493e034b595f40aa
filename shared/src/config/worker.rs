//! Settings of workers, and faults that tests have them inflict on themselves.

use std::path::PathBuf;

use clap::Args;
use serde::{Deserialize, Serialize};

use super::values::size_bytes;

/// Settings common to all workers.
#[derive(Clone, Debug, Default, Serialize, Deserialize, Args)]
#[command(rename_all = "snake_case", next_help_heading = "Limits")]
pub struct WorkerConfig {
    /// Compute threads of a CPU worker; 0 = one per core.
    #[arg(skip)]
    pub threads: u32,
    /// CPUs on which workers of the processor may run (`--cpus`); none = all that are of use.
    #[arg(skip)]
    pub cpus: Vec<u32>,
    /// A fault that each worker inflicts on itself: ACTION@POINT#JOB[xTIMES]
    #[allow(rustdoc::broken_intra_doc_links)]
    #[arg(
        id = "inject_fault",
        long = "inject_fault",
        value_name = "FAULT",
        hide = true,
        help_heading = "Supervision"
    )]
    #[serde(rename = "inject_fault")]
    pub fault: Option<FaultPlan>,
    /// Folder in which measured rates are kept; `None` keeps none.
    #[arg(skip)]
    pub rates_dir: Option<PathBuf>,
    /// Whether to measure although rates are kept.
    #[arg(skip)]
    pub measure_anew: bool,
    /// Mirror the KV cache of a GPU in host memory, so that sessions survive a crash of its worker:
    /// on, off, or auto (when it fits)
    #[arg(long, value_name = "on|off|auto", default_value = "auto")]
    pub kv_mirror: KvMirror,
    /// Maximum memory that each worker takes of its GPU [default: the free memory]
    #[arg(id = "device_memory", long = "device_memory", value_name = "SIZE", value_parser = size_bytes)]
    #[serde(rename = "device_memory")]
    pub device_bytes: Option<u64>,
}

/// When KV pages of a device are mirrored in host memory, from where the next worker takes them
/// (`--kv_mirror`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, strum::EnumString)]
#[strum(serialize_all = "lowercase", parse_err_ty = String, parse_err_fn = expected_kv_mirrors)]
pub enum KvMirror {
    /// Always; a start without the memory for it fails.
    On,
    /// Never: a worker's death ends the sessions that it had.
    Off,
    /// When the host's memory allows.
    #[default]
    Auto,
}

fn expected_kv_mirrors(_: &str) -> String {
    "expected on, off or auto".to_owned()
}

/// A fault that a worker inflicts on itself at a point of a job, to test recovery. Armed in the
/// first `times` generations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultPlan {
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

impl std::str::FromStr for FaultPlan {
    type Err = String;

    /// `ACTION@POINT#JOB[xTIMES][rRANK]`, for example `kill@block:2#5x3`.
    fn from_str(text: &str) -> Result<FaultPlan, String> {
        let form = || {
            "expected ACTION@POINT#JOB[xTIMES][rRANK] with ACTION kill, abort, hang or (at completion) repeat and POINT start, taken, copies, block:N, \
             output or completion, for example kill@block:2#5x3"
                .to_owned()
        };
        let plan = || {
            let (action, rest) = text.split_once('@')?;
            let (point, rest) = rest.split_once('#')?;
            let (rest, rank) = match rest.split_once('r') {
                Some((rest, rank)) => (rest, Some(rank.parse().ok()?)),
                None => (rest, None),
            };
            let (job, times) = rest.split_once('x').unwrap_or((rest, "1"));
            let action = match action {
                "kill" => FaultAction::Kill,
                "abort" => FaultAction::Abort,
                "hang" => FaultAction::Hang,
                "repeat" => FaultAction::Repeat,
                _ => return None,
            };
            let point = match point {
                "start" => FaultPoint::Start,
                "taken" => FaultPoint::Taken,
                "copies" => FaultPoint::Copies,
                "output" => FaultPoint::Output,
                "completion" => FaultPoint::Completion,
                block => FaultPoint::Block(block.strip_prefix("block:")?.parse().ok()?),
            };
            if action == FaultAction::Repeat && point != FaultPoint::Completion {
                return None;
            }
            let (job, times) = (job.parse().ok()?, times.parse().ok()?);
            Some(FaultPlan { action, point, job, times, rank })
        };
        plan().ok_or_else(form)
    }
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
