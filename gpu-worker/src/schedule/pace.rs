//! What units cost by measured speed, and how large the next ones may be.

use std::time::Duration;

/// What a token costs in units of one kind, as they ran.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// Seconds of a token in one block, a moving mean; zero: nothing ran yet.
    mean: f64,
    /// How much slower units are than the mean, a moving mean too: those that are faster count as
    /// zero.
    excess: f64,
}

impl Pace {
    /// Excesses above the mean for which units are planned, and what they are at least, as a part
    /// of the mean: few are slower than that.
    const MARGIN: f64 = 5.0;
    const LEAST_EXCESS: f64 = 0.015;
    /// Part of a new value in the means. A unit that was disturbed makes the next ones smaller at
    /// once, by its excess, and is forgotten after some.
    const MEAN_GAIN: f64 = 0.25;
    const EXCESS_GAIN: f64 = 0.125;

    pub(super) fn add(&mut self, tokens: usize, elapsed: Duration) {
        let seconds = elapsed.as_secs_f64().max(1e-6) / tokens.max(1) as f64;
        if self.mean == 0.0 {
            self.mean = seconds;
            return;
        }
        let off = seconds - self.mean;
        self.mean += Self::MEAN_GAIN * off;
        self.excess += Self::EXCESS_GAIN * (off.max(0.0) - self.excess);
    }

    /// Tokens of a unit that hardly takes longer than `time`; none while nothing ran.
    pub(super) fn tokens(&self, time: Duration) -> f64 {
        if self.mean == 0.0 {
            return 0.0;
        }
        let excess = self.excess.max(Self::LEAST_EXCESS * self.mean);
        time.as_secs_f64() / (self.mean + Self::MARGIN * excess)
    }
}
