//! One text under way, in a task of its own. Its pieces go into a bounded queue; the text waits for a
//! caller that reads slowly, and ends with one that has gone.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use client::chain::Chain;
use client::decoder::{Chosen, Continuation, DecodeError, Decoder, Logprobs};
use client::end_rules::EndRules;
use client::generation::{Added, Finish, Generation, GenerationError};
use client::grammar::Grammar;
use client::prompt_scores;
use client::sampling::{Sampler, SamplingConfig};
use p2p::{PeerId, task};
use tokio::sync::mpsc;

use crate::accounts::CallerAccount;
use crate::model::Model;

/// Pieces that wait for their caller.
pub const QUEUE: usize = 32;
/// A caller that takes nothing for this long is given up.
const STALL: Duration = Duration::from_secs(60);

/// What is asked for.
#[derive(Debug)]
pub struct TextRequest {
    /// Tokens to go on from.
    pub prompt: Arc<[u32]>,
    /// Most tokens to add.
    pub max_new_tokens: u32,
    /// How tokens are chosen.
    pub sampling: SamplingConfig,
    /// Tokens that end the text, and from which length on.
    pub ends: EndRules,
    /// Texts before which the text ends.
    pub stop: Vec<String>,
    /// The form that the text is to have.
    pub grammar: Option<Grammar>,
    /// How many of the most probable tokens to name beside each.
    pub top_logprobs: Option<usize>,
    /// The prompt as text, if it comes first, with the probabilities of its tokens if those are asked for.
    pub echo: Option<String>,
    /// Where its tokens are counted.
    pub account: Option<CallerAccount>,
}

/// A token as text, with its probability.
#[derive(Clone, Debug)]
pub struct TokenText {
    /// What it reads as, alone.
    pub text: String,
    /// Logarithm of its probability; NaN for the first token of a text, which nothing predicts.
    pub logprob: f32,
    /// The most probable tokens in its place.
    pub top: Vec<(String, f32)>,
}

/// A text that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    pub finish: Finish,
    /// The servers that it ended over, in order, with their blocks.
    pub route: Vec<(PeerId, Range<u32>)>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens that were added, the one that ends the text included.
    pub completion_tokens: usize,
    /// Tokens of the prompt that a session held already.
    pub cached_tokens: usize,
    /// How long the servers took for the first step, which carries the rest of the prompt.
    pub first_step: Duration,
}

/// What comes of a text, in parts.
#[derive(Debug)]
pub enum TextPiece {
    /// More of it; the text may be empty while a character is incomplete.
    Text {
        text: String,
        /// The tokens behind it, if their probabilities were asked for.
        tokens: Vec<TokenText>,
    },
    End(Ended),
}

impl TextPiece {
    /// Whether it says nothing.
    pub fn is_empty(&self) -> bool {
        matches!(self, TextPiece::Text { text, tokens } if text.is_empty() && tokens.is_empty())
    }
}

/// The pieces of a text, of which an end or an error is the last.
pub type Pieces = mpsc::Receiver<Result<TextPiece, GenerationError>>;

/// Starts a text; dropping its pieces ends it.
pub fn start(model: Arc<Model>, ask: TextRequest) -> Pieces {
    let (pieces, receiver) = mpsc::channel(QUEUE);
    task::spawn(async move {
        let last = tokio::select! {
            outcome = generate(&model, ask, &pieces) => match outcome.transpose() {
                Some(ended) => ended.map(TextPiece::End),
                None => return,
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
    ask: TextRequest,
    pieces: &mpsc::Sender<Result<TextPiece, GenerationError>>,
) -> Result<Option<Ended>, GenerationError> {
    let sampler = Sampler::new(ask.sampling)?;
    // A session of an earlier turn has no states of its tokens left to score.
    let scored = ask.echo.as_ref().and(ask.top_logprobs);
    let session = match scored {
        Some(_) => model.new_session(&ask.prompt, ask.max_new_tokens).await.map(|new| (new, 0)),
        None => model.session(&ask.prompt, ask.max_new_tokens).await,
    };
    let (mut chain, cached_tokens) = session.map_err(DecodeError::from)?;
    if let Some(text) = ask.echo {
        let tokens = match scored {
            Some(count) => scores(model, &mut chain, &ask.prompt, count).await?,
            None => Vec::new(),
        };
        if pieces.send_timeout(Ok(TextPiece::Text { text, tokens }), STALL).await.is_err() {
            return Ok(None);
        }
    }
    let task = Continuation {
        prompt: ask.prompt.to_vec(),
        max_new_tokens: ask.max_new_tokens,
        ends: ask.ends,
        drafts: model.local.drafts(),
        grammar: ask.grammar,
        top_logprobs: ask.top_logprobs,
    };
    let decoder = Decoder::new(chain, model.local.head.clone(), sampler, task);
    let mut generation = Generation::new(decoder, &model.local.codec, &ask.prompt, &ask.stop);
    let mut completion_tokens = 0;
    while let Some(Added { text, tokens }) = generation.next().await? {
        completion_tokens += tokens.len();
        if let Some(account) = &ask.account {
            account.answer(tokens.len());
        }
        let tokens = tokens.iter().filter_map(|chosen| named(model, chosen)).collect();
        if pieces.send_timeout(Ok(TextPiece::Text { text, tokens }), STALL).await.is_err() {
            return Ok(None);
        }
    }
    let (finish, chain, tokens, report) = generation.finish();
    model.keep(chain, tokens);
    Ok(Some(Ended {
        finish,
        route: report.legs,
        prompt_tokens: report.prompt_tokens,
        completion_tokens,
        cached_tokens,
        first_step: report.prefill.total,
    }))
}

/// The tokens of a prompt with their probabilities.
async fn scores(
    model: &Model,
    chain: &mut Chain,
    prompt: &[u32],
    count: usize,
) -> Result<Vec<TokenText>, DecodeError> {
    let all = prompt_scores::of_prompt(chain, &model.local.head, prompt, count).await?;
    let unknown = Logprobs { chosen: f32::NAN, top: Vec::new() };
    let each = prompt.iter().zip(std::iter::once(&unknown).chain(&all));
    Ok(each.map(|(token, of)| token_text(model, *token, of)).collect())
}

/// `None` for a token that is no part of the text, or if probabilities were not asked for.
fn named(model: &Model, chosen: &Chosen) -> Option<TokenText> {
    let of = chosen.logprobs.as_ref().filter(|_| !chosen.is_eos)?;
    Some(token_text(model, chosen.token, of))
}

fn token_text(model: &Model, token: u32, of: &Logprobs) -> TokenText {
    let text = |token: u32| model.local.codec.piece(token);
    let top = of.top.iter().map(|(token, logprob)| (text(*token), *logprob)).collect();
    TokenText { text: text(token), logprob: of.chosen, top }
}
