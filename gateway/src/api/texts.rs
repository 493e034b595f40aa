//! The texts of one request: all of them at once, in one queue.

use std::ops::Range;
use std::sync::Arc;
use std::task::Context;
use std::time::Instant;

use client::generation::{Finish, GenerationError};
use futures::StreamExt;
use futures::stream::{self, BoxStream};
use p2p::PeerId;
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

use super::ApiState;
use super::error::ApiError;
use crate::accounts::CallerAccount;
use crate::engine::Engine;
use crate::generation::{Ended, Pieces, TextPiece, TextRequest, TokenText, start};
use crate::metrics::UnderWay;
use crate::model::Model;

/// Numbers of tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub prompt: usize,
    /// Of these, held by open sessions.
    pub cached: usize,
    pub completion: usize,
}

impl Usage {
    /// As OpenAI's API has it.
    pub fn to_json(self) -> Value {
        let Usage { prompt, cached, completion } = self;
        json!({
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }
}

/// The texts of a request under way. Dropping them ends their sessions.
pub struct Texts {
    parts: BoxStream<'static, (u32, Result<TextPiece, GenerationError>)>,
    model: Arc<Model>,
    engine: Arc<Engine>,
    began: Instant,
    has_begun: bool,
    /// Texts that have not ended.
    left: u32,
    /// What was counted so far.
    pub usage: Usage,
    /// The servers of the text that ended last, in order, with their blocks.
    route: Vec<(PeerId, Range<u32>)>,
    _under_way: Vec<(UnderWay, OwnedSemaphorePermit)>,
}

impl Texts {
    /// Starts a text for each of `asks`.
    ///
    /// # Errors
    /// Too many texts are under way, or the caller has no tokens left.
    pub fn start(
        shared: &ApiState,
        model: &Arc<Model>,
        mut asks: Vec<TextRequest>,
    ) -> Result<Texts, ApiError> {
        let engine = shared.engine.clone();
        let slot = || {
            let permit = engine.slots.clone().try_acquire_owned();
            let text = "too many texts are under way here; try again in a few seconds".to_owned();
            permit.map_err(|_| ApiError::too_many(text, 2))
        };
        let permits = asks.iter().map(|_| slot()).collect::<Result<Vec<_>, _>>()?;
        let under_way = permits.into_iter().map(|permit| (engine.metrics.text(), permit)).collect();
        let prompts = asks.chunk_by(|a, b| Arc::ptr_eq(&a.prompt, &b.prompt));
        let prompt = prompts.filter_map(<[TextRequest]>::first).map(|ask| ask.prompt.len()).sum();
        if let Some(account) = CallerAccount::of_request() {
            account.prompt(prompt)?;
            asks.iter_mut().for_each(|ask| ask.account = Some(account.clone()));
        }
        let left = u32::try_from(asks.len()).unwrap_or(u32::MAX);
        let queue = |(index, mut pieces): (u32, Pieces)| {
            let next = move |cx: &mut Context<'_>| {
                pieces.poll_recv(cx).map(|piece| piece.map(|piece| (index, piece)))
            };
            stream::poll_fn(next).boxed()
        };
        let texts = (0..).zip(asks.into_iter().map(|ask| start(model.clone(), ask)));
        Ok(Texts {
            parts: stream::select_all(texts.map(queue)).boxed(),
            model: model.clone(),
            engine,
            began: Instant::now(),
            has_begun: false,
            left,
            usage: Usage { prompt, ..Usage::default() },
            route: Vec::new(),
            _under_way: under_way,
        })
    }

    /// The next piece of any text, with the text's index; `None` after the last.
    ///
    /// # Errors
    /// The whole request fails, and nothing comes after it.
    pub async fn next(&mut self) -> Option<Result<(u32, TextPiece), ApiError>> {
        if self.left == 0 {
            return None;
        }
        let Some((index, piece)) = self.parts.next().await else {
            // A text that ended without a word: its task was stopped.
            self.left = 0;
            let text = "the gateway is shutting down".to_owned();
            return Some(Err(ApiError::too_many(text, 1)));
        };
        if !std::mem::replace(&mut self.has_begun, true) {
            self.engine.metrics.first_text(self.began.elapsed());
        }
        Some(match piece {
            Ok(piece) => {
                if let TextPiece::End(ended) = &piece {
                    self.left -= 1;
                    self.count(ended);
                }
                Ok((index, piece))
            }
            Err(error) => {
                self.left = 0;
                tracing::warn!(model = self.model.view.name, %error, "text failed");
                Err(ApiError::of_text(&error, &self.model))
            }
        })
    }

    /// The servers of the text that ended last, for programs.
    pub fn route(&self) -> Value {
        let leg = |(peer, blocks): &(PeerId, Range<u32>)| json!({"peer": peer.to_string(), "start": blocks.start, "end": blocks.end});
        self.route.iter().map(leg).collect()
    }

    fn count(&mut self, ended: &Ended) {
        self.route.clone_from(&ended.route);
        self.usage.cached = self.usage.cached.max(ended.cached_tokens);
        self.usage.completion += ended.completion_tokens;
        let (metrics, name) = (&self.engine.metrics, &self.model.view.name);
        metrics.tokens(name, "prompt", ended.prompt_tokens);
        metrics.tokens(name, "cached", ended.cached_tokens);
        metrics.tokens(name, "completion", ended.completion_tokens);
        metrics.first_step(ended.first_step);
    }
}

/// Why a text ended, in the words of the API.
pub fn finish_name(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
    }
}

/// One text, whole.
#[derive(Debug, Default)]
pub struct Whole {
    pub text: String,
    /// Its tokens, if they were asked for.
    pub tokens: Vec<TokenText>,
    pub finish: Option<Finish>,
}

/// All texts, whole.
///
/// # Errors
/// Of the first that fails.
pub async fn collect(mut texts: Texts, count: usize) -> Result<(Vec<Whole>, Usage), ApiError> {
    let mut all: Vec<Whole> = Vec::new();
    all.resize_with(count, Whole::default);
    while let Some(next) = texts.next().await {
        let (index, piece) = next?;
        let Some(whole) = all.get_mut(index as usize) else { continue };
        match piece {
            TextPiece::Text { text, tokens } => {
                whole.text.push_str(&text);
                whole.tokens.extend(tokens);
            }
            TextPiece::End(ended) => whole.finish = Some(ended.finish),
        }
    }
    Ok((all, texts.usage))
}
