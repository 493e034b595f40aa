//! Measures operations: microseconds, what an operation moves or computes per second, and the share
//! of what the device gives at best.

use std::io::{self, Write};
use std::time::Instant;

use kernels::cases::{Measurement, Operation, Row, Shapes, Subject};
use kernels::ops::OpError;
use shared::exit::ExitReason;

use super::Ended;
use super::report::SelftestReport;

/// What a device gives at best, as measured in this run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Peaks {
    /// Of a copy, read and written together.
    pub(super) bytes_per_s: Option<f64>,
    /// Of the tensor cores on bfloat16.
    pub(super) flops_per_s: Option<f64>,
}

/// Where the rows go, and how they are measured.
pub(super) struct Table<'a, W> {
    pub(super) peaks: Peaks,
    /// Runs that are enqueued and waited for together.
    pub(super) repetitions: usize,
    pub(super) out: &'a mut W,
    /// Where all of it is kept.
    pub(super) report: &'a mut SelftestReport,
}

impl<W: Write> Table<'_, W> {
    /// One row per case of `operations` whose name `is_wanted`.
    pub(super) fn operations<B: Subject>(
        &mut self,
        backend: &mut B,
        operations: &[Operation<B>],
        shapes: &Shapes,
        is_wanted: &dyn Fn(&str) -> bool,
    ) -> Result<(), Ended> {
        // Numbers of about 0.01 in every format.
        let ring = vec![0x3c; shapes.ring_bytes];
        let mut written = Ok(());
        for operation in operations {
            let timer = &mut |row: &Row, repeat: &mut dyn FnMut(usize) -> Result<(), OpError>| {
                let seconds = self.time(repeat)?;
                if let Err(failure) = self.print(row, seconds) {
                    written = Err(failure);
                }
                Ok(())
            };
            let mut measurement = Measurement { shapes, ring: &ring, is_wanted, timer };
            let done = operation.measure(backend, &mut measurement);
            done.map_err(|failure| Ended::new(ExitReason::DeviceLost, &failure))?;
        }
        Ok(written?)
    }

    /// Seconds of one run: the best of three series. `repeat` makes so many runs and waits for
    /// them.
    pub(super) fn time(
        &self,
        repeat: &mut dyn FnMut(usize) -> Result<(), OpError>,
    ) -> Result<f64, OpError> {
        repeat(1)?;
        let mut best = f64::INFINITY;
        for _ in 0..3 {
            let start = Instant::now();
            repeat(self.repetitions)?;
            best = best.min(start.elapsed().as_secs_f64() / self.repetitions as f64);
        }
        Ok(best.max(1e-9))
    }

    pub(super) fn print(&mut self, row: &Row, seconds: f64) -> io::Result<()> {
        let bytes = row.work.bytes as f64 / seconds;
        let flops = row.work.operations as f64 / seconds;
        let share = |value: f64, peak: Option<f64>| match peak {
            Some(peak) if value > 0.0 => format!("{:4.0} %", 100.0 * value / peak),
            _ => "    -".to_owned(),
        };
        let us = seconds * 1e6;
        let computed = self.report.measured(&row.name, us, row.work.bytes, row.work.operations);
        let computed = computed.map_or_else(String::new, |us| format!("  computed {us:.0} µs"));
        writeln!(
            self.out,
            "{:60} {us:10.1} µs {:9.1} GB/s {} {:9.2} TFLOP/s {}{computed}",
            row.name,
            bytes / 1e9,
            share(bytes, self.peaks.bytes_per_s),
            flops / 1e12,
            share(flops, self.peaks.flops_per_s),
        )
    }
}
