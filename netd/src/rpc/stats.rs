//! Time of inference steps inside this server: from the last byte of the request to the first byte
//! of the answer.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Buckets per doubling of the time; the middle of a bucket is within 5 % of what fell into it.
const PER_DOUBLING: u32 = 8;
/// From 1 µs to about 18 minutes.
const BUCKETS: usize = 30 * PER_DOUBLING as usize;

/// A histogram with exponential buckets.
#[derive(Debug)]
pub struct StepStats {
    histogram: Mutex<Histogram>,
}

#[derive(Debug)]
struct Histogram {
    buckets: [u64; BUCKETS],
    count: u64,
}

/// What the histogram says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepFigures {
    /// Steps answered.
    pub count: u64,
    /// Median.
    pub p50: Duration,
    /// 99th percentile.
    pub p99: Duration,
}

impl Default for StepStats {
    fn default() -> StepStats {
        StepStats { histogram: Mutex::new(Histogram { buckets: [0; BUCKETS], count: 0 }) }
    }
}

impl StepStats {
    /// Counts one step.
    pub fn record(&self, time: Duration) {
        let mut state = self.histogram.lock().unwrap_or_else(PoisonError::into_inner);
        state.buckets[bucket(time)] += 1;
        state.count += 1;
    }

    /// Figures over all steps so far.
    pub fn figures(&self) -> StepFigures {
        let state = self.histogram.lock().unwrap_or_else(PoisonError::into_inner);
        let at = |share: f64| {
            let rank = (state.count as f64 * share).ceil() as u64;
            let mut seen = 0;
            let found = state.buckets.iter().position(|n| {
                seen += n;
                seen >= rank.max(1)
            });
            found.map_or(Duration::ZERO, middle)
        };
        StepFigures { count: state.count, p50: at(0.5), p99: at(0.99) }
    }
}

fn bucket(time: Duration) -> usize {
    let micros = time.as_secs_f64() * 1e6;
    let place = micros.max(1.0).log2() * f64::from(PER_DOUBLING);
    (place as usize).min(BUCKETS - 1)
}

fn middle(bucket: usize) -> Duration {
    let micros = ((bucket as f64 + 0.5) / f64::from(PER_DOUBLING)).exp2();
    Duration::from_secs_f64(micros / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_within_a_bucket() {
        let stats = StepStats::default();
        assert_eq!(stats.figures(), StepFigures::default());
        for micros in 1..=1000 {
            stats.record(Duration::from_micros(micros));
        }
        let figures = stats.figures();
        assert_eq!(figures.count, 1000);
        let near =
            |time: Duration, micros: f64| (time.as_secs_f64() * 1e6 / micros - 1.0).abs() < 0.1;
        assert!(near(figures.p50, 500.0) && near(figures.p99, 990.0), "{figures:?}");
        stats.record(Duration::from_secs(1 << 40));
    }
}
