//! A text under way: tokens become text, and end at a token, a text or a form that ends it.

use crate::chain::Chain;
use crate::decoder::{Chosen, DecodeError, Decoder};
use crate::report::GenerationReport;
use crate::sampling::SamplingError;
use crate::stops::Stops;
use crate::text::{TextCodec, TextError, TextStream};

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// By a token or a text that ends it, or because its form is complete.
    Stop,
    /// It is as long as it may be.
    Length,
}

/// Why there is no text.
#[derive(Debug, thiserror::Error)]
pub enum GenerationError {
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The swarm, or the local part of the model.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The tokenizer.
    #[error(transparent)]
    Text(#[from] TextError),
}

/// What a step adds to a text.
#[derive(Debug, Default)]
pub struct Added {
    /// What can be shown; empty while a character, or a text that may end it, is incomplete.
    pub text: String,
    /// The tokens behind it, the one that ends the text included.
    pub tokens: Vec<Chosen>,
}

/// Goes on with a text step by step. Dropping it ends its session.
pub struct Generation<'a> {
    decoder: Decoder,
    stream: TextStream<'a>,
    stops: Stops,
    /// Tokens so far, and before which no text ends it.
    count: usize,
    min_tokens: usize,
    finish: Option<Finish>,
}

impl<'a> Generation<'a> {
    /// What `decoder` adds to `prompt`, up to one of the texts `stop`.
    pub fn new(
        decoder: Decoder,
        codec: &'a TextCodec,
        prompt: &[u32],
        stop: &[String],
    ) -> Generation<'a> {
        let (stream, stops) = (TextStream::new(codec, prompt), Stops::new(stop));
        let min_tokens = decoder.min_tokens();
        Generation { decoder, stream, stops, count: 0, min_tokens, finish: None }
    }

    /// What the next step adds; `None` once the text has ended.
    ///
    /// # Errors
    /// [`GenerationError`]; the session is of no use afterwards.
    pub async fn next(&mut self) -> Result<Option<Added>, GenerationError> {
        if self.finish.is_some() {
            return Ok(None);
        }
        let mut added = Added::default();
        let step = self.decoder.step().await?;
        if step.is_empty() {
            self.finish = Some(Finish::Length);
        }
        for chosen in step {
            let mut is_over = chosen.is_eos || chosen.completes;
            self.count += 1;
            if !chosen.is_eos {
                let piece = self.stream.push(chosen.token)?;
                // What came before the shortest length is no part of a text that ends it.
                let (shown, is_stopped) = match self.count < self.min_tokens {
                    true => (piece, false),
                    false => self.stops.push(&piece),
                };
                added.text.push_str(&shown);
                is_over |= is_stopped;
            }
            added.tokens.push(chosen);
            if is_over {
                self.finish = Some(Finish::Stop);
                break;
            }
        }
        if self.finish.is_some() {
            added.text.push_str(&self.stops.rest());
        }
        Ok(Some(added))
    }

    /// Why the text ended, its session, the tokens that the session holds, and what was done.
    pub fn finish(self) -> (Finish, Chain, Vec<u32>, GenerationReport) {
        let (chain, tokens, report) = self.decoder.finish();
        (self.finish.unwrap_or(Finish::Length), chain, tokens, report)
    }
}
