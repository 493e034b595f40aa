//! One text under way, in a task of its own. Its pieces go into a bounded queue; the text waits for a
//! caller that reads slowly, and ends with one that has gone.

use std::sync::Arc;
use std::time::Duration;

use client::decoder::{Continuation, DecodeError, Decoder, Logprobs};
use client::grammar::Grammar;
use client::sampling::{Sampler, SamplingError};
use client::stops::Stops;
use client::text::{TextError, TextStream};
use hivemind::task;
use shared::config::SamplingConfig;
use tokio::sync::mpsc;

use crate::model::Model;

/// Pieces that wait for their caller.
pub const QUEUE: usize = 32;
/// A caller that takes nothing for this long is given up.
const STALL: Duration = Duration::from_secs(60);

/// What is asked for.
#[derive(Debug)]
pub struct Ask {
    /// Tokens to go on from.
    pub prompt: Arc<[u32]>,
    /// Most tokens to add.
    pub max_new_tokens: u32,
    /// How tokens are chosen.
    pub sampling: SamplingConfig,
    /// Texts before which the text ends.
    pub stop: Vec<String>,
    /// The form that the text is to have.
    pub grammar: Option<Grammar>,
    /// How many of the most probable tokens to name beside each.
    pub top_logprobs: Option<usize>,
}

/// A token as text, with its probability.
#[derive(Clone, Debug)]
pub struct TokenText {
    /// What it reads as, alone.
    pub text: String,
    /// Logarithm of its probability.
    pub logprob: f32,
    /// The most probable tokens in its place.
    pub top: Vec<(String, f32)>,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// By a token or a text that ends it, or because its form is complete.
    Stop,
    /// It is as long as it may be.
    Length,
}

/// A text that has ended.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// Why.
    pub finish: Finish,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens that were added, the one that ends the text included.
    pub completion_tokens: usize,
    /// Tokens of the prompt that a session held already.
    pub cached_tokens: usize,
    /// How long the servers took for the first step, which carries the rest of the prompt.
    pub first_step: Duration,
}

/// Why there is no text.
#[derive(Debug, thiserror::Error)]
pub enum GenerationError {
    /// The settings.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The swarm, or the local part of the model.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// The tokenizer.
    #[error(transparent)]
    Text(#[from] TextError),
}

/// What comes of a text, piece by piece.
#[derive(Debug)]
pub enum Piece {
    /// More of it; the text may be empty while a character is incomplete.
    Text {
        /// What it adds.
        text: String,
        /// The tokens behind it, if their probabilities were asked for.
        tokens: Vec<TokenText>,
    },
    /// The end.
    End(Ended),
    /// There is no more.
    Failed(GenerationError),
}

/// Starts a text; dropping the receiver ends it.
pub fn start(model: Arc<Model>, ask: Ask) -> mpsc::Receiver<Piece> {
    let (pieces, receiver) = mpsc::channel(QUEUE);
    task::spawn(async move {
        let last = tokio::select! {
            outcome = generate(&model, ask, &pieces) => match outcome {
                Ok(Some(ended)) => Piece::End(ended),
                Ok(None) => return,
                Err(error) => Piece::Failed(error),
            },
            () = pieces.closed() => return,
        };
        // The caller may have gone.
        let _ = pieces.send_timeout(last, STALL).await;
    });
    receiver
}

/// `None` if the caller takes nothing.
async fn generate(
    model: &Model,
    ask: Ask,
    pieces: &mpsc::Sender<Piece>,
) -> Result<Option<Ended>, GenerationError> {
    let sampler = Sampler::new(ask.sampling)?;
    let session = model.session(&ask.prompt, ask.max_new_tokens).await;
    let (chain, cached_tokens) = session.map_err(DecodeError::from)?;
    let task = Continuation {
        prompt: ask.prompt.to_vec(),
        max_new_tokens: ask.max_new_tokens,
        drafts: model.drafts(),
        grammar: ask.grammar,
        top_logprobs: ask.top_logprobs,
    };
    let mut decoder = Decoder::new(chain, model.head.clone(), sampler, task);
    let mut stream = TextStream::new(&model.codec, &ask.prompt);
    let mut stops = Stops::new(&ask.stop);
    let (mut finish, mut completion_tokens) = (Finish::Length, 0);
    'text: loop {
        let step = decoder.step().await?;
        if step.is_empty() {
            break;
        }
        let (mut text, mut tokens) = (String::new(), Vec::new());
        for one in step {
            completion_tokens += 1;
            if one.is_eos {
                finish = Finish::Stop;
                break;
            }
            let (shown, is_over) = stops.push(&stream.push(one.token)?);
            text.push_str(&shown);
            tokens.extend(one.logprobs.map(|of| named(model, one.token, &of)));
            if is_over || one.completes {
                finish = Finish::Stop;
                break;
            }
        }
        let is_over = finish == Finish::Stop;
        if is_over {
            text.push_str(&std::mem::replace(&mut stops, Stops::new(&[])).rest());
        }
        let piece = Piece::Text { text, tokens };
        if pieces.send_timeout(piece, STALL).await.is_err() {
            return Ok(None);
        }
        if is_over {
            break 'text;
        }
    }
    let rest = stops.rest();
    if !rest.is_empty()
        && pieces.send_timeout(Piece::Text { text: rest, tokens: Vec::new() }, STALL).await.is_err()
    {
        return Ok(None);
    }
    let (chain, tokens, report) = decoder.finish();
    model.keep(chain, tokens);
    Ok(Some(Ended {
        finish,
        prompt_tokens: report.prompt_tokens,
        completion_tokens,
        cached_tokens,
        first_step: report.prefill.total,
    }))
}

fn named(model: &Model, token: u32, of: &Logprobs) -> TokenText {
    let text = |token: u32| model.codec.piece(token);
    let top = of.top.iter().map(|(token, logprob)| (text(*token), *logprob)).collect();
    TokenText { text: text(token), logprob: of.chosen, top }
}
