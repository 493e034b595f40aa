//! What workers computed, as they show it and as it is read.

use std::time::Duration;

use super::super::layout::{BATCH_BUCKETS, WORK_KINDS, WorkPart, WorkWords};
use super::super::sync::{AtomicU64, Ordering};
use super::BoardWriter;
use super::writer::add;
use crate::job::WorkKind;

/// Largest number of rows in each bucket of decode units but the last.
pub const BATCH_BOUNDS: [u64; BATCH_BUCKETS - 1] = [1, 2, 4, 8, 16, 32, 64];

/// Zero degrees Celsius on the board, in kelvin.
const FREEZING: u64 = 273;

/// Jobs of one kind that a worker has answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkCounts {
    pub jobs: u64,
    /// Tokens of all their rows.
    pub tokens: u64,
    /// Time that they waited in the worker.
    pub queued: Duration,
    /// Time that they were computed, or shared the device with others.
    pub computed: Duration,
}

/// How the device of a worker is, where that is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceFigures {
    /// Bytes of its memory in use, by whomever, and all its bytes.
    pub memory: Option<(u64, u64)>,
    /// Temperature in degrees Celsius.
    pub celsius: Option<u32>,
    /// Power draw in milliwatts.
    pub milliwatts: Option<u64>,
}

/// What a worker computed since it was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkSnapshot {
    /// By kind of work, in the order of [`WorkKind::ALL`].
    pub kinds: [WorkCounts; WORK_KINDS],
    /// Decode units by their rows: one bucket for each of [`BATCH_BOUNDS`], and one for more.
    pub batches: [u64; BATCH_BUCKETS],
    /// Rows of all decode units.
    pub batch_rows: u64,
    pub device: DeviceFigures,
}

impl WorkSnapshot {
    pub(super) fn of(part: &WorkPart) -> WorkSnapshot {
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let counts = |words: &WorkWords| WorkCounts {
            jobs: load(&words.jobs),
            tokens: load(&words.tokens),
            queued: Duration::from_nanos(load(&words.queue_ns)),
            computed: Duration::from_nanos(load(&words.compute_ns)),
        };
        let known = |word: &AtomicU64| Some(load(word)).filter(|value| *value > 0);
        let kelvin = known(&part.kelvin).and_then(|kelvin| kelvin.checked_sub(FREEZING));
        WorkSnapshot {
            kinds: part.kinds.each_ref().map(counts),
            batches: part.batches.each_ref().map(load),
            batch_rows: load(&part.batch_rows),
            device: DeviceFigures {
                memory: known(&part.memory_total).map(|total| (load(&part.memory_used), total)),
                celsius: kelvin.and_then(|celsius| u32::try_from(celsius).ok()),
                milliwatts: known(&part.milliwatts),
            },
        }
    }

    /// Jobs and times of all kinds together.
    pub fn all(&self) -> WorkCounts {
        self.kinds.iter().fold(WorkCounts::default(), |sum, kind| WorkCounts {
            jobs: sum.jobs.saturating_add(kind.jobs),
            tokens: sum.tokens.saturating_add(kind.tokens),
            queued: sum.queued.saturating_add(kind.queued),
            computed: sum.computed.saturating_add(kind.computed),
        })
    }

    pub fn decode_units(&self) -> u64 {
        self.batches.iter().fold(0, |sum, units| sum.saturating_add(*units))
    }
}

impl BoardWriter {
    /// One job was answered that had waited for `queue_ns` and was computed for `compute_ns`.
    pub fn job_done(&self, kind: WorkKind, tokens: u64, queue_ns: u64, compute_ns: u64) {
        let Some(words) = self.work().kinds.get(kind as usize) else { return };
        add(&words.tokens, tokens);
        add(&words.queue_ns, queue_ns);
        add(&words.compute_ns, compute_ns);
        add(&words.jobs, 1);
    }

    /// One unit of decode steps ran over so many rows.
    pub fn decoded(&self, rows: u64) {
        let bucket = BATCH_BOUNDS.iter().take_while(|bound| rows > **bound).count();
        let work = self.work();
        if let Some(units) = work.batches.get(bucket) {
            add(units, 1);
            add(&work.batch_rows, rows);
        }
    }

    /// Shows how the device is. To be called by one thread.
    pub fn set_device(&self, figures: &DeviceFigures) {
        let work = self.work();
        let (used, total) = figures.memory.unwrap_or((0, 0));
        let kelvin = figures.celsius.map_or(0, |celsius| u64::from(celsius) + FREEZING);
        work.memory_used.store(used, Ordering::Relaxed);
        work.memory_total.store(total, Ordering::Relaxed);
        work.kelvin.store(kelvin, Ordering::Relaxed);
        work.milliwatts.store(figures.milliwatts.unwrap_or(0), Ordering::Relaxed);
    }

    fn work(&self) -> &WorkPart {
        &self.child().work
    }
}

impl WorkPart {
    pub(super) fn reset(&self) {
        let kinds = self.kinds.iter();
        let kinds = kinds.flat_map(|of| [&of.jobs, &of.tokens, &of.queue_ns, &of.compute_ns]);
        let device = [&self.memory_used, &self.memory_total, &self.kelvin, &self.milliwatts];
        for word in kinds.chain(&self.batches).chain([&self.batch_rows]).chain(device) {
            word.store(0, Ordering::Relaxed);
        }
    }
}
