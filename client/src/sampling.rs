//! Choice of the next token from its logits: biases, then penalties of what was said, then greedy, or drawn
//! after temperature, top-k, top-p and min-p in that order (the order of transformers'
//! `LogitsProcessorList` in `generate`).

use std::collections::{BTreeMap, BTreeSet};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

pub use crate::config::SamplingConfig;

/// Largest frequency and presence penalty either way, as in OpenAI's interface.
const MAX_PENALTY: f32 = 2.0;
/// Largest bias of a token either way, as in OpenAI's interface.
const MAX_BIAS: f32 = 100.0;

/// A setting that cannot be sampled with.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// Temperature not above 0.
    #[error(
        "invalid temperature {0}: expected a positive number; leave it out for greedy decoding"
    )]
    Temperature(f32),
    #[error("invalid top-k 0: expected at least 1")]
    TopK,
    /// top-p outside (0, 1].
    #[error("invalid top-p {0}: expected a number above 0 and at most 1")]
    TopP(f32),
    /// min-p outside [0, 1].
    #[error("invalid min-p {0}: expected a number from 0 to 1")]
    MinP(f32),
    /// A repetition penalty not above 0.
    #[error("invalid repetition penalty {0}: expected a positive number, 1 for none")]
    Repetition(f32),
    /// A frequency or presence penalty that is too large.
    #[error("invalid {0} penalty {1}: expected a number from -{MAX_PENALTY} to {MAX_PENALTY}")]
    Penalty(&'static str, f32),
    /// A bias that is too large.
    #[error("invalid bias {1} of token {0}: expected a number from -{MAX_BIAS} to {MAX_BIAS}")]
    Bias(u32, f32),
}

/// Chooses tokens one after the other.
#[derive(Debug)]
pub struct Sampler {
    config: SamplingConfig,
    rng: StdRng,
    /// Tokens of the prompt, each once.
    prompt: BTreeSet<u32>,
    /// Tokens that were chosen, and how often.
    said: BTreeMap<u32, u32>,
}

impl Sampler {
    /// A sampler with checked settings.
    ///
    /// # Errors
    /// [`SamplingError`] names the setting that is out of range.
    pub fn new(config: SamplingConfig) -> Result<Sampler, SamplingError> {
        check(&config)?;
        let rng = config.seed.map_or_else(StdRng::from_os_rng, StdRng::seed_from_u64);
        Ok(Sampler { config, rng, prompt: BTreeSet::new(), said: BTreeMap::new() })
    }

    /// Takes the tokens of the prompt, which the repetition penalty counts too.
    pub fn hear(&mut self, prompt: &[u32]) {
        self.prompt.extend(prompt);
    }

    /// The next token for `logits` `[vocabulary]`, or `None` when no logit is finite.
    pub fn choose(&mut self, logits: &[f32]) -> Option<u32> {
        let token = match self.is_plain() {
            true => self.draw(logits),
            false => {
                let mut changed = logits.to_vec();
                self.change(&mut changed);
                self.draw(&changed)
            }
        }?;
        *self.said.entry(token).or_default() += 1;
        Some(token)
    }

    /// Whether logits stay as they are.
    fn is_plain(&self) -> bool {
        let SamplingConfig { repetition_penalty, frequency_penalty, presence_penalty, .. } =
            self.config;
        (repetition_penalty, frequency_penalty, presence_penalty) == (1.0, 0.0, 0.0)
            && self.config.logit_bias.is_empty()
    }

