//! `POST /tokenize` and `POST /detokenize`, in the form of vLLM.

use std::sync::Arc;

use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::ApiState;
use super::chat::{self, ChatRequest};
use super::error::ApiError;
use super::request;
use crate::model::Model;

/// A text, or a conversation; the fields of the latter are those of `/v1/chat/completions`.
#[derive(Debug, Deserialize)]
struct TokenizeRequest {
    #[serde(default)]
    model: String,
    #[serde(default)]
    prompt: Option<String>,
    #[serde(default)]
    messages: Option<IgnoredAny>,
    #[serde(default)]
    add_special_tokens: Option<bool>,
    #[serde(default)]
    return_token_strs: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct DetokenizeRequest {
    #[serde(default)]
    model: String,
    tokens: Vec<u32>,
}

/// Answers with the tokens of a text or of a conversation.
pub(super) async fn tokenize(State(shared): State<ApiState>, body: Bytes) -> Response {
    shared.answered("tokenize", tokens(&shared, &body).await)
}

/// Answers with the text of tokens.
pub(super) async fn detokenize(State(shared): State<ApiState>, body: Bytes) -> Response {
    shared.answered("detokenize", text(&shared, &body).await)
}

async fn tokens(shared: &ApiState, body: &Bytes) -> Result<Response, ApiError> {
    let request: TokenizeRequest = request::parse(body)?;
    let model = request::model(&shared.engine, &request.model)?;
    let tokens = match (request.prompt, request.messages) {
        (Some(prompt), None) => {
            of_text(model, prompt, request.add_special_tokens != Some(false)).await?
        }
        (None, Some(_)) => {
            let mut chat: ChatRequest = request::parse(body)?;
            chat::prompt(model, chat.input()?).await?
        }
        (Some(_), Some(_)) => {
            let text = "prompt and messages cannot both be given: send one of them".to_owned();
            return Err(ApiError::bad(text, Some("prompt")));
        }
        (None, None) => {
            let text = "there is nothing to tokenize: send prompt or messages".to_owned();
            return Err(ApiError::bad(text, Some("prompt")));
        }
    };
    let names = (request.return_token_strs == Some(true)).then(|| names(model, &tokens));
    Ok(Json(json!({
        "count": tokens.len(),
        "max_model_len": model.local.max_positions,
        "tokens": tokens,
        "token_strs": names,
    }))
    .into_response())
}

async fn of_text(model: &Arc<Model>, text: String, special: bool) -> Result<Vec<u32>, ApiError> {
    let model = model.clone();
    let encode = move || match special {
        true => model.local.codec.encode(&text),
        false => model.local.codec.encode_rendered(&text),
    };
    let tokens = request::outside(encode).await?;
    tokens.map_err(|error| ApiError::bad(error.to_string(), Some("prompt")))
}

/// The entries of the vocabulary.
fn names(model: &Model, tokens: &[u32]) -> Vec<Value> {
    tokens.iter().map(|token| json!(model.local.codec.name(*token))).collect()
}

async fn text(shared: &ApiState, body: &Bytes) -> Result<Response, ApiError> {
    let DetokenizeRequest { model, tokens } = request::parse(body)?;
    let model = request::model(&shared.engine, &model)?.clone();
    request::check_tokens(&tokens, model.local.head.vocabulary(), "tokens")?;
    let text = request::outside(move || model.local.codec.decode_all(&tokens)).await?;
    let text = text.map_err(|error| ApiError::bad(error.to_string(), Some("tokens")))?;
    Ok(Json(json!({"prompt": text})).into_response())
}
