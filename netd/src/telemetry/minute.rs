//! Figures of the last minute, and the rate of each session over the last seconds: differences of
//! counters that were noted before. Pure; the driver calls it once a second.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use shared::figures::{Latency, Minute, SessionFigures, StepPart};

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
    pub parts: [Histograms; StepPart::ALL.len()],
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
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let per_second = |count: u64| match time.is_zero() {
        true => 0.0,
        false => count as f64 / time.as_secs_f64(),
    };
    let since = |(now, before): (&Histograms, &Histograms)| now.since(before);
    let parts: Vec<Histograms> = now.parts.iter().zip(&before.parts).map(since).collect();
    let latency = StepPart::ALL.into_iter().zip(&parts).map(|(part, times)| Latency {
        part,
        p50_ms: ms(times.quantile(0.5)),
        p99_ms: ms(times.quantile(0.99)),
    });
    // Every step is in each part.
    let steps = parts.first().map_or(0, Histograms::count);
    let [rows, units] =
        [now.rows.saturating_sub(before.rows), now.units.saturating_sub(before.units)];
    Minute {
        seconds: time.as_secs_f64(),
        steps,
        steps_per_s: per_second(steps),
        tokens_per_s: per_second(now.tokens.saturating_sub(before.tokens)),
        mean_batch: rows as f64 / units.max(1) as f64,
        latency: latency.collect(),
    }
}

/// Tokens of sessions by their numbers.
type Lengths = BTreeMap<u64, u32>;

/// Rates of sessions.
#[derive(Debug, Default)]
pub struct SessionRates {
    notes: VecDeque<(Duration, Lengths)>,
}

impl SessionRates {
    /// Adds their rates to sessions.
    pub fn tick(&mut self, now: Duration, sessions: &mut [SessionFigures]) {
        let is_over = |at: &Duration| now.saturating_sub(*at) > RATE;
        while self.notes.front().is_some_and(|(at, _)| is_over(at)) {
            self.notes.pop_front();
        }
        for session in &mut *sessions {
            // The earliest note of the session; one that is younger has grown from nothing.
            let noted =
                |(at, lengths): &(Duration, Lengths)| Some((*at, *lengths.get(&session.number)?));
            if let Some((at, length)) = self.notes.iter().find_map(noted) {
                let seconds = now.saturating_sub(at).as_secs_f64().max(1e-3);
                session.tokens_per_s = f64::from(session.length.saturating_sub(length)) / seconds;
            }
        }
        let lengths = sessions.iter().map(|session| (session.number, session.length));
        self.notes.push_back((now, lengths.collect()));
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
            let Latency { part, p50_ms, p99_ms } = shown.latency[0];
            assert_eq!((part, shown.latency.len()), (StepPart::Total, 4));
            assert!(second < 15 || p50_ms < 2.0, "{second}: {p50_ms}");
            let has_slow = p99_ms > 900.0;
            assert!(second >= 65 || has_slow, "{second}: {p99_ms}");
            assert!(second < 66 || !has_slow, "{second}: {p99_ms}");
            if second >= 65 {
                assert!((60..=65).contains(&shown.steps), "{shown:?}");
                assert_eq!((shown.steps_per_s, shown.tokens_per_s), (1.0, 1.0));
                assert_eq!(shown.seconds, shown.steps as f64);
                assert!((1.9..=2.1).contains(&shown.mean_batch), "{shown:?}");
            }
        }
    }

    #[test]
    fn a_rate_is_of_one_session_alone() {
        let mut rates = SessionRates::default();
        let mut rate = |second: u64, number: u64, length: u32| {
            let mut sessions = [SessionFigures { number, length, ..SessionFigures::default() }];
            rates.tick(Duration::from_secs(second), &mut sessions);
            sessions[0].tokens_per_s
        };
        assert_eq!(rate(0, 7, 0), 0.0);
        assert_eq!(rate(2, 7, 30), 15.0);
        assert_eq!(rate(3, 8, 100), 0.0);
        assert_eq!(rate(5, 8, 110), 5.0);
        assert_eq!(rate(30, 8, 110), 0.0);
    }
}
