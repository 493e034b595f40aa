//! A text that grows step by step over a session of a chain. Guesses change how many steps it takes, and
//! no token.

use std::time::Instant;

use futures::future::BoxFuture;

use crate::chain::{Chain, ChainError};
use crate::drafts::Drafts;
use crate::end_rules::EndRules;
use crate::grammar::{Grammar, GrammarError};
use crate::head::Head;
use crate::local_layers::LocalModelError;
use crate::report::GenerationReport;
use crate::sampling::Sampler;
use crate::states::Hidden;

/// Why a text cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The local part of the model.
    #[error(transparent)]
    Model(#[from] LocalModelError),
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// The head made nothing that could be sampled.
    #[error(
        "the logits after {0} tokens are not finite: a server of the chain computes wrong values"
    )]
    NoToken(usize),
    /// The form of the text.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// The session holds the whole text already.
    #[error("there is no token to go on from")]
    NothingToSend,
    /// Work outside of the reactor was given up.
    #[error("the program is shutting down")]
    Stopped,
}

/// What a [`Decoder`] is to do.
#[derive(Debug)]
pub struct Continuation {
    /// Tokens to go on from. The session may hold the first of them already, but not all.
    pub prompt: Vec<u32>,
    /// Most tokens to add.
    pub max_new_tokens: u32,
    /// Where the text may end before that.
    pub ends: EndRules,
    /// Guesses of what comes.
    pub drafts: Drafts,
    /// The form that the text is to have; any, if there is none.
    pub grammar: Option<Grammar>,
    /// How many of the most probable tokens to name beside each chosen one; `None` computes no
    /// probabilities.
    pub top_logprobs: Option<usize>,
}

/// A token that was chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// The token.
    pub token: u32,
    /// Whether it ends the text and is no part of it.
    pub is_eos: bool,
    /// Whether it is the last of a text whose form is complete.
    pub completes: bool,
    /// Logarithms of probabilities, if they were asked for.
    pub logprobs: Option<Logprobs>,
}

/// Logarithms of probabilities as the model has them, before biases, penalties and temperature.
#[derive(Clone, Debug, PartialEq)]
pub struct Logprobs {
    /// That of the chosen token.
    pub chosen: f32,
    /// The most probable tokens, the first first.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    pub(crate) fn of(logits: &[f32], token: u32, count: usize) -> Logprobs {
        let most = logits.iter().copied().filter(|l| l.is_finite()).fold(f32::MIN, f32::max);
        let finite = || (0u32..).zip(logits.iter().copied()).filter(|(_, l)| l.is_finite());
        let sum: f64 = finite().map(|(_, logit)| f64::from(logit - most).exp()).sum();
        let log_sum = f64::from(most) + sum.ln();
        let of = |logit: f32| (f64::from(logit) - log_sum) as f32;
        let mut top: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
        for (token, logit) in finite() {
            let at = top.partition_point(|(_, other)| *other >= logit);
            if at < count {
                top.insert(at, (token, logit));
                top.truncate(count);
            }
        }
        let chosen = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
        let top = top.into_iter().map(|(token, logit)| (token, of(logit))).collect();
        Logprobs { chosen: of(chosen), top }
    }
}

/// A text under way. Dropping it ends its session.
pub struct Decoder {
    chain: Chain,
    head: Head,
    sampler: Sampler,
    ends: EndRules,
    drafts: Drafts,
    grammar: Option<Grammar>,
    top_logprobs: Option<usize>,
    /// The prompt and what was chosen. The session holds all of it, or all but the end.
    text: Vec<u32>,
    most: usize,
    is_over: bool,
    report: GenerationReport,
    began: Instant,
}

impl Decoder {
    /// Goes on from a prompt over a session that holds none or some of its first tokens.
    pub fn new(chain: Chain, head: Head, mut sampler: Sampler, task: Continuation) -> Decoder {
        sampler.hear(&task.prompt);
        let most = task.max_new_tokens as usize;
        let report =
            GenerationReport { prompt_tokens: task.prompt.len(), ..GenerationReport::default() };
        Decoder {
            chain,
            head,
            sampler,
            ends: task.ends,
            drafts: task.drafts,
            grammar: task.grammar,
            top_logprobs: task.top_logprobs,
            text: task.prompt,
            most,
            is_over: most == 0,
            report,
            began: Instant::now(),
        }
    }

    /// Tokens before which nothing ends the text.
    pub fn min_tokens(&self) -> usize {
        self.ends.min_tokens
    }

