//! Bytes over time, and the rate from them. Pure: times are passed in.
//!
//! What has arrived by some time since the start came through the line in that time: no burst from
//! a buffer on the way, and no packet that held up those behind it, makes the line look faster than
//! it is. The best such time counts, since a peer that has sent all it lends leaves the line idle.

use std::time::Duration;

/// Width of a bucket.
const BUCKET: Duration = Duration::from_millis(100);
/// Buckets that a rate is taken over at least, unless the transfer is shorter: a second.
const LEAST: usize = 10;
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
    }

    /// Bits per second from the start to the best moment before the `end` of the transfer, and not
    /// before the first second is over unless the transfer is; `None` if almost nothing has
    /// arrived.
    #[must_use]
    pub fn bits_per_s(&self, end: Duration) -> Option<f64> {
        if self.total < MIN_BYTES {
            return None;
        }
        let mut arrived = 0u64;
        let mut best = self.total as f64 / end.max(MIN_TIME).as_secs_f64();
        // Nothing arrives after the last bucket, however long the transfer goes on.
        let buckets = self.buckets.iter().copied();
        let buckets = buckets.chain(std::iter::repeat_n(0, LEAST));
        for (bytes, index) in buckets.zip(1..) {
            arrived = arrived.saturating_add(bytes);
            let time = BUCKET * index;
            if index >= LEAST as u32 && time <= end {
                best = best.max(arrived as f64 / time.as_secs_f64());
            }
        }
        Some(best * 8.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn near(meter: &Meter, end: u64, expected: f64) {
        let rate = meter.bits_per_s(ms(end)).unwrap();
        assert!((rate / expected - 1.0).abs() < 1e-9, "{rate}");
    }

    #[test]
    fn the_best_moment_counts_and_not_the_idle_time_after_it() {
        let mut meter = Meter::default();
        // 1 MB/s for two seconds, then all but one of the peers are done.
        for at in (0..2000).step_by(100) {
            meter.add(ms(at), 100_000);
        }
        for at in (2000..4000).step_by(100) {
            meter.add(ms(at), 10_000);
        }
        near(&meter, 4000, 8e6);
    }

    #[test]
    fn a_burst_after_a_lost_packet_makes_no_line_faster() {
        let mut meter = Meter::default();
        for at in (0..1000).step_by(100) {
            meter.add(ms(at), 100_000);
        }
        // Nothing for a second; then what was held up comes at once.
        meter.add(ms(1950), 1_000_000);
        near(&meter, 4000, 8e6);
    }

    #[test]
    fn a_transfer_that_stops_is_as_slow_as_it_was_in_a_second() {
        let mut meter = Meter::default();
        meter.add(ms(50), 500_000);
        near(&meter, 4000, 4e6);
    }

    #[test]
    fn a_short_transfer_is_measured_as_a_whole() {
        let mut meter = Meter::default();
        meter.add(ms(0), 400_000);
        meter.add(ms(450), 600_000);
        near(&meter, 500, 16e6);
        // Not infinitely fast.
        near(&meter, 0, 8e8);
    }

    #[test]
    fn next_to_nothing_and_what_comes_too_late_say_nothing() {
        let mut meter = Meter::default();
        let end = ms(4000);
        assert_eq!(meter.bits_per_s(end), None);
        meter.add(ms(10), MIN_BYTES - 1);
        assert_eq!(meter.bits_per_s(end), None);
        meter.add(Duration::from_secs(1 << 40), u64::MAX);
        assert_eq!(meter.bits_per_s(end), None);
        assert!(meter.buckets.len() <= MAX_BUCKETS);
        meter.add(ms(20), u64::MAX);
        assert!(meter.bits_per_s(end).unwrap().is_finite());
    }
}
