//! What a run has shown, and the table of all runs.

use crate::fleet::Rule;

/// Steps of a histogram: each bound is so many times the one before.
const RATIO: f64 = 1.02;
/// The first bound, in seconds.
const LEAST_S: f64 = 0.01;
const BINS: usize = 700;

/// Times of steps, each with how often it was seen.
pub struct Histogram(Vec<f64>);

impl Default for Histogram {
    fn default() -> Histogram {
        Histogram(vec![0.0; BINS])
    }
}

impl Histogram {
    /// Adds `count` steps of `seconds`.
    pub fn add(&mut self, seconds: f64, count: f64) {
        let bin = ((seconds / LEAST_S).ln() / RATIO.ln()).max(0.0) as usize;
        self.0[bin.min(BINS - 1)] += count;
    }

    /// The time that a share of the steps does not exceed.
    pub fn quantile(&self, share: f64) -> f64 {
        let mut left = share * self.0.iter().sum::<f64>();
        let bin = self.0.iter().position(|count| {
            left -= count;
            left <= 0.0
        });
        LEAST_S * RATIO.powi(bin.unwrap_or(0) as i32 + 1)
    }
}

/// What was counted while it was measured.
#[derive(Default)]
pub struct Counts {
    /// Times of the steps of sessions.
    pub steps: Histogram,
    /// Tokens that came out of sessions, and those of batches.
    pub tokens: f64,
    /// Tokens of batches.
    pub batch_tokens: f64,
    /// Sessions that were opened.
    pub opened: u32,
    /// Legs that were replaced within a session.
    pub rerouted: u32,
    /// Sessions that were given up.
    pub failed: u32,
    /// Servers that refused a session.
    pub refused: u32,
}

/// One run.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub rule: Rule,
    pub seed: u64,
    /// Tokens per second of all sessions.
    pub tokens_per_s: f64,
    /// Tokens per second of all batches.
    pub batch_tokens_per_s: f64,
    /// Tokens per second of one client with a session: the median, and what nineteen of twenty have.
    pub per_client: (f64, f64),
    /// Seconds of a step: p50, p95, p99.
    pub step_s: [f64; 3],
    /// Sessions at a time, on average.
    pub sessions: f64,
    /// Sessions that were opened.
    pub opened: u32,
    /// Legs that were replaced.
    pub rerouted: u32,
    /// Sessions that were given up.
    pub failed: u32,
    /// Servers that refused a session.
    pub refused: u32,
    /// Moves of one server in an hour.
    pub moves_per_hour: f64,
    /// The weakest block's throughput as a share of the mean block's, on average.
    pub weakest: f64,
    /// Seconds in which a block had no server.
    pub broken_s: f64,
}

/// Prints the table.
pub fn print(outcomes: &[Outcome]) {
    println!(
        "| rule | seed | tokens/s | batch tokens/s | per client, p50 / p5 | step p50 / p95 / p99, s | at once | opened | refused | re-routed | given up | moves/h | weakest | broken, s |"
    );
    println!(
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    );
    for o in outcomes {
        let [p50, p95, p99] = o.step_s;
        println!(
            "| {:?} | {} | {:.0} | {:.0} | {:.2} / {:.2} | {p50:.2} / {p95:.2} / {p99:.2} | {:.0} | {} | {} | {} | {} | {:.3} | {:.3} | {:.0} |",
            o.rule,
            o.seed,
            o.tokens_per_s,
            o.batch_tokens_per_s,
            o.per_client.0,
            o.per_client.1,
            o.sessions,
            o.opened,
            o.refused,
            o.rerouted,
            o.failed,
            o.moves_per_hour,
            o.weakest,
            o.broken_s,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_what_was_added() {
        let mut steps = Histogram::default();
        (1..=1000).for_each(|ms| steps.add(f64::from(ms) / 1e3, 2.0));
        for share in [0.5, 0.95, 0.99] {
            let found = steps.quantile(share);
            assert!((found / share - 1.0).abs() < 0.03, "{found} instead of {share}");
        }
    }
}