    /// The tokens that the next step brings, one or more; none once the text is over. What follows a
    /// token that ends the text is not chosen.
    ///
    /// # Errors
    /// [`DecodeError`]; the session is of no use afterwards.
    pub fn step(&mut self) -> BoxFuture<'_, Result<Vec<Chosen>, DecodeError>> {
        Box::pin(async move {
            let mut chosen = Vec::new();
            if self.is_over {
                return Ok(chosen);
            }
            let position = self.chain.position() as usize;
            let mut input = self.text.get(position..).unwrap_or_default().to_vec();
            if input.is_empty() {
                return Err(DecodeError::NothingToSend);
            }
            // The first step carries the prompt alone; the last token of a step is chosen behind its guesses.
            let left = self.most.saturating_sub(self.report.tokens.len() + 1);
            let may_guess = !self.report.tokens.is_empty() && self.chain.rolls_back();
            let limit = if may_guess { left } else { 0 };
            let guesses = self.drafts.guess(&self.text, limit).await;
            let kept = position + input.len();
            input.extend(&guesses);
            let tokens = input.len();
            let bytes = self.head.embed(input).await?.into();
            let hidden = Hidden { dtype: self.head.dtype(), rows: 1, tokens, bytes };
            if self.report.tokens.is_empty() {
                self.drafts.read(&self.text);
            }
            let (output, spent) = self.chain.step(hidden).await?;
            self.report.count(spent, guesses.len());
            let states = output.last(guesses.len() + 1).to_f32();
            let mut right = 0;
            // Together: the head's weights are read once.
            let logits = self.head.logits(states).await?;
            for logits in logits.chunks(self.head.vocabulary()) {
                let one = self.choose(logits)?;
                let is_right = guesses.get(right) == Some(&one.token);
                right += usize::from(is_right);
                self.is_over = one.is_eos || one.completes || self.report.tokens.len() >= self.most;
                chosen.push(one);
                if self.is_over || !is_right {
                    break;
                }
            }
            self.report.accepted += right as u64;
            self.drafts.learn(guesses.len(), right);
            if right < guesses.len() {
                self.chain.roll_back(u32::try_from(kept + right).unwrap_or(u32::MAX))?;
            }
            Ok(chosen)
        })
    }

    fn choose(&mut self, logits: &[f32]) -> Result<Chosen, DecodeError> {
        let count = self.report.tokens.len();
        let none = DecodeError::NoToken(count);
        let later = self.ends.without_ends(logits, count, self.head.eos());
        let later = later.as_deref().filter(|logits| can_choose(logits));
        let (token, completes) = match &mut self.grammar {
            None => (self.sampler.choose(later.unwrap_or(logits)).ok_or(none)?, false),
            Some(grammar) if can_choose(logits) => {
                let mut allowed = later.unwrap_or(logits).to_vec();
                grammar.limit(&mut allowed)?;
                // A form that is complete ends, however short it is.
                if later.is_some() && !can_choose(&allowed) {
                    allowed.copy_from_slice(logits);
                    grammar.limit(&mut allowed)?;
                }
                let nothing = || GrammarError::Text("no token may come next".into());
                let token = self.sampler.choose(&allowed).ok_or_else(nothing)?;
                grammar.push(token)?;
                (token, grammar.is_over())
            }
            Some(_) => return Err(none),
        };
        self.report.tokens.push(token);
        self.text.push(token);
        let logprobs = self.top_logprobs.map(|count| Logprobs::of(logits, token, count));
        let is_eos = self.ends.is_end(token, self.head.eos());
        Ok(Chosen { token, is_eos, completes, logprobs })
    }

    /// The session, the tokens that it holds, and what was done. The text may have been ended before
    /// all that was chosen.
    pub fn finish(mut self) -> (Chain, Vec<u32>, GenerationReport) {
        self.report.elapsed = self.began.elapsed();
        self.report.legs = self.chain.legs().collect();
        self.text.truncate(self.chain.position() as usize);
        (self.chain, self.text, self.report)
    }
}

/// Whether one of the logits can be sampled.
fn can_choose(logits: &[f32]) -> bool {
    logits.iter().any(|logit| logit.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_are_those_of_the_softmax_and_the_first_of_equals_comes_first() {
        let logits = [1.0f32.ln(), 2.0f32.ln(), f32::NAN, 5.0f32.ln(), 2.0f32.ln()];
        let got = Logprobs::of(&logits, 1, 3);
        assert!((got.chosen.exp() - 0.2).abs() < 1e-6);
        let tokens: Vec<u32> = got.top.iter().map(|(token, _)| *token).collect();
        assert_eq!(tokens, [3, 1, 4]);
        assert!((got.top[0].1.exp() - 0.5).abs() < 1e-6);
        assert!(Logprobs::of(&logits, 0, 0).top.is_empty());
        assert_eq!(Logprobs::of(&logits, 2, 9).top.len(), 4);
    }
}
