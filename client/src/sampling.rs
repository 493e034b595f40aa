//! Choice of the next token from its logits: greedy, or drawn after temperature, top-k and top-p in
//! that order (the order of transformers' `LogitsProcessorList` in `generate`).

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// How tokens are chosen. The default is greedy.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingConfig {
    /// Divides the logits; `None` chooses greedily and ignores the rest.
    pub temperature: Option<f32>,
    /// Keeps the most probable tokens only.
    pub top_k: Option<usize>,
    /// Keeps the smallest set of tokens whose probabilities sum to at least this.
    pub top_p: Option<f32>,
    /// Seed of the draws; `None` takes one from the system.
    pub seed: Option<u64>,
}

/// A setting that cannot be sampled with.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// Temperature not above 0.
    #[error(
        "invalid temperature {0}: expected a positive number; leave it out for greedy decoding"
    )]
    Temperature(f32),
    /// top-k of 0.
    #[error("invalid top-k 0: expected at least 1")]
    TopK,
    /// top-p outside (0, 1].
    #[error("invalid top-p {0}: expected a number above 0 and at most 1")]
    TopP(f32),
}

/// Chooses tokens one after the other.
#[derive(Debug)]
pub struct Sampler {
    config: SamplingConfig,
    rng: StdRng,
}

impl Sampler {
    /// A sampler with checked settings.
    ///
    /// # Errors
    /// [`SamplingError`] names the setting that is out of range.
    pub fn new(config: SamplingConfig) -> Result<Sampler, SamplingError> {
        if let Some(t) = config.temperature.filter(|t| !(t.is_finite() && *t > 0.0)) {
            return Err(SamplingError::Temperature(t));
        }
        if config.top_k == Some(0) {
            return Err(SamplingError::TopK);
        }
        if let Some(p) = config.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
            return Err(SamplingError::TopP(p));
        }
        let rng = config.seed.map_or_else(StdRng::from_os_rng, StdRng::seed_from_u64);
        Ok(Sampler { config, rng })
    }

    /// The next token for `logits` `[vocabulary]`, or `None` when no logit is finite.
    pub fn choose(&mut self, logits: &[f32]) -> Option<u32> {
        let best = argmax(logits)?;
        let Some(temperature) = self.config.temperature else {
            return Some(best);
        };
        let peak = logits[best as usize];
        let mut kept: Vec<(u32, f64)> = (0u32..)
            .zip(logits)
            .filter(|(_, l)| !l.is_nan())
            .map(|(token, l)| (token, f64::from((l - peak) / temperature).exp()))
            .collect();
        kept.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        kept.truncate(self.config.top_k.unwrap_or(usize::MAX));
        if let Some(top_p) = self.config.top_p {
            let limit = f64::from(top_p) * kept.iter().map(|(_, p)| p).sum::<f64>();
            let mut sum = 0.0;
            let enough = kept.iter().position(|(_, p)| {
                sum += p;
                sum >= limit
            });
            kept.truncate(enough.map_or(kept.len(), |n| n + 1));
        }
        let total: f64 = kept.iter().map(|(_, p)| p).sum();
        let mut draw = self.rng.random::<f64>() * total;
        let drawn = kept.iter().find(|(_, p)| {
            draw -= p;
            draw < 0.0
        });
        Some(drawn.map_or(best, |(token, _)| *token))
    }
}

/// Index of the largest finite logit, the first of equals.
fn argmax(logits: &[f32]) -> Option<u32> {
    (0u32..)
        .zip(logits)
        .filter(|(_, l)| l.is_finite())
        .fold(None, |best: Option<(u32, f32)>, (token, &l)| match best {
            Some((_, top)) if top >= l => best,
            _ => Some((token, l)),
        })
        .map(|(token, _)| token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(config: SamplingConfig) -> Sampler {
        Sampler::new(config).unwrap()
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let mut greedy = sampler(SamplingConfig::default());
        assert_eq!(greedy.choose(&[0.0, 3.0, f32::NAN, 3.0]), Some(1));
        assert_eq!(greedy.choose(&[f32::NAN, f32::NEG_INFINITY]), None);
        assert_eq!(greedy.choose(&[]), None);
    }

    #[test]
    fn top_k_and_top_p_bound_what_can_be_drawn() {
        let logits = [1.0, 2.0, 3.0, 4.0];
        let base = SamplingConfig { temperature: Some(10.0), seed: Some(1), ..Default::default() };
        let mut top_k = sampler(SamplingConfig { top_k: Some(2), ..base });
        let mut top_p = sampler(SamplingConfig { top_p: Some(0.3), ..base });
        for _ in 0..200 {
            assert!(top_k.choose(&logits).unwrap() >= 2);
            assert!(top_p.choose(&logits).unwrap() >= 2, "0.29 + 0.26 covers 0.3 with two tokens");
        }
    }

    #[test]
    fn draws_follow_the_softmax_and_the_seed() {
        let config = SamplingConfig { temperature: Some(1.0), seed: Some(7), ..Default::default() };
        let logits = [0.0, 1.0f32.ln(), 3.0f32.ln(), 5.0f32.ln()];
        let draw =
            |mut s: Sampler| (0..20_000).map(|_| s.choose(&logits).unwrap()).collect::<Vec<_>>();
        let tokens = draw(sampler(config));
        assert_eq!(tokens, draw(sampler(config)));
        for (token, expected) in [(0, 0.1), (1, 0.1), (2, 0.3), (3, 0.5)] {
            let share = tokens.iter().filter(|&&t| t == token).count() as f64 / tokens.len() as f64;
            assert!((share - expected).abs() < 0.02, "{token}: {share}");
        }
    }

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        let refused = |config| Sampler::new(config).unwrap_err().to_string();
        assert!(
            refused(SamplingConfig { temperature: Some(0.0), ..Default::default() })
                .contains("temperature 0")
        );
        assert!(refused(SamplingConfig { top_k: Some(0), ..Default::default() }).contains("top-k"));
        assert!(
            refused(SamplingConfig { top_p: Some(1.5), ..Default::default() })
                .contains("invalid top-p 1.5")
        );
    }
}
