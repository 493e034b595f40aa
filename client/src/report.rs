//! What a generation did, for people.

use std::time::Duration;

use p2p::PeerId;

use crate::session::StepTiming;

/// What a generation did.
#[derive(Clone, Debug, Default)]
pub struct GenerationReport {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated, the one that ends the text included.
    pub tokens: Vec<u32>,
    /// The servers in order, with their blocks.
    pub legs: Vec<(PeerId, std::ops::Range<u32>)>,
    /// Times of the first step, which runs the whole prompt.
    pub prefill: StepTiming,
    /// Times of all later steps, summed.
    pub decode: StepTiming,
    /// Steps after the first.
    pub decode_steps: u32,
    /// Tokens that were guessed.
    pub guessed: u64,
    /// Those of them that were right.
    pub accepted: u64,
    /// Wall time from the first step to the last token.
    pub elapsed: Duration,
}

impl GenerationReport {
    /// Notes a step that carried so many guesses.
    pub(crate) fn count(&mut self, spent: StepTiming, guesses: usize) {
        self.guessed += guesses as u64;
        if self.tokens.is_empty() {
            self.prefill = spent;
        } else {
            self.decode += spent;
            self.decode_steps += 1;
        }
    }

    /// Lines for people: route, speed, and where the time of a step went.
    pub fn lines(&self) -> Vec<String> {
        let steps = self.decode_steps.max(1);
        let per_step = |d: Duration| d.as_secs_f64() * 1e3 / f64::from(steps);
        let network = self.decode.total.saturating_sub(self.decode.queue + self.decode.compute);
        let speed = self.tokens.len() as f64 / self.elapsed.as_secs_f64().max(1e-9);
        let mut lines: Vec<String> = self
            .legs
            .iter()
            .map(|(peer, b)| format!("server {peer}  blocks {}:{}", b.start, b.end))
            .collect();
        lines.push(format!(
            "{} prompt tokens, {} new tokens, {speed:.1} tokens/s",
            self.prompt_tokens,
            self.tokens.len()
        ));
        lines.push(format!(
            "one step {:.2} ms over {} servers: network {:.2} ms, queue {:.2} ms, compute {:.2} ms",
            per_step(self.decode.total),
            self.legs.len(),
            per_step(network),
            per_step(self.decode.queue),
            per_step(self.decode.compute)
        ));
        if self.guessed > 0 {
            let decoded = self.tokens.len().saturating_sub(1) as f64;
            lines.push(format!(
                "{:.2} tokens per step: {} of {} guessed tokens were right",
                decoded / f64::from(steps),
                self.accepted,
                self.guessed
            ));
        }
        lines
    }
}
