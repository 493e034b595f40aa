//! The short-lived role `prepare`: reads a model folder, checks it, converts what is not in the block dtype, and leaves a
//! [`Manifest`](crate::weights::manifest::Manifest) that workers map. One thread. It alone reads checkpoints, so that a malformed one ends a process that nobody
//! depends on. It never writes into the model folder.
//!
//! ```text
//! model name -> folder (locate), or the Hub (hub, disk_cache) -> config.json -> BlockSpec, ModelFacts
//!            -> checkpoint files (checkpoint, header) -> tensors (source) -> prepared blocks (store) -> manifest
//! ```

mod adapter;
mod checkpoint;
pub mod disk_cache;
mod error;
mod header;
mod hub;
mod inspect;
mod locate;
mod ready;
mod source;
mod store;
mod torch;

use std::time::Duration;

use ipc_channel::TryRecvError;
use shared::bootstrap::{Bootstrap, ControlEnds};
use shared::config::{Device, PrepareConfig, WorkerConfig};
use shared::control::{BoardSeat, FromPrepare, ToPrepare};
use shared::exit::ExitReason;
use shared::shm::board::{BoardWriter, Phase};
use tracing::{debug, error, info};

use crate::sizing::device_memory;
use crate::throughput::RateCache;

pub use error::PrepareError;
pub use inspect::Inspected;
pub use locate::{ModelFolder, default_dht_prefix};
pub use ready::Progress;

/// Longest time without progress: one tensor of the largest models (a few GB) from a slow disk.
const TENSOR_LIMIT: Duration = Duration::from_secs(300);

type Ends = ControlEnds<ToPrepare, FromPrepare>;

/// Runs the role until the model is ready, cannot be made ready, or the parent is gone.
pub fn run(bootstrap: Bootstrap) -> ExitReason {
    let ends = match bootstrap.connect::<ToPrepare, FromPrepare>() {
        Ok(ends) => ends,
        Err(failure) => {
            error!(%failure, "no control channel");
            return failure.exit_reason();
        }
    };
    match serve(&ends) {
        Ok(()) => ExitReason::Clean,
        Err(End::Parent) => ExitReason::ParentGone,
        Err(End::Failed(reason, message)) => {
            debug!(%reason, message, "failed");
            // The supervisor logs the sentence; without a supervisor nobody is left to read it.
            let _ = ends.sender.send(FromPrepare::Failed { reason, message });
            reason
        }
    }
}

/// Why the role ends before its work is done.
enum End {
    Parent,
    Failed(ExitReason, String),
}

impl From<PrepareError> for End {
    fn from(error: PrepareError) -> End {
        End::Failed(error.exit_reason(), error.to_string())
    }
}

fn serve(ends: &Ends) -> Result<(), End> {
    let Some(First {
        config,
        seat,
        devices,
        worker,
    }) = first(ends)?
    else {
        return Ok(());
    };
    let board = BoardWriter::open(&seat, ends.birth.generation)
        .map_err(|e| End::Failed(ExitReason::ProtocolMismatch, e.to_string()))?;
    board.enter(Phase::Preparing, TENSOR_LIMIT);
    let mut inspected = Inspected::new(&config)?;
    let facts = inspected.facts.clone();
    let memory = device_memory(&devices, worker.device_bytes, &inspected.spec);
    let memory = memory.map_err(|(ordinal, failure)| {
        let (reason, message) = crate::worker::unusable(ordinal, &failure);
        End::Failed(reason, message)
    })?;
    for one in &memory {
        let (free_bytes, work_bytes) = (one.free_bytes, one.work_bytes);
        info!(device = %one.device, free_bytes, work_bytes, "device memory");
    }
    if !memory.is_empty() {
        send(ends, FromPrepare::Devices(memory))?;
    }
    info!(model = facts.name, model_type = facts.model_type, dtype = %facts.dtype, blocks = facts.num_blocks, "inspected");
    if let Some(folder) = worker.rates_dir.as_ref().filter(|_| !worker.measure_anew) {
        let cache = RateCache::new(folder, Duration::ZERO);
        if let Some(kept) = cache.kept(&facts, &devices, &worker) {
            send(ends, FromPrepare::Kept(kept))?;
        }
    }
    send(ends, FromPrepare::Inspected(facts))?;
    board.enter(Phase::Idle, Duration::ZERO);
    let (span, path) = match ends.receiver.recv() {
        Ok(ToPrepare::Span { span, manifest }) => (span, manifest),
        Ok(ToPrepare::Drain) => return Ok(()),
        Ok(ToPrepare::Init { .. }) => return Err(out_of_order("Span")),
        Err(_) => return Err(End::Parent),
    };
    board.enter(Phase::Preparing, TENSOR_LIMIT);
    let made = inspected.make_ready(span, |progress| {
        board.progress();
        if let Progress::Block { done, total } = progress {
            let _ = ends.sender.send(FromPrepare::Progress { done, total });
        }
        match ends.receiver.try_recv() {
            Err(TryRecvError::Empty) => Ok(()),
            _ => Err(PrepareError::Stopped),
        }
    });
    let manifest = match made {
        Ok(manifest) => manifest,
        Err(PrepareError::Stopped) => return Ok(()),
        Err(failure) => return Err(failure.into()),
    };
    manifest
        .write(&path)
        .map_err(|e| End::Failed(ExitReason::Failed, with_source(&e)))?;
    info!(%span, manifest = %path.display(), "prepared");
    send(ends, FromPrepare::Prepared)
}

/// What the supervisor says first.
struct First {
    config: PrepareConfig,
    seat: BoardSeat,
    devices: Vec<Device>,
    worker: WorkerConfig,
}

fn first(ends: &Ends) -> Result<Option<First>, End> {
    match ends.receiver.recv() {
        Ok(ToPrepare::Init {
            config,
            board: seat,
            devices,
            worker,
        }) => Ok(Some(First {
            config,
            seat,
            devices,
            worker,
        })),
        Ok(ToPrepare::Drain) => Ok(None),
        Ok(ToPrepare::Span { .. }) => Err(out_of_order("Init")),
        Err(_) => Err(End::Parent),
    }
}

fn out_of_order(expected: &str) -> End {
    End::Failed(
        ExitReason::ProtocolMismatch,
        format!("the supervisor sent another message where {expected} is due"),
    )
}

fn send(ends: &Ends, message: FromPrepare) -> Result<(), End> {
    ends.sender.send(message).map_err(|_| End::Parent)
}

/// An error and its causes in one line.
pub(crate) fn with_source(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

#[cfg(test)]
mod tests;