    /// Adds biases, and subtracts penalties: repetition as transformers
    /// (`RepetitionPenaltyLogitsProcessor`), frequency and presence as OpenAI's interface documents
    /// them.
    fn change(&self, logits: &mut [f32]) {
        let SamplingConfig { repetition_penalty, frequency_penalty, presence_penalty, .. } =
            self.config;
        let mut each = |token: u32, change: &dyn Fn(f32) -> f32| {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = change(*logit);
            }
        };
        for (token, bias) in &self.config.logit_bias {
            each(*token, &|logit| logit + bias);
        }
        for token in
            self.said.keys().filter(|token| !self.prompt.contains(token)).chain(&self.prompt)
        {
            each(*token, &|logit| match logit < 0.0 {
                true => logit * repetition_penalty,
                false => logit / repetition_penalty,
            });
        }
        for (token, times) in &self.said {
            let penalty = frequency_penalty * *times as f32 + presence_penalty;
            each(*token, &|logit| logit - penalty);
        }
    }

    fn draw(&mut self, logits: &[f32]) -> Option<u32> {
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
        if let Some(min_p) = self.config.min_p {
            // The most probable token has 1 here.
            let enough = kept.iter().position(|(_, p)| *p < f64::from(min_p));
            kept.truncate(enough.unwrap_or(kept.len()).max(1));
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

fn check(config: &SamplingConfig) -> Result<(), SamplingError> {
    if let Some(t) = config.temperature.filter(|t| !(t.is_finite() && *t > 0.0)) {
        return Err(SamplingError::Temperature(t));
    }
    if config.top_k == Some(0) {
        return Err(SamplingError::TopK);
    }
    if let Some(p) = config.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
        return Err(SamplingError::TopP(p));
    }
    if let Some(p) = config.min_p.filter(|p| !(0.0..=1.0).contains(p)) {
        return Err(SamplingError::MinP(p));
    }
    let repetition = config.repetition_penalty;
    if !(repetition.is_finite() && repetition > 0.0) {
        return Err(SamplingError::Repetition(repetition));
    }
    let penalties =
        [("frequency", config.frequency_penalty), ("presence", config.presence_penalty)];
    let within = |penalty: f32| (-MAX_PENALTY..=MAX_PENALTY).contains(&penalty);
    if let Some((name, penalty)) = penalties.into_iter().find(|(_, penalty)| !within(*penalty)) {
        return Err(SamplingError::Penalty(name, penalty));
    }
    let is_wild = |(_, bias): &&(u32, f32)| !(-MAX_BIAS..=MAX_BIAS).contains(bias);
    match config.logit_bias.iter().find(is_wild) {
        Some((token, bias)) => Err(SamplingError::Bias(*token, *bias)),
        None => Ok(()),
    }
}

/// Index of the largest finite logit, the first of equals.
pub(crate) fn argmax(logits: &[f32]) -> Option<u32> {
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
        let mut top_k = sampler(SamplingConfig { top_k: Some(2), ..base.clone() });
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
        let tokens = draw(sampler(config.clone()));
        assert_eq!(tokens, draw(sampler(config)));
        for (token, expected) in [(0, 0.1), (1, 0.1), (2, 0.3), (3, 0.5)] {
            let share = tokens.iter().filter(|&&t| t == token).count() as f64 / tokens.len() as f64;
            assert!((share - expected).abs() < 0.02, "{token}: {share}");
        }
    }

    #[test]
    fn min_p_keeps_what_is_nearly_as_probable_as_the_best() {
        let logits = [0.0, 0.5f32.ln(), 0.25f32.ln(), 0.1f32.ln()];
        let config = SamplingConfig {
            temperature: Some(1.0),
            min_p: Some(0.2),
            seed: Some(3),
            ..Default::default()
        };
        let mut min_p = sampler(config);
        let drawn: BTreeSet<u32> = (0..500).map(|_| min_p.choose(&logits).unwrap()).collect();
        assert_eq!(drawn, BTreeSet::from([0, 1, 2]));
    }

    #[test]
    fn penalties_count_what_was_said_and_repetition_the_prompt_too() {
        let logits = [4.0, 3.0, 2.5, -1.0];
        let mut repetition =
            sampler(SamplingConfig { repetition_penalty: 2.0, ..Default::default() });
        repetition.hear(&[0, 0, 9]);
        // 4 / 2 is below 3, which is halved when it was said.
        assert_eq!([(); 3].map(|()| repetition.choose(&logits).unwrap()), [1, 2, 0]);
        let mut frequency =
            sampler(SamplingConfig { frequency_penalty: 0.75, ..Default::default() });
        frequency.hear(&[0]);
        let said = [(); 5].map(|()| frequency.choose(&logits).unwrap());
        assert_eq!(
            said,
            [0, 0, 1, 0, 2],
            "4, 3.25, 2.5 (1 has 3), 2.5 (1 has 2.25), 1.75 (2 has 2.5)"
        );
        let mut presence = sampler(SamplingConfig { presence_penalty: 1.25, ..Default::default() });
        assert_eq!([(); 3].map(|()| presence.choose(&logits).unwrap()), [0, 1, 0]);
        let bias = SamplingConfig { logit_bias: vec![(3, 6.0), (77, 9.0)], ..Default::default() };
        assert_eq!(sampler(bias).choose(&logits), Some(3));
    }

    #[test]
    fn settings_of_penalties_out_of_range_are_refused_by_name() {
        let refused = |config| Sampler::new(config).unwrap_err().to_string();
        let config = SamplingConfig::default;
        assert!(refused(SamplingConfig { min_p: Some(1.5), ..config() }).contains("min-p 1.5"));
        assert!(
            refused(SamplingConfig { repetition_penalty: 0.0, ..config() }).contains("repetition")
        );
        let nan = f32::NAN;
        assert!(refused(SamplingConfig { presence_penalty: nan, ..config() }).contains("presence"));
        let bias = SamplingConfig { logit_bias: vec![(5, -101.0)], ..config() };
        assert!(refused(bias).contains("token 5"));
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
