//! Figures that outlive netd: what workers count on the board, and what the supervisor does.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::page::{self, Buckets, LabelPair, Sample, Samples};
use crate::ids::WorkerId;
use crate::job::WorkKind;

/// Buckets of the histogram of rows in a decode unit.
pub const BATCH_BUCKETS: usize = 8;

/// Largest number of rows in each bucket of decode units but the last.
pub const BATCH_BOUNDS: [u64; BATCH_BUCKETS - 1] = [1, 2, 4, 8, 16, 32, 64];

page::figures! {
    /// What supervisor and workers show on the board.
    pub struct ServerFigures {
        /// When this server was started, since 1970.
        pub started_unix_s: u64 => Gauge("sepal_start_time", "seconds"),
        /// The build of this server; always 1.
        pub build: bool => Gauge("sepal_build_info"; version = env!("CARGO_PKG_VERSION")),
        /// Processes that were started again.
        pub restarts: Vec<RestartCount> => Counter("sepal_restarts"),
        /// Each worker that has a seat.
        pub workers: BTreeMap<WorkerId, WorkerFigures> => figures,
    }
}

page::figures! {
    /// What a worker is and did since it was started.
    pub struct WorkerFigures {
        /// 1 for a worker that serves.
        pub ready: bool => Gauge("sepal_worker_ready"),
        /// Jobs that it answered.
        pub kinds: BTreeMap<WorkKind, WorkFigures> => figures,
        /// Sequences in each unit of decode steps that a worker computed together.
        pub batches: Option<Batches> => Histogram("sepal_worker_batch_rows"),
        /// Its device, where that is known.
        pub device: DeviceFigures => figures,
    }
}

impl WorkerFigures {
    /// Jobs of all kinds together.
    pub fn all(&self) -> WorkFigures {
        self.kinds.values().fold(WorkFigures::default(), |sum, kind| WorkFigures {
            jobs: sum.jobs.saturating_add(kind.jobs),
            tokens: sum.tokens.saturating_add(kind.tokens),
            queued_us: Micros(sum.queued_us.0.saturating_add(kind.queued_us.0)),
            computed_us: Micros(sum.computed_us.0.saturating_add(kind.computed_us.0)),
        })
    }
}

page::figures! {
    /// Jobs of one kind that a worker has answered.
    pub struct WorkFigures {
        /// Jobs that a worker answered since it was started.
        pub jobs: u64 => Counter("sepal_worker_jobs"),
        /// Tokens in these jobs, all sequences.
        pub tokens: u64 => Counter("sepal_worker_tokens"),
        /// Time that these jobs waited in the worker, each counted by itself.
        pub queued_us: Micros => Counter("sepal_worker_queue", "seconds"),
        /// Time that these jobs were computed, each counted by itself.
        pub computed_us: Micros => Counter("sepal_worker_compute", "seconds"),
    }
}

page::figures! {
    /// How the device of a worker is, where NVML tells.
    pub struct DeviceFigures {
        /// Memory of a worker's device that is in use, by any process.
        pub memory_used: Option<u64> => Gauge("sepal_device_memory_used", "bytes"),
        /// Memory of a worker's device.
        pub memory_total: Option<u64> => Gauge("sepal_device_memory", "bytes"),
        /// Temperature of a worker's device.
        pub celsius: Option<u32> => Gauge("sepal_device_temperature", "celsius"),
        /// Power draw of a worker's device.
        pub watts: Option<f64> => Gauge("sepal_device_power", "watts"),
    }
}

/// Restarts of one kind of process for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartCount {
    /// Which kind of process.
    pub role: String,
    pub reason: String,
    pub count: u64,
}

impl Samples for Vec<RestartCount> {
    fn samples(&self, labels: &mut Vec<LabelPair>, samples: &mut Vec<Sample>) {
        for of in self {
            labels.extend([("role", of.role.clone()), ("reason", of.reason.clone())]);
            of.count.samples(labels, samples);
            labels.truncate(labels.len() - 2);
        }
    }
}

/// Decode units of a worker by their rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Batches {
    /// One bucket for each of [`BATCH_BOUNDS`], and one for more.
    pub units: [u64; BATCH_BUCKETS],
    /// Rows of all units.
    pub rows: u64,
}

impl Batches {
    pub fn all_units(&self) -> u64 {
        self.units.iter().fold(0, |sum, units| sum.saturating_add(*units))
    }
}

impl Samples for Batches {
    fn samples(&self, labels: &mut Vec<LabelPair>, samples: &mut Vec<Sample>) {
        let bounds = BATCH_BOUNDS.iter().map(|bound| *bound as f64).chain([f64::INFINITY]);
        let buckets = bounds.zip(self.units).collect();
        Buckets { sum: self.rows as f64, buckets }.samples(labels, samples);
    }
}

/// Microseconds; metrics have seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Micros(pub u64);

impl Samples for Micros {
    fn samples(&self, labels: &mut Vec<LabelPair>, samples: &mut Vec<Sample>) {
        (self.0 as f64 / 1e6).samples(labels, samples);
    }
}
