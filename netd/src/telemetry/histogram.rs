//! A histogram of times with exponential buckets, that many threads write without a lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use shared::figures::Buckets;

/// Buckets per doubling of the time; the middle of a bucket is within 5 % of what fell into it.
const PER_DOUBLING: usize = 8;
/// Doublings from 1 µs on: to about 18 minutes.
const DOUBLINGS: usize = 30;
const BUCKETS: usize = DOUBLINGS * PER_DOUBLING;

/// Doublings of a microsecond that Prometheus is shown as bounds: 16 µs to 67 s.
const SHOWN: std::ops::RangeInclusive<usize> = 4..=26;

/// Counts times.
#[derive(Debug)]
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
}

/// The counts of a [`Histogram`] at one time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histograms {
    buckets: [u64; BUCKETS],
    sum_ns: u64,
}

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram { buckets: std::array::from_fn(|_| AtomicU64::new(0)), sum_ns: AtomicU64::new(0) }
    }
}

impl Histogram {
    /// Counts one time.
    pub fn record(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if let Some(bucket) = self.buckets.get(bucket(nanos)) {
            bucket.fetch_add(1, Ordering::Relaxed);
            self.sum_ns.fetch_add(nanos, Ordering::Relaxed);
        }
    }

    /// The counts now.
    pub fn read(&self) -> Histograms {
        Histograms {
            buckets: self.buckets.each_ref().map(|bucket| bucket.load(Ordering::Relaxed)),
            sum_ns: self.sum_ns.load(Ordering::Relaxed),
        }
    }
}

impl Histograms {
    /// How many times were counted.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// All of them together.
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }

    /// The time that this share of all does not exceed; zero if there is none.
    pub fn quantile(&self, share: f64) -> Duration {
        let rank = ((self.count() as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let found = self.buckets.iter().position(|count| {
            seen += count;
            seen >= rank
        });
        found.map_or(Duration::ZERO, middle)
    }

    /// What was counted after `earlier`.
    pub fn since(&self, earlier: &Histograms) -> Histograms {
        let mut buckets = self.buckets;
        for (count, before) in buckets.iter_mut().zip(&earlier.buckets) {
            *count = count.saturating_sub(*before);
        }
        Histograms { buckets, sum_ns: self.sum_ns.saturating_sub(earlier.sum_ns) }
    }

    /// As metrics have it, in seconds.
    pub fn figures(&self) -> Buckets {
        let mut from = 0;
        let mut buckets = Vec::with_capacity(SHOWN.count() + 1);
        for doubling in SHOWN {
            let to = doubling * PER_DOUBLING;
            let count = self.buckets.get(from..to).map_or(0, |counts| counts.iter().sum());
            buckets.push(((doubling as f64).exp2() / 1e6, count));
            from = to;
        }
        let rest = self.buckets.get(from..).map_or(0, |counts| counts.iter().sum());
        buckets.push((f64::INFINITY, rest));
        Buckets { sum: self.sum().as_secs_f64(), buckets }
    }
}

fn bucket(nanos: u64) -> usize {
    let doublings = (nanos as f64 / 1e3).max(1.0).log2();
    ((doublings * PER_DOUBLING as f64) as usize).min(BUCKETS - 1)
}

fn middle(bucket: usize) -> Duration {
    let micros = ((bucket as f64 + 0.5) / PER_DOUBLING as f64).exp2();
    Duration::from_secs_f64(micros / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_within_a_bucket() {
        let histogram = Histogram::default();
        assert_eq!(histogram.read().quantile(0.5), Duration::ZERO);
        for micros in 1..=1000 {
            histogram.record(Duration::from_micros(micros));
        }
        let read = histogram.read();
        assert_eq!((read.count(), read.sum()), (1000, Duration::from_micros(500_500)));
        let near =
            |time: Duration, micros: f64| (time.as_secs_f64() * 1e6 / micros - 1.0).abs() < 0.1;
        assert!(near(read.quantile(0.5), 500.0) && near(read.quantile(0.99), 990.0), "{read:?}");
        histogram.record(Duration::from_secs(1 << 40));
        assert_eq!(histogram.read().since(&read).count(), 1);
    }

    #[test]
    fn every_time_is_within_the_bounds_that_are_shown() {
        let histogram = Histogram::default();
        let times = [0, 15_999, 16_001, 1_000_000, 60_000_000_000, 70_000_000_000, u64::MAX / 4];
        times.iter().for_each(|nanos| histogram.record(Duration::from_nanos(*nanos)));
        let bounded = histogram.read().figures().buckets;
        assert_eq!(bounded.iter().map(|(_, count)| count).sum::<u64>(), times.len() as u64);
        assert_eq!(bounded.first(), Some(&(16e-6, 2)));
        assert_eq!(bounded.last(), Some(&(f64::INFINITY, 2)));
        assert!(bounded.is_sorted_by(|one, other| one.0 < other.0));
        let of_millisecond = bounded.iter().find(|(bound, _)| *bound >= 1e-3);
        assert_eq!(of_millisecond.map(|(_, count)| *count), Some(1));
    }
}
