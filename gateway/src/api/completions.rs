//! `POST /v1/completions`.

use std::time::SystemTime;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use client::text::{TextCodec, TextError};
use serde::Deserialize;
use serde_json::{Value, json};

use super::ApiState;
use super::error::ApiError;
use super::numbers::whole;
use super::request::{self, GenerationSettings, unix_seconds};
use super::stream::{self, Chunks};
use super::texts::{self, Texts, Usage, Whole, finish_name};
use crate::generation::{TextPiece, TokenText};
use crate::model::Model;

#[derive(Debug, Deserialize)]
pub(super) struct CompletionRequest {
    #[serde(default)]
    model: String,
    prompt: Prompt,
    #[serde(default)]
    echo: Option<bool>,
    #[serde(default)]
    suffix: Option<String>,
    #[serde(default, deserialize_with = "whole")]
    best_of: Option<u32>,
    #[serde(default, deserialize_with = "whole")]
    logprobs: Option<u32>,
    #[serde(flatten)]
    pub(super) settings: GenerationSettings,
}

/// A text or its tokens, or several of them.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    ListsOfTokens(Vec<Vec<u32>>),
}

impl Prompt {
    /// Each prompt as tokens and as text.
    fn read(self, codec: &TextCodec) -> Result<Vec<(Vec<u32>, String)>, TextError> {
        // Without a text there is nothing to begin with: the token that starts a sequence alone is no prompt.
        let encode = |text: String| match text.is_empty() {
            true => Ok((Vec::new(), text)),
            false => codec.encode(&text).map(|tokens| (tokens, text)),
        };
        let decode = |tokens: Vec<u32>| codec.decode(&tokens).map(|text| (tokens, text));
        match self {
            Prompt::Text(text) => Ok(vec![encode(text)?]),
            Prompt::Tokens(tokens) => Ok(vec![decode(tokens)?]),
            Prompt::Texts(texts) => texts.into_iter().map(encode).collect(),
            Prompt::ListsOfTokens(lists) => lists.into_iter().map(decode).collect(),
        }
    }
}

/// Answers one request.
pub(super) async fn create(State(shared): State<ApiState>, body: Bytes) -> Response {
    shared.answered("completions", answer(&shared, &body).await)
}

async fn answer(shared: &ApiState, body: &Bytes) -> Result<Response, ApiError> {
    let mut request: CompletionRequest = request::parse(body)?;
    let model = request::model(&shared.engine, &request.model)?;
    let unsupported = [
        ("suffix", request.suffix.is_some()),
        (
            "best_of",
            request.best_of.is_some_and(|best| Some(best) != request.settings.n && best > 1),
        ),
    ];
    if let Some((name, _)) = unsupported.into_iter().find(|(_, is_asked)| *is_asked) {
        return Err(ApiError::bad(format!("{name} is not supported: leave it out"), Some(name)));
    }
    let (prompt, owned) = (request.prompt, model.clone());
    let read = request::outside(move || prompt.read(&owned.local.codec)).await?;
    let read = read.map_err(|error| ApiError::bad(error.to_string(), Some("prompt")))?;
    let (prompts, texts): (Vec<_>, Vec<_>) = read.into_iter().unzip();
    let has_echo = request.echo == Some(true);
    request.settings.may_add_nothing = has_echo;
    let settings = &request.settings;
    let top = request.logprobs;
    let grammar = settings.grammar(model).await?;
    let mut asks =
        settings.asks(prompts, grammar.as_ref(), model, shared.default_max_tokens, top)?;
    let count = asks.len();
    if has_echo {
        let of_each = texts.iter().flat_map(|text| vec![text; count / texts.len().max(1)]);
        asks.iter_mut().zip(of_each).for_each(|(ask, text)| ask.echo = Some(text.clone()));
    }
    let texts = Texts::start(shared, model, asks)?;
    let head = TextHead::of(model);
    let names = top.is_some();
    if settings.streams() {
        return stream::respond(texts, TextChunks { head, names }, settings.tells_usage()).await;
    }
    let (all, usage) = texts::collect(texts, count).await?;
    let choice = |(index, whole): (u32, Whole)| {
        json!({
            "index": index,
            "text": whole.text,
            "logprobs": names.then(|| logprobs(&whole.tokens)),
            "finish_reason": whole.finish.map(finish_name),
        })
    };
    let mut body = head.object((0..).zip(all).map(choice).collect());
    body["usage"] = usage.to_json();
    Ok(Json(body).into_response())
}

struct TextHead {
    id: String,
    created: u64,
    model: String,
}

impl TextHead {
    fn of(model: &Model) -> TextHead {
        let id = format!("cmpl-{}", uuid::Uuid::new_v4().simple());
        TextHead { id, created: unix_seconds(SystemTime::now()), model: model.view.name.clone() }
    }

    fn object(&self, choices: Vec<Value>) -> Value {
        let TextHead { id, created, model } = self;
        let object = "text_completion";
        json!({"id": id, "object": object, "created": created, "model": model, "choices": choices})
    }
}

struct TextChunks {
    head: TextHead,
    names: bool,
}

impl Chunks for TextChunks {
    fn opening(&mut self) -> Vec<Value> {
        Vec::new()
    }

    fn of(&mut self, index: u32, piece: &TextPiece) -> Value {
        let (text, tokens, finish) = match piece {
            TextPiece::Text { text, tokens } => (text.as_str(), tokens.as_slice(), None),
            TextPiece::End(ended) => ("", &[][..], Some(finish_name(ended.finish))),
        };
        let choice = json!({
            "index": index,
            "text": text,
            "logprobs": self.names.then(|| logprobs(tokens)),
            "finish_reason": finish,
        });
        self.head.object(vec![choice])
    }

    fn usage(&mut self, usage: Usage) -> Value {
        let mut chunk = self.head.object(Vec::new());
        chunk["usage"] = usage.to_json();
        chunk
    }
}

/// The older form of probabilities: parallel lists.
fn logprobs(tokens: &[TokenText]) -> Value {
    let texts: Vec<&str> = tokens.iter().map(|token| token.text.as_str()).collect();
    let is_known = |token: &TokenText| !token.logprob.is_nan();
    let chosen: Vec<Option<f32>> =
        tokens.iter().map(|token| is_known(token).then_some(token.logprob)).collect();
    let top: Vec<Value> = tokens
        .iter()
        .map(|token| match is_known(token) {
            false => Value::Null,
            true => {
                token.top.iter().map(|(text, logprob)| (text.clone(), json!(logprob))).collect()
            }
        })
        .collect();
    let mut at = 0;
    let mut offset = |text: &str| {
        let here = at;
        at += text.chars().count();
        here
    };
    let offsets: Vec<usize> = texts.iter().map(|text| offset(text)).collect();
    json!({"tokens": texts, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets})
}
