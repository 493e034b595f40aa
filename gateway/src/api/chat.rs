//! `POST /v1/chat/completions`.

use std::sync::Arc;
use std::time::SystemTime;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::{Value, json};

use super::Shared;
use super::error::ApiError;
use super::request::{self, Settings, unix_seconds};
use super::stream::{self, Chunks};
use super::texts::{self, TextEvent, Texts, Usage, finish_name};
use crate::generation::TokenText;
use crate::model::{Model, PromptError};

/// Most messages of a conversation.
const MAX_MESSAGES: usize = 4096;

#[derive(Debug, Deserialize)]
pub(super) struct Request {
    model: String,
    pub(super) messages: Vec<Message>,
    #[serde(default)]
    pub(super) tools: Option<Value>,
    #[serde(default)]
    logprobs: Option<bool>,
    #[serde(default)]
    top_logprobs: Option<u32>,
    #[serde(flatten)]
    pub(super) settings: Settings,
}

/// A message; whatever else it holds (names, tool calls) reaches the template.
#[derive(Debug, Deserialize)]
pub(super) struct Message {
    role: String,
    #[serde(default)]
    content: Content,
    #[serde(flatten)]
    more: serde_json::Map<String, Value>,
}

/// A text, or parts of which each is a text.
#[derive(Debug, Default, Deserialize)]
#[serde(untagged)]
enum Content {
    #[default]
    None,
    Text(String),
    Parts(Vec<ContentPart>),
}

#[derive(Debug, Deserialize)]
struct ContentPart {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    text: Option<String>,
}

impl Message {
    fn into_value(self) -> Result<Value, ApiError> {
        let content = match self.content {
            Content::None => Value::Null,
            Content::Text(text) => Value::String(text),
            Content::Parts(parts) => {
                let text = |part: ContentPart| match (part.kind.as_str(), part.text) {
                    ("text", Some(text)) => Ok(text),
                    (kind, _) => Err(ApiError::bad(
                        format!("a content part of type {kind:?} is not supported: only text is"),
                        Some("messages"),
                    )),
                };
                Value::String(parts.into_iter().map(text).collect::<Result<String, _>>()?)
            }
        };
        let mut object = self.more;
        object.insert("role".into(), self.role.into());
        object.insert("content".into(), content);
        Ok(Value::Object(object))
    }
}

/// Answers one request.
pub(super) async fn create(State(shared): State<Shared>, body: Bytes) -> Response {
    shared.answered("chat", answer(&shared, &body).await)
}

async fn answer(shared: &Shared, body: &Bytes) -> Result<Response, ApiError> {
    let request: Request = request::parse(body)?;
    let model = request::model(&shared.engine, &request.model)?;
    let prompt = prompt(model, request.messages, request.tools.as_ref())?;
    let names = request.logprobs == Some(true);
    let top = names.then(|| request.top_logprobs.unwrap_or(0));
    let settings = &request.settings;
    let grammar = settings.grammar(model).await?;
    let asks = settings.asks(prompt, grammar.as_ref(), (model, shared.default_max_tokens), top)?;
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

/// The tokens of a conversation, after which the assistant speaks.
fn prompt(
    model: &Arc<Model>,
    messages: Vec<Message>,
    tools: Option<&Value>,
) -> Result<Vec<u32>, ApiError> {
    if messages.is_empty() || messages.len() > MAX_MESSAGES {
        let text = format!("{} messages: expected 1 to {MAX_MESSAGES}", messages.len());
        return Err(ApiError::bad(text, Some("messages")));
    }
    let messages = values(messages)?;
    let tools = tools.filter(|tools| !tools.is_null());
    model.chat_prompt(&Value::Array(messages), tools).map_err(|error| {
        let param = if matches!(error, PromptError::NoTemplate(_)) { "model" } else { "messages" };
        ApiError::bad(error.to_string(), Some(param))
    })
}

/// Messages as templates see them.
pub(super) fn values(messages: Vec<Message>) -> Result<Vec<Value>, ApiError> {
    messages.into_iter().map(Message::into_value).collect()
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

    fn of(&mut self, part: &TextEvent) -> Vec<Value> {
        match part {
            TextEvent::Text { text, tokens, .. } if text.is_empty() && tokens.is_empty() => {
                Vec::new()
            }
            TextEvent::Text { index, text, tokens } => {
                vec![self.chunk(*index, &json!({"content": text}), None, tokens)]
            }
            TextEvent::End { index, ended } => {
                vec![self.chunk(*index, &json!({}), Some(finish_name(ended.finish)), &[])]
            }
            TextEvent::Failed(_) => Vec::new(),
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
