//! What workers count, in the form that `sepal status --json` has had from its beginning.

use serde::{Deserialize, Serialize};
use shared::figures::server::{BATCH_BOUNDS, DeviceFigures, WorkFigures, WorkerFigures};

/// Jobs of one kind that a worker answered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkReport {
    pub kind: String,
    #[serde(flatten)]
    pub counts: WorkFigures,
}

/// Units of decode steps of about one size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchReport {
    /// Most sequences of such a unit; `None` = more than those before.
    pub up_to: Option<u64>,
    pub units: u64,
}

/// What a worker computed, by kind, of those kinds that there were.
pub(super) fn work(worker: &WorkerFigures) -> Vec<WorkReport> {
    let kinds = worker.kinds.iter().filter(|(_, counts)| counts.jobs > 0);
    kinds
        .map(|(kind, of)| WorkReport { kind: kind.name().to_owned(), counts: of.clone() })
        .collect()
}

/// The sizes of its decode units; none before the first.
pub(super) fn batches(worker: &WorkerFigures) -> Vec<BatchReport> {
    let Some(batches) = worker.batches.filter(|batches| batches.all_units() > 0) else {
        return Vec::new();
    };
    let bounds = BATCH_BOUNDS.into_iter().map(Some).chain([None]);
    bounds.zip(batches.units).map(|(up_to, units)| BatchReport { up_to, units }).collect()
}

/// How its device is, if anything is known.
pub(super) fn device(worker: &WorkerFigures) -> Option<DeviceFigures> {
    Some(worker.device.clone()).filter(|device| *device != DeviceFigures::default())
}
