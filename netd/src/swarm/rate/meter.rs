//! Bytes over time, and the rate of the best second. Pure: times are passed in.

use std::time::Duration;

/// Width of a bucket.
const BUCKET: Duration = Duration::from_millis(100);
/// Buckets of the window whose rate counts: a second.
const WINDOW: usize = 10;
/// Buckets kept: more time than any transfer has.
const MAX_BUCKETS: usize = 100;
/// Fewer bytes say nothing.
const MIN_BYTES: u64 = 16 << 10;
/// A shorter transfer is not told from one of this length.
const MIN_TIME: Duration = Duration::from_millis(10);

/// Counts what arrives, from whomever.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    buckets: Vec<u64>,
    total: u64,
    last: Duration,
}

impl Meter {
    /// `bytes` have arrived `at` this time since the start.
    pub fn add(&mut self, at: Duration, bytes: u64) {
        let index = (at.as_millis() / BUCKET.as_millis()) as usize;
        if index >= MAX_BUCKETS {
            return;
        }
        if self.buckets.len() <= index {
            self.buckets.resize(index + 1, 0);
        }
        if let Some(bucket) = self.buckets.get_mut(index) {
            *bucket = bucket.saturating_add(bytes);
        }
        self.total = self.total.saturating_add(bytes);
        self.last = self.last.max(at);
    }

    /// Bits per second in the best second, or over the whole time if that is shorter; `None` if almost nothing has arrived.
    #[must_use]
    pub fn bits_per_s(&self) -> Option<f64> {
        if self.total < MIN_BYTES {
            return None;
        }
        let best = self
            .buckets
            .windows(WINDOW)
            .map(|window| window.iter().sum());
        let bytes_per_s = match best.max() {
            Some(most) if self.last >= BUCKET * WINDOW as u32 => {
                let most: u64 = most;
                most as f64 / (BUCKET * WINDOW as u32).as_secs_f64()
            }
            _ => self.total as f64 / self.last.max(MIN_TIME).as_secs_f64(),
        };
        Some(bytes_per_s * 8.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_best_second_counts_and_a_slow_start_does_not() {
        let mut meter = Meter::default();
        // 100 kB/s for a second, then 1 MB/s for two, then one of four peers is done.
        for at in (0..1000).step_by(100) {
            meter.add(ms(at), 10_000);
        }
        for at in (1000..3000).step_by(100) {
            meter.add(ms(at), 100_000);
        }
        for at in (3000..4000).step_by(100) {
            meter.add(ms(at), 70_000);
        }
        assert_eq!(meter.bits_per_s(), Some(8e6));
    }

    #[test]
    fn a_short_transfer_is_measured_as_a_whole() {
        let mut meter = Meter::default();
        meter.add(ms(0), 400_000);
        meter.add(ms(500), 600_000);
        assert_eq!(meter.bits_per_s(), Some(16e6));
        let mut burst = Meter::default();
        burst.add(ms(0), 1_000_000);
        assert_eq!(burst.bits_per_s(), Some(8e8), "not infinitely fast");
    }

    #[test]
    fn next_to_nothing_and_what_comes_too_late_say_nothing() {
        let mut meter = Meter::default();
        assert_eq!(meter.bits_per_s(), None);
        meter.add(ms(10), MIN_BYTES - 1);
        assert_eq!(meter.bits_per_s(), None);
        meter.add(Duration::from_secs(1 << 40), u64::MAX);
        assert_eq!(meter.bits_per_s(), None);
        assert!(meter.buckets.len() <= MAX_BUCKETS);
        meter.add(ms(20), u64::MAX);
        assert!(meter.bits_per_s().unwrap().is_finite());
    }
}
