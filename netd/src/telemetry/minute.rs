//! Figures of the last minute, and the rate of each session over the last seconds: differences of
//! counters that were noted before. Pure; the driver calls it once a second.

use std::collections::VecDeque;
use std::time::Duration;

use shared::shm::board::{Minute, Quantiles};
use shared::shm::layout::{SESSION_ROWS, STEP_PARTS};

use super::histogram::Histograms;

/// Time between two notes of all counters.
const PACE: Duration = Duration::from_secs(5);
/// How far back the figures go.
const MINUTE: Duration = Duration::from_secs(60);
/// How far back the rates of sessions go.
const RATE: Duration = Duration::from_secs(10);

/// All counters at one time.
#[derive(Clone, Debug)]
pub struct Counters {
    /// Times of steps.
    pub parts: [Histograms; STEP_PARTS],
    /// Tokens in them.
    pub tokens: u64,
    /// Decode units that workers ran; those of a worker begin at zero when it is started again.
    pub units: u64,
    /// Rows in them.
    pub rows: u64,
}

/// Counters of the last minute.
#[derive(Debug, Default)]
pub struct LastMinute {
    notes: VecDeque<(Duration, Counters)>,
}

impl LastMinute {
    /// What happened in the last minute, `now` after the start.
    pub fn tick(&mut self, now: Duration, counters: Counters) -> Minute {
        let is_over = |at: &Duration| now.saturating_sub(*at) >= MINUTE;
        // The oldest note is the last that is a minute old.
        while self.notes.get(1).is_some_and(|(at, _)| is_over(at)) {
            self.notes.pop_front();
        }
        let minute = match self.notes.front() {
            Some((at, before)) => difference(now.saturating_sub(*at), before, &counters),
            None => Minute::default(),
        };
        if self.notes.back().is_none_or(|(at, _)| now.saturating_sub(*at) >= PACE) {
            self.notes.push_back((now, counters));
        }
        minute
    }
}

fn difference(time: Duration, before: &Counters, now: &Counters) -> Minute {
    let mut quantiles = [Quantiles::default(); STEP_PARTS];
    let mut steps = 0;
    for (of, (now, before)) in quantiles.iter_mut().zip(now.parts.iter().zip(&before.parts)) {
        let since = now.since(before);
        *of = Quantiles { p50: since.quantile(0.5), p99: since.quantile(0.99) };
        steps = since.count();
    }
    Minute {
        time,
        steps,
        tokens: now.tokens.saturating_sub(before.tokens),
        quantiles,
        units: now.units.saturating_sub(before.units),
        rows: now.rows.saturating_sub(before.rows),
    }
}

/// Number of a session in each row, 0 for none, and its tokens.
pub type Lengths = [(u64, u64); SESSION_ROWS];

/// Rates of sessions.
#[derive(Debug, Default)]
pub struct Rates {
    notes: VecDeque<(Duration, Lengths)>,
}

impl Rates {
    /// Tokens per 1000 seconds of each row.
    pub fn tick(&mut self, now: Duration, lengths: &Lengths) -> [u64; SESSION_ROWS] {
        let is_over = |at: &Duration| now.saturating_sub(*at) > RATE;
        while self.notes.front().is_some_and(|(at, _)| is_over(at)) {
            self.notes.pop_front();
        }
        let rate = |row: usize| {
            let &(number, length) = lengths.get(row)?;
            // The earliest note of the same session; one that is younger has grown from nothing.
            let same = |(at, before): &(Duration, Lengths)| {
                let &(known, length) = before.get(row)?;
                (known == number && number != 0).then_some((*at, length))
            };
            let (at, before) = self.notes.iter().find_map(same)?;
            let millis = u64::try_from(now.saturating_sub(at).as_millis()).ok()?.max(1);
            Some(length.saturating_sub(before).saturating_mul(1_000_000) / millis)
        };
        let rates = std::array::from_fn(|row| rate(row).unwrap_or(0));
        self.notes.push_back((now, *lengths));
        rates
    }
}

#[cfg(test)]
mod tests {
    use super::super::histogram::Histogram;
    use super::*;

    #[test]
    fn what_is_older_than_a_minute_does_not_count() {
        let histogram = Histogram::default();
        let mut minute = LastMinute::default();
        let counters = |tokens| Counters {
            parts: std::array::from_fn(|_| histogram.read()),
            tokens,
            units: tokens / 2,
            rows: tokens,
        };
        assert_eq!(minute.tick(Duration::ZERO, counters(0)), Minute::default());
        // A second of slow steps, then nothing but fast ones.
        (0..10).for_each(|_| histogram.record(Duration::from_secs(1)));
        for second in 1..=90_u64 {
            histogram.record(Duration::from_millis(1));
            let shown = minute.tick(Duration::from_secs(second), counters(second));
            let [p50, p99] = [shown.quantiles[0].p50, shown.quantiles[0].p99];
            assert!(second < 15 || p50 < Duration::from_millis(2), "{second}: {p50:?}");
            let has_slow = p99 > Duration::from_millis(900);
            assert!(second >= 65 || has_slow, "{second}: {p99:?}");
            assert!(second < 66 || !has_slow, "{second}: {p99:?}");
            if second >= 65 {
                assert!((60..=65).contains(&shown.steps), "{shown:?}");
                assert_eq!((shown.tokens, shown.rows), (shown.steps, shown.steps));
                assert_eq!(shown.time.as_secs(), shown.steps);
            }
        }
    }

    #[test]
    fn a_rate_is_of_one_session_alone() {
        let mut rates = Rates::default();
        let mut lengths: Lengths = [(0, 0); SESSION_ROWS];
        lengths[3] = (7, 0);
        assert_eq!(rates.tick(Duration::ZERO, &lengths)[3], 0);
        lengths[3] = (7, 30);
        assert_eq!(rates.tick(Duration::from_secs(2), &lengths)[3], 15_000);
        // Another session in the same row.
        lengths[3] = (8, 100);
        assert_eq!(rates.tick(Duration::from_secs(3), &lengths)[3], 0);
        lengths[3] = (8, 110);
        assert_eq!(rates.tick(Duration::from_secs(5), &lengths)[3], 5000);
        assert_eq!(rates.tick(Duration::from_secs(30), &lengths)[3], 0);
    }
}
