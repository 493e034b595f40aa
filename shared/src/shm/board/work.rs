//! What workers computed, as they show it and as it is read.

use super::super::layout::{WorkPart, WorkWords};
use super::super::sync::{AtomicU64, Ordering};
use super::BoardWriter;
use super::writer::add;
use crate::figures::server::{
    BATCH_BOUNDS, Batches, DeviceFigures, Micros, WorkFigures, WorkerFigures,
};
use crate::job::WorkKind;

/// Zero degrees Celsius on the board, in kelvin.
const FREEZING: u64 = 273;

impl WorkPart {
    pub(super) fn figures(&self) -> WorkerFigures {
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let counts = |words: &WorkWords| WorkFigures {
            jobs: load(&words.jobs),
            tokens: load(&words.tokens),
            queued_us: Micros(load(&words.queue_ns) / 1000),
            computed_us: Micros(load(&words.compute_ns) / 1000),
        };
        let known = |word: &AtomicU64| Some(load(word)).filter(|value| *value > 0);
        let kelvin = known(&self.kelvin).and_then(|kelvin| kelvin.checked_sub(FREEZING));
        let memory_total = known(&self.memory_total);
        WorkerFigures {
            ready: false,
            kinds: WorkKind::ALL.into_iter().zip(self.kinds.each_ref().map(counts)).collect(),
            batches: Some(Batches {
                units: self.batches.each_ref().map(load),
                rows: load(&self.batch_rows),
            }),
            device: DeviceFigures {
                memory_used: memory_total.map(|_| load(&self.memory_used)),
                memory_total,
                celsius: kelvin.and_then(|celsius| u32::try_from(celsius).ok()),
                watts: known(&self.milliwatts).map(|milliwatts| milliwatts as f64 / 1e3),
            },
        }
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
        let kelvin = figures.celsius.map_or(0, |celsius| u64::from(celsius) + FREEZING);
        let milliwatts = figures.watts.map_or(0, |watts| (watts * 1e3).round() as u64);
        work.memory_used.store(figures.memory_used.unwrap_or(0), Ordering::Relaxed);
        work.memory_total.store(figures.memory_total.unwrap_or(0), Ordering::Relaxed);
        work.kelvin.store(kelvin, Ordering::Relaxed);
        work.milliwatts.store(milliwatts, Ordering::Relaxed);
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
