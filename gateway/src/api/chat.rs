//! `POST /v1/chat/completions`.

use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
// Keeps the order of keys, which a template writes.
use minijinja::Value as Variable;
use minijinja::context;
use minijinja::value::ValueKind;
use serde::Deserialize;
use serde_json::{Value, json};

use super::ApiState;
use super::error::ApiError;
use super::messages;
use super::numbers::whole;
use super::request::{self, GenerationSettings, unix_seconds};
use super::stream::{self, Chunks};
use super::texts::{self, Texts, Usage, finish_name};
use crate::generation::{TextPiece, TokenText};
use crate::model::{Model, PromptError};
use crate::template::{PromptEnding, TemplateInput};

#[derive(Debug, Deserialize)]
pub(super) struct ChatRequest {
    #[serde(default)]
    model: String,
    messages: Vec<Variable>,
    #[serde(default)]
    tools: Option<Variable>,
    /// More variables of the template, as in vLLM's API.
    #[serde(default)]
    chat_template_kwargs: Option<Variable>,
    #[serde(default)]
    add_generation_prompt: Option<bool>,
    #[serde(default)]
    continue_final_message: Option<bool>,
    #[serde(default)]
    logprobs: Option<bool>,
    #[serde(default, deserialize_with = "whole")]
    top_logprobs: Option<u32>,
    #[serde(flatten)]
    pub(super) settings: GenerationSettings,
}

impl ChatRequest {
    /// What the template makes the prompt of; it can be taken once.
    pub(super) fn input(&mut self) -> Result<TemplateInput, ApiError> {
        let tools = given(self.tools.take(), ValueKind::Seq, "tools")?;
        let variables = self.chat_template_kwargs.take();
        let variables = given(variables, ValueKind::Map, "chat_template_kwargs")?;
        Ok(TemplateInput {
            messages: messages::readable(&self.messages)?.into_iter().collect(),
            tools: tools.unwrap_or(Variable::from(())),
            variables: variables.unwrap_or(context! {}),
            ending: self.ending()?,
        })
    }

    /// How the prompt ends, as in vLLM's API.
    fn ending(&self) -> Result<PromptEnding, ApiError> {
        match (self.continue_final_message, self.add_generation_prompt) {
            (Some(true), Some(true)) => {
                let text = "continue_final_message and add_generation_prompt exclude each other: set one to false";
                Err(ApiError::bad(text.to_owned(), Some("continue_final_message")))
            }
            (Some(true), _) => Ok(PromptEnding::LastMessage),
            (_, Some(false)) => Ok(PromptEnding::Messages),
            _ => Ok(PromptEnding::Answer),
        }
    }
}

/// Answers one request.
pub(super) async fn create(State(shared): State<ApiState>, body: Bytes) -> Response {
    shared.answered("chat", answer(&shared, &body).await)
}

async fn answer(shared: &ApiState, body: &Bytes) -> Result<Response, ApiError> {
    let mut request: ChatRequest = request::parse(body)?;
    let model = request::model(&shared.engine, &request.model)?;
    let input = request.input()?;
    let prompt = prompt(model, input).await?;
    let names = request.logprobs == Some(true);
    let top = names.then(|| request.top_logprobs.unwrap_or(0));
    let settings = &request.settings;
    let grammar = settings.grammar(model).await?;
    let asks =
        settings.asks(vec![prompt], grammar.as_ref(), model, shared.default_max_tokens, top)?;
    let count = asks.len();
    let texts = Texts::start(shared, model, asks)?;
    let head = Head::of(model);
    if settings.streams() {
        let chunks = ChatChunks { head, count, names };
        return stream::respond(texts, chunks, settings.tells_usage()).await;
    }
    let (all, usage) = texts::collect(texts, count).await?;
    let choice = |(index, whole): (u32, texts::Whole)| {
        json!({
            "index": index,
            "message": {"role": "assistant", "content": whole.text, "refusal": null},
            "logprobs": names.then(|| logprobs(&whole.tokens)),
            "finish_reason": whole.finish.map(finish_name),
        })
    };
    let choices: Vec<Value> = (0..).zip(all).map(choice).collect();
    let mut body = head.object("chat.completion", choices);
    body["usage"] = usage.to_json();
    Ok(Json(body).into_response())
}

/// What a request has under `name`, which must be of this kind if it is there.
fn given(
    value: Option<Variable>,
    kind: ValueKind,
    name: &'static str,
) -> Result<Option<Variable>, ApiError> {
    let value = value.filter(|value| !value.is_none());
    match value.as_ref().map(Variable::kind) {
        Some(other) if other != kind => {
            Err(ApiError::bad(format!("{name} is a {other}: expected a {kind}"), Some(name)))
        }
        _ => Ok(value),
    }
}

/// The tokens of a conversation, after which the assistant speaks.
pub(super) async fn prompt(model: &Arc<Model>, input: TemplateInput) -> Result<Vec<u32>, ApiError> {
    let model = model.clone();
    let prompt = request::outside(move || model.chat_prompt(&input)).await?;
    prompt.map_err(|error| {
        let param = if matches!(error, PromptError::NoTemplate(_)) { "model" } else { "messages" };
        ApiError::bad(error.to_string(), Some(param))
    })
}

/// What all chunks of an answer begin with.
struct Head {
    id: String,
    created: u64,
    model: String,
}

impl Head {
    fn of(model: &Model) -> Head {
        let id = format!("chatcmpl-{}", uuid::Uuid::new_v4().simple());
        Head { id, created: unix_seconds(SystemTime::now()), model: model.view.name.clone() }
    }

    fn object(&self, object: &str, choices: Vec<Value>) -> Value {
        let Head { id, created, model } = self;
        json!({"id": id, "object": object, "created": created, "model": model, "choices": choices})
    }
}

struct ChatChunks {
    head: Head,
    count: usize,
    names: bool,
}

impl ChatChunks {
    fn chunk(
        &self,
        index: u32,
        delta: &Value,
        finish: Option<&str>,
        tokens: &[TokenText],
    ) -> Value {
        let choice = json!({
            "index": index,
            "delta": delta,
            "logprobs": self.names.then(|| logprobs(tokens)),
            "finish_reason": finish,
        });
        self.head.object("chat.completion.chunk", vec![choice])
    }
}

impl Chunks for ChatChunks {
    fn opening(&mut self) -> Vec<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        (0..).take(self.count).map(|index| self.chunk(index, &delta, None, &[])).collect()
    }

    fn of(&mut self, index: u32, piece: &TextPiece) -> Value {
        match piece {
            TextPiece::Text { text, tokens } => {
                self.chunk(index, &json!({"content": text}), None, tokens)
            }
            TextPiece::End(ended) => {
                self.chunk(index, &json!({}), Some(finish_name(ended.finish)), &[])
            }
        }
    }

    fn usage(&mut self, usage: Usage) -> Value {
        let mut chunk = self.head.object("chat.completion.chunk", Vec::new());
        chunk["usage"] = usage.to_json();
        chunk
    }
}

fn logprobs(tokens: &[TokenText]) -> Value {
    let one = |text: &str, logprob: f32| json!({"token": text, "logprob": logprob, "bytes": text.as_bytes()});
    let content: Vec<Value> = tokens
        .iter()
        .map(|token| {
            let mut named = one(&token.text, token.logprob);
            named["top_logprobs"] =
                token.top.iter().map(|(text, logprob)| one(text, *logprob)).collect();
            named
        })
        .collect();
    json!({"content": content, "refusal": null})
}
