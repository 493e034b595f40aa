//! What workers computed, by kind of job, for the lines of `--stats_report_interval`. Source of the
//! figures and of their form: `StatsReporter` in `hivemind/moe/server/runtime.py`.

use std::time::Duration;

use parking_lot::Mutex;
use shared::job::WorkKind;

/// Jobs of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobTally {
    /// Jobs that were answered.
    pub batches: u64,
    /// Sequences in them.
    pub examples: u64,
    /// Time in which they were computed.
    pub compute: Duration,
}

/// Inference steps, forward and backward passes since the last report.
#[derive(Debug, Default)]
pub struct Tally {
    shares: Mutex<[JobTally; 3]>,
}

/// Names of the kinds, those of Petals' pools.
const NAMES: [&str; 3] = ["inference", "forward", "backward"];

impl Tally {
    /// Counts one job.
    pub(super) fn count(&self, kind: WorkKind, examples: u32, compute_ns: u64) {
        let index = match kind {
            WorkKind::Decode | WorkKind::Prefill => 0,
            WorkKind::Forward => 1,
            WorkKind::Backward => 2,
        };
        let mut shares = self.shares.lock();
        if let Some(share) = shares.get_mut(index) {
            share.batches += 1;
            share.examples += u64::from(examples);
            share.compute += Duration::from_nanos(compute_ns);
        }
    }

    /// The lines of a report over the time since the last.
    pub fn report(&self, interval: Duration) -> Vec<String> {
        let shares = std::mem::take(&mut *self.shares.lock());
        let total: u64 = shares.iter().map(|share| share.batches).sum();
        let seconds = interval.as_secs_f64();
        let first = format!("Processed {total} batches in last {seconds} seconds:");
        let used = NAMES.iter().zip(shares).filter(|(_, share)| share.batches > 0);
        std::iter::once(first).chain(used.map(|(name, share)| line(name, &share))).collect()
    }
}

fn line(name: &str, share: &JobTally) -> String {
    let seconds = share.compute.as_secs_f64().max(1e-9);
    let pace = |count: u64, many: &str, one: &str| {
        let per_s = count as f64 / seconds;
        // Upstream prints things per second under either unit.
        let unit = if per_s > 1.0 { format!("{many}/s") } else { format!("s/{one}") };
        let shown = if per_s > 1.0 { per_s } else { 1.0 / per_s };
        format!("{count} {many} ({shown:.2} {unit})")
    };
    let batches = pace(share.batches, "batches", "batch");
    let examples = pace(share.examples, "examples", "example");
    let mean = share.examples as f64 / share.batches.max(1) as f64;
    format!("{name}: {batches}, {examples}, avg batch size {mean:.2}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_has_the_form_of_hivemind_and_begins_anew() {
        let tally = Tally::default();
        for _ in 0..4 {
            tally.count(WorkKind::Decode, 2, 250_000_000);
        }
        tally.count(WorkKind::Backward, 3, 6_000_000_000);
        assert_eq!(
            tally.report(Duration::from_secs(60)),
            [
                "Processed 5 batches in last 60 seconds:",
                "inference: 4 batches (4.00 batches/s), 8 examples (8.00 examples/s), avg batch size 2.00",
                "backward: 1 batches (6.00 s/batch), 3 examples (2.00 s/example), avg batch size 3.00",
            ]
        );
        assert_eq!(
            tally.report(Duration::from_millis(500)),
            ["Processed 0 batches in last 0.5 seconds:"]
        );
    }
}
